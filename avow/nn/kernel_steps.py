"""Single decoding steps of a cache by kernels on a GPU, none of which waits for the last.

The answer is right when it is handed out: if a bound would exceed the tolerance, the kernels themselves read all
tokens. Its certificate stays on the device until someone asks for its bound. With a confidence below 1 tokens are
drawn; the seed of the draws is on the device, too, where each step advances it. The last step that is known to be done
says whether looking at the sketch pays: its numbers come back beside the work, and are read when they have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Certificate, LazyCertificate, Problem
from avow.core.certify import absolute_errors, relative_errors
from avow.core.requirement import INDEPENDENT
from avow.methods.sparse import Sparse
from avow.numerics.heads import per_query_head
from avow.numerics.norms import length_floors, slack
from avow.numerics.rounding import unit
from avow.numerics.sketch import Sketch

# What kernels can multiply, how many query heads may share a key head, and of how many tokens they can draw.
_TYPES, _SIBLINGS, _WIDEST = (torch.bfloat16, torch.float16, torch.float32), 8, 256
_DRAWABLE = 2**24
# Of a tolerance this share is aimed at by what is not read; the rest is for rounding, and for guesses that were off.
_AIM = 0.5
# Answers are expected to be this much longer than the last ones at most: a guess, which only decides what is read.
_LONGER = 1.1
# If more than this share of the tokens has to be read, the look at the sketch costs more than it saves.
WORTHWHILE = 0.6
# What the kernels' bounds assume of a GPU.
_SUMS = "tensor cores sum in float32, with twice its unit"
_POWERS = "ex2.approx is right to two units of float32, lg2.approx to 2^-21"


@dataclass
class _Report:
    """A step's numbers on their way to the host."""

    arrays: tuple[Tensor, ...]
    done: torch.cuda.Event | None
    tokens: int
    tol: float

    @staticmethod
    def sent(arrays: tuple[Tensor, ...], tokens: int, tol: float) -> _Report:
        """A report under way: copies to memory that a GPU writes while the host goes on."""
        if arrays[0].device.type != "cuda":
            return _Report(arrays, None, tokens, tol)
        there = tuple(torch.empty_like(x, device="cpu", pin_memory=True) for x in arrays)
        for target, x in zip(there, arrays, strict=True):
            target.copy_(x, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Report(there, done, tokens, tol)

    @property
    def paid(self) -> bool:
        """Whether the step read little enough, and proved what it was to prove."""
        tokens_read, bound, within = self.arrays
        share = float(tokens_read.double().mean()) / self.tokens
        return share <= WORTHWHILE and bool(within.all()) and bool((bound <= self.tol).all())


@dataclass
class KernelSteps:
    """Decoding steps by kernels, and what was learnt from them."""

    _report: _Report | None = None
    _hint: Tensor | None = field(default=None, repr=False)
    _seed: Tensor | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: object) -> KernelSteps:
        """Another cache learns for itself."""
        return KernelSteps()

    @staticmethod
    def unfit(problem: Problem, tol: float, confidence: float, bits: int | None, wide: bool, window: int | None) -> str:
        """Why the kernels cannot do a step; empty if they can."""
        (_, h, n, d), (g, s, e) = problem.q.shape, problem.v.shape[1:]
        kind = problem.q.dtype
        reasons = {
            "there are several queries to a head": n != 1,
            f"the kernels do not support {kind}": kind not in _TYPES,
            "the sketch does not have 4 bits": bits != 4,
            f"{h // g} query heads share a key head": h // g > _SIBLINGS,
            f"{d} dimensions are not a multiple of 16 up to {_WIDEST}": d % 16 != 0 or d > _WIDEST,
            f"{e} dimensions of values are more than {_WIDEST}": e > _WIDEST,
            "the cache has a sliding window": window is not None,
            "lengths of values need float64": wide,
            "the scale is not above 0": not problem.scale > 0,
            f"the kernels sample at most {_DRAWABLE} tokens": confidence < 1 and s > _DRAWABLE,
            "rounding takes most of the tolerance": kind in _TYPES and not tol >= 2.5 * unit(kind),
        }
        reason = next((text for text, holds in reasons.items() if holds), "")
        return reason or _absent(problem.q.device)

    @property
    def waiting(self) -> bool:
        """Whether a step's numbers are still on their way."""
        return self._report is not None

    def last_step_paid(self) -> bool | None:
        """Whether the last step that is known to be done was worth it; None if there is nothing new."""
        report = self._report
        if report is None or (report.done is not None and not report.done.query()):
            return None
        self._report = None
        if not report.paid:
            # By the time the sketch is asked again, answers may have other lengths.
            self._hint = None
        return report.paid

    def step(
        self,
        problem: Problem,
        sketch: Sketch,
        norms: Float[Tensor, "b g s"],
        longest: Float[Tensor, "b g"],
        tol: float,
        confidence: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Certificate]:
        """The answer to one query of each head, with its certificate.

        `norms` are at least the lengths of values, `longest` at least the longest of them and hardly more.
        """
        from avow.kernels.sparse_decode import Lengths, decode

        p, chance = problem, 1 - confidence
        b, h, _, d = p.q.shape
        # Lengths exceed the truth by no more than their slack, and by what was lost when they were narrowed.
        most = (longest * (1 - 2 * slack(p.v.shape[-1], p.v.dtype) - 2.0**-21)).float()
        hint = self._hint if self._hint is not None and self._hint.shape == (b, h) else None
        # What draws are aimed at follows from the limit, which single precision may round up.
        drop, limit = tol if chance else _AIM * tol, tol * (1 - 2.0**-20)
        seed = self._next_seed(p.q.device, generator) if chance else None
        lengths, q = Lengths(norms, most), p.q.reshape(b, h, d)
        decoded = decode(q, p.k, p.v, sketch, lengths, drop, p.scale, hint, limit, confidence, seed)
        self._hint = decoded.length * _LONGER
        if self._report is None and not (p.q.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._report = _Report.sent((decoded.kept, decoded.bound, decoded.within), p.k.shape[-2], tol)
        method = Sparse(bits=4, drop=drop, chance=chance)
        rows = decoded.bound.double().unsqueeze(-1)
        # At least the longest value of each head, and at most how long answers are, whatever becomes of them later.
        values = per_query_head(longest, h).double().unsqueeze(-1)
        floors = length_floors(decoded.out).unsqueeze(-1)

        def bounds() -> dict[str, Any]:
            """What is on the device: the first look at it waits for the step to be done."""
            own = relative_errors(absolute_errors(rows, values), floors)
            return {"bound": float(rows.amax()), "relative_rows": own, "relative": float(own.amax())}

        certificate = LazyCertificate.of(
            bounds,
            method=method.name,
            parameters=method.parameters,
            target=method.target,
            kind="statistical" if chance else "deterministic",
            rows=rows,
            confidence=confidence,
            coverage=1.0,
            rounding=True,
            assumptions=(_SUMS, _POWERS, *((INDEPENDENT,) if chance else ())),
            reason=f"only tokens that {'were drawn' if chance else 'may matter'} were read in full",
            cost=method.cost(p.sizes),
        )
        return decoded.out.unsqueeze(-2), certificate

    def _next_seed(self, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """The seed of a step's draws: a generator's next number, or what the step before left."""
        if generator is None and self._seed is not None and self._seed.device == device:
            return self._seed
        home = torch.device("cpu") if generator is None else generator.device
        number = torch.randint(2**62, (1,), generator=generator, device=home).to(device, non_blocking=True)
        if generator is None:
            self._seed = number
        return number


def _absent(device: torch.device) -> str:
    """Why there are no kernels for a device."""
    if device.type != "cuda":
        return f"kernels are for GPUs, and the cache is on {device.type}"
    from avow.kernels.availability import why_not

    return why_not(device)
