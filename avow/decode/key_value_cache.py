r"""All keys and values so far, attended to with a certificate, and if the tolerance allows it only in part.

Beside the keys stands a sketch of them, a few bits a number (`numerics.sketch`): it says which tokens may matter to a
query, and only those are read in full. Groups of 64 tokens are sketched when they are complete; the open group is
always read. The lengths of values, and of the longest key of each head, are kept too, so that attending never reads
what it does not use.

The path of a decoding step: `append` writes the token; `attend` answers by `_quick`, on a GPU by `_quick_by_kernel`, if
the last call was like this one, else checks its arguments. `_attend_within` then asks kernels on a GPU (`KernelSteps`)
or compiled code on a CPU (`CpuSteps`), or answers `_from_some_tokens` by the reference, or `_from_all_tokens`.
Sequences of different lengths are answered together by kernels, and else each by itself (`_attend_each`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from avow.attend import Attended, attend_exact
from avow.core import LazyCertificate, Method, Norms, Problem, check_tensor, has_tangents
from avow.core.certify import aimed_bound, answer_ratios, certify
from avow.core.compose import compose
from avow.core.requirement import Requirement, check_generator, checked_requirement, random_stream
from avow.decode import cache_file
from avow.decode.cpu import MOST_ROWS, SHORTEST, CachedTokens, CpuSteps, looks
from avow.decode.cpu import unavailable as cpu_unavailable
from avow.decode.host_memory import host_of
from avow.decode.kernel_steps import SHORTEST as SHORTEST_FOR_KERNELS
from avow.decode.kernel_steps import Asked, KernelSteps, unfit_rows
from avow.decode.split_k_exact import SplitKExact, serves
from avow.decode.token_buffers import LengthBounds, TokenBuffers, is_capturing, is_plain_call, norm_slack
from avow.errors import (
    AvowError,
    DtypeError,
    FileError,
    NonFiniteError,
    NotDifferentiable,
    ParameterError,
    ShapeError,
    value_text,
)
from avow.methods import named_form
from avow.methods.sparse import Sparse
from avow.numerics.norms import check_range, row_norms
from avow.numerics.sketch import GROUP

# What kernels prove of exact attention in float32 at the usual sizes, and the tolerance that any finite bound keeps.
_COARSE, _LARGEST = 1e-3, torch.finfo(torch.float32).max
# Calls of a cache that are known by their arguments.
_CALLS = 4

# What `attend` is called with beside queries: tol, confidence, scale, generator, method and rtol.
_Arguments = tuple[float | None, float | None, float | None, torch.Generator | None, str, float | None]


class _Call(NamedTuple):
    """One call of `attend` after its checks."""

    problem: Problem
    first: int
    """Where in the buffers the tokens begin that the queries see."""
    requirement: Requirement
    generator: torch.Generator | None
    method: str
    sinks: Tensor | None = None


class KeyValueCache(TokenBuffers):
    """Keys and values of `key_heads` heads, to which tokens are appended and queries attend, certified.

    Sequences of a batch may have different lengths, by `append(k, v, lengths=...)` and `crop`. It is for inference:
    answers carry no gradient.

    Args:
        key_heads: heads of keys and values.
        dim: features of a key.
        value_dim: features of a value; None is `dim`.
        batch: sequences.
        dtype: type of keys, values and queries.
        device: where they are.
        bits: bits of a number of the sketch that is kept beside the keys, 1 to 8; 4 add less than 30% to a bfloat16
            cache of 16 or more dimensions. None keeps no sketch, and every answer is exact.
        window: how many tokens a token sees, itself included; older ones make way when the room is full, which is twice
            what the window and the last tokens need. None: all.
        capacity: room for this many tokens from the start. Nothing moves then, so that `append` and `attend` can be
            captured in a CUDA graph and replayed while the cache grows. None: buffers grow when they are full.
        offload: whether keys and values are in host memory, where a GPU reads the rows that it needs. The device holds
            the sketch, the lengths of values, and rows that were read lately.
        hot: how many bytes the device may spend on those rows; None is a hundredth of the keys and values.

    Raises:
        ParameterError: a number does not fit, or the device is not available.
        DtypeError: nothing can be computed in that type.

    >>> import torch, avow
    >>> cache = avow.nn.KeyValueCache(key_heads=2, dim=16)
    >>> cache.append(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16))
    >>> out, certificate = cache.attend(torch.randn(1, 8, 1, 16), tol=1e-2)
    >>> tuple(out.shape), certificate.bound <= 1e-2
    ((1, 8, 1, 16), True)
    """

    # What a cache that was just made has learnt: nothing.
    _asked = ""
    _bold: Tensor | None = None
    """What the steps of a CPU learnt of each head."""
    _shortness: float | None = None
    """How long the shortest of the last answers was beside the longest value: what `rtol` is aimed by."""
    _checked: _Arguments | None = None
    """The arguments of the last call, which were checked then."""

    @functools.cached_property
    def _exact_reader(self) -> SplitKExact:
        return SplitKExact()

    @functools.cached_property
    def _cpu_steps(self) -> CpuSteps:
        return CpuSteps()

    @functools.cached_property
    def _steps(self) -> KernelSteps:
        return KernelSteps()

    _asked_before: tuple[tuple[torch.Size, _Arguments, Asked], ...] = ()
    """The last calls that kernels answered: the shape of queries, the arguments, and what kernels were asked."""

    def _bind(self) -> None:
        super()._bind()
        self._steps.forget_addresses()

    def attend(
        self,
        q: Float[Tensor, "b h n d"],
        tol: float | None = None,
        confidence: float | None = None,
        scale: float | None = None,
        generator: torch.Generator | None = None,
        method: str | Method = "auto",
        rtol: float | None = None,
        sinks: Float[Tensor, "h"] | None = None,
    ) -> Attended:
        """The answers to the queries of the last n tokens of each sequence, and the certificate of the error they made.

        Without a tolerance the answer is exact. With one, tokens that cannot matter are not read, if that is faster
        than reading all. Query i of n sees the tokens up to the one it belongs to. Certificates of single queries are
        worked out when somebody looks at them. On a GPU queries are answered without waiting for the device (up to 64
        that share a key head, unless `rtol` is given); nan among them or among the tokens, or logits so large that
        single precision cannot keep `tol`, then show in the bound, and as an error from a later call.

        Args:
            q: queries, (batch, heads, n, dim); key heads divide the heads.
            tol: the largest error of a row that is accepted, relative to the longest value that the row sees.
            confidence: accept bounds that hold with this probability for each row, which lets flat heads be sampled;
                None accepts certain ones alone.
            scale: what q·k is multiplied by; None is 1/sqrt(dim).
            generator: what samples are drawn from; None is torch's own generator.
            method: "auto"; "exact" reads all tokens; "sparse" reads only those that the sketch asks for, whatever that
                takes.
            rtol: the largest error that is accepted relative to the length of the row's true answer.
            sinks: logits of the query heads that have no value, (heads,): they only enlarge the sum of weights.

        Returns:
            The answer, (batch, heads, n, value_dim), and its certificate.

        Raises:
            ShapeError: sizes do not fit, or the cache is empty.
            DtypeError: queries are of another type than the cache.
            ParameterError: an option has a value that it must not have.
            ToleranceUnreachable: no available arithmetic proves the tolerance.
            NotDifferentiable: derivatives were asked for.
        """
        name, parameters = (method, {}) if isinstance(method, str) else named_form(method)
        if parameters:
            rule = "has parameters, which a cache sets by tol and bits"
            raise ParameterError("method", method, rule, f"use method={name!r}")
        arguments = (tol, confidence, scale, generator, name, rtol)
        if sinks is not None:
            _check_sinks(sinks, q, self.device)
        if torch.compiler.is_compiling() and not self._unfit:
            return self._attend_compiled(q, arguments, sinks)
        if self._sequences:
            return self._attend_each(q, arguments, self._sequences, sinks)
        quick = self._quick if self._unfit else self._quick_by_kernel
        return quick(q, arguments, sinks) or self._attend(q, arguments, sinks)

    @torch.no_grad()
    def _attend(self, q: Tensor, arguments: _Arguments, sinks: Tensor | None) -> Attended:
        """The answer after every check."""
        tol, confidence, scale, generator, method, rtol = arguments
        if method not in ("auto", "exact", "sparse"):
            rule = "must be 'auto', 'exact' or 'sparse'"
            raise ParameterError("method", value_text(method), rule, "use another method with avow.attend")
        if method == "sparse" and self.bits is None:
            rule = "needs a sketch of the keys, and this cache keeps none"
            raise ParameterError("method", repr(method), rule, "make the cache with bits=4")
        requirement = checked_requirement(tol, confidence, rtol=rtol)
        check_generator(generator)
        self._measure_written()
        cast = torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, enabled=False) if cast else contextlib.nullcontext():
            call = _Call(*self._problem(q, scale), requirement, generator, method, sinks)
            # A generator cannot be copied, and the cache can.
            self._checked = arguments if generator is None else None
            if self._counts is not None:
                return self._attend_ragged(call, arguments)
            return self._attend_within(call, requirement.tol) if rtol is None else self._attend_within_rtol(call)

    def _attend_ragged(self, call: _Call, arguments: _Arguments) -> Attended:
        """The answer to sequences of different lengths in the buffers of kernels, by these or of each by itself."""
        requirement, tol = call.requirement, call.requirement.tol
        why = "sequences have different lengths"
        if tol is not None and requirement.rtol is None and call.method != "exact" and not call.problem.empty:
            why = self._found_ill() or self._steps.unfit(call.problem, tol, requirement.confidence)
            if not why:
                return self._by_kernel(call, tol)
        if is_capturing(self.device):
            rule = "are not known while a CUDA graph is captured"
            raise ShapeError("cache.lengths", "on the device", rule, f"attend outside of the graph: {why}")
        assert self._store is not None
        sequences = []
        for i, length in enumerate(self._positions):
            one = self._sequence(i, length)
            one._unfit, one._sketched = why, length // GROUP
            one._store = type(self._store)(*(x.unflatten(0, (self.batch, -1))[i] for x in self._stored))
            sequences.append(one)
        return self._attend_each(call.problem.q, arguments, sequences, call.sinks)

    @torch.no_grad()
    def _attend_each(
        self, q: Tensor, arguments: _Arguments, sequences: Sequence[KeyValueCache], sinks: Tensor | None
    ) -> Attended:
        """The answers of caches of one sequence each, and their certificates, one after the other."""
        self._check_queries(q)
        for i, one in enumerate(sequences):
            one._first_seen(q.shape[2], f" of sequence {i}")
        row_norms(q, "q")  # says where nan is
        tol, confidence, scale, generator, method, rtol = arguments
        answers = [
            one.attend(q[i : i + 1], tol, confidence, scale, generator, method, rtol, sinks)
            for i, one in enumerate(sequences)
        ]
        return _joined(answers, 0)

    @torch.no_grad()
    def attend_masked(
        self, q: Float[Tensor, "b h n d"], mask: Tensor, tol: float | None, rtol: float | None, scale: float | None
    ) -> Attended:
        """The exact answers to queries that see other tokens than those up to their own, and their certificate.

        What is known of the lengths of tokens is not measured again.

        Args:
            q: queries, (batch, heads, n, dim).
            mask: what they see of the last `length` tokens, as `avow.attend` takes it.
            tol: the largest error of a row that is accepted, relative to the longest value that the row sees.
            rtol: the same relative to the length of the row's true answer.
            scale: what q·k is multiplied by; None is 1/sqrt(dim).

        Returns:
            The answer, (batch, heads, n, value_dim), and its certificate.

        Raises:
            ShapeError: sizes do not fit, or the cache is empty.
            DtypeError: queries are of another type than the cache.
            ToleranceUnreachable: no available arithmetic proves the tolerance.
        """
        self._check_queries(q)
        self._first_seen(q.shape[2])
        self._measure_written()
        requirement, end = checked_requirement(tol, None, rtol=rtol), self._position - self._base
        if self.offload:
            factor = 1 / math.sqrt(self.dim) if scale is None else scale
            return self._head_by_head(q, end - self.length, self.length, factor, requirement, mask=mask)
        k, v, lengths = (self._buffers[name][:, :, end - self.length : end] for name in ("keys", "values", "norms"))
        problem = Problem.of(q, k, v, mask=mask, scale=scale, enable_gqa=True)
        error = norm_slack(max(self.dim, self.value_dim), self.dtype, self._wide)
        keys = self._longest.unsqueeze(-1).expand(lengths.shape)
        norms = Norms(row_norms(problem.q, "q"), keys, lengths.double(), error)
        check_range(*norms.most, problem.scale)
        return attend_exact(problem.with_norms(norms), requirement)

    @property
    def last_report(self) -> Tensor | None:
        """What the last step by kernels reports (`KernelSteps`), on the device; None if there was none."""
        return None if self._unfit else self._steps.report

    @last_report.setter
    def last_report(self, report: Tensor | None) -> None:
        """Note what a step reported that a CUDA graph repeated."""
        self._steps.report = report

    def doubt(self) -> None:
        """Leave kernels out of the next step, since one that a CUDA graph repeated proved nothing.

        Raises:
            AvowError: tokens that were appended have no bound; this says why.
        """
        self._report_faults()
        self._steps.doubt()

    def crop(self, lengths: int | Sequence[int] | Int[Tensor, "b"]) -> None:
        """Keep the first tokens of each sequence; with 0 it begins again.

        Args:
            lengths: how many: of every sequence, or of each its own number. On a GPU this may be a tensor there, which
                nobody waits for.

        Raises:
            ParameterError: the cache holds fewer tokens.
        """
        if not isinstance(lengths, int) or lengths < GROUP:
            self._asked_before = ()  # a sequence may have fewer tokens than queries now: the next call looks
        super().crop(lengths)

    def why_exact(self, tol: float | None, confidence: float | None, rtol: float | None, method: str) -> str:
        """Why `attend` would read all tokens for one query, as far as is known before it; empty if it may read less.

        Args:
            tol: as `attend` has it.
            confidence: as `attend` has it.
            rtol: as `attend` has it.
            method: as `attend` has it.

        Returns:
            The reason, or nothing.
        """
        requirement, length = checked_requirement(tol, confidence, rtol=rtol), max(self._bounds)
        if not self._unfit and method == "auto" and length < SHORTEST_FOR_KERNELS:
            return self._why_all(requirement.exact, method, length)
        return self._skip_reason(requirement, method)

    def _attend_within(self, call: _Call, aim: float | None) -> Attended:
        """The answer within the required `tol`; one from a part of the tokens is within `aim`."""
        confidence, why = call.requirement.confidence, self._skip_reason(call.requirement, call.method)
        if (aim is None or why) and self._kernels_read_all(call):
            return self._by_kernel(call, None, why)
        if aim is not None and not why and not call.problem.empty:
            unfit = self._unfit
            if not unfit:
                unfit = self._found_ill() or self._steps.unfit(call.problem, aim, confidence)
                if not unfit:
                    return self._by_kernel(call, aim)
            on_cpu = self._unfit and self.device.type == "cpu"
            answer = self._by_cpu_steps(call, aim) if on_cpu else unfit
            if call.sinks is not None and isinstance(answer, str):
                without = "compiled code" if on_cpu else "kernels"
                if call.method == "sparse":
                    rule = f"has no sinks without {without} ({answer})"
                    raise ParameterError("method", repr(call.method), rule, "leave it out: the answer is exact then")
                return self._from_all_tokens(call, f"sinks without {without}: {answer}")
            if not isinstance(answer, Attended) and call.method == "sparse":
                call = self._with_norms(call)
                answer = self._from_some_tokens(call, aim, answer)
            if isinstance(answer, Attended):
                return answer
            why = answer
        return self._from_all_tokens(call, why)

    def _attend_within_rtol(self, call: _Call) -> Attended:
        """The answer within the required `rtol`: from a part of the tokens, which is aimed twice, or else from all."""
        call = self._with_norms(call)
        problem, tol, rtol = call.problem, call.requirement.tol, call.requirement.rtol
        assert rtol is not None
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            remedy = "use tol=, which kernels keep by themselves, or attend outside of the graph"
            raise ParameterError("rtol", rtol, "cannot be checked while a CUDA graph is captured", remedy)
        if self._shortness is None:
            self._shortness = 1 / math.sqrt(self.length)
        reason = ""
        for _ in range(2):
            aim = min(math.inf if tol is None else tol, aimed_bound(self._shortness, rtol))
            attended = self._attend_within(call, aim)
            certificate = attended.certificate
            if not problem.empty:
                self._shortness, _ = answer_ratios(problem, attended.out, certificate.rows)
            if call.requirement.met_by(certificate):
                return attended
            reason = f"{certificate.method} could prove only {certificate.relative:.1e} relative to the answer"
            if certificate.method == "exact":
                break
        if self.offload:
            return self._from_host(call, call.requirement, reason)
        return attend_exact(self._with_sinks(call).problem, call.requirement, reason)

    @property
    def _repeats(self) -> bool:
        """Whether calls are such as a CUDA graph repeats, to which nothing may depend on numbers of the device."""
        return self.host_counts or is_capturing(self.device)

    def _kernels_read_all(self, call: _Call) -> bool:
        """Whether exact attention is left to kernels, which wait for nothing, and take lengths from the device."""
        tol = math.inf if call.requirement.tol is None else call.requirement.tol
        # In float32 PyTorch's own way is proved several times as tight, but it has to wait for the device.
        wide = self.dtype == torch.float32
        fits = self.offload or not wide or (tol >= _COARSE and self._repeats)
        if self._unfit or not fits or call.requirement.rtol is not None or call.problem.empty:
            return False
        return not (self._found_ill() or self._steps.unfit(call.problem, tol, 1.0))

    def _by_kernel(self, call: _Call, aim: float | None, why: str = "") -> Attended:
        """The answer by kernels, within `aim`, or without one from all tokens, which `why` is a reason for."""
        assert self._store is not None
        if aim is None:
            limit = _LARGEST if call.requirement.tol is None else call.requirement.tol
            asked = Asked(limit, 1.0, call.problem.scale, False, self.window, why)
        else:
            asked = Asked(aim, call.requirement.confidence, call.problem.scale, call.method == "sparse", self.window)
        if self._checked is not None and call.requirement.rtol is None:
            # The next call may be like this one.
            self._asked_before = (*self._asked_before[1 - _CALLS :], (call.problem.q.shape, self._checked, asked))
        return self._step(call.problem.q, asked, call.generator, call.sinks)

    def _step(self, q: Tensor, asked: Asked, generator: torch.Generator | None, sinks: Tensor | None) -> Attended:
        """The answer by kernels to what they are asked."""
        assert self._store is not None
        more = self.host_counts, self._hot, self.offload
        return Attended(*self._steps.step(q, self._store, asked, generator, sinks, *more))

    def _quick_by_kernel(self, q: Tensor, arguments: _Arguments, sinks: Tensor | None) -> Attended | None:
        """The answer if kernels gave the last one and nothing but the numbers changed since; else None."""
        shape = q.shape if isinstance(q, Tensor) else None
        before = (asked for known, past, asked in self._asked_before if known == shape and past == arguments)
        asked = next(before, None)
        if (
            asked is None
            or q.dtype != self.dtype
            or q.device != self.device
            or q.requires_grad
            or not is_plain_call()
            or (not self._repeats and self._steps.ill)
            or self._store is None
        ):
            return None
        return self._step(q, asked, None, sinks)

    def _attend_compiled(self, q: Tensor, arguments: _Arguments, sinks: Tensor | None) -> Attended:
        """The answer inside of `torch.compile`, and a certificate that tells of the last such step of this cache."""
        tol, confidence, scale, generator, method, rtol = arguments
        self._check_queries(q)
        if q.shape[1] % self.key_heads or q.shape[3] != self.dim or q.device != self.device:
            rule = f"must be (batch, a multiple of {self.key_heads}, length, {self.dim}) on {self.device}"
            raise ShapeError("q", f"{tuple(q.shape)} on {q.device}", rule, "attend with the heads of its keys")
        rows, asked = q.shape[1] // self.key_heads * q.shape[2], 1.0 if confidence is None else confidence
        factor, room = 1 / math.sqrt(self.dim) if scale is None else scale, self._buffers["keys"].shape[2]
        why = "" if rtol is None and generator is None and method != "exact" else "exact, rtol= or generator="
        why = why or ("without tol=" if tol is None else unfit_rows(rows, room, q.dtype, factor, tol, asked))
        if why or tol is None or self._store is None:
            rule = "is not answered by one operator inside of torch.compile"
            raise ParameterError("call", why, rule, "give tol= alone, or attend outside of it")
        wanted = Asked(tol, asked, factor, method == "sparse", self.window)
        out = self._steps.compiled_step(q, self._store, wanted, sinks, self._hot, self.offload)
        return Attended(out, self._steps.latest)

    def _found_ill(self) -> str:
        """Why kernels are left out after a step whose bound was above its tolerance; raises if tokens have no bound."""
        if self._repeats or not self._steps.found_ill():
            return ""
        self._report_faults()
        return "the kernels proved less than the tolerance in the last step"

    def _quick(self, q: Tensor, arguments: _Arguments, sinks: Tensor | None) -> Attended | None:
        """The answer on a CPU if the last call had the same arguments, which were checked then; else None.

        Decoding waits for this at every layer and token.
        """
        tol, confidence, scale, _, method, rtol = arguments
        usual = (
            self.device.type == "cpu"
            and arguments == self._checked
            and rtol is None
            and self._position > 0
            and (self.bits is None or self._buffers["codes"].stride(-2) == 1)
            and isinstance(q, Tensor)
            and not q.requires_grad
            and q.dtype == self.dtype
            and q.device == self.device
            and q.ndim == 4
            and q.shape[0] == self.batch
            and q.shape[1] % self.key_heads == 0 < q.shape[1]
            and q.shape[3] == self.dim
            and not torch.is_autocast_enabled("cpu")
            and is_plain_call()
        )
        if not usual:
            return None
        reason: Callable[[], str] = functools.partial(self._why_all, tol is None, method, self.length)
        if tol is not None and not self._skip_reason(Requirement(tol, confidence or 1.0, None), method):
            unfit = self._unfit_for_cpu(q.shape[1] // self.key_heads * q.shape[2], confidence or 1.0, method)
            answer = unfit or self._by_cpu_step(q, scale, tol, method, sinks)
            if isinstance(answer, Attended):
                return answer
            if method == "sparse":
                return None
            reason = functools.partial(str, answer)
        if not serves(q, self._buffers["values"]) or sinks is not None:
            return None
        k, v, known = self._seen_by_last()
        exact = self._exact_reader.quick(q, k, v, known, self._value_slack, tol, scale, reason)
        return None if exact is None else Attended(*exact)

    def __repr__(self) -> str:
        length = self.lengths if self._ragged else self.length
        held = f"batch={self.batch}, key_heads={self.key_heads}, length={length}, dim={self.dim}"
        sketch = "no sketch" if self.bits is None else f"sketch of {self.bits} bits"
        where = f"{str(self.dtype).removeprefix('torch.')}, {self.device}"
        size = f"{self.nbytes:,} bytes" + (f", {self.host_nbytes:,} of them in host memory" if self.offload else "")
        return f"KeyValueCache({held}, value_dim={self.value_dim}, {where}, {sketch}, {size})"

    def save(self, path: str | Path) -> None:
        """Write what the cache holds to a safetensors file, whole or not at all.

        Args:
            path: where.

        Raises:
            ShapeError: sequences have different lengths.
            FileError: the file cannot be written.
            MissingPackage: safetensors is not installed.
        """
        if self._ragged:
            rule, remedy = "differ, and a file holds sequences of one length", "save a cache for each sequence"
            raise ShapeError("cache.lengths", list(self.lengths), rule, remedy)
        self._measure_written()
        if self.bits is not None:
            with torch.autocast(self.device.type, enabled=False):
                self._sketch(0)
        sizes = {name: getattr(self, name) for name in cache_file.SIZES}
        state = {name: getattr(self, f"_{name}") for name in cache_file.STATE}
        keys, values = self.tokens
        tensors = {"keys": keys, "values": values, "norms": self._buffers["norms"][:, :, : keys.shape[2]]}
        tensors["longest"] = self._longest
        if self.window is None and keys.shape[2]:
            # Cropped keys may have been longer than those left, and loading checks what the file says of these.
            tensors["longest"] = torch.minimum(self._longest, 1.5 * row_norms(keys, "k").amax(-1))
        # Kernels do not measure the spread of a sketch; without it loading sketches as if for the first time.
        learnt = ("metric", "size", "spread") if self._spread is not None else ()
        tensors |= {name: getattr(self, f"_{name}") for name in learnt}
        if self._bold is not None:
            tensors["bold"] = self._bold
        cache_file.write(Path(path), cache_file.Saved(sizes, self.dtype, state, tensors))

    @staticmethod
    def load(
        path: str | Path, device: torch.device | str = "cpu", offload: bool = False, hot: int | None = None
    ) -> KeyValueCache:
        """The cache that `save` wrote; it answers as that one would have.

        Args:
            path: the file.
            device: where the cache is to be.
            offload: whether its keys and values are to be in host memory.
            hot: how many bytes of them the device may keep besides.

        Returns:
            The cache.

        Raises:
            FileError: the file is missing, damaged, or not one of a cache.
        """
        saved = cache_file.read(Path(path))
        cache = KeyValueCache(**saved.sizes, dtype=saved.dtype, device=device, offload=offload, hot=hot)
        try:
            cache._restore(saved)
        except AvowError as error:
            rule = f"holds what no cache can hold ({error})"
            raise FileError("path", path, rule, "save the cache again") from error
        for name in ("asked", "shortness"):
            setattr(cache, f"_{name}", saved.state[name])
        cache._bold = saved.tensors["bold"].to(cache.device) if "bold" in saved.tensors else None
        return cache

    def _problem(self, q: Tensor, scale: float | None) -> tuple[Problem, int]:
        """What is asked of the tokens that these queries see, and where in the buffers those begin: with a group."""
        self._check_queries(q)
        n = q.shape[-2]
        if self._counts is None:
            first, end = self._first_seen(n), self._position - self._base
        else:
            # Nobody waits for lengths that the device alone knows: a sequence without tokens gets zeros there.
            first, end = 0, max(self._bounds)
            for i, bound in enumerate(self._bounds):
                self._first_seen(n, f" of sequence {i}", bound)
        k, v = (self._buffers[name][:, :, first:end] for name in ("keys", "values"))
        return Problem.of(q, k, v, mask=self._mask(n, end - first), scale=scale, enable_gqa=True), first

    def _check_queries(self, q: Tensor) -> None:
        """Raise if queries are not of this cache's kind."""
        check_tensor("q", q)
        if has_tangents(q):
            rule = "asks for derivatives forward, which answers from a cache do not carry"
            raise NotDifferentiable("q", "a dual tensor", rule, "use avow.attend with its keys and values")
        if q.ndim != 4:
            rule = "must be (batch, heads, length, dim)"
            raise ShapeError("q.shape", tuple(q.shape), rule, "give q its four axes")
        if q.shape[0] != self.batch:
            raise ShapeError("q.shape[0]", q.shape[0], f"must equal batch={self.batch}", "attend with the whole batch")
        if q.dtype != self.dtype:
            raise DtypeError("q.dtype", q.dtype, f"must equal the cache's {self.dtype}", f"use q.to({self.dtype})")

    def _first_seen(self, n: int, sequence: str = "", position: int | None = None) -> int:
        """Where in the buffers the tokens begin that the last n queries see: with a group.

        Raises if there are fewer tokens, of the cache or of a `sequence` that is so long.
        """
        position = self._position if position is None else position
        if position == 0:
            name = f"length{sequence}" if sequence else "cache.length"
            raise ShapeError(name, 0, "must be at least 1", "append keys and values first")
        oldest = 0 if self.window is None else max(0, position - n - self.window + 1)
        if n > position or oldest < self._base:
            rule = f"exceeds the {position - self._base} tokens held{sequence}"
            raise ShapeError("q.shape[-2]", n, rule, "attend right after appending their keys")
        return (oldest - self._base) // GROUP * GROUP

    def _mask(self, n: int, s: int) -> Tensor | None:
        """Which of the last s tokens each of the last n sees: those up to itself, within the window."""
        if n == 1 and (self.window is None or s <= self.window):
            return None
        own = torch.arange(s - n, s, device=self.device).unsqueeze(-1)
        tokens = torch.arange(s, device=self.device)
        seen = tokens <= own
        return seen if self.window is None else seen & (tokens > own - self.window)

    def _with_norms(self, call: _Call) -> _Call:
        """The same call, with norms in its problem: the longest of each head, or of each token if that matters."""
        if call.problem.known_norms is not None:
            return call
        # A head's extremes stand for all, unless old ones were forgotten or values come near to where sums underflow.
        few = self.window is None and float(self._extremes[..., 0].amin()) > 1e-9
        shown = self._extremes if few else self._lengths(call).double()
        keys = self._longest.unsqueeze(-1).expand(shown.shape)
        error = norm_slack(max(self.dim, self.value_dim), self.dtype, self._wide)
        norms = Norms(row_norms(call.problem.q, "q"), keys, shown, error)
        check_range(*norms.most, call.problem.scale)
        return call._replace(problem=call.problem.with_norms(norms))

    def _with_sinks(self, call: _Call) -> _Call:
        """The same call, where its sinks are one more token, whose key and value are zero, with a bias."""
        if call.sinks is None:
            return call
        old, sinks = call.problem, _finite_sinks(call.sinks)
        k, v = (torch.cat([torch.zeros_like(x[:, :, :1]), x], 2) for x in (old.k, old.v))
        bias = sinks.new_zeros(1, old.q.shape[1], old.q.shape[2], k.shape[2])
        if old.allowed is not None:
            bias[..., 1:].masked_fill_(~old.allowed, -math.inf)
        bias[..., 0] = sinks[:, None]
        problem = Problem.of(old.q, k, v, mask=bias, scale=old.scale, enable_gqa=True)
        return call._replace(problem=problem, sinks=None)

    def _lengths(self, call: _Call) -> Tensor:
        return self._buffers["norms"][:, :, call.first : call.first + call.problem.k.shape[-2]]

    def _skip_reason(self, requirement: Requirement, method: str) -> str:
        """Why this step does not look at the sketch, empty if it does."""
        exact = requirement.exact
        if not exact and (method == "sparse" or (not self._unfit and method != "exact")):
            return ""  # the kernels decide by themselves
        if exact or self.bits is None or method == "exact" or self.length < SHORTEST:
            return self._why_all(exact, method, self.length)
        limits = f"{requirement.tol} {requirement.rtol} {requirement.confidence:g}"
        if limits != self._asked:
            self._asked, self._bold = limits, None
        return ""

    def _why_all(self, exact: bool, method: str, length: int) -> str:
        """Why all of this many tokens are read without a look at the sketch."""
        if exact:
            return ""
        if method == "exact":
            return "exact attention was asked for"
        if self.bits is None:
            return "the cache keeps no sketch"
        return f"cache too short for sparse decoding ({length:,} tokens)"

    def _from_some_tokens(self, call: _Call, tol: float, unfit: str) -> Attended | str:
        """The answer from a part of the tokens by the reference if that keeps `tol`; else why not.

        `unfit` says why neither kernels nor compiled code gave it.
        """
        problem, confidence = call.problem, call.requirement.confidence
        method = Sparse(**Sparse.tune({"bits": self.bits}, problem.sizes, tol, confidence))
        if method.drop == 0 or not method.estimate_bound(problem, confidence).bound <= tol:
            return "rounding leaves nothing of the tolerance to drop"
        values, norms = self._lengths(call).double(), problem.norms
        whole = Norms(norms.q, self._longest.unsqueeze(-1).expand_as(values), values, norms.slack)
        stream = random_stream(call.generator, self.device) if method.statistical else call.generator
        computed = method.compute(problem.with_norms(whole), stream, self._sketch(call.first))
        certificate = certify(method, problem, computed, confidence)
        if not certificate.keeps(tol):
            return f"sparse could prove only {certificate.bound:.1e}"
        without = "compiled code" if self.device.type == "cpu" else "kernels"
        reason = f"{certificate.reason}; without {without}: {unfit}"
        return Attended(computed.out, dataclasses.replace(certificate, reason=reason))

    def _from_all_tokens(self, call: _Call, reason: str) -> Attended:
        """The answer within the required `tol`, whatever the required `rtol`, by parts if these serve."""
        problem, requirement = call.problem, call.requirement._replace(rtol=None)
        if self.offload and not problem.empty:
            return self._from_host(call, requirement, reason)
        if call.sinks is not None:
            return attend_exact(self._with_sinks(call).problem, requirement, reason)
        if self.device.type == "cpu" and not problem.empty and serves(problem.q, problem.v):
            k, v, known = self._seen_by_last()
            if problem.allowed is not None:  # the one query sees what is in its window, and that is all
                problem = Problem.of(problem.q, k, v, scale=problem.scale, enable_gqa=True)
            answer = self._exact_reader.attend(problem, known, self._value_slack, requirement.tol, reason)
            if answer is not None:
                return Attended(*answer)
        return attend_exact(self._with_norms(call).problem, requirement, reason)

    def _from_host(self, call: _Call, requirement: Requirement, reason: str) -> Attended:
        """The answer from all tokens in host memory, each of which crosses the bus once: by kernels that read it where
        it is if the queries fit into one pass of theirs, else by exact attention to one key head after the other.
        """
        p = call.problem
        if requirement.rtol is None and self._kernels_read_all(call._replace(requirement=requirement)):
            return self._by_kernel(call, None, reason)
        return self._head_by_head(p.q, call.first, p.k.shape[2], p.scale, requirement, reason, sinks=call.sinks)

    def _head_by_head(
        self,
        q: Tensor,
        first: int,
        many: int,
        scale: float,
        requirement: Requirement,
        reason: str = "",
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Attended:
        """The exact answer to queries that see so many tokens from the `first` place on, or what a mask says of them.

        The tokens of one key head of one sequence are on the device at a time.
        """
        mask, siblings = self._mask(q.shape[2], many) if mask is None else mask, q.shape[1] // self.key_heads
        sequences = []
        for i in range(self.batch):
            heads = []
            for head in range(self.key_heads):
                rows = slice(head * siblings, (head + 1) * siblings)
                k, v = (self._on_gpu(name, i, head, first, many) for name in ("keys", "values"))
                seen = mask
                if seen is not None and seen.ndim == 4:
                    seen = seen[i : i + 1] if seen.shape[0] > 1 else seen
                    seen = seen[:, rows] if seen.shape[1] > 1 else seen
                problem = Problem.of(q[i : i + 1, rows], k, v, mask=seen, scale=scale, enable_gqa=True)
                call = _Call(problem, first, requirement, None, "exact", None if sinks is None else sinks[rows])
                heads.append(attend_exact(self._with_sinks(call).problem, requirement, reason))
            sequences.append(_joined(heads, 1))
        return _joined(sequences, 0)

    def _on_gpu(self, name: str, sequence: int, head: int, first: int, many: int) -> Float[Tensor, "1 1 s d"]:
        """Tokens of one key head, copied from host memory without the host waiting."""
        whole = self._buffers[name]
        host = host_of(whole)
        rows = (whole if host is None else host)[sequence : sequence + 1, head : head + 1, first : first + many]
        return rows.to(self.device, non_blocking=True)

    def _seen_by_last(self) -> tuple[Tensor, Tensor, LengthBounds]:
        """Keys and values that the last token's query sees, and bounds on their lengths."""
        if self.window is None:
            return *self.tokens, self._length_bounds
        end = self._position - self._base
        first, known = max(0, end - self.window), self._length_bounds
        k, v = (self._buffers[name][:, :, first:end] for name in ("keys", "values"))
        # A bound is relative to the longest value that is seen; longer keys than those bound these, too.
        return k, v, known._replace(values=self._longest_seen(1, first, end)[:, 0].tolist())

    def _by_cpu_steps(self, call: _Call, tol: float) -> Attended | str:
        """The answer from a part of the tokens by compiled code; or why it does not serve."""
        q = call.problem.q
        unfit = self._unfit_for_cpu(q.shape[1] // self.key_heads * q.shape[2], call.requirement.confidence, call.method)
        return unfit or self._by_cpu_step(q, call.problem.scale, tol, call.method, call.sinks)

    def _unfit_for_cpu(self, rows: int, confidence: float, method: str) -> str:
        """Why compiled code does not answer so many queries that share a key head; empty if it does."""
        reasons = {
            f"{rows} queries share a key head": rows > MOST_ROWS,
            f"compiled code does not support {self.dtype}": self.dtype == torch.float64,
            "the sketch does not have 3 or 4 bits": self.bits not in (3, 4),
            "the tokens of a group are not side by side": self._buffers["codes"].stride(-2) != 1,
            "tokens are drawn by the reference": confidence < 1 and method == "sparse",
        }
        return next((reason for reason, holds in reasons.items() if holds), "") or cpu_unavailable()

    def _by_cpu_step(
        self, q: Tensor, scale: float | None, tol: float, method: str, sinks: Tensor | None = None
    ) -> Attended | str:
        """What compiled code makes of the tokens that these queries see."""
        n, alike = q.shape[2], q.shape[2] == 1 and self.window is None
        first = self._first_seen(n)
        if self._sketched < self._groups or not alike:
            self._measure_written()
            if looks(q.shape[1] // self.key_heads * n, method == "sparse"):
                with torch.autocast("cpu", enabled=False):
                    self._sketch(0)
        metric, size = self._metric, self._size
        if metric is None or size is None:  # nothing is sketched yet: either all tokens are read, or there are few
            metric, size = torch.ones(self.batch, self.key_heads, self.dim), torch.ones_like(self._longest)
        end, known = self._position - self._base, self._length_bounds
        window = end - first if self.window is None else self.window
        longest = np.array(known.values)[:, None] if alike else self._longest_seen(n, first, end)
        bounds = known.keys, longest, known.least
        held = CachedTokens(self._buffers, metric, size, first, end - first, window, *bounds)
        own = None if sinks is None else _finite_sinks(sinks).tolist()
        answer = self._cpu_steps.step(q, held, scale, tol, self._bold, method == "sparse", own)
        if isinstance(answer, str):
            return answer
        out, certificate, self._bold = answer
        return Attended(out, certificate)

    def _longest_seen(self, n: int, first: int, end: int) -> Float64[np.ndarray, "H n"]:
        """Upper bounds on the longest value that each of the last n queries sees, among tokens from `first` on."""
        norms, s = self._buffers["norms"][:, :, first:end].flatten(0, 1), end - first  # (b·g, s)
        spans = [(max(0, x - (self.window or s)), x) for x in range(s - n + 1, s + 1)]
        shared = norms[:, spans[-1][0] : spans[0][1]]
        if shared.shape[1] == 0:
            return torch.stack([norms[:, a:b].amax(-1) for a, b in spans], -1).double().numpy()
        # What all queries see, and of each what stands before and behind that.
        most = shared.amax(-1, keepdim=True)
        before = torch.cat([most, norms[:, : spans[-1][0]].flip(-1)], -1).cummax(-1).values.flip(-1)
        behind = torch.cat([most, norms[:, spans[0][1] :]], -1).cummax(-1).values
        return torch.maximum(before[:, [a for a, _ in spans]], behind).double().numpy()


# Python's own errors about arguments name the class that people know.
TokenBuffers.append.__qualname__ = "KeyValueCache.append"


def _joined(answers: Sequence[Attended], dim: int) -> Attended:
    """Answers to sequences or heads, side by side."""
    certificates = [answer.certificate for answer in answers]
    joined = LazyCertificate.of(lambda: dict(vars(compose(certificates, dim))))
    return Attended(torch.cat([answer.out for answer in answers], dim), joined)


def _finite_sinks(sinks: Tensor) -> Float64[Tensor, "h"]:
    """Sinks in float64; raises if one is nan or +inf."""
    wide = sinks.detach().double()
    if not bool((wide < math.inf).all()):
        raise NonFiniteError("sinks", "nan or +inf", "must be finite, or -inf", "use -inf for heads without one")
    return wide


def _check_sinks(sinks: Tensor, q: Tensor, device: torch.device) -> None:
    """Raise if these are not sinks of the heads of these queries."""
    check_tensor("sinks", sinks)
    heads = q.shape[1] if isinstance(q, Tensor) and q.ndim == 4 else 0
    if heads and sinks.shape != (heads,):
        raise ShapeError("sinks.shape", tuple(sinks.shape), f"must be ({heads},)", "give one logit for each query head")
    if not sinks.is_floating_point():
        raise DtypeError("sinks.dtype", sinks.dtype, "must be a type of floats", "use sinks.float()")
    if sinks.device != device:
        raise DtypeError("sinks.device", sinks.device, f"must equal the cache's {device}", "move them first")
