"""`avow claims`: list, run and explain what is claimed of attention; a user's own file of claims too."""

from __future__ import annotations

import difflib
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from avow.cli.options import AsJson, command, files, option, present, report_file, report_option
from avow.errors import ParameterError

if TYPE_CHECKING:
    from avow.theory.claims import Claim, Finding

# The verdicts that a claim may be recorded with.
VERDICTS = ("proved", "refuted", "corrected", "supported")

app = typer.Typer(no_args_is_help=True, help="List, run and explain what is claimed of attention.")

Topic = Annotated[str | None, option("Only claims of this topic.")]
OnRecord = Annotated[
    str | None, option("Only claims with this verdict on record.", "--verdict", metavar="|".join(VERDICTS))
]
User = Annotated[Path | None, option("Your own Python file of claims, in place of the catalogue.")]
Seconds = Annotated[float, option("A claim, or a broken variant of it, that takes longer gets no verdict.")]


@app.command("list")
def list_claims(topic: Topic = None, verdict: OnRecord = None, user: User = None, as_json: AsJson = False) -> None:
    """Every claim with its topic, the verdict on record and its words."""
    from avow.report.claims import catalogue_table

    if verdict is not None and verdict not in VERDICTS:
        raise ParameterError("verdict", repr(verdict), "is not one on record", f"use one of {', '.join(VERDICTS)}")
    claims = [one for one in _chosen(_known(user), topic, [], user) if verdict in (None, one.expected)]
    listed = [{**one.words(), "recorded": one.expected, "sabotages": list(one.sabotage)} for one in claims]
    present(as_json, {"claims": listed}, catalogue_table(claims))


@app.command()
def run(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Claims to judge; all by default.")] = None,
    topic: Topic = None,
    user: User = None,
    seconds: Seconds = 60.0,
    html: Annotated[Path | None, report_option("out/claims.html, or out/claims-FILE.html with --user FILE.py")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge claims and their broken variants.

    Fails if a verdict is not the recorded one.
    """
    from avow import file_io
    from avow.report.claims import claims_page, faults, findings_table, headline
    from avow.report.terminal import bold

    known = _known(user)
    claims = _chosen(known, topic, ids or [], user)
    # The page of the catalogue stays when claims of one's own are judged.
    html = report_file(html, Path("out/claims.html" if user is None else f"out/claims-{user.stem}.html"))
    written = files(html)
    findings = _judged(claims, known, seconds)
    wrong = faults(findings)
    if html:
        file_io.write(html, claims_page(findings, command()))
    line = headline(findings)
    plain = {"headline": line, "faults": wrong, "claims": [finding.plain() for finding in findings]}
    parts = findings_table(findings), "", bold(line)
    present(as_json, plain, *parts, written=written, reported=html is not None, faults=wrong)


@app.command("show")
def show_claim(
    id: Annotated[str, typer.Argument(help="The claim.")],
    user: User = None,
    seconds: Seconds = 60.0,
    as_json: AsJson = False,
) -> None:
    """Everything about one claim, judged now."""
    from avow.report.claims import explanation

    known = _known(user)
    (finding,) = _judged(_chosen(known, None, [id], user), known, seconds)
    present(as_json, finding.plain(), *explanation(finding))


@app.command("questions")
def list_questions(as_json: AsJson = False) -> None:
    """The questions that `avow claims grade` knows."""
    from avow.report.claims import questions_table
    from avow.theory.claims.questions import QUESTIONS

    listed = [
        {"id": one.id, "asks": one.asks, "letters": dict(one.letters), "claim": one.claim.id}
        for one in QUESTIONS.values()
    ]
    present(as_json, {"questions": listed}, questions_table(QUESTIONS.values()))


@app.command("grade")
def grade_answer(
    question: Annotated[str, typer.Argument(help="The question; `avow claims questions` lists them.")],
    answer: Annotated[str, typer.Argument(help="A formula in Python or LaTeX; it is read, never run.")],
    as_json: AsJson = False,
) -> None:
    """Grade an answer: right with its proof, or wrong with numbers.

    Fails if the answer is not shown to be right.
    """
    from avow.report.claims import graded
    from avow.theory.claims.grading import grade
    from avow.theory.claims.questions import QUESTIONS

    if question not in QUESTIONS:
        near = difflib.get_close_matches(question, QUESTIONS)
        remedy = f"did you mean {' or '.join(near)}?" if near else "avow claims questions lists them"
        raise ParameterError("question", repr(question), "is not known", remedy)
    found = grade(QUESTIONS[question], answer)
    present(as_json, found.plain(), *graded(found))
    if found.judgement != "right":
        raise typer.Exit(1)


@app.command("new")
def new_claim(
    name: Annotated[Path, typer.Argument(help="The Python file to write, such as mine.py.")], as_json: AsJson = False
) -> None:
    """Write a file with a claim of your own that runs."""
    from avow import file_io
    from avow.theory.claims.template import TEMPLATE

    path = name if name.suffix == ".py" else name.with_suffix(".py")
    if path.exists():
        raise ParameterError("name", str(path), "exists already", "give another name, or delete it first")
    file_io.write(path, TEMPLATE)
    command_line = f"avow claims run --user {path}"
    present(as_json, {"wrote": str(path), "judge": command_line}, f"judge it: {command_line}", written=[path])


def _known(user: Path | None) -> dict[str, Claim]:
    from avow.theory.claims import catalogue, claims_in

    return catalogue() if user is None else claims_in(user)


def _chosen(known: dict[str, Claim], topic: str | None, ids: list[str], user: Path | None) -> list[Claim]:
    for id in ids:
        if id not in known:
            near = difflib.get_close_matches(id, known)
            file = "" if user is None else f" --user {user}"
            remedy = f"did you mean {' or '.join(near)}?" if near else f"avow claims list{file} names them all"
            if id.endswith(".py"):
                remedy = f"a file of claims is given by --user {id}"
            raise ParameterError("claim", repr(id), f"is not known{file and f' in {user}'}", remedy)
    topics = list(dict.fromkeys(claim.topic for claim in known.values()))
    if topic is not None and topic not in topics:
        raise ParameterError("topic", repr(topic), "is not known", f"known topics: {', '.join(topics)}")
    chosen = [known[id] for id in dict.fromkeys(ids or known) if topic in (None, known[id].topic)]
    if not chosen:
        raise ParameterError("topic", repr(topic), f"is not that of {', '.join(ids)}", "leave out one or the other")
    return chosen


def _judged(claims: list[Claim], known: dict[str, Claim], seconds: float) -> list[Finding]:
    """The findings of some claims, in their order; claims of the same file that they rest on are judged too."""
    from avow.report.terminal import progress
    from avow.theory.claims import run as judge

    if not seconds > 0:
        raise ParameterError("seconds", seconds, "must be above 0", "try --seconds 60")
    requested = {claim.id: claim for claim in claims}
    for claim in (more := list(claims)):
        for need in claim.needs:
            if need in known and need not in requested:
                requested[need] = known[need]
                more.append(known[need])
    by_id: dict[str, Finding] = {}
    with progress(len(requested)) as tell:
        findings = judge(requested, seconds, tell=lambda claim: tell(claim.id))
        # An interrupt must not leave workers behind.
        with closing(cast("Generator[Finding]", findings)):
            for finding in findings:
                by_id[finding.claim.id] = finding
    return [by_id[claim.id] for claim in claims]
