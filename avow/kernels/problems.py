"""Problems that linear attention's kernels can answer, as methods ask them; None where the plain path must."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Problem, has_tangents
from avow.errors import NotDifferentiable
from avow.kernels import feature_attention as features
from avow.kernels import linear_step
from avow.kernels import separable_attention as columns
from avow.kernels.chunking import TYPES, Sums
from avow.numerics import kernel_rounding, scan
from avow.numerics.features import Frame
from avow.numerics.kernel_rounding import KernelRounding

_WIDEST_KEY, _WIDEST_VALUE = 256, 512
# Tensor cores cut their sums at every eighth product. Over more channels than this that costs float32 more than twice
# the error of a plain product.
_WIDEST_FLOAT = 64
# Gradients of causal separable attention have one reference for all keys of a feature.
_STEEP_GRADIENT = 20.0
_STEP_REACH = 60.0


class Means(NamedTuple):
    """An answer, the state after the last key, and how both were rounded."""

    out: Float[Tensor, "b h n e"]
    state: scan.State
    rounding: KernelRounding


class Radii(NamedTuple):
    """Lengths of queries and of the longest keys over the root of the scale."""

    queries: Float[Tensor, "b h n"]
    keys: Float[Tensor, "b g 1"]


def shaped(p: Problem) -> bool:
    """Whether a problem has a shape, a type and a mask that kernels know, and no derivative forward is asked for."""
    if has_tangents(p.q, p.k, p.v):
        return False
    (_, h, n, d), (g, s), e = p.q.shape, p.k.shape[1:3], p.v.shape[3]
    paired = n == s or not p.causal
    widest = (_WIDEST_FLOAT, _WIDEST_FLOAT) if p.q.dtype == torch.float32 else (_WIDEST_KEY, _WIDEST_VALUE)
    fits = d <= widest[0] and e <= widest[1] and h % max(g, 1) == 0 and paired and p.mask_kind == "none"
    return fits and p.q.dtype in TYPES and min(p.q.numel(), p.k.numel(), p.v.numel()) > 0


def radii(p: Problem) -> Radii:
    """From the norms of the problem where they are known, or by one more reading of q and k."""
    root = math.sqrt(abs(p.scale))
    q, k = (p.known_norms.q, p.known_norms.k) if p.known_norms is not None else (_lengths(p.q), _lengths(p.k))
    return Radii(q * root, (k * root).amax(-1, keepdim=True))


def _needs_gradient(*tensors: Tensor) -> bool:
    """Whether gradients of some tensors will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32)


def _value_ends(p: Problem) -> tuple[Tensor, Tensor]:
    """The least and the most of the longest values of each head."""
    longest = (_lengths(p.v) if p.known_norms is None else p.known_norms.v).amax(-1)
    return longest.amin(), longest.amax()


def _comfortable(least: float, most: float) -> bool:
    low, high = kernel_rounding.COMFORT
    return least >= low and most <= high


def _frame_change(frame: Frame) -> Tensor:
    """Zero for the frame that changes nothing, which is all that kernels know."""
    return torch.stack([frame.query_shift.abs(), frame.key_shift.abs(), (frame.balance - 1).abs()]).amax()


def _in_range(p: Problem, directions: Tensor, lengths: Radii, *others: Tensor) -> list[float] | None:
    """None where features or values leave kernels' range; else the largest log of a feature, and the others' values."""
    longest = torch.linalg.vector_norm(directions, dim=-1)
    numbers = (longest.amax(), *(x.amax() for x in lengths), *_value_ends(p), *others)
    # One wait for the device, whatever is asked.
    reach, radius_q, radius_k, least, most, *rest = torch.stack([x.double() for x in numbers]).tolist()
    fits = kernel_rounding.reaches(len(directions), reach, radius_q, radius_k) and _comfortable(least, most)
    return [reach * max(radius_q, radius_k), *rest] if fits else None


