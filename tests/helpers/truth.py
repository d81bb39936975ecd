"""What attention really is, written out from its definition: it shares no code with the library that it judges.

It reads what a caller passes (q, k, v, mask, scale, causal, kernel, sigma) and nothing else. Floats decide first:
float64 for narrower inputs and 80-bit arithmetic for float64 ones, each with its own error bounded. Where that cannot
decide whether an error is above its bound, balls do, of as many bits as it takes. So an error proved above its bound is
broken, one proved below is kept, and nothing is a matter of opinion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from flint import arb, ctx
from torch import Tensor

if TYPE_CHECKING:
    from avow.core import Method, Problem

SOFTMAX, SEPARABLE, LATENT = "softmax attention", "separable attention", "latent attention"
# Mechanisms whose definition stands here.
KNOWN = (SOFTMAX, SEPARABLE, LATENT)
# Balls of so many bits are tried in turn: logits of 1e600 need two thousand.
_BITS = (200, 800, 3200, 12800)

Wide = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Question:
    """What a caller passes: q (..., h, n, d), k (..., g, s, d), v (..., g, s, e), with g dividing h.

    Without a `scale` it is 1/√d, or 1/σ where `sigma` is given, as real numbers.

    `parameters` are those that define a mechanism: the temperature of separable attention, latents and segment of
    latent attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    kernel: str = "dot"
    sigma: float | None = None
    target: str = SOFTMAX
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batches, heads, rows, keys."""
        heads = self.q.shape[-3] if self.q.ndim > 2 else 1
        return math.prod(self.q.shape[:-3]), heads, self.q.shape[-2], self.k.shape[-2]

    @property
    def empty(self) -> bool:
        return 0 in (*self.shape, self.v.shape[-1])


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
    which: tuple[tuple[int, int, int], ...] = ()


class Errors(NamedTuple):
    """The error of every row (b, h, n) as floats know it, how far that may be off, and the largest value each sees."""

    error: Wide
    own: Wide
    longest: Wide


def judge(
    method: Method, p: Problem, out: Tensor, bounds: Tensor, mask: Tensor | None, most_balls: int | None = None
) -> Verdict:
    """How many rows of a problem's answer break their bound; `mask` is the mask as the caller gave it."""
    if method.target not in KNOWN:
        return _by_its_own_reference(method, p, out, bounds)
    found = verdict(_asked(method, p, mask), out, bounds, most_balls)
    return dataclasses.replace(found, story=f"{method.name}{method.parameters}: {found.story}" if found.story else "")


def _asked(method: Method, p: Problem, mask: Tensor | None) -> Question:
    """The question that a canonical problem stands for: its numbers are the caller's, and so must the mask's be."""
    if mask is not None and mask.dtype != torch.bool:
        shown = mask.double() if p.allowed is None else torch.where(p.allowed, mask.double(), -math.inf)
    else:
        shown = p.allowed
    return Question(p.q, p.k, p.v, shown, p.causal, p.scale, p.kernel, None, method.target, method.parameters)


def _by_its_own_reference(method: Method, p: Problem, out: Tensor, bounds: Tensor) -> Verdict:
    """A mechanism unknown here has no balls: its own float64 reference decides, where it does so by far."""
    truth = method.reference(p)
    distance = torch.linalg.vector_norm(out.double() - truth, dim=-1)
    longest = torch.linalg.vector_norm(p.v.double(), dim=-1).amax()
    broken = int((distance > (bounds * (1 + 1e-9) + 1e-12) * longest).sum())
    story = f"{method.name}{method.parameters}: {broken} rows are further off than their bounds"
    return Verdict(bounds.numel(), broken, 0, story if broken else "")


