"""The attention explorer: keys around a circle or on a sphere, and a query to drag."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch

import avow
from avow.core import Certificate
from avow.core.chart import Chart
from avow.errors import ParameterError
from avow.lab.page import Answer, Inputs, Page, control, fact
from avow.lab.pages import explorer_scenes as scenes
from avow.lab.pages.explorer_scenes import Scene
from avow.report import formatting
from avow.report.charts import figure
from avow.theory.constructions.construction import Proof
from avow.theory.constructions.queries import Enclosed, Query, Readout, enclosed, read
from avow.theory.constructions.routers import Router

_MOST_LENGTH = 40.0
# Queries are drawn so many times shorter than keys are.
_UNIT = 30.0
_LOOKING = ("copy", "average")
_GAP = "over any other key"


class Explored(Inputs):
    show: Literal["copy", "average", "noise", "route"] = control("copy", "What the head does", quiet=True)
    space: Literal["plane", "sphere"] = control("plane", "Keys on the", when={"show": _LOOKING})
    n: int = control(8, "Number of keys", low=3, high=12, when={"show": ("copy", "average", "route")})
    target: int = control(1, "Key to read", low=0, high=11, below="n", when={"show": _LOOKING})
    other: int = control(2, "And key", low=0, high=11, below="n", when={"show": ("average",)})
    ahead: int = control(2, "Steps ahead that each token reads", low=0, high=11, below="n", when={"show": ("route",)})
    angle: float | None = control(
        None, "Direction (°)", low=-180, high=180, step=1, when={"show": ("copy", "average", "route")}
    )
    rise: float | None = control(
        None, "Height above the equator (°)", low=-90, high=90, step=1, when={"show": _LOOKING, "space": ("sphere",)}
    )
    length: float | None = control(
        None, "Length of the query", low=0, high=_MOST_LENGTH, step=0.1, when={"show": _LOOKING}
    )
    heads: Literal["one", "two"] = control("one", "Heads", when={"show": ("noise",)})
    law: Literal["1 ± c", "Gaussian"] = control("1 ± c", "Noise on key 0", when={"show": ("noise",)})
    c: float = control(
        0.5,
        "c: the key is scaled by 1 − c or 1 + c",
        low=0.05,
        high=0.95,
        step=0.05,
        when={"show": ("noise",), "law": ("1 ± c",)},
    )
    variance: float = control(
        0.25, "Variance of the scale", low=0.01, high=1, log=True, when={"show": ("noise",), "law": ("Gaussian",)}
    )
    x: float = control(0.5, "X: this draw of the scale", low=-1, high=2, step=0.01, when={"show": ("noise",)})
    eps: float = control(
        0.01, "ε: what may go elsewhere", low=0.001, high=0.3, log=True, about="Smaller asks for a longer query."
    )


def preview(inputs: Explored) -> Answer:
    """What the head reads, in float64, and the certificate of the float32 answer."""
    scene = _scene(inputs)
    found = read(scene.queries, scene.keys, scene.values)
    certificate = _attended(scene)[1]
    facts = [
        fact("Logit gap", f"{found.gap(_kept(scene)):.4g}", _GAP),
        fact("Length of the query", f"{float(scene.queries[0].double().norm()):.4g}"),
    ]
    if isinstance(scene.made, Query):
        about = f"the promise asks for at most {inputs.eps:g}"
        facts.append(fact("Goes elsewhere, over what is read", f"{scene.made.estimate:.3g}", about))
    if inputs.show == "noise":
        facts.append(
            fact("Off the average of keys 0 and 1", f"{_off(found):.3g}", f"at most {scenes.ETA:g} is a success")
        )
    facts += [fact("Output", _point(found.outputs.mean(0).tolist())), _certified(certificate)]
    return _stage(scene, found) | {"facts": facts, "figures": {"curve": _drawn(inputs, scene)}}


def verdict(inputs: Explored) -> Answer:
    """The same in ball arithmetic, the promise proved or refuted, and the certificate held to account."""
    scene = _scene(inputs)
    answers, certificate = _attended(scene)
    true = enclosed(scene.queries, scene.keys, scene.values, answers, _kept(scene))
    facts = [
        fact("Logit gap", _between(true.gap), _GAP),
        fact("Weight of what is read", _between(_sum(true, scene.wanted))),
    ]
    judged = _judged(inputs, scene)
    if inputs.show == "noise":
        for name, found in scenes.odds(inputs.eps, _law(inputs)).items():
            about = f"of weights within {scenes.ETA:g} of ½ and ½"
            facts.append(fact(f"Chance with {name} head{'s' if name == 'two' else ''}", _between(found.success), about))
    facts += [fact("Output", _point([sum(ends) / 2 for ends in true.output])), _certified(certificate)]
    kept = true.error <= certificate.bound
    step = (
        f"the float32 answer is within {true.error:.2e} of real arithmetic, and its certificate "
        f"{'promised' if kept else 'BROKE its promise of'} {certificate.bound:.2e}"
    )
    judged["steps"] = [*judged["steps"], step]
    if not kept:
        judged |= {"tone": "refuted", "word": "broken", "says": step}
    return {"facts": facts, "verdict": judged}


def _scene(inputs: Explored) -> Scene:
    match inputs.show:
        case "noise":
            return scenes.noisy(inputs.eps, _law(inputs), inputs.heads, inputs.x)
        case "route":
            return scenes.routing(inputs.n, _key(inputs, "ahead"), inputs.eps, inputs.angle)
        case "copy":
            wanted: tuple[int, ...] = (_key(inputs, "target"),)
        case "average":
            wanted = _key(inputs, "target"), _key(inputs, "other")
            if wanted[0] == wanted[1]:
                raise ParameterError("other", wanted[1], "must be another key than the first", "move either of the two")
    return scenes.looking(inputs.space, inputs.n, wanted, inputs.eps, inputs.angle, inputs.rise, inputs.length)


def _key(inputs: Explored, name: Literal["target", "other", "ahead"]) -> int:
    """One of the keys that there are."""
    number: int = getattr(inputs, name)
    if number >= inputs.n:
        raise ParameterError(name, number, f"must be below the number of keys, {inputs.n}", "move it to the left")
    return number


def _law(inputs: Explored) -> Any:
    return scenes.law_of(inputs.law, inputs.c, inputs.variance)


def _attended(scene: Scene) -> tuple[torch.Tensor, Certificate]:
    """Attention as the library computes it, head by head in float32, with its certificate."""
    keys, values = (x.expand(len(scene.queries), *x.shape)[None] for x in (scene.keys, scene.values))
    out, certificate = avow.attend(scene.queries[None, :, None], keys, values, scale=1.0)
    return out[0, :, 0], certificate


def _judged(inputs: Explored, scene: Scene) -> dict[str, Any]:
    """The verdict's words."""
    if scene.refusal is not None:
        keys = _names(i for i, share in enumerate(scene.refusal.combination) if share)
        says = f"No query reads just keys {_names(scene.wanted)} alike: keys {keys} rule it out, exactly."
        return {"tone": "refuted", "word": "impossible", "says": says, "steps": [str(scene.refusal)]}
    if inputs.show == "noise":
        chances = scenes.odds(inputs.eps, _law(inputs))
        one, two = (100 * chances[name].success[0] for name in ("one", "two"))
        says = f"One head stays near the average in {one:.3g}% of draws, two heads in {two:.4g}%."
        steps = ["each head's weight is a logistic function of X, and the law's mass is enclosed where it succeeds"]
        return {"tone": "proved", "word": "proved", "says": says, "steps": steps}
    assert scene.made is not None
    proof = scene.made.verify()
    if proof.achieved == math.inf:
        return {"tone": "none", "word": "undecided", "says": proof.promise, "steps": list(proof.steps)}
    return {
        "tone": "proved" if proof else "refuted",
        "word": "kept" if proof else "not kept",
        "says": _sentence(scene, proof, inputs),
        "steps": [f"promised {proof.bound:.6g}, proved {proof.achieved:.6g}", *proof.steps],
    }


