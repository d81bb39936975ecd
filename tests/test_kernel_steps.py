"""A cache's single steps by kernels: within the tolerance, without waiting, exact where the sketch saves nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.core import Certificate, LazyCertificate
from avow.decode import kernel_steps
from avow.decode.key_value_cache import KeyValueCache
from avow.errors import ShapeError
from avow.kernels import operators, pausing, sparse_decode
from avow.kernels.append_tokens import append
from tests.helpers import caches
from tests.helpers.kernel_caches import answer_by_kernels, errors

# A GPU does not warn of inf and nan.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOL = 5e-2


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by_kernels(monkeypatch)


def filled(tokens: int = 126, **options: Any) -> KeyValueCache:
    cache = KeyValueCache(2, 32, **({"dtype": torch.bfloat16} | options))
    appended(cache, tokens)
    return cache


def appended(cache: KeyValueCache, tokens: int = 1) -> None:
    k, v = (
        torch.randn(cache.batch, cache.key_heads, tokens, width, dtype=cache.dtype)
        for width in (cache.dim, cache.value_dim)
    )
    cache.append(k, v)


def asked(loud: float = 6.0, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (loud * torch.randn(1, heads, 1, 32)).to(dtype)


def test_every_step_of_a_growing_cache_keeps_its_certificate() -> None:
    cache = filled()
    for _ in range(3):
        q = asked()
        out, certificate = cache.attend(q, tol=TOL)
        assert isinstance(certificate, LazyCertificate) and certificate.kind == "deterministic"
        assert out.shape == (1, 4, 1, 32) and out.dtype == torch.bfloat16
        assert certificate.rows.shape == (1, 4, 1) and certificate.keeps(TOL)
        assert bool((errors(cache, q, out) <= certificate.rows).all())
        appended(cache)
    assert cache._groups == 2


@pytest.mark.parametrize(("heads", "queries"), [(4, 5), (32, 1), (8, 16)])
def test_several_queries_and_many_siblings_are_answered_by_one_step(heads: int, queries: int) -> None:
    cache = filled(150)
    sinks = 14 + 3 * torch.randn(heads)
    for own in (None, sinks, sinks.bfloat16()):
        q = (6 * torch.randn(1, heads, queries, 32)).bfloat16()
        out, certificate = cache.attend(q, tol=TOL, sinks=own)
        assert certificate.method == "sparse" and certificate.keeps(TOL) and certificate.rows.shape == q.shape[:3]
        assert bool((errors(cache, q, out, own) <= certificate.rows).all())
        assert own is None or not bool((errors(cache, q, out) <= certificate.rows).all())
        appended(cache)


@pytest.mark.parametrize(("window", "queries"), [(64, 1), (100, 5), (400, 3)])
def test_windows_of_a_cache_with_room_for_all_tokens_are_read_by_kernels(window: int, queries: int) -> None:
    cache = KeyValueCache(2, 32, dtype=torch.bfloat16, window=window, capacity=256)
    k, v = (torch.randn(1, 2, 180, 32).bfloat16() for _ in range(2))
    v[:, :, :50] *= 50  # bounds are in units of what a row sees
    cache.append(k, v)
    for _ in range(2):
        q = (6 * torch.randn(1, 4, queries, 32)).bfloat16()
        out, certificate = cache.attend(q, tol=TOL)
        assert certificate.method == "sparse" and certificate.keeps(TOL)
        assert bool((errors(cache, q, out) <= certificate.rows).all())
        appended(cache)
    assert cache.length == min(window, 182)


def test_sinks_are_read_however_they_lie_in_memory() -> None:
    cache, q = filled(150), asked()
    both = 14 + 6 * torch.randn(8)
    for sinks in (both[::2], both[:1].expand(4), torch._neg_view(-both[:4]), both[:4].double()):
        out, certificate = cache.attend(q, tol=TOL, sinks=sinks)
        assert bool((errors(cache, q, out, sinks) <= certificate.rows).all()) and certificate.keeps(TOL)
        moved = errors(cache, q, out, sinks.roll(1))
        assert sinks.stride() == (0,) or not bool((moved <= certificate.rows).all())


def test_a_sequence_with_fewer_tokens_than_queries_proves_nothing_of_the_first_rows() -> None:
    """Only the device knows that; what stands before its first token is not read."""
    cache = KeyValueCache(2, 32, batch=2, dtype=torch.bfloat16, capacity=128)
    for sinks in (None, torch.zeros(4)):
        k, v = (torch.randn(2, 2, 70, 32).bfloat16() for _ in range(2))
        cache.append(k, v, lengths=torch.tensor([70, 3]))
        q = torch.randn(2, 4, 8, 32).bfloat16()
        assert cache._store is not None
        wanted = kernel_steps.Asked(TOL, 1.0, 32**-0.5, False)
        out, certificate = cache._steps.step(q, cache._store, wanted, None, sinks)
        rows = certificate.rows
        # A row without tokens has no answer, or beside a sink the answer zero.
        assert bool((rows[1, :, :5] == math.inf).all() if sinks is None else (out[1, :, :5] == 0).all())
        assert bool((rows[0] <= TOL).all() & (rows[1, :, 5:] <= TOL).all())
        cache.crop(0)


def test_more_rows_than_kernels_have_room_for_get_the_exact_answer_and_the_reason() -> None:
    cache, q = filled(), (torch.randn(1, 8, 17, 32)).bfloat16()
    out, certificate = cache.attend(q, tol=TOL)
    assert certificate.method == "exact" and certificate.reason == "68 queries share a key head"
    assert bool((errors(cache, q, out) <= certificate.rows).all())
    sinks = torch.randn(8)
    out, certificate = cache.attend(q, tol=TOL, sinks=sinks)
    assert certificate.method == "exact" and "sinks without kernels: 68 queries" in certificate.reason
    assert bool((errors(cache, q, out, sinks) <= certificate.rows).all())


@pytest.mark.parametrize(("queries", "sunk"), [(1, False), (5, True)])
def test_exact_steps_take_lengths_from_the_device_and_know_nothing_of_the_sketch(queries: int, sunk: bool) -> None:
    """What a CUDA graph repeats reads the tokens that there are then, not those that the host knew of."""
    cache, sinks = filled(130), 3 * torch.randn(4) if sunk else None
    assert cache._store is not None
    cache._store.codes.fill_(255)
    for tol in (None, TOL):
        q = (6 * torch.randn(1, 4, queries, 32)).bfloat16()
        out, certificate = cache.attend(q, tol, method="exact", sinks=sinks)
        assert certificate.method == "exact" and certificate.bound < 2e-2 and certificate.kind == "deterministic"
        assert isinstance(certificate, LazyCertificate)
        assert bool((errors(cache, q, out, sinks) <= certificate.rows).all())
        assert certificate.reason == ("" if tol is None else "exact attention was asked for")
        appended(cache)
    stale = cache._store.used.clone()
    cache._store.used.fill_(70)
    short, _ = cache.attend(q, method="exact", sinks=sinks)
    cache._store.used.copy_(stale)
    whole = (x[:, :, :70] for x in cache.tokens)
    assert float(caches.errors(q, *whole, short, None, sinks).max()) < 2e-2
    assert not bool((errors(cache, q, short, sinks) <= certificate.rows).all())


def test_exact_steps_beyond_what_kernels_prove_are_pytorchs() -> None:
    cache = filled(dtype=torch.float32)
    q = asked(dtype=torch.float32)
    for tol in (None, 1e-5, 1e-2):
        cache.host_counts = tol == 1e-5  # even where a CUDA graph would repeat it
        certificate = cache.attend(q, tol, method="exact").certificate
        assert not isinstance(certificate, LazyCertificate) and certificate.keeps(3e-4 if tol is None else tol)
    cache.host_counts = True
    out, certificate = cache.attend(q, 1e-2, method="exact")
    assert isinstance(certificate, LazyCertificate) and certificate.keeps(1e-3)
    assert bool((errors(cache, q, out) <= certificate.rows).all())


def test_a_cache_that_is_doubted_leaves_kernels_out_once() -> None:
    cache, q = filled(), asked()
    found = []
    for _ in range(2):
        found += [isinstance(cache.attend(q, method="exact").certificate, LazyCertificate) for _ in range(2)]
        cache.doubt()
    assert found == [True, True, False, True]


def test_a_step_reads_the_buffers_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = filled(), []
    plain = sparse_decode.decode

    def watched(q: Tensor, k: Tensor, v: Tensor, sketch: Any, lengths: Any, *rest: Any, **more: Any) -> Any:
        seen.extend([k, v, sketch.codes, sketch.scale, sketch.zero, sketch.radius, sketch.reach, lengths.each])
        return plain(q, k, v, sketch, lengths, *rest, **more)

    monkeypatch.setattr(operators, "decode", watched)
    cache.attend(asked(), tol=TOL)
    names = ("keys", "values", "codes", "scale", "zero", "radius", "reach", "norms")
    assert [x.data_ptr() for x in seen] == [cache._buffers[name].data_ptr() for name in names]


def test_the_bound_is_fetched_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()

    def refused(*_: object) -> None:
        raise AssertionError("a step read a number back")

    with monkeypatch.context() as patch:
        # Not `cpu`: with that the interpreter itself fetches what a kernel works on.
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
            patch.setattr(Tensor, name, refused)
        _, certificate = cache.attend(asked(), tol=TOL)
        assert "bound" not in vars(certificate)
        with pytest.raises(AssertionError, match="read a number back"):
            _ = certificate.bound
    assert certificate.bound == float(certificate.rows.amax()) <= TOL
    assert Certificate.from_json(certificate.to_json()).bound == certificate.bound
    with pytest.raises(AttributeError, match="colour"):
        _ = certificate.colour  # type: ignore[attr-defined]


def test_what_a_step_found_is_looked_at_only_when_it_has_arrived() -> None:
    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    steps, event = kernel_steps.KernelSteps(), Event()
    steps._notice = kernel_steps._Notice(torch.full((1, 4), math.inf), event, TOL)  # type: ignore[arg-type]
    assert not steps.found_ill()
    event.done = True
    assert steps.found_ill() and not steps.found_ill()
    steps._notice = kernel_steps._Notice(torch.full((1, 4), TOL), None, TOL)
    assert not steps.found_ill()


def test_a_cache_that_must_be_read_whole_is_soon_read_without_the_sketch() -> None:
    cache, flat, looks = filled(), asked(0.0), []
    for _ in range(8):
        state = cache._steps._states.get(False)
        looks.append(state is None or int(state[pausing.LEFT]) == 0)
        out, certificate = cache.attend(flat, tol=TOL)
        assert certificate.keeps(TOL)
        assert looks[-1] or certificate.reason == "all tokens were read: the sketch saved nothing"
        assert bool((errors(cache, flat, out) <= certificate.rows).all())
    # After the first look one step is exact, after the second two, after the third four.
    assert looks == [True, False, True, False, False, True, False, False]
    state = cache._steps._states[False]
    state[pausing.LEFT] = 0
    sharp = 4 * cache._buffers["keys"][:, :, 5:6].repeat_interleave(2, 1)
    for _ in range(2):  # the first is misled by how long flat answers were
        certificate = cache.attend(sharp, tol=TOL).certificate
        assert certificate.keeps(TOL)
        state[pausing.LEFT] = 0
    assert "of the tokens were read in full, those that may matter" in certificate.reason


def test_a_guess_that_was_off_costs_time_and_not_the_tolerance() -> None:
    cache, q = filled(), asked()
    assert cache.attend(q, tol=TOL).certificate.keeps(TOL)
    cache._steps._reports[1, 4, 1][0][3] = 1e-4
    out, certificate = cache.attend(q, tol=TOL)
    assert certificate.keeps(TOL) and bool((errors(cache, q, out) <= certificate.rows).all())
    assert certificate.reason == "all tokens were read: the sketch saved nothing"


def test_a_sketch_of_other_keys_is_seen_to_break_the_bound() -> None:
    cache, q = filled(), asked(12.0)
    q[:, 1] = q[:, 0]
    logits = (cache._buffers["keys"][0, 0, :64] @ q[0, 0, 0]).float()
    codes = cache._buffers["codes"][0, 0, 0]
    # What matters most of the first group looks as if it mattered least.
    largest, least = int(logits.argmax()), int(logits.argmin())
    assert not torch.equal(codes[largest], codes[least])
    codes[largest] = codes[least]
    cache._buffers["keys"][0, 0, 64:], cache._buffers["values"][0, 0, 64:] = 0.0, 0.0
    out, certificate = cache.attend(q, tol=TOL)
    assert bool((errors(cache, q, out) > certificate.rows)[0, 0])


def test_nan_is_no_answer_and_an_error_from_the_next_call_on() -> None:
    cache = filled(128)
    q = asked()
    q[0, 0] = math.nan
    assert cache.attend(q, tol=TOL).certificate.bound == math.inf
    with pytest.raises(ValueError, match=r"q\[0, 0, 0, 0\]=nan must be finite"):
        cache.attend(q, tol=TOL)


def unfit(cache: KeyValueCache, q: Tensor, tol: float, confidence: float) -> str:
    """Why kernels do not answer a cache's queries; empty if they do."""
    return cache._unfit or cache._steps.unfit(cache._problem(q, None)[0], tol, confidence)


