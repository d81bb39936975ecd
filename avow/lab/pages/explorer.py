"""The attention explorer: keys around a circle or on a sphere, and a query to drag."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

import avow
from avow.core import Certificate
from avow.core.chart import Chart
from avow.errors import OutOfReach, ParameterError
from avow.lab.page import Answer, Inputs, Page, control, fact, judgement
from avow.report import formatting
from avow.report.charts import figure
from avow.theory.constructions import (
    AverageQuery,
    CopyQuery,
    DiscreteLaw,
    GaussianLaw,
    NoiseAnalysis,
    RobustHeads,
    Router,
    average_query,
    copy_query,
    noise_analysis,
    robust_heads,
    router,
)
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.queries import Query, Readout, enclosed, read

# The success of heads under noise: weights within this of the average, in the sum of their distances.
_ETA = 0.1
# The noisy key's picture: as many orthonormal keys as a sphere has room for.
_AXES = 3
_MOST_LENGTH = 40.0
# Queries are drawn so many times shorter than keys are.
_UNIT = 30.0
_GAP = "over any other key"

_LOOKING = {"show": ("copy", "average")}
_ROUND = {"show": ("copy", "average", "route")}
_NOISE = {"show": ("noise",)}

Law = DiscreteLaw | GaussianLaw


@dataclass(frozen=True)
class ExplorerInputs(Inputs):
    show: Literal["copy", "average", "noise", "route"] = control("copy", "What the head does", quiet=True)
    space: Literal["plane", "sphere"] = control("plane", "Keys on the", when=_LOOKING)
    n: int = control(8, "Number of keys", low=3, high=12, when=_ROUND)
    target: int = control(1, "Key to read", low=0, high=11, below="n", when=_LOOKING)
    other: int = control(2, "And key", low=0, high=11, below="n", when={"show": ("average",)})
    ahead: int = control(2, "Steps ahead that each token reads", low=0, high=11, below="n", when={"show": ("route",)})
    angle: float | None = control(None, "Direction (°)", low=-180, high=180, step=1, when=_ROUND)
    rise: float | None = control(
        None, "Height above the equator (°)", low=-90, high=90, step=1, when=_LOOKING | {"space": ("sphere",)}
    )
    length: float | None = control(None, "Length of the query", low=0, high=_MOST_LENGTH, step=0.1, when=_LOOKING)
    heads: Literal["one", "two"] = control("one", "Heads", when=_NOISE)
    law: Literal["1 ± c", "Gaussian"] = control("1 ± c", "Noise on key 0", when=_NOISE)
    c: float = control(
        0.5,
        "c: the key is scaled by 1 − c or 1 + c",
        low=0.05,
        high=0.95,
        step=0.05,
        when=_NOISE | {"law": ("1 ± c",)},
    )
    variance: float = control(
        0.25, "Variance of the scale", low=0.01, high=1, log=True, when=_NOISE | {"law": ("Gaussian",)}
    )
    x: float = control(0.5, "X: this draw of the scale", low=-1, high=2, step=0.01, when=_NOISE)
    eps: float = control(
        0.01, "ε: what may go elsewhere", low=0.001, high=0.3, log=True, about="Smaller asks for a longer query."
    )


@dataclass(frozen=True)
class Scene:
    """Tensors in float32, as a model would hold them, and the construction that promises something of them."""

    keys: Float[Tensor, "n d"]
    values: Float[Tensor, "n d"]
    queries: Float[Tensor, "h d"]
    construction: Construction | None
    # The keys that are meant to be read.
    wanted: tuple[int, ...]
    # What the reader can take hold of: where it is, and how it moves.
    handle: dict[str, Any]
    shown: dict[str, float] = field(default_factory=dict)
    refusal: OutOfReach | None = None

    def read(self) -> Readout:
        return read(self.queries, self.keys, self.values)

    @property
    def first_wanted(self) -> tuple[int, ...]:
        """The keys that the first head is to read: all that are wanted, or the first if each has a head of its own."""
        return self.wanted if len(self.queries) == 1 else self.wanted[:1]


def preview(inputs: ExplorerInputs) -> Answer:
    """What the head reads, in float64, and the certificate of the float32 answer."""
    scene = _scene(inputs)
    readout = scene.read()
    output = readout.outputs.mean(0)
    facts = [
        fact("Logit gap", f"{readout.gap(scene.first_wanted):.4g}", _GAP),
        fact("Length of the query", f"{float(scene.queries[0].double().norm()):.4g}"),
    ]
    if isinstance(scene.construction, Query):
        about = f"the promise asks for at most {inputs.eps:g}"
        facts.append(fact("Goes elsewhere, over what is read", f"{scene.construction.estimate:.3g}", about))
    if inputs.show == "noise":
        aim = torch.zeros_like(readout.weights[0])
        aim[:2] = 0.5
        distance = float((readout.weights.mean(0) - aim).abs().sum())
        facts.append(fact("Off the average of keys 0 and 1", f"{distance:.3g}", f"at most {_ETA:g} is a success"))
    facts += [_output(output.tolist()), _certified(_attended(scene)[1])]
    # Everything is drawn in the units of keys, queries divided by `unit`.
    stage: Answer = {
        "keys": scene.keys,
        "values": scene.values,
        "queries": scene.queries,
        "weights": readout.weights.mean(0),
    }
    stage |= {"outputs": output, "wanted": scene.wanted, "handle": scene.handle, "unit": _UNIT}
    return {"shown": scene.shown, "stage": stage, "facts": facts, "figures": {"curve": _curve(inputs, scene)}}


def verdict(inputs: ExplorerInputs) -> Answer:
    """The same in ball arithmetic, the promise proved or refuted, and the certificate held to account."""
    scene = _scene(inputs)
    answers, certificate = _attended(scene)
    true = enclosed(scene.queries, scene.keys, scene.values, answers, scene.first_wanted)
    low, high = (sum(true.weights[i][end] for i in scene.wanted) for end in (0, 1))
    facts = [fact("Logit gap", _between(true.gap), _GAP), fact("Weight of what is read", _between((low, high)))]
    if inputs.show == "noise":
        about = f"of weights within {_ETA:g} of ½ and ½"
        for name, odds in _odds(inputs.eps, _law(inputs)).items():
            facts.append(fact(f"Chance with {name} head{'s' if name == 'two' else ''}", _between(odds.success), about))
    facts += [_output([sum(ends) / 2 for ends in true.output]), _certified(certificate)]
    holds = true.error <= certificate.bound
    step = (
        f"the float32 answer is within {true.error:.2e} of real arithmetic, and its certificate "
        f"{'promised' if holds else 'BROKE its promise of'} {certificate.bound:.2e}"
    )
    judged = _judged(inputs, scene)
    judged["steps"] = [*judged["steps"], step]
    if not holds:
        judged |= {"tone": "refuted", "word": "broken", "says": step}
    return {"facts": facts, "verdict": judged}


def _judged(inputs: ExplorerInputs, scene: Scene) -> Answer:
    wanted = formatting.listed([str(key) for key in scene.wanted])
    if scene.refusal is not None:
        keys = formatting.listed([str(i) for i, share in enumerate(scene.refusal.combination) if share])
        says = f"No query reads just keys {wanted} alike: keys {keys} rule it out, exactly."
        return judgement("refuted", "impossible", says, [str(scene.refusal)])
    if inputs.show == "noise":
        odds = _odds(inputs.eps, _law(inputs))
        one, two = (100 * odds[name].success[0] for name in ("one", "two"))
        says = f"One head stays near the average in {one:.3g}% of draws, two heads in {two:.4g}%."
        steps = ["each head's weight is a logistic function of X, and the law's mass is enclosed where it succeeds"]
        return judgement("proved", "proved", says, steps)
    assert scene.construction is not None
    proof = scene.construction.verify()
    if proof.achieved == math.inf:
        return judgement("none", "undecided", proof.promise, list(proof.steps))
    if isinstance(scene.construction, Router):
        says = f"Each of {inputs.n} tokens receives what its source carries, within {proof.achieved:.3g}."
    else:
        one_key = len(scene.wanted) == 1
        keys = f"Key {wanted} gets" if one_key else f"Keys {wanted} each get"
        share = f"1/({len(scene.wanted)} + {inputs.eps:g})"
        most = f"a weight of at least {share}" if proof else f"less than the weight {share} this query should give"
        says = f"{keys} {most}."
    steps = [f"promised {proof.bound:.6g}, proved {proof.achieved:.6g}", *proof.steps]
    return judgement("proved" if proof else "refuted", "kept" if proof else "not kept", says, steps)


def _attended(scene: Scene) -> tuple[Float[Tensor, "h d"], Certificate]:
    """Attention as the library computes it, head by head in float32, with its certificate."""
    keys, values = (x.expand(len(scene.queries), *x.shape)[None] for x in (scene.keys, scene.values))
    out, certificate = avow.attend(scene.queries[None, :, None], keys, values, scale=1.0)
    return out[0, :, 0], certificate


# ---- what stands on the stage


def _scene(inputs: ExplorerInputs) -> Scene:
    match inputs.show:
        case "noise":
            return _noisy(inputs.eps, _law(inputs), inputs.heads, inputs.x)
        case "route":
            return _routing(inputs, _key(inputs, "ahead"))
        case "copy":
            return _looking(inputs, (_key(inputs, "target"),))
        case "average":
            wanted = _key(inputs, "target"), _key(inputs, "other")
            if wanted[0] == wanted[1]:
                raise ParameterError("other", wanted[1], "must be another key than the first", "move either of the two")
            return _looking(inputs, wanted)


def _key(inputs: ExplorerInputs, name: Literal["target", "other", "ahead"]) -> int:
    """One of the keys that there are."""
    number: int = getattr(inputs, name)
    if number >= inputs.n:
        raise ParameterError(name, number, f"must be below the number of keys, {inputs.n}", "move it to the left")
    return number


def _looking(inputs: ExplorerInputs, wanted: tuple[int, ...]) -> Scene:
    """One query that copies a key or averages two; the reader may have turned it or changed its length."""
    keys = _around(inputs.space, inputs.n)
    start = _query(inputs.space, inputs.n, wanted, inputs.eps)
    refusal = start if isinstance(start, OutOfReach) else None
    # No query does it; halfway between the two is where one would look for it.
    query = keys[list(wanted)].mean(0) * 10 if isinstance(start, OutOfReach) else start
    moved = {"angle": inputs.angle, "rise": inputs.rise, "length": inputs.length}
    if any(value is not None for value in moved.values()):
        own = bearings(query)
        query = pointed(keys.shape[1], **{name: own[name] if value is None else value for name, value in moved.items()})
    eps, one_key = inputs.eps, len(wanted) == 1
    promise = CopyQuery(query, keys, eps, wanted[0]) if one_key else AverageQuery(query, keys, eps, wanted)
    handle = {"kind": inputs.space, "name": "query", "at": query}
    return Scene(keys, keys, query[None], promise, wanted, handle, bearings(query), refusal)


@functools.lru_cache(256)
def _query(space: str, n: int, wanted: tuple[int, ...], eps: float) -> Float[Tensor, " d"] | OutOfReach:
    """The query that copies one key or averages two, or the proof that there is none."""
    keys = _around(space, n)
    if len(wanted) == 1:
        return copy_query(keys, wanted[0], eps, dtype=torch.float32).query
    try:
        return average_query(keys, (wanted[0], wanted[1]), eps, dtype=torch.float32).query
    except OutOfReach as refusal:
        return refusal


def _noisy(eps: float, law: Law, heads: str, scale: float) -> Scene:
    """Orthonormal keys, the first of them scaled by X; one head that looks at two keys, or a head for each."""
    axes = torch.eye(_AXES)
    keys = axes.clone()
    keys[0] *= scale
    construction = _heads(eps, law)[heads]
    handle = {"kind": "ray", "name": "noisy key", "at": keys[0], "along": axes[0]}
    robust = construction if isinstance(construction, RobustHeads) else None
    return Scene(keys, axes, _queries(construction).float(), robust, (0, 1), handle)


@functools.lru_cache(256)
def _heads(eps: float, law: Law) -> dict[str, AverageQuery | RobustHeads]:
    """One head and two heads for the average of keys 0 and 1."""
    one = average_query(torch.eye(_AXES), (0, 1), eps, dtype=torch.float32)
    least = float(min(law.values)) if isinstance(law, DiscreteLaw) else law.mean / 2
    return {"one": one, "two": robust_heads(_AXES, eps, law, least=least, dtype=torch.float32)}


def _queries(heads: AverageQuery | RobustHeads) -> Float[Tensor, "h d"]:
    return heads.queries if isinstance(heads, RobustHeads) else heads.query[None]


def _law(inputs: ExplorerInputs) -> Law:
    """How the noisy key is scaled: by 1 − c or 1 + c, or by a Gaussian around 1."""
    if inputs.law == "Gaussian":
        return GaussianLaw(1.0, inputs.variance)
    step, half = Fraction(inputs.c).limit_denominator(1000), Fraction(1, 2)
    return DiscreteLaw((1 - step, 1 + step), (half, half))


@functools.lru_cache(64)
def _odds(eps: float, law: Law) -> dict[str, NoiseAnalysis]:
    """What the noise does to one head and to two: the exact law of their weights."""
    rows = {name: _queries(heads).double().tolist() for name, heads in _heads(eps, law).items()}
    return {name: noise_analysis(_AXES, [dict(enumerate(q)) for q in own], law, _ETA) for name, own in rows.items()}


def _routing(inputs: ExplorerInputs, ahead: int) -> Scene:
    """One head in which each token reads the one so many steps ahead; the reader moves a token around."""
    head = _router(inputs.n, ahead, inputs.eps)
    token = pointed(2, inputs.angle or 0.0, 0.0, 1.0)
    query = (head.scale * (head.W_Q.double() @ token.double())).float()
    keys, values = head.tokens @ head.W_K.mT, head.tokens @ head.W_V.mT
    handle = {"kind": "ring", "name": "token", "at": token}
    wanted = (head.routes[int((head.tokens @ token).argmax())][0],)
    return Scene(keys, values, query[None], head, wanted, handle, {"angle": bearings(token)["angle"]})


@functools.lru_cache(256)
def _router(n: int, ahead: int, eps: float) -> Router:
    return router(_around("plane", n), {i: (i + ahead) % n for i in range(n)}, eps)


def _around(space: str, n: int) -> Float[Tensor, "n d"]:
    """n points around a circle, or on a sphere."""
    if space == "sphere":
        return sphere(n)
    turns = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack((turns.cos(), turns.sin()), 1).float()


def sphere(n: int) -> Float[Tensor, "n 3"]:
    """n points spread over a sphere, along a spiral of golden angles; turned so that the second faces the reader."""
    places = torch.arange(n, dtype=torch.float64) + 0.5
    height, turns = 1 - 2 * places / n, (places - 1.5) * math.pi * (3 - math.sqrt(5)) + 0.6
    reach = (1 - height * height).sqrt()
    return torch.stack((reach * turns.cos(), reach * turns.sin(), height), 1).float()


def pointed(dims: int, angle: float, rise: float, length: float) -> Float[Tensor, " d"]:
    """The vector of a length that looks there; angles in degrees, `rise` above the equator."""
    turn, up = math.radians(angle), math.radians(rise if dims == 3 else 0.0)
    ends = [math.cos(up) * math.cos(turn), math.cos(up) * math.sin(turn), math.sin(up)]
    return (torch.tensor(ends[:dims], dtype=torch.float64) * length).float()


def bearings(x: Float[Tensor, " d"]) -> dict[str, float]:
    """Where a vector looks, and its length: `pointed` the other way round."""
    first, second, third = (*x.double().tolist(), 0.0)[:3]
    flat = math.hypot(first, second)
    angles = {"angle": math.degrees(math.atan2(second, first)), "rise": math.degrees(math.atan2(third, flat))}
    return angles | {"length": math.hypot(flat, third)}


# ---- what is shown


def _curve(inputs: ExplorerInputs, scene: Scene) -> dict[str, Any]:
    """Weights over the one number that matters: the scale of the noisy key, or the length of the query."""
    now = scene.read().weights.mean(0)
    if inputs.show == "noise":
        series = _over_scales(inputs.eps, _law(inputs)) | {"this draw": ([inputs.x], [float(now[0])])}
        chart = Chart("Weight of the noisy key", "X, the scale of key 0", "weight of key 0", series)
        ends = [-1.05, 2.05]
    else:
        query, wanted = scene.queries[0].double(), list(scene.wanted)
        length = float(query.norm())
        lengths = [_MOST_LENGTH * i / 80 for i in range(81)]
        along = query / length if length > 0 else query
        weights = read(along * torch.tensor(lengths, dtype=torch.float64)[:, None], scene.keys, scene.values).weights
        series = {f"key {i}": (lengths, weights[:, i].tolist()) for i in wanted}
        series["all others"] = (lengths, (1 - weights[:, wanted].sum(1)).tolist())
        series["this query"] = ([length], [float(now[wanted[0]])])
        chart = Chart("Weights as the query grows", "length of the query", "weight", series)
        ends = [-0.6, _MOST_LENGTH + 0.6]
    drawn = figure(chart)
    # Weights keep their whole range, so that nothing jumps while the query moves.
    drawn["layout"]["xaxis"]["range"], drawn["layout"]["yaxis"]["range"] = ends, [-0.03, 1.05]
    return drawn


@functools.lru_cache(64)
def _over_scales(eps: float, law: Law) -> dict[str, tuple[list[float], list[float]]]:
    """The noisy key's weight at every scale, for one head and for two."""
    scales = [i / 25 - 1 for i in range(76)]
    return {
        f"{name} head{'s' if name == 'two' else ''}": (
            scales,
            [float(_noisy(eps, law, name, scale).read().weights.mean(0)[0]) for scale in scales],
        )
        for name in ("one", "two")
    }


def _certified(certificate: Certificate) -> dict[str, str]:
    return fact("Certificate", f"error ≤ {certificate.bound:.2e}", f"{certificate.kind}, float32, rounding included")


def _output(x: Iterable[float]) -> dict[str, str]:
    return fact("Output", "(" + ", ".join(f"{part:.3f}" for part in x) + ")")


def _between(ends: tuple[float, float]) -> str:
    """As many digits as both ends share, at most ten."""
    for digits in range(10, 1, -1):
        low, high = (f"{end:.{digits}g}" for end in ends)
        if low == high:
            return low
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


PAGE = Page(
    name="explorer",
    title="Attention explorer",
    summary="Drag the query, and see what it reads. Longer is sharper; a scaled key fools one head, and not two.",
    order=10,
    inputs=ExplorerInputs,
    preview=preview,
    verdict=verdict,
    presets={
        "Copy one": {},
        "Average two": {"show": "average"},
        "A noisy key, one head": {"show": "noise"},
        "… two heads": {"show": "noise", "heads": "two"},
        "Route tokens": {"show": "route"},
    },
)
