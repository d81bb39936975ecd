"""The picture of the architecture shows the imports as they are, and none of them points upwards."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.site import architecture
from docs.site.architecture import PICTURE, ROOT, drawn_in, main, picture
from docs.site.imports import modules, part
from docs.site.layers import BOXES, Arrow, graph, implied, upward

TREE = {
    "__init__.py": "from avow.attend import attend as attend\n",
    "errors.py": "",
    "numerics/scan.py": "from avow import errors\n",
    "methods/exact.py": "from avow.numerics import scan\ndef compute():\n    from avow.kernels import scan\n",
    "kernels/scan.py": "from ..numerics import scan\n",
    "attend.py": "from avow.methods import exact\nfrom avow.numerics import scan\n",
}
SHOWN = [
    "attend → core",
    "attend → methods",
    "avow → attend",
    "core → errors",
    "kernels → core",
    "methods → core",
    "methods ⇢ kernels",
]


def planted(folder: Path, **changes: str) -> Path:
    for name, source in (TREE | {f"{name}.py": source for name, source in changes.items()}).items():
        file = folder / "avow" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return folder / "avow"


def test_the_picture_is_that_of_the_imports() -> None:
    shown, there = drawn_in(PICTURE.read_text()), graph(ROOT / "avow").plain()
    assert shown == there, "python -m docs.site.architecture draws it anew"
    assert len(there) > 50


def test_no_arrow_points_upwards() -> None:
    assert upward(graph(ROOT / "avow").arrows) == []


def test_every_part_has_one_box() -> None:
    parts = [name for box in BOXES for name in box.parts]
    assert len(parts) == len(set(parts)) and set(parts) == {part(module) for module in modules(ROOT / "avow")}


def test_arrows_are_what_files_spell(tmp_path: Path) -> None:
    found = graph(planted(tmp_path))
    assert found.plain() == SHOWN and upward(found.arrows) == []
    assert found.sizes["attend"] == (1, 2) and found.sizes["lab"] == (0, 0)


def test_a_wrong_import_changes_the_picture_and_points_upwards(tmp_path: Path) -> None:
    before = picture(graph(planted(tmp_path)))
    after = picture(graph(planted(tmp_path, planner="from avow.nn import cache\n")))
    assert drawn_in(before) == SHOWN and "planner → nn" in drawn_in(after)
    assert 'class="wrong' not in before and after.count('class="wrong') == 1


def test_what_changes_no_import_leaves_the_picture_as_it_is(tmp_path: Path) -> None:
    more = "from avow.numerics import scan\n" * 3 + "x = 1\n" * 50
    assert graph(planted(tmp_path, planner=more)).plain() != SHOWN
    again = TREE["numerics/scan.py"] + more.replace("from avow.numerics import scan", "import avow.errors")
    (tmp_path / "avow" / "planner.py").unlink()
    (tmp_path / "avow" / "numerics" / "scan.py").write_text(again)
    assert graph(tmp_path / "avow").plain() == SHOWN


def test_a_part_without_a_box_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="helpers: in no box; add it to BOXES"):
        graph(planted(tmp_path, helpers=""))


def test_an_arrow_is_faint_where_a_chain_of_others_leads_there() -> None:
    chain = (Arrow("cli", "report", 1, False), Arrow("report", "nn", 1, False), Arrow("cli", "nn", 1, True))
    assert implied(chain) == {("cli", "nn")}
    assert implied(chain[1:]) == set()


def test_the_picture_is_whole_and_its_boxes_stand_apart() -> None:
    drawing = ElementTree.fromstring(PICTURE.read_text())
    assert "prefers-color-scheme: dark" in ElementTree.tostring(drawing, "unicode")
    said = "".join(drawing.itertext())
    assert all(box.name in said and box.words in said for box in BOXES)
    spots = [(box.row, box.x, box.x + box.wide) for box in BOXES]
    assert all(right < left for (row, _, right), (other, left, _) in itertools.pairwise(spots) if row == other)
    assert all(left >= 0 and right <= 1200 for _, left, right in spots)


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.svg"
    monkeypatch.setattr(architecture, "ROOT", planted(tmp_path).parent)
    assert main(["--out", str(out)]) == 0 and drawn_in(out.read_text()) == SHOWN
    planted(tmp_path, parameters="from avow.numerics import scan\n")
    assert main(["--out", str(out)]) == 1
    assert "errors imports core, which lies above it" in capsys.readouterr().err


def test_the_page_names_files_that_are_there() -> None:
    named = re.findall(r"`(avow/[\w/.]*)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 8 and [name for name in named if not (ROOT / name).exists()] == []