def _sentence(scene: Scene, proof: Proof, inputs: Explored) -> str:
    if isinstance(scene.made, Router):
        return f"Each of {inputs.n} tokens receives what its source carries, within {proof.achieved:.3g}."
    keys = f"Key {scene.wanted[0]} gets" if len(scene.wanted) == 1 else f"Keys {_names(scene.wanted)} each get"
    share = f"1/({len(scene.wanted)} + {inputs.eps:g})"
    return (
        f"{keys} a weight of at least {share}."
        if proof
        else f"{keys} less than the weight {share} this query should give."
    )


def _stage(scene: Scene, found: Readout) -> Answer:
    """What is drawn: everything in the units of keys, queries divided by `unit`."""
    return {
        "shown": scene.shown,
        "stage": {
            "keys": scene.keys,
            "values": scene.values,
            "weights": found.weights.mean(0),
            "queries": scene.queries,
            "outputs": found.outputs.mean(0),
            "wanted": scene.wanted,
            "handle": scene.handle,
            "unit": _UNIT,
        },
    }


def _drawn(inputs: Explored, scene: Scene) -> dict[str, Any]:
    """The curve for plotly; weights keep their whole range, so that nothing jumps while the query moves."""
    drawn = figure(_curve(inputs, scene))
    drawn["layout"]["xaxis"]["range"] = [-1.05, 2.05] if inputs.show == "noise" else [-0.6, _MOST_LENGTH + 0.6]
    drawn["layout"]["yaxis"]["range"] = [-0.03, 1.05]
    return drawn


