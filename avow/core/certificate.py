"""What is promised of an answer, and what it cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import notebook
from avow.core.schema import json_schema
from avow.errors import InputError, ParameterError, ShapeError, value_text
from avow.parameters import as_float

SOFTMAX = "softmax attention"
"""The target that most methods share."""

SCHEMA = "avow.certificate/1"
"""What a certificate in JSON says of its form."""

Kind = Literal["deterministic", "statistical", "sampled", "none"]

_Bound = Annotated[float, {"anyOf": [{"type": "number", "minimum": 0}, {"const": "inf"}]}]
_Share = Annotated[float, {"type": "number", "minimum": 0, "maximum": 1}]

# The fields of a certificate that hold a number for each row.
_ROWS = ("rows", "relative_rows")
# What is printed if an answer may be as far off as it is long, or its length was not measured.
_UNPROVED = "relative to the answer nothing is proved"


@dataclass(frozen=True)
class Cost:
    """What a method does, counted.

    Attributes:
        flops: operations of matrix products, as `torch.utils.flop_counter` counts them.
        pointwise: numbers that operations other than matrix products write.
        launches: kernels that are started, one after the other.
        peak_bytes: memory at the peak, beyond the inputs.
        weight: what one operation costs beside the same in the method's usual precision: 2 for float64.
        hits: rows of keys and values in host memory that were read on the device, which had kept them.
        misses: rows of keys and values that were read from host memory.

    >>> from avow import Cost
    >>> (Cost(8, 4, 1, 64) + Cost(2, 2, 1, 32)).peak_bytes
    64
    """

    flops: int
    pointwise: int
    launches: int
    peak_bytes: int
    weight: float = 1.0
    hits: int = 0
    misses: int = 0

    def __add__(self, other: Cost) -> Cost:
        """One after the other: work adds up, the memory of the first is free again."""
        return Cost(
            self.flops + other.flops,
            self.pointwise + other.pointwise,
            self.launches + other.launches,
            max(self.peak_bytes, other.peak_bytes),
            max(self.weight, other.weight),
            self.hits + other.hits,
            self.misses + other.misses,
        )


@dataclass(frozen=True)
class Promise:
    """What a method can say of its own answer: a bound for every row, and what that rests on.

    Attributes:
        kind: what is promised: always, with a probability, or nothing.
        rows: a bound for each row, (b, h, n), relative to the longest value that the row sees.
        confidence: the probability with which it holds.
        assumptions: what it rests on and cannot be checked, each in a sentence.
        reason: why nothing is promised, or what else there is to say.
    """

    kind: Kind
    rows: Float[Tensor, "b h n"]
    confidence: float = 1.0
    assumptions: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""A bound on the error of one answer, in two units, and all it rests on.

    `rows`, and `bound`, their maximum, are in units of the longest value that a row sees:
    :math:`\|out_i - o^*_i\|_2 / \max_j \|v_j\|_2`. `relative_rows`, and `relative`, are in units of the answer itself:
    :math:`\|out_i - o^*_i\|_2 / \|o^*_i\|_2`; they are infinite if nothing of that kind is known.

    Attributes:
        method: name of the method that gave the answer.
        parameters: the parameters it ran with.
        target: the mechanism that the answer is compared with. Only if this is "softmax attention" is the answer close
            to what PyTorch's SDPA computes; `separable` and `latent` are mechanisms of their own.
        kind: what is promised: `deterministic` (every row, always), `statistical` (each row, with probability
            `confidence`), `sampled` (a share `coverage` of the rows, with probability `confidence`) or `none`.
        bound: the largest of `rows`.
        rows: a bound for each row, (batch, heads, n), relative to the longest value that the row sees.
        confidence: the probability with which the promise holds; 1 is always.
        coverage: the share of the rows that the promise is about.
        rounding: whether the bound includes the rounding of all arithmetic.
        assumptions: what the bound rests on and cannot be checked, each in a sentence.
        reason: why this method ran, or why nothing is promised.
        cost: what the answer cost; None if it was not counted.
        relative: the largest of `relative_rows`.
        relative_rows: a bound for each row, (batch, heads, n), relative to the length of the true answer.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> certificate = avow.attend(q, k, v).certificate
    >>> certificate.kind, certificate.target, tuple(certificate.rows.shape)
    ('deterministic', 'softmax attention', (1, 8, 64))
    """

    method: str
    parameters: Mapping[str, Any]
    target: str
    kind: Kind
    bound: _Bound
    rows: Tensor
    confidence: _Share = 1.0
    coverage: _Share = 1.0
    rounding: bool = True
    assumptions: tuple[str, ...] = ()
    reason: str = ""
    cost: Cost | None = None
    relative: _Bound = math.inf
    relative_rows: Tensor = field(default_factory=lambda: torch.full((), math.inf, dtype=torch.float64, device="cpu"))

    def __post_init__(self) -> None:
        if self.relative_rows.ndim == 0 != self.rows.ndim:
            object.__setattr__(self, "relative_rows", self.relative_rows.to(self.rows.device).expand(self.rows.shape))
        if self.relative_rows.shape != self.rows.shape:
            rule, remedy = f"must be that of rows, {tuple(self.rows.shape)}", "change both, or neither"
            raise ShapeError("shape of relative_rows", tuple(self.relative_rows.shape), rule, remedy)

    def keeps(self, tol: float | None = None, rtol: float | None = None) -> bool:
        """Whether the promise is at least as strong as what is given.

        Args:
            tol: the limit for `bound`; None does not ask.
            rtol: the limit for `relative`; None does not ask. One of the two must be given.

        Returns:
            False also if the kind is `none`.

        Raises:
            ParameterError: neither is given, or one is not a number.

        >>> import torch, avow
        >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
        >>> avow.attend(q, k, v).certificate.keeps(tol=1e-2)
        True
        """
        check_limits(tol, rtol)
        if self.kind == "none":
            return False
        # The second is asked for only if it matters: it may still be on a device.
        return (tol is None or self.bound <= tol) and (rtol is None or self.relative <= rtol)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Certificate):
            return NotImplemented
        mine, theirs = self._plain(), other._plain()
        return mine == theirs and all(torch.equal(getattr(self, name), getattr(other, name)) for name in _ROWS)

    def _plain(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _ROWS}
        return plain | {"parameters": dict(self.parameters)}

    def to_json(self, rows: bool = True) -> str:
        """The certificate as JSON, in the form that `json_schema` says.

        Args:
            rows: whether the bound of every single row is written, too.

        Returns:
            One object. Infinities are written as the word "inf".

        >>> import json, torch, avow
        >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
        >>> json.loads(avow.attend(q, k, v).certificate.to_json(rows=False))["schema"]
        'avow.certificate/1'
        """
        plain: dict[str, Any] = {"schema": SCHEMA, **self._plain()}
        plain["cost"] = None if self.cost is None else dataclasses.asdict(self.cost)
        plain["bound"], plain["relative"] = _finite_or_word(self.bound), _finite_or_word(self.relative)
        for name in _ROWS if rows else ():
            flat = getattr(self, name).detach().double().cpu()
            plain[name] = {"shape": list(flat.shape), "values": [_finite_or_word(x) for x in flat.flatten().tolist()]}
        return json.dumps(plain)

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The certificate that `to_json` wrote; what no certificate says is refused.

        One that says nothing of `relative`, as older versions wrote them, promises nothing in that unit.

        Args:
            text: the JSON.

        Returns:
            The certificate, equal to the one that was written. Without rows, if these were left out.

        Raises:
            InputError: this is not JSON, not a certificate, one of another version, or one that contradicts itself.

        >>> import torch, avow
        >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
        >>> certificate = avow.attend(q, k, v).certificate
        >>> avow.Certificate.from_json(certificate.to_json()) == certificate
        True
        """
        try:
            plain = json.loads(text)
            if (schema := plain.pop("schema", SCHEMA)) != SCHEMA:
                raise ValueError(f"its schema is {schema!r}, and this version reads {SCHEMA!r}")
            plain.setdefault("rows", {"shape": [0], "values": []})
            for name in [name for name in _ROWS if name in plain]:
                values = torch.tensor([float(x) for x in plain[name]["values"]], dtype=torch.float64, device="cpu")
                plain[name] = values.reshape(plain[name]["shape"])
            cost = plain.pop("cost")
            plain["bound"], plain["relative"] = float(plain["bound"]), float(plain.get("relative", math.inf))
            plain["assumptions"] = tuple(plain["assumptions"])
            certificate = Certificate(**plain, cost=None if cost is None else Cost(**cost))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise _unread(text, f"{type(error).__name__}: {error}") from error
        if fault := certificate._fault():
            raise _unread(text, fault)
        return certificate

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema of what `to_json` writes.

        Returns:
            The schema as a dictionary, in the dialect of 2020-12.

        >>> import avow
        >>> avow.Certificate.json_schema()["title"]
        'avow.certificate/1'
        """
        return json_schema(Certificate, SCHEMA, optional=_ROWS)

    def _fault(self) -> str:
        """What no certificate says, in words; empty if nothing is wrong."""
        if self.kind not in get_args(Kind):
            return f"its kind is {self.kind!r}"
        words = (self.method, self.target, self.reason, *self.assumptions)
        if not all(isinstance(x, str) for x in words) or not isinstance(self.parameters, dict):
            return "method, target, reason or assumptions are not strings"
        shares = as_float(self.confidence), as_float(self.coverage)
        if not all(0 <= x <= 1 for x in shares) or not isinstance(self.rounding, bool):
            return "its confidence or coverage is not between 0 and 1"
        counted = [] if self.cost is None else dataclasses.astuple(self.cost)
        if not all(0 <= as_float(x) < math.inf for x in counted):
            return "its cost is not made of finite numbers"
        bounds = ("bound", self.bound, self.rows), ("relative bound", self.relative, self.relative_rows)
        for name, bound, rows in bounds:
            # nan compares false with everything.
            if not bound >= 0 or not bool(((rows >= 0) & (rows <= bound)).all()):
                return f"its {name} is not a bound, or below that of a row"
        return ""

    def __repr__(self) -> str:
        """What is promised, in one line."""
        return f"<Certificate by {self.method}: {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        return "\n".join([self._sentence, *(f"  {name:9}{text}" for name, text in self._facts)])

    def _repr_html_(self) -> str:
        return notebook.card(self._sentence, notebook.facts(self._facts), promise=self.kind != "none")

    @property
    def _sentence(self) -> str:
        """What is promised, of what, and in which unit."""
        share = f"{self.coverage:.4g} of the rows, with probability {self.confidence:g}, are within"
        start = {
            "deterministic": "every row is within",
            "statistical": f"each row, with probability {self.confidence:g}, is within",
            "sampled": share if min(self.coverage, self.confidence) < 1 else "every row is within",
            "none": "no promise:",
        }[self.kind]
        # What the bound is relative to, and what is proved relative to the answer.
        proved = f"{self.relative:.2e} relative to the answer" if math.isfinite(self.relative) else _UNPROVED
        units = f"relative to the longest value ({proved})"
        # Whoever asked for a tolerance may have had softmax attention in mind.
        target = self.target if self.target == SOFTMAX else f"{self.target}, which is not {SOFTMAX}"
        return f"{start} {self.reason if self.kind == 'none' else f'{self.bound:.2e} of {target}, {units}'}"

    @property
    def _facts(self) -> list[tuple[str, str]]:
        """The method, the kind, the reason, what is assumed and the cost, each with its name."""
        settings = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        rounding = "included" if self.rounding else "not included"
        lines = [("method", self.method + (f" ({settings})" if settings else ""))]
        lines.append(("kind", f"{self.kind}, rounding {rounding}"))
        if self.reason and self.kind != "none":
            lines.append(("because", self.reason))
        lines += [("assumes", assumption) for assumption in self.assumptions]
        if self.cost is not None:
            flops, peak = f"{self.cost.flops:.3g} flops", f"{self.cost.peak_bytes / 2**20:.1f} MiB at the peak"
            rows = f", {self.cost.misses:,} rows from host memory" if self.cost.misses or self.cost.hits else ""
            lines.append(("cost", f"{flops}, {peak}{rows}"))
        return lines


