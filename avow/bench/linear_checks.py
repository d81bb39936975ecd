"""The linear attentions that are measured, each compared with float64 and with its plain formula: what fails here gets
no speed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
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
_FRESH = 2**-22  # errors below this, relatively, are no fault of anyone
_TOKENS = 7  # of a sequence that steps read one by one
FEATURES = 256


class Variant(NamedTuple):
    """A kernel, the plain formula it stands for (in the type it is given), and what it is checked at."""

    call: Call
    formula: Call
    prepare: Callable[[Tensor, Tensor, Tensor], Inputs]
    cases: tuple[Case, ...] = _FEW_CASES


class Step(NamedTuple):
    """The whole sequence's variant, its random features (or none), and the call that takes one more token in."""

    variant: str
    features: int | None
    call: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def repeat_heads(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Keys and values as often as query heads share them."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in others]


def _linear(normalise: bool) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from avow.kernels.linear_attention import linear_attention

        return linear_attention(q, k, v, normalise)

    return call


def _linear_formula(normalise: bool) -> Call:
    """Causal linear attention by its definition, all pairs written out."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        pairs = (q @ k.mT).tril()
        return pairs @ v / pairs.sum(-1, keepdim=True) if normalise else pairs @ v

    return formula


def _shortened(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    # Sums over thousands of keys stay within float16.
    return q * q.shape[-1] ** -0.5, k, v


def _positive(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Normalisers are away from zero if queries and keys are positive."""
    return q.abs() * q.shape[-1] ** -0.5 + 0.01, k.abs() * 0.1 + 0.01, v


def _quiet(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Queries and keys as short as those that random features are good for."""
    return 0.7 * q, 0.7 * k, v


def _unchanged(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return q, k, v


@functools.cache
def directions(d: int, device: torch.device, features: int = FEATURES) -> Tensor:
    """The same directions for the same width in every call."""
    return torch.randn(features, d, generator=torch.Generator().manual_seed(d)).to(device)


def random_features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Features of rows and keys in the type they come in, each over the largest of its kind."""
    w, root = directions(q.shape[-1], q.device).to(q.dtype), q.shape[-1] ** -0.25
    rows, keys = q * root @ w.mT, k * root @ w.mT
    keys = keys - 0.5 * root**2 * k.square().sum(-1, keepdim=True)
    rows = torch.exp(rows - rows.detach().amax(-1, keepdim=True))
    return rows, torch.exp(keys - keys.detach().amax())


def _featured(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from avow.kernels.feature_attention import feature_attention

    return feature_attention(q, k, v, directions(q.shape[-1], q.device)).out


def _feature_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, keys = random_features(q, k)
    return _linear_formula(True)(rows, keys, v)


def _separable(causal: bool) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from avow.kernels.separable_attention import separable_attention

        return separable_attention(q, k, v, causal).out

    return call


def _separable_formula(causal: bool) -> Call:
    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        rows, columns = torch.softmax(q, -1), torch.exp(k - k.detach().amax(-2, keepdim=True))
        if not causal:
            return rows @ ((columns / columns.sum(-2, keepdim=True)).mT @ v)
        return ((rows / columns.cumsum(-2)) @ columns.mT).tril() @ v

    return formula


VARIANTS = {
    "linear": Variant(_linear(False), _linear_formula(False), _shortened, _CASES),
    "linear, normalised": Variant(_linear(True), _linear_formula(True), _positive, _CASES),
    "random features": Variant(_featured, _feature_formula, _quiet),
    "separable": Variant(_separable(False), _separable_formula(False), _unchanged),
    "separable, causal": Variant(_separable(True), _separable_formula(True), _unchanged),
}


def _feature_step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
    from avow.kernels.linear_step import feature_step

    return feature_step(q, k, v, directions(q.shape[-1], q.device), state)


def _separable_step(q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
    from avow.kernels.linear_step import separable_step

    return separable_step(q, k, v, state)


STEPS = {
    "random features": Step("random features", FEATURES, _feature_step),
    "separable": Step("separable, causal", None, _separable_step),
}


def empty_state(step: Step, device: str, b: int, g: int, d: int, e: int) -> Any:
    """The state before any token: random features share a reference, columns have one each."""
    from avow.kernels.chunking import Sums

    m, tops = (d, (b, g, d)) if step.features is None else (step.features, (b, g))
    sums, totals = torch.zeros(b, g, m, e, device=device), torch.zeros(b, g, m, device=device)
    return Sums(sums, totals, torch.full(tops, -torch.inf, device=device))


def drawn(device: str, shape: Shape, kind: torch.dtype) -> Inputs:
    """Gaussian inputs."""
    b, h, g, n, d, e = shape
    generator = torch.Generator(device).manual_seed(n + d)
    shapes = ((b, h, n, d), (b, g, n, d), (b, g, n, e))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(kind) for shape in shapes)
    return q, k, v


def relative_error(x: Tensor, truth: Tensor) -> float:
    """How far an answer is from the truth, relative to its size; inf where it is no number."""
    apart = float(torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth))
    return apart if apart == apart else float("inf")


def _with_gradients(call: Call, inputs: Inputs, seed: Tensor) -> list[Tensor]:
    """An answer and its gradients, all in one list."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = call(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), seed.to(out.dtype))]


def check(device: str, name: str, case: Case) -> list[str]:
    """What is wrong with a kernel, beside float64 and beside the plain formula in the same type."""
    if device == "cpu":
        from avow.kernels.interpreted import interpret

        interpret()
    kind, (b, h, g, n, d, e) = case
    where = f"{name}, {str(kind)[6:]}, {b}x{h}/{g}x{n}, d = {d}, e = {e}"
    try:
        return [f"{where}: {fault}" for fault in _compared(device, VARIANTS[name], case)]
    except Exception as error:  # whatever a compiler, a launch or one before it may raise is a finding
        return [f"{where}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]


def _compared(device: str, variant: Variant, case: Case) -> Iterator[str]:
    kind, (b, h, _, n, _, e) = case
    inputs = variant.prepare(*drawn(device, case[1], kind))
    seed = torch.randn(b, h, n, e, device=device).to(kind)
    own, again = (_with_gradients(variant.call, inputs, seed) for _ in range(2))
    wide = inputs[0].double(), inputs[1].double(), inputs[2].double()
    truth = _with_gradients(variant.formula, wide, seed.double())
    plain = _with_gradients(variant.formula, inputs, seed)
    for what, x, y, t, p in zip(("out", "dq", "dk", "dv"), own, again, truth, plain, strict=True):
        mine, other = relative_error(x, t), relative_error(p, t)
        if not mine <= 2 * other + _FRESH:
            yield f"{what} is {mine:.3g} off, the plain formula {other:.3g}"
        if not torch.equal(x, y):
            yield f"{what} differs from run to run"


def checked(device: str, names: list[str], quick: bool) -> dict[str, list[str]]:
    """Faults by variant; on a GPU, in processes of their own, since most of the time is the compilers'."""
    cases = {name: _QUICK_CASES if quick else VARIANTS[name].cases for name in names}
    return _faults([(device, name, case) for name in names for case in cases[name]])


def fuzzed(device: str, count: int, quick: bool) -> dict[str, list[str]]:
    """Faults by variant at random shapes and types that methods would ask kernels for."""
    source = random.Random(0)
    widest, longest = (40, 150) if quick else (256, 2000)
    tasks: list[tuple[str, str, Case]] = []
    while len(tasks) < count:
        groups, kind = source.choice((1, 2)), source.choice((_BF16, _FP16, _FP32))
        heads, d, e = groups * source.choice((1, 1, 2, 3)), source.randint(8, widest), source.randint(8, widest // 2)
        case = kind, (source.choice((1, 2)), heads, groups, source.randint(1, longest), d, e)
        if kind != _FP32 or max(d, e) <= 64:
            tasks.append((device, source.choice(list(VARIANTS)), case))
    return _faults(tasks)


def _faults(tasks: list[tuple[str, str, Case]]) -> dict[str, list[str]]:
    """What is wrong at some shapes, by variant."""
    faults: dict[str, list[str]] = {name: [] for _, name, _ in tasks}
    for (_, name, _), some in zip(tasks, spread(tasks[0][0], check, tasks), strict=True):
        faults[name] += some
    return faults


def check_step(device: str, name: str, batch: int) -> list[str]:
    """What is wrong with single tokens, read one after the other, beside the formula for the whole sequence."""
    step, (d, e), where = STEPS[name], (64, 64), f"step, {name}, batch {batch}"
    variant = VARIANTS[step.variant]
    q, k, v = variant.prepare(*drawn(device, (batch, 4, 2, _TOKENS, d, e), _BF16))
    state = empty_state(step, device, batch, 2, d, e)
    try:
        rows = [step.call(q[:, :, i], k[:, :, i], v[:, :, i], state) for i in range(_TOKENS)]
    except Exception as error:  # whatever a compiler or a launch may raise is a finding
        return [f"{where}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    truth, plain = variant.formula(q.double(), k.double(), v.double()), variant.formula(q, k, v)
    mine, other = relative_error(torch.stack(rows, 2), truth), relative_error(plain, truth)
    return [] if mine <= 2 * other + _FRESH else [f"{where}: {mine:.3g} off, the plain formula {other:.3g}"]
