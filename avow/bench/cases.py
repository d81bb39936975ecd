"""Caches to decode from (synthetic sharp or diffuse ones, real heads resampled), exact attention of PyTorch to compare
with, the distance from the truth, and checks in several processes."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from avow.bench.workloads import Workload, read
from avow.errors import FileError

# Neighbouring tokens that stay together when real keys are resampled, so that groups are as alike as in a text.
_WINDOW = 256
# On a GPU most of a check's time is the compilers', and those run on every core.
_PROCESSES = 12

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Sizes(NamedTuple):
    """What is measured: lengths, query heads, key heads, rounds, and calls that are timed together."""

    lengths: tuple[int, ...]
    heads: int
    groups: int
    rounds: int
    calls: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One cache and one query per head."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    before: Tensor | None = None
    """The queries of the step before, whose answers' lengths are this step's hint."""

    @property
    def length(self) -> int:
        return self.k.shape[2]


def cases(device: str, sizes: Sizes, folder: Path | None) -> Iterator[Case]:
    """Real heads where a folder of them is given, sharp and diffuse ones, at every length."""
    heads = None if folder is None else stored(folder)
    for n in sizes.lengths:
        if heads is not None:
            yield real(device, sizes, n, heads)
        generator = torch.Generator(device).manual_seed(n)
        shapes = [(1, sizes.heads, 128), (1, sizes.groups, n, 128), (1, sizes.groups, n, 128)]
        q, k, v = (torch.randn(shape, generator=generator, device=device).to(sizes.dtype) for shape in shapes)
        yield Case("sharp", 6 * q, k, v, 128**-0.5)
        yield Case("diffuse", 0.01 * q, k, v, 128**-0.5)


def count(sizes: Sizes, folder: Path | None) -> int:
    """How many cases there are."""
    return len(sizes.lengths) * (2 if folder is None else 3)


def stored(folder: Path) -> list[Workload]:
    """The heads in a folder of .safetensors files, without those of the first layer: they look everywhere."""
    if not folder.is_dir():
        raise FileError("heads", folder, "is not a folder", "name a folder of .safetensors files with q, k and v")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileError("heads", folder, "holds no .safetensors file", "save q, k and v of some heads there")
    loads = [read(file, option="heads") for file in files[1:] or files]
    least = min(load.k.shape[-2] for load in loads)
    if least < _WINDOW or min(load.q.shape[-2] for load in loads) < 2:
        rule = f"holds a file of fewer than {_WINDOW} keys or 2 queries"
        raise FileError("heads", folder, rule, "save longer heads")
    if len({(*load.k.shape[-2:], load.v.shape[-1]) for load in loads}) > 1:
        raise FileError("heads", folder, "holds heads of different sizes", "keep one model and one length to a folder")
    return loads


def real(device: str, sizes: Sizes, n: int, loads: list[Workload]) -> Case:
    """Heads of a trained model, resampled to n tokens; heads of 64 dimensions are paired to 128."""
    generator = torch.Generator().manual_seed(n)
    heads: list[tuple[Tensor, ...]] = []
    for load in loads:
        q, k, v = load.q[0], load.k[0], load.v[0]
        groups, siblings = k.shape[0], q.shape[0] // k.shape[0]
        for i in range(groups):
            # A head, and for a pair another sibling of the next key head.
            parts = [(i, 0), ((i + 1) % groups, 1)] if k.shape[-1] == 64 else [(i, 0)]
            of_shared = [
                torch.cat([q[j * siblings + (a + shift) % siblings, -2:] for j, shift in parts], -1)
                for a in range(sizes.heads // sizes.groups)
            ]
            heads.append((torch.stack(of_shared), *(torch.cat([x[j] for j, _ in parts], -1) for x in (k, v))))
    chosen = [heads[i % len(heads)] for i in range(sizes.groups)]
    q = torch.cat([x[0] for x in chosen])[None].to(device, sizes.dtype)  # (1, h, 2, 128)
    k, v = (torch.stack([x[part] for x in chosen])[None] for part in (1, 2))
    starts = torch.randint(0, k.shape[2] - _WINDOW + 1, (math.ceil(n / _WINDOW),), generator=generator)
    places = (starts[:, None] + torch.arange(_WINDOW)).flatten()[:n]
    k, v = (x.to(device, sizes.dtype)[:, :, places.to(device)].contiguous() for x in (k, v))
    scale = loads[0].k.shape[-1] ** -0.5
    return Case("real", q[:, :, 1].contiguous(), k, v, scale, q[:, :, 0].contiguous())


def distances(case: Case, out: Tensor) -> Tensor:
    """The errors of answers (1, h, d), in the unit of bounds, one key head at a time."""
    errors = []
    r = case.q.shape[1] // case.k.shape[1]
    for head in range(case.k.shape[1]):
        k, v = case.k[0, head].double(), case.v[0, head].double()
        rows = slice(head * r, head * r + r)
        truth = torch.softmax(case.q[0, rows].double() @ k.T * case.scale, -1) @ v
        error = torch.linalg.vector_norm(out[0, rows].double() - truth, dim=-1)
        errors.append(error / torch.linalg.vector_norm(v, dim=-1).amax())
    return torch.cat(errors)[None]


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's exact attention by one of its backends."""
    with sdpa_kernel(BACKENDS[backend]):
        return scaled_dot_product_attention(q, k, v, **options)


def exact(case: Case) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every exact attention that is right here, sibling heads as heads that share keys and as rows of one head."""
    q, rows = case.q.unsqueeze(2), case.q.view(1, case.k.shape[1], -1, case.q.shape[-1])
    for name in ("cuDNN", "flash", "efficient") if case.q.is_cuda else ("flash", "math"):
        for form, x in (("heads", q), ("rows", rows)):
            call = partial(sdpa, name, x, case.k, case.v, scale=case.scale, enable_gqa=form == "heads")
            try:
                out = call().reshape(case.q.shape)
            except RuntimeError as error:
                print(f"  {name}, {form}: does not run here ({str(error).splitlines()[0][:80]})", file=sys.stderr)
                continue
            if float(distances(case, out).max()) < 0.05:
                yield f"{name}, {form}", call


def spread(device: str, check: Callable[..., list[str]], tasks: Sequence[tuple[Any, ...]]) -> list[list[str]]:
    """The faults a check finds in every task, in their order; on a GPU, in processes of their own."""
    if device == "cpu":
        return [check(*task) for task in tasks]
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        return list(pool.map(check, *zip(*tasks, strict=True)))


def interpret_kernels() -> None:
    """Have kernels run in Python from now on, without warnings that a GPU would not give: for rehearsals on a CPU."""
    from avow.kernels.interpreted import interpret

    interpret()
    np.seterr(all="ignore")
    warnings.filterwarnings("ignore", category=RuntimeWarning)