def verdict(question: Question, out: Tensor, bounds: Tensor, most_balls: int | None = None) -> Verdict:
    """How many rows of `out` break their bound, decided rigorously.

    Of the rows that floats cannot decide, `most_balls` go to balls: those that look worst.
    """
    b, h, n, _ = question.shape
    given, limits = _given(out, question), bounds.detach().cpu().double().reshape(b, h, n).numpy()
    if question.empty:
        wrong = int(((given != 0).any(-1) & (limits < math.inf)).sum())
        return Verdict(limits.size, wrong, 0, f"{wrong} rows that attend to nothing are not zero" if wrong else "")
    with np.errstate(all="ignore"):
        error, own, longest = errors(question, out)
        kept = (error + own) * (1 + 1e-9) <= limits
        # A target never lies outside the ball of its values, so a bound near 2 needs no reference at all.
        kept |= _norm(given.astype(error.dtype)) * (1 + 1e-9) <= (limits - 1) * longest
        kept |= limits == math.inf
        wrong = ~np.isfinite(given).all(-1) | np.isnan(limits)
        lost = ~kept & (wrong | ((error - own) * (1 - 1e-9) > limits))
        clear = (limits > 100 * own) & np.isfinite(error) & (limits > 0)
        worst = float((error / np.where(clear, limits, 1))[clear].max()) if clear.any() else 0.0
    which = [(int(x), int(y), int(z)) for x, y, z in np.argwhere(lost)]
    undecided = np.argwhere(~kept & ~lost).tolist()
    if most_balls is not None and len(undecided) > most_balls:
        undecided.sort(key=lambda at: float(error[tuple(at)]) / max(float(limits[tuple(at)]), 1e-300), reverse=True)
        undecided = undecided[:most_balls]
    for row in undecided:
        found, ratio = ball_verdict(question, given, *row, float(limits[tuple(row)]))
        worst = max(worst, ratio)
        if not found:
            which.append((row[0], row[1], row[2]))
    story = "" if not which else _story(question, which, error, limits)
    return Verdict(limits.size, len(which), len(undecided), story, worst, tuple(which))


def _story(question: Question, which: Sequence[tuple[int, int, int]], error: Wide, limits: Wide) -> str:
    row = max(which, key=lambda at: float(error[at]) / max(float(limits[at]), 1e-300))
    sizes = f"q {tuple(question.q.shape)} k {tuple(question.k.shape)} v {tuple(question.v.shape)} {question.q.dtype}"
    return (
        f"{len(which)} rows of {limits.size} of {question.target} break their bounds; row {row}: error "
        f"{float(error[row]):.4g}, bound {float(limits[row]):.4g}; {sizes}"
    )


def errors(question: Question, out: Tensor) -> Errors:
    """The error of every row by float arithmetic, and a bound on that arithmetic's own."""
    at = _Arrays.of(question)
    with np.errstate(all="ignore"):
        truth, own = _TARGETS[question.target](question, at)
        given = _given(out, question).astype(at.wide)
        distance = _norm(given - truth)
        longest = np.where(at.seen, _norm(at.v)[:, :, None, :], 0).max(-1)  # (b, h, n)
        some = longest > 0
        error = np.where(some, distance / np.where(some, longest, 1), np.where(distance > 0, np.inf, 0))
        s, e = at.v.shape[-2:]
        # Sums over keys of weighted values, their underflow, and the distance itself.
        own = own + 4 * (s + 8) * at.u + (e + 8) * at.u * error
        own = own + np.where(some, s * math.sqrt(e) * at.tiny / np.where(some, longest, 1), 0)
        return Errors(error, np.where(some, own, 0), longest)


