"""What attention really is: float64 or wider with its own error bounded, ball arithmetic where that cannot decide.

A verdict on a certificate is never a matter of opinion: an error proved above its bound is broken, an error
proved below it is kept, and what float arithmetic cannot decide goes to balls of as many bits as it takes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from flint import arb, ctx
from torch import Tensor

from avow.certificates.audit import reference_error
from avow.contract import Method, Norms, Problem
from avow.maths.heads import longest_seen, per_query_head
from avow.maths.masks import visible
from avow.methods.latent import Latent, directions

# Mechanisms whose truth is written out here once more, apart from the methods that are judged by it.
KNOWN = ("softmax attention", "separable attention", "latent attention")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Rows judged, rows broken (with the first as a story), rows that needed balls, the largest error beside its bound.

    The last is of rows alone whose bounds are far above what the reference itself may be off.
    """

    rows: int
    broken: int
    by_balls: int
    story: str = ""
    worst: float = 0.0


def judge(
    method: Method,
    p: Problem,
    norms: Norms,
    out: Tensor,
    bounds: Tensor,
    mask: Tensor | None,
    most_balls: int | None = None,
) -> Verdict:
    """How many rows of `out` break their bound, decided rigorously; `mask` is the mask as the caller gave it.

    Of the rows that floats cannot decide, `most_balls` go to balls, spread over all of them.
    """
    if p.empty:
        wrong = int(((out != 0).any(-1) & (bounds < math.inf)).sum())
        return Verdict(bounds.numel(), wrong, 0, f"{wrong} rows answer nothing otherwise than by zeros")
    out = out.double()
    truth, added = wide_reference(method, p, mask)
    tight = longest_seen(p, _norm(p.v.double())).expand(p.q.shape[:-1])
    distance = _norm(out - truth)
    error = torch.where(tight > 0, distance / tight.clamp(min=1e-320), torch.where(distance > 0, math.inf, 0.0))
    key = per_query_head(norms.k.amax(-1, keepdim=True), p.q.shape[1])
    own = _reference_error(method, p, norms, key)
    sure = (error + own) * (1 + 1e-9) <= bounds
    # A target never lies outside the ball of its values, so a bound near 2 needs no reference at all.
    length = _norm(out)
    sure |= length * (1 + 1e-9) <= (bounds - 1) * tight
    lost = ~sure & (error > bounds * (1 + 1e-9) + own)
    if p.bias is not None and method.target in KNOWN:
        lost &= False  # A bias may swallow what it is added to in the reference, too: only balls tell.
    clear = (bounds > 100 * own) & torch.isfinite(error)
    worst = float((error / bounds)[clear].amax()) if bool(clear.any()) else 0.0
    broken, story = int(lost.sum()), ""
    if broken:
        story = f"{method.name}{method.parameters} rows {lost.nonzero().tolist()[:3]} by far; {p.sizes}"
    if method.target not in KNOWN:
        # A mechanism unknown here has no balls: its own float64 reference decides.
        return Verdict(bounds.numel(), broken, 0, story, worst)
    open_rows = (~sure & ~lost).nonzero().tolist()
    if most_balls is not None:
        open_rows = open_rows[:: -(-len(open_rows) // most_balls) or 1]
    for b, h, i in open_rows:
        actual = ball_error(method, p, out, b, h, i, added)
        if not actual <= arb(float(bounds[b, h, i])):
            broken += 1
            story = story or (
                f"{method.name}{method.parameters} row ({b},{h},{i}): error {float(actual.mid()):.6g} > bound "
                f"{float(bounds[b, h, i]):.6g}; {p.sizes}"
            )
    return Verdict(bounds.numel(), broken, len(open_rows), story, worst)


def _norm(x: Tensor) -> Tensor:
    """Lengths of rows, of those too whose squares would vanish or overflow."""
    top = x.abs().amax(-1)
    unit = torch.where(top > 0, top, 1.0)
    return torch.linalg.vector_norm(x / unit.unsqueeze(-1), dim=-1) * unit


def _added(p: Problem, mask: Tensor | None) -> Tensor | None:
    """What the caller's own mask adds to the logits, apart from the kernel's share of the bias."""
    if mask is None or mask.dtype == torch.bool:
        return None
    numbers = mask.double().masked_fill(mask == -math.inf, 0.0)
    return numbers.reshape((1,) * (4 - numbers.ndim) + tuple(numbers.shape))


def _reference_error(method: Method, p: Problem, norms: Norms, key: Tensor) -> Tensor:
    shrink = 2.0**-11 if p.q.dtype == torch.float64 else 1.0
    if isinstance(method, Latent):
        return _latent_error(method, p, norms, key, shrink * 2.0**-53)
    if method.target != "softmax attention":
        # Positive sums of exponentials of the inputs themselves: see the method's own promise.
        bias = 0.0 if p.bias is None else float(p.bias.abs().amax())
        return torch.tensor(shrink * (4 * bias + 4000 + 8 * p.k.shape[-2]) * 2.0**-53).expand(p.q.shape[:-1])
    return shrink * reference_error(p, norms)


def _latent_error(method: Latent, p: Problem, norms: Norms, key: Tensor, u: float) -> Tensor:
    """What rounding by u may do to latent attention written out: logits move, so weights do, so latents do, and again.

    Weights that are proportional to exp(x) change in sum by expm1(2δ) at most where every x moves by at most δ.
    """
    s, d, m = p.k.shape[-2], p.q.shape[-1], method.latents
    bias = 0.0 if p.bias is None else float(p.bias.abs().amax())
    sketch = abs(p.scale) * math.sqrt(d) * key.double()  # the largest logit of a latent, which looks along signs
    reach = abs(p.scale) * norms.q.double() * key.double()  # and of a row: latent keys are no longer than keys
    down = u * ((d + 16) * sketch + 8 * bias + 64)
    eta = (torch.expm1(2 * down) + (4 * s + 64) * u).clamp(max=2.01)
    up = reach * eta + u * ((d + 16) * reach * (1 + eta) + 16 * bias + 8 * math.log(s * m) + 2 * s + 200)
    return torch.expm1(2 * up) * (1 + eta) + eta + 4 * (s + m + 16) * u


def wide_reference(method: Method, p: Problem, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The target as far as float arithmetic knows it, and what the caller's mask adds to the logits."""
    added = _added(p, mask)
    return _wide_reference(method, p, added), added


def _wide_reference(method: Method, p: Problem, added: Tensor | None) -> Tensor:
    """The target, in float64 for narrower inputs and in 80-bit arithmetic for float64 ones, rounded to float64."""
    if p.q.dtype != torch.float64 or method.target not in KNOWN or np.finfo(np.longdouble).eps > 1e-18:
        return method.reference(p)
    heads = p.q.shape[1]
    q, k, v = (np.asarray(per_query_head(x, heads)).astype(np.longdouble) for x in (p.q, p.k, p.v))
    n, s = q.shape[-2], k.shape[-2]
    seen = visible(p)
    mask = np.broadcast_to(np.ones((1, 1, 1, 1), bool) if seen is None else seen.numpy(), (*q.shape[:2], n, s))
    bias = np.longdouble(0) if added is None else added.numpy().astype(np.longdouble)
    if p.kernel == "rbf":
        bias = bias - (np.longdouble(0.5) * np.longdouble(p.scale) * (k**2).sum(-1))[:, :, None, :]
    if method.target == "softmax attention":
        logits = np.longdouble(p.scale) * np.einsum("bhnd,bhsd->bhns", q, k) + bias
        weights = _softmax(np.where(mask, logits, -np.inf), -1)
        return torch.from_numpy(np.einsum("bhns,bhse->bhne", weights, v).astype(np.float64))
    if isinstance(method, Latent):
        bias = np.broadcast_to(bias, mask.shape)
        rows = [
            [_wide_latent(method, p.scale, q[b, h], k[b, h], v[b, h], mask[b, h], bias[b, h]) for h in range(heads)]
            for b in range(len(q))
        ]
        return torch.from_numpy(np.array(rows).astype(np.float64))
    cool = np.longdouble(method.parameters["temperature"])
    rho = _softmax(q / cool, -1)
    logs = (k / cool)[:, :, None] + np.broadcast_to(bias, (*q.shape[:2], n, s))[..., None]
    columns = _softmax(np.where(mask[..., None], logs, -np.inf), -2)
    return torch.from_numpy(np.einsum("bhnd,bhnsd,bhse->bhne", rho, columns, v).astype(np.float64))


def _wide_latent(
    method: Latent, scale: float, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Latent attention of one head in the type of its inputs."""
    place, wide = np.arange(len(k)), np.longdouble(scale)
    horizon = np.where(seen, place, 0).max(-1, keepdims=True) // method.segment * method.segment
    behind, near = seen & (place < horizon), seen & (place >= horizon)
    z = directions(method.latents, torch.zeros(1, q.shape[-1], dtype=torch.float64)).numpy()
    logs = wide * (z @ k.T) + bias[:, None]  # (n, m, s)
    beta = _softmax(np.where(behind[:, None], logs, -np.inf), -1)
    latent_keys, latent_values = np.einsum("nms,sd->nmd", beta, k), np.einsum("nms,se->nme", beta, v)
    top = np.where(behind, bias, -np.inf).max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    mass = np.where(behind, np.exp(np.where(behind, bias, top) - top), 0).sum(-1, keepdims=True)
    # A row with nothing behind its horizon reads no latents.
    share = np.where(mass > 0, top + np.log(np.where(mass > 0, mass, 1) / np.longdouble(method.latents)), -np.inf)
    far = wide * np.einsum("nd,nmd->nm", q, latent_keys) + share
    own = np.where(near, wide * (q @ k.T) + bias, -np.inf)
    weights = _softmax(np.concatenate([far, own], -1), -1)
    far, own = np.split(weights, [method.latents], -1)
    return np.einsum("nm,nme->ne", far, latent_values) + own @ v


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis, keepdims=True)
    weights = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def ball_error(method: Method, p: Problem, out: Tensor, b: int, h: int, i: int, added: Tensor | None) -> arb:
    """The true error of one row, as a ball narrow enough to compare."""
    for bits in (400, 1600, 6400):
        ctx.prec = bits
        try:
            error = _ball_row(method, p, out, b, h, i, added)
        finally:
            ctx.prec = 53
        if error.rad() < 1e-20:
            return error
    return error


def _ball_row(method: Method, p: Problem, out: Tensor, b: int, h: int, i: int, added: Tensor | None) -> arb:
    group = h // (p.q.shape[1] // p.k.shape[1])
    seen = visible(p)
    keys = [j for j in range(p.k.shape[-2]) if seen is None or bool(_at(seen, b, h, i)[j])]
    got = [arb(x) for x in out[b, h, i].tolist()]
    if not keys:
        return _length(got)
    q = [arb(x) for x in p.q[b, h, i].double().tolist()]
    k = [[arb(x) for x in p.k[b, group, j].double().tolist()] for j in keys]
    v = [[arb(x) for x in p.v[b, group, j].double().tolist()] for j in keys]
    bias = [
        _ball_bias(p, key, None if added is None else _at(added, b, h, i)[j]) for j, key in zip(keys, k, strict=True)
    ]
    if method.target == "softmax attention":
        scale = arb(p.scale)
        weights = _ball_softmax([scale * _dot(q, key) + extra for key, extra in zip(k, bias, strict=True)])
    elif isinstance(method, Latent):
        weights = _ball_latent(method, arb(p.scale), q, k, bias, keys)
    else:
        cool = arb(method.parameters["temperature"])
        rho = _ball_softmax([x / cool for x in q])
        columns = [
            _ball_softmax([key[f] / cool + extra for key, extra in zip(k, bias, strict=True)]) for f in range(len(q))
        ]
        weights = [_dot(rho, [column[j] for column in columns]) for j in range(len(keys))]
    off = [got[c] - _dot(weights, [row[c] for row in v]) for c in range(len(got))]
    lengths = [_length(row) for row in v]
    longest = max(lengths, key=lambda x: float(x.mid()) if x.mid() < 1e300 else 1e300)
    return _length(off) / longest if longest > 0 else _length(off)


def _ball_latent(
    method: Latent, scale: arb, q: list[arb], k: list[list[arb]], bias: list[arb], places: list[int]
) -> list[arb]:
    """The weight of each key that a row sees, those behind its horizon through the latents that average them."""
    horizon = places[-1] // method.segment * method.segment
    count = sum(place < horizon for place in places)
    logits = [scale * _dot(q, key) + extra for key, extra in zip(k[count:], bias[count:], strict=True)]
    if not count:
        return _ball_softmax(logits)
    behind, shifts = k[:count], bias[:count]
    top = max(shifts, key=lambda x: x.mid())
    share = top + (sum(((x - top).exp() for x in shifts), arb(0)) / method.latents).log()
    columns = [list(column) for column in zip(*behind, strict=True)]
    betas, far = [], []
    for z in directions(method.latents, torch.zeros(1, len(q), dtype=torch.float64)).tolist():
        look = [arb(x) for x in z]
        betas.append(_ball_softmax([scale * _dot(look, key) + x for key, x in zip(behind, shifts, strict=True)]))
        far.append(scale * _dot(q, [_dot(betas[-1], column) for column in columns]) + share)
    weights = _ball_softmax(far + logits)
    through = [_dot(weights[: len(far)], [beta[j] for beta in betas]) for j in range(count)]
    return through + weights[len(far) :]


def _ball_bias(p: Problem, key: list[arb], added: Tensor | None) -> arb:
    shift = -arb(0.5) * arb(p.scale) * _dot(key, key) if p.kernel == "rbf" else arb(0)
    return shift if added is None else shift + arb(float(added))


def _at(x: Tensor, b: int, h: int, i: int) -> Tensor:
    return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0, i if x.shape[2] > 1 else 0]


def _dot(a: list[arb], b: list[arb]) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def _length(a: list[arb]) -> arb:
    square = _dot(a, a)
    if square >= 0:
        return square.sqrt()
    # The ball reaches below zero, where no square is: from zero to the root of its upper end.
    half = square.abs_upper().sqrt() / 2
    return arb(half.mid(), half.abs_upper())


def _ball_softmax(logits: list[arb]) -> list[arb]:
    top = logits[0]
    for x in logits[1:]:
        if x.mid() > top.mid():
            top = x
    weights = [(x - top).exp() for x in logits]
    total = sum(weights, arb(0))
    return [w / total for w in weights]
