"""Errors relative to the answer's own length: bounded, asked for, and never accepted where nothing proves them."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb
from torch import Tensor

import avow
from avow import planner
from avow.attend import Attended
from avow.core import Certificate, Promise, certify
from avow.core.certify import absolute_errors, aimed_bound, relative_errors
from avow.core.compose import Partial, compose, merge
from avow.core.requirement import Requirement
from avow.errors import ParameterError, RangeError, ToleranceUnreachable
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from avow.nn import KeyValueCache
from avow.numerics.norms import length_floors, lengths
from tests.fuzz import answer
from tests.helpers.generators import Case, draw_case
from tests.helpers.truth import _asked, ball_error, errors

# What floats cannot decide goes to balls, so many rows of a case at most.
_BALLS = 2


def flat(keys: int = 4096, queries: int = 16, dim: int = 32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A head whose values nearly cancel: its answers are about √keys times shorter than a value."""
    draws = torch.Generator().manual_seed(seed)
    q = 0.1 * torch.randn(1, 1, queries, dim, generator=draws)
    k, v = (torch.randn(1, 1, keys, dim, generator=draws) for _ in range(2))
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def true_errors(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    target = truth(q, k, v)
    return (out.double() - target).norm(dim=-1) / target.norm(dim=-1)


def broken_rows(case: Case, attended: Attended) -> tuple[int, int]:
    """How many rows are further from the truth, relative to it, than their bound; and how many had a finite one."""
    p, method = case.problem, case.method
    out = attended.out.double().reshape(*p.q.shape[:-1], -1)
    bounds = attended.certificate.relative_rows.reshape(p.q.shape[:-1])
    assert not bool(bounds.isnan().any())
    finite = int(torch.isfinite(bounds).sum())
    if p.empty:
        return int(((out != 0).any(-1) & (bounds < math.inf)).sum()), finite
    question, zeros, limits = _asked(method, p, case.mask), torch.zeros_like(out), bounds.numpy()
    # The error of zeros is the true answer's length, both relative to the longest value.
    error, own, _ = errors(question, out)
    length, its_own, _ = errors(question, zeros)
    with np.errstate(all="ignore"):
        sure = (limits == math.inf) | ((error + own) * (1 + 1e-9) <= limits * (length - its_own))
        lost = ~sure & ((error - own) * (1 - 1e-9) > limits * (length + its_own))
    count = int(lost.sum())
    for b, h, i in np.argwhere(~sure & ~lost).tolist()[:_BALLS]:
        off, whole = (ball_error(method, p, x, b, h, i, case.mask) for x in (out, zeros))
        count += not off <= arb(float(limits[b, h, i])) * whole
    return count, finite


def search(cases: int, seed: int) -> tuple[int, int]:
    """Rows broken and rows bounded among random heads of every method, type, mask and size."""
    rng, broken, bounded = random.Random(seed), 0, 0
    for _ in range(cases):
        case = draw_case(rng.getrandbits(48), heads=16)
        try:
            attended = answer(case)
        except RangeError:
            continue
        if attended.certificate.kind == "deterministic":
            wrong, some = broken_rows(case, attended)
            broken, bounded = broken + wrong, bounded + some
    return broken, bounded


def test_no_row_is_further_from_the_truth_than_its_relative_bound() -> None:
    broken, bounded = search(400, 5)
    assert broken == 0 and bounded > 10_000


def test_the_search_notices_a_bound_that_forgets_how_long_answers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Were answers taken to be a thousand times as long, their errors would seem a thousand times smaller.
    monkeypatch.setattr(certify, "length_floors", lambda x: 1e3 * length_floors(x))
    assert search(150, 5)[0] > 0


def test_the_search_notices_a_bound_that_takes_the_given_answer_for_the_true_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def naive(absolute: Tensor, lengths: Tensor) -> Tensor:
        return torch.where(absolute > 0, absolute / lengths, 0.0)

    # A promise as weak as can be: every answer may be off by its own length, and some are.
    q, k, v = flat(64)
    target = truth(q, k, v)
    out, allowed = 0.5 * target, 0.5 * target.norm(dim=-1)
    errors = true_errors(out, q, k, v)
    assert bool((errors <= relative_errors(allowed * (1 + 1e-9), length_floors(out))).all())
    monkeypatch.setattr(certify, "relative_errors", naive)
    assert bool((errors < certify.relative_errors(allowed, length_floors(out))).any())
    assert bool((true_errors(2 * target, q, k, v) > naive(2 * allowed, length_floors(2 * target))).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-200, 1e-42, 1e-20, 1.0, 1e4, 1e30, 1e200])