def wide_reference(method: Method, p: Problem, mask: Tensor | None) -> Tensor:
    """The target as far as float arithmetic knows it."""
    question = _asked(method, p, mask)
    with np.errstate(all="ignore"):
        return torch.from_numpy(_TARGETS[question.target](question, _Arrays.of(question))[0].astype(np.float64))


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The numbers of a question in a wider type, one key head for each query head."""

    wide: Any
    q: Wide
    k: Wide
    v: Wide
    seen: Wide
    added: Wide
    scale: Any

    @staticmethod
    def of(question: Question) -> _Arrays:
        if np.float64(5e-324) * np.float64(1) == 0:
            raise RuntimeError("subnormal numbers are read as zero here: judge outside torch.set_flush_denormal(True)")
        wide = np.longdouble if question.q.dtype == torch.float64 else np.float64
        h = question.shape[1]
        q, k, v = (_numbers(x, wide) for x in (question.q, question.k, question.v))
        k, v = (np.repeat(x, h // x.shape[1], 1) for x in (k, v))
        seen, added = _mask(question)
        if question.scale is not None:
            scale = wide(question.scale)
        else:
            scale = 1 / (np.sqrt(wide(q.shape[-1])) if question.sigma is None else wide(question.sigma))
        return _Arrays(wide, q, k, v, seen, added.astype(wide), scale)

    @property
    def u(self) -> float:
        return float(np.finfo(self.wide).eps)

    @property
    def tiny(self) -> Any:
        return np.finfo(self.wide).tiny


def _given(out: Tensor, question: Question) -> Wide:
    b, h, n, _ = question.shape
    return out.detach().cpu().double().reshape(b, h, n, question.v.shape[-1]).numpy()


def _numbers(x: Tensor, wide: Any) -> Wide:
    """The numbers of a tensor, (b, h, length, dim), whatever its strides."""
    plain = x.detach().cpu().double()
    heads = plain.shape[-3] if plain.ndim > 2 else 1
    return plain.reshape(math.prod(plain.shape[:-3]), heads, *plain.shape[-2:]).numpy().astype(wide)


def _mask(question: Question) -> tuple[Wide, Wide]:
    """Which keys each row sees, and what is added to their logits; both broadcast to (b, h, n, s)."""
    b, h, n, s = question.shape
    seen, added = np.ones((1, 1, 1, s), bool), np.zeros((1, 1, 1, 1))
    if question.mask is not None:
        mask = question.mask.detach().cpu()
        whole = (*question.q.shape[:-2], n, s)
        numbers = np.broadcast_to(mask.numpy() if mask.dtype == torch.bool else mask.double().numpy(), whole)
        numbers = numbers.reshape(b, h, n, s)
        if mask.dtype == torch.bool:
            seen = numbers
        else:
            seen, added = numbers > -np.inf, np.where(numbers > -np.inf, numbers, 0)
    if question.causal:
        seen = seen & (np.arange(s) <= np.arange(n)[:, None])
    return seen, added


def _softmax(logits: Wide, off: Wide, u: float, axis: int) -> tuple[Wide, Wide]:
    """Weights, and how far all of them together may be from those of the real logits, which are `off` at most so much.

    With p the weights of the computed logits and a_j = exp(−e_j) for errors |e_j| ≤ off_j, the real ones are
    p_j·a_j/Σ p·a, so that they differ by 2E/(1 − E) in sum where E = Σ p_j·expm1(off_j) < 1.
    """
    top = logits.max(axis, keepdims=True)
    x = logits - np.where(np.isfinite(top), top, 0)
    hidden = logits == -np.inf
    off = np.where(hidden, 0, off + u * (2 * np.abs(np.where(hidden, 0, x)) + 16))
    weights = np.exp(x)
    total = weights.sum(axis, keepdims=True)
    some = np.where(total > 0, total, 1)
    weights = weights / some
    # A weight that vanished may still be one that a large error makes large.
    moved = np.where(off < 1, weights * np.expm1(np.minimum(off, 1)), np.exp(x - np.log(some) + off))
    keys = logits.shape[axis]
    whole = 1.01 * np.where(hidden, 0, moved).sum(axis) + 4 * (keys + 8) * u
    return weights, np.where(whole < 0.5, 2 * whole / (1 - np.minimum(whole, 0.5)), 2.0)


def _logits(at: _Arrays, rbf: bool) -> tuple[Wide, Wide]:
    """Logits (b, h, n, s), −inf where a key is hidden, and how far each may be off."""
    d = at.q.shape[-1]
    logits = at.scale * np.matmul(at.q, np.swapaxes(at.k, -1, -2)) + at.added
    size = abs(at.scale) * _norm(at.q)[..., None] * _norm(at.k)[..., None, :] + np.abs(at.added)
    if rbf:
        # −‖q − k‖²/2σ without ‖q‖², which all keys of a row share.
        half = at.scale * (at.k**2).sum(-1)[..., None, :] / 2
        logits, size = logits - half, size + half
    return np.where(at.seen, logits, -np.inf), (d + 12) * at.u * size + d * at.tiny


def _softmax_target(question: Question, at: _Arrays) -> tuple[Wide, Wide]:
    weights, own = _softmax(*_logits(at, question.kernel == "rbf"), at.u, -1)
    return np.matmul(weights, at.v), own


def _separable_target(question: Question, at: _Arrays) -> tuple[Wide, Wide]:
    """Softmax over the features of q, times softmax over the keys that a row sees of each feature of k."""
    cool = at.wide(question.parameters.get("temperature", 1.0))
    (b, h, n, d), s = at.q.shape, at.k.shape[-2]
    rho, own = _softmax(at.q / cool, 2 * at.u * np.abs(at.q / cool), at.u, -1)
    out = np.zeros((b, h, n, at.v.shape[-1]), at.wide)
    for f in range(d):
        key = (at.k[..., f] / cool)[:, :, None, :]
        size = 4 * at.u * (np.abs(key) + np.abs(at.added))
        logits = np.where(at.seen, key + at.added, -np.inf)
        columns, off = _softmax(np.broadcast_to(logits, (b, h, n, s)), np.broadcast_to(size, (b, h, n, s)), at.u, -1)
        out = out + rho[..., f : f + 1] * np.matmul(columns, at.v)
        own = own + rho[..., f] * (off + 4 * at.u)
    return out, own + 2 * d * at.u


def _latent_target(question: Question, at: _Arrays) -> tuple[Wide, Wide]:
    (b, h, n, _), s = at.q.shape, at.k.shape[-2]
    seen, added = (np.broadcast_to(x, (b, h, n, s)) for x in (at.seen, at.added))
    given = (at.q, at.k, at.v, seen, added)
    rows = [[_latent_head(question.parameters, at, *(x[i, j] for x in given)) for j in range(h)] for i in range(b)]
    return np.array([[out for out, _ in row] for row in rows]), np.array([[own for _, own in row] for row in rows])


def _latent_head(
    parameters: Mapping[str, Any], at: _Arrays, q: Wide, k: Wide, v: Wide, seen: Wide, added: Wide
) -> tuple[Wide, Wide]:
    """Latent attention of one head: m averages of what lies behind the horizon, and what lies before it itself."""
    m, segment, u = parameters["latents"], parameters["segment"], at.u
    (s, d), place = k.shape, np.arange(len(k))
    horizon = np.where(seen, place, 0).max(-1, keepdims=True) // segment * segment  # (n, 1)
    behind, near = seen & (place < horizon), seen & (place >= horizon)
    size = abs(at.scale) * _norm(k)
    z = np.array(_directions(m, d)).astype(at.wide)
    down = np.where(behind[:, None], at.scale * (z @ k.T) + added[:, None], -np.inf)  # (n, m, s)
    off = np.broadcast_to((d + 12) * u * (math.sqrt(d) * size + np.abs(added))[:, None], down.shape)
    beta, moved = _softmax(down, off, u, -1)
    latent_keys, latent_values = beta @ k, beta @ v
    top = np.where(behind, added, -np.inf).max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    mass = np.where(behind, np.exp(np.where(behind, added - top, 0)), 0).sum(-1, keepdims=True)
    share = np.where(mass > 0, top + np.log(np.where(mass > 0, mass, 1) / m), -np.inf)  # none behind: no latents
    reach = _norm(q)[:, None] * size.max()
    far = at.scale * np.einsum("nd,nmd->nm", q, latent_keys) + share
    far_off = reach * (moved + (d + s + 12) * u) + u * (4 * np.abs(added).max(-1, keepdims=True) + 4 * s + 64)
    own = np.where(near, at.scale * (q @ k.T) + added, -np.inf)
    own_off = (d + 12) * u * (reach + np.abs(added))
    weights, up = _softmax(np.concatenate([far, own], -1), np.concatenate([far_off, own_off], -1), u, -1)
    far, own = np.split(weights, [m], -1)
    out = np.einsum("nm,nme->ne", far, latent_values) + own @ v
    return out, up + (far * moved).sum(-1) + 4 * (m + s + 16) * u


def _directions(latents: int, dim: int) -> list[list[int]]:
    """Where latents look: the first nowhere, the others along signs that a hash of their place gives."""

    def sign(place: int) -> int:
        for _ in range(2):
            place = ((place ^ (place >> 16)) * 0x45D9F3B) % 2**32
        return 1 - 2 * (place >> 16 & 1)

    return [[sign(r * dim + f) if r else 0 for f in range(dim)] for r in range(latents)]


_TARGETS: dict[str, Callable[[Question, _Arrays], tuple[Wide, Wide]]] = {
    SOFTMAX: _softmax_target,
    SEPARABLE: _separable_target,
    LATENT: _latent_target,
}


def _norm(x: Wide) -> Wide:
    """Lengths of rows, of those too whose squares would vanish or overflow."""
    top = np.abs(x).max(-1, initial=0)
    unit = np.where(top > 0, top, 1)
    return np.asarray(np.sqrt(((x / unit[..., None]) ** 2).sum(-1)) * unit)


def ball_verdict(question: Question, out: Wide, b: int, h: int, i: int, bound: float) -> tuple[bool, float]:
    """Whether one row's error is proved to be within its bound, and the error beside it."""
    ratio = math.inf
    for bits in _BITS:
        error = _at_precision(bits, question, out, b, h, i)
        ratio = float(error.mid()) / bound if bound > 0 else (math.inf if error > 0 else 0.0)
        if error <= arb(bound):
            return True, ratio
        if error > arb(bound):
            return False, ratio
    return False, ratio


