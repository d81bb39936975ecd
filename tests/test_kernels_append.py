"""Tokens written by the kernel of a cache: where they belong, measured and sketched as the plain code does it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.kernels.append_tokens import NO_ROOM, NOT_FINITE, OUT_OF_RANGE, TokenStore, append
from avow.numerics.sketch import GROUP, Sketch, sketched, unpacked
from tests.helpers.stores import CAPACITY, blank, drawn

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def check(store: TokenStore, k: Tensor, v: Tensor) -> None:
    """Whether a store holds these tokens and bounds everything it says of them."""
    keys, values = (x.flatten(0, 1) for x in (k, v))
    s = keys.shape[1]
    assert store.used.tolist() == [s] * len(keys) and store.flags.tolist() == [0] * len(keys)
    assert torch.equal(store.k[:, :s], keys) and torch.equal(store.v[:, :s], values)
    true = torch.linalg.vector_norm(values.double(), dim=-1)
    assert bool((store.norms[:, :s].double() >= true).all())
    assert bool((store.norms[:, :s].double() <= true * (1 + 1e-6)).all())
    assert bool((store.longest >= torch.linalg.vector_norm(keys.double(), dim=-1).amax(-1)).all())
    assert torch.equal(store.extremes, torch.stack(store.norms[:, :s].double().aminmax(dim=-1), -1))
    assert bool((store.most <= true.amax(-1)).all()) and bool((store.most >= true.amax(-1) * (1 - 1e-5)).all())
    c = s // GROUP
    assert bool((store.codes[:, c:] == 255).all() & store.scale[:, c:].isnan().all())
    codes = unpacked(store.codes[:, :c], 4).double()
    scale, zero = (x[:, :c].double().unsqueeze(2) for x in (store.scale, store.zero))
    whole = keys[:, : c * GROUP].double().unflatten(1, (c, GROUP)) / store.size[:, None, None, None]
    lost = whole - (zero + scale * codes)
    weights = store.metric.double()[:, None, None]
    assert bool((store.radius[:, :c].double() >= (lost.square() / weights).sum(-1).sqrt()).all())
    far = torch.linalg.vector_norm(zero.abs() + 15 * scale, dim=-1).squeeze(-1)
    assert bool((store.reach[:, :c].double() >= far).all())


def plain(store: TokenStore, k: Tensor) -> Sketch:
    """The sketch that plain code makes with the same metric and sizes."""
    lead = k.shape[:2]
    return sketched(k, 4, store.metric.unflatten(0, lead), store.size.unflatten(0, lead))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parts", [(1,) * 66, (70, 1, 58, 1), (200, 20), (130, 64, 3), (5, 60, 63)])
def test_tokens_that_come_in_any_parts_are_measured_and_sketched(parts: tuple[int, ...], dtype: torch.dtype) -> None:
    store, tokens = blank(dtype=dtype), [drawn(part, dtype=dtype) for part in parts]
    if parts[0] > GROUP:  # many tokens at once come with their sizes
        store.size.fill_(8.0)
        store.metric.copy_(torch.rand(2, 32) + 0.5)
    for k, v in tokens:
        append(store, k, v)
    k, v = (torch.cat(x, 2) for x in zip(*tokens, strict=True))
    check(store, k, v)
    other = plain(store, k)
    c = other.codes.shape[2]
    for name in ("scale", "zero"):
        assert torch.equal(getattr(store, name)[:, :c], getattr(other, name).flatten(0, 1))
    apart = unpacked(store.codes[:, :c], 4).int() - unpacked(other.codes.flatten(0, 1), 4).int()
    assert float((apart != 0).double().mean()) < 1e-2 and int(apart.abs().max()) <= 1  # ties are rounded elsewhere


def test_sequences_of_a_batch_may_take_different_numbers_of_tokens() -> None:
    store, counts = blank(b=2, g=1), torch.tensor([70, 3], dtype=torch.int32)
    store.size.fill_(8.0)
    k, v = drawn(70, b=2, g=1)
    append(store, k, v, counts=counts)
    assert store.used.tolist() == [70, 3]
    assert torch.equal(store.k[1, :3], k[1, 0, :3]) and bool(store.k[1, 3:].isnan().all())
    assert bool((store.codes[1] == 255).all()) and not bool(store.scale[0, 0].isnan().any())


@pytest.mark.parametrize(
    ("where", "value", "flag"),
    [("k", math.nan, NOT_FINITE), ("v", math.inf, NOT_FINITE), ("v", 1e-32, OUT_OF_RANGE), ("v", 1e32, OUT_OF_RANGE)],
)
@pytest.mark.parametrize("many", [1, 200])
def test_tokens_without_a_bound_are_flagged_and_leave_none(where: str, value: float, flag: int, many: int) -> None:
    store = blank()
    store.size.fill_(8.0)
    k, v = drawn(many)
    {"k": k, "v": v}[where][:, 1, -1] = value
    append(store, k, v)
    assert store.flags.tolist() == [0, flag] and store.used.tolist() == [many, many]
    assert store.most.isnan().tolist() == [False, True]
    append(store, *drawn(1))
    assert store.flags.tolist() == [0, flag] and store.most.isnan().tolist() == [False, True]


def test_tokens_without_room_are_flagged_and_not_written() -> None:
    store = blank()
    store.size.fill_(8.0)
    append(store, *drawn(CAPACITY - 1))
    for flags in ([0, 0], [NO_ROOM] * 2):
        append(store, *drawn(1))
        assert store.used.tolist() == [CAPACITY] * 2 and store.flags.tolist() == flags


def test_keys_beyond_a_sketch_are_always_read() -> None:
    store = blank(dtype=torch.float32)
    store.size.fill_(1.0)
    k, v = drawn(GROUP, dtype=torch.float32)
    k[:, 0] *= 1e32
    append(store, k, v)
    assert store.reach[:, 0].isinf().tolist() == [True, False] and bool((store.scale[0, 0] == 0).all())


def test_values_of_zero_have_length_zero() -> None:
    store = blank()
    k, v = drawn(1)
    append(store, k, torch.zeros_like(v))
    assert store.most.tolist() == [0.0, 0.0] and store.norms[:, 0].tolist() == [0.0, 0.0]


def test_programs_that_share_a_head_agree_on_the_unit_of_its_sketch() -> None:
    store = blank(dtype=torch.float32)
    k, v = drawn(200, dtype=torch.float32)
    k[:, :, GROUP:] *= 50  # groups would each say another size
    append(store, k, v)
    assert store.size.tolist() == [1.0, 1.0]
    check(store, k, v)
