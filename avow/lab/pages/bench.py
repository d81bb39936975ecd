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
from avow.bench.compare import frontier
from avow.calibration import rates
from avow.core import Method
from avow.errors import AvowError
from avow.lab.page import Answer, Inputs, Page, control, fact, judgement
from avow.lab.pages.bench_heads import Head, Trial, drawn_head, run_sparse_trial, run_trial, uploaded_head
from avow.methods import method_named
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.parameters import at_most_characters, param
from avow.planner import candidates
from avow.report import formatting
from avow.report.style import look

# A preview looks at so many keys at most, and asks them so many queries.
_KEYS, _QUERIES = 512, 128
# Sparse attention weighs each row by itself, and slowly here: so many rows tell enough of it while one moves, so many
# pairs of rows and keys when one lets go, and so many beside other methods.
_ROWS, _PAIRS, _ASIDE = 20, 1 << 18, 1 << 16
# What a reader wants in the end: an error that a model does not notice.
GOAL = 1e-2
# An error of one is as long as the longest value.
_USEFUL = 1.0
# Below this an error is rounding, and one axis holds all methods.
_FLOOR, _CEILING = 1e-9, 8.0
# Some hundred rows tell the story; the one nearest to its bound is always among them.
_MARKS = 200
_LETTERS = {"square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼", "pentagon": "⬟", "hexagon": "⬢"}
_PRICES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_GREY = "#7d8590"

Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BenchInputs(Inputs):
    method: Literal["random_features", "low_rank", "sparse"] = control("random_features", "Method")
    kind: Literal["diffuse", "clustered", "averaging", "copying"] = control(
        "diffuse", "What the head does", about="A file of your own takes its place."
    )
    norm: float = control(
        8.0,
        "Queries and keys stretched (×)",
        low=0.1,
        high=30,
        log=True,
        about="Logits grow with its square.",
        when={"method": ("random_features",)},
    )
    features: int = control(256, "Random features", low=16, high=2048, step=16, when={"method": ("random_features",)})
    rank: int = control(16, "Rank: landmarks among the keys", low=1, high=256, when={"method": ("low_rank",)})
    drop: float = control(
        0.03, "Tolerance: what unread tokens may move", low=1e-4, high=0.5, log=True, when={"method": ("sparse",)}
    )
    n: int = control(512, "Tokens (n)", low=64, high=2048, step=64)
    d: int = control(32, "Numbers per token (d)", low=8, high=128, step=8, about="A file has its own.")
    head: int = control(0, "Draw, or head of the file", low=0, high=31)
    cost: Literal["operations", "time"] = control("operations", "Cost counted in")
    file: str | None = param(None, at_most_characters(32), "handle of an uploaded file")


class Knob(NamedTuple):
    """The number that decides how good a method is: where it is tried, and what it makes of head and method."""

    title: str
    places: tuple[float, ...]
    at: Callable[[BenchInputs], float]
    put: Callable[[Head, BenchInputs, float], tuple[Head, Method]]


