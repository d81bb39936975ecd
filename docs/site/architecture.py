"""The architecture as one picture, drawn from the imports themselves: `python -m docs.site.architecture`.

Layers are rows, and what a row imports lies below or beside it. An arrow is an import that some file spells; it is
faint where a chain of other arrows leads there, too. One that pointed upwards would be red.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from html import escape
from pathlib import Path

from docs.site.layers import BOXES, ROWS, Arrow, Box, Graph, Size, graph, implied, upward

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
_BOTTOM = BOXES[-1].name


def drawn_in(svg: str) -> list[str]:
    """The arrows that a picture says it shows."""
    found = re.search(r"<metadata>(.*?)</metadata>", svg, re.DOTALL)
    return list(json.loads(found[1])) if found else []


_WIDE, _BOX, _STEP, _TOP = 1200, 62, 106, 20
_TALL = _TOP + _STEP * (len(ROWS) - 1) + _BOX + 66
_STYLE = """
text { font: 12.5px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #24292f; }
.name { font-size: 17px; font-weight: 650; } .soft { fill: #57606a; } .row { font-size: 14px; fill: #57606a; }
.middle text { text-anchor: middle; } .end { text-anchor: end; }
.band { fill: #f6f8fa; } .page { fill: #ffffff; }
path { fill: none; stroke-linecap: round; } .faint { stroke: #8c959f; opacity: .34; } .late { stroke-dasharray: 2 5; }
LIGHT.wrong { stroke: #d1242f; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .soft, .row { fill: #9da7b3; } .band { fill: #151b23; } .page { fill: #0d1117; }
.faint { stroke: #9da7b3; }
DARK}
"""


def _style() -> str:
    def hues(fill: str, border: str, line: str) -> str:
        return "".join(
            f".r{i} rect {{ fill: hsl({hue} {fill}); stroke: hsl({hue} {border}); }} "
            f".e{i} {{ stroke: hsl({hue} {line}); }}\n"
            for i, (_, hue) in enumerate(ROWS)
        )

    light, dark = hues("75% 95%", "50% 48%", "55% 45%"), hues("35% 17%", "55% 55%", "60% 62%")
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def picture(found: Graph) -> str:
    """The picture as SVG: it has its own colours for light and dark, and needs nothing else."""
    boxes = {box.name: box for box in BOXES}
    hidden = implied(found.arrows)
    wrong = {a.ends for a in upward(found.arrows)}
    shown = [a for a in found.arrows if a.imported != _BOTTOM]
    ports = _ports(shown, boxes)
    lines = []
    # Faint arrows first, so that the others cross above them.
    for a in sorted(shown, key=lambda a: a.ends not in hidden):
        words = "wrong" if a.ends in wrong else "faint" if a.ends in hidden else f"e{boxes[a.importer].row}"
        width = 1 + 1.15 * math.log2(a.times) if words != "faint" else 0.8 + 0.45 * math.log2(a.times)
        label = f"{a.importer} imports {a.imported} {a.times} times{', at use' if a.at_use else ''}"
        lines.append(
            f'<path class="{words}{" late" if a.at_use else ""}" stroke-width="{width:.1f}" '
            f'd="{_curve(boxes[a.importer], boxes[a.imported], *ports[a.ends])}"><title>{escape(label)}</title></path>'
        )
    boxes_drawn = [_drawn(box, found.sizes[box.name]) for box in BOXES]
    bands = [
        f'<rect class="band" x="0" y="{_y(i) - 14}" width="{_WIDE}" height="{_BOX + 28}" rx="10"/>'
        f'<text class="row" x="18" y="{_y(i) + _BOX / 2 + 5}">{escape(name)}</text>'
        for i, (name, _) in enumerate(ROWS)
    ]
    every = {box.name for box in BOXES} - {_BOTTOM} == {a.importer for a in found.arrows if a.imported == _BOTTOM}
    data = json.dumps(found.plain(), ensure_ascii=False)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_TALL}" role="img" aria-labelledby="t">
<title id="t">The packages of avow in layers, and which of them import which</title>
<metadata>{escape(data, quote=False)}</metadata>
<style>{_style()}</style>
<rect class="page" width="{_WIDE}" height="{_TALL}"/>
{chr(10).join(bands)}
{chr(10).join(lines)}
{chr(10).join(boxes_drawn)}
{_legend(every)}
</svg>
"""


def _y(row: int) -> int:
    return _TOP + row * _STEP


def _ports(arrows: list[Arrow], boxes: dict[str, Box]) -> dict[tuple[str, str], tuple[float, float]]:
    """Where arrows leave and arrive along the edges of their boxes: side by side, in the order of their other ends."""

    def angle(box: Box, other: Box) -> float:
        across = other.x + other.wide / 2 - box.x - box.wide / 2
        return math.atan2(across, abs(other.row - box.row))

    found: dict[tuple[str, str], list[float]] = {a.ends: [0.0, 0.0] for a in arrows}
    for end in range(2):
        for name, box in boxes.items():
            mine = [ends for ends in found if ends[end] == name and boxes[ends[1 - end]].row != box.row]
            mine.sort(key=lambda ends: angle(box, boxes[ends[1 - end]]))
            for i, ends in enumerate(mine):
                found[ends][end] = box.x + box.wide * (i + 1) / (len(mine) + 1)
    return {pair: (start, stop) for pair, (start, stop) in found.items()}


def _curve(importer: Box, imported: Box, start: float, stop: float) -> str:
    """A line from the foot of a box to the head of another with its barbs, or straight across a row."""
    if importer.row == imported.row:
        right = imported.x > importer.x
        # Two that import each other have a line each.
        y = _y(importer.row) + _BOX / 2 + (9 if right else -9)
        a, b = (importer.x + importer.wide, imported.x) if right else (importer.x, imported.x + imported.wide)
        step = -6 if right else 6
        return f"M{a} {y} L{b} {y} M{b + step} {y - 5} L{b} {y} L{b + step} {y + 5}"
    down = imported.row > importer.row
    top, end = (_y(importer.row) + _BOX, _y(imported.row)) if down else (_y(importer.row), _y(imported.row) + _BOX)
    pull = min(max(abs(end - top) * 0.45, 30), 150) * (1 if down else -1)
    barb = -7 if down else 7
    return (
        f"M{start:.0f} {top} C{start:.0f} {top + pull:.0f} {stop:.0f} {end - pull:.0f} {stop:.0f} {end} "
        f"M{stop - 4:.0f} {end + barb} L{stop:.0f} {end} L{stop + 4:.0f} {end + barb}"
    )


def _drawn(box: Box, size: Size) -> str:
    y, middle = _y(box.row), box.x + box.wide / 2
    count = f"{size.lines:,} lines in {size.files} file{'s' if size.files > 1 else ''}"
    return (
        f'<g class="r{box.row} middle"><rect x="{box.x}" y="{y}" width="{box.wide}" height="{_BOX}" rx="9"/>'
        f'<text class="name" x="{middle}" y="{y + 22}">{escape(box.name)}</text>'
        f'<text x="{middle}" y="{y + 39}">{escape(box.words)}</text>'
        f'<text class="soft" x="{middle}" y="{y + 55}">{count}</text></g>'
    )


def _legend(every: bool) -> str:
    y = _TALL - 28
    whose = "every box above" if every else "most boxes above"
    items = (
        (18, "e4", 4, "imports; the wider, the more often"),
        (320, "e4 late", 2, "only when used"),
        (500, "faint", 1.6, "also by way of others"),
    )
    samples = "".join(
        f'<path class="{kind}" stroke-width="{width}" d="M{x} {y - 4} h34"/>'
        f'<text class="soft" x="{x + 44}" y="{y}">{words}</text>'
        for x, kind, width, words in items
    )
    words = f"The lowest row is imported by {whose}: those arrows are left out."
    return f'{samples}<text class="soft end" x="1182" y="{y}">{words}</text>'


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture; 1 where an arrow points upwards."""
    parser = argparse.ArgumentParser("python -m docs.site.architecture", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help="where the picture goes [docs/architecture.svg]")
    out: Path = parser.parse_args(arguments).out
    found = graph(ROOT / "avow")
    out.write_text(picture(found))
    for a in upward(found.arrows):
        print(f"{a.importer} imports {a.imported}, which lies above it", file=sys.stderr)
    print(f"wrote {out}: {len(BOXES)} boxes, {len(found.arrows)} arrows")
    return int(bool(upward(found.arrows)))


if __name__ == "__main__":
    sys.exit(main())
