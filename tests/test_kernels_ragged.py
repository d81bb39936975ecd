"""Sequences of different lengths that kernels keep and read: counted on the device, each row from its own tokens."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.core import LazyCertificate
from avow.decode import token_buffers
from avow.decode.key_value_cache import KeyValueCache
from avow.errors import ParameterError, ShapeError
from avow.kernels.append_tokens import MISCOUNTED, append, crop
from tests.helpers.caches import tokens
from tests.helpers.kernel_caches import answer_by_kernels
from tests.helpers.ragged import Ragged
from tests.helpers.stores import blank, drawn
from tests.test_kernels_append import check

# A GPU does not warn of inf and nan.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOL = 5e-2


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by_kernels(monkeypatch)


def ragged(batch: int = 2, **options: Any) -> Ragged:
    return Ragged(KeyValueCache(1, 32, batch=batch, **({"dtype": torch.bfloat16} | options)))


def asked(batch: int = 2, n: int = 1) -> Tensor:
    return (6 * torch.randn(batch, 2, n, 32)).bfloat16()


@pytest.mark.parametrize("on_device", [False, True])
def test_every_row_keeps_its_certificate_while_sequences_grow_apart(on_device: bool) -> None:
    held = ragged(3)
    for counts in ([130, 3, 64], [1, 1, 0], [0, 70, 1]):
        held.append(counts, on_device=on_device)
        certificate = held.check(asked(3), TOL)
        assert isinstance(certificate, LazyCertificate) and certificate.method == "sparse"
    assert held.cache.lengths == (131, 74, 65) and held.cache.length == 131
    assert held.cache._store is not None and held.cache._store.flags.tolist() == [0] * 3


def test_rows_are_those_of_a_cache_with_one_sequence() -> None:
    held = ragged(3)
    held.append([130, 70, 5])
    q = asked(3)
    out, certificate = held.cache.attend(q, tol=TOL)
    for i, (k, v) in enumerate(held.sequences):
        alone = KeyValueCache(1, 32, dtype=torch.bfloat16)
        alone.append(k.unsqueeze(0), v.unsqueeze(0))
        other = alone.attend(q[i : i + 1], tol=TOL)
        apart = torch.linalg.vector_norm(out[i].double() - other.out[0].double(), dim=-1)
        longest = torch.linalg.vector_norm(v.double(), dim=-1).amax()
        assert bool((apart <= (certificate.rows[i] + other.certificate.rows[0]) * longest).all())


def test_a_row_that_saw_more_than_its_own_tokens_would_be_caught() -> None:
    """The sabotage: the device counts tokens of a sequence that are not its own."""
    held = ragged()
    held.append([130, 130])
    held.crop([130, 20])
    held.check(asked(), TOL)
    assert held.cache._store is not None
    held.cache._store.used.fill_(130)
    with pytest.raises(AssertionError, match="row is beyond its bound"):
        held.check(asked(), TOL)


def test_calls_that_no_kernel_serves_are_answered_of_each_sequence_by_itself() -> None:
    held = ragged()
    held.append([130, 70], on_device=True)
    for q, tol in ((asked(), None), (asked(n=33), TOL)):
        assert held.check(q, tol).method == "exact"
    q = asked()
    for arguments in ({"rtol": 0.3}, {"tol": TOL, "method": "exact"}):
        certificate = held.cache.attend(q, **arguments).certificate
        assert certificate.rows.shape == (2, 2, 1) and certificate.method == "exact"
    before = {name: x.clone() for name, x in held.cache._buffers.items()}
    q = asked().expand(2, 2, 1, 32).repeat_interleave(33, 1)
    assert held.cache.attend(q, tol=TOL, method="sparse").certificate.method == "sparse"
    for name, x in held.cache._buffers.items():
        assert torch.equal(x.nan_to_num(), before[name].nan_to_num()), f"a look changed {name}"


def test_crops_and_new_beginnings_go_on() -> None:
    held = ragged(3, capacity=320)
    held.append([200, 200, 200], loud=20.0)
    held.check(asked(3), TOL)
    held.crop([100, 0, 57])
    with pytest.raises(ShapeError, match=r"^length of sequence 1=0 must be at least 1"):
        held.cache.attend(asked(3), tol=TOL)
    held.append([1, 130, 64])
    held.check(asked(3), TOL)
    held.crop([64, 0, 60], on_device=True)
    held.append([0, 1, 1], on_device=True)
    held.check(asked(3), TOL)
    assert held.cache.lengths == (64, 1, 61)


def test_bounds_are_relative_to_the_longest_value_that_is_left() -> None:
    held = ragged()
    held.append([130, 130])
    k, v = tokens(held.cache, 1)
    held.cache.append(k, 1000 * v)
    store = held.cache._store
    assert store is not None
    held.cache.crop([130, 130])
    true = torch.linalg.vector_norm(torch.stack([v for _, v in held.sequences]).double(), dim=-1).flatten(0, 1)
    assert bool((store.most <= true.amax(-1)).all()) and bool((store.most >= true.amax(-1) * (1 - 1e-5)).all())
    held.check(asked(), TOL)


def test_a_sequence_without_bounds_spoils_no_other_and_begins_again() -> None:
    held = ragged(capacity=256)
    held.append([70, 70])
    k, v = tokens(held.cache, 1)
    k[1] = math.nan
    held.cache.append(k, v, lengths=[0, 1])
    certificate = held.cache.attend(asked(), tol=TOL).certificate
    assert certificate.rows[0].amax() <= TOL and bool(certificate.rows[1].isinf().all())
    with pytest.raises(ValueError, match="k or v=nan or inf was appended"):
        held.cache.attend(asked(), tol=TOL)
    held.crop([70, 0])
    held.append([1, 3])
    held.check(asked(), TOL)


def test_no_call_waits_for_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ragged(capacity=256)
    held.append([70, 3])

    def refused(*_: object) -> None:
        raise AssertionError("a step read a number back")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patch.setattr(Tensor, name, refused)
        held.append([1, 0], on_device=True)
        held.append([2, 1])
        held.crop([72, 4], on_device=True)
        out, certificate = held.cache.attend(asked(), tol=TOL)
        with pytest.raises(AssertionError, match="read a number back"):
            _ = held.cache.lengths
    assert out.shape == (2, 2, 1, 32) and certificate.keeps(TOL)
    assert held.cache.lengths == (72, 4)
    held.check(asked(), TOL)


def test_lengths_that_a_graph_changed_are_asked_of_the_device() -> None:
    held = ragged(capacity=256)
    held.append([70, 3])
    k, v = tokens(held.cache, 2)
    assert held.cache._store is not None
    append(held.cache._store, k, v, counts=torch.tensor([2, 1]))  # as a graph does that is replayed
    held.cache._replayed = True
    held.sequences = [
        (torch.cat([own[0], k[i, :, :n]], 1), torch.cat([own[1], v[i, :, :n]], 1))
        for i, (own, n) in enumerate(zip(held.sequences, (2, 1), strict=True))
    ]
    assert held.cache.lengths == (72, 4)
    held.check(asked(), TOL)


def test_while_a_graph_is_captured_lengths_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ragged(capacity=256)
    held.append([70, 3])
    for module in (token_buffers, __import__("avow.decode.key_value_cache", fromlist=["_"])):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    with pytest.raises(ParameterError, match=r"^lengths=\[1, 0\] are numbers of the host, which a CUDA graph does not"):
        held.append([1, 0])
    with pytest.raises(ShapeError, match=r"^cache.lengths=on the device are not known while a CUDA graph is captured"):
        held.cache.attend(asked())
    monkeypatch.undo()
    assert held.cache._store is not None and held.cache._store.used.tolist() == [70, 3]


@pytest.mark.parametrize("counts", [[1, 3], [-1, 2], [2, 2**40 + 1]])
@pytest.mark.parametrize("many", [2, 130])
def test_lengths_beyond_the_tokens_leave_no_bound_and_nothing_else_is_read(counts: list[int], many: int) -> None:
    held = ragged(capacity=512)
    held.append([70, 70])
    wrong = [count not in range(many + 1) for count in (x * many // 2 if x < 4 else x for x in counts)]
    lengths = torch.tensor([x * many // 2 if x < 4 else x for x in counts])
    held.cache.append(*tokens(held.cache, many), lengths=lengths)
    store = held.cache._store
    assert store is not None
    assert store.flags.tolist() == [MISCOUNTED * x for x in wrong] and store.most.isnan().tolist() == wrong
    assert bool((store.used <= 70 + many).all())
    assert held.cache.attend(asked(), tol=TOL).certificate.bound == math.inf
    with pytest.raises(ParameterError, match="lengths=on the device were outside of 0 to the number of tokens given"):
        held.cache.attend(asked(), tol=TOL)


def test_tokens_without_room_leave_no_bound_of_their_sequence() -> None:
    held = ragged(capacity=64)
    held.append([60, 3])
    held.cache.append(*tokens(held.cache, 8), lengths=torch.tensor([8, 0]))
    rows = held.cache.attend(asked(), tol=TOL).certificate.rows
    assert bool(rows[0].isinf().all()) and float(rows[1].amax()) <= TOL
    with pytest.raises(ShapeError, match="tokens appended=more than 64 exceed the room of the cache"):
        held.cache.attend(asked(), tol=TOL)


def test_buffers_grow_for_the_longest_sequence() -> None:
    held = ragged()
    for _ in range(4):
        held.append([50, 3], on_device=True)
        held.append([30, 1])
        held.check(asked(), TOL)
    assert held.cache.lengths == (320, 16) and held.cache._buffers["keys"].shape[2] < 1024


def test_a_cropped_store_is_that_of_the_tokens_left() -> None:
    store, (k, v) = blank(b=1, g=2), drawn(130)
    store.size.fill_(8.0)
    append(store, k, v)
    crop(store, torch.tensor([70]))
    for name in ("codes", "scale"):
        getattr(store, name)[:, 1:] = 255 if name == "codes" else math.nan
    check(store, k[:, :, :70], v[:, :, :70])
    append(store, *(x[:, :, 70:] for x in (k, v)))
    check(store, k, v)


@pytest.mark.parametrize("longest", [3, 100])
def test_what_is_known_of_lengths_follows_a_crop(longest: int) -> None:
    """Bounds are relative to the longest value that is left: one that goes must not stand for the others."""
    store, (k, v) = blank(b=2, g=1), drawn(130, b=2, g=1)
    store.size.fill_(8.0)
    v[:, :, longest] *= 50
    append(store, k, v)
    before = store.most.clone()
    crop(store, torch.tensor([70, 200]))
    left = torch.linalg.vector_norm(v[0, 0, :70].double(), dim=-1)
    assert store.used.tolist() == [70, 130]
    assert float(store.most[0]) <= float(left.amax()) <= float(store.extremes[0, 1])
    assert float(store.extremes[0, 0]) == float(store.norms[0, :70].min())
    assert (store.most == before).tolist() == [longest < 70, True]
    crop(store, torch.tensor([0, 5]))
    assert store.used.tolist() == [0, 5] and store.most.tolist()[0] == 0 and store.size.tolist() == [0, 0]


def test_copies_are_apart_and_one_tensor_is_refused(tmp_path: Path) -> None:
    held = ragged()
    held.append([70, 3])
    other = copy.deepcopy(held)
    other.append([1, 2])
    assert (held.cache.lengths, other.cache.lengths) == ((70, 3), (71, 5))
    for one in (held, other):
        one.check(asked(), TOL)
    with pytest.raises(ShapeError, match=r"^cache.lengths=\[70, 3\] differ, and tokens are one tensor"):
        _ = held.cache.tokens


def test_a_cache_that_kernels_keep_is_saved_and_loaded(tmp_path: Path) -> None:
    held = ragged()
    held.append([130, 130])
    held.cache.save(tmp_path / "cache")
    held.cache = KeyValueCache.load(tmp_path / "cache")
    held.append([3, 70])
    held.check(asked(), TOL)


@pytest.mark.parametrize("seed", range(4))
def test_rows_stay_within_their_bounds_whatever_comes(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    capacity = chance.choice([None, 384])
    held = ragged(chance.randint(2, 3), dtype=dtype, capacity=capacity)
    # Louder logits are more than single precision can keep the tolerance with.
    held.play(chance, 12, on_device=True, most=300, loudest=4.0)
