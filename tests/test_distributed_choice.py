"""Where a tolerance is given, processes run the cheapest method that proves it: all of them the same one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from avow.attend import Attended
from avow.core import BoundEstimate, Problem, Sizes
from avow.distributed import Interconnect, attend
from avow.distributed.parallel_plan import Roofline, offers
from avow.distributed.planner import candidates
from avow.methods.exact import Exact
from avow.methods.low_rank import LowRank
from tests.helpers.processes import message, together
from tests.helpers.truth import judge

pytestmark = pytest.mark.processes

# How 300 tokens are shared.
ENDS = {2: (100, 300), 4: (0, 120, 121, 300)}
# Seconds of a launch, of an element and of an operation.
CHEAP, DEAR = [0.0, 0.0, 1e-14], [1.0, 1.0, 1.0]
# Links on which nobody waits.
LINK = Interconnect(1e15, 0.0)


def inputs(loud: float, causal: bool = False) -> Problem:
    """Queries and keys of few directions, so that landmarks may know them; louder ones they know less."""
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, heads, 300, 8, generator=draw) for heads in (4, 2, 2))
    q[..., 2:], k[..., 2:] = 0.01 * q[..., 2:], 0.01 * k[..., 2:]
    return Problem.of(loud * q, loud * k, v, causal=causal, enable_gqa=True)


def asked(
    p: Problem,
    tol: float | None,
    prices: dict[str, list[float]],
    shared: bool,
    rows: slice | None = None,
    **options: Any,
) -> Attended:
    """What this process gets of its share, where the first one says that this is what methods cost."""
    rank, count = dist.get_rank(), dist.get_world_size()
    start, end = (0, *ENDS[count])[rank : rank + 2]
    here = slice(start, end)
    q = p.q if shared else p.q[:, :, rows or here]
    # Others would choose exact attention.
    told = {f"{name}{form}": price for name, price in prices.items() for form in ("", "/causal")}
    told = {"exact": CHEAP, "exact/causal": CHEAP} if rank else told
    with mock.patch("avow.distributed.attend.own_rates", lambda device: told):
        given: dict[str, Any] = {
            "link": LINK,
            "generator": torch.Generator().manual_seed(2),
            "causal": p.causal,
        } | options
        return attend(q, p.k[:, :, here], p.v[:, :, here], tol=tol, shared_queries=shared, enable_gqa=True, **given)


SEEN = torch.ones(300, dtype=torch.bool)
SPARSE = {"exact": DEAR, "sparse": CHEAP}
LANDMARKS = {"exact": DEAR, "low_rank": CHEAP, "random_features": DEAR}
FEATURES = {"exact": DEAR, "low_rank": DEAR, "random_features": CHEAP}
# Name: problem, tolerance, prices, whether queries are shared, more words; and who answers, and why if it is exact.
CASES: dict[str, tuple[Problem, float | None, dict[str, list[float]], bool, dict[str, Any], str, str]] = {
    "landmarks": (inputs(0.7), 0.2, LANDMARKS, False, {}, "low_rank", ""),
    "causal landmarks": (inputs(0.7, causal=True), 0.2, LANDMARKS, False, {"link": None}, "low_rank", ""),
    "landmarks at a price": (inputs(0.7), 0.2, {"exact": CHEAP}, False, {}, "exact", "low_rank: costs more than exact"),
    "loud keys": (inputs(40.0), 0.2, LANDMARKS, False, {}, "exact", "low_rank: landmarks leave too much of these keys"),
    "hopeless": (inputs(0.7), 1e-3, LANDMARKS, False, {}, "exact", "low_rank: cannot prove 0.001"),
    "features": (inputs(0.05), 0.3, FEATURES, False, {"confidence": 0.9}, "random_features", ""),
    "unasked features": (inputs(0.05), 0.3, FEATURES, False, {}, "exact", "promises only with a confidence below 1"),
    "sparse": (inputs(3.0), 0.1, SPARSE, True, {}, "sparse", "of the tokens of all shards"),
    "sampled sparse": (inputs(3.0), 0.1, SPARSE, True, {"confidence": 0.99}, "sparse", "of the tokens of all shards"),
    "dear sparse": (inputs(3.0), 0.1, {"exact": CHEAP}, True, {}, "exact", "sparse: costs more than exact"),
    "causal sparse": (inputs(3.0, causal=True), 0.1, SPARSE, True, {}, "exact", ""),
    "masked": (inputs(0.7), 0.2, LANDMARKS, False, {"mask": SEEN}, "exact", "no other method has a form over shards"),
    "no tolerance": (inputs(0.7), None, LANDMARKS, False, {}, "exact", ""),
}


def ask() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {name: asked(*case[:4], **case[4]) for name, case in CASES.items()}
    # A guess that boasts is tried, and found out.
    with mock.patch.object(LowRank, "estimate_bound", lambda *given: BoundEstimate(0.0, "deterministic", False)):
        found["boasting"] = asked(inputs(40.0), 0.2, LANDMARKS, False)
    p = inputs(0.7)
    rows = slice(0, 150) if rank == 0 else slice(150, 300 if rank == 1 else 150)
    found["rows apart"] = asked(inputs(0.7, causal=True), 0.2, LANDMARKS, False, rows=rows)
    found["mistakes"] = {
        "link": message(lambda: asked(p, 0.1, LANDMARKS, False, link=Interconnect(1e9 * (1 + rank), 1e-5))),
        "parameter": message(lambda: asked(p, 0.1, LANDMARKS, False, rank=3)),
        "tolerance": message(lambda: asked(p, 1e-9, LANDMARKS, False)),
        "confidence": message(lambda: asked(p, 0.1, LANDMARKS, False, confidence=1.5)),
        "generator": message(lambda: asked(p, 0.1, LANDMARKS, False, generator=7)),
        "one generator": message(lambda: asked(p, 0.1, LANDMARKS, False, generator=7 if rank == 1 else None)),
    }
    return found


@pytest.fixture(scope="module", params=list(ENDS))
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(request.param, ask, tmp_path_factory.mktemp("choice"))


def joined(answers: list[Attended], shared: bool) -> tuple[Tensor, Tensor]:
    if shared:
        return answers[0].out, answers[0].certificate.rows
    return torch.cat([x.out for x in answers], -2), torch.cat([x.certificate.rows for x in answers], -1)


@pytest.mark.parametrize("name", CASES)
def test_all_processes_run_the_cheapest_method_that_keeps_the_tolerance(said: list[dict[str, Any]], name: str) -> None:
    p, tol, _, shared, _, method, reason = CASES[name]
    answers: list[Attended] = [one[name] for one in said]
    for _, certificate in answers:
        assert certificate.method == method or not certificate.rows.numel()
        assert tol is None or certificate.keeps(tol)
        assert reason in certificate.reason
    out, rows = joined(answers, shared)
    verdict = judge(Exact(), p, out, rows, None)
    assert verdict.broken == 0, verdict.story


def test_causal_rows_that_are_not_those_of_the_keys_beside_them_are_left_to_a_ring(said: list[dict[str, Any]]) -> None:
    p, answers = inputs(0.7, causal=True), [one["rows apart"] for one in said]
    out, rows = joined(answers, shared=False)
    assert judge(Exact(), p, out, rows, None).broken == 0
    for _, certificate in answers:
        assert certificate.method in ("exact", "nothing")
        assert certificate.reason.endswith("if causal rows are not those of the process's own keys")


def test_a_method_that_cannot_keep_its_word_is_followed_by_exact_attention(said: list[dict[str, Any]]) -> None:
    answers: list[Attended] = [one["boasting"] for one in said]
    for _, certificate in answers:
        assert certificate.method in ("exact", "nothing") and certificate.keeps(0.2)
        first, *others = certificate.reason.split("; ")
        assert first.startswith("low_rank: is below the ") and first.endswith(" it can prove")
        assert all(other.startswith("low_rank: is below the ") for other in others)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "link",
            "InputError: link at rank 1=Interconnect(bandwidth=2000000000.0, latency=1e-05) must be as at rank 0, ",
        ),
        ("parameter", "ParameterError: rank=3 belongs to a named method; add method='low_rank'"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("confidence", "ParameterError: confidence=1.5 must be above 0 and at most 1; try confidence=0.99"),
        ("generator", "ParameterError: generator=7 must be a torch.Generator; pass torch.Generator().manual_seed(0)"),
        ("one generator", "ParameterError: rank 1: generator=7 must be a torch.Generator; pass torch.Generator()"),
    ],
)
def test_all_processes_are_told_what_is_wrong(said: list[dict[str, Any]], name: str, words: str) -> None:
    if name == "link" and len(said) == 4:
        words = "InputError: link at rank "  # each of the four has another
    told = {one["mistakes"][name] for one in said}
    assert len(told) == 1 and words in told.pop()


@pytest.mark.parametrize("shared", [False, True])
def test_prices_are_those_of_the_plan_for_many_ranks(shared: bool) -> None:
    sizes, roof, link = Sizes(1, 8, 1, 4096, 4096, 64, 64), Roofline(1e12, 1e11), Interconnect(1e9, 1e-5)
    planned = {offer.strategy.name: offer.time.whole for offer in offers(sizes, 16, link, roof)}
    found = {one.method.name: one.seconds for one in candidates(sizes, 16, shared, 0.1, 1.0, link, roof)}
    exact = "exact (keys)" if shared else "exact (ring)"
    assert math.isclose(found["exact"], planned[exact])
    assert set(found) == ({"exact", "sparse"} if shared else {"exact", "low_rank", "random_features"})
    if shared:
        assert math.isclose(found["sparse"], planned["sparse"])