@pytest.mark.parametrize("rows", [50, 1000])
def test_lower_bounds_on_lengths_are_below_and_close(dtype: torch.dtype, size: float, rows: int) -> None:
    x = (torch.randn(rows, 24, dtype=torch.float64) * size).to(dtype)
    x = x[torch.isfinite(x).all(-1)]
    exact = torch.tensor([math.hypot(*row) for row in x.double().tolist()], dtype=torch.float64)
    floors = length_floors(x)
    assert bool((floors <= exact * (1 + 2.0**-52)).all())
    assert bool((floors >= exact * (1 - 1e-4) - 1e-300).all())


def test_rows_with_nan_or_inf_have_no_relative_bound() -> None:
    out = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [1.0, 0.0]])
    for x in (out, out.double()):
        bounds = relative_errors(torch.full((3,), 0.1, dtype=torch.float64), length_floors(x))
        assert bounds[:2].isinf().all() and bounds[2] == pytest.approx(0.1 / 0.9)


def test_what_is_known_of_no_error_is_unknown_relative_to_the_answer() -> None:
    rows = torch.tensor([0.0, 0.5, math.inf, math.nan, 0.1, math.inf], dtype=torch.float64)
    longest = torch.tensor([2.0, 2.0, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    assert absolute_errors(rows, longest).tolist() == [0.0, pytest.approx(1.0), math.inf, math.inf, 0.0, math.inf]


def test_an_answer_of_zeros_is_wrong_by_its_whole_length() -> None:
    q, k, v = flat(32_768)
    zeros = torch.zeros_like(q)
    report = avow.audit(zeros, q, k, v)
    assert report.certificate.keeps(1e-2)  # relative to the longest value it is hardly wrong
    assert bool((report.relative_errors >= 1).all()) and report.certificate.relative < 1 + 1e-6
    assert report.certificate.keeps(1e-2, 1.01) and not report.certificate.keeps(1e-2, 0.999)
    assert "1.00e+00 of the answer" in str(report)
    longest = float(v.norm(dim=-1).amax())
    assert report.absolute_errors.tolist() == pytest.approx((report.errors * longest).tolist(), rel=1e-5)


def test_no_method_gets_zeros_past_a_relative_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = flat()
    honest = Exact.compute

    def idle(self: Exact, problem: Any, generator: Any = None) -> Any:
        return dataclasses.replace(honest(self, problem, generator), out=torch.zeros_like(problem.q))

    def humble(self: Exact, problem: Any, *arguments: Any) -> Promise:
        return Promise("deterministic", torch.full(problem.q.shape[:-1], 5e-2, dtype=torch.float64))

    monkeypatch.setattr(Exact, "compute", idle)
    monkeypatch.setattr(Exact, "promise", humble)
    zeros, certificate = avow.attend(q, k, v, tol=1e-1)
    assert not zeros.any() and certificate.relative == math.inf  # true, and of no use
    for rtol in (1e-3, 0.5, 0.999, 1e6):
        with pytest.raises(ToleranceUnreachable, match=r"^rtol="):
            avow.attend(q, k, v, tol=1e-1, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_true_errors_are_within_relative_bounds_of_every_type(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in flat(512))
    out, certificate = avow.attend(q, k, v)
    assert bool((true_errors(out, q, k, v) <= certificate.relative_rows).all())
    assert certificate.relative == float(certificate.relative_rows.amax()) > certificate.bound


def test_rows_that_see_nothing_are_right() -> None:
    q, k, v = flat(64)
    mask = torch.ones(16, 64, dtype=torch.bool)
    mask[3] = False
    out, certificate = avow.attend(q, k, v, mask=mask)
    assert not out[..., 3, :].any() and certificate.relative_rows[0, 0, 3] == 0
    assert 0 < certificate.relative < 1
    report = avow.audit(out, q, k, v, mask=mask)
    assert report.relative_errors[3] == 0 and report.absolute_errors[3] == 0
    wrong = out.clone()
    wrong[0, 0, 3, 0] = 1e-3
    assert avow.audit(wrong, q, k, v, mask=mask).relative_errors[3] == math.inf


@pytest.mark.parametrize("method", ["exact", "sparse", "low_rank"])
def test_values_that_are_all_zero_have_answers_without_error(method: str) -> None:
    q, k, v = flat(64)
    out, certificate = avow.attend(q, k, 0 * v, method=method, rtol=1e-9)
    assert not out.any() and certificate.relative == 0
    assert avow.audit(out, q, k, 0 * v).certificate.relative == 0


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8)], ids=["no queries", "no keys"])
def test_where_there_is_nothing_to_attend_to_nothing_is_wrong(shape: tuple[int, int, int]) -> None:
    n, s, d = shape
    certificate = avow.attend(torch.randn(1, 1, n, d), *torch.randn(2, 1, 1, s, d).unbind(), rtol=1e-9).certificate
    assert certificate.relative == 0 and certificate.relative_rows.shape == (1, 1, n)


