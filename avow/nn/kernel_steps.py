"""Single decoding steps of a cache by kernels on a GPU, none of which waits for the last; lazy certificates.

The answer is right when it is handed out: if a bound would exceed the tolerance, the kernels themselves read all
tokens. Its certificate stays on the device until someone asks for its bound. With a confidence below 1 tokens are
drawn; the seed of the draws is on the device, too, where each step advances it. Whether looking at the sketch pays is
learnt from the last step that is known to be done: its numbers come back beside the work, and are looked at only when
they have arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Certificate, Problem
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


class Held(NamedTuple):
    """What a cache holds beside keys and values, as it lies there."""

    sketch: Sketch
    norms: Float[Tensor, "b g s"]
    """At least the lengths of values."""
    longest: Float[Tensor, "b g"]
    """At least the longest of them, and hardly more."""


@dataclass
class _Report:
    """A step's numbers on their way to the host."""

    arrays: tuple[Tensor, ...]
    done: torch.cuda.Event | None
    tokens: int
    tol: float

    @property
    def arrived(self) -> bool:
        return self.done is None or self.done.query()

    @property
    def paid(self) -> bool:
        """Whether the step read little enough, and proved what it was to prove."""
        kept, bound, within = self.arrays
        share = float(kept.double().mean()) / self.tokens
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

    def learnt(self) -> bool | None:
        """Whether the last step that is known to be done was worth it; None if there is nothing new."""
        if self._report is None or not self._report.arrived:
            return None
        paid, self._report = self._report.paid, None
        if not paid:
            # By the time the sketch is asked again, answers may have other lengths.
            self._hint = None
        return paid

    def step(
        self,
        problem: Problem,
        held: Held,
        tol: float,
        confidence: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Certificate]:
        """The answer to one query of each head, with its certificate."""
        from avow.kernels.sparse_decode import Lengths, decode

        p = problem
        b, h, _, d = p.q.shape
        # Lengths exceed the truth by no more than their slack, and by what was lost when they were narrowed.
        most = (held.longest * (1 - 2 * slack(p.v.shape[-1], p.v.dtype) - 2.0**-21)).float()
        hint = self._hint if self._hint is not None and self._hint.shape == (b, h) else None
        found = decode(
            p.q.reshape(b, h, d),
            p.k,
            p.v,
            held.sketch,
            Lengths(held.norms, most),
            # What draws are aimed at follows from the limit.
            _AIM * tol if confidence == 1 else tol,
            p.scale,
            hint,
            # Single precision may round the limit up.
            tol * (1 - 2.0**-20),
            confidence,
            None if confidence == 1 else self._drawn(p.q.device, generator),
        )
        self._hint = found.length * _LONGER
        if self._report is None and not _capturing(p.q.device):
            self._report = _sent((found.kept, found.bound, found.within), p.k.shape[-2], tol)
        chance = 1 - confidence
        method = Sparse(bits=4, drop=tol if chance else _AIM * tol, chance=chance)
        rows = found.bound.double().unsqueeze(-1)
        # At least the longest value of each head, and at most how long answers are, whatever becomes of them later.
        longest, lengths = (
            per_query_head(held.longest, h).double().unsqueeze(-1),
            length_floors(found.out).unsqueeze(-1),
        )

        def bounds() -> dict[str, Any]:
            """What is on the device: the first look at it waits for the step to be done."""
            own = relative_errors(absolute_errors(rows, longest), lengths)
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
        return found.out.unsqueeze(-2), certificate

    def _drawn(self, device: torch.device, generator: torch.Generator | None) -> Tensor:
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


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _sent(arrays: tuple[Tensor, ...], tokens: int, tol: float) -> _Report:
    """A report under way: copies to memory that a GPU writes while the host goes on."""
    if arrays[0].device.type != "cuda":
        return _Report(arrays, None, tokens, tol)
    there = tuple(torch.empty_like(x, device="cpu", pin_memory=True) for x in arrays)
    for target, x in zip(there, arrays, strict=True):
        target.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return _Report(there, done, tokens, tol)


class LazyCertificate(Certificate):
    """A certificate some of whose fields are computed at the first look at any of them.

    Decoding hands out one for every layer and token, and few are read. What it rests on is captured when the answer is
    given (norms and lengths, never tensors that others may write into), so a late look states the same bound.
    """

    @staticmethod
    def of(later: Callable[[], dict[str, Any]], **known: Any) -> LazyCertificate:
        """The certificate with the fields `known` now; `later` gives the others, once."""
        certificate = LazyCertificate.__new__(LazyCertificate)
        certificate.__dict__.update(known, _later=later)
        return certificate

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are complete certificates."""
        return _complete, ({field.name: getattr(self, field.name) for field in dataclasses.fields(Certificate)},)


class _Late:
    """A field that is not computed yet; once it is, the certificate's own entry hides this one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, certificate: Any, owner: type) -> Any:
        if certificate is None:
            return self
        fields = certificate.__dict__
        # Two threads may look at once: then both complete it, to the same.
        if (later := fields.get("_later")) is not None:
            known = {name: value for name, value in fields.items() if name != "_later"}
            fields.update(vars(Certificate(**(later() | known))))
            fields.pop("_later", None)
        return fields[self._name]


def _complete(fields: dict[str, Any]) -> Certificate:
    return Certificate(**fields)


for _field in dataclasses.fields(Certificate):
    setattr(LazyCertificate, _field.name, _Late(_field.name))
