"""Where it breaks: a method, a head, and the one number that breaks it; the bound beside the measured error."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import avow
from avow import file_io
from avow.bench.clock import pace
from avow.bench.trials import Trial, run_trial, token_marks
from avow.bench.workloads import KINDS, Workload, from_tensors, workload
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

# Previews, verdicts and figures are all of the same rows: all of them up to so many, else so many evenly taken. Sparse
# attention weighs each row by itself, and slowly here.
_ROWS, _SPARSE_ROWS = 256, 32
# What a reader wants in the end, an error that a model does not notice; and one that is as long as the longest value.
GOAL, _USEFUL = 1e-2, 1.0
# Below this an error is rounding, and one axis holds all methods.
_FLOOR, _CEILING = 1e-9, 8.0
# Some hundred rows tell the story; the one nearest to its bound is always among them.
_MARKS = 200
_WORDS = Words("bench.txt")

# Heads of SmolLM2 on the first story, and what they do there.
REAL = {
    "induction": "Layer 18, head 6 of SmolLM2: where a word came before, it reads what followed it there",
    "resting": "Layer 18, head 3 of SmolLM2: it rests on the first token, until something calls it",
    "wide": "Layer 2, head 3 of SmolLM2: it spreads over the whole text",
}
MADE = {
    "diffuse": "Diffuse: its vectors have a small norm (length), so every row reads nearly all keys nearly evenly",
    "clustered": "Made: keys in 8 tight clusters, each query near one of them",
    "averaging": "Made: each row averages a group of about 16 keys evenly and ignores the rest",
    "copying": "Made: each row copies one key's value, whose score is far above all others",
}
# How far the queries and keys of a head are stretched to begin with.
_STRETCH = {"diffuse": 8.0}

METHODS = {
    "random_features": "Random features: random numbers stand for each query and key, and their products are right on"
    " average",
    "low_rank": "Low rank: as many keys as the rank says, the landmarks, stand for all of them",
    "sparse": "Sparse: tokens that can weigh next to nothing are not read",
}

_FEATURES, _RANK, _SPARSE = ({"method": (name,)} for name in ("random_features", "low_rank", "sparse"))
_MADE = {"kind": tuple(KINDS)}

Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BenchInputs(Inputs):
    method: Literal["random_features", "low_rank", "sparse"] = control("sparse", "Method", means=METHODS)
    kind: Literal["induction", "resting", "wide", "diffuse", "clustered", "averaging", "copying"] = control(
        "induction", "Head", means=REAL | MADE
    )
    norm: float | None = control(
        None,
        "Queries and keys stretched (×)",
        (0.1, 30),
        log=True,
        about="Logits, the scores before softmax, grow with its square.",
        when=_FEATURES,
    )
    features: int = control(256, "Random features", (16, 2048), step=16, when=_FEATURES)
    rank: int = control(
        16,
        "Rank: landmarks among the keys",
        (1, 256),
        about="The more keys stand for all of them, the nearer the answer, and the more it costs.",
        when=_RANK,
    )
    drop: float = control(0.03, "Tolerance: what unread tokens may move", (1e-4, 0.5), log=True, when=_SPARSE)
    n: int = control(256, "Tokens (n), at most", (64, 2048), step=64)
    d: int = control(32, "Numbers per token (d)", (8, 128), step=8, about="A file has its own.", when=_MADE)
    head: int = control(0, "Draw, or head of the file", (0, 31), when=_MADE)
    cost: Literal["operations", "time"] = control("operations", "Cost counted in")
    file: str | None = param(None, at_most_characters(32), "handle of an uploaded file")

    @property
    def stretch(self) -> float:
        return _STRETCH.get(self.kind, 1.0) if self.norm is None else self.norm


class Knob(NamedTuple):
    """The number that decides how good a method is: its input, where it is tried, what it makes of head and method."""

    input: str
    title: str
    places: tuple[float, ...]
    at: Callable[[BenchInputs], float]
    put: Callable[[Workload, BenchInputs, float], tuple[Workload, Method]]


KNOBS = {
    "random_features": Knob(
        "norm",
        "queries and keys stretched (×)",
        (0.1, 0.3, 1, 2, 4, 6, 9, 15, 30),
        lambda inputs: inputs.stretch,
        lambda head, inputs, x: (
            dataclasses.replace(head, q=head.q * x, k=head.k * x),
            RandomFeatures(features=inputs.features),
        ),
    ),
    "low_rank": Knob(
        "rank",
        "rank",
        (1, 4, 8, 10, 12, 16, 64, 128, 256),
        lambda inputs: float(inputs.rank),
        lambda head, inputs, x: (head, LowRank(rank=min(round(x), head.k.shape[-2]))),
    ),
    "sparse": Knob(
        "drop",
        "tolerance",
        (1e-4, 1e-3, 5e-3, 2e-2, 0.1, 0.5),
        lambda inputs: inputs.drop,
        lambda head, inputs, x: (head, Sparse(drop=x)),
    ),
}


def preview(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Answer:
    """Its answer and its certificate on some rows of the head, and how both change along the knob."""
    base, curve = _at_rest(inputs, tensors)
    knob = KNOBS[inputs.method]
    head, method = knob.put(base, inputs, knob.at(inputs))
    rows = _rows(head, method)
    trial = run_trial(head, method, rows)
    judgement = judged(trial, head)
    return {
        "shown": {"norm": inputs.stretch},
        "live": {name: judgement[name] for name in ("tone", "word", "says")},
        "python": _WORDS.html("python", inputs, trial, len(trial.errors) < head.q.shape[-2], head.causal).strip(),
        "sentence": _WORDS.say(f"at_{inputs.method}", knob.at(inputs), trial, _USEFUL),
        "about": _WORDS.say("about", METHODS[inputs.method], _does(inputs), *_sizes(trial, head)),
        "knob": {"name": knob.input, "at": knob.at(inputs), "ends": (knob.places[0], knob.places[-1])},
        "facts": _facts(trial, head),
        "figures": {"breaking": _breaking(inputs, curve, trial), "promises": _promises(trial)},
        "strip": {"rows": token_marks(rows, trial), "tokens": head.k.shape[-2]} if method.selects_tokens else None,
    }


def verdict(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Answer:
    """The same rows against float64; every other method beside it, on these rows too."""
    knob = KNOBS[inputs.method]
    head, method = knob.put(_head(inputs, tensors), inputs, knob.at(inputs))
    rows, others = _rows(head, method), []
    trial = run_trial(head, method, rows)
    for offer in candidates(head.sizes, rates("cpu", measure=False)):
        try:
            others.append(run_trial(head, offer.method, rows))
        except AvowError:
            continue  # what cannot be had for this head is left out of the costs
    with torch.no_grad():
        automatic = avow.attend(rows.q, rows.k, rows.v, tol=GOAL, confidence=0.99, **rows.call).certificate
    return {
        "facts": [*_facts(trial, head), *_WORDS.facts("automatic", automatic, GOAL)],
        "figures": {"promises": _promises(trial), "costs": _costs(rows, others, inputs.cost)},
        "legend": _legend(others),
        "verdict": judged(trial, head),
    }


def judged(trial: Trial, head: Workload) -> Answer:
    """The verdict: a promise that says something and is kept, one that warns, or one that was broken."""
    certificate, name, rows, sizes = trial.certificate, _words(trial.method), len(trial.errors), _sizes(trial, head)
    likely = "" if certificate.kind == "deterministic" else f" with probability {certificate.confidence:g}"
    steps = [
        f"{_WORDS.say('rows', *sizes)} were answered in float32 or wider and compared with float64",
        f"the certificate is {certificate.kind}{likely}, rounding included",
        *certificate.assumptions,
        *([certificate.reason] if certificate.reason else []),
    ]
    # A statistical promise is made to each row, and may be broken as often as it says.
    if trial.broken > (1 - certificate.confidence) * rows:
        return judgement("refuted", "broken", _WORDS.say("broken", trial, name), steps)
    if trial.bound >= _USEFUL:
        return judgement("corrected", "warned", _WORDS.say("warned", trial, name, GOAL), steps)
    return judgement("proved", "kept", _WORDS.say("kept", trial, likely, *sizes), steps)


def _does(inputs: BenchInputs) -> str:
    """What the head does, if that is known."""
    return "" if inputs.file else (REAL | MADE)[inputs.kind]


def _sizes(trial: Trial, head: Workload) -> tuple[int, int, int]:
    """How many rows were tried, how many there are, and over how many keys."""
    return len(trial.errors), head.q.shape[-2], head.k.shape[-2]


def _head(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Workload:
    if inputs.file:
        return uploaded_head(tensors, inputs.n, inputs.head)
    if inputs.kind in REAL:
        return real_head(inputs.kind).first(inputs.n)
    return workload(inputs.kind, 1, inputs.n, inputs.d, inputs.head)


@functools.cache
def real_head(kind: str) -> Workload:
    """A head of a model that reads the first story; it is causal."""
    path = Path(str(resources.files("avow.lab.stories") / "heads.safetensors"))
    tensors, _ = file_io.load_tensors(path, "kind")
    own = {name: tensors[f"{kind}.{name}"].float() for name in "qkv"}
    return from_tensors(own, kind, causal=True, option="kind")


def uploaded_head(tensors: dict[str, Tensor], length: int, number: int) -> Workload:
    """One head of a file: its first keys, and the queries that stand among them."""
    try:
        return from_tensors(tensors, "as uploaded", option="file").first(length).head(number)
    except FileError:
        raise
    except InputError as error:
        rule = f"holds what does not fit together: {error.name}={error.value} {error.rule}"
        raise FileError("file", "as uploaded", rule, error.remedy) from error


def _rows(head: Workload, method: Method) -> Workload:
    """The rows that are tried: all, or as many as there is time for."""
    return head.some(_SPARSE_ROWS if method.selects_tokens else _ROWS)


# What does not move with the knob, of the last few states. A file is known by its handle, one of the inputs.
_known: OrderedDict[BenchInputs, tuple[Workload, tuple[Trial, ...]]] = OrderedDict()
_MOST_KNOWN = 8


def _at_rest(inputs: BenchInputs, tensors: dict[str, Tensor]) -> tuple[Workload, tuple[Trial, ...]]:
    """The head, and what the method makes of its rows along the whole knob."""
    # What moves along the curve, or does not change it, is at its default.
    still = ["norm", "rank", "drop", "cost"] + (["features"] if inputs.method != "random_features" else [])
    inputs = dataclasses.replace(inputs, **{name: getattr(BenchInputs, name) for name in still})
    if inputs not in _known:
        knob, base = KNOBS[inputs.method], _head(inputs, tensors)
        settings = [knob.put(base, inputs, place) for place in knob.places]
        curve = tuple(run_trial(head, method, _rows(head, method)) for head, method in settings)
        _known[inputs] = base, curve
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[inputs]


# ---- what is shown


def _facts(trial: Trial, head: Workload) -> list[dict[str, str]]:
    features = isinstance(trial.method, RandomFeatures)
    needed = avow.features_needed(head.q, head.k, tol=GOAL) if features else None
    return _WORDS.facts("facts", trial, *_sizes(trial, head), GOAL, needed)


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
    hover = [_WORDS.html("row", x, y).strip() for x, y in zip(errors, bounds, strict=True)]
    style = look(trial.method.name)
    marks = Trace("a row", errors, bounds, "points", style, size=7, opacity=0.55, legend=False, hover=hover)
    x, y = (_error_axis(title, min(errors)) for title in ("measured error of a row", "its bound"))
    return figure(Plot("", x, y, [even, marks]))


def _costs(rows: Workload, trials: Sequence[Trial], unit: str) -> Figure:
    """Every setting of every method: what it costs beside exact attention, its error, and above it its bound."""
    settings = []
    for trial in trials:
        cost = trial.cost if unit == "operations" else _time_ratio(rows, trial.method)
        counted = unit if unit == "time" or not trial.method.selects_tokens else "bytes read"
        hover = _WORDS.html("hover", trial, cost, counted, trial.own_mechanism).strip()
        settings.append(Setting(trial.method, cost, _shown(trial.error), _shown(trial.bound), hover))
    x = Axis(f"{'time' if unit == 'time' else 'cost'} relative to exact attention", log=True, format="×")
    plot = cost_plot("", x, _error_axis("error", min(trial.error for trial in trials)), settings)
    # The page has a legend of its own.
    return figure(dataclasses.replace(plot, traces=[dataclasses.replace(one, legend=False) for one in plot.traces]))


def _time_ratio(rows: Workload, method: Method) -> float:
    """The time of a method beside exact attention of the same rows."""
    problem = rows.problem

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
    return Axis(title, log=True, format="%", range=(10**bottom, _CEILING), every=1 if bottom > -5 else 2)


def _shown(error: float) -> float:
    """An error, on the floor where it is below it."""
    return max(error, _FLOOR)


_SUMMARY = "Methods skip words or summarise them. Before one fails, its certificate, the proved bound, warns."
_PRESETS: Presets = {
    "A real head, sparse": {},
    "Sparse, clusters": {"kind": "clustered"},
    "Nothing to skip": {"kind": "diffuse"},
    "Low rank, clusters": {"method": "low_rank", "kind": "clustered"},
    "Low rank, copying": {"method": "low_rank", "kind": "copying", "rank": 64},
    "A real head, features": {"method": "random_features"},
    "Vectors stretched": {"method": "random_features", "kind": "diffuse"},
}
PAGE = Page("bench", "Where it breaks", _SUMMARY, 20, BenchInputs, preview, verdict, _PRESETS, seconds=60.0)