KNOBS = {
    "random_features": Knob(
        "queries and keys stretched (×)",
        (0.1, 0.3, 1, 2, 4, 6, 9, 15, 30),
        lambda inputs: inputs.norm,
        lambda head, inputs, x: (head.scaled(x), RandomFeatures(features=inputs.features)),
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
    base, curve = _at_rest(_resting(inputs), tensors)
    knob = KNOBS[inputs.method]
    head, method = knob.put(base, inputs, knob.at(inputs))
    result, lit = run_sparse_trial(head, method) if isinstance(method, Sparse) else (run_trial(head, method), None)
    return {
        "facts": _facts(result, head),
        "figures": {"breaking": _breaking(inputs, curve, result), "promises": _promises(result)},
        "strip": {"rows": lit, "tokens": head.k.shape[-2]} if lit else None,
    }


def verdict(inputs: BenchInputs, tensors: dict[str, Tensor]) -> Answer:
    """Every row at the size that was asked for; every other method beside it."""
    knob = KNOBS[inputs.method]
    head, method = knob.put(_head(inputs, tensors, inputs.n), inputs, knob.at(inputs))
    result = run_trial(_rows(head, method, _PAIRS), method)
    others = _others(head)
    prices = [_price(head, other, inputs.cost) for other in others]
    with torch.no_grad():
        chosen = avow.attend(head.q, head.k, head.v, tol=GOAL, confidence=0.99).certificate
    automatic = fact(f"attend(tol={GOAL:g}) runs", chosen.method, f"the quickest that proves it: {chosen.bound:.2g}")
    return {
        "facts": [*_facts(result, head), automatic],
        "figures": {"promises": _promises(result), "costs": _costs(others, prices, inputs.cost)},
        "legend": _legend(others),
        "verdict": judged(result, len(result.errors)),
    }


def judged(result: Trial, rows: int) -> Answer:
    """The verdict's words: a promise that says something and is kept, one that warns, or one that was broken."""
    certificate, name = result.certificate, _words(result.method.name).capitalize()
    error, bound = f"{result.error:.2g}", f"{result.bound:.2g}"
    likely = "" if certificate.kind == "deterministic" else f" with probability {certificate.confidence:g}"
    steps = [
        f"{rows} rows were answered in float32 or wider and compared with float64",
        f"the certificate is {certificate.kind}{likely}, rounding included",
        *certificate.assumptions,
        *([certificate.reason] if certificate.reason else []),
    ]
    # A statistical promise is made to each row, and may be broken as often as it says.
    if result.broken > (1 - certificate.confidence) * rows:
        says = f"{result.broken} of {rows} rows are further off than {name.lower()} promised."
        return judgement("refuted", "broken", says, steps)
    if result.bound >= _USEFUL:
        after = "and the answer is" if result.error > GOAL else "though the answer is only"
        says = f"{name} gave warning: the certificate promises no better than {bound}, {after} off by {error}."
        return judgement("corrected", "warned", says, steps)
    says = f"Each of {rows} rows is within its promise of at most {bound}{likely}; the worst is off by {error}."
    return judgement("proved", "kept", says, steps)


def _head(inputs: BenchInputs, tensors: dict[str, Tensor], most: int) -> Head:
    length = min(inputs.n, most)
    if inputs.file:
        return uploaded_head(tensors, length, inputs.head)
    return drawn_head(inputs.kind, length, inputs.d, inputs.head)


def _resting(inputs: BenchInputs) -> BenchInputs:
    """The same inputs with what moves along the curve, or moves it not at all, at its default: a key for `_known`."""
    still = ["norm", "rank", "drop", "cost"] + (["features"] if inputs.method != "random_features" else [])
    defaults = {name: getattr(BenchInputs, name) for name in still}
    return dataclasses.replace(inputs, **defaults, n=min(inputs.n, _KEYS))


# What does not move with the knob, of the last few states. A file is known by its handle, one of the inputs.
_known: OrderedDict[BenchInputs, tuple[Head, tuple[Trial, ...]]] = OrderedDict()
_MOST_KNOWN = 8


def _at_rest(inputs: BenchInputs, tensors: dict[str, Tensor]) -> tuple[Head, tuple[Trial, ...]]:
    """The head as a preview sees it, and what the method makes of it along the whole knob."""
    if inputs not in _known:
        knob = KNOBS[inputs.method]
        head = _head(inputs, tensors, _KEYS).rows(_ROWS if inputs.method == "sparse" else _QUERIES)
        _known[inputs] = head, tuple(run_trial(*knob.put(head, inputs, place)) for place in knob.places)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[inputs]


def _rows(head: Head, method: Method, pairs: int) -> Head:
    """All rows, or as many as a slow method has time for."""
    return head.rows(max(16, pairs // head.k.shape[-2])) if method.selects_tokens else head


def _others(head: Head) -> list[Trial]:
    """Every setting of every method that runs on this head, in the order of what exact attention's planner expects."""
    results = []
    for offer in candidates(head.problem.sizes, rates("cpu", measure=False)):
        try:
            results.append(run_trial(_rows(head, offer.method, _ASIDE), offer.method))
        except AvowError:
            continue  # What cannot be had for this head has no place among the costs.
    return results


def _price(head: Head, result: Trial, unit: str) -> float:
    """What a method costs beside exact attention of the same rows."""
    if unit == "operations":
        return result.operations
    some = _rows(head, result.method, _ASIDE)

    def call(method: Method) -> Callable[[], object]:
        return lambda: method.compute(some.problem, torch.Generator().manual_seed(0))

    with torch.no_grad():
        return pace(call(result.method), call(method_named("exact")()), torch.device("cpu"), 3).ratio


def _facts(result: Trial, head: Head) -> list[dict[str, str]]:
    certificate, name = result.certificate, result.method.name
    kind = certificate.kind if certificate.kind == "deterministic" else f"with probability {certificate.confidence:g}"
    about = f"of {len(result.errors)} rows over {head.k.shape[-2]} keys, in float64"
    facts = [
        fact("Largest error", f"{result.error:.2g}", about),
        fact("Certificate", f"error ≤ {result.bound:.2g}", kind),
    ]
    if name == "sparse":  # which saves reading, not arithmetic
        return [*facts, fact("Tokens read in full", f"{result.read:.1%}", "of those that a row may see")]
    facts.append(fact("Operations", formatting.ratio(result.operations), "of exact attention's"))
    if name == "random_features":
        needed = avow.features_needed(head.q, head.k, tol=GOAL)
        count = "hopeless" if math.isinf(needed.features) else f"{needed.features:,.0f}"
        facts.append(fact(f"Features for {GOAL:g}", count, f"they grow as exp(|q+k|²), here {needed.radius:.3g}²"))
    return facts


# ---- figures, as plotly reads them


def _breaking(inputs: BenchInputs, curve: Sequence[Trial], here: Trial) -> Figure:
    """Measured error and certified bound over the one number that decides, and where the reader stands."""
    knob, colour = KNOBS[inputs.method], look(inputs.method).colour
    places, place = knob.places, knob.at(inputs)
    line = {"color": colour, "width": 2.5}

    def over(number: str) -> list[tuple[float, float]]:
        return [(at, getattr(one, number)) for at, one in zip(places, curve, strict=True)]

    def mark(number: str, symbol: str) -> Figure:
        point = [(place, getattr(here, number))]
        return _trace(point, "markers", marker=_marker(colour, symbol, 13), showlegend=False)

    traces = [
        _trace(over("bound"), "lines", name="certified bound", line=line | {"dash": "dash"}),
        _trace(over("error"), "lines", name="measured error", line=line, fill="tonexty", fillcolor=_faint(colour)),
        mark("bound", "circle-open"),
        mark("error", "circle"),
    ]
    if not math.isnan(here.read):
        dots = {"color": _GREY, "width": 2, "dash": "dot"}
        traces.append(_trace(over("read"), "lines", name="share of tokens read", line=dots))
    layout = _layout(knob.title, "error", min(one.error for one in (*curve, here)))
    label = {"text": "no use", "textposition": "start", "yanchor": "top", "font": {"size": 11}}
    level = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1.0, "y1": 1.0, "label": label}
    layout["shapes"] = [level | {"line": {"width": 1, "dash": "dot"}}]
    # Room for a mark at either end, and never another: what moves along the knob is moved alone.
    ends = math.log10(places[0]), math.log10(places[-1])
    room = 0.04 * (ends[1] - ends[0])
    layout["xaxis"] |= {"range": [ends[0] - room, ends[1] + room], "dtick": 1}
    return {"data": traces, "layout": layout}


def _promises(result: Trial) -> Figure:
    """Every row: what it is off by, and what was promised; on the line a bound would be met exactly."""
    colour, symbol, _ = look(result.method.name)
    rows = list(zip(result.errors.tolist(), result.bounds.tolist(), strict=True))
    rows.sort(key=lambda row: -row[0] / row[1] if row[1] > 0 else -math.inf)
    rows = rows[:: -(-len(rows) // _MARKS)]
    even = _trace([(_FLOOR, _FLOOR), (_CEILING, _CEILING)], "lines", line={"color": _GREY, "width": 1, "dash": "dot"})
    marks = _trace(rows, "markers", name="a row", marker=_marker(colour, symbol, 7) | {"opacity": 0.55})
    marks["hovertemplate"] = "measured %{x:.1e}<br>promised %{y:.1e}<extra></extra>"
    layout = _layout("measured error of a row", "its bound", min(error for error, _ in rows))
    layout["xaxis"] |= {"range": list(layout["yaxis"]["range"]), "dtick": 1}
    return {"data": [even | {"hoverinfo": "skip"}, marks], "layout": layout | {"showlegend": False}}


def _costs(results: Sequence[Trial], prices: Sequence[float], unit: str) -> Figure:
    """Every setting of every method: what it costs beside exact attention, its error, and above it its bound."""
    points = [(price, max(one.error, _FLOOR)) for one, price in zip(results, prices, strict=True)]
    best = sorted(point for point, wins in zip(points, frontier(points), strict=True) if wins)
    line = {"shape": "hv", "width": 6, "color": "rgba(125,133,144,.25)"}
    traces = [_trace(best, "lines", name="frontier", line=line, hoverinfo="skip")]
    for name in dict.fromkeys(one.method.name for one in results):
        own = [(one, price) for one, price in zip(results, prices, strict=True) if one.method.name == name]
        colour, symbol, _ = look(name)
        texts = {"text": [_hover(*pair) for pair in own], "hovertemplate": "%{text}<extra></extra>"}
        measured, words = [(price, one.error) for one, price in own], _words(name)
        if own[0][0].own_mechanism:
            marker = {"color": colour, "symbol": "x-thin", "size": 10, "line": {"width": 2, "color": colour}}
            traces.append(_trace(measured, "markers", name=f"{words} (another mechanism)", marker=marker, **texts))
            continue
        stems = [(price, y) for one, price in own for y in (one.error, one.bound, math.nan)]
        bounds = [(price, one.bound) for one, price in own]
        traces += [
            _trace(stems, "lines", line={"color": colour, "width": 1}, hoverinfo="skip"),
            _trace(measured, "markers", name=words, marker=_marker(colour, symbol, 10), **texts),
            _trace(bounds, "markers", marker=_marker(colour, f"{symbol}-open", 10), **texts),
        ]
    layout = _layout(f"{unit} beside exact attention", "error", min(one.error for one in results))
    layout["xaxis"] |= {"tickvals": list(_PRICES), "ticktext": [f"{price:g}×" for price in _PRICES]}
    upright = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot"}}
    # A legend of plotly's would leave a phone no room for the figure.
    return {"data": traces, "layout": layout | {"shapes": [upright], "showlegend": False}}


def _legend(results: Sequence[Trial]) -> list[dict[str, str]]:
    """How each method is drawn, in words and as a letter."""
    kinds = {one.method.name: one.own_mechanism for one in results}
    return [
        {
            "words": f"{_words(name)}, another mechanism" if own else _words(name),
            "colour": look(name).colour,
            "mark": "×" if own else _LETTERS.get(look(name).symbol, "●"),
        }
        for name, own in kinds.items()
    ]


def _words(name: str) -> str:
    """A method's name as a reader says it."""
    return name.replace("_", " ")


def _hover(result: Trial, price: float) -> str:
    error = formatting.error(result.error)
    last = f"{error} measured, {formatting.error(result.bound)} promised"
    if result.own_mechanism:
        last = f"{error} from softmax attention: it is another mechanism"
    return "<br>".join([f"<b>{result.label}</b>", f"{formatting.ratio(price)} of exact attention", last])


def _layout(x: str, y: str, lowest: float) -> dict[str, Any]:
    """Two axes in factors; the upright one holds all from the lowest error, in steps that do not follow every move."""
    power = {"type": "log", "exponentformat": "power"}
    bottom = max(2 * math.floor(math.log10(max(lowest, _FLOOR)) / 2 - 0.05), math.log10(_FLOOR))
    upright = {"range": [bottom, math.log10(_CEILING)], "dtick": 1 if bottom > -5 else 2}
    return {"xaxis": {**power, "title": {"text": x}}, "yaxis": {**power, "title": {"text": y}, **upright}}


def _trace(points: Sequence[tuple[float, float]], mode: str, **more: Any) -> Figure:
    """Points, those below the floor on it; gaps where there is no number."""
    y = [max(y, _FLOOR) if math.isfinite(y) else None for _, y in points]
    x = [max(x, _FLOOR) if mode == "markers" else x for x, _ in points]
    return {"type": "scatter", "x": x, "y": y, "mode": mode, **more}


def _marker(colour: str, symbol: str, size: int) -> dict[str, Any]:
    return {"color": colour, "symbol": symbol, "size": size, "line": {"width": 2, "color": colour}}


def _faint(colour: str) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},.12)"


PAGE = Page(
    name="bench",
    title="Approximation bench",
    summary="Make a method fail, and see its certificate say so first: bound beside measured error, cost beside both.",
    order=20,
    inputs=BenchInputs,
    preview=preview,
    verdict=verdict,
    presets={
        "Random features, norms grow": {},
        "Low rank, clusters": {"method": "low_rank", "kind": "clustered"},
        "Low rank, copying": {"method": "low_rank", "kind": "copying", "rank": 64},
        "Sparse, clusters": {"method": "sparse", "kind": "clustered"},
        "Sparse, nothing to skip": {"method": "sparse", "kind": "diffuse"},
    },
    seconds=60.0,
    takes_files=True,
)