def test_a_mask_over_values_of_unlike_lengths_is_weighed_row_by_row() -> None:
    q, k, v = flat(64)
    v[..., 32:, :] *= 1e6
    mask = torch.zeros(16, 64, dtype=torch.bool)
    mask[:8, :32], mask[8:, 32:] = True, True
    certificate = avow.attend(q, k, v, mask=mask).certificate
    short, long = certificate.relative_rows[0, 0, :8], certificate.relative_rows[0, 0, 8:]
    assert float(short.amax()) < 10 * float(long.amax()) < 0.1


@pytest.mark.parametrize("keys", [1024, 16_384])
def test_a_flat_heads_answer_shrinks_and_its_relative_error_grows(keys: int) -> None:
    q, k, v = flat(keys)
    ratio = float((truth(q, k, v).norm(dim=-1) / v.norm(dim=-1).amax()).mean())
    assert ratio == pytest.approx(0.75 / math.sqrt(keys), rel=0.4)


@pytest.mark.parametrize(
    ("dtype", "rtol", "precision"),
    [(torch.float32, 1e-1, "native"), (torch.float32, 1e-4, "float64"), (torch.bfloat16, 1e-2, "float32")],
    ids=str,
)
def test_a_relative_tolerance_is_kept_in_the_narrowest_arithmetic_that_proves_it(
    dtype: torch.dtype, rtol: float, precision: str
) -> None:
    q, k, v = (x.to(dtype) for x in flat(4096))
    for method in ("auto", "exact"):
        out, certificate = avow.attend(q, k, v, rtol=rtol, method=method)
        assert certificate.parameters == {"precision": precision} and certificate.keeps(rtol=rtol)
        assert bool((true_errors(out, q, k, v) <= rtol).all())


def test_both_tolerances_hold_where_both_are_given() -> None:
    q, k, v = flat(4096)
    assert avow.attend(q, k, v, tol=1e-2).certificate.relative > 1e-4
    assert avow.attend(q, k, v, tol=1e-2, rtol=1e-4).certificate.keeps(1e-2, 1e-4)
    assert avow.attend(q, k, v, tol=1e-6, rtol=1.0).certificate.keeps(1e-6, 1.0)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.float32, "convert q, k and v to float64, or ask for tol="),
        (torch.float64, "an answer near zero has no relative bound; ask for tol= instead"),
    ],
    ids=str,
)
def test_a_relative_tolerance_that_nothing_proves_is_refused(dtype: torch.dtype, remedy: str) -> None:
    q, k, v = (x.to(dtype) for x in flat(4096))
    with pytest.raises(ToleranceUnreachable) as caught:
        avow.attend(q, k, v, rtol=1e-15)
    assert re.fullmatch(
        r"rtol=1e-15 is below \S+, the best bound relative to the answer that can be proved in float\d\d; "
        + re.escape(remedy),
        str(caught.value),
    )
    assert 1e-15 < caught.value.best < 1e-3


def test_a_tolerance_that_is_too_small_is_told_apart_from_a_relative_one() -> None:
    q, k, v = flat()
    with pytest.raises(ToleranceUnreachable, match=r"^tol=1e-12 is below"):
        avow.attend(q, k, v, tol=1e-12, rtol=0.5)
    with pytest.raises(ToleranceUnreachable, match=r"^low_rank: rtol=0.01 is below the .* relative to the answer; use"):
        avow.attend(q, k, v, method="low_rank", rank=1, rtol=1e-2)


