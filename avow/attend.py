"""The one verb: attend, and get an answer with its certificate.

The path of a call: `attend` makes a `Problem` of the tensors and a `Requirement` of the tolerances. `_attend_cheapest`
makes a plan and runs its candidates, the cheapest first, or `_attend_by` runs the method that was named; if none
proves enough, `attend_exact` does. Whatever runs goes through `run_certified`: compute, promise, certificate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from avow import deferred, in_graph, planner
from avow.calibration import Rates, is_off, rates
from avow.core import (
    BoundEstimate,
    Certificate,
    Computed,
    Method,
    Problem,
    Sizes,
    check_numbers,
    check_tensor,
    dtype_name,
)
from avow.core.audit import Audit, audit_rows
from avow.core.certify import aimed_bound, answer_ratios, certify, certify_lazily, subnormal_charge
from avow.core.eager import run_eagerly
from avow.core.record import is_recording, note, running_layer
from avow.core.requirement import USUAL_CONFIDENCE, Requirement, check_generator, checked_requirement, random_stream
from avow.core.sdpa_names import mask_and_causal
from avow.errors import (
    AvowError,
    ParameterError,
    RangeError,
    ShapeError,
    ToleranceUnreachable,
    is_out_of_memory,
    value_text,
)
from avow.methods import all_methods, checked_class, exact_method, method_from, random_features
from avow.methods.random_features import FeatureCount
from avow.numerics.rounding import unit
from avow.parameters import named_arguments
from avow.planner import Plan

# What autocast converts.
_NARROWED = (torch.float32, torch.bfloat16, torch.float16)

# What methods proved in the calls of this process, and how long that took; without calibration no choice rests on time.
_trials = planner.Trials(lambda: 0.0 if is_off() else time.perf_counter())

_P = ParamSpec("_P")
_R = TypeVar("_R")

# rtol is aimed by the lengths of a few answers: at most this many rows, and at most one of so many, which is cheap.
_SAMPLED_ROWS, _ROWS_PER_SAMPLE = 8, 64


class Attended(NamedTuple):
    """An answer and what is promised of it.

    Attributes:
        out: the answer, (batch, heads, n, value dim), in the type of q.
        certificate: what is promised of it.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> out, certificate = avow.attend(q, k, v)
    >>> tuple(out.shape)
    (1, 8, 64, 16)
    """

    out: Tensor
    certificate: Certificate

    def __repr__(self) -> str:
        return f"Attended(out={value_text(self.out)}, certificate={self.certificate!r})"


def own_arithmetic(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function outside autocast and compiled graphs: a bound is for the arithmetic that was asked for, no other."""

    @functools.wraps(function)
    def outside(*arguments: _P.args, **options: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            if function.__name__ == "attend" and (words := in_graph.spoken(arguments, options)):
                return Attended(*in_graph.attend(words, *arguments, options))  # type: ignore[return-value, arg-type, call-arg]
            return run_eagerly(f"avow.{function.__name__}", function, *arguments, **options)
        given = (*arguments, *options.values())
        kinds = {x.device.type for x in given if isinstance(x, Tensor)}
        on = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
        if not on:
            return function(*arguments, **options)
        with contextlib.ExitStack() as stack:
            for kind in on:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*arguments, **options)

    return outside


