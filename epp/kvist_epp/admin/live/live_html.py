"""The live page as HTML: templates of ``assets/`` filled with the live document. No I/O but reading them.

The server writes every figure and every word, so that the page is the same without JavaScript; the script
only puts newer sections in place of older ones. All values are escaped by the templates.
"""

import hashlib
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvist_epp.admin.live import units
from kvist_epp.scheduling.cost import TERMS

ASSETS: Final = Path(__file__).parent / "assets"
SECTIONS: Final = ("health", "summary", "endpoints", "queue", "picks", "unknown")
"""Parts of the page that are replaced at each tick, each a template."""
STATIC: Final[Mapping[str, str]] = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
MAX_ROWS: Final = 200
"""Endpoints in the table, the worst first; the document has all."""
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
"""Paths that the form offers."""
SPARK_WIDTH: Final = 60
SPARK_HEIGHT: Final = 16
BAR_WIDTH: Final = 100


class _Templates(Environment):
    """Reads ``a.b`` as an item of a dict first, which is all that a document has: twice as fast."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an item of a dict, or what Jinja takes ``obj.attribute`` for."""
        if type(obj) is dict:
            try:
                return obj[attribute]
            except KeyError:
                pass
        return super().getattr(obj, attribute)


class LiveHtml:
    """Compiled templates; making one takes about 50 ms, and the first page another 50 ms."""

    def __init__(self) -> None:
        environment = _Templates(
            autoescape=True,
            loader=FileSystemLoader(ASSETS),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= units.FILTERS
        environment.globals |= {
            "spark": spark,
            "bar": bar,
            "stack": stack,
            "terms": tuple(TERMS),
            "max_rows": MAX_ROWS,
            "paths": PATHS,
            "assets": self.digest,
        }
        self._sections = {name: environment.get_template(f"{name}.html") for name in SECTIONS}
        self._page = environment.get_template("page.html")
        self._explanation = environment.get_template("explanation.html")

    @cached_property
    def digest(self) -> str:
        """Names the version of the assets, so that a page of another version loads itself again."""
        content = b"".join((ASSETS / name).read_bytes() for name in STATIC)
        return hashlib.sha256(content).hexdigest()[:12]

    def sections(self, document: Mapping[str, Any]) -> Generator[None, None, bytes]:
        """Return a JSON object with the HTML of each section; yields between rows."""
        found = {}
        for name, template in self._sections.items():
            chunks = []
            for chunk in template.generate(doc=document):
                chunks.append(chunk)
                yield
            found[name] = "".join(chunks)
        return msgspec.json.encode(found)

    def page(
        self, document: Mapping[str, Any], sections: bytes, *, explained: Mapping[str, Any] | None = None
    ) -> str:
        """Return the whole page; ``explained`` is what the form was answered, with the text pasted into
        it."""
        parts = {name: Markup(html) for name, html in msgspec.json.decode(sections).items()}
        return self._page.render(doc=document, parts=parts, explained=explained)

    def explanation(self, explained: Mapping[str, Any]) -> str:
        """Return the answer to the form alone."""
        return self._explanation.render(explained=explained)


# f-strings instead of Markup.format, which takes 20 us: all values are numbers and names of ours


def spark(values: Sequence[float | None], *, top: float = 0.0, area: bool = True) -> Markup:
    """Return a line of the last values as SVG; its full height is ``top`` or the largest value."""
    return _spark(tuple(values), top, area)


@lru_cache(maxsize=4096)
def _spark(values: tuple[float | None, ...], top: float, area: bool) -> Markup:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Markup("")
    most = max(top, *known) or 1.0
    step = SPARK_WIDTH / (len(values) - 1)
    height = SPARK_HEIGHT - 1
    points = [
        (round(at * step, 1), round(height - (height - 1) * value / most, 1))
        for at, value in enumerate(values)
        if value is not None
    ]
    line = " ".join([f"{x:g},{y:g}" for x, y in points])
    first, last = points[0][0], points[-1][0]
    below = f'<polygon points="{first:g},{SPARK_HEIGHT} {line} {last:g},{SPARK_HEIGHT}"/>' if area else ""
    return Markup(
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true">{below}<polyline points="{line}"/></svg>'
    )


def bar(share: float | None, kind: str = "") -> Markup:
    """Return a bar that is filled to ``share`` (0 to 1); empty without a number."""
    if share is None:
        return Markup("")
    width = round(BAR_WIDTH * min(max(share, 0.0), 1.0), 1)
    return Markup(
        f'<svg class="bar {kind}" viewBox="0 0 {BAR_WIDTH} 6" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:g}" height="6"/></svg>'
    )


def stack(terms: Mapping[str, float], scale: float) -> Markup:
    """Return the terms of a cost side by side, in proportion to ``scale`` seconds."""
    parts, at = [], 0.0
    for name in TERMS:
        width = BAR_WIDTH * terms.get(name, 0.0) / scale if scale > 0 else 0.0
        if width > 0:
            parts.append(f'<rect class="term-{name}" x="{at:.2f}" width="{width:.2f}" height="8"/>')
            at += width
    return Markup(
        f'<svg class="stack" viewBox="0 0 {BAR_WIDTH} 8" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )
