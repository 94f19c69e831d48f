"""Compact form of matplotlib's SVG drawings: one file for light and dark pages, text as text.

Coordinates are rounded to a tenth of a point, styles become classes whose colours depend on
``prefers-color-scheme``, neighbouring lines of one style become one path, and invisible shapes are left out.
Pure.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final
from xml.sax.saxutils import escape

SVG: Final = "{http://www.w3.org/2000/svg}"
HREF: Final = "{http://www.w3.org/1999/xlink}href"
FONT: Final = '"DejaVu Sans",Verdana,Arial,sans-serif'
BASE: Final = f"path{{fill:none;stroke-linejoin:round}}text{{font:8px {FONT}}}"
UNITS: Final = 10
"""Coordinates are whole tenths of a point."""
MARGIN: Final = 2 * UNITS
"""Lines that stay this far inside their panel need no clipping."""
TEXT_SHIFT: Final = re.compile(r"translate\(([-\d.]+) ([-\d.]+)\) rotate\((-?\d+)\)")

Point = tuple[int, int]
Style = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """One line, area or text of a drawing."""

    style: Style
    data: str
    """Path data, or the text."""
    clip: str = ""
    """Identifier of the clipping rectangle; empty for none."""
    at: str = ""
    """Attributes that place a text; empty for a path."""


def compact(drawing: bytes, dark: Mapping[str, str]) -> str:
    """Return the compact form of a light drawing; ``dark`` maps its colours to those of a dark page.

    Raises KeyError for a colour that ``dark`` lacks.
    """
    root = ET.fromstring(drawing)
    width, height = root.attrib["viewBox"].split()[2:]
    reader = _Reader(root)
    shapes = list(_merged(reader.shapes(root)))
    names = {style: f"a{number}" for number, style in enumerate(dict.fromkeys(s.style for s in shapes))}
    clips = {
        clip: f"c{number}" for number, clip in enumerate(dict.fromkeys(s.clip for s in shapes if s.clip))
    }
    size = f'width="{width}pt" height="{height}pt"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
        f"<style>{BASE}",
        *(_rule(name, style) for style, name in names.items()),
        "@media(prefers-color-scheme:dark){",
        *(_rule(name, _dark(style, dark)) for style, name in names.items()),
        "}</style>",
    ]
    for clip, name in clips.items():
        x, y, right, bottom = reader.rectangles[clip]
        area = (
            f'x="{_number(x)}" y="{_number(y)}" width="{_number(right - x)}" height="{_number(bottom - y)}"'
        )
        lines.append(f'<clipPath id="{name}"><rect {area}/></clipPath>')
    for shape in shapes:
        if shape.at:
            lines.append(f'<text class="{names[shape.style]}" {shape.at}>{escape(shape.data)}</text>')
        else:
            clip = f' clip-path="url(#{clips[shape.clip]})"' if shape.clip else ""
            lines.append(f'<path class="{names[shape.style]}"{clip} d="{shape.data}"/>')
    return "\n".join([*lines, "</svg>\n"])


class _Reader:
    """Flattens a drawing."""

    def __init__(self, root: ET.Element) -> None:
        self._defined = {e.attrib["id"]: e for e in root.iter(f"{SVG}path") if "id" in e.attrib}
        self.rectangles = {}
        for clip in root.iter(f"{SVG}clipPath"):
            x, y, width, height = (float(clip[0].attrib[k]) for k in ("x", "y", "width", "height"))
            left, top = _rounded(x, y)
            self.rectangles[clip.attrib["id"]] = (left, top, *_rounded(x + width, y + height))

    def shapes(self, element: ET.Element, clip: str = "") -> Iterator[Shape]:
        """Yield what an element draws, in order; of an axis lines first, sorted by style."""
        for child in element:
            name = child.tag.removeprefix(SVG)
            inside = child.attrib.get("clip-path", "").removeprefix("url(#").removesuffix(")") or clip
            if name == "g":
                found = self.shapes(child, inside)
                axis = child.attrib.get("id", "").startswith("matplotlib.axis")
                yield from sorted(found, key=lambda s: (s.at != "", s.style)) if axis else found
            elif name == "path":
                yield from self._path(child, child.attrib.get("style", ""), inside, (0.0, 0.0))
            elif name == "use":
                path = self._defined[child.attrib[HREF].removeprefix("#")]
                shift = float(child.attrib["x"]), float(child.attrib["y"])
                yield from self._path(path, path.attrib.get("style", child.attrib["style"]), inside, shift)
            elif name == "text":
                yield _text(child)

    def _path(self, path: ET.Element, style: str, clip: str, shift: tuple[float, float]) -> Iterator[Shape]:
        kept = _style(style, drop={"stroke-dashoffset", "stroke-linejoin"})
        if not {"stroke", "fill"} & {name for name, _ in kept}:
            return
        lines = list(_points(path.attrib["d"], shift))
        if clip and all(_inside(point, self.rectangles[clip]) for line in lines for point in line):
            clip = ""
        closed = "z" in path.attrib["d"]
        yield Shape(kept, "".join(_data(line) + ("z" if closed else "") for line in lines), clip)


def _merged(shapes: Iterable[Shape]) -> Iterator[Shape]:
    """Join neighbouring lines of one style; areas and texts stay apart."""
    for (style, clip, whole), group in groupby(shapes, key=lambda s: (s.style, s.clip, _separate(s))):
        if whole:
            yield from group
        else:
            yield Shape(style, "".join(shape.data for shape in group), clip)


def _separate(shape: Shape) -> bool:
    return bool(shape.at) or "fill" in dict(shape.style)


def _text(element: ET.Element) -> Shape:
    if shift := TEXT_SHIFT.match(element.attrib.get("transform", "")):
        x, y = _rounded(float(shift[1]), float(shift[2]))
        at = f'transform="translate({_number(x)} {_number(y)}) rotate({shift[3]})"'
    else:
        x, y = _rounded(float(element.attrib["x"]), float(element.attrib["y"]))
        at = f'x="{_number(x)}" y="{_number(y)}"'
    style = dict(_style(element.attrib["style"], drop={"font-family"}))
    style = {name: value for name, value in style.items() if value not in {"8px", "start"}}
    return Shape(tuple(style.items()), element.text or "", at=at)


def _style(text: str, drop: set[str]) -> Style:
    pairs = (part.split(":", 1) for part in text.split(";") if ":" in part)
    kept = ((name.strip(), value.strip()) for name, value in pairs)
    return tuple((name, value) for name, value in kept if name not in drop and value != "none")


def _rule(name: str, style: Style) -> str:
    return f".{name}{{{';'.join(f'{key}:{value}' for key, value in style)}}}"


def _dark(style: Style, dark: Mapping[str, str]) -> Style:
    return tuple((name, dark[value]) for name, value in style if value.startswith("#"))


def _points(data: str, shift: tuple[float, float]) -> Iterator[list[Point]]:
    """Yield the lines of path data, without points that repeat the one before."""
    line: list[Point] = []
    for command, x, y in re.findall(r"([ML]) ([-\d.]+) ([-\d.]+)", data):
        if command == "M" and line:
            yield line
            line = []
        point = _rounded(float(x) + shift[0], float(y) + shift[1])
        if not line or line[-1] != point:
            line.append(point)
    if line:
        yield line


def _rounded(x: float, y: float) -> Point:
    return round(x * UNITS), round(y * UNITS)


def _inside(point: Point, rectangle: tuple[int, int, int, int]) -> bool:
    (x, y), (left, top, right, bottom) = point, rectangle
    return left + MARGIN <= x <= right - MARGIN and top + MARGIN <= y <= bottom - MARGIN


def _data(line: list[Point]) -> str:
    """Return path data of one line: the first point, then differences, which are short."""
    steps = ((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(line))
    numbers = " ".join(f"{_number(x)} {_number(y)}" for x, y in steps).replace(" -", "-")
    start = f"M{_number(line[0][0])} {_number(line[0][1])}"
    return f"{start}l{numbers}" if numbers else f"{start}z"


def _number(tenths: int) -> str:
    """Return tenths of a point as points, without needless digits."""
    text = f"{tenths / UNITS:.1f}".removesuffix(".0")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
