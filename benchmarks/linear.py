"""How much faster the linear methods are than softmax attention, and than another library's linear attention."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.attend import Attended
from avow.bench.results import Goal, Result, Row
from avow.core import Problem
from avow.methods import method_named
from benchmarks.options import Options
from benchmarks.peers import PeerMissing, performer
from benchmarks.race import Contender, Race, race
from benchmarks.truth import broken, too_far

_FEATURES = 256
_NO_RATIO = "no ratio: one of the two did not run"
# Linear answers are estimates: this share of the truth's size is far from chance and within what they reach here.
_NEAR = 0.5
_SETTINGS: dict[str, dict[str, Any]] = {
    "separable": {},
    "random_features": {"features": _FEATURES},
    "low_rank": {"rank": 64},
    "polynomial": {},
}
# What a caller with a tolerance gets on flat heads: the method is the planner's choice.
_TOLERANT, _TOL = "attend within 1e-2, flat", 1e-2
_BARE = ", no certificate"
Inputs = tuple[Tensor, Tensor, Tensor]


def run(options: Options) -> Result:
    """Speed-ups over SDPA and over performer-pytorch, of whole calls with their certificates."""
    long, short = (2048, 512) if options.quick else (16384, 2048)
    seconds = 5.0 if options.quick else 45.0
    remarks = ["Without a certificate, a method's computing is timed alone."]
    qkv = inputs(long)
    flat = qkv[0] / 16, *qkv[1:]
    remarks.append("polynomial, and calls with a tolerance, get queries of a sixteenth of the size: flat heads.")
    contenders = []
    for causal in (False, True):
        contenders.append(_sdpa(qkv, causal))
        for name in _SETTINGS:
            contenders += _avow(name, flat if name == "polynomial" else qkv, causal)
    contenders.append(_tolerant(flat))
    few = inputs(short)
    beside = [_sdpa(few, True), *_avow("random_features", few, True)]
    try:
        contenders.append(_performer(qkv, causal=False))
        # Its causal form without CUDA holds n·features·d numbers per head in 128 chunks: only short sequences.
        beside.append(_performer(few, causal=True))
    except PeerMissing as error:
        remarks.append(f"performer-pytorch was left out: {error}.")
    found, compared = race(contenders, seconds), race(beside, seconds / 5)
    rows = _rows(found, long) + _rows(compared, short)
    goals = [
        _at_least(f"separable over SDPA, n = {long}", found, "SDPA", "separable", 50),
        _at_least(f"random_features over SDPA, n = {long}", found, "SDPA", "random_features", 15),
        _at_least(f"random_features over performer-pytorch, n = {long}", found, "performer", "random_features", 1.5),
        *(_at_most(name, found, 2.5) for name in _SETTINGS),
        _at_least(f"attend(tol={_TOL:g}) over SDPA on flat heads, n = {long}", found, "SDPA", _TOLERANT, 10),
    ]
    failed = [f"{name} {why}" for one in (found, compared) for name, why in one.failed.items()]
    title = f"linear: speed-ups over SDPA and performer-pytorch ({_FEATURES} features, 8 heads, d = 64, float32)"
    return Result(title, rows, goals, remarks, failed)


def inputs(n: int) -> Inputs:
    """Queries and keys that fill some eight directions, and values that follow the keys.

    The truth then differs from row to row, and a few hundred features can get near it.
    """
    generator = torch.Generator().manual_seed(n)
    q, k, noise = (torch.randn(1, 8, n, 64, generator=generator) for _ in range(3))
    spectrum = torch.exp(-torch.arange(64) / 8)
    return q * spectrum, k * spectrum, k * spectrum + 0.1 * noise


def _label(name: str, causal: bool) -> str:
    return f"{name}, causal" if causal else name


def _sdpa(qkv: Inputs, causal: bool) -> Contender:
    def bare() -> Tensor:
        return scaled_dot_product_attention(*qkv, is_causal=causal)

    problem = Problem.of(*qkv, causal=causal)
    return Contender(_label("SDPA", causal), bare, lambda: too_far(bare(), problem, 1e-3))


def _avow(name: str, qkv: Inputs, causal: bool) -> list[Contender]:
    """A method's whole call, and its computing alone."""
    settings = _SETTINGS[name]
    method, problem = method_named(name)(**settings), Problem.of(*qkv, causal=causal)

    def whole() -> Attended:
        generator = torch.Generator().manual_seed(1)
        return avow.attend(*qkv, method=name, causal=causal, generator=generator, **settings)

    def alone() -> Tensor:
        return method.compute(problem, torch.Generator().manual_seed(1)).out

    def check() -> str:
        out, certificate = whole()
        far = too_far(out, problem, _NEAR) if method.target == "softmax attention" else ""
        return broken(out, certificate, problem, method) or far

    bare = Contender(_label(f"{name}{_BARE}", causal), alone, check)
    return [Contender(_label(name, causal), whole, check), bare]


def _tolerant(qkv: Inputs) -> Contender:
    """A call with a tolerance, whichever method answers it."""
    problem = Problem.of(*qkv)

    def whole() -> Attended:
        return avow.attend(*qkv, tol=_TOL)

    def check() -> str:
        out, certificate = whole()
        return broken(out, certificate, problem) or ("" if certificate.keeps(_TOL) else "is above the tolerance")

    return Contender(_TOLERANT, whole, check)


def _performer(qkv: Inputs, causal: bool) -> Contender:
    torch.manual_seed(1)
    with contextlib.redirect_stdout(io.StringIO()):  # it announces the lack of its CUDA extension
        theirs = performer().FastAttention(dim_heads=64, nb_features=_FEATURES, causal=causal)

    def call() -> Tensor:
        return theirs(*qkv)

    problem = Problem.of(*qkv, causal=causal)
    return Contender(_label("performer", causal), call, lambda: too_far(call(), problem, _NEAR))


def _rows(found: Race, n: int) -> list[Row]:
    rows: list[Row] = []
    for name in [*found.times, *found.failed]:
        tail = ", causal" if name.endswith(", causal") else ""
        bare = name.removesuffix(tail)
        base, peer = found.ratio(f"SDPA{tail}", name), found.ratio(f"performer{tail}", name)
        rows.append(
            {
                "contender": bare.removesuffix(_BARE),
                "certificate": "no" if bare.endswith(_BARE) else "yes" if bare in (*_SETTINGS, _TOLERANT) else "–",
                "causal": "yes" if tail else "no",
                "n": n,
                "seconds": found.median(name) if name in found.times else None,
                "speed-up over SDPA": base and base.median,
                "by minima": base and base.minimum,
                "over performer-pytorch": peer and peer.median,
                "check": found.failed.get(name, "passed"),
            }
        )
    return rows


def _at_least(what: str, found: Race, base: str, name: str, least: float) -> Goal:
    aim, ratio = f"speed-up of {what}, at least {least:g}", found.ratio(base, name)
    if ratio is None:
        return Goal(aim, _NO_RATIO, False)
    return Goal(aim, f"{ratio.median:.3g} (by minima {ratio.minimum:.3g})", ratio.median >= least)


def _at_most(name: str, found: Race, most: float) -> Goal:
    aim, ratio = f"{name}, causal over non-causal time, at most {most:g}", found.ratio(f"{name}, causal", name)
    if ratio is None:
        return Goal(aim, _NO_RATIO, False)
    return Goal(aim, f"{ratio.median:.3g} (by minima {ratio.minimum:.3g})", ratio.median <= most)
