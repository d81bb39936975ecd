"""Routers and programs: who reads whom, compiled into weights, with the smallest scale and the error of every hop."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from avow.errors import (
    AvowError,
    DtypeError,
    MissingPackage,
    NonFiniteError,
    ParameterError,
    RangeError,
    ShapeError,
    ToleranceUnreachable,
)
from avow.theory.constructions import Router, feature_map, program, project_out, route_by_weights, router
from tests.helpers.draws_heads import DRAWS, WEAKENED

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def error_of(made: Router) -> float:
    """The worst routed row by definition, in float64."""
    x = made.tokens.double()
    scores = (x @ made.W_Q.double().mT) @ (x @ made.W_K.double().mT).mT * made.scale
    values = x @ made.W_V.double().mT
    received = torch.softmax(scores, -1) @ values
    intended = {i: (x[list(sources)] @ made.carry.double().mT).mean(0) for i, sources in made.routes.items()}
    worst = max(float((received[i] - wanted).norm()) for i, wanted in intended.items())
    return worst / float(values.norm(dim=1).amax())


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0, 3.0, 5.0])
def test_the_worked_example_has_exactly_these_errors(beta: float) -> None:
    made = route_by_weights(beta)
    u = beta * torch.eye(4, dtype=torch.float64)
    a, b, c, d = u
    torch.testing.assert_close(made.tokens, torch.stack((d + b, a, c + b)))
    torch.testing.assert_close(made.W_V, (torch.outer(b, b) - torch.outer(c, c)) / beta**2)
    torch.testing.assert_close(made.W_Q, (torch.outer(c, d) + torch.outer(d, a)) / beta**2)
    torch.testing.assert_close(made.W_K, torch.eye(4, dtype=torch.float64))
    received = made.as_module()(made.tokens)
    weight = 1 / (math.exp(beta**2) + 2)
    assert float((received[0] - (b - c)).norm()) == pytest.approx(math.sqrt(5) * beta * weight, rel=1e-4)
    assert float((received[1] - b).norm()) == pytest.approx(math.sqrt(2) * beta * weight, rel=1e-4)
    proof = made.verify()
    assert proof and proof.achieved == pytest.approx(math.sqrt(2.5) * weight, rel=1e-10)
    assert not replace(made, eps=made.eps * (1 - 1e-9)).verify()


def test_without_weights_a_token_copies_itself() -> None:
    beta = 2.0
    plain = replace(route_by_weights(beta), W_Q=torch.eye(4, dtype=torch.float64))
    weights = plain.picture().rows[1]
    own = math.exp(beta**2) / (math.exp(beta**2) + 2)
    assert float(str(weights[2])) == pytest.approx(own)  # headings: token, 0, 1, 2, routed to
    assert not plain.verify()


def test_the_router_finds_the_worked_example_by_itself() -> None:
    example = route_by_weights(2.0)
    features = torch.eye(4, dtype=torch.float64)
    carry = feature_map(features, (0.0, 1.0, -1.0, 0.0))
    torch.testing.assert_close(carry, example.W_V)
    made = router(example.tokens, {0: 2, 1: 0}, example.eps, carry=carry)
    assert made.verify() and made.is_smallest()
    # Both put β² on the source and 0 elsewhere: W_Q scores 1 there, so the scale is β².
    assert made.scale == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ring_is_routed_in_every_type(dtype: torch.dtype) -> None:
    tokens = torch.randn(6, 9, dtype=torch.float64).to(dtype)
    made = router(tokens, {i: (i + 1) % 6 for i in range(6)}, 0.01)
    proof = made.verify()
    assert proof and made.is_smallest() and made.W_Q.dtype == dtype
    assert error_of(made) <= proof.achieved + 1e-12
    assert error_of(made) == pytest.approx(0.01, rel=1e-6)
    assert not replace(made, scale=made.scale * 0.999).verify()


def test_the_smallest_scale_is_the_one_in_closed_form() -> None:
    n, eps = 7, 1e-3
    made = router(torch.eye(n, dtype=torch.float64), {0: 3, 2: (1, 4)}, eps)
    needed = []
    for k in (1, 2):
        # ‖mean of the others − mean of the sources‖ for orthonormal values.
        apart = math.sqrt(1 / (n - k) + 1 / k)
        needed.append(math.log((n - k) * (apart / eps - 1) / k))
    assert made.scale == pytest.approx(max(needed), rel=1e-9)


@pytest.mark.parametrize(("size", "dtype"), [(1e-150, torch.float64), (1e-18, torch.float32), (1e15, torch.float32)])
def test_tiny_and_huge_tokens_are_routed_alike(size: float, dtype: torch.dtype) -> None:
    tokens = torch.randn(4, 6, dtype=torch.float64)
    plain = router(tokens, {0: 1, 1: (2, 3)}, 0.01)
    made = router((size * tokens).to(dtype).requires_grad_(), {0: 1, 1: (2, 3)}, 0.01)
    assert made.verify() and made.is_smallest()
    assert made.scale == pytest.approx(plain.scale, rel=1e-4)
    assert not made.W_Q.requires_grad
    received = made.as_module()(made.tokens).double() / size
    torch.testing.assert_close(received, plain.as_module()(tokens), rtol=0, atol=1e-4)


def test_several_sources_are_averaged_and_signs_are_carried() -> None:
    features = torch.randn(3, 8, dtype=torch.float64)
    carry = feature_map(features, (1.0, -1.0, 0.0))
    torch.testing.assert_close(carry @ features[0], features[0])
    torch.testing.assert_close(carry @ features[1], -features[1])
    torch.testing.assert_close(carry @ features[2], torch.zeros(8, dtype=torch.float64))
    tokens = torch.randn(5, 8, dtype=torch.float64)
    tokens[1] += features[0] + features[1]
    made = router(tokens, {0: (1, 2), 4: 3}, 1e-6, carry=carry)
    assert made.verify()
    received = made.as_module()(tokens)
    unit = float((tokens @ carry.mT).norm(dim=1).amax())
    assert float((received[0] - carry @ (tokens[1] + tokens[2]) / 2).norm()) <= 1.01e-6 * unit
    assert float((received[4] - carry @ tokens[3]).norm()) <= 1.01e-6 * unit


def test_a_narrower_map_delivers_coordinates() -> None:
    tokens = torch.randn(4, 6, dtype=torch.float64)
    spans = project_out(tokens[:2].mT.contiguous(), tokens[2:].mT.contiguous())
    made = router(tokens, {3: 0, 2: 1}, 1e-4, carry=spans.coordinates)
    received = made.as_module()(tokens)
    assert made.verify() and received.shape == (4, 2)
    torch.testing.assert_close(received[[3, 2]], torch.eye(2, dtype=torch.float64), atol=2e-4, rtol=0)


def test_a_token_left_free_reads_all_evenly() -> None:
    made = router(torch.randn(4, 4, dtype=torch.float64), {0: 1}, 0.01)
    for row in made.picture().rows[1:]:
        assert row[5] == "free"
        assert [float(str(w)) for w in row[1:5]] == pytest.approx([0.25] * 4)


def test_more_tokens_than_dimensions_are_routed_where_scores_can_tell_them_apart() -> None:
    tokens = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
    made = router(tokens, {0: 1, 1: 2, 2: 3, 3: 0}, 0.01)
    assert made.verify() and made.is_smallest()
    assert error_of(made) <= 0.01 * (1 + 1e-9)


def test_dependent_tokens_average_their_sources_to_rounding() -> None:
    tokens = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, -1]], dtype=torch.float64)
    made = router(tokens, {0: (1, 2)}, 1e-9)
    assert made.verify()


def test_a_source_between_others_cannot_be_read() -> None:
    tokens = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]], dtype=torch.float64)
    text = (
        "router: tokens=3 of rank 2 are linearly dependent, and no bilinear score puts every source above the rest "
        "(the widest margin is 0; the routes of tokens [0] stand against it); "
        "give each token an address feature of its own, or drop a route"
    )
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        router(tokens, {0: 2}, 0.01)
    addressed = torch.cat((tokens, torch.eye(3, dtype=torch.float64)), 1)
    assert router(addressed, {0: 2}, 0.01).verify()


def test_equals_of_a_source_are_sources() -> None:
    tokens = torch.eye(4, dtype=torch.float64)
    tokens[1] = tokens[0]
    made = router(tokens, {3: 0}, 1e-5)
    assert made.verify()


def test_a_type_too_coarse_for_the_tokens_says_what_it_reaches() -> None:
    tokens = torch.randn(6, 6, dtype=torch.float64)
    tokens[5] = tokens[0] + 0.01 * tokens[5]
    routes = {i: (i, (i + 1) % 6) for i in range(6)}
    with pytest.raises(
        ToleranceUnreachable, match=r"eps=1e-06 cannot be kept with weights rounded to bfloat16"
    ) as refused:
        router(tokens.bfloat16(), routes, 1e-6)
    assert 1e-6 < refused.value.best < 2
    assert router(tokens, routes, 1e-6).verify()


CHAIN = [{1: 0}, {2: 1}, {3: 2}]


def addressed_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Four tokens, each an address and a content, with the maps that keep one or the other, in no particular basis."""
    basis = torch.eye(8, dtype=torch.float64) + 0.2 * torch.randn(8, 8, dtype=torch.float64)
    addresses, contents = basis[:, :4], basis[:, 4:]
    keep, carry = project_out(addresses, contents).projection, project_out(contents, addresses).projection
    return (addresses + contents @ torch.randn(4, 4, dtype=torch.float64)).mT.contiguous(), keep, carry


