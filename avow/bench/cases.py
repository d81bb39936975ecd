"""Caches to decode from (synthetic sharp or diffuse ones, real heads resampled), exact attention of PyTorch to compare
with, the distance from the truth, and checks in several processes."""

from __future__ import annotations

import math
import re
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
# Files of a model's first layer.
_FIRST_LAYER = re.compile(r"layer0+$")
# On a GPU most of a check's time is the compilers', and those run on every core.
_PROCESSES = 12

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class Shape(NamedTuple):
    """Another step than that of one query of one sequence, by its name, and how many tokens there are behind it."""

    name: str
    length: int
    batch: int = 1
    siblings: int = 4
    """Query heads per key head."""
    queries: int = 1


class Sizes(NamedTuple):
    """What is measured: lengths, query heads, key heads, rounds, and calls that are timed together."""

    lengths: tuple[int, ...]
    heads: int
    groups: int
    rounds: int
    calls: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    queries: int = 1
    """Queries of each head in a step."""
    shapes: tuple[Shape, ...] = ()
    """Other steps, of real heads alone."""
    steady: tuple[int, ...] = ()
    """Lengths at which single steps are timed one after the other."""

    def of(self, shape: Shape) -> Sizes:
        """The same for steps of another shape."""
        return self._replace(batch=shape.batch, heads=shape.siblings * self.groups, queries=shape.queries)


