"""Sparse attention reads what may matter, and what it leaves unread it proves not to."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest
import torch
from torch import Tensor

import avow
from avow.core import Certificate, Problem
from avow.core.certify import certify
from avow.core.requirement import INDEPENDENT
from avow.errors import ParameterError, ToleranceUnreachable
from avow.methods import sparse
from avow.methods.sparse import Sparse
from avow.numerics import sketch as sketches
from avow.numerics import token_ranking
from avow.numerics.heads import longest_seen
from avow.numerics.shard_steps import Steps, alone
from avow.numerics.sparse_reading import Answer


def peaked(n: int = 6, s: int = 700, d: int = 32, sharp: float = 3.0, heads: int = 4, groups: int = 2) -> Problem:
    """Queries near some of the keys: heads that look at few tokens, as trained ones do."""
    keys = torch.randn(1, groups, s, d)
    aims = keys[:, :, torch.randint(s, (n,))].repeat_interleave(heads // groups, 1)
    values = torch.randn(1, groups, s, d)
    return Problem.of(sharp * aims + torch.randn(1, heads, n, d), keys, values, enable_gqa=True)


def attended(method: Sparse, p: Problem, seed: int = 0) -> tuple[Tensor, Certificate, sparse.Trace]:
    computed = method.compute(p, torch.Generator().manual_seed(seed))
    return computed.out, certify(method, p, computed, 0.999), computed.trace


def errors(p: Problem, out: Tensor) -> Tensor:
    truth = Sparse().reference(p)
    unit = longest_seen(p, torch.linalg.vector_norm(p.v.double(), dim=-1))
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / unit


@pytest.mark.parametrize("drop", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("chance", [0.0, 1e-3])
def test_peaked_heads_are_read_in_part_and_within_the_bound(drop: float, chance: float) -> None:
    p = peaked()
    out, certificate, trace = attended(Sparse(drop=drop, chance=chance), p)
    found = errors(p, out)
    assert bool((found <= certificate.rows).all())
    assert certificate.bound <= drop * 1.001 + 1e-6
    assert certificate.kind == ("statistical" if chance else "deterministic")
    assert certificate.confidence == 1 - chance
    assert float(trace.read.mean()) < 0.5 * p.k.shape[-2]
    # What is left unread does move the answer: a bound that forgot it would be broken.
    assert float(found.max()) > 1e-6


def test_a_smaller_drop_reads_more() -> None:
    p = peaked()
    reads = [float(attended(Sparse(drop=drop), p)[2].read.mean()) for drop in (0.3, 0.03, 0.003, 0.0)]
    assert reads == sorted(reads) and reads[0] < reads[1] < reads[2]


def test_nothing_is_dropped_where_nothing_may_be() -> None:
    p = peaked()
    out, certificate, trace = attended(Sparse(drop=0.0), p)
    assert float(errors(p, out).max()) < 1e-6 and certificate.bound < 1e-6
    assert bool((trace.tails == 0).all())


def test_flat_heads_are_read_almost_whole_unless_sampled() -> None:
    p = peaked(sharp=0.0, s=8192, n=1)
    flat = dataclasses.replace(p, q=0.1 * p.q)
    whole, sampled = (attended(Sparse(drop=0.1, chance=chance), flat) for chance in (0.0, 1e-3))
    assert float(whole[2].read.mean()) > 0.8 * 8192
    assert float(sampled[2].read.mean()) < 0.5 * 8192
    assert bool((errors(flat, sampled[0]) <= sampled[1].rows).all())


def test_tokens_without_a_sketch_are_always_read() -> None:
    p = peaked(s=63)
    assert bool((attended(Sparse(drop=1.0), p)[2].read == 63).all())
    longer = peaked(s=64 + 9)
    assert bool((attended(Sparse(drop=1.0), longer)[2].read >= 9).all())


def test_tokens_taken_together_are_read_less_than_each_at_its_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    p = peaked(s=4096, n=2, sharp=2.0, heads=2)
    out, certificate, trace = attended(Sparse(drop=0.05), p)
    assert bool((errors(p, out) <= certificate.rows).all())
    monkeypatch.setattr(token_ranking, "aggregate_error", lambda *_: None)
    _, _, singly = attended(Sparse(drop=0.05), p)
    assert float(trace.read.mean()) < 0.8 * float(singly.read.mean())


def test_a_spread_that_claims_too_little_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p, made = aligned(), sketches.sketched

    def boasting(rows: Tensor, bits: int) -> sketches.Sketch:
        """Each logit may be anywhere in its bracket, but all together are claimed to be in the middle."""
        sketch = made(rows, bits)
        assert sketch.spread is not None
        return dataclasses.replace(sketch, spread=0 * sketch.spread)

    out, certificate, _ = attended(Sparse(drop=0.3, bits=1), p)
    assert bool((errors(p, out) <= certificate.rows).all())
    monkeypatch.setattr(sparse, "sketched", boasting)
    out, certificate, _ = attended(Sparse(drop=0.3, bits=1), p)
    assert bool((errors(p, out) > certificate.rows).any())


def aligned() -> Problem:
    """One heavy token, and a thousand light ones of which a sketch of one bit loses the same: a query along it."""
    keys = torch.full((1, 1, 1024, 8), -0.1) * torch.eye(8)[0]
    keys[:, :, ::64, 0], keys[:, :, 1::64, 0], keys[:, :, 0, 1] = -1.0, 1.0, 1.0
    values = torch.full((1, 1, 1024, 8), -1.0)
    values[:, :, 0] = 1.0
    query = torch.tensor([1.5 / 0.9, math.log(1e4), 0, 0, 0, 0, 0, 0])
    return Problem.of(query.expand(1, 1, 1, 8), keys, values, scale=1.0)


def test_values_chosen_to_do_the_most_damage_do_not_break_it() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        p = peaked(n=4, s=320, heads=2)
        method = Sparse(drop=0.05)
        read = _drawn(method, p)
        # Everything that was not read points away from everything that was.
        away = torch.where(read.any(2), 1.0, -1.0)[..., None] * torch.ones(1, 2, 320, 32) / math.sqrt(32)
        worse = dataclasses.replace(p, v=away.float())
        out, certificate, _ = attended(method, worse)
        assert bool((errors(worse, out) <= certificate.rows).all())


def _drawn(method: Sparse, p: Problem) -> Tensor:
    """Which tokens the method reads."""
    answers = []

    def spying(steps: Steps) -> Answer:
        answers.append(alone(steps))
        return answers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "alone", spying)
        method.compute(p)
    return answers[0].kept


def test_a_sketch_that_claims_too_much_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    p, made = peaked(), sketches.sketched

    def boasting(rows: Tensor, bits: int) -> sketches.Sketch:
        """All keys are claimed to be zero, for sure."""
        sketch = made(rows, bits)
        return dataclasses.replace(sketch, zero=0 * sketch.zero, scale=0 * sketch.scale, radius=0 * sketch.radius)

    monkeypatch.setattr(sparse, "sketched", boasting)
    out, certificate, _ = attended(Sparse(drop=0.1), p)
    assert bool((errors(p, out) > certificate.rows).any())


def test_statistical_bounds_fail_no_oftener_than_they_say() -> None:
    p = peaked(n=1, s=1024, sharp=0.3)
    method = Sparse(drop=0.3, chance=0.2)
    missed = rows = sampled = 0
    for seed in range(120):
        out, certificate, trace = attended(method, p, seed)
        missed += int((errors(p, out) > certificate.rows).sum())
        rows += certificate.rows.numel()
        sampled += int((trace.read < 1024).sum())
    assert sampled > 100, "nothing was sampled, so nothing was tested"
    assert missed <= 0.2 * rows


def test_samples_that_leave_too_little_of_the_mass_certain_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, method = peaked(n=1, s=1024, sharp=0.3), Sparse(drop=0.3, chance=0.2)
    usual, other = (attended(method, p, seed)[0] for seed in (1, 2))
    assert not torch.equal(usual, other)
    monkeypatch.setattr("avow.numerics.tail_samples._SURE", 0.0)
    sure, again = (attended(method, p, seed)[0] for seed in (1, 2))
    assert torch.equal(sure, again), "draws count only where they prove something"


def test_draws_repeat_with_their_seed_and_differ_without() -> None:
    p = peaked(sharp=0.3, s=1024)
    method = Sparse(drop=0.1, chance=0.01)
    first, again, other = (attended(method, p, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("chance", [0.0, 1e-2])
def test_gradients_are_those_of_the_tokens_read(chance: float) -> None:
    p = peaked(n=3, s=200)
    q, k, v = (x.double().requires_grad_() for x in (p.q, p.k, p.v))
    out = (
        Sparse(drop=1e-8, chance=chance)
        .compute(Problem.of(q, k, v, enable_gqa=True), torch.Generator().manual_seed(0))
        .out
    )
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    truth = Sparse().reference(Problem.of(q, k, v, enable_gqa=True))
    for mine, exact in zip(found, torch.autograd.grad(truth.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-5)


def test_attend_sets_it_to_the_tolerance() -> None:
    p = peaked()
    for confidence, kind in ((None, "deterministic"), (0.99, "statistical")):
        _, certificate = avow.attend(p.q, p.k, p.v, method="sparse", tol=2e-2, confidence=confidence, enable_gqa=True)
        assert certificate.bound <= 2e-2 and certificate.kind == kind
        assert re.fullmatch(r"read \d+\.\d% of the tokens in full", certificate.reason)
    # A drop of one's own is kept, and judged against the tolerance.
    with pytest.raises(ToleranceUnreachable):
        avow.attend(p.q, p.k, p.v, method="sparse", tol=2e-2, drop=0.5, enable_gqa=True)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"drop": -1.0}, "sparse: drop=-1.0 must be at least 0"),
        ({"bits": 9}, "sparse: bits=9 must be from 1 to 8"),
        ({"chance": 1.0}, "sparse: chance=1.0 must be at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], text: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(text)):
        Sparse(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("small", [1e-40, 1e-250, 1e-300, 1e-310])
def test_values_that_vanish_beside_a_later_one_are_not_taken_for_zeros(small: float) -> None:
    q, k, v = (torch.randn(1, 1, 6, d, dtype=torch.float64) for d in (4, 4, 3))
    v = torch.cat([v[:, :, :5] * small, v[:, :, 5:] * 1e290], 2)
    out, certificate = avow.attend(q, k, v, method="sparse", causal=True)
    weights = torch.softmax((q @ k.mT / 2).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf), -1)
    values = v[:, :, :5] / small
    errors = torch.linalg.vector_norm(out[:, :, :5] / small - weights[:, :, :5, :5] @ values, dim=-1)
    longest = torch.linalg.vector_norm(values, dim=-1).cummax(-1).values
    assert bool((errors <= certificate.rows[..., :5] * longest).all())
    assert float((errors / longest).max()) > 0.1, "what vanished is the whole answer"


def test_rows_that_see_nothing_but_zeros_are_exact() -> None:
    q, k, v = (torch.randn(1, 1, 6, d, dtype=torch.float64) for d in (4, 4, 3))
    v = torch.cat([0 * v[:, :, :5], v[:, :, 5:] * 1e290], 2)
    out, certificate = avow.attend(q, k, v, method="sparse", causal=True)
    assert not out[:, :, :5].any() and not certificate.rows[..., :5].any()


def _misses_of_values_made_from_a_seed(seeds: int) -> int:
    """Bounds broken, of flat heads whose values lean on the numbers that a seed set again would draw."""
    broken = 0
    for seed in range(seeds):
        torch.manual_seed(seed)
        drawn = torch.rand(8192, dtype=torch.float64)
        leaning = (drawn < 0.5) == (torch.rand(8192, dtype=torch.float64) < 0.56)
        v = torch.where(leaning, 1.0, -1.0).double()[None, None, :, None]
        q, k = torch.zeros(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 8192, 16, dtype=torch.float64)
        torch.manual_seed(seed)
        out, certificate = avow.attend(q, k, v, method="sparse", drop=0.1, confidence=0.9)
        assert certificate.kind == "statistical" and INDEPENDENT in certificate.assumptions
        broken += float((out - v.mean()).abs()) > certificate.bound
    return broken


def test_values_made_from_a_seed_that_is_set_again_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _misses_of_values_made_from_a_seed(12) == 0
    monkeypatch.setattr(sys.modules["avow.attend"], "random_stream", lambda *_: None)
    assert _misses_of_values_made_from_a_seed(12) > 1  # draws from the caller's own stream
