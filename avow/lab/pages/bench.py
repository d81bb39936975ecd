"""The approximation bench: a method, a head, and the one number that breaks it; the bound beside the measured error."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

import avow
from avow.bench.clock import pace
from avow.calibration import rates
from avow.core import Method
from avow.errors import AvowError
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.lab.pages import bench_figures as figures
from avow.lab.pages.bench_heads import Head, Tried, drawn, read_by, tried, uploaded
from avow.methods import method_named
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.sparse import Sparse
from avow.planner import candidates
from avow.report import formatting

# A preview looks at so many keys at most, and asks them so many queries.
_KEYS, _QUERIES = 512, 128
# Sparse attention weighs each row by itself, and slowly here: so many rows tell enough of it while one moves, so many
# pairs of rows and keys when one lets go, and so many beside other methods.
_ROWS, _PAIRS, _ASIDE = 20, 1 << 18, 1 << 16
# What a reader wants in the end: an error that a model does not notice.
GOAL = 1e-2
# An error of one is as long as the longest value.
_USEFUL = 1.0


class Benched(Inputs):
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
        0.03,
        "Tolerance: what unread tokens may move",
        low=1e-4,
        high=0.5,
        log=True,
        when={"method": ("sparse",)},
    )
    n: int = control(512, "Tokens (n)", low=64, high=2048, step=64)
    d: int = control(32, "Numbers per token (d)", low=8, high=128, step=8, about="A file has its own.")
    head: int = control(0, "Draw, or head of the file", low=0, high=31)
    cost: Literal["operations", "time"] = control("operations", "Cost counted in")
    file: str | None = Field(default=None, max_length=32)


class Knob(NamedTuple):
    """The number that decides how good a method is: where it is tried, and what it makes of head and method."""

    title: str
    places: tuple[float, ...]
    at: Callable[[Benched], float]
    put: Callable[[Head, Benched, float], tuple[Head, Method]]


def _whole(x: float, head: Head) -> int:
    return min(round(x), head.k.shape[-2])


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
        lambda head, inputs, x: (head, LowRank(rank=_whole(x, head))),
    ),
    "sparse": Knob(
        "tolerance",
        (1e-4, 1e-3, 5e-3, 2e-2, 0.1, 0.5),
        lambda inputs: inputs.drop,
        lambda head, inputs, x: (head, Sparse(drop=x)),
    ),
}


def preview(inputs: Benched, tensors: dict[str, Tensor]) -> Answer:
    """Some rows of the head, its answer and its certificate, and how both change along the knob."""
    base, curve = _at_rest(_resting(inputs), tensors)
    knob = KNOBS[inputs.method]
    head, method = knob.put(base, inputs, knob.at(inputs))
    found, lit = read_by(head, method) if isinstance(method, Sparse) else (tried(head, method), None)
    drawn_curve = figures.breaking(inputs.method, knob.title, knob.places, curve, (knob.at(inputs), found))
    return {
        "facts": _facts(found, head, f"of {len(found.errors)} rows over {head.k.shape[-2]} keys, in float64"),
        "figures": {"breaking": drawn_curve, "promises": figures.promises(found)},
        "strip": {"rows": lit, "tokens": head.k.shape[-2]} if lit else None,
    }


def verdict(inputs: Benched, tensors: dict[str, Tensor]) -> Answer:
    """Every row at the size that was asked for; every other method beside it."""
    base = _head(inputs, tensors, inputs.n)
    knob = KNOBS[inputs.method]
    head, method = knob.put(base, inputs, knob.at(inputs))
    found = tried(_asked(head, method, _PAIRS), method)
    others = _others(head)
    prices = [_price(head, one, inputs.cost) for one in others]
    title = f"{inputs.cost} beside exact attention"
    rows, keys = len(found.errors), head.k.shape[-2]
    facts = _facts(found, head, f"of {rows} rows over {keys} keys, in float64")
    facts.append(_automatic(head))
    return {
        "facts": facts,
        "figures": {"promises": figures.promises(found), "costs": figures.costs(others, prices, title)},
        "legend": figures.legend(others),
        "verdict": judged(found, rows),
    }


def judged(found: Tried, rows: int) -> dict[str, Any]:
    """The verdict's words: a promise that says something and is kept, one that warns, or one that was broken."""
    certificate, name = found.certificate, figures.words_of(found.method.name).capitalize()
    error, bound = f"{found.error:.2g}", f"{found.bound:.2g}"
    likely = "" if certificate.kind == "deterministic" else f" with probability {certificate.confidence:g}"
    steps = [
        f"{rows} rows were answered in float32 or wider and compared with float64",
        f"the certificate is {certificate.kind}{likely}, rounding included",
        *certificate.assumptions,
        *([certificate.reason] if certificate.reason else []),
    ]
    # A statistical promise is made to each row, and may be broken as often as it says.
    if found.broken > (1 - certificate.confidence) * rows:
        says = f"{found.broken} of {rows} rows are further off than {name.lower()} promised."
        return {"tone": "refuted", "word": "broken", "says": says, "steps": steps}
    if found.bound >= _USEFUL:
        after = "and the answer is" if found.error > GOAL else "though the answer is only"
        says = f"{name} gave warning: the certificate promises no better than {bound}, {after} off by {error}."
        return {"tone": "corrected", "word": "warned", "says": says, "steps": steps}
    says = f"Each of {rows} rows is within its promise of at most {bound}{likely}; the worst is off by {error}."
    return {"tone": "proved", "word": "kept", "says": says, "steps": steps}


