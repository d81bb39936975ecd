"""One head by hand: keys around a circle or on a sphere, and a query; all of them can be dragged."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

import avow
from avow.core import Certificate
from avow.core.chart import Chart
from avow.errors import InsideHull, OutOfReach, ParameterError, ToleranceUnreachable
from avow.lab.page import Answer, Inputs, Page, Presets, Words, control, expectation, judgement
from avow.report.charts import figure
from avow.theory.constructions import (
    AverageQuery,
    CopyQuery,
    DiscreteLaw,
    GaussianLaw,
    RobustHeads,
    Router,
    average_query,
    copy_query,
    noise_analysis,
    robust_heads,
    router,
)
from avow.theory.constructions.construction import Construction
from avow.theory.constructions.queries import Enclosed, Query, Readout, enclosed, read

# The success of heads under noise: weights within this of the average, in the sum of their distances.
_ETA = 0.1
# The noisy key's picture: as many orthonormal keys as a sphere has room for.
_AXES = 3
_MOST_LENGTH = 40.0
# Queries are drawn so many times shorter than keys are.
_UNIT = 30.0
# How far from the middle a key may be moved along each axis; the stage shows a little more.
_EDGE = 1.3
# Heads that route are built this much better than asked, or a token a hair beside its place would break the promise.
_SPARE = 2

_LOOKING = {"show": ("copy", "average")}
_ROUND = {"show": ("copy", "average", "route")}
_ON_SPHERE = _LOOKING | {"space": ("sphere",)}
_NOISE = {"show": ("noise",)}
_STEP, _GAUSSIAN = _NOISE | {"law": ("1 ± c",)}, _NOISE | {"law": ("Gaussian",)}
_WORDS = Words("explorer.txt")

_NAMES = {"one": "one head", "two": "two heads"}

Law = DiscreteLaw | GaussianLaw
Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ExplorerInputs(Inputs):
    show: Literal["copy", "average", "noise", "route"] = control("copy", "What the head does", quiet=True)
    space: Literal["plane", "sphere"] = control("plane", "Keys on the", when=_LOOKING)
    n: int = control(8, "Number of keys", (3, 12), when=_ROUND)
    target: int = control(1, "Key to read", (0, 11), below="n", when=_LOOKING)
    other: int = control(2, "And key", (0, 11), below="n", when={"show": ("average",)})
    ahead: int = control(2, "Steps ahead that each token reads", (0, 11), below="n", when={"show": ("route",)})
    angle: float | None = control(None, "Direction (°)", (-180, 180), step=1, when=_ROUND)
    rise: float | None = control(None, "Height above the equator (°)", (-90, 90), step=1, when=_ON_SPHERE)
    keys: str = control("", "Keys that were moved", longest=480, quiet=True)
    length: float | None = control(None, "Length of the query", (0, _MOST_LENGTH), step=0.1, when=_LOOKING)
    heads: Literal["one", "two"] = control("one", "Heads", when=_NOISE)
    law: Literal["1 ± c", "Gaussian"] = control("1 ± c", "Noise on key 0", when=_NOISE)
    c: float = control(0.5, "c: the key is scaled by 1 − c or 1 + c", (0.05, 0.95), step=0.05, when=_STEP)
    variance: float = control(0.25, "Variance of the scale", (0.01, 1), log=True, when=_GAUSSIAN)
    x: float = control(0.5, "X: this draw of the scale", (-1, 2), step=0.01, when=_NOISE)
    eps: float = control(
        0.01, "ε: what may go elsewhere", (0.001, 0.3), log=True, about="Smaller asks for a longer query."
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
    refusal: InsideHull | OutOfReach | None = None

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
    weights, output = readout.weights.mean(0), readout.outputs.mean(0)
    elsewhere = scene.construction.estimate if isinstance(scene.construction, Query) else None
    distance = None
    if inputs.show == "noise":
        distance = float((weights[:2] - 0.5).abs().sum() + weights[2:].sum())
    gap, length = readout.gap(scene.first_wanted), float(scene.queries[0].double().norm())
    stage: Answer = {"keys": scene.keys, "values": scene.values, "queries": scene.queries, "weights": weights}
    # Everything is drawn in the units of keys, queries divided by `unit`.
    stage |= {"outputs": output, "wanted": scene.wanted, "handle": scene.handle, "unit": _UNIT}
    stage |= {"show": inputs.show, "eps": inputs.eps, "eta": _ETA, "edge": _EDGE, "longest": _MOST_LENGTH}
    return {
        "shown": scene.shown,
        "live": _expected(inputs, scene, weights, output, distance),
        "python": _python(inputs, scene),
        "stage": stage,
        "facts": [
            *_WORDS.facts("read", gap, length, elsewhere, inputs.eps, distance, _ETA),
            *_WORDS.facts("answer", output.tolist(), _attended(scene)[1]),
        ],
        "figures": {"curve": _curve(inputs, scene, weights)},
    }


def verdict(inputs: ExplorerInputs) -> Answer:
    """The same in ball arithmetic, the promise proved or refuted, and the certificate held to account."""
    scene = _scene(inputs)
    answers, certificate = _attended(scene)
    true = enclosed(scene.queries, scene.keys, scene.values, answers, scene.first_wanted)
    weight = tuple(sum(true.weights[i][end] for i in scene.wanted) for end in (0, 1))
    chances = _chances(inputs.eps, _law(inputs)) if inputs.show == "noise" else {}
    judged, step = _judged(inputs, scene, true), _WORDS.say("certificate", true.error, certificate.bound)
    if true.error > certificate.bound:
        judged = judgement("refuted", "broken", step, judged["steps"])
    shortest = _least(scene, inputs.eps) if inputs.show == "copy" else None
    return {
        "facts": [
            *_WORDS.facts("enclosed", true.gap, weight, chances, _ETA, shortest),
            *_WORDS.facts("answer", [sum(ends) / 2 for ends in true.output], certificate),
        ],
        "verdict": judged | {"steps": [*judged["steps"], step]},
        # The keys that prove it impossible, for the stage.
        "shares": None if scene.refusal is None else [float(share) for share in _combination(scene.refusal)],
    }


def _python(inputs: ExplorerInputs, scene: Scene) -> str:
    """The calls that give the verdict."""
    more: dict[str, Any] = {}
    if inputs.show == "route":
        more = {"routes": routes_ahead(inputs.n, inputs.ahead), "built": inputs.eps / _SPARE}
    elif inputs.show == "noise":
        more = {"law": _law(inputs), "eta": _ETA}
    return _WORDS.html(f"python_{inputs.show}", inputs, scene, **more).strip()


def _expected(
    inputs: ExplorerInputs,
    scene: Scene,
    weights: Float[Tensor, " n"],
    output: Float[Tensor, " d"],
    distance: float | None,
) -> Answer:
    """What the verdict will be, as float64 sees it."""
    wanted = [str(key) for key in scene.wanted]
    if scene.refusal is not None:
        return expectation(False, _WORDS.say("hopeless", wanted), broken="impossible")
    if distance is not None:
        near = distance <= _ETA
        return expectation(near, _WORDS.say("drawn", distance, _ETA), "near the average", "off the average")
    if inputs.show == "route":
        off = float((output - scene.values[scene.wanted[0]].double()).norm())
        return expectation(off <= inputs.eps, _WORDS.say("held", wanted, off, inputs.eps))
    least = 1 / (len(wanted) + inputs.eps)
    given = [float(weights[key]) for key in scene.wanted]
    return expectation(min(given) >= least, _WORDS.say("given", wanted, given, least))


def _judged(inputs: ExplorerInputs, scene: Scene, true: Enclosed) -> Answer:
    wanted = [str(key) for key in scene.wanted]
    if scene.refusal is not None:
        shares = {str(i): float(share) for i, share in enumerate(_combination(scene.refusal)) if share}
        inside = isinstance(scene.refusal, InsideHull)
        says = _WORDS.say("inside" if inside else "impossible", wanted, shares)
        return judgement("refuted", "impossible", says, [str(scene.refusal), _WORDS.say("combination", wanted, shares)])
    if inputs.show == "noise":
        heads = "one head is" if inputs.heads == "one" else "two heads are"
        steps = ["each head's weight is a logistic function of X, and the law's mass is enclosed where it succeeds"]
        says = _WORDS.say("noise", _chances(inputs.eps, _law(inputs)), inputs.x, heads, _off_average(true), _ETA)
        return judgement("proved", "proved", says, steps)
    assert scene.construction is not None
    proof = scene.construction.verify()
    if proof.achieved == math.inf:
        return judgement("none", "undecided", proof.promise, proof.steps)
    steps = [f"promised {proof.bound:.6g}, proved {proof.achieved:.6g}", *proof.steps]
    if isinstance(scene.construction, Router):
        least, most = _off_source(scene)
        if least <= inputs.eps < most:
            return judgement("none", "undecided", "Its distance is too near to what is allowed.", steps)
        holds = most <= inputs.eps and bool(proof)
        says = _WORDS.say("routed", inputs.n, proof.achieved, wanted, most, inputs.eps, most <= inputs.eps)
        steps.append(f"the token that is held: off by {least:.6g} to {most:.6g} max‖v‖")
        return judgement("proved" if holds else "refuted", "kept" if holds else "not kept", says, steps)
    shortest = None if proof or inputs.show != "copy" else _least(scene, inputs.eps)
    longer = shortest if shortest is not None and shortest > float(scene.queries[0].double().norm()) else None
    says = _WORDS.say("weighed", wanted, inputs.eps, bool(proof), longer)
    return judgement("proved" if proof else "refuted", "kept" if proof else "not kept", says, steps)


def _combination(refusal: InsideHull | OutOfReach) -> tuple[Fraction, ...]:
    """The numbers, one a key, that prove it: the mean that the key is, or what every query's weights keep to."""
    return refusal.weights if isinstance(refusal, InsideHull) else refusal.combination


