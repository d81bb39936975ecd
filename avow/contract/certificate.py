"""What is promised of an answer, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from avow.errors import InputError, ParameterError
from avow.params import as_float

Kind = Literal["deterministic", "statistical", "sampled", "none"]


@dataclass(frozen=True)
class Cost:
    """What a method does, counted: `flops` as `torch.utils.flop_counter` counts, `peak_bytes` beyond the inputs.

    `weight` is what one operation costs beside the same in the method's usual precision: two for float64.
    """

    flops: int
    pointwise: int
    launches: int
    peak_bytes: int
    weight: float = 1.0

    def __add__(self, other: Cost) -> Cost:
        """One after the other: work adds up, the memory of the first is free again."""
        return Cost(
            self.flops + other.flops,
            self.pointwise + other.pointwise,
            self.launches + other.launches,
            max(self.peak_bytes, other.peak_bytes),
            max(self.weight, other.weight),
        )


@dataclass(frozen=True)
class Promise:
    """What a method can say of its own answer: a bound for every row, and what that rests on."""

    kind: Kind
    rows: Float[Tensor, "b h n"]
    confidence: float = 1.0
    coverage: float = 1.0
    assumptions: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""A bound on the error of one answer, and all it rests on.

    The unit: :math:`\|out_i - o^*_i\|_2 / \max_j \|v_j\|_2`, j over the keys row i may see.
    """

    method: str
    parameters: Mapping[str, Any]
    target: str
    kind: Kind
    bound: float
    rows: Tensor
    confidence: float = 1.0
    coverage: float = 1.0
    rounding: bool = True
    assumptions: tuple[str, ...] = ()
    reason: str = ""
    cost: Cost | None = None

    def keeps(self, tol: float) -> bool:
        """Whether the promise is at least as strong as `tol`."""
        if math.isnan(as_float(tol)):
            raise ParameterError("tol", repr(tol), "must be a number", "try tol=1e-2")
        return self.kind != "none" and self.bound <= tol

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Certificate):
            return NotImplemented
        mine, theirs = self._plain(), other._plain()
        return mine == theirs and torch.equal(self.rows, other.rows)

    def _plain(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rows"}
        return plain | {"parameters": dict(self.parameters)}

    def to_json(self, rows: bool = True) -> str:
        """The certificate as JSON; `rows=False` leaves the bound of each single row out."""
        plain = self._plain()
        plain["cost"] = None if self.cost is None else dataclasses.asdict(self.cost)
        plain["bound"] = _finite_or_word(self.bound)
        if rows:
            flat = self.rows.detach().double().cpu()
            plain["rows"] = {"shape": list(flat.shape), "values": [_finite_or_word(x) for x in flat.flatten().tolist()]}
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The certificate `to_json` wrote; what no certificate says is refused."""
        try:
            plain = json.loads(text)
            stored = plain.pop("rows", {"shape": [0], "values": []})
            values = torch.tensor([float(x) for x in stored["values"]], dtype=torch.float64)
            cost = plain.pop("cost")
            plain["bound"] = float(plain["bound"])
            plain["assumptions"] = tuple(plain["assumptions"])
            cost = None if cost is None else Cost(**cost)
            made = Certificate(**plain, rows=values.reshape(stored["shape"]), cost=cost)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as problem:
            raise _unread(text, f"{type(problem).__name__}: {problem}") from problem
        if wrong := made._fault():
            raise _unread(text, wrong)
        return made

    def _fault(self) -> str:
        """What no certificate says, in words; empty where nothing is wrong."""
        if self.kind not in get_args(Kind):
            return f"its kind is {self.kind!r}"
        words = (self.method, self.target, self.reason, *self.assumptions)
        if not all(isinstance(x, str) for x in words) or not isinstance(self.parameters, dict):
            return "its words are none"
        shares = as_float(self.confidence), as_float(self.coverage)
        if not all(0 <= x <= 1 for x in shares) or not isinstance(self.rounding, bool):
            return "its confidence or coverage is no share"
        counted = [] if self.cost is None else dataclasses.astuple(self.cost)
        if not all(0 <= as_float(x) < math.inf for x in counted):
            return "its cost is none"
        # nan compares false with everything.
        if not self.bound >= 0 or not bool(((self.rows >= 0) & (self.rows <= self.bound)).all()):
            return "its bound is none, or below that of a row"
        return ""

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        share = f"{self.coverage:.4g} of the rows, with probability {self.confidence:g}, are within"
        sentence = {
            "deterministic": "every row is within",
            "statistical": f"each row, with probability {self.confidence:g}, is within",
            "sampled": share if min(self.coverage, self.confidence) < 1 else "every row is within",
            "none": "no promise:",
        }[self.kind]
        what = self.reason if self.kind == "none" else f"{self.bound:.2e} of {self.target}"
        lines = [f"{sentence} {what}", f"  method   {self.method}" + (f" ({settings})" if settings else "")]
        lines.append(f"  kind     {self.kind}, rounding {'included' if self.rounding else 'not included'}")
        if self.reason and self.kind != "none":
            lines.append(f"  because  {self.reason}")
        lines += [f"  assumes  {sentence}" for sentence in self.assumptions]
        if self.cost is not None:
            lines.append(f"  cost     {self.cost.flops:.3g} flops, {self.cost.peak_bytes / 2**20:.1f} MiB at the peak")
        return "\n".join(lines)


def _unread(text: object, why: str) -> InputError:
    rule = f"is no certificate ({why[:200]})"
    return InputError("certificate", repr(str(text)[:40]), rule, "pass what Certificate.to_json wrote")


_STRENGTH: dict[Kind, int] = {"deterministic": 3, "statistical": 2, "sampled": 1, "none": 0}


def weakest(certificates: Iterable[Certificate]) -> Certificate:
    """The one whose kind of promise is the weakest, and speaks for all; the first of equals."""
    return min(certificates, key=lambda certificate: _STRENGTH[certificate.kind])


def _finite_or_word(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