def feature_means(
    p: Problem, directions: Float[Tensor, "m d"], frame: Frame, start: scan.State | None, lengths: Radii
) -> Means | None:
    """Causal random features, where logs stay in float32's range and older sums share one reference."""
    if not shaped(p) or (start is not None and not _readable(start)):
        return None
    begin, others = None, list[Tensor]()
    if start is not None:
        begin = Sums(start.sums, start.total.squeeze(-1), start.top[..., 0, 0])
        top = start.top.masked_fill(start.top == -math.inf, 0.0)  # sums that have read nothing have no reference
        others = [top.abs().amax(), _frame_change(frame)]
    numbers = _in_range(p, directions, lengths, *others)
    # Logs that older sums are relative to lie beside those of new keys.
    if numbers is None or (start is not None and not (numbers[1] <= kernel_rounding.RANGE and numbers[2] == 0)):
        return None
    mean = features.feature_attention(p.q, p.k, p.v, directions, p.scale, begin)
    if not bool(torch.isfinite(mean.log_normaliser).all()):
        return None
    steps = features.steps(p.q, len(directions), p.v.shape[3])
    sums, total = (_without_gradient(p, x) for x in (mean.last.sums, mean.last.totals.unsqueeze(-1)))
    steps += 0 if start is None else start.steps
    assert mean.last.tops is not None
    state = scan.State(mean.last.tops[..., None, None], sums, total, steps)
    return Means(mean.out, state, kernel_rounding.of_features(p.q.dtype, state.steps))


def column_means(p: Problem, temperature: float) -> tuple[Float[Tensor, "b h n e"], KernelRounding] | None:
    """Separable attention and how it was rounded, if softmaxes are not too steep for logarithms to base 2."""
    if not shaped(p) or not 1e-6 <= temperature <= 1e6:
        return None
    ends = _value_ends(p)
    largest = torch.maximum(p.q.detach().abs().amax(), p.k.detach().abs().amax())
    steepest, least, most = torch.stack([x.double() for x in (largest, *ends)]).tolist()
    limit = _STEEP_GRADIENT if p.causal and _needs_gradient(p.q, p.k, p.v) else kernel_rounding.STEEP
    if not (steepest <= limit * temperature and _comfortable(least, most)):
        return None
    mean = columns.separable_attention(p.q, p.k, p.v, p.causal, temperature)
    if bool(mean.lost):
        return None
    steps = columns.steps(p.q, p.k, p.v.shape[3], p.causal)
    return mean.out, kernel_rounding.of_columns(p.q.dtype, steps)


def _readable(state: scan.State) -> bool:
    """Whether a kernel can read on from a state: one reference, float32, and no gradient asked of it."""
    single = state.top.shape[-1] == 1 and state.sums.dtype == torch.float32
    return single and not any(x.requires_grad for x in state[:3])


def _single(q: Tensor, k: Tensor, v: Tensor, state: scan.State) -> bool:
    """Whether one token can be answered by changing a state in place."""
    whole = all(x.is_contiguous() and x.dtype == torch.float32 for x in state[:3])
    single = q.shape[2] == k.shape[2] == 1 and q.dtype in TYPES
    return single and whole and not _needs_gradient(q, k, v, *state[:3]) and not has_tangents(q, k, v, *state[:3])


def feature_step(
    p: Problem, directions: Float[Tensor, "m d"], frame: Frame, state: scan.State
) -> Float[Tensor, "b h 1 e"] | None:
    """One token more of causal random features; the state takes it in, in place."""
    if not shaped(p) or not _single(p.q, p.k, p.v, state) or not _readable(state):
        return None
    numbers = _in_range(p, directions, radii(p), _frame_change(frame))
    # A step is relative to the largest feature of a key, and a row to its own: both ends must be in float32.
    if numbers is None or not (2 * numbers[0] <= _STEP_REACH and numbers[1] == 0):
        return None
    sums = Sums(state.sums, state.total.squeeze(-1), state.top[..., 0, 0])
    q, k, v = (x.squeeze(2) for x in (p.q, p.k, p.v))
    return linear_step.feature_step(q, k, v, directions.float(), sums, p.scale).unsqueeze(2)


def column_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 e"],
    state: scan.State,
    temperature: float,
) -> Float[Tensor, "b h 1 e"] | None:
    """One token more of separable attention; the state takes it in, in place."""
    if not _single(q, k, v, state) or q.shape[3] > _WIDEST_KEY or not 1e-6 <= temperature <= 1e6:
        return None
    sums = Sums(state.sums, state.total.squeeze(-1), state.top.squeeze(-2))
    q, k, v = (x.squeeze(2) for x in (q, k, v))
    return linear_step.separable_step(q, k, v, sums, temperature).unsqueeze(2)


class _NoGradient(torch.autograd.Function):
    """The same tensor; asking for its gradient is an error."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, *inputs: Tensor) -> Tensor:
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        rule = "has no gradient when kernels made it"
        remedy = "pass the whole sequence at once, or detach the state before reading on from it"
        raise NotDifferentiable("state", "sums over keys", rule, remedy)


def _without_gradient(p: Problem, state: Tensor) -> Tensor:
    if not _needs_gradient(p.q, p.k, p.v):
        return state
    detached: Tensor = _NoGradient.apply(state, p.q, p.k, p.v)
    return detached
