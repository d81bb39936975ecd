"""Whether a module treats its tokens as a set: permute what enters, and what leaves is permuted alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from avow.errors import DtypeError, NonFiniteError, ParameterError, ShapeError
from avow.parameters import check_count, declared


@dataclass(frozen=True)
class Equivariance:
    """What permuting the tokens did.

    Attributes:
        holds: whether no permutation deviated by more than `tolerance`: that is what the trials found, and no proof.
        deviation: the largest |f(PX) − P f(X)|, relative to the largest output.
        tolerance: how far rounding may bring it.
        trials: how many permutations were tried.
        witness: the permutation that deviated most, if the deviation exceeds `tolerance`: the proof that it fails.
    """

    holds: bool
    deviation: float
    tolerance: float
    trials: int
    witness: tuple[int, ...] | None

    def __str__(self) -> str:
        size = f"deviation {self.deviation:.2g}, tolerance {self.tolerance:.2g}"
        if self.witness is None:
            return f"permutation equivariant under {self.trials} permutations ({size})"
        return f"not permutation equivariant ({size}): see the order {self.witness}"


@declared()
def check_permutation_equivariance(
    module: Callable[[Tensor], Tensor],
    example: Tensor | Sequence[int],
    trials: int = 8,
    tolerance: float | None = None,
    *,
    seed: int = 0,
) -> Equivariance:
    """Whether f(PX) = P f(X), tried on permutations of the tokens.

    Attention without mask or positions, feed-forward, residuals and norms keep it; a causal mask or positions break it
    [claim permutation].

    Args:
        module: what maps (…, n, d), or whole-number ids (…, n), to (…, n, e).
        example: such a tensor, or the shape (…, n, d) of numbers to draw for every trial.
        trials: how many permutations are tried.
        tolerance: how far outputs may be apart, relative to the largest; None: three quarters of the digits of the
            output's type agree.
        seed: decides what is drawn.

    Returns:
        What was found, with the permutation that deviated most.

    Raises:
        ParameterError: a number does not fit.
        ShapeError: the output does not have a row for each token.

    >>> import torch, avow
    >>> avow.nn.check_permutation_equivariance(torch.nn.LayerNorm(4), (2, 5, 4), trials=3).holds
    True
    """
    check_count("trials", trials)
    if tolerance is not None and not (tolerance >= 0 and math.isfinite(tolerance)):
        raise ParameterError("tolerance", tolerance, "must be at least 0", "leave it out for the type's own")
    _refuse_dropout(module)
    generator = torch.Generator().manual_seed(seed)
    draw = _inputs(module, example, generator)
    worst, witness, allowed = 0.0, None, tolerance
    for order in _orders(_tokens(draw()), trials, generator):
        x = draw()
        permuted_input = x.index_select(_token_axis(x), order.to(x.device))
        with torch.no_grad():
            straight, again, permuted = (_out(module, given) for given in (x, x, permuted_input))
        allowed = torch.finfo(straight.dtype).eps ** 0.75 if allowed is None else allowed
        if _apart(straight, again) > allowed:
            rule, remedy = "must answer one input alike", "call module.eval(), and fix what it draws at random"
            raise ParameterError("module", _name(module), rule, remedy)
        deviation = _apart(straight.index_select(-2, order.to(straight.device)), permuted)
        if deviation > worst:
            worst, witness = deviation, order
    assert allowed is not None
    holds = worst <= allowed
    return Equivariance(holds, worst, allowed, trials, None if holds or witness is None else tuple(witness.tolist()))


def _orders(n: int, trials: int, generator: torch.Generator) -> Iterator[Int[Tensor, "n"]]:
    """The reversal, then a shift by one, then orders at random; never the one that changes nothing."""
    plain = torch.arange(n)
    for trial in range(trials):
        order = plain.flip(0) if trial == 0 else plain.roll(1) if trial == 1 else torch.randperm(n, generator=generator)
        yield plain.roll(1) if torch.equal(order, plain) else order


def _inputs(
    module: Callable[[Tensor], Tensor], example: Tensor | Sequence[int], generator: torch.Generator
) -> Callable[[], Tensor]:
    """What gives the input of each trial: the example itself, or numbers of its shape."""
    if isinstance(example, Tensor):
        given = example.detach()
        least = 2 if given.is_floating_point() else 1
        if given.ndim < least or _tokens(given) < 2:
            rule = "must have at least two tokens: (…, n, d), or (…, n) for ids"
            raise ShapeError("example.shape", tuple(given.shape), rule, "give a sequence with n ≥ 2")
        return lambda: given
    shape = tuple(example)
    if not all(size >= 1 for size in shape) or len(shape) < 2 or shape[-2] < 2:
        raise ShapeError("example", shape, "must be a shape (…, n, d) with n ≥ 2", "try (2, 16, d)")
    weights = [p for p in module.parameters() if p.is_floating_point()] if isinstance(module, nn.Module) else []
    like = weights[0].detach() if weights else torch.zeros(())
    return lambda: torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def _token_axis(x: Tensor) -> int:
    return -2 if x.is_floating_point() else -1


def _tokens(x: Tensor) -> int:
    return x.shape[_token_axis(x)]


def _out(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out = module(x)
    if not isinstance(out, Tensor):
        remedy = "wrap it: lambda x: module(x)[0]"
        raise DtypeError("module's answer", type(out).__name__, "must be one tensor", remedy)
    if not out.is_floating_point():
        raise DtypeError("module's answer", out.dtype, "must be floating point", "return numbers, not choices")
    if out.ndim < 2 or out.shape[-2] != _tokens(x):
        rule = f"must be (…, {_tokens(x)}, e): one row for each token"
        raise ShapeError("module's answer", tuple(out.shape), rule, "put the tokens on the last axis but one")
    if not bool(out.isfinite().all()):
        raise NonFiniteError("module's answer", "nan or inf", "must be finite", "try a smaller example")
    return out


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    if a.shape != b.shape:
        rule = f"must keep its shape {tuple(a.shape)}"
        raise ShapeError("module's answer", tuple(b.shape), rule, "answer every order of the tokens alike")
    difference = float((a.double() - b.double()).abs().max())
    return difference / max(float(a.abs().max()), float(b.abs().max())) if difference else 0.0


def _refuse_dropout(module: Callable[[Tensor], Tensor]) -> None:
    if not isinstance(module, nn.Module):
        return
    for name, part in module.named_modules():
        # Attention modules hold their dropout as a number.
        share = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and isinstance(share, int | float) and share > 0:
            where = f"{_name(module)}{'.' if name else ''}{name}"
            raise ParameterError(f"dropout of {where}", share, "draws at random in training", "call module.eval()")


def _name(module: Callable[[Tensor], Tensor]) -> str:
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "callable")