@pytest.mark.parametrize(
    ("options", "heads", "tol", "why"),
    [
        ({"bits": 8}, 4, TOL, "the sketch does not have 4 bits"),
        ({"window": 400}, 4, TOL, "the tokens of a sliding window move; with capacity= they stay"),
        ({}, 130, TOL, "65 queries share a key head"),
        ({"dtype": torch.float64}, 4, TOL, "the kernels do not support torch.float64"),
        ({}, 4, 5e-3, "rounding takes most of the tolerance"),
    ],
)
def test_what_is_not_for_kernels_says_why(options: dict[str, Any], heads: int, tol: float, why: str) -> None:
    cache = filled(128, **options)
    q = asked(heads=heads, dtype=cache.dtype)
    assert unfit(cache, q, tol, 1.0) == why
    assert not isinstance(cache.attend(q, tol=tol).certificate, LazyCertificate)


def test_more_tokens_than_can_be_told_apart_are_not_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(128)
    monkeypatch.setattr(kernel_steps, "_DRAWABLE", 127)
    assert unfit(cache, asked(), TOL, 0.9) == "the kernels sample at most 127 tokens"
    assert not unfit(cache, asked(), TOL, 1.0)


def test_steps_with_a_confidence_draw_anew_each_time_and_keep_their_certificates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of so few tokens most are read, and it is asked again all the same.
    monkeypatch.setattr(pausing, "WORTHWHILE", 1.0)
    cache, q = filled(640), asked(0.3)
    answers = [cache.attend(q, tol=0.5, confidence=0.9) for _ in range(2)]
    for out, certificate in answers:
        assert isinstance(certificate, LazyCertificate) and certificate.kind == "statistical"
        assert certificate.confidence == 0.9 and certificate.keeps(0.5)
        assert "those that were drawn" in certificate.reason
        assert bool((errors(cache, q, out) <= certificate.rows).all())
    assert not torch.equal(answers[0].out, answers[1].out)
    assert Certificate.from_json(answers[0].certificate.to_json()).confidence == 0.9
    # A generator decides, and the cache's own draws go on from where they were.
    own = cache._steps._seed
    assert own is not None
    before = int(own)
    same = []
    for _ in range(2):
        cache._steps._reports.clear()
        same.append(cache.attend(q, 0.5, 0.9, generator=torch.Generator().manual_seed(7)).out)
    assert torch.equal(*same) and int(own) == before
    assert copy.deepcopy(cache)._steps._seed is None