def test_three_hops_carry_a_content_from_the_first_token_to_the_last() -> None:
    tokens, keep, carry = addressed_tokens()
    made = program(tokens, CHAIN, 1e-3, carry=carry, residual=keep)
    proof = made.verify()
    assert proof and proof.achieved < made.bound <= 1e-3
    wanted = made.intended()
    torch.testing.assert_close(wanted[3], keep @ tokens[3] + carry @ tokens[0])
    torch.testing.assert_close(wanted[0], tokens[0])
    out = made.as_module()(tokens)
    off = float((out - wanted).norm(dim=1).amax() / wanted.norm(dim=1).amax())
    assert off == pytest.approx(proof.achieved, rel=1e-6)
    # The content really travelled: the last token now carries the first one's, not its own.
    assert float((carry @ (out[3] - tokens[0])).norm()) <= 1e-3 * float(wanted.norm(dim=1).amax())
    assert float((carry @ (out[3] - tokens[3])).norm()) > 0.1
    assert len(made.tensors()) == 13 and len(made.picture().rows) == 3


@pytest.mark.parametrize("residual", [True, False], ids=["added", "overwritten"])
def test_programs_add_to_a_token_or_overwrite_it(residual: bool) -> None:
    tokens = torch.randn(4, 8, dtype=torch.float64)
    made = program(tokens, CHAIN, 1e-4, residual=residual)
    assert made.verify() and made.bound <= 1e-4
    by_hand = tokens
    for destination, source in ((1, 0), (2, 1), (3, 2)):
        sources = [source if i == destination else i for i in range(4)]
        by_hand = by_hand[sources] + (by_hand if residual else 0)
    torch.testing.assert_close(made.intended(), by_hand)
    if not residual:
        torch.testing.assert_close(made.intended()[3], tokens[0])


