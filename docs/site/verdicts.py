"""The page of verdicts, written from the catalogue of claims: `python -m docs.site.verdicts`.

Verdicts are those that the catalogue records; `avow claims run` compares them with what its checks find. Refuted claims
are judged here, for their counterexamples.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from avow.theory.claims import Claim, Finding, catalogue

PAGE = Path(__file__).parents[1] / "verdicts.md"
# A longer number than this is for the proof, not for the page.
_SHORT = 12
# What the topics are called on the page; another one goes by its own name.
_TITLES = {
    "softmax": "Softmax weights",
    "queries": "Queries that copy and average",
    "heads": "Heads and layers",
    "efficient": "Efficient attention",
    "costs": "Costs",
    "relu": "ReLU networks",
    "dynamics": "Optimisers and recurrent networks",
    "lemmas": "Lemmas that certificates use",
    "neighbours": "Other packages",
}
_TOP = """<!-- This page is written by `python -m docs.site.verdicts`; change the catalogue instead. -->
# Every verdict

The statement of every claim in the [ledger](claims.md), in words, with its recorded verdict. A refuted claim has a
counterexample, a corrected one the statement that is proved in its place. `avow claims show copy-gap` shows a claim
with its formula, assumptions and proof; `avow claims run` judges all of them again.

"""
_HEAD = "| claim | statement | verdict | instead, or why not |\n|---|---|---|---|\n"


def page(claims: Iterable[Claim]) -> str:
    """The page in Markdown: a table for each topic."""
    known = list(claims)
    counts = Counter(claim.expected for claim in known)
    text = (
        _TOP + f"{len(known)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".\n"
    )
    for topic, group in itertools.groupby(known, key=lambda claim: claim.topic):
        text += f"\n## {_TITLES.get(topic, topic)}\n\n{_HEAD}"
        text += "".join(_row(claim) for claim in group)
    return text


def _row(claim: Claim) -> str:
    cells = (f"`{claim.id}`", claim.plain, claim.expected, _instead(claim))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _instead(claim: Claim) -> str:
    """What is true instead of a claim that is not, or where it fails; empty for one that is proved."""
    if claim.expected != "refuted":
        return claim.amended_plain
    if claim.requires:  # what is installed here must not change the page
        packages = " and ".join(one.replace("==", " ") for one in claim.requires)
        return f"`avow claims show {claim.id}` shows a counterexample if {packages} is installed"
    return counterexample(claim.judge())


def counterexample(finding: Finding) -> str:
    """The first counterexample of a refutation in words, with its two numbers if it has no more."""
    first = next(step for step in finding.evidence if step.kind == "counterexample")
    facts = {name.replace("_", " "): str(fact) for name, fact in first.facts.items() if name != "evaluated by"}
    few = len(facts) <= 2 and all(len(fact) <= _SHORT for fact in facts.values())
    numbers = ", ".join(f"{name}: {fact}" for name, fact in facts.items())
    return f"counterexample: {first.says}" + (f" ({numbers})" if numbers and few else "")


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser("python -m docs.site.verdicts", description="The verdicts as a page.")
    parser.add_argument("--out", type=Path, default=PAGE, help="where the page goes [docs/verdicts.md]")
    out: Path = parser.parse_args(arguments).out
    claims = catalogue().values()
    out.write_text(page(claims))
    print(f"wrote {out}: {len(claims)} claims")
    return 0


if __name__ == "__main__":
    sys.exit(main())
