"""The built site: links lead somewhere, nothing comes from elsewhere, pictures and search are complete."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest
from tests.website.mermaid import MEMBER, NoMermaidError, script
from tests.website.pages import DOCS, ROOT, outside

SITE: Final = ROOT / "build" / "site"
LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Attributes that a browser loads by itself, by element."""


class Page(HTMLParser):
    """Reads what tests ask of a page: ids, links, what is loaded, and the text of paragraphs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get(LOADED[tag], ""))
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


@cache
def pages() -> dict[Path, Page]:
    """Return every page of the site."""
    found = {file: Page(file) for file in sorted(SITE.rglob("*.html")) if file.name != "404.html"}
    assert len(found) > 80, f"{SITE} has {len(found)} pages: run `make site`"
    return found


def inside(file: Path, link: str) -> tuple[Path, str] | None:
    """Return file and anchor that a link of a page leads to; None if it leaves the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


def test_every_link_and_anchor_leads_somewhere() -> None:
    """Links that stay in the site lead to a file that exists, and anchors to an element of it."""
    wrong = []
    for file, page in pages().items():
        for link in page.links:
            found = inside(file, link)
            if found is None:
                continue
            target, anchor = found
            missing = anchor and target in pages() and anchor not in pages()[target].ids
            if not target.exists() or missing:
                wrong.append(f"{file.relative_to(SITE)}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Scripts, styles, fonts and pictures are files of the site; styles name no other host either."""
    wrong = [
        f"{file.relative_to(SITE)}: {link}"
        for file, page in pages().items()
        for link in page.loaded
        if not link.startswith("data:") and ((found := inside(file, link)) is None or not found[0].exists())
    ]
    styles = "".join(file.read_text() for file in SITE.rglob("*.css"))
    wrong += re.findall(r"""(?:url\(["']?|@import ["'])(?:https?:)?//[^)"']*""", styles)
    assert wrong == []


def test_pictures_are_drawn_by_a_script_of_the_site() -> None:
    """Pages with a picture, and only these, load mermaid from the site, before the theme asks for it."""
    drawn = {file.name for file in pages() if 'class="mermaid"' in file.read_text()}
    loads = {file.name for file, page in pages().items() if any("mermaid" in link for link in page.loaded)}
    assert "architecture.html" in drawn
    assert loads == drawn
    assert (SITE / "assets" / "mermaid.min.js").read_bytes() == script().read_bytes()
    for file in (SITE / name for name in ("architecture.html",)):
        text = file.read_text()
        assert text.index("mermaid.min.js") < text.index("javascripts/bundle")


def test_the_search_finds_pages_of_every_kind() -> None:
    """The index has guides, reference, examples and decisions, and leaves out files that are only shown."""
    found = json.loads((SITE / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in found}
    assert {"guides/attach-envoy.html", "reference/picker-flags.html", "examples/01-minimal.html"} <= places
    assert any(place.startswith("decisions/0") for place in places)
    assert not [place for place in places if place.startswith("source/")]
    assert any("--prewarm-tokens" in entry["text"] for entry in found)


def test_every_document_is_a_page() -> None:
    """Each Markdown file of docs/, and each one from outside that the site has, became a page."""
    names = [file.relative_to(DOCS).with_suffix(".html") for file in DOCS.rglob("*.md")]
    names += [Path(uri).with_suffix(".html") for uri in outside()]
    assert [str(name) for name in names if not (SITE / name).exists()] == []


def _unread() -> Iterator[str]:
    for file, page in pages().items():
        for text in page.paragraphs:
            if re.search(r"^\s*(\||- |\d+\. |```)", text, re.MULTILINE):
                yield f"{file.relative_to(SITE)}: {text.strip()[:80]}"


def test_no_list_or_table_stays_text() -> None:
    """No Markdown is read as a list, table or fence by a forge alone; a blank line before it helps."""
    assert list(_unread()) == []


def test_a_script_with_another_digest_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script from npm is only used if it is the one that was reviewed."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho other >mermaid.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NoMermaidError, match="has the digest"):
        script()
    assert MEMBER.endswith(".js")
