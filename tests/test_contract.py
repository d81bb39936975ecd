"""The nouns: every call has one canonical form, and a certificate can be read by people and machines."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import avow
from avow.core import Certificate, Cost, Kind, Problem, Sizes
from avow.errors import InputError, ParameterError, ShapeError


def tensors(*lead: int, n: int = 5, s: int = 7, d: int = 4, e: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, n, d), torch.randn(*lead, s, d), torch.randn(*lead, s, e)


@pytest.mark.parametrize(
    ("lead", "canonical"),
    [((), (1, 1)), ((3,), (1, 3)), ((2, 3), (2, 3)), ((2, 4, 3), (8, 3)), ((2, 1, 4, 3), (8, 3))],
    ids=str,
)
def test_any_leading_axes_become_two_and_come_back(lead: tuple[int, ...], canonical: tuple[int, int]) -> None:
    q, k, v = tensors(*lead)
    p = Problem.of(q, k, v)
    assert p.q.shape == (*canonical, 5, 4) and p.k.shape == (*canonical, 7, 4) and p.v.shape == (*canonical, 7, 3)
    assert p.leading == lead
    out, certificate = avow.attend(q, k, v)
    assert out.shape == (*lead, 5, 3) and certificate.rows.shape == (*lead, 5)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("shape", ["s", "n s", "1 s", "n 1", "full", "heads"])
def test_masks_broadcast_as_they_do_in_pytorch(lead: tuple[int, ...], shape: str) -> None:
    q, k, v = tensors(*lead)
    sizes = {
        "s": (7,),
        "n s": (5, 7),
        "1 s": (1, 7),
        "n 1": (5, 1),
        "full": (*lead, 5, 7),
        "heads": (*(1 for _ in lead[:-1]), *lead[-1:], 1, 7),
    }[shape]
    seen = torch.rand(sizes) < 0.7
    seen[..., 0] = True
    numbers = torch.randn(sizes)
    expanded = [x.expand(*lead, 5, 7) for x in (seen, numbers)]
    for mask, whole in zip((seen, numbers), expanded, strict=True):
        out = avow.attend(q, k, v, mask=mask).out
        torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, attn_mask=whole))


def test_minus_infinity_hides_and_numbers_add() -> None:
    q, k, v = tensors(2, 3)
    mask = torch.tensor([0.5, -math.inf, -2.0, 0.0, -math.inf, 1.0, -1e9])
    p = Problem.of(q, k, v, mask=mask)
    assert p.allowed is not None and p.bias is not None
    assert p.allowed.flatten().tolist() == [True, False, True, True, False, True, True]
    assert p.bias.flatten().tolist() == [0.5, 0.0, -2.0, 0.0, 0.0, 1.0, -1e9]
    finite = Problem.of(q, k, v, mask=mask.clamp(min=-1e9))
    assert finite.allowed is None and finite.bias is not None
    flags = Problem.of(q, k, v, mask=mask > -math.inf)
    assert flags.bias is None and flags.allowed is not None


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (None, "none"),
        (torch.ones(7, dtype=torch.bool), "keys"),
        (torch.zeros(2, 1, 1, 7), "keys"),
        (torch.ones(5, 7, dtype=torch.bool), "full"),
        (torch.ones(5, 1), "full"),
    ],
)
def test_a_mask_is_of_keys_or_full(mask: Tensor | None, kind: str) -> None:
    p = Problem.of(*tensors(2, 3), mask=mask)
    assert p.mask_kind == p.sizes.mask == kind
    assert p.sizes.biased == (mask is not None and mask.dtype != torch.bool)


def test_sizes_say_all_that_a_cost_depends_on() -> None:
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 8)
    shared = Problem.of(q, k, v, causal=True, enable_gqa=True).sizes
    assert shared == Sizes(2, 6, 3, 5, 7, 4, 8, torch.float32, "cpu", True)
    assert shared.linear_key_heads == 3 and shared.item == 4
    own = Problem.of(q, k, v, enable_gqa=True, mask=torch.ones(1, 6, 1, 7, dtype=torch.bool)).sizes
    assert own.own_masks and own.linear_key_heads == 6


@pytest.mark.parametrize(("queries", "keys", "grown"), [(7, 7, 100), (1, 7, 1), (5, 7, 5), (1, 1, 1)])
def test_queries_grow_with_the_keys_only_where_there_are_as_many(queries: int, keys: int, grown: int) -> None:
    longer = Sizes(2, 6, 3, queries, keys, 4, 8).with_keys(100)
    assert (longer.queries, longer.keys, longer.heads) == (grown, 100, 6)


def test_the_scale_is_one_over_the_root_of_the_dimension_unless_said() -> None:
    q, k, v = tensors(2, 3)
    assert Problem.of(q, k, v).scale == 0.5 and Problem.of(q, k, v).default_scale
    assert Problem.of(q, k, v, scale=0.5).scale == 0.5 and not Problem.of(q, k, v, scale=0.5).default_scale


def test_an_rbf_kernel_is_a_scale_and_a_bias() -> None:
    q, k, v = tensors(2, 3)
    p = Problem.of(q, k, v, kernel="rbf", sigma=2.0, mask=torch.full((7,), 0.25))
    assert p.scale == 0.5 and p.bias is not None and p.bias.dtype == torch.float64
    torch.testing.assert_close(p.bias[:, :, 0], 0.25 - 0.25 * k.double().square().sum(-1))
    with pytest.raises(ParameterError, match=r'scale=1.0 has no meaning for kernel="rbf"; set sigma instead'):
        Problem.of(q, k, v, kernel="rbf", sigma=1.0, scale=1.0)


def test_inputs_in_canonical_form_are_not_copied() -> None:
    q, k, v = tensors(2, 3)
    p = Problem.of(q, k, v)
    assert p.q is q and p.k is k and p.v is v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 1, 5, 7), (1, 6, 1, 7)], ids=str)
def test_some_rows_of_one_head_are_that_part_of_the_answer(causal: bool, shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 8)
    p = Problem.of(q, k, v, mask=torch.randn(shape), causal=causal, enable_gqa=True)
    whole = avow.all_methods()["exact"]().reference(p)
    index = torch.tensor([4, 0, 2])
    for b, h in ((0, 0), (1, 5), (1, 2)):
        part = p.head(b, h, h // 2).rows(index)
        torch.testing.assert_close(avow.all_methods()["exact"]().reference(part)[0, 0], whole[b, h, index])


def test_detached_problems_hold_the_same_numbers_outside_autograd() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(2, 3))
    p = Problem.of(q, k, v, mask=torch.zeros(7, requires_grad=True)).detached()
    assert p.bias is not None
    assert not any(x.requires_grad for x in (p.q, p.k, p.v, p.bias)) and torch.equal(p.q, q)


def test_costs_add_as_one_after_the_other() -> None:
    assert Cost(1, 2, 3, 40) + Cost(10, 20, 30, 4) == Cost(11, 22, 33, 40)


def certificate(kind: Kind = "deterministic", bound: float = 1.25e-3, **more: object) -> Certificate:
    rows = torch.tensor([[bound, 1e-3]], dtype=torch.float64)
    parts = {"method": "low_rank", "parameters": {"rank": 8}, "target": "softmax attention"} | more
    return Certificate(kind=kind, bound=bound, rows=rows, **parts)  # type: ignore[arg-type]


UNITS = "1.25e-03 of softmax attention, relative to the longest value (2.00e-02 relative to the answer)"


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("deterministic", f"every row is within {UNITS}"),
        ("statistical", f"each row, with probability 0.9, is within {UNITS}"),
        ("sampled", f"0.99 of the rows, with probability 0.9, are within {UNITS}"),
        ("none", "no promise: norms are too large"),
    ],
)
def test_a_certificate_reads_as_sentences(kind: Kind, first: str) -> None:
    made = certificate(
        kind,
        confidence=0.9,
        coverage=0.99,
        assumptions=("exp is right to 64 ulp",),
        reason="norms are too large",
        cost=Cost(12345, 1, 1, 2**20),
        relative=0.02,
    )
    lines = str(made).splitlines()
    assert lines[0] == first
    assert lines[1] == "  method   low_rank (rank=8)"
    assert lines[2] == f"  kind     {kind}, rounding included"
    assert ("  because  norms are too large" in lines) == (kind != "none")
    assert "  assumes  exp is right to 64 ulp" in lines
    assert lines[-1] == "  cost     1.23e+04 flops, 1.0 MiB at the peak"


def test_a_bound_on_another_mechanism_says_so_in_its_first_line() -> None:
    first = str(certificate(target="separable attention")).splitlines()[0]
    assert "1.25e-03 of separable attention, which is not softmax attention, relative to" in first
    assert "which is not" not in str(certificate())


def test_what_is_not_proved_relative_to_the_answer_is_said() -> None:
    said = "1.25e-03 of softmax attention, relative to the longest value (relative to the answer nothing is proved)"
    assert said in str(certificate())


def test_rounding_that_is_left_out_is_said() -> None:
    assert "rounding not included" in str(certificate(rounding=False))


def test_a_certificate_keeps_what_it_bounds() -> None:
    made = certificate()
    assert made.keeps(1.25e-3) and not made.keeps(1.24e-3)
    assert not certificate("none").keeps(10.0) and not certificate(bound=math.nan).keeps(10.0)


def test_a_certificate_keeps_both_limits_or_none() -> None:
    made = certificate(relative=0.02)
    assert made.keeps(rtol=0.02) and not made.keeps(rtol=0.019)
    assert made.keeps(1.25e-3, 0.02) and not made.keeps(1.24e-3, 0.02) and not made.keeps(1.25e-3, 0.019)
    assert not certificate("none", relative=0.02).keeps(rtol=1.0)
    assert not certificate(relative=math.nan).keeps(rtol=1.0)
    assert not certificate().keeps(rtol=1e300)  # nothing is known in that unit


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({}, "tol, rtol=None, None must not both be left out; try tol=1e-2 or rtol=1e-2"),
        ({"rtol": math.nan}, "rtol=nan must be a number; try rtol=1e-2"),
        ({"tol": math.nan, "rtol": 1.0}, "tol=nan must be a number; try tol=1e-2"),
    ],
    ids=str,
)
def test_limits_that_are_none_are_refused(limits: dict[str, float], text: str) -> None:
    with pytest.raises(ParameterError, match=f"^{re.escape(text)}$"):
        certificate(relative=0.02).keeps(**limits)


@pytest.mark.parametrize("bound", [1.25e-3, math.inf])
def test_json_brings_a_certificate_back(bound: float) -> None:
    own = {"relative": 8 * bound, "relative_rows": torch.tensor([[8 * bound, 0.0]], dtype=torch.float64)}
    made = certificate(bound=bound, assumptions=("a", "b"), cost=Cost(1, 2, 3, 4), reason="because", **own)
    text = made.to_json()
    plain = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert plain["bound"] == (bound if math.isfinite(bound) else "inf")
    assert plain["relative"] == (8 * bound if math.isfinite(bound) else "inf")
    assert Certificate.from_json(text) == made
    assert Certificate.from_json(text) != dataclasses.replace(made, bound=1.0)
    assert Certificate.from_json(text) != dataclasses.replace(made, rows=made.rows * 2)
    assert Certificate.from_json(text) != dataclasses.replace(made, relative=1.0)
    assert Certificate.from_json(text) != dataclasses.replace(made, relative_rows=made.relative_rows + 1)


def test_a_certificate_of_before_there_was_a_second_unit_promises_nothing_in_it() -> None:
    plain = json.loads(certificate(relative=0.02).to_json())
    del plain["relative"], plain["relative_rows"]
    old = Certificate.from_json(json.dumps(plain))
    assert old.keeps(1.25e-3) and not old.keeps(rtol=1e300)
    assert old.relative == math.inf and torch.equal(old.relative_rows, torch.full((1, 2), math.inf).double())
    assert Certificate.from_json(old.to_json()) == old


def test_bounds_of_rows_have_one_shape_in_both_units() -> None:
    text = r"shape of relative_rows=(3,) must be that of rows, (1, 2); change both, or neither"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        certificate(relative_rows=torch.zeros(3))


def test_json_may_leave_the_rows_out() -> None:
    made = certificate(relative=0.02)
    assert not {"rows", "relative_rows"} & json.loads(made.to_json(rows=False)).keys()
    short = Certificate.from_json(made.to_json(rows=False))
    assert (short.bound, short.relative) == (made.bound, 0.02)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kind": "certain"}, "its kind is 'certain'"),
        ({"kind": []}, "its kind is []"),
        ({"bound": -1.0}, "its bound is not a bound, or below that of a row"),
        ({"bound": "nan"}, "its bound is not a bound, or below that of a row"),
        ({"bound": 0.0}, "its bound is not a bound, or below that of a row"),
        ({"bound": None}, "TypeError: "),
        ({"confidence": 2}, "its confidence or coverage is not between 0 and 1"),
        ({"rounding": "yes"}, "its confidence or coverage is not between 0 and 1"),
        ({"method": 3}, "method, target, reason or assumptions are not strings"),
        ({"parameters": []}, "method, target, reason or assumptions are not strings"),
        ({"assumptions": [1]}, "method, target, reason or assumptions are not strings"),
        ({"rows": {"shape": [7], "values": [0.1]}}, "RuntimeError: "),
        ({"rows": {"shape": [1], "values": ["x"]}}, "ValueError: "),
        ({"rows": {"shape": [1, 2], "values": [-0.1, 0]}}, "its bound is not a bound, or below that of a row"),
        ({"cost": {"flops": 1}}, "TypeError: "),
        (
            {"cost": {"flops": "1", "pointwise": 1, "launches": 1, "peak_bytes": 1}},
            "its cost is not made of finite numbers",
        ),
        ({"more": 1}, "TypeError: "),
        ({"relative": -1.0}, "its relative bound is not a bound"),
        ({"relative": "nan"}, "its relative bound is not a bound"),
        ({"relative": 1.0}, "its relative bound is not a bound, or below that of a row"),
        ({"relative_rows": {"shape": [1, 2], "values": [0, -1]}}, "its relative bound is not a bound"),
        ({"relative_rows": {"shape": [2], "values": [0, 1]}}, "ShapeError: "),
    ],
    ids=str,
)
def test_what_no_certificate_says_is_refused(changed: dict[str, object], why: str) -> None:
    plain = json.loads(certificate(cost=Cost(1, 2, 3, 4)).to_json()) | changed
    with pytest.raises(InputError, match=re.escape(f"is not a certificate ({why}")):
        Certificate.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, None, 3, {"bound": 0.1}])
def test_what_is_no_certificate_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"is not a certificate .*; pass what Certificate\.to_json wrote"):
        Certificate.from_json(text)


def test_a_certificate_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate().bound = 0.0  # type: ignore[misc]
    assert certificate() != "a certificate"
