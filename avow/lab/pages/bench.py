"""The approximation bench: a method, a head, and the one number that breaks it; the bound beside the measured error."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import avow
from avow.bench.clock import pace
from avow.bench.trials import Trial, run_marked, run_trial
from avow.bench.workloads import Workload, from_tensors, workload
from avow.calibration import rates
from avow.core import Method
from avow.errors import AvowError, FileError, InputError
from avow.lab.page import Answer, Inputs, Page, Presets, Words, control, judgement
from avow.methods import exact_method
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.parameters import at_most_characters, param
from avow.planner import candidates
from avow.report.charts import Axis, Mode, Plot, Trace, figure
from avow.report.compare import Setting, cost_plot
from avow.report.style import FRONTIER, look

# A preview looks at so many keys at most, and asks them so many queries.
_KEYS, _QUERIES = 512, 128
# Sparse attention weighs each row by itself, and slowly here: so many rows tell enough of it while one moves, so many
# pairs of rows and keys when one lets go, and so many beside other methods.
_ROWS, _PAIRS, _ASIDE = 20, 1 << 18, 1 << 16
# What a reader wants in the end, an error that a model does not notice; and one that is as long as the longest value.
GOAL, _USEFUL = 1e-2, 1.0
# Below this an error is rounding, and one axis holds all methods.
_FLOOR, _CEILING = 1e-9, 8.0
# Some hundred rows tell the story; the one nearest to its bound is always among them.
_MARKS = 200
_WORDS = Words("bench.txt")

_FEATURES, _RANK, _SPARSE = ({"method": (name,)} for name in ("random_features", "low_rank", "sparse"))

Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BenchInputs(Inputs):
    method: Literal["random_features", "low_rank", "sparse"] = control("random_features", "Method")
    kind: Literal["diffuse", "clustered", "averaging", "copying"] = control(
        "diffuse", "What the head does", about="A file of your own takes its place."
    )
    norm: float = control(
        8.0, "Queries and keys stretched (×)", (0.1, 30), log=True, about="Logits grow with its square.", when=_FEATURES
    )
    features: int = control(256, "Random features", (16, 2048), step=16, when=_FEATURES)
    rank: int = control(16, "Rank: landmarks among the keys", (1, 256), when=_RANK)
    drop: float = control(0.03, "Tolerance: what unread tokens may move", (1e-4, 0.5), log=True, when=_SPARSE)
    n: int = control(512, "Tokens (n)", (64, 2048), step=64)
    d: int = control(32, "Numbers per token (d)", (8, 128), step=8, about="A file has its own.")
    head: int = control(0, "Draw, or head of the file", (0, 31))
    cost: Literal["operations", "time"] = control("operations", "Cost counted in")
    file: str | None = param(None, at_most_characters(32), "handle of an uploaded file")


class Knob(NamedTuple):
    """The number that decides how good a method is: where it is tried, and what it makes of head and method."""

    title: str
    places: tuple[float, ...]
    at: Callable[[BenchInputs], float]
    put: Callable[[Workload, BenchInputs, float], tuple[Workload, Method]]


KNOBS = {
    "random_features": Knob(
        "queries and keys stretched (×)",
        (0.1, 0.3, 1, 2, 4, 6, 9, 15, 30),
        lambda inputs: inputs.norm,
        lambda head, inputs, x: (
            dataclasses.replace(head, q=head.q * x, k=head.k * x),
            RandomFeatures(features=inputs.features),
        ),
    ),
    "low_rank": Knob(
        "rank",
        (1, 4, 8, 10, 12, 16, 64, 128, 256),
        lambda inputs: float(inputs.rank),
        lambda head, inputs, x: (head, LowRank(rank=min(round(x), head.k.shape[-2]))),
    ),
    "sparse": Knob(
        "tolerance",
        (1e-4, 1e-3, 5e-3, 2e-2, 0.1, 0.5),
        lambda inputs: inputs.drop,
        lambda head, inputs, x: (head, Sparse(drop=x)),
    ),
}


def preview(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Answer:
    """Some rows of the head, its answer and its certificate, and how both change along the knob."""
    base, curve = _at_rest(inputs, tensors)
    knob = KNOBS[inputs.method]
    head, method = knob.put(base, inputs, knob.at(inputs))
    trial, lit = run_marked(head, method) if method.selects_tokens else (run_trial(head, method), None)
    return {
        "facts": _facts(trial, head),
        "figures": {"breaking": _breaking(inputs, curve, trial), "promises": _promises(trial)},
        "strip": {"rows": lit, "tokens": head.k.shape[-2]} if lit else None,
    }


def verdict(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Answer:
    """Every row at the size that was asked for; every other method beside it."""
    knob = KNOBS[inputs.method]
    head, method = knob.put(_head(inputs, tensors, inputs.n), inputs, knob.at(inputs))
    trial, others = run_trial(_rows(head, method, _PAIRS), method), []
    for offer in candidates(head.problem.sizes, rates("cpu", measure=False)):
        try:
            others.append(run_trial(_rows(head, offer.method, _ASIDE), offer.method))
        except AvowError:
            continue  # what cannot be had for this head is left out of the costs
    with torch.no_grad():
        automatic = avow.attend(head.q, head.k, head.v, tol=GOAL, confidence=0.99).certificate
    return {
        "facts": [*_facts(trial, head), *_WORDS.facts("automatic", automatic, GOAL)],
        "figures": {"promises": _promises(trial), "costs": _costs(head, others, inputs.cost)},
        "legend": _legend(others),
        "verdict": judged(trial),
    }


def judged(trial: Trial) -> Answer:
    """The verdict: a promise that says something and is kept, one that warns, or one that was broken."""
    certificate, name, rows = trial.certificate, _words(trial.method), len(trial.errors)
    likely = "" if certificate.kind == "deterministic" else f" with probability {certificate.confidence:g}"
    steps = [
        f"{rows} rows were answered in float32 or wider and compared with float64",
        f"the certificate is {certificate.kind}{likely}, rounding included",
        *certificate.assumptions,
        *([certificate.reason] if certificate.reason else []),
    ]
    # A statistical promise is made to each row, and may be broken as often as it says.
    if trial.broken > (1 - certificate.confidence) * rows:
        return judgement("refuted", "broken", _WORDS.say("broken", trial, name), steps)
    if trial.bound >= _USEFUL:
        return judgement("corrected", "warned", _WORDS.say("warned", trial, name, GOAL), steps)
    return judgement("proved", "kept", _WORDS.say("kept", trial, likely), steps)


def _head(inputs: BenchInputs, tensors: dict[str, Tensor], most: int) -> Workload:
    length = min(inputs.n, most)
    if inputs.file:
        return uploaded_head(tensors, length, inputs.head)
    return workload(inputs.kind, 1, length, inputs.d, inputs.head)


def uploaded_head(tensors: dict[str, Tensor], length: int, number: int) -> Workload:
    """One head of a file: its first keys, and the queries that stand among them."""
    try:
        return from_tensors(tensors, "as uploaded", option="file").first(length).head(number)
    except FileError:
        raise
    except InputError as error:
        rule = f"holds what does not fit together: {error.name}={error.value} {error.rule}"
        raise FileError("file", "as uploaded", rule, error.remedy) from error


def _rows(head: Workload, method: Method, pairs: int) -> Workload:
    """All rows, or as many as a slow method has time for."""
    return head.some(max(16, pairs // head.k.shape[-2])) if method.selects_tokens else head


# What does not move with the knob, of the last few states. A file is known by its handle, one of the inputs.
_known: OrderedDict[BenchInputs, tuple[Workload, tuple[Trial, ...]]] = OrderedDict()
_MOST_KNOWN = 8


def _at_rest(inputs: BenchInputs, tensors: dict[str, Tensor]) -> tuple[Workload, tuple[Trial, ...]]:
    """The head as a preview sees it, and what the method makes of it along the whole knob."""
    # What moves along the curve, or does not change it, is at its default.
    still = ["norm", "rank", "drop", "cost"] + (["features"] if inputs.method != "random_features" else [])
    defaults = {name: getattr(BenchInputs, name) for name in still}
    inputs = dataclasses.replace(inputs, **defaults, n=min(inputs.n, _KEYS))
    if inputs not in _known:
        knob, head = KNOBS[inputs.method], _head(inputs, tensors, _KEYS)
        _, method = knob.put(head, inputs, knob.places[0])
        head = head.some(_ROWS if method.selects_tokens else _QUERIES)
        _known[inputs] = head, tuple(run_trial(*knob.put(head, inputs, place)) for place in knob.places)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[inputs]


# ---- what is shown


def _facts(trial: Trial, head: Workload) -> list[dict[str, str]]:
    features = isinstance(trial.method, RandomFeatures)
    needed = avow.features_needed(head.q, head.k, tol=GOAL) if features else None
    return _WORDS.facts("facts", trial, head.k.shape[-2], GOAL, needed)


def _breaking(inputs: BenchInputs, curve: Sequence[Trial], here: Trial) -> Figure:
    """Measured error and certified bound over the one number that decides, and where the reader stands."""
    knob, style = KNOBS[inputs.method], look(inputs.method)._replace(symbol="circle")

    def over(number: str) -> list[float]:
        return [_shown(getattr(trial, number)) for trial in curve]

    def mark(number: str, mode: Mode) -> Trace:
        return Trace("", [knob.at(inputs)], [_shown(getattr(here, number))], mode, style, size=13, legend=False)

    traces = [
        Trace("certified bound", knob.places, over("bound"), "line", style, dash=1, width=2.5),
        Trace("measured error", knob.places, over("error"), "line", style, width=2.5, fill=True),
        mark("bound", "open points"),
        mark("error", "points"),
    ]
    if here.method.selects_tokens:
        traces.append(Trace("share of tokens read", knob.places, over("read"), "line", FRONTIER, dash=2))
    # Room for a mark at either end, and never another: the axis stands still while the mark moves along it.
    first, last = knob.places[0], knob.places[-1]
    room = (last / first) ** 0.04
    x = Axis(knob.title, log=True, range=(first / room, last * room), every=1)
    y = _error_axis("error", min(trial.error for trial in (*curve, here)))
    return figure(Plot("", x, y, traces, levels={1.0: "no use"}))


def _promises(trial: Trial) -> Figure:
    """Every row: what it is off by, and what was promised; on the line a bound would be met exactly."""
    rows = list(zip(trial.errors.tolist(), trial.certificate.rows[0, 0].tolist(), strict=True))
    rows.sort(key=lambda row: -row[0] / row[1] if row[1] > 0 else -math.inf)
    rows = rows[:: -(-len(rows) // _MARKS)]
    errors, bounds = ([_shown(row[i]) for row in rows] for i in (0, 1))
    ends = (_FLOOR, _CEILING)
    even = Trace("", ends, ends, "line", FRONTIER, dash=2, width=1, legend=False, hover=None)
    hover = [f"a row\nmeasured {x:.1e}\npromised {y:.1e}" for x, y in zip(errors, bounds, strict=True)]
    style = look(trial.method.name)
    marks = Trace("a row", errors, bounds, "points", style, size=7, opacity=0.55, legend=False, hover=hover)
    x, y = (_error_axis(title, min(errors)) for title in ("measured error of a row", "its bound"))
    return figure(Plot("", x, y, [even, marks]))


def _costs(head: Workload, trials: Sequence[Trial], unit: str) -> Figure:
    """Every setting of every method: what it costs beside exact attention, its error, and above it its bound."""
    settings = []
    for trial in trials:
        cost = trial.operations if unit == "operations" else _time_ratio(head, trial.method)
        hover = _WORDS.html("hover", trial, cost, trial.own_mechanism).strip()
        settings.append(Setting(trial.method, cost, _shown(trial.error), _shown(trial.bound), hover))
    x = Axis(f"{unit} relative to exact attention", log=True, format="×")
    plot = cost_plot("", x, _error_axis("error", min(trial.error for trial in trials)), settings)
    # The page has a legend of its own.
    return figure(dataclasses.replace(plot, traces=[dataclasses.replace(one, legend=False) for one in plot.traces]))


def _time_ratio(head: Workload, method: Method) -> float:
    """The time of a method beside exact attention of the same rows."""
    problem = _rows(head, method, _ASIDE).problem

    def call(one: Method) -> Callable[[], object]:
        return lambda: one.compute(problem, torch.Generator().manual_seed(0))

    with torch.no_grad():
        return pace(call(method), call(exact_method()()), torch.device("cpu"), 3).ratio


def _legend(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """How each method is drawn."""
    methods = {trial.method.name: trial for trial in trials}
    return [
        {"words": _words(trial.method), "own_mechanism": trial.own_mechanism, **look(name)._asdict()}
        for name, trial in methods.items()
    ]


def _words(method: Method) -> str:
    """A method's name as a reader says it."""
    return method.name.replace("_", " ")


def _error_axis(title: str, lowest: float) -> Axis:
    """An axis that holds all from the lowest error, in steps that do not follow every move."""
    bottom = max(2 * math.floor(math.log10(max(lowest, _FLOOR)) / 2 - 0.05), math.log10(_FLOOR))
    return Axis(title, log=True, range=(10**bottom, _CEILING), every=1 if bottom > -5 else 2)


def _shown(error: float) -> float:
    """An error, on the floor where it is below it."""
    return max(error, _FLOOR)


_SUMMARY = "Make a method fail, and see its certificate say so first: bound, measured error and cost in one picture."
_PRESETS: Presets = {
    "Random features, norms grow": {},
    "Low rank, clusters": {"method": "low_rank", "kind": "clustered"},
    "Low rank, copying": {"method": "low_rank", "kind": "copying", "rank": 64},
    "Sparse, clusters": {"method": "sparse", "kind": "clustered"},
    "Sparse, nothing to skip": {"method": "sparse", "kind": "diffuse"},
}
PAGE = Page(
    "bench",
    "Approximation bench",
    _SUMMARY,
    20,
    BenchInputs,
    preview,
    verdict,
    _PRESETS,
    seconds=60.0,
    short="Where it breaks",
)
