"""Hooks of the site's generator (mkdocs.yml): files become pages, and links lead to them."""

import posixpath
import re
from typing import Any

from properdocs.structure.files import File, InclusionLevel
from tests.website import mermaid
from tests.website.pages import DECISIONS, DOCS, completed, decisions, linked, outside, source, with_links

SCRIPT = "assets/mermaid.min.js"
SEARCH_WEIGHTS = {"reference/": 8.0, "guides/": 3.0, "decisions/": 0.3, "benchmarks": 0.3, "changelog": 0.3}
"""By the beginning of a page's name, how much a match there counts in the search, beside 1 of other pages: a
flag is looked for in the reference, however often measurements mention it."""


def on_config(config: Any) -> Any:
    """Complete the navigation."""
    config.nav = completed(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of docs/, and the script for pictures."""

    def add(uri: str, content: str, inclusion: InclusionLevel = InclusionLevel.INCLUDED) -> None:
        files.append(File.generated(config, uri, content=content, inclusion=inclusion))

    texts = {file.src_uri: (DOCS / file.src_uri).read_text() for file in files.documentation_pages()}
    for uri, path in outside().items():
        texts[uri] = path.read_text()
        add(uri, texts[uri])
    for uri in sorted(linked(texts.items())):
        add(uri, source(uri), InclusionLevel.NOT_IN_NAV)
    add(DECISIONS, decisions())
    files.append(File.generated(config, SCRIPT, abs_src_path=str(mermaid.script())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, and give it its weight in the search."""
    uri = page.file.src_uri
    weight = next((value for start, value in SEARCH_WEIGHTS.items() if uri.startswith(start)), 1.0)
    page.meta.setdefault("search", {"boost": weight})
    return markdown if uri == DECISIONS or uri.startswith("source/") else with_links(markdown, uri)


def on_page_content(html: str, **_: Any) -> str:
    """Mark flags in the text, which browsers would break after their first dash."""
    return re.sub(r"<code>(?=-[^<]{1,40}</code>)", '<code class="flag">', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Add the script to pages with pictures; the theme would load it from elsewhere."""
    if 'class="mermaid"' not in output:
        return output
    path = posixpath.relpath(SCRIPT, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{path}"></script></head>', 1)