def _off_source(scene: Scene) -> tuple[float, float]:
    """How far the held token's answer is from what it is to read, at least and at most, over the longest value."""
    source = scene.values[list(scene.wanted)]
    true = enclosed(scene.queries, scene.keys, scene.values, source, scene.wanted)
    aside = [max(low - x, x - high, 0.0) for (low, high), x in zip(true.output, source[0].tolist(), strict=True)]
    # What a few roundings could add to the distance is far below this.
    return math.hypot(*aside) / float(scene.values.double().norm(dim=-1).amax()) * (1 - 1e-12), true.error


def _off_average(true: Enclosed) -> tuple[float, float]:
    """How far this draw's weights are from ½ and ½ in all, at least and at most."""
    aims = [0.5, 0.5, *[0.0] * (len(true.weights) - 2)]
    pairs = list(zip(true.weights, aims, strict=True))
    least = math.fsum(max(low - aim, aim - high, 0.0) for (low, high), aim in pairs)
    return least, math.fsum(max(abs(low - aim), abs(high - aim)) for (low, high), aim in pairs)


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
    """One query that copies a key or averages two; the reader may have moved it, and the keys."""
    keys = _moved(_around(inputs.space, inputs.n), inputs.keys)
    start = _query(_points(keys), wanted, inputs.eps)
    refusal = start if isinstance(start, InsideHull | OutOfReach) else None
    # No query does it, or none that was found; where one would look for it is along what is wanted.
    query = start if isinstance(start, Tensor) else keys[list(wanted)].mean(0) * 10
    if float(query.norm()) > _MOST_LENGTH:  # longer than the stage has room for
        query = query / query.norm() * _MOST_LENGTH
    moved = {"angle": inputs.angle, "rise": inputs.rise, "length": inputs.length}
    if any(value is not None for value in moved.values()):
        own = bearings(query)
        query = pointed(keys.shape[1], **{name: own[name] if value is None else value for name, value in moved.items()})
    eps, one_key = inputs.eps, len(wanted) == 1
    promise = CopyQuery(query, keys, eps, wanted[0]) if one_key else AverageQuery(query, keys, eps, wanted)
    handle = {"kind": inputs.space, "name": "query", "at": query}
    return Scene(keys, keys, query[None], promise, wanted, handle, bearings(query), refusal)


