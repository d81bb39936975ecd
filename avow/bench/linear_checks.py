"""The linear attentions that are measured, and their checks: beside float64 and beside the plain formula."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avow.bench.cases import spread

# Batch, query heads, key heads, length, width of keys, width of values.
Shape = tuple[int, int, int, int, int, int]
Case = tuple[torch.dtype, Shape]
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Shapes to check, with the type that each is checked in: compiling is what takes time.
_CASES: tuple[Case, ...] = (
    (_BF16, (1, 2, 2, 4096, 64, 64)),
    (_BF16, (2, 4, 2, 1000, 128, 128)),
    (_BF16, (1, 2, 1, 1537, 96, 40)),
    (_BF16, (1, 1, 1, 777, 256, 256)),
    (_FP16, (1, 2, 1, 1537, 64, 64)),
    (_FP32, (1, 2, 1, 1537, 64, 64)),
    (_FP32, (1, 2, 2, 300, 48, 64)),
)
_FEW_CASES = (_CASES[0], _CASES[2], (_BF16, (1, 2, 2, 700, 128, 128)), _CASES[4], (_FP32, (1, 1, 1, 500, 64, 64)))
_QUICK_CASES: tuple[Case, ...] = ((_BF16, (1, 2, 1, 300, 24, 40)), (_FP32, (1, 1, 1, 90, 16, 16)))
_NEGLIGIBLE = 2**-22  # relative errors below this are not faults
_TOKENS = 7  # of a sequence that steps read one by one
FEATURES = 256


class Variant(NamedTuple):
    """A kernel, the plain formula of the same attention (in the type of its inputs), and what it is checked at."""

    call: Call
    formula: Call
    prepare: Callable[[Tensor, Tensor, Tensor], Inputs] = lambda q, k, v: (q, k, v)
    cases: tuple[Case, ...] = _FEW_CASES


class Step(NamedTuple):
    """The variant for the whole sequence, its random features (or None), and the call for one more token."""

    variant: str
    features: int | None
    call: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def repeat_heads(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Keys and values as often as query heads share them."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in others]


def _linear_formula(q: Tensor, k: Tensor, v: Tensor, normalise: bool) -> Tensor:
    """Causal linear attention by its definition, all pairs written out."""
    k, v = repeat_heads(q, k, v)
    pairs = (q @ k.mT).tril()
    return pairs @ v / pairs.sum(-1, keepdim=True) if normalise else pairs @ v


@functools.cache
def directions(d: int, device: torch.device) -> Tensor:
    """The same directions for the same width in every call."""
    return torch.randn(FEATURES, d, generator=torch.Generator().manual_seed(d)).to(device)


def random_features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Features of rows and keys in their own type, each divided by the largest of its kind."""
    w, root = directions(q.shape[-1], q.device).to(q.dtype), q.shape[-1] ** -0.25
    rows, keys = q * root @ w.mT, k * root @ w.mT
    keys = keys - 0.5 * root**2 * k.square().sum(-1, keepdim=True)
    rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))
    return rows, torch.exp(keys - keys.detach().amax())


def _separable_formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = repeat_heads(q, k, v)
    rows, columns = torch.softmax(q, -1), torch.exp(k - k.detach().amax(-2, keepdim=True))
    if not causal:
        return rows @ ((columns / columns.sum(-2, keepdim=True)).mT @ v)
    return ((rows / columns.cumsum(-2)) @ columns.mT).tril() @ v


@functools.cache
def variants() -> dict[str, Variant]:
    """The attentions of whole sequences; kernels are loaded here, and need Triton."""
    from avow.kernels.feature_attention import feature_attention
    from avow.kernels.linear_attention import linear_attention
    from avow.kernels.separable_attention import separable_attention

    return {
        "linear": Variant(
            linear_attention,
            partial(_linear_formula, normalise=False),
            # Sums over thousands of keys stay within float16.
            lambda q, k, v: (q * q.shape[-1] ** -0.5, k, v),
            _CASES,
        ),
        "linear, normalised": Variant(
            partial(linear_attention, normalise=True),
            partial(_linear_formula, normalise=True),
            # Normalisers are away from zero if queries and keys are positive.
            lambda q, k, v: (q.abs() * q.shape[-1] ** -0.5 + 0.01, k.abs() * 0.1 + 0.01, v),
            _CASES,
        ),
        "random features": Variant(
            lambda q, k, v: feature_attention(q, k, v, directions(q.shape[-1], q.device)).out,
            lambda q, k, v: _linear_formula(*random_features(q, k), v, normalise=True),
            # As short as random features need queries and keys.
            lambda q, k, v: (0.7 * q, 0.7 * k, v),
        ),
        "separable": Variant(
            lambda q, k, v: separable_attention(q, k, v, False).out, partial(_separable_formula, causal=False)
        ),
        "separable, causal": Variant(
            lambda q, k, v: separable_attention(q, k, v, True).out, partial(_separable_formula, causal=True)
        ),
    }