def test_sparse_attention_aims_at_a_relative_tolerance() -> None:
    q, k, v = flat(2048, 4)
    for rtol in (0.5, 1e-2):
        out, certificate = avow.attend(q, k, v, method="sparse", rtol=rtol)
        assert certificate.method == "sparse" and certificate.keeps(rtol=rtol)
        # It aimed at what answers a few times shorter than those of a flat head would need, or at what these do.
        assert 0.2 * rtol < certificate.parameters["drop"] * 2048**0.5 < 2 * rtol
        assert bool((true_errors(out, q, k, v) <= certificate.relative_rows[0, 0]).all())


def test_sparse_attention_aims_again_where_answers_are_shorter_than_was_thought() -> None:
    # One query: how long its answer is was a guess. Values cancel further than those of any flat head.
    q, k, v = flat(2048, 1)
    v = v.abs() * torch.tensor([1.0, -1.0]).repeat(1024)[:, None] + 1e-3 * v
    first = avow.attend(q * 1e-3, k, v, method="sparse", drop=aimed_bound(2048**-0.5, 0.1)).certificate
    assert not first.keeps(rtol=0.1)
    assert avow.attend(q * 1e-3, k, v, method="sparse", rtol=0.1).certificate.keeps(rtol=0.1)


def clustered(n: int = 4096) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 16, generator=draws)
    k = centres[torch.arange(n) % 4] + 1e-4 * torch.randn(n, 16, generator=draws)
    q = 0.3 * torch.randn(n, 16, generator=draws)
    v = torch.randn(n, 16, generator=draws)
    return q[None, None], k[None, None], v[None, None]


def test_a_cheaper_method_that_misses_gives_way_to_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = clustered()
    monkeypatch.setattr(planner, "WASTE", 1.0)  # as if exact attention took longer
    easy = avow.attend(q, k, v + 3, rtol=0.1).certificate
    assert easy.method == "low_rank" and easy.keeps(rtol=0.1)
    # The same bound relative to the longest value proves nothing of answers that cancel.
    honest = LowRank.promise
    monkeypatch.setattr(
        LowRank,
        "promise",
        lambda *arguments: dataclasses.replace(honest(*arguments), rows=honest(*arguments).rows + 0.02),
    )
    certificate = avow.attend(q, k, v, rtol=0.1).certificate
    assert certificate.method == "exact" and certificate.keeps(rtol=0.1)


def test_a_plan_says_what_it_aims_at() -> None:
    q, k, v = clustered(1024)
    made = avow.plan(q, k, v, tol=0.5, rtol=1e-2)
    assert made.rtol == 1e-2 and made.aim is not None and made.aim < 1e-2
    text = f"plan for tolerance 0.5 and relative tolerance 0.01, which is about {made.aim:.1e} of the longest value"
    assert str(made).startswith(text)
    assert str(made).splitlines()[0].endswith("; bounds are relative to the longest value that a row sees")
    assert avow.plan(q, k, v, tol=0.5).aim is None


@pytest.mark.parametrize("rtol", [-1.0, math.nan, math.inf, "small", True], ids=str)
def test_what_is_no_relative_tolerance_is_refused(rtol: Any) -> None:
    q, k, v = flat(8)
    quoted = isinstance(rtol, str)
    remedy = "pass a number, without quotes" if quoted else "try rtol=1e-2, or leave it out for exact"
    for call in (avow.attend, avow.plan):
        with pytest.raises(ParameterError, match=re.escape(f"rtol={rtol!r} must be a number above 0; {remedy}")):
            call(q, k, v, rtol=rtol)


def test_sampled_promises_are_held_to_the_relative_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = flat(256, 300)
    options: dict[str, Any] = {"method": "random_features", "features": 512, "coverage": 0.9}
    certificate = avow.attend(q, k, v, tol=0.5, generator=torch.Generator().manual_seed(0), **options).certificate
    assert certificate.kind == "sampled" and certificate.bound < certificate.relative < math.inf
    with pytest.raises(ToleranceUnreachable, match=r"^random_features: rtol"):
        avow.attend(q, k, v, rtol=certificate.relative / 4, generator=torch.Generator().manual_seed(0), **options)


def test_statistical_promises_hold_relative_to_the_answer_too() -> None:
    q, k, v = flat(256, 200)
    wish = Requirement(None, 0.99, None)
    k, v = 0.1 * k, v + 1
    out, certificate = avow.attend(
        q, k, v, method="random_features", features=2048, generator=torch.Generator().manual_seed(0)
    )
    assert certificate.kind == "statistical" and wish.met_by(certificate)
    assert bool(torch.isfinite(certificate.relative_rows).all())
    assert bool((true_errors(out, q, k, v) <= certificate.relative_rows).all())


