"""Answers that wait for no device, with certificates that are stated when somebody looks.

Where nothing has to be decided by the numbers, nothing is read from the device: the answer is computed, and one more
launch measures the lengths of all rows of q, k, v and of the answer. The certificate is what follows from these lengths
and from sizes alone, so it says the same however late the look and whatever became of the tensors. That also goes for
a call that is captured in a CUDA graph: each look tells of the last replay.

Errors that a caller would have got at once come at the look: nan and inf raise `NonFiniteError`, and numbers that the
arithmetic of the inputs may not carry (which `attend` would have computed in a wider type) leave an infinite bound and
the promise `none`, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from avow.core import Certificate, Computed, LazyCertificate, Method, Norms, Problem
from avow.core.certify import certify
from avow.core.requirement import USUAL_CONFIDENCE
from avow.numerics import norms as plain


def waits_freely(device: torch.device) -> bool:
    """Whether reading a number from a device costs nothing, so that errors can be immediate."""
    return device.type == "cpu"


class Origin(NamedTuple):
    """All that a promise rests on, but for lengths: how the problem looked, and which method answered it."""

    method: Method
    shapes: tuple[tuple[int, ...], ...]
    allowed: Bool[Tensor, "#b #h #n s"] | None
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    default_scale: bool
    leading: tuple[int, ...]

    @staticmethod
    def of(method: Method, p: Problem) -> Origin:
        """Of a problem without a bias; its mask is copied, for others may write into it."""
        shapes = tuple(tuple(x.shape) for x in (p.q, p.k, p.v))
        allowed = None if p.allowed is None else p.allowed.clone()
        return Origin(method, shapes, allowed, p.q.dtype, p.q.device, p.causal, p.scale, p.default_scale, p.leading)

    def problem(self) -> Problem:
        """A problem that looks the same and holds no numbers."""
        q, k, v = (self.blank(shape) for shape in self.shapes)
        return Problem(q, k, v, self.allowed, None, self.causal, self.scale, self.default_scale, "dot", self.leading)

    def filled(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """The problem with these numbers, in the shapes that callers give them."""
        q, k, v = (x.reshape(shape) for x, shape in zip((q, k, v), self.shapes, strict=True))
        return dataclasses.replace(self.problem(), q=q, k=k, v=v)

    def blank(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(1, dtype=self.dtype, device=self.device).expand(shape)


def fits(method: Method, p: Problem) -> bool:
    """Whether the promise follows from lengths and sizes, and there is something to promise."""
    return method.rests_on_lengths and p.bias is None and p.kernel == "dot" and not p.empty


def answer(method: Method, p: Problem) -> tuple[Float[Tensor, "b h n e"], Float64[Tensor, "rows"]]:
    """The answer, and the lengths of the rows of q, k, v and the answer, one after the other."""
    out = method.compute(p).out
    with torch.no_grad():
        return out, row_lengths(p.q, p.k, p.v, out)


def certificate(
    origin: Origin, lengths: Float64[Tensor, "rows"], follows: bool = False, reason: str = ""
) -> Certificate:
    """The certificate of that answer, stated at the first look, or at each if it `follows` a graph."""
    return LazyCertificate.of(functools.partial(certificate_fields, origin, lengths, reason), follows)


def row_lengths(*tensors: Float[Tensor, "..."]) -> Float64[Tensor, "rows"]:
    """The lengths of all rows of q, k, v and perhaps an answer: on a GPU by one launch."""
    q, _, v = tensors[:3]
    if q.device.type == "cuda":
        from avow.kernels.availability import is_available

        if is_available(q.device):
            from avow.kernels import row_lengths as kernel

            if kernel.takes(q, v):
                if q.device.index == torch.cuda.current_device():
                    return kernel.row_lengths(*tensors)
                with torch.cuda.device(q.device):  # Triton launches on the current one
                    return kernel.row_lengths(*tensors)
    return plain.row_lengths(*tensors)


def norms_of(p: Problem, lengths: Float64[Tensor, "rows"]) -> Norms:
    """The norms of a problem, from the lengths that `row_lengths` measured."""
    q, k, v, *_ = _split(p, lengths)
    return Norms(q, k, v, plain.slack(max(p.q.shape[-1], p.v.shape[-1]), torch.float64))


def _split(p: Problem, lengths: Float64[Tensor, "rows"]) -> list[Tensor]:
    """The lengths of q, k and v, and those of the answer if they were measured, each in its shape."""
    shapes = [x.shape[:-1] for x in (p.q, p.k, p.v, p.q)]
    sizes = [math.prod(shape) for shape in shapes]
    many = 4 if lengths.numel() == sum(sizes) else 3
    return [x.view(shape) for x, shape in zip(lengths.split(sizes[:many]), shapes, strict=False)]


def certificate_fields(origin: Origin, lengths: Float64[Tensor, "rows"], reason: str = "") -> dict[str, Any]:
    """What the certificate says; raises if a row of q, k or v holds nan or inf."""
    p, method = origin.problem(), origin.method
    norms = norms_of(p, lengths)
    norms.check(p.scale)
    p, e = p.with_norms(norms), p.v.shape[-1]
    shape = (*p.q.shape[:-1], e)
    estimate = method.estimate_bound(p, 1.0)
    if estimate.kind != "none":
        given = Computed(origin.blank(shape), lengths=_split(p, lengths)[3])
        stated = certify(method, p, given, USUAL_CONFIDENCE)
        return vars(stated) | {"reason": reason or stated.reason}
    return {
        "method": method.name,
        "parameters": method.parameters,
        "target": method.target,
        "kind": "none",
        "bound": math.inf,
        "rows": torch.full((*origin.leading, shape[2]), math.inf, dtype=torch.float64, device=origin.device),
        "reason": f'{estimate.reason}: convert q, k and v to a wider type, or use method="exact", precision="float64"',
        "cost": method.cost(p.sizes),
    }