@functools.cache
def token_steps() -> dict[str, Step]:
    """The attentions of single tokens."""
    from avow.kernels.linear_step import feature_step, separable_step

    def of_features(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        return feature_step(q, k, v, directions(q.shape[-1], q.device), state)

    return {
        "random features": Step("random features", FEATURES, of_features),
        "separable": Step("separable, causal", None, separable_step),
    }


def empty_state(step: Step, device: str, b: int, g: int, d: int, e: int) -> Any:
    """The state before any token: random features share a reference, columns have one each."""
    from avow.kernels.chunking import Sums

    m, tops = (d, (b, g, d)) if step.features is None else (step.features, (b, g))
    sums, totals = torch.zeros(b, g, m, e, device=device), torch.zeros(b, g, m, device=device)
    return Sums(sums, totals, torch.full(tops, -torch.inf, device=device))


def drawn(device: str, shape: Shape, dtype: torch.dtype) -> Inputs:
    """Gaussian inputs."""
    b, h, g, n, d, e = shape
    generator = torch.Generator(device).manual_seed(n + d)
    shapes = ((b, h, n, d), (b, g, n, d), (b, g, n, e))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return q, k, v


def relative_error(x: Tensor, truth: Tensor) -> float:
    """The distance from the truth, relative to its size; inf for nan."""
    error = float(torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth))
    return error if error == error else float("inf")


def check(device: str, name: str, case: Case) -> list[str]:
    """Faults of a kernel, beside float64 and beside the plain formula in the same type."""
    dtype, (b, h, g, n, d, e) = case
    where = f"{name}, {str(dtype)[6:]}, {b}x{h}/{g}x{n}, d = {d}, e = {e}"
    return _located(where, lambda: _kernel_faults(device, variants()[name], case))


def check_step(device: str, name: str, batch: int) -> list[str]:
    """Faults of single tokens, read one after the other, beside the formula for the whole sequence."""
    return _located(f"step, {name}, batch {batch}", lambda: _step_faults(device, token_steps()[name], batch))


def _located(where: str, faults: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return [f"{where}: {fault}" for fault in faults()]
    except Exception as error:  # whatever a compiler, a launch or one before it may raise is a fault
        return [f"{where}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]


def _kernel_faults(device: str, variant: Variant, case: Case) -> Iterator[str]:
    dtype, (b, h, _, n, _, e) = case
    inputs = variant.prepare(*drawn(device, case[1], dtype))
    seed = torch.randn(b, h, n, e, device=device).to(dtype)

    def gradients(call: Call, wide: bool = False) -> list[Tensor]:
        """An answer and its gradients."""
        q, k, v = ((x.double() if wide else x).detach().requires_grad_() for x in inputs)
        out = call(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), seed.to(out.dtype))]

    own, again = gradients(variant.call), gradients(variant.call)
    truth, plain = gradients(variant.formula, wide=True), gradients(variant.formula)
    for what, x, y, t, p in zip(("out", "dq", "dk", "dv"), own, again, truth, plain, strict=True):
        yield from (f"{what} is {fault}" for fault in _distance_faults(x, t, p))
        if not torch.equal(x, y):
            yield f"{what} differs from run to run"


def _step_faults(device: str, step: Step, batch: int) -> Iterator[str]:
    variant, d = variants()[step.variant], 64
    q, k, v = variant.prepare(*drawn(device, (batch, 4, 2, _TOKENS, d, d), _BF16))
    state = empty_state(step, device, batch, 2, d, d)
    rows = [step.call(q[:, :, i], k[:, :, i], v[:, :, i], state) for i in range(_TOKENS)]
    truth = variant.formula(q.double(), k.double(), v.double())
    return _distance_faults(torch.stack(rows, 2), truth, variant.formula(q, k, v))


def _distance_faults(x: Tensor, truth: Tensor, plain: Tensor) -> Iterator[str]:
    """A fault if an answer is further from the truth than twice the plain formula's."""
    own, other = relative_error(x, truth), relative_error(plain, truth)
    if not own <= 2 * other + _NEGLIGIBLE:
        yield f"{own:.3g} off, the plain formula {other:.3g}"


def checked(device: str, names: list[str], quick: bool) -> dict[str, list[str]]:
    """Faults by variant."""
    tasks = [(device, name, case) for name in names for case in (_QUICK_CASES if quick else variants()[name].cases)]
    faults: dict[str, list[str]] = {name: [] for name in names}
    for (_, name, _), some in zip(tasks, spread(device, check, tasks), strict=True):
        faults[name] += some
    return faults


def fuzzed(device: str, count: int, quick: bool) -> list[str]:
    """Faults at random shapes and types that methods would ask kernels for."""
    source = random.Random(0)
    widest, longest = (40, 150) if quick else (256, 2000)
    tasks: list[tuple[str, str, Case]] = []
    while len(tasks) < count:
        groups, dtype = source.choice((1, 2)), source.choice((_BF16, _FP16, _FP32))
        heads, d, e = groups * source.choice((1, 1, 2, 3)), source.randint(8, widest), source.randint(8, widest // 2)
        case = dtype, (source.choice((1, 2)), heads, groups, source.randint(1, longest), d, e)
        if dtype != _FP32 or max(d, e) <= 64:
            tasks.append((device, source.choice(list(variants())), case))
    return [fault for faults in spread(device, check, tasks) for fault in faults]