@dataclass(frozen=True)
class Case:
    """One cache (b, g, s, d), and the queries of its last tokens (b, h, n, d)."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    before: Tensor | None = None
    """The queries of the step before, so that what a cache learns from one step is not what the next one needs."""

    @property
    def length(self) -> int:
        return self.k.shape[2]


def cases(device: str, sizes: Sizes, folder: Path | None) -> Iterator[Case]:
    """Real heads on each text if a folder of them is given, sharp and diffuse ones, at every length."""
    texts = {} if folder is None else stored(folder)
    for n in sizes.lengths:
        for text, loads in texts.items():
            yield real(device, sizes, n, loads, text)
        generator = torch.Generator(device).manual_seed(n)
        shapes = [(1, sizes.heads, 1, 128), (1, sizes.groups, n, 128), (1, sizes.groups, n, 128)]
        q, k, v = (torch.randn(shape, generator=generator, device=device).to(sizes.dtype) for shape in shapes)
        yield Case("sharp", 6 * q, k, v, 128**-0.5)
        yield Case("diffuse", 0.01 * q, k, v, 128**-0.5)


def count(sizes: Sizes, folder: Path | None) -> int:
    """How many cases there are."""
    texts = 0 if folder is None else len(_by_text(folder))
    return len(sizes.lengths) * (2 + texts) + (len(sizes.shapes) + len(sizes.steady) if texts else 0)


def stored(folder: Path) -> dict[str, list[Workload]]:
    """The heads in a folder of .safetensors files by the text that the model read, without those of the first layer.

    Heads of the first layer look everywhere. Files of several texts are called TEXT-layerNN; those that name no text
    count as prose. A single text is called real.
    """
    if not folder.is_dir():
        raise FileError("heads", folder, "is not a folder", "name a folder of .safetensors files with q, k and v")
    files = _by_text(folder)
    if not files:
        raise FileError("heads", folder, "holds no .safetensors file", "save q, k and v of some heads there")
    texts = {text: [read(file, option="heads") for file in some] for text, some in files.items()}
    loads = [load for some in texts.values() for load in some]
    least = min(load.k.shape[-2] for load in loads)
    if least < _WINDOW or min(load.q.shape[-2] for load in loads) < 2:
        rule = f"holds a file of fewer than {_WINDOW} keys or 2 queries"
        raise FileError("heads", folder, rule, "save longer heads")
    if len({(*load.k.shape[-2:], load.v.shape[-1]) for load in loads}) > 1:
        raise FileError("heads", folder, "holds heads of different sizes", "keep one model and one length to a folder")
    return texts


def _by_text(folder: Path) -> dict[str, list[Path]]:
    """The files of each text in a folder, those that name none first."""
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        files.setdefault(file.stem.rpartition("-layer")[0], []).append(file)
    for text, some in files.items():
        files[text] = [file for file in some if not _FIRST_LAYER.search(file.stem)] or some
    single = len(files) == 1
    return {"real" if single else text or "prose": files[text] for text in sorted(files)}


def real(device: str, sizes: Sizes, n: int, loads: list[Workload], name: str = "real") -> Case:
    """Heads of a trained model, resampled to n tokens; heads of 64 dimensions are paired to 128.

    Key heads are spread evenly over those of all layers. Sequences of a batch are other samples, with queries of other
    tokens.
    """
    generator = torch.Generator().manual_seed(n)
    heads: list[tuple[Tensor, ...]] = []
    for load in loads:
        q, k, v = load.q[0], load.k[0], load.v[0]
        groups, siblings = k.shape[0], q.shape[0] // k.shape[0]
        # Of each sequence the queries of two steps: the last ones of the text for the first sequence.
        steps = torch.arange(-2 * sizes.queries * sizes.batch, 0).view(sizes.batch, 2, sizes.queries).flip(0)
        asked = q[:, steps % q.shape[1]]  # (heads, b, 2, n, d)
        for i in range(groups):
            # A head, and for a pair another sibling of the next key head: no pair of siblings twice while there are
            # others, since equal queries read the same tokens.
            parts = [i, (i + 1) % groups] if k.shape[-1] == 64 else [i]
            of_shared = [
                torch.cat(
                    [asked[j * siblings + (a + p * (1 + a // siblings)) % siblings] for p, j in enumerate(parts)], -1
                )
                for a in range(sizes.heads // sizes.groups)
            ]
            heads.append((torch.stack(of_shared), *(torch.cat([x[j] for j in parts], -1) for x in (k, v))))
    many = len(heads) >= sizes.groups
    chosen = [heads[i * len(heads) // sizes.groups if many else i % len(heads)] for i in range(sizes.groups)]
    q = torch.cat([x[0] for x in chosen]).to(device, sizes.dtype)  # (h, b, 2, n, d)
    before, q = (x.transpose(0, 1).contiguous() for x in q.unbind(2))
    k, v = (torch.stack([x[part] for x in chosen]).to(device, sizes.dtype) for part in (1, 2))  # (g, s, d)
    windows = sizes.batch, math.ceil(n / _WINDOW)
    starts = torch.randint(0, k.shape[1] - _WINDOW + 1, windows, generator=generator)
    places = (starts[..., None] + torch.arange(_WINDOW)).flatten(1)[:, :n].to(device)
    k, v = (x[:, places].transpose(0, 1).contiguous() for x in (k, v))
    return Case(name, q, k, v, loads[0].k.shape[-1] ** -0.5, before)


def distances(case: Case, out: Tensor, causal: bool = True) -> Tensor:
    """The errors of answers (b, h, n, d), in the unit of bounds, one key head at a time: (b, h, n).

    The queries are those of the last n tokens; if not `causal`, each sees the tokens after its own, too.
    """
    b, h, n, _ = case.q.shape
    g, s = case.k.shape[1:3]
    own = torch.arange(n, device=case.q.device)
    hidden = (own > own[:, None]) & causal  # (n, n), of the last tokens
    errors = []
    for sequence in range(b):
        for head in range(g):
            k, v = case.k[sequence, head].double(), case.v[sequence, head].double()
            rows = slice(head * (h // g), (head + 1) * (h // g))
            scores = case.q[sequence, rows].double() @ k.T * case.scale  # (r, n, s)
            scores[..., s - n :].masked_fill_(hidden, -math.inf)
            error = torch.linalg.vector_norm(out[sequence, rows].double() - torch.softmax(scores, -1) @ v, dim=-1)
            lengths = torch.linalg.vector_norm(v, dim=-1)
            seen = torch.where(hidden, 0.0, lengths[s - n :]).amax(-1)  # (n,)
            errors.append(error / (seen.clamp(min=lengths[: s - n].amax()) if s > n else seen))
    return torch.cat(errors).view(b, h, n)


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's exact attention by one of its backends."""
    with sdpa_kernel(BACKENDS[backend]):
        return scaled_dot_product_attention(q, k, v, **options)


def exact(case: Case) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every exact attention that is right here, sibling heads as heads that share keys and as rows of one head.

    Several queries see each other's tokens here: a mask would only make it slower.
    """
    q, rows = case.q, case.q.view(*case.k.shape[:2], -1, case.q.shape[-1])
    for name in ("cuDNN", "flash", "efficient") if case.q.is_cuda else ("flash", "math"):
        for form, x in (("heads", q), ("rows", rows)):
            call = partial(sdpa, name, x, case.k, case.v, scale=case.scale, enable_gqa=form == "heads")
            try:
                out = call().reshape(case.q.shape)
            except RuntimeError as error:
                print(f"  {name}, {form}: does not run here ({str(error).splitlines()[0][:80]})", file=sys.stderr)
                continue
            if float(distances(case, out, causal=False).max()) < 0.05:
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
