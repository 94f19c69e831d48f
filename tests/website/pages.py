"""Which files of the repository are pages of the site, where links lead, and what the navigation lacks.

Documents link to each other as files, so that they can be read in a checkout and on a forge. The site has
the files of docs/ as they are, and some from outside of it (``outside``). A link to any other file leads to a
page that shows the file (``source``).
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
DECISIONS: Final = "decisions/index.md"
LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".json": "json", ".md": "markdown"}
SOURCES: Final = "source"
Nav = list[Any]


class StrayLinkError(ValueError):
    """A link that leads to no file of the repository."""


def outside() -> dict[str, Path]:
    """Return the pages that are files from outside of docs/: path in the site → file."""
    found = {
        "examples/index.md": ROOT / "examples" / "README.md",
        "reference/chart.md": ROOT / "charts" / "kvist" / "README.md",
        "changelog.md": ROOT / "CHANGELOG.md",
        "contributing.md": ROOT / "CONTRIBUTING.md",
    }
    for file in sorted((ROOT / "examples").glob("*/README.md")):
        found[f"examples/{file.parent.name}.md"] = file
    return found


def origin(uri: str) -> Path:
    """Return the file that a page of the site is made from."""
    return outside().get(uri, DOCS / uri)


def uri_of(file: Path) -> str:
    """Return the path in the site of a file or folder of the repository. Raises StrayLinkError."""
    pages = {path: uri for uri, path in outside().items()}
    readme = file / "README.md"
    if file in pages or readme in pages:
        return pages.get(file) or pages[readme]
    if file == DOCS / "decisions":
        return DECISIONS
    if file.is_file() and file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if file.is_file() and file.is_relative_to(ROOT):
        return f"{SOURCES}/{file.relative_to(ROOT).as_posix()}.md"
    raise StrayLinkError(f"{file} is no file that the site can show")


def with_links(text: str, uri: str) -> str:
    """Return a page's Markdown with its links as the site needs them. Raises StrayLinkError."""

    def target(found: re.Match[str]) -> str:
        path, anchor, heading = found[1].partition("#")
        if not path or ":" in path:
            return found[1]
        file = (origin(uri).parent / path).resolve()
        return posixpath.relpath(uri_of(file), posixpath.dirname(uri) or ".") + anchor + heading

    return LINK.sub(target, text)


def linked(texts: Iterable[tuple[str, str]]) -> set[str]:
    """Return the paths below ``source/`` that pages, given as (path in the site, text), link to."""
    found = set()
    for uri, text in texts:
        for path in LINK.findall(with_links(text, uri)):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(uri), path.partition("#")[0]))
            if target.startswith(f"{SOURCES}/"):
                found.add(target)
    return found


def source(uri: str) -> str:
    """Return a page that shows a file of the repository."""
    name = uri.removeprefix(f"{SOURCES}/").removesuffix(".md")
    language = LANGUAGES.get(Path(name).suffix, "text")
    text = (ROOT / name).read_text()
    return (
        f"---\nsearch:\n  exclude: true\n---\n# {Path(name).name}\n\n`{name}`\n\n````{language}\n{text}````\n"
    )


def title(file: Path) -> str:
    """Return the first heading of a document."""
    found = re.search(r"^# (.*)$", file.read_text(), re.MULTILINE)
    return found[1] if found else file.stem


def decisions() -> str:
    """Return the list of decision records."""
    files = sorted((DOCS / "decisions").glob("0*.md"))
    rows = [f"- [{title(file)}]({file.name})\n" for file in files]
    text = (
        "Each record has the context of a decision, its consequence, and the measurement that decided it.\n"
    )
    return f"# Decisions\n\n{text}\n{''.join(rows)}"


class _Plain(yaml.SafeLoader):
    """Reads mkdocs.yml without the objects that some settings name."""


for tag in ("tag:yaml.org,2002:python/", "!"):
    _Plain.add_multi_constructor(tag, lambda *_: None)


def navigation() -> Nav:
    """Return the navigation of mkdocs.yml."""
    found: Nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Plain)["nav"]
    return found


def named(nav: Nav) -> Iterator[str]:
    """Yield the path of every page of a navigation."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from named(value) if isinstance(value, list) else (value,)


def unnamed(nav: Nav) -> list[str]:
    """Return the pages of docs/ that a navigation lacks; decision records are in the list of decisions."""
    known = set(named(nav))
    files = (file.relative_to(DOCS).as_posix() for file in sorted(DOCS.rglob("*.md")))
    return [uri for uri in files if uri not in known and not uri.startswith("decisions/")]


def completed(nav: Nav) -> Nav:
    """Return the navigation with the examples in place of their first page, and a group for what it lacks."""
    examples = [{title(file): uri} for uri, file in outside().items() if uri.startswith("examples/")]
    whole = [{"Examples": examples} if "Examples" in entry else entry for entry in nav]
    more = unnamed(nav)
    return [*whole, {"More": more}] if more else whole
