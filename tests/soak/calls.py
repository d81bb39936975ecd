"""`attend`, `plan` and `audit`, asked in every way: kept bounds, untouched inputs, refusals with their four parts."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import avow
from avow.attend import Attended
from avow.core import Certificate, Problem
from avow.errors import AvowError
from avow.methods import all_methods
from tests.helpers.generators import draw_call
from tests.helpers.truth import Verdict, judge
from tests.soak.turns import Case, Found, Wrong, tried

NAN = math.nan
# What people pass by mistake where a number, a word or a tensor was meant.
NUMBERS: tuple[Any, ...] = (NAN, math.inf, -math.inf, -1, 0, 1e308, 10**400, -0.0, 1e-320, True, 0.5, Fraction(1, 3))
ODD: tuple[Any, ...] = (
    *(*NUMBERS, "0.1", "", "auto\n", b"x", [], {}, (1, 2), Path("x"), 1j, float, range(3), "é\0"),
    *(torch.tensor(0.1), torch.tensor([0.1, 0.2]), torch.tensor(True)),
)
# Scales that make logits vanish, overflow, or turn round.
SCALES = (0.0, -0.0, 1e30, -1e30, 1e-30, 5e-324, 1e-310, 1e300, -3.0, 1, 17, 1e-8)
# Rows of one answer that balls judge.
BALLS = 8
OPTIONS = ("tol", "method", "mask", "scale", "kernel", "sigma", "confidence", "coverage", "generator")


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Calls drawn from seeds alone."""
    yield case


def case(seed: int) -> Found:
    """One call, judged; now and then asked of what it cannot answer."""
    rng = random.Random(seed)
    drawn = draw_call(seed, rng.choice((1, 1, 2, 4, 8)))
    tensors, options = _reshaped(rng, [drawn.q, drawn.k, drawn.v], dict(drawn.options))
    options |= _wishes(rng)
    if rng.random() < 0.2 and options.get("kernel") is None:
        options["scale"] = rng.choice(SCALES)
    if rng.random() < 0.6:
        options |= {"method": drawn.method.name}
        options |= drawn.method.parameters if rng.random() < 0.6 else {}
    spoilt = _spoil(rng, tensors, options) if rng.random() < 0.15 else ""
    if rng.random() < 0.1:
        name = rng.choice([*OPTIONS, "rank", "features", "drop", "bits", "precision", "nonsense", "causal"])
        options[name] = rng.choice(ODD)
    before = [x.detach().clone() for x in _tensors(tensors, options)]
    with _mode(rng, tensors):
        found = tried(lambda: _asked(seed, tensors, options))
        again = tried(lambda: _asked(seed, tensors, options))
        _more(rng, tensors, options, found)
    for x, old in zip(_tensors(tensors, options), before, strict=True):
        if not torch.equal(x.detach().nan_to_num(nan=7.0), old.nan_to_num(nan=7.0)):
            raise Wrong("an input was changed")
    if isinstance(found, AvowError) or isinstance(again, AvowError):
        if str(found) != str(again):
            raise Wrong(f"refused once only, or otherwise: {found!s:.200} | {again!s:.200}")
        return Found(f"refused, {type(found).__name__}")
    if not torch.equal(found.out, again.out) or found.certificate != again.certificate:
        raise Wrong("the same seed gave two answers")
    if spoilt:
        raise Wrong(f"{spoilt} was answered")
    return judged(tensors, options, found)


def _asked(seed: int, tensors: list[Any], options: dict[str, Any]) -> Attended:
    given = {"generator": torch.Generator().manual_seed(seed + 1)} | options
    q, k, v = tensors
    return avow.attend(q, k, v, **given)