@own_arithmetic
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    method: str | Method = "auto",
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
    confidence: float | None = None,
    coverage: float | None = None,
    generator: torch.Generator | None = None,
    **parameters: Any,
) -> Attended:
    """Attention, and the certificate of the error it made.

    With `tol` or `rtol` the cheapest method runs that proves what was asked, and exact attention if none can. Without
    either, the answer is exact, and the certificate bounds its rounding. Shapes, masks and scale are those of PyTorch's
    SDPA.

    Which method runs depends on the tensors and arguments, on the rates of this machine (`avow.calibration`), and on
    what methods proved in earlier calls of this process with the same sizes and limits and about the same largest
    logits: one that proved too little rests for some calls. On a GPU, calls without a tolerance wait for nothing, and
    bad numbers are an error when somebody looks at the certificate.

    Args:
        q: queries, (batch, heads, n, dim). Further batch axes may come before these four, and batch and heads may be
            left out.
        k: keys, (batch, key heads, s, dim).
        v: values, (batch, key heads, s, value dim).
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees; None sets no
            limit.
        rtol: the same relative to the length of the row's true answer.
        method: "auto", the name of a method (`avow.all_methods()` has them), or a `Method` object, which runs as it is.
            The bound is then on the distance to that method's target: `separable` and `latent` are mechanisms of their
            own, and not softmax attention.
        mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        kernel: "dot" for weights exp(scale·q·k), or "rbf" for exp(-‖q - k‖²/(2·sigma)).
        sigma: width of the RBF kernel; for `kernel="rbf"` alone.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.
        dropout_p: must be 0: no certificate covers attention weights that are dropped at random.
        confidence: accept bounds that hold with this probability for each row; None accepts certain ones alone.
        coverage: accept bounds that hold for this share of the rows, from rows recomputed in float64; None accepts
            bounds for all rows alone.
        generator: what methods draw from that draw at random; None is torch's own generator.
        **parameters: parameters of a named method, such as `features=256`; those left out are chosen for the tolerance,
            or are the defaults.

    Returns:
        The answer and its certificate, as `out` and `certificate`.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.
        UnknownMethod: there is no method of that name.
        ToleranceUnreachable: the named method, or with "auto" any available arithmetic, cannot prove the tolerance;
            `error.best` is the smallest bound that can be proved.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> out, certificate = avow.attend(q, k, v, tol=1e-2, causal=True)
    >>> certificate.bound <= 1e-2
    True
    """
    mask, causal = mask_and_causal(mask, causal, attn_mask, is_causal, dropout_p)
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    )
    requirement = checked_requirement(tol, confidence, coverage, rtol)
    check_generator(generator)
    if method == "auto":
        check_automatic(parameters)
    later = _stated_later(problem, requirement, method, parameters)
    if later is not None:
        return _attend_unwaiting(later, problem)
    problem = _measured(problem)
    if method == "auto":
        return _attend_cheapest(problem, requirement, generator)
    return _attend_by(method, parameters, problem, requirement, generator)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    tol: float | None = None,
    rtol: float | None = None,
) -> Tensor:
    """The answer of `attend` alone, called as `torch.nn.functional.scaled_dot_product_attention` is.

    Its certificate goes to the records that `avow.record` has open; without a record and a tolerance none is computed.
    Under autocast the inputs are converted first, as PyTorch's function does it. Errors call the inputs q, k, v and
    mask.

    Args:
        query: queries, (batch, heads, n, dim).
        key: keys, (batch, key heads, s, dim).
        value: values, (batch, key heads, s, value dim).
        attn_mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        dropout_p: must be 0: no certificate covers attention weights that are dropped at random.
        is_causal: whether row i sees keys 0 to i alone; PyTorch does not take a mask beside it, this does.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees; None sets no
            limit.
        rtol: the same relative to the length of the row's true answer.

    Returns:
        The answer, (batch, heads, n, value dim).

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.
        ToleranceUnreachable: no available arithmetic proves the tolerance.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> with avow.record() as certificates:
    ...     out = avow.scaled_dot_product_attention(q, k, v, is_causal=True, tol=1e-2)
    >>> certificates.keeps(1e-2)
    True
    """
    qkv = as_autocast(query, key, value)
    options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    if tol is None and rtol is None and not torch.compiler.is_compiling() and not is_recording():
        return _answer_alone(*qkv, scale=scale, enable_gqa=enable_gqa, **options)
    options |= {"scale": scale, "enable_gqa": enable_gqa, "tol": tol, "rtol": rtol}
    if not is_recording():
        return attend(*qkv, **options).out
    out, certificate = run_eagerly("avow.scaled_dot_product_attention in a record", attend, *qkv, **options)
    note(running_layer("scaled_dot_product_attention"), certificate)
    return out