def test_single_sources_are_read_to_any_tolerance_even_with_coarse_weights() -> None:
    assert program(torch.eye(4).bfloat16(), CHAIN, 1e-6, residual=False).verify()


def test_a_program_with_one_weak_hop_is_caught() -> None:
    tokens, keep, carry = addressed_tokens()
    made = program(tokens, CHAIN, 1e-3, carry=carry, residual=keep)
    for hop in range(3):
        routers = list(made.routers)
        routers[hop] = replace(routers[hop], scale=routers[hop].scale / 2)
        assert not replace(made, routers=tuple(routers)).verify()


def test_averages_travel_too() -> None:
    tokens, keep, carry = addressed_tokens()
    made = program(tokens, [{1: (0, 2)}, {3: 1}], 1e-2, carry=carry, residual=keep)
    assert made.verify()
    torch.testing.assert_close(made.intended()[3], keep @ tokens[3] + carry @ (tokens[0] + tokens[2]) / 2)


@pytest.mark.parametrize("kind", sorted(DRAWS))
def test_random_constructions_keep_their_word_and_weakened_ones_do_not(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        made = DRAWS[kind](generator)
        proof = made.verify()
        assert proof, str(proof)
        assert not WEAKENED[kind](made).verify(), made.promise
        if isinstance(made, Router):
            assert made.is_smallest()


EYE = torch.eye(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: router(EYE, {0: 1}, 0.0), ParameterError, "router: eps=0.0 must lie in (0, 1); try eps=0.01"),
        (lambda: router(EYE, {0: 1}, math.nan), ParameterError, "router: eps=nan must lie in (0, 1)"),
        (lambda: router(EYE, {}, 0.1), ParameterError, "router: routes={} must route a token; try {0: 1}"),
        (lambda: router(EYE, {0: 3}, 0.1), ParameterError, "routes=0: 3 must name tokens 0..2, each source once"),
        (lambda: router(EYE, {0: []}, 0.1), ParameterError, "routes=0: [] must name tokens 0..2"),
        (lambda: router(EYE, {0: (1, 1)}, 0.1), ParameterError, "routes=0: (1, 1) must name tokens 0..2"),
        (lambda: router(EYE / 0, {0: 1}, 0.1), NonFiniteError, "router: tokens[0]=[inf, nan, nan] holds a number"),
        (
            lambda: router(EYE * 1e-310, {0: 1}, 0.1),
            RangeError,
            "so small, or so near dependent, carry the weights out of float64; scale them towards 1, or use",
        ),
        (lambda: router(EYE[0], {0: 1}, 0.1), ShapeError, "router: tokens=(3,) must be a matrix"),
        (lambda: router(EYE[:0], {0: 1}, 0.1), ShapeError, "router: tokens=(0, 3) must be a matrix of at least"),
        (lambda: router(EYE.long(), {0: 1}, 0.1), DtypeError, "router: tokens=torch.int64 must be of a floating type"),
        (
            lambda: router(EYE, {0: 1}, 0.1, carry=EYE[:, :2]),
            ShapeError,
            "router: carry=(3, 2) must be (e, 3), as wide as a token; transpose it?",
        ),
        (lambda: router(EYE, {0: 1}, 0.1, carry=0 * EYE), ParameterError, "must carry something of some token"),
        (lambda: feature_map(EYE, (1.0,)), ParameterError, "gains=(1.0,) must be a finite number for each of the 3"),
        (
            lambda: feature_map(EYE[[0, 0]], (1.0, 2.0)),
            ParameterError,
            "feature_map: features=(2, 3) are not proved linearly independent; drop one of them",
        ),
        (lambda: route_by_weights(0.0), ParameterError, "route_by_weights: beta=0.0 must be above 0 and finite"),
        (lambda: program(EYE, [], 0.1), ParameterError, "program: hops=[] must hold a hop; give a mapping"),
        (lambda: program(EYE, [{0: 1}], 2.0), ParameterError, "program: eps=2.0 must lie in (0, 1)"),
        (lambda: program(EYE, [{0: 5}], 0.1), ParameterError, "routes=0: 5 must name tokens 0..2"),
        (lambda: program(EYE, [{5: 0}], 0.1), ParameterError, "routes=5: 0 must name tokens 0..2"),
        (
            lambda: program(EYE, [{0: 1}], 0.1, carry=EYE[:2]),
            ShapeError,
            "program: carry=(2, 3) must be (3, 3); a hop maps tokens to tokens",
        ),
        (
            lambda: program(torch.randn(4, 4).bfloat16(), [{1: (0, 2)}, {3: 1}], 1e-6),
            ToleranceUnreachable,
            "program: eps=1e-06 is below what 2 hops in bfloat16 can promise; use float64 or fewer hops",
        ),
        (lambda: router(torch.eye(3), 7, 0.1), ParameterError, "router: routes=7 must be a mapping; pass a dict"),
        (lambda: router(torch.eye(3), {0: 0.5}, 0.1), ParameterError, "routes[0]=0.5 must be a whole number or a"),
        (lambda: router(torch.eye(3), {0: True}, 0.1), ParameterError, "routes[0]=True must be a whole number or a"),
        (lambda: program(torch.eye(3), [0.5], 0.1), ParameterError, "program: hops[0]=0.5 must be a mapping; pass a"),
        (lambda: route_by_weights(10**400), ParameterError, "must be above 0 and finite; try beta=3"),
        (lambda: feature_map(torch.eye(2), (1, 10**400)), ParameterError, "must be a finite number for each of the 2"),
        (lambda: feature_map(torch.zeros(0, 0), ()), ShapeError, "feature_map: features=(0, 0) must be a matrix of at"),
    ],
)
def test_what_cannot_be_routed_is_refused_in_words(make, error: type[AvowError], text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_without_scipy_dependent_tokens_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        MissingPackage, match=r"scipy is not installed; it is needed to route .*; pip install 'avow\[rigor\]'"
    ):
        router(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), {0: 1}, 0.1)