def test_composed_answers_keep_their_relative_bounds() -> None:
    parts = [avow.attend(*flat(keys)).certificate for keys in (64, 512, 128)]
    for order in (parts, parts[::-1]):
        whole = compose(order, 1)
        assert whole.relative == max(part.relative for part in parts)
        assert torch.equal(whole.relative_rows, torch.cat([part.relative_rows for part in order], 1))


def shard(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    out, certificate = avow.attend(q, k, v)
    lse = torch.logsumexp(q.double() @ k.double().mT / q.shape[-1] ** 0.5, -1)
    longest = lengths(v).amax(-1, keepdim=True).expand(lse.shape)
    return Partial.of(out, lse, 1e-12, longest, certificate, slack=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_merged_shards_bound_the_error_relative_to_the_whole_answer(dtype: torch.dtype) -> None:
    q, k, v = flat(1000)
    parts = [shard(q, k[..., some, :], v[..., some, :]) for some in (slice(0, 100), slice(100, 700), slice(700, 1000))]
    answers = []
    for a, b, c in ((0, 1, 2), (2, 0, 1)):
        for whole in (merge(merge(parts[a], parts[b]), parts[c]), merge(parts[a], merge(parts[b], parts[c]))):
            out, certificate = whole.answer(dtype)
            answers.append(certificate)
            assert bool((true_errors(out, q, k, v) <= certificate.relative_rows).all())
            assert certificate.relative == float(certificate.relative_rows.amax()) < 1
    for certificate in answers[1:]:
        assert certificate.relative == pytest.approx(answers[0].relative, rel=1e-3)
    alone, own = parts[0].answer(dtype)
    with_nothing = merge(parts[0], Partial.nothing(alone.shape)).answer(dtype)[1]
    assert with_nothing.relative == own.relative


def test_shards_that_see_nothing_are_right() -> None:
    _, certificate = Partial.nothing((1, 1, 3, 4)).answer()
    assert certificate.relative == 0 and certificate.relative_rows.shape == (1, 1, 3)


def test_shards_whose_answers_cancel_have_no_relative_bound() -> None:
    q, k, v = flat(64)
    whole = merge(shard(q, k, v), shard(q, k, -v))
    out, certificate = whole.answer()
    assert float(out.norm(dim=-1).amax()) < 1e-6 and certificate.bound < 1e-3 and certificate.relative == math.inf


def test_a_certificate_survives_json_with_its_relative_rows() -> None:
    certificate = avow.attend(*flat(64)).certificate
    assert Certificate.from_json(certificate.to_json()) == certificate


def filled(k: Tensor, v: Tensor, **more: Any) -> KeyValueCache:
    cache = KeyValueCache(k.shape[1], k.shape[-1], dtype=k.dtype, **more)
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["auto", "sparse"])
def test_a_cache_keeps_a_relative_tolerance(dtype: torch.dtype, method: str) -> None:
    q, k, v = (x.to(dtype) for x in flat(2000, 1))
    cache = filled(k, v)
    for rtol in (0.3, 3e-2):
        out, certificate = cache.attend(q, rtol=rtol, method=method)
        assert certificate.keeps(rtol=rtol)
        assert bool((true_errors(out, q, k, v) <= certificate.relative_rows).all())
        assert cache.attend(q, 1e-2, rtol=rtol, method=method).certificate.keeps(1e-2, rtol)


def test_a_cache_reads_a_part_of_its_tokens_for_a_relative_tolerance() -> None:
    q, k, v = flat(4000, 1)
    k[..., :40, :] += 20 * q  # some tokens matter, the others do not
    certificate = filled(k, v).attend(100 * q, rtol=0.05, method="sparse").certificate
    assert certificate.method == "sparse" and certificate.keeps(rtol=0.05)
    assert not certificate.reason.startswith("read 100")


def test_a_cache_aims_again_where_answers_are_shorter_than_was_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = flat(2048, 1)
    cache, aims = filled(k, v), []
    honest = KeyValueCache._attend_within

    def counted(self: KeyValueCache, call: Any, aim: float) -> Attended:
        aims.append(aim)
        attended = honest(self, call, aim)
        if len(aims) > 1:
            return attended
        # As if so bold an aim had left too much unread.
        return attended._replace(certificate=dataclasses.replace(attended.certificate, relative=math.inf))

    monkeypatch.setattr(KeyValueCache, "_attend_within", counted)
    cache._shortness = 20.0  # longer than any value: an answer never is
    out, certificate = cache.attend(q, rtol=0.1, method="sparse")
    assert certificate.keeps(rtol=0.1) and bool((true_errors(out, q, k, v) <= 0.1).all())
    assert len(aims) == 2 and aims[1] < 0.1 * aims[0]
    # The next answer is aimed at by the last.
    assert cache.attend(q, rtol=0.1, method="sparse").certificate.keeps(rtol=0.1) and len(aims) == 3


def test_a_cache_refuses_a_relative_tolerance_that_nothing_proves() -> None:
    q, k, v = flat(256, 1)
    cache = filled(k, v)
    with pytest.raises(ToleranceUnreachable, match=r"^rtol=1e-12 is below"):
        cache.attend(q, rtol=1e-12)
    with pytest.raises(
        ParameterError, match=r"^rtol=0 must be a number above 0; try rtol=1e-2, or leave it out for exact$"
    ):
        cache.attend(q, rtol=0)
    with pytest.raises(ParameterError, match=r"^rtol=nan must be a number above 0"):
        cache.attend(q, rtol=math.nan)


def test_a_cache_whose_parts_lie_ignores_no_relative_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever reads a part of the tokens or all of them natively, its answer must be proved.
    q, k, v = flat(512, 1)
    monkeypatch.setattr("avow.decode.split_k_exact.length_floors", lambda x: 0 * length_floors(x))
    certificate = filled(k, v).attend(q, rtol=0.1).certificate
    assert certificate.keeps(rtol=0.1)
    assert certificate.reason == "exact could prove only inf relative to the answer"


def test_queries_of_several_tokens_and_windows_keep_a_relative_tolerance() -> None:
    q, k, v = flat(300, 5)
    for window in (None, 64):
        out, certificate = filled(k, v, window=window).attend(q, rtol=0.1)
        seen = torch.arange(300) <= torch.arange(295, 300)[:, None]
        if window is not None:
            seen &= torch.arange(300) > torch.arange(295, 300)[:, None] - window
        logits = (q.double() @ k.double().mT / 32**0.5).masked_fill(~seen, -math.inf)
        target = torch.softmax(logits, -1) @ v.double()
        errors = (out - target).norm(dim=-1) / target.norm(dim=-1)
        assert certificate.keeps(rtol=0.1) and bool((errors <= certificate.relative_rows).all())


def test_a_saved_cache_aims_as_before(tmp_path: Any) -> None:
    q, k, v = flat(256, 1)
    cache = filled(k, v)
    cache.attend(q, rtol=0.1)
    cache.save(tmp_path / "cache.safetensors")
    assert KeyValueCache.load(tmp_path / "cache.safetensors")._shortness == cache._shortness is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limits", [{"rtol": x} for x in (1e-4, 1e-3, 1e-2, 0.1)] + [{"tol": x} for x in (1e-4, 3e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_chooses_what_attend_runs(dtype: torch.dtype, limits: dict[str, float], causal: bool) -> None:
    q, k, v = (x.to(dtype) for x in torch.randn(3, 1, 4, 512, 32).unbind())
    chosen = avow.plan(q, k, v, causal=causal, **limits).chosen
    try:
        certificate = avow.attend(q, k, v, causal=causal, **limits).certificate
    except avow.ToleranceUnreachable:
        assert chosen is None
    else:
        assert chosen is not None
        assert (certificate.method, certificate.parameters) == (chosen.method.name, chosen.method.parameters)


def test_a_plan_that_nothing_meets_says_so() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 16).bfloat16().unbind()
    assert "nothing here is expected to meet it" in str(avow.plan(q, k, v, rtol=1e-5))


def test_short_answers_keep_tolerances_that_rounding_long_ones_would_break() -> None:
    q, k, v = torch.randn(3, 1, 2, 1024, 16).bfloat16().unbind()
    unit = 2.0**-8  # what rounding to bfloat16 costs an answer as long as the longest value
    assert avow.attend(q, k, v, tol=unit / 2).certificate.keeps(unit / 2)
    with pytest.raises(avow.ToleranceUnreachable):
        avow.attend(q * 50, k * 50, v, tol=unit / 2)  # sharp heads copy values, which are long