@own_arithmetic
def _answer_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    enable_gqa: bool,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Tensor:
    """What `attend` answers without a tolerance, after the same checks; its certificate, which nobody would see, is not
    computed.
    """
    mask, causal = mask_and_causal(None, False, attn_mask, is_causal, dropout_p)
    problem = Problem.of(q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
    requirement = checked_requirement(None)
    later = _stated_later(problem, requirement, "auto", {})
    if later is not None:
        out = later.compute(problem).out
        return out.reshape(*problem.leading, *out.shape[-2:])
    problem = _measured(problem)
    if not problem.empty:
        detached = problem.detached()
        for method in exact_method().grid(problem.sizes):
            if method.estimate_bound(detached, 1.0).kind != "none":
                out = method.compute(problem).out
                return out.reshape(*problem.leading, *out.shape[-2:])
    return attend_exact(problem, requirement).out


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that autocast has attention computed in, if it is on; it leaves float64 as it is."""
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type)}
    if not kinds:
        return tensors
    narrow = torch.get_autocast_dtype(kinds.pop())
    return tuple(x.to(narrow) if isinstance(x, Tensor) and x.dtype in _NARROWED else x for x in tensors)


@named_arguments(method="name it to attend: a plan compares all methods")
@own_arithmetic
def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tol: float | None = None,
    rtol: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
    confidence: float | None = None,
    coverage: float | None = None,
    keys: int | None = None,
) -> Plan:
    """What `attend` would weigh for these tensors, what it would cost, and why each loser lost.

    Whether `rtol` is kept shows in the answer alone: before, methods are weighed by how long a few answers are.

    Args:
        q: queries, (batch, heads, n, dim). Further batch axes may come before these four, and batch and heads may be
            left out.
        k: keys, (batch, key heads, s, dim).
        v: values, (batch, key heads, s, value dim).
        tol: the largest error of a row that is accepted, relative to the longest value that the row sees; None sets no
            limit.
        rtol: the same relative to the length of the row's true answer.
        mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        kernel: "dot" for weights exp(scale·q·k), or "rbf" for exp(-‖q - k‖²/(2·sigma)).
        sigma: width of the RBF kernel; for `kernel="rbf"` alone.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.
        dropout_p: must be 0: no certificate covers attention weights that are dropped at random.
        confidence: accept bounds that hold with this probability for each row; None accepts certain ones alone.
        coverage: accept bounds that hold for this share of the rows, from rows recomputed in float64; None accepts
            bounds for all rows alone.
        keys: price the plan for another number of keys. Queries grow with them if there are as many, as in
            self-attention; otherwise they stay as they are, so that one query is priced as a step of decoding.

    Returns:
        The candidates, the chosen one first; prints as a table.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> avow.plan(q, k, v, tol=1e-2).chosen.method.name
    'exact'
    """
    mask, causal = mask_and_causal(mask, causal, attn_mask, is_causal, dropout_p)
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    )
    requirement = checked_requirement(tol, confidence, coverage, rtol)
    sizes = problem.sizes if keys is None else problem.sizes.with_keys(keys)
    return _make_plan(_measured(problem), requirement, rates(sizes.device), sizes, thrifty=False)


@named_arguments(
    tol="ask the certificate: audit(...).certificate.keeps(tol)",
    rtol="ask the certificate: audit(...).certificate.keeps(rtol=rtol)",
    **dict.fromkeys(("rows", "samples", "n_rows"), "coverage= and confidence= say how many rows are recomputed"),
)
@own_arithmetic
def audit(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coverage: float = 0.99,
    confidence: float = 0.99,
    method: str | Method = "exact",
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
) -> Audit:
    """The errors of sampled rows of any answer, whoever computed it, and the `sampled` certificate that they earn.

    Rows are drawn uniformly and recomputed in float64; if there are few, all are.

    Args:
        out: the answer, (batch, heads, n, value dim), in any type.
        q: queries, (batch, heads, n, dim). Further batch axes may come before these four, and batch and heads may be
            left out.
        k: keys, (batch, key heads, s, dim).
        v: values, (batch, key heads, s, value dim).
        coverage: the share of the rows that the certificate is about; with 1 all rows are recomputed.
        confidence: the probability with which it holds.
        method: whose target the answer is compared with: "exact" is softmax attention.
        generator: what rows are drawn from; None is torch's own generator.
        mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        kernel: "dot" for weights exp(scale·q·k), or "rbf" for exp(-‖q - k‖²/(2·sigma)).
        sigma: width of the RBF kernel; for `kernel="rbf"` alone.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.
        dropout_p: must be 0: no certificate covers attention weights that are dropped at random.

    Returns:
        The errors of the rows, in three units, and the certificate.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.
        UnknownMethod: there is no method of that name.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> bool(avow.audit(out, q, k, v).errors.max() < 1e-5)
    True
    """
    mask, causal = mask_and_causal(mask, causal, attn_mask, is_causal, dropout_p)
    p = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    ).detached()
    check_generator(generator)
    check_tensor("out", out)
    check_numbers("out", out)
    shape = (*p.leading, p.q.shape[-2], p.v.shape[-1])
    if tuple(out.shape) != shape:
        turned = out.ndim == 4 and tuple(out.transpose(1, 2).shape) == shape
        remedy = "use out.transpose(1, 2)" if turned else "pass the output for these q, k and v"
        raise ShapeError("out.shape", tuple(out.shape), f"must be {shape}", remedy)
    return audit_rows(out.detach(), p.measure_norms(), method_from(method, {}), coverage, confidence, generator)


@named_arguments(v="values do not matter: leave them out")
@own_arithmetic
def features_needed(
    q: Tensor,
    k: Tensor,
    *,
    tol: float,
    confidence: float = USUAL_CONFIDENCE,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool | None = None,
) -> FeatureCount:
    """How many random features would certify `tol`, from q and k alone; infinite when no feasible number does.

    Args:
        q: queries, (batch, heads, n, dim). Further batch axes may come before these four, and batch and heads may be
            left out.
        k: keys, (batch, key heads, s, dim).
        tol: the error that would be certified, relative to the longest value.
        confidence: the probability with which it would be.
        causal: whether row i sees keys 0 to i alone.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        is_causal: PyTorch's name for `causal`.

    Returns:
        The number, with the norms that decide it.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        ParameterError: an option has a value that it must not have; the message names it.
        NonFiniteError: q or k hold nan or inf.

    >>> import torch, avow
    >>> q, k = 0.1 * torch.randn(2, 1, 8, 64, 16)
    >>> avow.features_needed(q, k, tol=0.5).features < 100_000
    True
    """
    _, causal = mask_and_causal(None, causal, None, is_causal)
    problem = Problem.of(q, k, k, causal=causal, scale=scale, enable_gqa=enable_gqa).detached()
    requirement = checked_requirement(tol, confidence)
    if not requirement.tol or requirement.confidence == 1:
        remedy = "try tol=1e-2, confidence=0.99"
        raise ParameterError("tol, confidence", (tol, confidence), "must allow some error", remedy)
    return random_features.features_needed(problem, requirement.tol, requirement.confidence)


def check_automatic(parameters: Mapping[str, object]) -> None:
    """Raise if arguments were given that `attend` does not have, and no method was named whose parameters they are."""
    for name, value in parameters.items():
        owners = [kind.name for kind in all_methods().values() if name in {p.name for p in kind.declared()}]
        if owners:
            remedy = f"add method={' or method='.join(map(repr, owners))}"
            raise ParameterError(name, value_text(value), "belongs to a named method", remedy)
        own = [option for option in inspect.signature(attend).parameters if option != "parameters"]
        near = [option for option in own[3:] if name.startswith(option)] or difflib.get_close_matches(name, own, 1, 0.7)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(own[3:])}"
        raise ParameterError(name, value_text(value), "is not an argument, nor a parameter of any method", remedy)


def later_method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "dot",
    sigma: float | None = None,
    tol: float | None = None,
    rtol: float | None = None,
    confidence: float | None = None,
    coverage: float | None = None,
    method: str | Method = "auto",
    **parameters: Any,
) -> tuple[Problem, Method | None]:
    """The problem of a call to `attend`, and its method if the certificate is one that is stated later."""
    mask, causal = mask_and_causal(mask, causal, attn_mask, is_causal, dropout_p)
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, kernel=kernel, sigma=sigma
    )
    requirement = checked_requirement(tol, confidence, coverage, rtol)
    return problem, _stated_later(problem, requirement, method, parameters)


def _stated_later(
    problem: Problem, requirement: Requirement, method: str | Method, parameters: Mapping[str, Any]
) -> Method | None:
    """The method, if nothing has to be known of the numbers before it runs, and its certificate can be stated later."""
    if not requirement.exact or deferred.waits_freely(problem.q.device):
        return None
    chosen = _plain_exact() if method == "auto" else method_from(method, parameters)
    return chosen if deferred.fits(chosen, problem) else None


@functools.cache
def _plain_exact() -> Method:
    """Exact attention in the inputs' own precision."""
    return exact_method()()


def _attend_unwaiting(method: Method, problem: Problem, reason: str = "") -> Attended:
    """A method's answer, with a certificate that is stated when somebody looks; `reason` says why this method ran."""
    for name in ("q", "k", "v"):
        check_numbers(name, getattr(problem, name))
    out, lengths = deferred.answer(method, problem)
    follows = problem.q.is_cuda and torch.cuda.is_current_stream_capturing()
    stated = deferred.certificate(deferred.Origin.of(method, problem), lengths, follows, reason)
    return Attended(out.reshape(*problem.leading, *out.shape[-2:]), stated)


def _measured(problem: Problem) -> Problem:
    """The problem with its norms; raises if numbers are bad."""
    if deferred.waits_freely(problem.q.device):
        return problem.measure_norms()
    for name in ("q", "k", "v"):
        check_numbers(name, getattr(problem, name))
    norms = deferred.norms_of(problem, deferred.row_lengths(problem.q, problem.k, problem.v))
    norms.check(problem.scale)
    return problem.with_norms(norms)


def _attend_cheapest(problem: Problem, requirement: Requirement, generator: torch.Generator | None) -> Attended:
    """The answer of the cheapest method that proves what was asked; of exact attention if none does."""
    if requirement.exact or problem.empty:
        return attend_exact(problem, requirement)
    kind = _kind(problem, requirement)
    _trials.begin(kind)
    if reason := _trials.nothing_to_try(kind):
        return attend_exact(problem, requirement, reason)
    known = rates(problem.q.device.type, measure=False)
    plan = _make_plan(problem, requirement, known, problem.sizes, thrifty=True, kind=kind)
    offers = [candidate for candidate in plan.ranked if not candidate.lost and not candidate.method.is_exact]
    if not offers:
        _trials.settle(kind, plan.why_exact)
    # Audits of several answers, of which the first that passes is kept, share one chance of being wrong.
    shared = requirement
    if requirement.coverage is not None:
        shared = requirement._replace(confidence=1 - (1 - requirement.stated) / max(len(offers), 1))
    failures: list[str] = []
    needed = math.inf
    for candidate in offers:
        if candidate.estimate is not None and candidate.estimate.bound > needed:
            continue  # the answers that were seen are shorter than was thought
        start = _trials.clock()
        attended = run_certified(candidate.method, problem, shared, generator)
        certificate = attended.certificate
        if requirement.met_by(certificate):
            _trials.kept(kind, candidate.method, certificate.bound, certificate.kind)
            return attended
        proved = f"{certificate.bound:.1e}" + (f" ({certificate.relative:.1e} relative)" if requirement.rtol else "")
        failures.append(f"{candidate.method.label} could prove only {proved}")
        spent = _trials.clock() - start
        _trials.failed(kind, candidate.method, f"could prove only {proved}", spent, plan.exact_seconds)
        if requirement.rtol is not None:
            needed = _error_budget(problem, requirement, attended) or 0.0
    return attend_exact(problem, requirement, "; ".join(failures) or plan.why_exact)


def _attend_by(
    method: str | Method,
    parameters: Mapping[str, Any],
    problem: Problem,
    requirement: Requirement,
    generator: torch.Generator | None,
) -> Attended:
    """The answer of one method; raises if that does not prove what was asked."""
    kind = checked_class(method, parameters)
    if kind.is_exact and not parameters and not isinstance(method, Method):
        return attend_exact(problem, requirement)

    def tuned(budget: float | None) -> Method:
        if isinstance(method, Method):
            return method
        return kind(**kind.tune(parameters, problem.sizes, budget, requirement.confidence))

    chosen = tuned(_error_budget(problem, requirement))
    chosen.check(problem.sizes)
    if chosen.is_exact and not problem.empty:
        estimate = chosen.estimate_bound(problem.detached(), 1.0)
        if estimate.kind == "none":
            name, value = (", ".join(map(str, x)) for x in (chosen.parameters, chosen.parameters.values()))
            raise RangeError(f"{chosen.name}: {name}", value, estimate.reason, 'use precision="float64"')
    attended = run_certified(chosen, problem, requirement, generator)
    if requirement.rtol is not None and not requirement.met_by(attended.certificate):
        # How long the answers are is known now, so that what is left to the method may be aimed again.
        again = tuned(_error_budget(problem, requirement, attended))
        attended = attended if again == chosen else run_certified(again, problem, requirement, generator)
    certificate = attended.certificate
    proved = {"tol": (certificate.bound, ""), "rtol": (certificate.relative, " relative to the answer")}
    for name, (bound, scope) in proved.items():
        limit = getattr(requirement, name)
        if limit is not None and not certificate.keeps(**{name: limit}):
            rule, remedy = f"is below the {bound:.2e} it can prove{scope}", f'use method="auto" or a wider {name}'
            nothing = certificate.kind == "none"
            if nothing:
                rule, remedy = f"cannot be proved: {certificate.reason or 'it promises nothing'}", 'use method="auto"'
            if (chosen.random or nothing) and requirement.coverage is None:
                more = "".join(f"more {p.name}, " for p in chosen.declared()[:1] if not nothing)
                remedy = f"{remedy}, {more}or coverage=0.99 to have a sample of its rows recomputed"
            raise ToleranceUnreachable(f"{chosen.name}: {name}", limit, rule, remedy, bound)
    return attended


def attend_exact(problem: Problem, requirement: Requirement, reason: str = "") -> Attended:
    """Exact attention in the narrowest arithmetic that cannot overflow and keeps the tolerances; `reason` says why."""
    best, own, detached = math.inf, math.inf, problem.detached()
    for method in exact_method().grid(problem.sizes):
        estimate = BoundEstimate(0.0, "deterministic", True) if problem.empty else method.estimate_bound(detached, 1.0)
        # Without a tolerance any answer will do that does not overflow: the widest arithmetic comes last. What rounding
        # the output costs depends on how long answers are, which is known when they are there.
        least = estimate.bound - estimate.of_answer if math.isfinite(estimate.bound) else math.inf
        if estimate.kind == "none" if requirement.tol is None else least > requirement.tol:
            best = min(best, estimate.bound)
            continue
        if requirement.rtol is None and _keeps_for_sure(method, problem, estimate, requirement.tol):
            return _attend_unwaiting(method, problem, reason)
        attended = run_certified(method, problem, requirement, None, reason)
        if requirement.exact or attended.certificate.keeps(requirement.tol, requirement.rtol):
            return attended
        best, own = min(best, attended.certificate.bound), min(own, attended.certificate.relative)
    raise _unreachable(problem, requirement, best, own)


def _keeps_for_sure(method: Method, problem: Problem, estimate: BoundEstimate, tol: float | None) -> bool:
    """Whether norms alone prove a tolerance, so that nobody has to wait on a device for the answer's own bound."""
    if tol is None or deferred.waits_freely(problem.q.device) or not deferred.fits(method, problem):
        return False
    # Where values are faint they are brought near one, which a certificate that comes later knows nothing of.
    plain = problem.norms.least_value > 1e-10 and subnormal_charge(method, problem) is None
    return plain and estimate.certain and estimate.bound <= tol


def run_certified(
    method: Method, problem: Problem, requirement: Requirement, generator: torch.Generator | None, reason: str = ""
) -> Attended:
    """A method's answer with its certificate: what the method promises, or what an audit of sampled rows finds."""
    if problem.empty:
        nothing = sum(x.sum() for x in (problem.q, problem.k, problem.v)) * 0
        computed = Computed(problem.v.new_zeros(*problem.q.shape[:-1], problem.v.shape[-1]) + nothing)
    else:
        stream = random_stream(generator, problem.q.device) if method.statistical else generator
        computed = method.compute(problem.measure_norms(), stream)
    # Before reshaping: rows are canonical. What nobody asked about is computed if somebody looks.
    state = certify_lazily if requirement.exact and not reason else certify
    certificate = state(method, problem, computed, requirement.stated)
    if requirement.coverage is not None and certificate.kind != "deterministic" and not problem.empty:
        out, share, confidence = computed.out.detach(), requirement.coverage, requirement.stated
        audited = audit_rows(out, problem.detached(), method, share, confidence, generator).certificate
        certificate = dataclasses.replace(audited, parameters=certificate.parameters, cost=certificate.cost)
    out = computed.out.reshape(*problem.leading, *computed.out.shape[-2:])
    return Attended(out, dataclasses.replace(certificate, reason=reason) if reason else certificate)


def _kind(problem: Problem, requirement: Requirement) -> Hashable:
    """Which calls are alike to a method: those of the same sizes and limits whose largest logits are about the same."""
    query, key, _ = problem.norms.most
    logit = abs(problem.scale) * query * key
    return problem.sizes, requirement, round(2 * math.log2(logit)) if logit > 0 else None


def _make_plan(
    problem: Problem, requirement: Requirement, known: Rates, sizes: Sizes, thrifty: bool, kind: Hashable = None
) -> Plan:
    """What each candidate costs at these sizes, and what it may promise of this problem.

    If it is `thrifty`, methods that failed for problems of this `kind` rest.
    """
    detached = problem.detached()

    aim = None if requirement.rtol is None else _error_budget(problem, requirement)
    # How much rounding an output costs depends on its length. `attend` finds that out by trying; a plan says it before.
    length = 1.0
    if requirement.rtol is not None and aim is not None:
        length = aim * (1 + requirement.rtol) / requirement.rtol if requirement.rtol else 1.0
    elif not thrifty and not requirement.exact:
        _, length = _answer_ratios(problem)

    def estimate_bound(method: Method) -> BoundEstimate:
        if problem.empty:
            return BoundEstimate(0.0, "deterministic", True, "there is nothing to attend to")
        try:
            with torch.no_grad():
                estimate = method.estimate_bound(detached, requirement.confidence)
        except AvowError:
            raise
        except Exception as error:
            # One plugin's mistake leaves the other methods to everybody.
            if is_out_of_memory(error):
                raise
            return BoundEstimate(math.inf, "none", True, f"estimate_bound raised {type(error).__name__}: {error}")
        if requirement.coverage is not None and method.random and math.isinf(estimate.bound):
            reason = "what recomputed rows would show is not known before it runs: name it with method="
            return dataclasses.replace(estimate, reason=reason)
        return estimate.for_answers(length) if method.is_exact and length < 1 else estimate

    offers, trials = planner.candidates(sizes, known), _trials if thrifty else None
    exact = min(offer.seconds for offer in offers if offer.method.is_exact)
    ranked = planner.screened(offers, requirement.tol, requirement.kinds, estimate_bound, thrifty, aim, trials, kind)
    return Plan(tuple(ranked), requirement.tol, known.source, exact, requirement.rtol, aim)


def _error_budget(problem: Problem, requirement: Requirement, attended: Attended | None = None) -> float | None:
    """The bound to aim at, relative to the longest value: `tol`, or what `rtol` needs of answers as long as these."""
    if requirement.rtol is None:
        return requirement.tol
    ratio, _ = _answer_ratios(problem, attended)
    return min(math.inf if requirement.tol is None else requirement.tol, aimed_bound(ratio, requirement.rtol))


def _answer_ratios(problem: Problem, attended: Attended | None = None) -> tuple[float, float]:
    """The lengths of the shortest and the longest answer beside the longest value.

    Without an answer they are those of a few rows; if even those cost too much, those of a flat and of a sharp head.
    """
    if problem.empty:
        return 1.0, 1.0
    if attended is not None:
        shape = (*problem.q.shape[:-1], problem.v.shape[-1])
        return answer_ratios(problem, attended.out.reshape(shape), attended.certificate.rows.reshape(shape[:-1]))
    count = min(_SAMPLED_ROWS, problem.q.shape[-2] // _ROWS_PER_SAMPLE)
    if not count:
        return 1 / math.sqrt(problem.k.shape[-2]), 1.0
    index = torch.linspace(0, problem.q.shape[-2] - 1, count, device=problem.q.device).long()
    rows = problem.detached().rows(index)
    with torch.no_grad():
        out = exact_method()().compute(rows).out
    return answer_ratios(rows.with_norms(problem.norms), out, out.new_zeros(out.shape[:-1], dtype=torch.float64))


def _unreachable(problem: Problem, requirement: Requirement, best: float, own: float) -> ToleranceUnreachable:
    """The error for exact attention that proves `best` relative to the longest value, and `own` to the answer."""
    dtype = problem.q.dtype
    name = dtype_name(dtype)
    wider = f"convert q, k and v to {'float64' if dtype == torch.float32 else 'float32'}"
    tol = math.inf if requirement.tol is None else requirement.tol
    if requirement.rtol is not None and best <= tol:
        rule = f"is below {own:.2e}, the best bound relative to the answer that can be proved in {name}"
        hint = "an answer near zero has no relative bound; ask for tol= instead"
        remedy = hint if dtype == torch.float64 else f"{wider}, or ask for tol="
        return ToleranceUnreachable("rtol", requirement.rtol, rule, remedy, own)
    remedy = wider
    if dtype == torch.float64 or best > 4 * unit(dtype):
        remedy = f"shrink the logits: scale·|q|·|k| is too large for tol={tol:g}"
    rule = f"is below {best:.2e}, the best bound that can be proved in {name}"
    return ToleranceUnreachable("tol", tol, rule, remedy, best)
