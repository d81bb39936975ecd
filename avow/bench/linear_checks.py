"""Linear attention's kernels beside float64 and beside the plain formula: what fails here gets no speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from avow.bench.cases import spread
from avow.bench.linear_steps import STEPS
from avow.bench.linear_variants import Case, Inputs, Variant, answerable, error, variants

_FRESH = 2**-22  # errors below this, relatively, are no fault of anyone
_TOKENS = 7  # of a sequence that steps read one by one


def drawn(device: str, b: int, h: int, g: int, n: int, d: int, e: int, kind: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed + n + d)
    shapes = ((b, h, n, d), (b, g, n, d), (b, g, n, e))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(kind) for shape in shapes)
    return q, k, v


def gradients(call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs, seed: Tensor) -> list[Tensor]:
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
    told = f"{name}, {str(kind)[6:]}, {b}x{h}/{g}x{n}, d = {d}, e = {e}"
    try:
        return [f"{told}: {fault}" for fault in _compared(device, variants()[name], case)]
    except Exception as error:  # whatever a compiler, a launch or one before it may raise is a finding
        return [f"{told}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"]


def _compared(device: str, variant: Variant, case: Case) -> Iterator[str]:
    kind, (b, h, g, n, d, e) = case
    inputs = variant.prepare(*drawn(device, b, h, g, n, d, e, kind))
    seed = torch.randn(b, h, n, e, device=device).to(kind)
    own, again = (gradients(variant.call, inputs, seed) for _ in range(2))
    wide = inputs[0].double(), inputs[1].double(), inputs[2].double()
    truth, plain = gradients(variant.formula, wide, seed.double()), gradients(variant.formula, inputs, seed)
    for what, x, y, t, p in zip(("out", "dq", "dk", "dv"), own, again, truth, plain, strict=True):
        mine, other = error(x, t), error(p, t)
        if not mine <= 2 * other + _FRESH:
            yield f"{what} is {mine:.3g} off, the plain formula {other:.3g}"
        if not torch.equal(x, y):
            yield f"{what} differs from run to run"


def checked(device: str, names: list[str], quick: bool) -> dict[str, list[str]]:
    """Faults by variant; on a GPU, in processes of their own, since most of the time is the compilers'."""
    return faults_of(
        [
            (device, name, case)
            for name in names
            for case in (variants()[name].quick_cases if quick else variants()[name].cases)
        ]
    )


def fuzzed(device: str, count: int, quick: bool) -> dict[str, list[str]]:
    """Faults by variant at random shapes and types."""
    source = random.Random(0)
    widest, longest = (40, 150) if quick else (256, 2000)
    tasks: list[tuple[str, str, Case]] = []
    while len(tasks) < count:
        groups, kind = source.choice((1, 2)), source.choice((torch.bfloat16, torch.float16, torch.float32))
        heads, d, e = groups * source.choice((1, 1, 2, 3)), source.randint(8, widest), source.randint(8, widest // 2)
        case = kind, (source.choice((1, 2)), heads, groups, source.randint(1, longest), d, e)
        if answerable(case):
            tasks.append((device, source.choice(list(variants())), case))
    return faults_of(tasks)


def faults_of(tasks: list[tuple[str, str, Case]]) -> dict[str, list[str]]:
    """What is wrong at some shapes, by variant."""
    faults: dict[str, list[str]] = {name: [] for _, name, _ in tasks}
    for (_, name, _), found in zip(tasks, spread(tasks[0][0], check, tasks), strict=True):
        faults[name] += found
    return faults


def check_step(device: str, name: str, batch: int) -> list[str]:
    """What is wrong with single tokens, read one after the other, beside the formula for the whole sequence."""
    step, (d, e) = STEPS[name], (64, 64)
    variant = variants()[step.variant]
    q, k, v = variant.prepare(*drawn(device, batch, 4, 2, _TOKENS, d, e, torch.bfloat16))
    state = step.empty(device, batch, 2, d, e)
    told = f"step, {name}, batch {batch}"
    try:
        rows = [step.call(q[:, :, i], k[:, :, i], v[:, :, i], state) for i in range(_TOKENS)]
    except Exception as exc:  # whatever a compiler or a launch may raise is a finding
        return [f"{told}: {type(exc).__name__}: {str(exc).splitlines()[0][:200]}"]
    truth, plain = variant.formula(q.double(), k.double(), v.double()), variant.formula(q, k, v)
    mine, other = error(torch.stack(rows, 2), truth), error(plain, truth)
    return [] if mine <= 2 * other + _FRESH else [f"{told}: {mine:.3g} off, the plain formula {other:.3g}"]