def _curve(inputs: Explored, scene: Scene) -> Chart:
    """Weights over the one number that matters: the scale of the noisy key, or the length of the query."""
    found = read(scene.queries, scene.keys, scene.values).weights.mean(0)
    if inputs.show == "noise":
        here = {"this draw": ([inputs.x], [float(found[0])])}
        series = _over_scales(inputs.eps, _law(inputs)) | here
        return Chart("Weight of the noisy key", "X, the scale of key 0", "weight of key 0", series)
    query, kept = scene.queries[0].double(), list(scene.wanted)
    length = float(query.norm())
    lengths = [_MOST_LENGTH * i / 80 for i in range(81)]
    along = query / length if length > 0 else query
    weights = read(along * torch.tensor(lengths, dtype=torch.float64)[:, None], scene.keys, scene.values).weights
    series = {f"key {i}": (lengths, weights[:, i].tolist()) for i in kept}
    series["all others"] = (lengths, (1 - weights[:, kept].sum(1)).tolist())
    series["this query"] = ([length], [float(found[kept[0]])])
    return Chart("Weights as the query grows", "length of the query", "weight", series)


@functools.lru_cache(64)
def _over_scales(eps: float, law: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The noisy key's weight at every scale, for one head and for two."""
    scales = [i / 25 - 1 for i in range(76)]
    series = {}
    for name, label in (("one", "one head"), ("two", "two heads")):
        drawn = [scenes.noisy(eps, law, name, scale) for scale in scales]
        weights = [float(read(one.queries, one.keys, one.values).weights.mean(0)[0]) for one in drawn]
        series[label] = (scales, weights)
    return series


def _kept(scene: Scene) -> tuple[int, ...]:
    """The keys that the first head is to read: all that are wanted, or the first where each has a head of its own."""
    return scene.wanted if len(scene.queries) == 1 else scene.wanted[:1]


def _off(found: Readout) -> float:
    aim = torch.zeros_like(found.weights[0])
    aim[:2] = 0.5
    return float((found.weights.mean(0) - aim).abs().sum())


def _sum(true: Enclosed, keys: tuple[int, ...]) -> tuple[float, float]:
    low, high = (sum(true.weights[i][end] for i in keys) for end in (0, 1))
    return low, high


def _certified(certificate: Certificate) -> dict[str, str]:
    return fact("Certificate", f"error ≤ {certificate.bound:.2e}", f"{certificate.kind}, float32, rounding included")


def _point(x: list[float]) -> str:
    return "(" + ", ".join(f"{part:.3f}" for part in x) + ")"


def _between(ends: tuple[float, float]) -> str:
    """As many digits as both ends share, at most ten."""
    for digits in range(10, 1, -1):
        low, high = (f"{end:.{digits}g}" for end in ends)
        if low == high:
            return low
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


def _names(keys: Iterable[int]) -> str:
    return formatting.listed([str(key) for key in keys])


PAGE = Page(
    name="explorer",
    title="Attention explorer",
    summary="Drag the query, and see what it reads. Longer is sharper; a scaled key fools one head, and not two.",
    order=10,
    inputs=Explored,
    preview=preview,
    verdict=verdict,
    sign=(
        '<path class="faint" stroke-width="4" d="M41 24h0M22 5h0M9 11h0M3 24h0M9 37h0M22 43h0M35 37h0"/>'
        '<circle class="dot" cx="35" cy="11" r="4.5"/>'
        '<path d="M22 24 31.5 14.5m-5.5 .3 5.5 -.3 -.3 5.5"/>'
    ),
    body="""<svg id="stage" class="stays" viewBox="-1.45 -1.45 2.9 2.9" role="group"
aria-label="Keys, query and output"></svg>
<p class="legend"><span><b class="k">●</b> key to be read</span><span>● other keys, as large as their weight</span>
<span><b class="q">➞</b> query, drawn at 1/30 of its length</span><span><b class="o">◆</b> output</span></p>
<div id="weights" aria-label="Weight of each key" role="img"></div>
<div class="figure" id="curve"></div>""",
    formulas=(
        r"\alpha_i = \frac{e^{q \cdot k_i}}{\sum_j e^{q \cdot k_j}}, \quad \mathrm{out} = \sum_i \alpha_i v_i",
        r"\alpha_t \ge \frac{1}{1+\varepsilon} \quad \text{as soon as the gap is} \quad \ln\frac{n-1}{\varepsilon}",
    ),
    presets={
        "Copy one": {},
        "Average two": {"show": "average"},
        "A noisy key, one head": {"show": "noise"},
        "… two heads": {"show": "noise", "heads": "two"},
        "Route tokens": {"show": "route"},
    },
)
