"""The packages of avow as the picture shows them: boxes in rows, and an arrow for every import from one to another."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from docs.site.imports import imports, modules, part


@dataclass(frozen=True)
class Box:
    """Parts of avow that are drawn as one: its name, what it is for, and where it stands."""

    name: str
    words: str
    row: int
    x: int
    parts: frozenset[str]
    wide: int = 204


def _box(name: str, words: str, row: int, x: int, parts: str = "", wide: int = 204) -> Box:
    return Box(name, words, row, x, frozenset((parts or name).split()), wide)


# From what people look at down to the types that everything uses: names, and hues.
ROWS = (
    ("commands", 270),
    ("pages", 245),
    ("ledger", 222),
    ("uses", 198),
    ("modules", 172),
    ("one verb", 145),
    ("choice", 88),
    ("methods", 46),
    ("tensors", 24),
    ("words", 350),
)
BOXES = (
    _box("cli", "avow …: every command", 0, 430, "cli __main__"),
    _box("lab", "a page on your machine", 0, 820),
    _box("report", "tables, charts, HTML", 1, 640),
    _box("theory", "claims and constructions", 2, 985),
    _box("bench", "ratios against peers", 3, 130),
    _box("avow", "the public names", 3, 390),
    _box("integrations", "Hugging Face models", 3, 650),
    _box("training", "corpus, loop, checkpoints", 3, 900),
    _box("distributed", "shards of a sequence", 4, 240),
    _box("nn", "modules, caches, optimisers", 4, 720, "nn optim"),
    _box("attend", "answer and certificate", 5, 470, "attend in_graph deferred bounds"),
    _box("decode", "steps from a part of a cache", 5, 800),
    _box("planner", "the cheapest that is certain", 6, 530, "planner calibration calibration_file"),
    _box("methods", "one file, one method", 7, 560),
    _box("kernels", "Triton, loaded at use", 8, 300),
    _box("core", "problems, certificates, numerics", 8, 740, "core numerics", 240),
    _box(
        "errors",
        "errors, optional packages, parameters, whole files, worker processes",
        9,
        130,
        "errors extras parameters file_io worker_pool",
        1059,
    ),
)


class Arrow(NamedTuple):
    """One box imports another: how often, and whether only inside functions."""

    importer: str
    imported: str
    times: int
    at_use: bool

    @property
    def ends(self) -> tuple[str, str]:
        return self.importer, self.imported


class Size(NamedTuple):
    """How much there is of a box."""

    files: int
    lines: int


@dataclass(frozen=True)
class Graph:
    """What the picture shows."""

    arrows: tuple[Arrow, ...]
    sizes: dict[str, Size]

    def plain(self) -> list[str]:
        """Every arrow in a line; how often, and how many lines there are, changes too easily to be compared."""
        return [f"{a.importer} {'⇢' if a.at_use else '→'} {a.imported}" for a in self.arrows]


def graph(package: Path) -> Graph:
    """Every import between boxes of a package."""
    home = {name: box.name for box in BOXES for name in box.parts}
    known = modules(package)
    homeless = sorted({part(module) for module in known} - set(home))
    if homeless:
        raise SystemExit(f"{', '.join(homeless)}: in no box; add it to BOXES of docs/site/layers.py")
    files, lines, always, late = Counter[str](), Counter[str](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for module, path in known.items():
        here = home[part(module)]
        files[here] += 1
        lines[here] += path.read_text().count("\n")
        for target, _, at_use in imports(module, path, known):
            if target.split(".")[0] == "avow" and (there := home.get(part(target), here)) != here:
                (late if at_use else always)[here, there] += 1
    found = sorted(set(always) | set(late))
    arrows = tuple(Arrow(*pair, always[pair] + late[pair], pair not in always) for pair in found)
    return Graph(arrows, {box.name: Size(files[box.name], lines[box.name]) for box in BOXES})


def upward(arrows: tuple[Arrow, ...]) -> list[Arrow]:
    """Arrows that point from a row to one above it; public names may stand for anything, loaded at first use."""
    row = {box.name: box.row for box in BOXES}
    return [a for a in arrows if row[a.imported] < row[a.importer] and not (a.importer == "avow" and a.at_use)]


def implied(arrows: tuple[Arrow, ...]) -> set[tuple[str, str]]:
    """Arrows that a chain of others comes to."""
    row = {box.name: box.row for box in BOXES}
    down: dict[str, set[str]] = {box.name: set() for box in BOXES}
    for a in arrows:
        if row[a.imported] > row[a.importer]:
            down[a.importer].add(a.imported)

    def reach(name: str) -> set[str]:
        return down[name].union(*(reach(other) for other in down[name]))

    return {(a, b) for a, found in down.items() for b in found if any(b in reach(other) for other in found - {b})}