_MOVED = re.compile(r"(\d+)((?:_-?\d+(?:\.\d+)?){2,3})")


def _moved(keys: Float[Tensor, "n d"], text: str) -> Float[Tensor, "n d"]:
    """The keys with some of them elsewhere, as `1_0.25_-0.5*3_0_1` says: key 1 at (0.25, −0.5), key 3 at (0, 1).

    Two numbers are a place on the plane, three one in space. What was moved in the other of the two is left out here,
    and so are keys that there are no more.
    """
    places = keys.clone()
    for word in filter(None, text.split("*")):
        found = _MOVED.fullmatch(word)
        place = [float(x) for x in found[2].split("_")[1:]] if found else []
        if found is None or any(abs(x) > _EDGE for x in place):
            rule = f"must say key_x_y, each number from -{_EDGE} to {_EDGE}, with * between keys"
            raise ParameterError("keys", word, rule, "try keys=1_0.25_-0.5, or leave it out")
        if int(found[1]) < len(keys) and len(place) == keys.shape[1]:
            places[int(found[1])] = torch.tensor(place)
    return places


def _points(keys: Float[Tensor, "n d"]) -> Points:
    return tuple(tuple(key) for key in keys.tolist())


@functools.lru_cache(256)
def _query(
    points: Points, wanted: tuple[int, ...], eps: float
) -> Float[Tensor, " d"] | InsideHull | OutOfReach | ToleranceUnreachable:
    """The query that copies one key or averages two, the proof that there is none, or that neither was found."""
    keys = torch.tensor(points)
    try:
        if len(wanted) == 1:
            return copy_query(keys, wanted[0], eps, dtype=torch.float32).query
        return average_query(keys, (wanted[0], wanted[1]), eps, dtype=torch.float32).query
    except (InsideHull, OutOfReach, ToleranceUnreachable) as refusal:
        return refusal


def _least(scene: Scene, eps: float) -> float | None:
    """The length that every query has which copies the wanted key, at least; None if there is none."""
    return _shortest(_points(scene.keys), scene.wanted[0], eps)


