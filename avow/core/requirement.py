"""What a caller will accept (tolerances, a confidence, a coverage), and the generator that random methods draw from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from avow.core import Certificate, Kind
from avow.errors import ParameterError, value_text
from avow.parameters import as_float

# Without a tolerance a random method still states its promise; this is the confidence it states it at.
USUAL_CONFIDENCE = 0.99

INDEPENDENT = "the draws are independent of q, k and v"
"""What every promise that holds with a probability assumes of its generator."""


class Requirement(NamedTuple):
    """What the caller will accept."""

    tol: float | None
    confidence: float
    coverage: float | None
    rtol: float | None = None

    @property
    def exact(self) -> bool:
        """Whether no error is allowed but that of rounding."""
        return self.tol is None and self.rtol is None

    def met_by(self, certificate: Certificate) -> bool:
        """Whether a certificate promises all that was asked for."""
        return certificate.kind in self.kinds and (self.exact or certificate.keeps(self.tol, self.rtol))

    @property
    def kinds(self) -> frozenset[Kind]:
        kinds: set[Kind] = {"deterministic"}
        if self.confidence < 1:
            kinds.add("statistical")
        if self.coverage is not None:
            kinds.add("sampled")
        return frozenset(kinds)

    @property
    def stated(self) -> float:
        """The confidence promises are stated at, also if certainty was asked for."""
        return self.confidence if self.confidence < 1 else USUAL_CONFIDENCE


def checked_requirement(
    tol: object, confidence: object = None, coverage: object = None, rtol: object = None
) -> Requirement:
    """What `attend` was asked to accept, once it is known to make sense; the confidence is 1 if none was given."""
    exact = "must be a number above 0", "try {name}=1e-2, or leave it out for exact"
    rules: dict[str, tuple[object, Callable[[float], bool], str, str]] = {
        "tol": (tol, lambda x: 0 < x < math.inf, *exact),
        "confidence": (confidence, lambda x: 0 < x <= 1, "must be above 0 and at most 1", "try {name}=0.99"),
        "coverage": (coverage, lambda x: 0 < x < 1, "must lie strictly between 0 and 1", "try {name}=0.99"),
        "rtol": (rtol, lambda x: 0 < x < math.inf, *exact),
    }
    numbers: dict[str, float] = {}
    for name, (value, holds, rule, remedy) in rules.items():
        if value is not None:
            numbers[name] = as_float(value)
            if not holds(numbers[name]):
                if isinstance(value, str):
                    remedy = "pass a number, without quotes"
                raise ParameterError(name, value_text(value), rule, remedy.format(name=name))
    sure = numbers.get("confidence", 1.0)
    return Requirement(numbers.get("tol"), sure, numbers.get("coverage"), numbers.get("rtol"))


def check_generator(generator: object) -> None:
    """Raise if chance could not come from it."""
    if generator is not None and not isinstance(generator, torch.Generator):
        rule = "must be a torch.Generator"
        raise ParameterError("generator", value_text(generator), rule, "pass torch.Generator().manual_seed(0)")


class RandomStream(torch.Generator):
    """A generator whose seed no inputs are made from."""


def random_stream(generator: torch.Generator | None, device: torch.device | str) -> RandomStream:
    """A generator seeded by a hash of the caller's next number; on the caller's device, or else on the given one.

    Inputs are often made from a seed which is set again before the call. Draws taken from the caller's generator itself
    would then be the very numbers that the inputs are made of, and nothing could be promised of them.
    """
    if isinstance(generator, RandomStream):
        return generator
    home = torch.device(device) if generator is None else generator.device
    number = torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else home)
    digest = hashlib.blake2b(int(number).to_bytes(8, "little"), digest_size=8, person=b"avow draws").digest()
    stream = RandomStream(home)
    stream.manual_seed(int.from_bytes(digest, "little") >> 1)
    return stream