def test_a_copy_of_a_cache_answers_alike_and_learns_for_itself() -> None:
    cache, q = filled(128), asked()
    first = cache.attend(q, tol=TOL)
    other = copy.deepcopy(cache)
    assert not other._steps._reports
    assert torch.equal(other.attend(q, tol=TOL).out, first.out)


def relative_errors(cache: KeyValueCache, q: Tensor, out: Tensor) -> Tensor:
    """How far an answer is from the truth, in float64 and relative to the truth's own length."""
    k, v = (cache._buffers[x][:, :, : cache._position].double().repeat_interleave(2, 1) for x in ("keys", "values"))
    truth = torch.softmax(q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
    return torch.linalg.vector_norm(out.double() - truth, dim=-1) / torch.linalg.vector_norm(truth, dim=-1)


def test_a_step_is_within_its_bound_relative_to_the_answer_whatever_becomes_of_that() -> None:
    cache = filled()
    q = asked()
    out, certificate = cache.attend(q, tol=TOL)
    assert isinstance(certificate, LazyCertificate)
    kept = out.clone()
    out.mul_(1e6)  # the caller's to do: the certificate is of what was given
    assert certificate.relative == float(certificate.relative_rows.amax()) < 1
    assert bool((relative_errors(cache, q, kept) <= certificate.relative_rows).all())
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_steps_keep_a_relative_tolerance_or_make_way_for_exact_attention() -> None:
    cache = filled()
    q = asked()
    out, certificate = cache.attend(q, rtol=0.3)
    assert isinstance(certificate, LazyCertificate) and certificate.keeps(rtol=0.3)
    assert bool((relative_errors(cache, q, out) <= 0.3).all())
    out, certificate = cache.attend(q, rtol=5e-3)
    assert not isinstance(certificate, LazyCertificate) and certificate.keeps(rtol=5e-3)
    assert bool((relative_errors(cache, q, out) <= 5e-3).all())


def test_a_relative_tolerance_is_never_ignored_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels know nothing of it: where their answers are short beside their bounds, others are given.
    plain = kernel_steps.relative_errors
    monkeypatch.setattr(kernel_steps, "relative_errors", lambda rows, floors: plain(rows, torch.zeros_like(floors)))
    cache = filled()
    certificate = cache.attend(asked(), rtol=0.3).certificate
    assert certificate.method == "exact" and certificate.keeps(rtol=0.3)


def test_tokens_that_are_not_finite_leave_no_bound_and_are_an_error_from_the_next_call_on() -> None:
    cache = filled(128)
    k = torch.randn(1, 2, 1, 32, dtype=torch.bfloat16)
    cache.append(k, torch.full_like(k, math.nan))
    assert cache.attend(asked(), tol=TOL).certificate.bound == math.inf
    with pytest.raises(ValueError, match="k or v=nan or inf was appended, and must be finite"):
        cache.attend(asked(), tol=TOL)


def test_a_cache_with_a_capacity_stays_where_it_is_and_takes_no_more() -> None:
    cache = filled(0, capacity=200)
    places = [x.data_ptr() for x in cache._buffers.values()]
    appended(cache, 130)
    for _ in range(3):
        q = asked()
        out, certificate = cache.attend(q, tol=TOL)
        assert bool((errors(cache, q, out) <= certificate.rows).all()) and certificate.keeps(TOL)
        appended(cache)
    assert places == [x.data_ptr() for x in cache._buffers.values()] and cache.length == 133
    with pytest.raises(ShapeError, match="tokens=257 exceeds the capacity of 200; make the cache with a larger"):
        appended(cache, 257 - 133)


def test_tokens_that_only_the_device_has_counted_are_seen() -> None:
    cache = filled(130, capacity=256)
    k, v = (torch.randn(1, 2, 3, 32, dtype=torch.bfloat16) for _ in range(2))
    assert cache._store is not None
    append(cache._store, k, v)  # as a graph does that is replayed
    cache._replayed = True
    q = asked()
    out, certificate = cache.attend(q, tol=TOL)
    assert cache.length == 133 and torch.equal(cache.tokens[0][:, :, 130:], k)
    assert bool((errors(cache, q, out) <= certificate.rows).all())


def test_a_certificate_of_a_captured_step_tells_of_the_last_replay() -> None:
    certificate = filled().attend(asked(), tol=TOL).certificate
    fields = {field.name: getattr(certificate, field.name) for field in dataclasses.fields(Certificate)}
    bounds = iter([1e-3, 2e-3])
    follows = LazyCertificate.of(lambda: fields | {"bound": next(bounds)}, follows=True)
    assert (follows.bound, follows.bound) == (1e-3, 2e-3)


def test_a_sketch_has_one_size_however_tokens_come() -> None:
    """Large keys after small ones: groups that were sketched before must not be read in another unit."""
    cache = filled(70, capacity=512)
    for tokens, size in ((130, 64.0), (1, 1.0), (200, 0.1)):
        k, v = (torch.randn(1, 2, tokens, 32, dtype=torch.bfloat16) for _ in range(2))
        cache.append(size * k, v)
        q = asked(2.0)
        out, certificate = cache.attend(q, tol=TOL)
        assert bool((errors(cache, q, out) <= certificate.rows).all()) and certificate.keeps(TOL)
    one_by_one = KeyValueCache(2, 32, dtype=torch.bfloat16, capacity=512)
    for _ in range(66):
        appended(one_by_one)
    assert one_by_one._store is not None
    size = one_by_one._store.size.clone()
    k, v = (torch.randn(1, 2, 200, 32, dtype=torch.bfloat16) for _ in range(2))
    one_by_one.append(64 * k, v)
    assert torch.equal(one_by_one._store.size, size) and bool((size > 0).all())
    out, certificate = one_by_one.attend(asked(2.0), tol=TOL)
    assert certificate.keeps(TOL)


def test_a_cache_made_in_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        cache = filled(130)
        cache.attend(asked(), tol=TOL)
    appended(cache)
    q = asked()
    out, certificate = cache.attend(q, tol=TOL)
    assert bool((errors(cache, q, out) <= certificate.rows).all())


def test_a_pickled_cache_goes_on_in_the_buffers_that_its_kernels_write_to() -> None:
    cache = filled()
    for _ in range(2):
        appended(cache)
        cache.attend(asked(), tol=TOL)
    other = pickle.loads(pickle.dumps(cache))
    appended(other)
    assert other.length == cache.length + 1 and other._longest.data_ptr() == other._store.longest.data_ptr()
    assert all(torch.equal(mine, theirs[:, :, :-1]) for mine, theirs in zip(cache.tokens, other.tokens, strict=True))
    q = asked()
    out, certificate = other.attend(q, tol=TOL)
    assert bool((errors(other, q, out) <= certificate.rows).all())


def test_a_copy_appends_to_its_own_tokens() -> None:
    cache = filled(130, capacity=256)
    other = copy.deepcopy(cache)
    appended(other, 3)
    assert (cache.length, other.length) == (130, 133)
    assert cache._store is not None and cache._store.used.tolist() == [130, 130]
    assert other._store is not None and other._buffers["keys"].data_ptr() == other._store.k.data_ptr()


def test_a_look_at_an_unfinished_sketch_does_not_settle_its_size(tmp_path: Path) -> None:
    """Ten tokens have no sketch. Saving them must not keep the first groups from saying how large keys are."""
    cache = filled(10, capacity=512)
    cache.save(tmp_path / "cache")
    k, v = (torch.randn(1, 2, 300, 32, dtype=torch.bfloat16) for _ in range(2))
    cache.append(64 * k, v)
    assert cache._store is not None and bool((cache._store.size >= 64).all())
    q = asked(2.0)
    out, certificate = cache.attend(q, tol=TOL)
    assert bool((errors(cache, q, out) <= certificate.rows).all())


def test_views_of_negatives_are_read_as_the_numbers_they_stand_for() -> None:
    turned = [torch.view_as_complex(torch.randn(1, 2, 130, 32, 2)).conj().imag for _ in range(2)]
    assert turned[0].is_neg()
    cache = filled(0, dtype=torch.float32, capacity=256)
    cache.append(*turned)
    assert torch.equal(cache.tokens[0], turned[0]) and torch.equal(cache.tokens[1], turned[1])
    q = 4 * torch.view_as_complex(torch.randn(1, 4, 1, 32, 2)).conj().imag
    out, certificate = cache.attend(q, tol=TOL)
    assert bool((errors(cache, q, out) <= certificate.rows).all())


def test_tokens_that_a_graph_writes_to_are_not_moved() -> None:
    cache = filled(128)
    cache._replayed = True  # as after a capture
    with pytest.raises(ShapeError, match="tokens=192 would move the tokens that a captured CUDA graph writes to"):
        appended(cache, 64)