def _more(rng: random.Random, tensors: list[Any], options: dict[str, Any], found: Attended | AvowError) -> None:
    """A plan, an audit, and gradients of what was answered."""
    q, k, v = tensors
    known = ("mask", "causal", "scale", "enable_gqa", "kernel", "sigma")
    about = {name: x for name, x in options.items() if name in known}
    if rng.random() < 0.1:
        wishes = {name: x for name, x in options.items() if name in ("tol", "confidence", "coverage")}
        plan = tried(lambda: avow.plan(q, k, v, **about, **wishes))
        if not isinstance(plan, AvowError) and "plan for" not in str(plan):
            raise Wrong("a plan that does not print")
    if isinstance(found, AvowError):
        return
    if rng.random() < 0.2 and found.out.requires_grad:
        tried(lambda: found.out.double().sum().backward())
    if rng.random() < 0.15:
        out = found.out.detach()
        if rng.random() < 0.5:
            out = out + torch.rand_like(out) * rng.choice((0.0, 1e-3, 1.0))
        share: dict[str, Any] = {"coverage": rng.choice((0.5, 0.9, 0.999)), "confidence": rng.choice((0.5, 0.9))}
        report = tried(lambda: avow.audit(out, q, k, v, **about, **share, method=found.certificate.method))
        if isinstance(report, AvowError) or not report.errors.numel():
            return
        p = _problem([x.detach() for x in tensors], options)
        bounds = torch.full(p.q.shape[:-1], math.inf, dtype=torch.float64)
        bounds[tuple(report.rows.T)] = report.errors
        method = all_methods()[found.certificate.method]()
        verdict = judge(method, p, out.reshape(*p.q.shape[:-1], -1), bounds, options.get("mask"))
        if verdict.broken:
            raise Wrong(f"an audited row is further off than the audit says: {verdict.story}")


def judged(tensors: list[Tensor], options: dict[str, Any], found: Attended) -> Found:
    """An answer against the truth, and its certificate against what was asked."""
    out, certificate = found
    p = _problem([x.detach() for x in tensors], options)
    tol = options.get("tol")
    if tol is not None and not certificate.keeps(float(tol)):
        raise Wrong(f"tol={tol} is not kept by {certificate.bound}")
    rows = certificate.rows.reshape(p.q.shape[:-1])
    if rows.numel() and certificate.kind != "none" and float(rows.amax()) != certificate.bound:
        raise Wrong(f"the bound {certificate.bound} is not that of the rows, {float(rows.amax())}")
    if rows.numel() and bool(rows.isnan().any()):
        raise Wrong("a bound is nan")
    if tuple(out.shape) != (*p.leading, p.q.shape[-2], p.v.shape[-1]) or out.dtype != p.q.dtype:
        raise Wrong(f"the answer is {tuple(out.shape)} of {out.dtype}")
    text = str(certificate)
    if Certificate.from_json(certificate.to_json()) != certificate or certificate.method not in text:
        raise Wrong("a certificate that does not come back from JSON")
    if p.empty:
        if out.numel() and bool((out != 0).any()):
            raise Wrong("nothing to attend to, and an answer that is not zero")
        return Found("nothing to attend to")
    if not bool(torch.isfinite(out).all()):
        raise Wrong("nan or inf in an answer")
    if certificate.kind == "none":
        return Found("no promise")
    return weighed(certificate, _verdict(p, options.get("mask"), found, rows))


def weighed(certificate: Certificate, verdict: Verdict) -> Found:
    """What a verdict on an answer's rows is worth."""
    if certificate.kind == "deterministic":
        if verdict.broken:
            raise Wrong(f"{verdict.broken} broken bounds: {verdict.story}")
        return Found(certificate.method, verdict.worst)
    chance = round(1 - certificate.confidence, 12)
    if certificate.kind == "sampled":
        # One promise about all rows: too many of them beyond the bound is one miss.
        missed = verdict.broken > (1 - certificate.coverage) * verdict.rows * (1 + 1e-12)
        if chance == 0:
            if missed:
                raise Wrong(f"{verdict.broken} of {verdict.rows} rows beyond a bound on {certificate.coverage} of them")
            return Found(f"{certificate.method}, sampled")
        return Found(f"{certificate.method}, sampled", 0.0, chance, 1, int(missed))
    # Rows of one call may share their draws, so they fail together: a call is one trial.
    return Found(f"{certificate.method}, statistical", 0.0, chance, 1, int(verdict.broken > 0))


def _verdict(p: Problem, mask: Tensor | None, found: Attended, rows: Tensor) -> Verdict:
    certificate = found.certificate
    method = all_methods()[certificate.method](**certificate.parameters)
    out = found.out.detach().reshape(*p.q.shape[:-1], -1)
    if mask is not None and mask.ndim > 4:
        mask = p.bias if p.bias is None or p.allowed is None else p.bias.masked_fill(~p.allowed, -math.inf)
    return judge(method, p, out, rows, mask, BALLS)


def _problem(tensors: list[Tensor], options: dict[str, Any]) -> Problem:
    known = ("mask", "causal", "scale", "enable_gqa", "kernel", "sigma")
    return Problem.of(*tensors, **{name: x for name, x in options.items() if name in known})


