"""What recomputed rows prove: how many are enough, that lies are found, and what is claimed when all were seen."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import avow
from avow.core.audit import reference_error, rows_needed
from avow.errors import ParameterError, ShapeError
from avow.methods import method_named
from avow.methods.latent import Latent, directions


def tensors(n: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 3, n, 4).to(dtype) for _ in range(3))  # type: ignore[return-value]  # three of them


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("coverage", "confidence", "rows"), [(0.99, 0.99, 459), (0.9, 0.95, 29), (0.5, 0.5, 1), (0.999, 0.99, 4603)]
)
def test_enough_rows_and_not_one_more(coverage: float, confidence: float, rows: int) -> None:
    assert rows_needed(coverage, confidence) == rows
    # All rows of the sample lie in the best share with probability coverage^rows.
    assert coverage**rows <= 1 - confidence + 1e-12
    assert coverage ** (rows - 1) > 1 - confidence


@pytest.mark.parametrize(
    ("coverage", "confidence", "words"),
    [
        (
            0.0,
            0.9,
            "coverage=0.0 must be above 0 and at most 1; try coverage=0.99, or coverage=1 to recompute all rows",
        ),
        (1.1, 0.9, "coverage=1.1 must be above 0 and at most 1"),
        (0.9, 0.0, "confidence=0.0 must lie strictly between 0 and 1; try confidence=0.99"),
        (1.0, 1.0, "confidence=1.0 must lie strictly between 0 and 1; try confidence=0.99"),
    ],
)
def test_no_sample_proves_everything(coverage: float, confidence: float, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        rows_needed(coverage, confidence)


def test_whoever_wants_all_rows_recomputed_gets_the_one_that_is_wrong() -> None:
    q, k, v = tensors(1200)  # more rows of a head than are recomputed at once
    out = avow.attend(q, k, v).out
    out[1, 2, 1100] += 1.0
    missed = avow.audit(out, q, k, v, generator=seeded())
    assert missed.errors.numel() == 459 and missed.errors.max() < 1e-5, "the seed draws other rows"
    report = avow.audit(out, q, k, v, coverage=1)
    assert report.errors.numel() == 2 * 3 * 1200 and report.certificate.coverage == report.certificate.confidence == 1
    assert report.rows[report.errors.argmax()].tolist() == [1, 2, 1100] and report.errors.max() > 0.1
    assert (report.errors > 1e-5).sum() == 1
    assert str(report).startswith("all 7200 rows recomputed in float64: largest errors ")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_numbers_are_counted_wherever_they_are(bad: float) -> None:
    q, k, v = tensors(1200)
    out = avow.attend(q, k, v).out
    assert avow.audit(out, q, k, v).not_finite == 0 and "nan" not in str(avow.audit(out, q, k, v))
    out[1, 2, 1100, 0] = bad
    report = avow.audit(out, q, k, v, generator=seeded())
    assert report.errors.max() < 1e-5, "the seed draws other rows"
    assert report.not_finite == 1 and "\n1 row of the answer holds nan or inf\n" in str(report)
    assert "holds nan or inf" in report._repr_html_()


def test_few_rows_are_all_recomputed_and_the_promise_is_about_all() -> None:
    q, k, v = tensors()
    report = avow.audit(avow.attend(q, k, v).out, q, k, v)
    assert report.errors.numel() == 2 * 3 * 40
    assert sorted(map(tuple, report.rows.tolist())) == [
        (b, h, i) for b in range(2) for h in range(3) for i in range(40)
    ]
    certificate = report.certificate
    assert (certificate.kind, certificate.coverage, certificate.confidence) == ("sampled", 1.0, 1.0)
    assert certificate.bound == float(report.errors.max()) < 1e-5
    assert certificate.assumptions == ("all 240 rows were recomputed in float64",)
    first, second, *_ = str(report).splitlines()
    assert first.startswith("all 240 rows recomputed in float64: largest error")
    assert second.startswith("every row is within") and "drawn" not in str(report)


def test_many_rows_are_sampled_and_the_promise_says_so() -> None:
    q, k, v = tensors(200)
    report = avow.audit(avow.attend(q, k, v).out, q, k, v, generator=seeded())
    assert report.errors.numel() == 459 < 2 * 3 * 200
    assert (report.certificate.coverage, report.certificate.confidence) == (0.99, 0.99)
    assert str(report).startswith("459 rows recomputed in float64: largest error")
    assert "0.99 of the rows, with probability 0.99, are within" in str(report)
    assert report.certificate.assumptions == ("the 459 audited rows were drawn uniformly, whatever the answer",)
    again = avow.audit(avow.attend(q, k, v).out, q, k, v, generator=seeded())
    assert torch.equal(report.rows, again.rows)
    assert not torch.equal(report.rows, avow.audit(avow.attend(q, k, v).out, q, k, v, generator=seeded(1)).rows)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": -2.0}, {"kernel": "rbf", "sigma": 2.0}], ids=str)
def test_a_wrong_answer_is_found_and_measured(options: dict[str, object]) -> None:
    q, k, v = tensors()
    out = avow.attend(q, k, v, **options).out
    assert avow.audit(out, q, k, v, **options).certificate.bound < 1e-5
    for b, h, i in ((0, 0, 0), (1, 2, 39)):
        wrong = out.clone()
        wrong[b, h, i] += 0.01
        report = avow.audit(wrong, q, k, v, **options)
        worst = report.rows[int(report.errors.argmax())].tolist()
        assert worst == [b, h, i]
        length = torch.linalg.vector_norm(v[b, h, : i + 1] if "causal" in options else v[b, h], dim=-1).max()
        assert report.certificate.bound == pytest.approx(0.02 / float(length), rel=1e-3)


def test_an_audit_never_reads_below_the_true_error() -> None:
    q, k, v = tensors(dtype=torch.float64)
    exact = avow.attend(q, k, v).out
    report = avow.audit(exact, q, k, v)
    assert 0 < report.certificate.bound < 1e-11


@pytest.mark.parametrize("size", [1e-160, 1e-307, 3e-308, 1e-310])
def test_values_whose_squares_vanish_are_audited_too(size: float) -> None:
    q = torch.randn(1, 1, 5, 2, dtype=torch.float64)
    v = size * torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    exact = v.expand(1, 1, 5, 2)
    report = avow.audit(exact * 0.7, q, q[:, :, :1], v)
    assert bool((report.errors >= 0.3 * (1 - 1e-6)).all())
    assert size < 1e-300 or bool((report.errors < 0.31).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_answer_that_is_no_number_is_infinitely_wrong(bad: float) -> None:
    q, k, v = tensors()
    out = avow.attend(q, k, v).out
    out[1, 2, 3, 0] = bad
    report = avow.audit(out, q, k, v)
    assert report.certificate.bound == math.inf and int(report.errors.isinf().sum()) == 1


@pytest.mark.parametrize("method", avow.all_methods())
@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)], ids=["no keys", "no values"])
def test_an_answer_to_nothing_must_be_zero(method: str, sizes: tuple[int, int]) -> None:
    s, e = sizes
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, s, 4), torch.randn(1, 2, s, e)
    zeros = torch.zeros(1, 2, 5, e)
    assert avow.audit(zeros, q, k, v, method=method).certificate.bound == 0.0
    if e:
        zeros[0, 1, 2] = 1e-30
        assert avow.audit(zeros, q, k, v, method=method).errors.isinf().sum() == 1


def test_what_is_no_answer_share_or_generator_is_refused() -> None:
    q, k, v = tensors()
    for options, words in (
        ({"out": [0.0]}, "out=list must be a torch.Tensor"),
        ({"coverage": "all"}, "coverage=all must be above 0 and at most 1"),
        ({"generator": 7}, "generator=7 must be a torch.Generator"),
    ):
        with pytest.raises(avow.InputError, match=words):
            avow.audit(**{"out": torch.zeros(2, 3, 40, 4), "q": q, "k": k, "v": v} | options)  # type: ignore[arg-type]


def test_each_sampled_error_stands_beside_its_row() -> None:
    q, k, v = tensors(200)
    out = avow.attend(q, k, v).out
    wrong = torch.randn(2, 3, 200, 1)
    report = avow.audit(out + wrong, q, k, v, generator=seeded())
    assert not torch.equal(report.rows, report.rows.flip(0))
    longest = v.norm(dim=-1).amax(-1)[..., None]  # (2, 3, 1)
    moved = ((4**0.5) * wrong.abs().squeeze(-1) / longest)[tuple(report.rows.T)]
    torch.testing.assert_close(report.errors.float(), moved, rtol=1e-2, atol=1e-4)


def test_errors_agree_with_the_certificate_of_an_approximation() -> None:
    q, k, v = tensors()
    out, certificate = avow.attend(q, k, v, method="low_rank", rank=8)
    report = avow.audit(out, q, k, v)
    for (b, h, i), error in zip(report.rows.tolist(), report.errors.tolist(), strict=True):
        assert error <= float(certificate.rows[b, h, i]) + 1e-9
    assert report.certificate.bound > 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_an_answer_is_held_to_the_target_of_its_own_mechanism(causal: bool) -> None:
    q, k, v = tensors()
    out = avow.attend(q, k, v, method="separable", causal=causal).out
    own = avow.audit(out, q, k, v, method="separable", causal=causal)
    assert own.certificate.target == "separable attention" and own.certificate.bound < 1e-5
    other = avow.audit(out, q, k, v, causal=causal)
    assert other.certificate.target == "softmax attention" and other.certificate.bound > 0.01


def test_masks_groups_and_blind_rows_are_audited_too() -> None:
    q, k, v = tensors()
    k, v = k[:, :1], v[:, :1]
    mask = torch.rand(2, 3, 40, 40) < 0.5
    mask[:, :, 5] = False
    options = {"mask": mask, "enable_gqa": True}
    out = avow.attend(q, k, v, **options).out
    assert avow.audit(out, q, k, v, **options).certificate.bound < 1e-5
    assert avow.audit(out, q, k, v, enable_gqa=True).certificate.bound > 0.1
    out[0, 0, 5] = 1e-3
    assert math.isinf(avow.audit(out, q, k, v, **options).certificate.bound)


@pytest.mark.parametrize("hidden", [-1e9, -1e30, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_may_hide_keys_by_the_smallest_number(hidden: float, causal: bool) -> None:
    q, k, v = tensors()
    keep = torch.rand(2, 1, 1, 40) < 0.7
    keep[..., 0] = True
    mask = torch.where(keep, 0.0, hidden)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, with_causality(mask, causal))
    report = avow.audit(out, q, k, v, mask=mask, causal=causal)
    infinite = avow.audit(out, q, k, v, mask=keep, causal=causal)
    assert report.errors.max() < 1e-6
    assert torch.allclose(report.absolute_errors, infinite.absolute_errors, rtol=0, atol=1e-10)
    assert avow.audit(out.roll(1, -1), q, k, v, mask=mask, causal=causal).errors.max() > 0.1


def with_causality(mask: Tensor, causal: bool) -> Tensor:
    """What PyTorch calls a mask beside `is_causal`."""
    return mask.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf) if causal else mask


def test_a_row_that_a_mask_lowers_as_a_whole_is_compared_with_the_answer_without_it() -> None:
    q, k, v = tensors()
    mask = torch.zeros(40, 40)
    mask[7] = torch.finfo(torch.float32).min
    plain = avow.attend(q, k, v).out
    assert avow.audit(plain, q, k, v, mask=mask).errors.max() < 1e-6
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)  # the logits are lost beside the mask
    assert avow.audit(theirs, q, k, v, mask=mask).errors.max() > 1e-2


@pytest.mark.parametrize("size", [3.0, 1e3, 1e7, 1e12])
@pytest.mark.parametrize("lowered", [0.0, 1e6, 1e11])
def test_the_rounding_of_biases_is_within_its_bound(size: float, lowered: float) -> None:
    q, k, v = (x.double()[:1, :1] for x in tensors())
    bias = size * torch.randn(1, 1, 40, 40).double() - lowered
    problem = avow.Problem.of(q, k, v, mask=bias)
    reference = method_named("exact")().reference(problem)[0, 0].numpy()
    long = [x[0, 0].numpy().astype(np.longdouble) for x in (q, k, v, bias)]
    truth = _softmax(long[0] @ long[1].T / 2 + long[3], 1) @ long[2]
    off = np.linalg.norm(truth - reference, axis=1) / np.linalg.norm(long[2], axis=1).max()
    assert bool((off <= reference_error(problem)[0, 0].numpy()).all())


def test_any_number_of_leading_axes_is_audited() -> None:
    q, k, v = tensors()
    for index in ((0,), (0, 0)):
        flat = [x[index] for x in (q, k, v)]
        report = avow.audit(avow.attend(*flat).out, *flat)
        assert report.certificate.bound < 1e-5 and report.certificate.rows.shape == flat[0].shape[:-1]


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((2, 3, 40, 5), "pass the output for these q, k and v"),
        ((2, 3, 39, 4), "pass the output for these q, k and v"),
        ((6, 40, 4), "pass the output for these q, k and v"),
        ((2, 40, 3, 4), "use out.transpose(1, 2)"),
    ],
    ids=str,
)
def test_an_answer_of_another_shape_is_refused(shape: tuple[int, ...], remedy: str) -> None:
    q, k, v = tensors()
    text = f"out.shape={shape} must be (2, 3, 40, 4); {remedy}"
    with pytest.raises(ShapeError, match=f"^{re.escape(text)}$"):
        avow.audit(torch.zeros(shape), q, k, v)


def test_the_share_of_rows_within_the_bound_is_as_promised() -> None:
    # 1% of the rows are wrong: at coverage 0.9 and confidence 0.9 an audit may miss them, and still tell the truth.
    q, k, v = tensors(400)
    out = avow.attend(q, k, v).out
    bad = torch.rand(2, 3, 400) < 0.05
    out[bad] += 0.1
    truth = avow.audit(out, q, k, v, coverage=0.9999, confidence=0.99)
    assert truth.certificate.coverage == 1.0
    errors = truth.errors
    lies = 0
    for seed in range(40):
        sampled = avow.audit(out, q, k, v, coverage=0.97, confidence=0.8, generator=seeded(seed)).certificate
        lies += float((errors <= sampled.bound).double().mean()) < sampled.coverage
    # 5% wrong rows are more than the 3% a sample may miss with probability 0.2: 8 lies expected at most.
    assert 0 < lies <= 18


@pytest.mark.parametrize("method", ["latent", "separable"])
@pytest.mark.parametrize("size", [1.0, 3e4, 1e6])
def test_an_audit_counts_the_rounding_of_the_mechanism_it_recomputes(method: str, size: float) -> None:
    q, k, v = (torch.randn(1, 1, 200, 8, generator=seeded(i), dtype=torch.float64) for i in range(3))
    q, k = size * q, size * k
    # What the audit itself computes: it finds no distance, and must still say how far both may be from the truth.
    out = method_named(method)().reference(avow.Problem.of(q, k, v))
    report = avow.audit(out, q, k, v, method=method)
    # The same definition in eighty bits: what float64 itself loses shows.
    wide = [x[0, 0].numpy().astype(np.longdouble) for x in (q, k, v)]
    truth = _latent(*wide) if method == "latent" else _separable(*wide)
    error = np.linalg.norm(out[0, 0].numpy() - truth, axis=-1) / float(v.norm(dim=-1).amax())
    assert (error.astype(float) <= report.errors.numpy()).all()
    assert report.errors.numel() == 200


def test_an_audit_asks_the_mechanism_how_far_its_reference_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    out = avow.attend(q, k, v, method="latent").out
    before = avow.audit(out, q, k, v, method="latent").errors
    monkeypatch.setattr(Latent, "reference_error", lambda _, p: torch.full(p.q.shape[:-1], 0.5))
    assert torch.allclose(avow.audit(out, q, k, v, method="latent").errors, before + 0.5, atol=1e-6)


def test_latents_of_large_logits_are_less_certain_than_softmax_averages() -> None:
    # Latents are averages themselves: what rounding does to their keys meets the queries once more.
    q, k, v = (1e4 * torch.randn(1, 1, 200, 8, dtype=torch.float64) for _ in range(3))
    problem = avow.Problem.of(q, k, v)
    assert bool((Latent().reference_error(problem) > 100 * reference_error(problem)).all())


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def _separable(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _softmax(q, 1) @ (_softmax(k, 0).T @ v)


def _latent(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Latent attention of 64 latents and segments of 64 to 200 keys without a mask, by its definition."""
    z = directions(64, torch.zeros(1, k.shape[1], dtype=torch.float64)).numpy().astype(np.longdouble)
    scale, end = np.longdouble(1 / math.sqrt(k.shape[1])), (len(k) - 1) // 64 * 64
    weights = _softmax(scale * (z @ k[:end].T), 1)
    keys, values = weights @ k[:end], weights @ v[:end]
    far = scale * (q @ keys.T) + np.log(np.longdouble(end)) - np.log(np.longdouble(64))
    return _softmax(np.concatenate([far, scale * (q @ k[end:].T)], 1), 1) @ np.concatenate([values, v[end:]])


def test_an_audit_does_not_say_who_computed_the_answer() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    shown = str(avow.audit(torch.nn.functional.scaled_dot_product_attention(q, k, v), q, k, v))
    assert "\n  compared with the target of exact\n" in shown and "method" not in shown