def ball_error(method: Method, p: Problem, out: Tensor, b: int, h: int, i: int, mask: Tensor | None) -> arb:
    """The true error of one row, as a ball narrow enough to compare."""
    question = _asked(method, p, mask)
    for bits in _BITS:
        error = _at_precision(bits, question, _given(out, question), b, h, i)
        if error.rad() < 1e-20:
            break
    return error


def _at_precision(bits: int, question: Question, out: Wide, b: int, h: int, i: int) -> arb:
    before, ctx.prec = ctx.prec, bits
    try:
        return _ball_row(question, out, b, h, i)
    finally:
        ctx.prec = before


def _ball_row(question: Question, out: Wide, b: int, h: int, i: int) -> arb:
    q, k, v = (_numbers(x, np.float64) for x in (question.q, question.k, question.v))
    group = h // (q.shape[1] // k.shape[1])
    seen, added = (np.broadcast_to(x, question.shape)[b, h, i] for x in _mask(question))
    places = np.flatnonzero(seen).tolist()
    got = _balls(out[b, h, i])
    if not places:
        return _length(got)
    row, keys, values = (
        _balls(q[b, h, i]),
        [_balls(k[b, group, j]) for j in places],
        [_balls(v[b, group, j]) for j in places],
    )
    shifts = _balls(added[places])
    if question.scale is not None:
        scale = arb(question.scale)
    else:
        scale = 1 / (arb(len(row)).sqrt() if question.sigma is None else arb(question.sigma))
    if question.kernel == "rbf":
        shifts = [shift - scale * _dot(key, key) / 2 for shift, key in zip(shifts, keys, strict=True)]
    if question.target == SOFTMAX:
        weights = _ball_softmax([scale * _dot(row, key) + shift for key, shift in zip(keys, shifts, strict=True)])
    elif question.target == LATENT:
        weights = _ball_latent(question.parameters, scale, row, keys, shifts, places)
    else:
        weights = _ball_separable(question.parameters, row, keys, shifts)
    off = [x - _dot(weights, [value[c] for value in values]) for c, x in enumerate(got)]
    longest = arb(0)
    for value in values:
        longest = longest.max(_length(value))
    return _length(off) / longest if longest > 0 else _length(off)