def _head(inputs: Benched, tensors: dict[str, Tensor], most: int) -> Head:
    length = min(inputs.n, most)
    return uploaded(tensors, length, inputs.head) if inputs.file else drawn(inputs.kind, length, inputs.d, inputs.head)


def _resting(inputs: Benched) -> Benched:
    """The same inputs with what moves along the curve, or moves it not at all, at rest: a key to remember them by."""
    still = {name: Benched.model_fields[name].default for name in ("norm", "rank", "drop", "cost")}
    if inputs.method != "random_features":
        still["features"] = Benched.model_fields["features"].default
    return inputs.model_copy(update=still | {"n": min(inputs.n, _KEYS)})


# What does not move with the knob, of the last few states. A file is known by its handle, one of the inputs.
_known: OrderedDict[Benched, tuple[Head, tuple[Tried, ...]]] = OrderedDict()
_MOST_KNOWN = 8


def _at_rest(inputs: Benched, tensors: dict[str, Tensor]) -> tuple[Head, tuple[Tried, ...]]:
    """The head as a preview sees it, and what the method makes of it along the whole knob."""
    if inputs not in _known:
        knob = KNOBS[inputs.method]
        head = _head(inputs, tensors, _KEYS).rows(_ROWS if inputs.method == "sparse" else _QUERIES)
        _known[inputs] = head, tuple(tried(*knob.put(head, inputs, place)) for place in knob.places)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[inputs]


def _asked(head: Head, method: Method, pairs: int) -> Head:
    """All rows, or as many as a slow method has time for."""
    return head.rows(max(16, pairs // head.k.shape[-2])) if method.name == "sparse" else head


def _others(head: Head) -> list[Tried]:
    """Every setting of every method that runs on this head, in the order of what exact attention's planner expects."""
    found = []
    for offer in candidates(head.problem.sizes, rates("cpu", measure=False)):
        try:
            found.append(tried(_asked(head, offer.method, _ASIDE), offer.method))
        except AvowError:
            continue  # What cannot be had for this head has no place among the costs.
    return found


def _price(head: Head, found: Tried, unit: str) -> float:
    """What a method costs beside exact attention of the same rows."""
    if unit == "operations":
        return found.operations
    some = _asked(head, found.method, _ASIDE)
    exact = method_named("exact")()

    def call(method: Method) -> Callable[[], object]:
        return lambda: method.compute(some.problem, torch.Generator().manual_seed(0))

    with torch.no_grad():
        return pace(call(found.method), call(exact), torch.device("cpu"), 3).ratio


def _automatic(head: Head) -> dict[str, str]:
    with torch.no_grad():
        chosen = avow.attend(head.q, head.k, head.v, tol=GOAL, confidence=0.99).certificate
    return fact(f"attend(tol={GOAL:g}) runs", chosen.method, f"the quickest that proves it: {chosen.bound:.2g}")


def _facts(found: Tried, head: Head, about: str) -> list[dict[str, str]]:
    certificate = found.certificate
    kind = certificate.kind if certificate.kind == "deterministic" else f"with probability {certificate.confidence:g}"
    facts = [
        fact("Largest error", f"{found.error:.2g}", about),
        fact("Certificate", f"error ≤ {found.bound:.2g}", kind),
    ]
    if found.method.name != "sparse":  # which saves reading, not arithmetic
        facts.append(fact("Operations", formatting.ratio(found.operations), "of exact attention's"))
    if found.method.name == "random_features":
        needed = avow.features_needed(head.q, head.k, tol=GOAL)
        count = "hopeless" if math.isinf(needed.features) else f"{needed.features:,.0f}"
        facts.append(fact(f"Features for {GOAL:g}", count, f"they grow as exp(|q+k|²), here {needed.radius:.3g}²"))
    if found.method.name == "sparse":
        facts.append(fact("Tokens read in full", f"{found.read:.1%}", "of those that a row may see"))
    return facts


PAGE = Page(
    name="bench",
    title="Approximation bench",
    summary="Make a method fail, and see its certificate say so first: bound beside measured error, cost beside both.",
    order=20,
    inputs=Benched,
    preview=preview,
    verdict=verdict,
    sign=(
        '<path class="faint" d="M4 44h88M4 44V4"/><path stroke-dasharray="4 4" d="M6 30 30 16 50 10H90"/>'
        '<path d="M6 42 34 38 56 30 72 18 90 12"/>'
    ),
    body="""<div class="panel first"><h2>Where it breaks</h2>
<p class="soft">Dashed what is promised, solid what is measured. An error of 1 is as long as the longest value.</p>
</div><div class="figure stays" id="breaking"></div>
<div class="panel" id="strip" hidden><h2>What was read</h2>
<p class="soft"><span id="read"></span> A line is a query, a column is a token, lit where it was read in full: the
brighter, the more it weighs.</p>
<canvas id="tokens" role="img" aria-label="Tokens read"></canvas></div>
<div class="panel"><h2>Error against cost, all methods</h2>
<p class="soft">Filled what is measured, open what is promised. Left of the dotted line is cheaper than exact.</p>
<p class="legend" id="methods"></p>
<div class="figure" id="costs"></div></div>
<div class="panel"><h2>Every row and its promise</h2>
<p class="soft">A mark below the dotted line would be a broken promise.</p>
<div class="figure" id="promises"></div></div>""",
    formulas=(
        r"\frac{\|\mathrm{out}_i - o^*_i\|}{\max_j \|v_j\|} \le \mathrm{bound}_i \quad \text{for every row } i",
        r"\text{random features:} \quad \text{relative variance} \approx \frac{e^{\|q+k\|^2} - 1}{m}",
    ),
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