class LazyCertificate(Certificate):
    """A certificate some of whose fields are computed at the first look at any of them.

    Decoding hands out one for every layer and token, and few are read. What it rests on is captured when the answer is
    given (norms and lengths, never tensors that others may write into), so a late look states the same bound. One that
    was made while a CUDA graph was captured `follows` the graph: each look at it tells of the last replay.
    """

    @staticmethod
    def of(
        later: Callable[[], dict[str, Any]], follows: bool = False, known: Mapping[str, Any] | None = None
    ) -> LazyCertificate:
        """The certificate whose fields `later` gives: once, or at every look if it `follows` a graph.

        Args:
            later: gives the fields of a certificate by name.
            follows: whether each look asks again.
            known: fields that are known by now; `later` is not asked for these.

        Returns:
            The certificate.
        """
        certificate = LazyCertificate.__new__(LazyCertificate)
        # A frozen class takes nothing else, and torch.compile can follow it.
        object.__setattr__(certificate, "_later", later)
        object.__setattr__(certificate, "_follows", follows)
        for name, value in (known or {}).items():
            object.__setattr__(certificate, name, value)
        return certificate

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are complete certificates."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Certificate)}
        return object.__new__, (Certificate,), fields


class _Late:
    """A field of a `LazyCertificate`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set__(self, certificate: LazyCertificate, value: Any) -> None:
        vars(certificate)[self._name] = value

    def __get__(self, certificate: LazyCertificate | None, owner: type) -> Any:
        if certificate is None:
            return self
        fields = vars(certificate)
        # Two threads may look at once: then both complete it, to the same.
        if self._name not in fields and (later := fields.get("_later")):
            complete = vars(Certificate(**later()))
            if fields["_follows"]:
                return complete[self._name]
            fields.update(complete)
            fields.pop("_later", None)
        return fields[self._name]


for _name in Certificate.__dataclass_fields__:
    setattr(LazyCertificate, _name, _Late(_name))


def with_reason(certificate: Certificate, reason: str) -> Certificate:
    """The same certificate with another reason before its own; what is computed at the first look still is.

    Args:
        certificate: what is promised.
        reason: why this method ran.

    Returns:
        A certificate that says so.
    """

    def later() -> dict[str, Any]:
        known = vars(certificate)
        fields = known["_later"]() if "_later" in known else known
        plain = {name: value for name, value in fields.items() if not name.startswith("_")}
        return plain | {"reason": "; ".join(filter(None, (reason, plain.get("reason"))))}

    return LazyCertificate.of(later, follows=vars(certificate).get("_follows", False))


def check_limits(tol: object, rtol: object) -> None:
    """Raise if neither says how far an answer may be off.

    Args:
        tol: a limit, or None.
        rtol: a limit, or None.

    Raises:
        ParameterError: both are None, or one is not a number.
    """
    if tol is None and rtol is None:
        raise ParameterError("tol, rtol", "None, None", "must not both be left out", "try tol=1e-2 or rtol=1e-2")
    for name, value in (("tol", tol), ("rtol", rtol)):
        if value is not None and math.isnan(as_float(value)):
            raise ParameterError(name, value_text(value), "must be a number", f"try {name}=1e-2")


def _unread(text: object, why: str) -> InputError:
    rule = f"is not a certificate ({why[:200]})"
    return InputError(
        "certificate",
        value_text(text[:40] if isinstance(text, str) else text),
        rule,
        "pass what Certificate.to_json wrote",
    )


_STRENGTH: dict[Kind, int] = {"deterministic": 3, "statistical": 2, "sampled": 1, "none": 0}


def weakest(certificates: Iterable[Certificate]) -> Certificate:
    """The one whose kind of promise is the weakest, and speaks for all; the first of equals.

    Args:
        certificates: at least one.

    Returns:
        One of them.
    """
    return min(certificates, key=lambda certificate: _STRENGTH[certificate.kind])


def _finite_or_word(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
