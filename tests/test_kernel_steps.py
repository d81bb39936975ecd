"""A cache's single steps by kernels: within the tolerance, without waiting, exact where the sketch saves nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from avow.kernels.interpreted import interpret

interpret()

from avow.core import Certificate, LazyCertificate
from avow.kernels import sparse_decode
from avow.nn import kernel_steps, key_value_cache, token_buffers
from avow.nn.key_value_cache import KeyValueCache

# A GPU does not warn of inf and nan.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TOL = 5e-2


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on a CPU are answered by kernels, interpreted, however short they are."""
    monkeypatch.setattr(kernel_steps, "_absent", lambda device: "")
    monkeypatch.setattr(key_value_cache, "_SHORT", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(token_buffers, "_ACROSS", ())
    monkeypatch.setattr(token_buffers, "_EAGER", ("cpu",))
    # Half of so few tokens have no sketch.
    monkeypatch.setattr(kernel_steps, "WORTHWHILE", 0.95)


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


def errors(cache: KeyValueCache, q: Tensor, out: Tensor) -> Tensor:
    """How far an answer is from the truth, in float64 and in the unit of bounds."""
    held = cache._position
    k, v = (cache._buffers[name][:, :, :held].double().repeat_interleave(2, 1) for name in ("keys", "values"))
    truth = torch.softmax(q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
    apart = torch.linalg.vector_norm(out.double() - truth, dim=-1)
    return apart / torch.linalg.vector_norm(v, dim=-1).amax(-1, keepdim=True)


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


def test_a_step_reads_the_buffers_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = filled(), []
    plain = sparse_decode.decode

    def watched(q: Tensor, k: Tensor, v: Tensor, sketch: Any, lengths: Any, *rest: Any) -> Any:
        seen.extend([k, v, sketch.codes, sketch.scale, sketch.zero, sketch.radius, sketch.reach, lengths.each])
        return plain(q, k, v, sketch, lengths, *rest)

    monkeypatch.setattr(sparse_decode, "decode", watched)
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
    numbers = (torch.full((1, 2), 318), torch.full((1, 4), 1e-3), torch.ones(1, 4, dtype=torch.bool))
    steps._report = kernel_steps._Report(numbers, event, 318, TOL)  # type: ignore[arg-type]
    assert steps.last_step_paid() is None and steps.waiting
    event.done = True
    assert steps.last_step_paid() is False and not steps.waiting
    few = numbers[0] // 3
    assert kernel_steps._Report((few, *numbers[1:]), None, 318, TOL).paid
    assert not kernel_steps._Report((few, numbers[1] * 100, numbers[2]), None, 318, TOL).paid
    assert not kernel_steps._Report((*numbers[:2], ~numbers[2]), None, 318, TOL).paid


def test_a_cache_that_must_be_read_whole_is_soon_read_without_the_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looks = filled(), 0
    plain = kernel_steps.KernelSteps.step

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return plain(*given)

    monkeypatch.setattr(kernel_steps.KernelSteps, "step", counted)
    flat = asked(0.0)
    answers = [cache.attend(flat, tol=TOL) for _ in range(7)]
    # After pauses of 1 and 2 steps, it rests for 4.
    assert looks == 3 and cache._left == 3
    assert "sparse decoding did not pay" in answers[1].certificate.reason
    assert all(certificate.keeps(TOL) for _, certificate in answers)
    assert bool((errors(cache, flat, answers[0].out) <= answers[0].certificate.rows).all())
    cache._left = 0
    sharp = 4 * cache._buffers["keys"][:, :, 5:6].repeat_interleave(2, 1)
    assert cache.attend(sharp, tol=TOL).certificate.keeps(TOL)
    assert looks == 4 and cache._pause == 4
    cache.attend(sharp, tol=TOL)
    assert looks == 5 and cache._pause == 0


def test_a_guess_that_was_off_costs_time_and_not_the_tolerance() -> None:
    cache, q = filled(), asked()
    assert cache.attend(q, tol=TOL).certificate.keeps(TOL)
    cache._steps._hint = torch.full((1, 4), 1e-4)
    out, certificate = cache.attend(q, tol=TOL)
    assert certificate.keeps(TOL) and bool((errors(cache, q, out) <= certificate.rows).all())
    assert cache._steps.last_step_paid() is False


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
    problem = cache._problem(q, None)[0]
    return cache._steps.unfit(problem, tol, confidence, cache.bits, cache._wide, cache.window)


@pytest.mark.parametrize(
    ("options", "heads", "tol", "why"),
    [
        ({"bits": 8}, 4, TOL, "the sketch does not have 4 bits"),
        ({"window": 400}, 4, TOL, "the cache has a sliding window"),
        ({}, 18, TOL, "9 query heads share a key head"),
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
    monkeypatch.setattr(kernel_steps, "WORTHWHILE", 1.0)
    cache, q = filled(640), asked(0.3)
    answers = [cache.attend(q, tol=0.5, confidence=0.9) for _ in range(2)]
    for out, certificate in answers:
        assert isinstance(certificate, LazyCertificate) and certificate.kind == "statistical"
        assert certificate.confidence == 0.9 and certificate.keeps(0.5)
        assert "tokens that were drawn" in certificate.reason
        assert bool((errors(cache, q, out) <= certificate.rows).all())
    assert not torch.equal(answers[0].out, answers[1].out)
    assert Certificate.from_json(answers[0].certificate.to_json()).confidence == 0.9
    # A generator decides, and the cache's own draws go on from where they were.
    own = cache._steps._seed
    assert own is not None
    before = int(own)
    same = []
    for _ in range(2):
        cache._steps._hint = None
        same.append(cache.attend(q, 0.5, 0.9, generator=torch.Generator().manual_seed(7)).out)
    assert torch.equal(*same) and int(own) == before
    cache._steps._report = None
    assert copy.deepcopy(cache)._steps._seed is None


def test_a_copy_of_a_cache_answers_alike_and_learns_for_itself() -> None:
    cache, q = filled(128), asked()
    first = cache.attend(q, tol=TOL)
    other = copy.deepcopy(cache)
    assert not other._steps.waiting
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
    monkeypatch.setattr(kernel_steps, "length_floors", lambda x: torch.zeros(x.shape[:-1], dtype=torch.float64))
    cache = filled()
    certificate = cache.attend(asked(), rtol=0.3).certificate
    assert certificate.method == "exact" and certificate.keeps(rtol=0.3)
