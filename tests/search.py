"""Search for inputs that break a certificate: `python -m tests.search --minutes 10 --method exact --dtype bfloat16`.

Hill climbing on error/bound. A climb starts from a random call of eight heads, some of them extreme, and changes it
step by step: sizes of q, k, v and biases, single entries, rows, near-ties of values, signs, masks, layouts, switches,
lengths and widths. Steps that act on numbers are taken by each head for itself, and kept by those whose largest
error/bound does not fall; others are kept or not as a whole. What no longer improves goes on with its best head alone,
then starts again. Bounds that say next to nothing count a tenth while they hold: any bound of 2 can be reached.

Errors are floats' while it climbs, less what those floats may be off (`tests.helpers.truth`); what is reported was
judged in balls. A statistical promise may fail by chance: a climb takes the median of some draws, and what it found is
judged by the share of many fresh draws that miss the bound.

Every result is printed with its recipe, which makes the same inputs again: `python -m tests.search --recipe '{…}'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

import avow
from avow.errors import AvowError
from avow.nn import KeyValueCache
from tests.faults import CONFIDENCE, FLOATS, RARE, SWITCHES, layout
from tests.helpers.truth import Question, ball_verdict, errors, verdict

METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "exact float64": {"method": "exact", "precision": "float64"},
    "auto": {"tol": 1e-2},
    "sparse": {"method": "sparse", "drop": 1e-2},
    "sparse statistical": {"method": "sparse", "drop": 0.1, "chance": 1 - CONFIDENCE},
    "low_rank": {"method": "low_rank"},
    "polynomial": {"method": "polynomial"},
    "polynomial of degree 2": {"method": "polynomial", "degree": 2},
    "random_features": {"method": "random_features", "features": 16, "confidence": CONFIDENCE},
    "separable": {"method": "separable"},
    "latent": {"method": "latent", "latents": 4, "segment": 8},
    "cache": {},
}
HEADS = 8
# Draws that a climb looks at where a promise is statistical, and that judge what it found.
LOOKS, DRAWS = 5, 200
# A bound below this says something.
TELLING = 0.5
# Steps without progress after which a climb goes on with one head, and then ends.
PATIENCE = 80
_SWITCHES = ("none", "none", "flush", "matmul medium", "fp32 bf16", "autocast", "deterministic")
_LAYOUTS = ("contiguous", "contiguous", "channels last", "transposed", "strided", "offset", "one row", "overlapping")


@dataclasses.dataclass(frozen=True)
class State:
    """A call in the making: numbers in float64 that the type holds, and what else there is to it."""

    q: Tensor  # (1, h, n, d)
    k: Tensor  # (1, h, s, d)
    v: Tensor  # (1, h, s, e)
    bias: Tensor | None  # (1, h, n, s), in the type of the mask
    causal: bool = False
    scale: float | None = None
    sigma: float | None = None
    switch: str = "none"
    layouts: tuple[str, str, str] = ("contiguous",) * 3


class Found(NamedTuple):
    """The error/bound of every row (h, n), less what the error may be off; the largest of every head; the answer."""

    rows: Tensor
    heads: Tensor
    question: Question
    out: Tensor
    bounds: Tensor


class Broken(Exception):
    """A call raised what it must not."""


@dataclasses.dataclass
class Climb:
    """One climb: where it stands, how it got there, and how high it is."""

    method: str
    dtype: str
    seed: int
    device: str = "cpu"
    steps: list[list[Any]] = dataclasses.field(default_factory=list)
    evaluations: int = 0

    def __post_init__(self) -> None:
        self.state = start(self.method, self.dtype, self.seed)
        found = self._evaluated(self.state)
        self.heads = torch.zeros(self.state.q.shape[1]) if found is None else found.heads
        self.first = float(self.heads.max())

    @property
    def ratio(self) -> float:
        return float(self.heads.max())

    @property
    def recipe(self) -> str:
        return json.dumps({"method": self.method, "dtype": self.dtype, "seed": self.seed, "steps": self.steps})

    def _evaluated(self, state: State) -> Found | None:
        self.evaluations += 1
        return evaluate(self.method, self.dtype, state, self.device)

    def step(self, rng: random.Random) -> bool:
        """Try one change; whether the climb got higher."""
        names = list(CHANGES if rng.random() < 0.85 else OTHER_CALLS)
        name, seed = rng.choice(names), rng.getrandbits(32)
        changed = _changed(self.state, name, seed, self.dtype, self.method)
        found = None if changed is None else self._evaluated(changed)
        if changed is None or found is None:
            return False
        before = self.ratio
        if name in OTHER_CALLS:
            if float(found.heads.max()) < before:
                return False
            self.state, self.heads = changed, found.heads
            self.steps.append([name, seed, ""])
            return self.ratio > before
        kept = found.heads >= self.heads
        if not bool(kept.any()):
            return False
        if not bool(kept.all()):
            # Heads share some of a bound, so that what each would keep is looked at together.
            changed = _mixed(kept, changed, self.state)
            found = self._evaluated(changed)
            if found is None or float(found.heads.max()) < before:
                return False
        self.state, self.heads = changed, found.heads
        self.steps.append([name, seed, "".join("01"[bool(one)] for one in kept)])
        return self.ratio > before

    def isolate(self) -> None:
        """Go on with the best head alone."""
        best = int(self.heads.argmax())
        alone = _isolated(self.state, best)
        found = self._evaluated(alone)
        if found is not None and float(found.heads.max()) >= self.ratio:
            self.state, self.heads = alone, found.heads
            self.steps.append(["isolate", best, ""])


def replay(recipe: dict[str, Any]) -> State:
    """The call that a recipe makes."""
    state = start(recipe["method"], recipe["dtype"], recipe["seed"])
    for name, seed, kept in recipe["steps"]:
        if name == "isolate":
            state = _isolated(state, seed)
            continue
        changed = _changed(state, name, seed, recipe["dtype"], recipe["method"])
        assert changed is not None
        state = _mixed(torch.tensor([one == "1" for one in kept]), changed, state) if kept else changed
    return state


def _changed(state: State, name: str, seed: int, dtype: str, method: str) -> State | None:
    change = CHANGES[name] if name in CHANGES else OTHER_CALLS[name]
    changed = change(state, _Dice(seed, dtype, method))
    return None if changed is None else _rounded(changed, dtype)


def _rounded(state: State, dtype: str) -> State:
    kind = FLOATS[dtype]
    most = torch.finfo(kind).max / 8
    q, k, v = (x.nan_to_num(0, most, -most).clamp(-most, most).to(kind).double() for x in (state.q, state.k, state.v))
    return dataclasses.replace(state, q=q, k=k, v=v)


def _mixed(kept: Tensor, new: State, old: State) -> State:
    """The new numbers in the heads that keep them."""
    at = kept.reshape(1, -1, 1, 1)
    parts = {name: torch.where(at, getattr(new, name), getattr(old, name)) for name in "qkv"}
    bias = new.bias
    if new.bias is not None and old.bias is not None:
        bias = torch.where(at, new.bias, old.bias)
    return dataclasses.replace(new, **parts, bias=bias)


def _isolated(state: State, head: int) -> State:
    some = slice(head, head + 1)
    bias = None if state.bias is None else state.bias[:, some].contiguous()
    q, k, v = (x[:, some].contiguous() for x in (state.q, state.k, state.v))
    return dataclasses.replace(state, q=q, k=k, v=v, bias=bias)


class _Dice:
    """Draws of one change, the same every time."""

    def __init__(self, seed: int, dtype: str, method: str) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.method = FLOATS[dtype], method

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def below(self, count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=self.generator)


def start(method: str, dtype: str, seed: int) -> State:
    """A random call; its heads differ in the sizes of their numbers."""
    dice = _Dice(seed, dtype, method)
    rng = dice.rng
    n, s = rng.choice((1, 1, 2, 5, 33)), rng.choice((2, 3, 8, 31, 64, 130, 600))
    d, e = rng.choice((1, 2, 4, 8, 16, 64)), rng.choice((1, 2, 8, 16, 64))
    if rng.random() < 0.6:
        e = d
    if method in ("sparse", "sparse statistical"):
        s = rng.choice((64, 130, 600))
    if method == "cache":
        n = 1
    reach = rng.choice((0.3, 1.0, 1.0, 2.0, 20.0))
    sizes = [10 ** ((2 * dice.uniform(1, HEADS, 1, 1) - 1) * reach) for _ in range(3)]
    q, k, v = (
        dice.normal(1, HEADS, *shape) * size for shape, size in zip(((n, d), (s, d), (s, e)), sizes, strict=True)
    )
    state = State(q, k, v, None)
    if method != "cache":
        state = dataclasses.replace(state, causal=rng.random() < 0.2)
        if rng.random() < 0.5:
            state = _with_bias(state, dice) or state
    return _rounded(state, dtype)


def evaluate(method: str, dtype: str, state: State, device: str = "cpu", draw: int = 0) -> Found | None:
    """How near every head comes to its bound; None where the call is refused. Raises where it fails otherwise."""
    statistical = method in ("sparse statistical", "random_features")
    looks = [_looked(method, dtype, state, device, draw + look) for look in range(LOOKS if statistical else 1)]
    if looks[0] is None or any(one is None for one in looks):
        return None
    rows = torch.stack([one.rows for one in looks if one is not None]).median(0).values
    return looks[0]._replace(rows=rows, heads=rows.amax(-1))


def _looked(method: str, dtype: str, state: State, device: str, draw: int) -> Found | None:
    kind = FLOATS[dtype]
    tensors = [
        layout(x.to(kind), how).to(device) for x, how in zip((state.q, state.k, state.v), state.layouts, strict=True)
    ]
    q, k, v = tensors
    options: dict[str, Any] = {"causal": state.causal} if state.causal else {}
    options |= {"scale": state.scale} if state.scale is not None else {}
    options |= {"kernel": "rbf", "sigma": state.sigma} if state.sigma is not None else {}
    mask = None if state.bias is None else state.bias.to(device)
    wish = dict(METHODS[method])
    if method == "low_rank":
        wish["rank"] = min(6, k.shape[-2])
    drawn = torch.Generator("cpu").manual_seed(1_000_003 + draw)
    try:
        with warnings.catch_warnings(), SWITCHES[state.switch]():
            warnings.simplefilter("ignore")
            if method == "cache":
                cache = KeyValueCache(k.shape[1], k.shape[-1], v.shape[-1], dtype=kind, device=device)
                cache.append(k, v)
                out, certificate = cache.attend(q, scale=state.scale)
            else:
                out, certificate = avow.attend(q, k, v, mask=mask, **wish, **options, generator=drawn)
    except AvowError:
        return None
    except Exception as error:  # any other error is a failure of its own
        raise Broken(f"{type(error).__name__}: {str(error)[:200]}") from error
    if certificate.kind == "none":
        return None
    question = Question(
        *(x.cpu() for x in (q, k, v)),
        None if mask is None else mask.cpu(),
        **options,
        target=certificate.target,
        parameters=certificate.parameters,
    )
    out, bounds = out.detach().cpu(), certificate.rows.detach().cpu().double()
    if bool(bounds.isnan().any()):
        raise Broken("a bound is nan")
    with np.errstate(all="ignore"):
        error, own, _ = errors(question, out)
        error = np.where(np.isnan(error), np.inf, error)
        sure = np.maximum(error - own, 0)
        limits = bounds.reshape(sure.shape).numpy()
        ratio = np.where(limits > 0, sure / np.where(limits > 0, limits, 1), np.where(sure > 0, np.inf, 0))
        ratio = np.where((limits < TELLING) | (ratio >= 1), ratio, ratio / 10)
    rows = torch.from_numpy(np.nan_to_num(ratio.astype(np.float64), nan=0.0, posinf=1e300))[0]
    return Found(rows, rows.amax(-1), question, out, bounds)


# Changes of numbers, which every head takes for itself.


def _some(dice: _Dice) -> str:
    return dice.rng.choice("qkv")


def _resized(state: State, dice: _Dice) -> State:
    name, reach = _some(dice), dice.rng.choice((0.1, 0.5, 2.0, 10.0))
    factor = 2 ** ((2 * dice.uniform(1, state.q.shape[1], 1, 1) - 1) * reach)
    return dataclasses.replace(state, **{name: getattr(state, name) * factor})


def _entry(state: State, dice: _Dice) -> State:
    """One number of every head drawn again, at the size of its tensor or far above."""
    name = _some(dice)
    x = getattr(state, name).clone()
    h, length, width = x.shape[1:]
    top = x.abs().amax((-1, -2))[0]
    fresh = dice.normal(h) * top * dice.rng.choice((1.0, 1.0, 4.0, 0.0))
    x[0, torch.arange(h), dice.below(length, h), dice.below(width, h)] = fresh
    return dataclasses.replace(state, **{name: x})


def _noise(state: State, dice: _Dice) -> State:
    name = _some(dice)
    x = getattr(state, name)
    return dataclasses.replace(state, **{name: x * (1 + dice.rng.choice((1e-3, 0.1, 0.5)) * dice.normal(*x.shape))})


def _ulps(state: State, dice: _Dice) -> State:
    """A few units in the last place, up or down."""
    name = _some(dice)
    x = getattr(state, name)
    unit = torch.finfo(dice.dtype).eps * 2 ** x.abs().clamp(min=1e-300).log2().floor()
    return dataclasses.replace(state, **{name: x + unit * (dice.below(5, *x.shape) - 2)})


def _ties(state: State, dice: _Dice) -> State:
    """Values near one number, with a period: roundings of a running sum go one way."""
    v, period = state.v, dice.rng.choice((1, 2, 3, 4, 8, 16))
    h, s, e = v.shape[1:]
    sizes = torch.finfo(dice.dtype).eps * dice.below(4, 1, h, min(period, s), e)
    pattern = (1 + sizes).repeat(1, 1, -(-s // sizes.shape[2]), 1)[:, :, :s]
    return dataclasses.replace(state, v=pattern * v.abs().amax((-1, -2), keepdim=True).clamp(min=1e-300))


def _first_large(state: State, dice: _Dice) -> State:
    """One value that all others are small beside, so that each of them is rounded."""
    v = state.v * 2.0 ** -dice.below(30, 1, state.v.shape[1], 1, 1)
    v[:, :, dice.rng.choice((0, -1))] = state.v.abs().amax(-2)
    return dataclasses.replace(state, v=v)


def _one_sign(state: State, dice: _Dice) -> State:
    name = _some(dice)
    return dataclasses.replace(state, **{name: getattr(state, name).abs()})


def _with_query(state: State, dice: _Dice) -> State:
    """Keys along the first query, so that no product cancels, or against it."""
    signs = state.q[:, :, :1].sign() * dice.rng.choice((1, -1))
    return dataclasses.replace(state, k=state.k.abs() * signs)


def _equal_keys(state: State, dice: _Dice) -> State:
    """All keys but some the same: equal weights."""
    some = dice.uniform(1, state.k.shape[1], state.k.shape[2], 1) < dice.rng.choice((0.0, 0.1))
    return dataclasses.replace(state, k=torch.where(some, state.k, state.k[:, :, :1]))


def _opposed(state: State, dice: _Dice) -> State:
    """Values of the keys that the first query likes point one way, all others the other."""
    liked = (state.k * state.q[:, :, :1]).sum(-1, keepdim=True)
    level = liked.quantile(dice.rng.random(), -2, keepdim=True)
    size = state.v.abs().amax((-1, -2), keepdim=True)
    return dataclasses.replace(state, v=torch.where(liked >= level, size, -size).expand(state.v.shape).clone())


def _far(state: State, dice: _Dice) -> State:
    """All keys moved by one vector: logits share what they lose digits to."""
    shift = dice.normal(1, state.k.shape[1], 1, state.k.shape[-1]) * 2.0 ** dice.below(12, 1, state.k.shape[1], 1, 1)
    return dataclasses.replace(state, k=state.k + shift * state.k.abs().amax((-1, -2), keepdim=True))


def _nothing(state: State, dice: _Dice) -> State:
    name = _some(dice)
    x = getattr(state, name)
    return dataclasses.replace(state, **{name: torch.where(dice.uniform(*x.shape[:-1], 1) < 0.3, 0.0, x)})


def _best_shared(state: State, dice: _Dice) -> State:
    """Heads take numbers of a neighbour."""
    order = torch.randperm(state.q.shape[1], generator=dice.generator)
    name = _some(dice)
    return dataclasses.replace(state, **{name: getattr(state, name)[:, order]})


def _other_bias(state: State, dice: _Dice) -> State | None:
    if state.bias is None:
        return None
    bias = state.bias.double()
    finite = bias.isfinite()
    how = dice.rng.choice(("resized", "entry", "against", "noise"))
    if how == "resized":
        bias = bias * 2 ** (6 * dice.uniform(1, bias.shape[1], 1, 1) - 3)
    elif how == "noise":
        bias = bias + dice.normal(*bias.shape) * dice.rng.choice((0.1, 1.0, 10.0))
    elif how == "entry":
        bias = torch.where(dice.uniform(*bias.shape) < 0.1, 10 * dice.normal(*bias.shape), bias)
    else:
        bias = -_logits(state) + dice.normal(*bias.shape)
    most = torch.finfo(state.bias.dtype).max / 4
    bias = bias.nan_to_num(0).clamp(-most, most)
    return dataclasses.replace(state, bias=torch.where(finite, bias, -math.inf).to(state.bias.dtype))


def _logits(state: State) -> Tensor:
    scale = 1 / math.sqrt(state.q.shape[-1]) if state.scale is None else state.scale
    return (scale if state.sigma is None else 1 / state.sigma) * (state.q @ state.k.mT)


# Changes of the call, kept or not as a whole.


def _with_bias(state: State, dice: _Dice) -> State | None:
    if dice.method == "cache":
        return None
    kind = dice.rng.choice([dice.dtype, dice.dtype, *FLOATS.values()])
    h, n, s = state.q.shape[1], state.q.shape[2], state.k.shape[2]
    bias = dice.normal(1, h, n, s) * dice.rng.choice((1.0, 6.0, 40.0))
    if dice.rng.random() < 0.3:
        bias = bias.masked_fill(dice.uniform(1, h, n, s) < 0.3, -math.inf)
    return dataclasses.replace(state, bias=bias.to(kind))


def _without_bias(state: State, dice: _Dice) -> State:
    return dataclasses.replace(state, bias=None)


def _other_causal(state: State, dice: _Dice) -> State | None:
    return None if dice.method == "cache" else dataclasses.replace(state, causal=not state.causal)


def _other_scale(state: State, dice: _Dice) -> State | None:
    if dice.method == "separable":
        return None
    if dice.method not in ("latent", "cache") and dice.rng.random() < 0.3:
        return dataclasses.replace(state, scale=None, sigma=10 ** dice.rng.uniform(-3, 3))
    scale = dice.rng.choice((None, 1.0, -1.0, 10 ** dice.rng.uniform(-3, 3), 10 ** dice.rng.uniform(-30, 6)))
    return dataclasses.replace(state, scale=scale, sigma=None)


def _other_switch(state: State, dice: _Dice) -> State:
    return dataclasses.replace(state, switch=dice.rng.choice(_SWITCHES))


def _other_layouts(state: State, dice: _Dice) -> State:
    first, second, third = (dice.rng.choice(_LAYOUTS) for _ in range(3))
    return dataclasses.replace(state, layouts=(first, second, third))


def _other_lengths(state: State, dice: _Dice) -> State:
    """More or fewer keys and rows: what there is, cut or said again."""
    s = max(1, min(3000, round(state.k.shape[2] * 2 ** dice.rng.uniform(-1.5, 1.5))))
    n = 1 if dice.method == "cache" else max(1, min(64, round(state.q.shape[2] * 2 ** dice.rng.uniform(-1, 1))))
    q, k, v = _told(state.q, 2, n), _told(state.k, 2, s), _told(state.v, 2, s)
    bias = None if state.bias is None else _told(_told(state.bias, 2, n), 3, s)
    return dataclasses.replace(state, q=q, k=k, v=v, bias=bias)


def _other_widths(state: State, dice: _Dice) -> State:
    d, e = (dice.rng.choice((1, 2, 4, 8, 11, 16, 32, 64)) for _ in range(2))
    if dice.rng.random() < 0.5:
        e = d
    return dataclasses.replace(state, q=_told(state.q, 3, d), k=_told(state.k, 3, d), v=_told(state.v, 3, e))


def _told(x: Tensor, axis: int, length: int) -> Tensor:
    """The first of an axis, again from the beginning where there are too few."""
    return x.index_select(axis, torch.arange(length) % x.shape[axis])


CHANGES: dict[str, Callable[[State, _Dice], State | None]] = {
    "size": _resized,
    "entry": _entry,
    "noise": _noise,
    "ulps": _ulps,
    "ties": _ties,
    "first large": _first_large,
    "one sign": _one_sign,
    "with query": _with_query,
    "equal keys": _equal_keys,
    "opposed": _opposed,
    "far": _far,
    "nothing": _nothing,
    "neighbour": _best_shared,
    "bias numbers": _other_bias,
}
OTHER_CALLS: dict[str, Callable[[State, _Dice], State | None]] = {
    "bias": _with_bias,
    "no bias": _without_bias,
    "causal": _other_causal,
    "scale": _other_scale,
    "switch": _other_switch,
    "layouts": _other_layouts,
    "lengths": _other_lengths,
    "widths": _other_widths,
}


class Job(NamedTuple):
    """A method and a type to search, and for how long: seconds, or calls."""

    method: str
    dtype: str
    seed: int
    seconds: float
    calls: float = math.inf
    device: str = "cpu"


class Result(NamedTuple):
    """The highest that a search came, as balls know it, where the first climb began, and what makes it again."""

    method: str
    dtype: str
    ratio: float
    first: float
    climbs: int
    calls: int
    recipe: str
    broken: str = ""

    def __str__(self) -> str:
        word = f"  BROKEN: {self.broken}" if self.broken else ""
        return (
            f"{self.method:<20}{self.dtype:<10}{self.ratio:10.6f}  from {self.first:.2g}, {self.climbs} climbs, "
            f"{self.calls:,} calls{word}"
        )


def search(job: Job) -> Result:
    """Climb, start again, and judge the highest in balls."""
    rng = random.Random(job.seed)
    end, best, first, climbs, calls = time.monotonic() + job.seconds, None, 0.0, 0, 0
    while calls < job.calls and time.monotonic() < end:
        climb = None
        try:
            climb = Climb(job.method, job.dtype, rng.getrandbits(32), job.device)
            first = climb.first if climbs == 0 else first
            climbs += 1
            for alone in (False, True):
                stale = 0
                while stale < PATIENCE and calls + climb.evaluations < job.calls and time.monotonic() < end:
                    stale = 0 if climb.step(rng) else stale + 1
                if not alone:
                    climb.isolate()
        except Broken as error:
            recipe = "" if climb is None else climb.recipe
            return Result(job.method, job.dtype, math.inf, first, climbs, calls, recipe, str(error))
        calls += climb.evaluations
        if best is None or climb.ratio > best.ratio:
            best = climb
        if best.ratio >= 1:
            break
    if best is None:
        return Result(job.method, job.dtype, 0.0, first, climbs, calls, "", "")
    ratio, broken = judged(job.method, job.dtype, best.state, job.device)
    return Result(job.method, job.dtype, ratio, first, climbs, calls, best.recipe, broken)


def judged(method: str, dtype: str, state: State, device: str = "cpu") -> tuple[float, str]:
    """The true error/bound of what was found, and what it breaks; of a statistical promise, by fresh draws."""
    if method in ("sparse statistical", "random_features"):
        # The row that comes nearest is chosen by the draws of the climb, and judged by others.
        found = evaluate(method, dtype, state, device)
        if found is None:
            return 0.0, ""
        row = int(found.rows.argmax())
        looks = [_looked(method, dtype, state, device, 10_000 + draw) for draw in range(DRAWS)]
        ratios = torch.stack([one.rows.flatten()[row] for one in looks if one is not None])
        misses, allowed = int((ratios > 1).sum()), binom.isf(RARE, len(ratios), 1 - CONFIDENCE)
        ratio = float(ratios.quantile(CONFIDENCE))
        return ratio, f"{misses} misses in {len(ratios)} draws" if misses > allowed else ""
    found = evaluate(method, dtype, state, device)
    if found is None:
        return 0.0, ""
    story = verdict(found.question, found.out, found.bounds, 4).story
    b, h, n, _ = found.question.shape
    given, limits = found.out.double().reshape(b, h, n, -1).numpy(), found.bounds.reshape(b, h, n)
    best = int(found.rows.argmax())
    at = (0, best // n, best % n)
    _, ratio = ball_verdict(found.question, given, *at, float(limits[at]))
    return ratio, story


def _worker(job: Job) -> Result:
    torch.set_num_threads(1)
    return search(job)


def main(arguments: list[str] | None = None) -> int:
    """Print the worst of every method and type; 1 where one breaks its promise."""
    parser = argparse.ArgumentParser("python -m tests.search", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each method and type")
    parser.add_argument("--calls", type=float, default=math.inf, help="no more calls than these, for each")
    parser.add_argument("--method", choices=list(METHODS), help="default: all")
    parser.add_argument("--dtype", choices=list(FLOATS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--recipe", help="make what was found again, and judge it")
    chosen = parser.parse_args(arguments)
    if chosen.recipe:
        recipe = json.loads(chosen.recipe)
        state = replay(recipe)
        ratio, broken = judged(recipe["method"], recipe["dtype"], state, chosen.device)
        shapes = f"q {tuple(state.q.shape)} k {tuple(state.k.shape)} v {tuple(state.v.shape)}"
        more = f"causal={state.causal} scale={state.scale} sigma={state.sigma} {state.switch} {state.layouts}"
        mask = "no mask" if state.bias is None else f"{state.bias.dtype} mask"
        print(f"{shapes} {mask} {more}: error/bound {ratio:.4g}", broken)
        return 1 if broken else 0
    pairs = itertools.product([chosen.method] if chosen.method else METHODS, [chosen.dtype] if chosen.dtype else FLOATS)
    jobs = [Job(*pair, chosen.seed, 60 * chosen.minutes, chosen.calls, chosen.device) for pair in pairs]
    results = []
    if chosen.processes == 1:
        for job in jobs:
            results.append(search(job))
            print(results[-1], f"    --recipe '{results[-1].recipe}'", sep="\n", flush=True)
    else:
        with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
            for result in pool.imap_unordered(_worker, jobs):
                results.append(result)
                print(result, f"    --recipe '{result.recipe}'", sep="\n", flush=True)
    print(f"\n{'method':<20}{'dtype':<10}{'error/bound':>11}")
    for result in sorted(results):
        print(f"{result.method:<20}{result.dtype:<10}{result.ratio:11.4f}{'  BROKEN' if result.broken else ''}")
    return 1 if any(result.broken or result.ratio >= 1 for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