def _ball_separable(parameters: Mapping[str, Any], q: list[arb], k: list[list[arb]], shifts: list[arb]) -> list[arb]:
    cool = arb(parameters.get("temperature", 1.0))
    rho = _ball_softmax([x / cool for x in q])
    columns = [
        _ball_softmax([key[f] / cool + shift for key, shift in zip(k, shifts, strict=True)]) for f in range(len(q))
    ]
    return [_dot(rho, [column[j] for column in columns]) for j in range(len(k))]


def _ball_latent(
    parameters: Mapping[str, Any], scale: arb, q: list[arb], k: list[list[arb]], shifts: list[arb], places: list[int]
) -> list[arb]:
    """The weight of each key that a row sees, those behind its horizon through the latents that average them."""
    m, segment = parameters["latents"], parameters["segment"]
    horizon = places[-1] // segment * segment
    count = sum(place < horizon for place in places)
    logits = [scale * _dot(q, key) + shift for key, shift in zip(k[count:], shifts[count:], strict=True)]
    if not count:
        return _ball_softmax(logits)
    behind, own = k[:count], shifts[:count]
    top = _topmost(own)
    share = top + (sum(((x - top).exp() for x in own), arb(0)) / m).log()
    columns = [list(column) for column in zip(*behind, strict=True)]
    betas, far = [], []
    for direction in _directions(m, len(q)):
        look = [arb(x) for x in direction]
        betas.append(_ball_softmax([scale * _dot(look, key) + shift for key, shift in zip(behind, own, strict=True)]))
        far.append(scale * _dot(q, [_dot(betas[-1], column) for column in columns]) + share)
    weights = _ball_softmax(far + logits)
    through = [_dot(weights[:m], [beta[j] for beta in betas]) for j in range(count)]
    return through + weights[m:]


def _balls(x: Wide) -> list[arb]:
    return [arb(float(one)) for one in x]


def _dot(a: Sequence[arb], b: Sequence[arb]) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def _length(a: Sequence[arb]) -> arb:
    square = _dot(a, a)
    if square >= 0:
        return square.sqrt()
    # The ball reaches below zero, where no square is: from zero to the root of its upper end.
    half = square.abs_upper().sqrt() / 2
    return arb(half.mid(), half.abs_upper())


def _topmost(a: Sequence[arb]) -> arb:
    return max(a, key=lambda x: x.mid())


def _ball_softmax(logits: Sequence[arb]) -> list[arb]:
    top = _topmost(logits)
    weights = [(x - top).exp() for x in logits]
    total = sum(weights, arb(0))
    return [w / total for w in weights]
