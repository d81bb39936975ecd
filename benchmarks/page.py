"""`python -m benchmarks.page`: docs/numbers.md from what was measured, and every figure that other pages quote.

Pages quote figures by name: a number, then a comment such as `<!--overhead-most-->`, which no reader sees. What each
name stands for is in docs/figures/quoted.toml, as a question to the files beside it. What stands between
`<!-- table: … -->` and `<!-- end of table -->` is an answer, too. So nobody types a figure, and a test compares them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from avow.bench.results import Goal, Row, Value, shown
from avow.file_io import write
from benchmarks.catalogue import ALL, Benchmark
from benchmarks.figures import FOLDER, Measured, NoFigure, answer, everything, table

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "docs" / "numbers.md"
# A number as prose writes it, then the name of what it is.
QUOTED = re.compile(r"(?P<number>[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)(?P<percent>%?)<!--(?P<name>[\w-]+)-->")
TABLE = re.compile(r"^<!-- table: (?P<question>.*?) -->\n.*?^<!-- end of table -->$", re.MULTILINE | re.DOTALL)


def pages(root: Path = ROOT) -> list[Path]:
    """Every page that may quote a figure."""
    found = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("**/*.md"))]
    return [page for page in found if page != root / "docs" / "numbers.md"]


def questions(folder: Path = FOLDER) -> dict[str, str]:
    """What each quoted name stands for."""
    return tomllib.loads((folder / "quoted.toml").read_text())


def filled(text: str, names: Mapping[str, str], known: Mapping[str, Measured]) -> str:
    """A page with every quoted figure and table as it was measured, to as many digits as the page gives."""

    def number(found: re.Match[str]) -> str:
        if found["name"] not in names:
            raise NoFigure(f"{found[0]}: quoted.toml has no {found['name']}")
        value = answer(names[found["name"]], known)
        return f"{written(value, found['number'], bool(found['percent']))}{found['percent']}<!--{found['name']}-->"

    def rows(found: re.Match[str]) -> str:
        question = found["question"]
        return (
            f"<!-- table: {question} -->\n{markdown(table(' '.join(question.split()), known))}\n<!-- end of table -->"
        )

    return TABLE.sub(rows, QUOTED.sub(number, text))


def written(value: float, like: str, percent: bool = False) -> str:
    """A number to the digits of another: so many decimals, or so many before an exponent.

    >>> written(0.1074, "9", percent=True), written(4.0271, "3.9"), written(1001472, "1"), written(2.46e-8, "1.0e-8")
    ('11', '4.0', '1,001,472', '2.5e-8')
    """
    value = 100 * value if percent else value
    mantissa, exponent, _ = like.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent:
        digits, _, power = f"{value:.{decimals}e}".partition("e")
        return f"{digits}e{int(power)}"
    sign = "+" if like.startswith("+") else ""
    told = f"{value:{sign},.{decimals}f}"
    return told.replace("-", "−") if "−" in like or like.startswith("−") else told


def markdown(rows: list[Row]) -> str:
    """Rows as a table of Markdown: numbers to the right, columns that say nothing left out."""
    head = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    right = {name for name in head if all(_aligned_right(row[name]) for row in rows)}
    lines = [head, ["---:" if name in right else "---" for name in head]]
    lines += [[_cell(row[name], name) for name in head] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _aligned_right(value: Value) -> bool:
    """Numbers and days: the site breaks no line in such columns."""
    return isinstance(value, int | float | None) or re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None


def _cell(value: Value, column: str) -> str:
    if isinstance(value, int) and column not in ("n", "d"):
        return f"{value:,}"
    # Sizes such as 2 × 16 stay on one line.
    return shown(value) if not isinstance(value, str) else value.replace("|", "\\|").replace(" × ", "\u00a0×\u00a0")


def numbers(known: Mapping[str, Measured]) -> str:
    """The page of all that was measured: how many goals were met, then a section for each benchmark."""
    there = [one for one in ALL if one.name in known]
    goals = [goal for one in there for goal in known[one.name].goals]
    head = [
        "# Numbers",
        "Every figure on these pages, with its command, machine and day. Times are next to those of another "
        "implementation measured in the same run. Outputs are checked first; one that fails has no time. Load averages "
        "show what else the machine did. Two commands write this page:",
        # The tests run every command of a page, or ask why not.
        "<!-- not run here: it measures for long; tests/test_figures.py runs both small -->\n"
        "```text\npython -m benchmarks.run --heads DIR --corpus DIR\npython -m benchmarks.page\n```",
        "`make bench` runs both for what a CPU can measure. The files in docs/figures have every row, also those that "
        "are left out here.",
        f"{sum(goal.met for goal in goals)} of {len(goals)} goals were met. Each section lists those it missed.",
        markdown([_overview(one, known[one.name]) for one in there]),
    ]
    return "\n\n".join([*head, *(section(one, known) for one in there)]) + "\n"


def _overview(benchmark: Benchmark, measured: Measured) -> Row:
    return {
        "what": f"[{benchmark.title}](#{anchor(benchmark.title)})",
        "on": re.sub(r"\(R\)| Processor @.*", "", measured.machine.partition(",")[0]),
        "day": measured.date,
        "seconds": round(measured.seconds) or None,
        "goals met": _met(measured.goals),
    }


def _met(goals: list[Goal]) -> str:
    """How many goals were met; empty if there was none."""
    return f"{sum(goal.met for goal in goals)} of {len(goals)}" if goals else ""


def anchor(title: str) -> str:
    """The name under which a heading can be linked to.

    >>> anchor("The knowledge experiment, real people")
    'the-knowledge-experiment-real-people'
    """
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def section(benchmark: Benchmark, known: Mapping[str, Measured]) -> str:
    """One benchmark: what it is, its command, machine and day, its goals, and what of its tables a reader needs."""
    measured = known[benchmark.name]
    remarks = [remark for result in measured.results for remark in result.remarks]
    faults = [f"- {goal}" for goal in measured.goals if not goal.met]
    faults += [f"- FAILED: {failure}" for result in measured.results for failure in result.failures]
    # Parts of the table that this run could not fill, a peer that was not installed, say, are left out.
    tables = []
    for question in benchmark.shown:
        try:
            tables.append(markdown(table(question, known)))
        except NoFigure:
            continue
    busy = next((result.conditions for result in measured.results if result.conditions), "")
    took = f"; {measured.seconds:.0f} s" if measured.seconds else ""
    source = f"`{measured.command}`, {measured.date}, {measured.machine}{took}. {busy}"
    met = f" Goals met: {_met(measured.goals)}." if measured.goals else ""
    notes = " ".join(_sentence(remark) for remark in remarks)
    parts = [f"## {benchmark.title}", benchmark.words, source.rstrip() + met, "\n".join(faults), *tables, notes]
    return "\n\n".join(part for part in parts if part)


def _sentence(remark: str) -> str:
    """A remark with a capital letter and a full stop, so that another may follow.

    >>> _sentence("last loss 0.45")
    'Last loss 0.45.'
    """
    return f"{remark[:1].upper()}{remark[1:].removesuffix('.')}."


def main(arguments: list[str] | None = None) -> int:
    """Write the page and fill the others; 1, with every reason, where a page quotes what was not measured."""
    parser = argparse.ArgumentParser("python -m benchmarks.page", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository [this one]")
    root: Path = parser.parse_args(arguments).root
    folder = root / "docs" / "figures"
    known, names, wrong = everything(folder), questions(folder), []
    write(root / "docs" / "numbers.md", numbers(known))
    for page in pages(root):
        before = page.read_text()
        try:
            after = filled(before, names, known)
        except NoFigure as error:
            wrong.append(f"{page.relative_to(root)}: {error}")
            continue
        if after != before:
            write(page, after)
            print(f"filled {page.relative_to(root)}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(f"wrote docs/numbers.md: {sum(one.name in known for one in ALL)} of {len(ALL)} benchmarks")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