@functools.lru_cache(256)
def _shortest(points: Points, target: int, eps: float) -> float | None:
    """A length that no query which copies the key stays below, proved; None if none copies it."""
    try:
        return copy_query(torch.tensor(points), target, eps, shortest=True).lower_bound
    except (InsideHull, ToleranceUnreachable):
        return None


def _noisy(eps: float, law: Law, heads: str, scale: float) -> Scene:
    """Orthonormal keys, the first of them scaled by X; one head that looks at two keys, or a head for each."""
    axes = torch.eye(_AXES)
    keys = axes.clone()
    keys[0] *= scale
    queries, robust = _heads(eps, law)[heads]
    handle = {"kind": "ray", "name": "noisy key", "at": keys[0], "along": axes[0]}
    return Scene(keys, axes, queries.float(), robust, (0, 1), handle)


@functools.lru_cache(256)
def _heads(eps: float, law: Law) -> dict[str, tuple[Float[Tensor, "h d"], RobustHeads | None]]:
    """The queries of one head and of two for the average of keys 0 and 1, and what two promise under noise."""
    one = average_query(torch.eye(_AXES), (0, 1), eps, dtype=torch.float32)
    least = float(min(law.values)) if isinstance(law, DiscreteLaw) else law.mean / 2
    two = robust_heads(_AXES, eps, law, least=least, dtype=torch.float32)
    return {"one": (one.query[None], None), "two": (two.queries, two)}


def _law(inputs: ExplorerInputs) -> Law:
    """How the noisy key is scaled: by 1 − c or 1 + c, or by a Gaussian around 1."""
    if inputs.law == "Gaussian":
        return GaussianLaw(1.0, inputs.variance)
    step, half = Fraction(inputs.c).limit_denominator(1000), Fraction(1, 2)
    return DiscreteLaw((1 - step, 1 + step), (half, half))


@functools.lru_cache(64)
def _chances(eps: float, law: Law) -> dict[str, tuple[float, float]]:
    """The chance that one head, and that two, stay near the average under the noise, from the law of their weights."""
    chances = {}
    for name, (queries, _) in _heads(eps, law).items():
        rows = [dict(enumerate(query)) for query in queries.double().tolist()]
        chances[_NAMES[name]] = noise_analysis(_AXES, rows, law, _ETA).success
    return chances


def _routing(inputs: ExplorerInputs, ahead: int) -> Scene:
    """One head in which each token reads the one so many steps ahead; the reader moves a token around."""
    head = _router(inputs.n, ahead, inputs.eps / _SPARE)
    token = pointed(2, inputs.angle or 0.0, 0.0, 1.0)
    query = (head.scale * (head.W_Q.double() @ token.double())).float()
    keys, values = head.tokens @ head.W_K.mT, head.tokens @ head.W_V.mT
    # A query is what this map makes of a token.
    handle = {"kind": "ring", "name": "token", "at": token, "map": head.scale * head.W_Q.double(), "ahead": ahead}
    wanted = (head.routes[int((head.tokens @ token).argmax())][0],)
    return Scene(keys, values, query[None], head, wanted, handle, {"angle": bearings(token)["angle"]})


def routes_ahead(n: int, ahead: int) -> dict[int, int]:
    """Which token each token is to read."""
    return {i: (i + ahead) % n for i in range(n)}


@functools.lru_cache(256)
def _router(n: int, ahead: int, eps: float) -> Router:
    return router(_around("plane", n), routes_ahead(n, ahead), eps)


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


def _curve(inputs: ExplorerInputs, scene: Scene, now: Float[Tensor, " n"]) -> dict[str, Any]:
    """Weights over the one number that matters: the scale of the noisy key, or the length of the query."""
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
    # Weights keep their whole range, so that nothing jumps while the query moves.
    return figure(chart, x={"range": ends}, y={"range": [-0.03, 1.05]})


@functools.lru_cache(64)
def _over_scales(eps: float, law: Law) -> dict[str, tuple[list[float], list[float]]]:
    """The noisy key's weight at every scale, for one head and for two."""
    scales = [i / 25 - 1 for i in range(76)]
    return {
        words: (scales, [float(_noisy(eps, law, name, scale).read().weights.mean(0)[0]) for scale in scales])
        for name, words in _NAMES.items()
    }


_SUMMARY = (
    "Dots are words, by their keys; the arrow is the query of the word that asks. Drag it; drag the blue key among the "
    "others: nothing reads it."
)
_PRESETS: Presets = {
    "Copy one": {},
    "A key among the others": {"keys": "1_0.3_0.2"},
    "Average two": {"show": "average"},
    "A noisy key, one head": {"show": "noise"},
    "… two heads": {"show": "noise", "heads": "two"},
    "Route tokens": {"show": "route"},
}
PAGE = Page("explorer", "One head, by hand", _SUMMARY, 10, ExplorerInputs, preview, verdict, _PRESETS, short="One head")