def _tensors(tensors: list[Any], options: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*tensors, options.get("mask")) if isinstance(x, Tensor)]


def _wishes(rng: random.Random) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    if rng.random() < 0.75:
        wishes["tol"] = rng.choice((10 ** rng.uniform(-12, 0.3), 10 ** rng.uniform(-3, 0), 2, 1e-12, 0.0, 1e30))
    if rng.random() < 0.4:
        wishes["confidence"] = rng.choice((0.9, 0.99, 0.999, 1.0, 1))
    if rng.random() < 0.15:
        wishes["coverage"] = rng.choice((0.5, 0.9, 0.99))
    return wishes


def _reshaped(rng: random.Random, tensors: list[Tensor], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same call with other axes, or with axes of no length."""
    kind = rng.random()
    mask = options["mask"]
    if kind < 0.1 and tensors[0].shape[1] == tensors[1].shape[1]:
        if mask is not None and mask.ndim == 4:
            options["mask"] = mask[0] if kind < 0.05 else mask
        return [x[0] if kind < 0.05 else x.unsqueeze(0) for x in tensors], options
    if kind < 0.14 and tensors[0].shape[1] == 1 and (mask is None or mask.ndim == 2):
        return [x[0, 0] for x in tensors], options
    if kind < 0.2:
        axis = rng.choice((0, 1, 2, 3))
        some = rng.choice(([0], [1, 2], [0, 1, 2], [2]))
        for i in some:
            tensors[i] = tensors[i].narrow(axis, 0, 0)
        if mask is not None and axis == 2:
            n, s = tensors[0].shape[2], tensors[1].shape[2]
            options["mask"] = mask[..., : n if mask.shape[-2] > 1 else 1, :s]
    elif kind < 0.28 and mask is not None:
        n, s = mask.shape[-2:]
        b, h = tensors[0].shape[:2]
        wide = mask.expand(b, h, n, s) if rng.random() < 0.5 else mask.expand(1, 1, n, s)
        options["mask"] = wide.transpose(-1, -2).contiguous().transpose(-1, -2) if rng.random() < 0.5 else wide
    elif kind < 0.33:
        tensors = [x.expand(3, *x.shape[1:]) for x in tensors]
    return tensors, options


def _spoil(rng: random.Random, tensors: list[Any], options: dict[str, Any]) -> str:
    """Put something where no number is; what must be refused."""
    at = rng.choice((0, 1, 2, 3, 4, 5))
    if at < 3:
        x = tensors[at].clone()
        if not x.numel() or any(not y.numel() for y in tensors):
            return ""
        flat = x.reshape(-1)
        flat[rng.randrange(x.numel())] = rng.choice((NAN, math.inf, -math.inf))
        tensors[at] = flat.reshape(x.shape)
        return "nan or inf among the inputs"
    if at == 3:
        n, s = tensors[0].shape[-2], tensors[1].shape[-2]
        options["mask"] = torch.zeros(n, s).fill_(rng.choice((NAN, math.inf)))
        return "nan or +inf in a mask" if n * s else ""
    which = rng.randrange(3)
    if at == 4:
        x = tensors[which]
        tensors[which] = rng.choice((None, 1.0, "q", [[1.0]], x.long(), x.to(torch.complex64)))
        return "no tensor of floating-point numbers"
    odd = tensors[which]
    tensors[which] = rng.choice((odd.flatten(), odd[..., :-1], odd.unsqueeze(0), odd.sum(), odd.transpose(0, -1)))
    return "" if tensors[which].shape == odd.shape or odd.shape[-2:] == tensors[which].shape[-2:] else _unfit(tensors)


def _unfit(tensors: list[Any]) -> str:
    try:
        Problem.of(*tensors, enable_gqa=True)
    except AvowError:
        return "shapes that do not fit"
    return ""


@contextlib.contextmanager
def _mode(rng: random.Random, tensors: list[Any]) -> Iterator[None]:
    """With gradients, without, in inference or under autocast."""
    kind = rng.random()
    if kind < 0.2 and all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        for i, x in enumerate(tensors):
            tensors[i] = x.detach().requires_grad_(rng.random() < 0.7)
    with contextlib.ExitStack() as stack:
        if 0.2 <= kind < 0.3:
            stack.enter_context(torch.inference_mode())
        elif 0.3 <= kind < 0.4:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        elif 0.4 <= kind < 0.5:
            stack.enter_context(torch.no_grad())
        yield
