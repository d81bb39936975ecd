"""Watching what others compute: broken kernels and caches are named, healthy ones are not, what is unseen is told."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    QuantizedCache,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask

import avow
from avow.errors import ParameterError
from avow.integrations import attention_audit
from avow.integrations.attention_audit import CACHE, AttentionAudit, judged
from benchmarks.auditing import FourBits, calls
from tests.helpers.tiny_models import ARCHITECTURES, Architecture

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, num_key_value_heads=2, eos_token_id=None, **sizes)).eval()


@pytest.fixture
def broken(model: Any) -> Iterator[Any]:
    """The model with a kernel that takes the values of the keys before, in its middle layer."""

    def off_by_one(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        v = v.roll(1, -2) if module.layer_idx == 1 else v
        out = sdpa(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1, scale=options["scaling"], enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("off_by_one", off_by_one)
    AttentionMaskInterface.register("off_by_one", sdpa_mask)
    model.set_attn_implementation("off_by_one")
    yield model
    model.set_attn_implementation("sdpa")


def written(model: Any, more: int = 20, rows: int = 1, **options: Any) -> Tensor:
    ids = torch.arange(3, 3 + 12 * rows).reshape(rows, 12)
    asked = {"max_new_tokens": more, "min_new_tokens": more, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    out: Tensor = model.generate(ids, **asked, **options)
    return out


def names(report: AttentionAudit) -> list[str]:
    return [layer.name for layer in report.alarms]


def heads(n: int = 32, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, n, 16, dtype=torch.float64).to(dtype).unbind()
    return q, k, v


def test_a_broken_kernel_is_named_by_its_layer(broken: Any) -> None:
    with avow.auditing(broken, seed=0) as report:
        written(broken)
    assert names(report) == ["model.layers.1.self_attn"] and not report.healthy
    assert report.alarms[0].first == 1
    assert "ALARM in 1 layer: model.layers.1.self_attn" in str(report)


def test_a_cache_of_four_bits_is_named_and_not_the_kernel_that_reads_it(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    cache.layers[2] = FourBits()
    with avow.auditing(model, seed=0) as report:
        written(model, past_key_values=cache)
    assert names(report) == ["model.layers.2.self_attn" + CACHE]
    assert report.alarms[0].kernel == "FourBits"


def test_a_cache_of_transformers_in_eight_bits_is_named(model: Any) -> None:
    with avow.auditing(model, seed=0) as report:
        written(model, past_key_values=QuantizedCache(backend="fp8", config=model.config))
    assert names(report) == [f"model.layers.{i}.self_attn{CACHE}" for i in range(3)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "avow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_model_raises_no_alarm_and_writes_the_same(
    model: Any, implementation: str, dtype: torch.dtype
) -> None:
    import avow.integrations.transformers

    model.to(dtype).set_attn_implementation(implementation)
    try:
        alone = written(model, rows=2)
        with avow.auditing(model, rate=0.2) as report:
            watched = written(model, rows=2)
    finally:
        model.float().set_attn_implementation("sdpa")
    assert torch.equal(alone, watched)
    assert report.healthy and not report.unseen, str(report)
    assert set(report.layers) == {f"model.layers.{i}.self_attn{end}" for i in range(3) for end in ("", CACHE)}
    assert all(layer.calls == 20 for layer in report.layers.values())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_no_architecture_of_transformers_is_an_alarm(architecture: Architecture, implementation: str) -> None:
    torch.manual_seed(0)
    model = architecture.build()
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")
    with torch.no_grad(), avow.auditing(model, rate=1.0) as report:
        model(**architecture.inputs("left"))
    assert report.healthy, str(report)
    assert sum(layer.recomputed for layer in report.layers.values()) >= 100
    assert not any("could be seen" in reason for reason in report.unseen)


def test_sinks_and_soft_caps_of_models_are_understood() -> None:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config = GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1)
    for model in (GptOssForCausalLM(config), Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=0.5))):
        with torch.no_grad(), avow.auditing(model.eval(), rate=1.0) as report:
            for name, weight in model.named_parameters():
                weight.normal_(0, 1.0 if "sinks" in name else 0.3)
            model.set_attn_implementation("eager")
            model(torch.arange(3, 15)[None])
        assert report.healthy and {layer.kernel for layer in report.layers.values()} >= {"eager"}, str(report)


def test_healthy_calls_of_every_type_raise_no_alarm() -> None:
    with avow.auditing(rate=0.5) as report:
        for call in calls(400, random.Random(4)):
            call()
    assert report.healthy, str(report)
    assert sum(layer.recomputed for layer in report.layers.values()) > 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_rounding_too_coarse_for_the_type_is_an_alarm_and_its_own_is_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrower = {torch.float64: torch.float32, torch.float32: torch.bfloat16}.get(dtype, torch.float8_e5m2)
    own = attention_audit._SDPA.decompose

    class Coarse:
        def decompose(self, q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
            return own(q, k, v.to(narrower).to(dtype), *more, **options)

    q, k, v = heads(dtype=dtype)
    with avow.auditing(rate=1.0) as report:
        sdpa(q, k, v)
    assert report.healthy
    monkeypatch.setattr(attention_audit, "_SDPA", Coarse())
    with avow.auditing(rate=1.0) as report:
        sdpa(q, k, v)
    assert report.alarms and report.alarms[0].recomputed == 256


def test_a_tolerance_decides_what_is_an_alarm() -> None:
    q, k, v = heads(dtype=torch.bfloat16)
    for tol, alarm in ((1e-5, True), (1e-1, False)):
        with avow.auditing(rate=1.0, tol=tol) as report:
            sdpa(q, k, v)
        assert bool(report.alarms) is alarm and all(row.allowed == tol for row in report.layers.popitem()[1].worst)


def test_a_rate_that_says_nothing_about_other_rows_is_named() -> None:
    q = torch.randn(1, 2, 30, 8)
    with avow.auditing() as low:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with avow.auditing(rate=0.5) as high:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert "too rarely to say anything about the others of a layer's 60 rows; a higher rate would." in str(low)
    assert "at most 6 rows of a layer have larger errors" in str(high) and "too rarely" not in str(high)


def test_errors_are_those_of_an_audit() -> None:
    q, k, v = heads(dtype=torch.bfloat16)
    mask = torch.rand(2, 1, 32, 32) < 0.7
    with avow.auditing(rate=1.0) as report:
        out = sdpa(q, k, v, mask)
    (layer,) = report.layers.values()
    wanted = avow.audit(out, q, k, v, mask=mask, coverage=0.999999, confidence=0.999999)
    assert layer.recomputed + layer.unjudged == 256
    assert math.isclose(layer.error, float(wanted.errors.max()), rel_tol=1e-4)
    assert math.isclose(layer.relative, float(wanted.relative_errors.max()), rel_tol=1e-4)


def test_masks_scales_and_shared_keys_are_understood() -> None:
    q, k, v = heads()
    bias = torch.randn(4, 32, 32).masked_fill(torch.rand(4, 32, 32) < 0.3, -math.inf)
    bias[..., 0] = 0
    with avow.auditing(rate=1.0) as report:
        sdpa(q, k, v, bias - 300, scale=0.7)
        sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
        sdpa(q[0, 0], k[0, 0], v[0, 0])
        sdpa(q[:, None], k[:, None], v[:, None], torch.rand(32, 32) < 0.9)
    assert report.healthy and len(report.layers) == 4, str(report)
    assert sum(layer.recomputed for layer in report.layers.values()) == 256 * 3 + 32


def test_flex_attention_is_watched_with_its_masks_and_scores() -> None:
    q, k, v = heads()

    def near(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row - key).abs() < 3 + h

    def bent(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return 2 * torch.tanh(score / 2) + 0.1 * (row - key)

    mask = create_block_mask(near, 2, 4, 32, 32, device="cpu")
    with avow.auditing(rate=1.0) as report:
        flex_attention(q, k, v, score_mod=bent, block_mask=mask)
        flex_attention(q, k, v, score_mod=bent)
    assert report.healthy and {x.kernel for x in report.layers.values()} == {"flex_attention"}
    assert sum(layer.recomputed for layer in report.layers.values()) == 512


def test_calls_of_other_threads_under_autocast_and_in_inference_mode_are_seen() -> None:
    q, k, v = heads()

    def work() -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            sdpa(q, k, v)

    with avow.auditing(rate=1.0) as report:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (layer,) = report.layers.values()
    assert (layer.calls, layer.recomputed, layer.dtype) == (4, 1024, "bfloat16") and report.healthy


def test_gradients_are_those_without_watching() -> None:
    q, k, v = (x.requires_grad_() for x in heads())
    plain = torch.autograd.grad(sdpa(q, k, v, is_causal=True).square().sum(), (q, k, v))
    with avow.auditing():
        watched = torch.autograd.grad(sdpa(q, k, v, is_causal=True).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_draws_of_the_caller_are_not_moved() -> None:
    q, k, v = heads()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with avow.auditing(rate=1.0):
        sdpa(q, k, v)
    assert torch.equal(torch.rand(3), wanted)


def test_nothing_stays_hooked(model: Any) -> None:
    before = AttentionInterface.get_interface, Cache.update, Cache.crop, flex_attention
    with avow.auditing(model), avow.auditing():
        assert AttentionInterface.get_interface is not before[0]
    import torch.nn.attention.flex_attention as flex

    assert (AttentionInterface.get_interface, Cache.update, Cache.crop, flex.flex_attention) == before
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    with avow.auditing() as report:
        pass
    sdpa(*heads())
    assert not report.layers and "nothing is said" in str(report) and not report.healthy


def test_two_reports_at_once_both_see_a_call() -> None:
    with avow.auditing(rate=1.0) as first:
        with avow.auditing(rate=1.0) as second:
            sdpa(*heads())
        sdpa(*heads())
    counts = [sum(layer.recomputed for layer in report.layers.values()) for report in (first, second)]
    assert counts == [512, 256]


class Block(nn.Module):
    """An attention module that computes by itself, or by PyTorch's function."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.seen, self.project = seen, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return sdpa(x, x, x) if self.seen else torch.softmax(x @ x.mT / 4, -1) @ x


class SelfAttention(Block):
    pass


def test_modules_of_any_model_name_their_calls_and_those_that_are_not_seen_are_told() -> None:
    model = nn.Sequential(SelfAttention(True), SelfAttention(False))
    with avow.auditing(model, rate=1.0) as report:
        model(torch.randn(1, 2, 9, 16))
    assert list(report.layers) == ["0"]
    assert list(report.unseen) == ["1 (SelfAttention) ran without a call that could be seen"]


def test_attention_of_torch_modules_is_seen_without_weights_and_told_of_with_them() -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 9, 16)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2).eval()
    model = nn.ModuleDict({"layer": layer, "encoder": encoder})
    with torch.no_grad(), avow.auditing(model, rate=1.0) as report:
        layer(x, x, x, need_weights=False)
        encoder(x)
    assert report.healthy and not report.unseen
    assert list(report.layers) == ["layer", *(f"encoder.layers.{i}.self_attn" for i in range(2))]
    with torch.no_grad(), avow.auditing(model, rate=1.0) as report:
        layer(x, x, x)
    (told,) = report.unseen
    assert not report.layers and told.startswith(
        "layer (MultiheadAttention) ran without a call that could be seen; pass"
    )
    assert torch.backends.mha.get_fastpath_enabled()


def test_compiled_code_is_told_of(model: Any) -> None:
    compiled = torch.compile(nn.Sequential(SelfAttention(True)), backend="eager")
    with avow.auditing(compiled) as report:
        compiled(torch.randn(1, 2, 9, 16))
    assert any("is compiled" in reason for reason in report.unseen)


def test_code_that_was_compiled_before_is_told_of() -> None:
    function = torch.compile(lambda q, k, v: sdpa(q, k, v), backend="aot_eager")
    function(*heads())
    for _ in range(2):  # nothing is traced any more
        with avow.auditing() as report:
            function(*heads())
        assert not report.layers and list(report.unseen) == ["compiled code ran: attention inside it may not be seen"]
    with avow.auditing() as report, torch.compiler.set_stance("force_eager"):
        function(*heads())
    assert report.layers and not report.unseen


def test_code_compiled_after_an_audit_has_its_gradients() -> None:
    def gradient(attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = (x.requires_grad_() for x in heads())
        attention(q, k, v).sum().backward()
        assert q.grad is not None
        return q.grad

    def compiled() -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(lambda q, k, v: sdpa(q, k, v), backend="aot_eager")  # type: ignore[no-any-return]

    # What earlier tests had traced would hide what tracing inside the block leaves behind.
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    with avow.auditing():
        assert torch.equal(gradient(compiled()), gradient(sdpa))
    assert torch.equal(gradient(compiled()), gradient(sdpa))


def test_dropout_is_told_of() -> None:
    with avow.auditing(rate=1.0) as report:
        sdpa(*heads(), dropout_p=0.5)
    assert not report.layers and any("drop weights at random" in reason for reason in report.unseen)


def test_what_a_cache_is_told_to_forget_is_no_alarm(model: Any) -> None:
    with avow.auditing(model, rate=0.5) as report:
        written(model, num_beams=3)
    assert not report.alarms and any("reorder_cache" in reason for reason in report.unseen)
    with avow.auditing(model, rate=0.5) as report:
        written(model, cache_implementation="static")
    assert not report.alarms and any("gave back other tokens" in reason for reason in report.unseen)


def test_padding_is_no_alarm(model: Any) -> None:
    ids = torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with avow.auditing(model, rate=1.0) as report:
            model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert report.healthy, str(report)
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("window", [None, 5])
def test_masks_of_flash_attention_are_understood(window: int | None) -> None:
    """Padding as (batch, keys), the last row beside the last key, and a window: as its kernels take them."""

    def toy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        (n, s), width = (q.shape[2], k.shape[2]), options.get("sliding_window")
        row, key = torch.arange(n)[:, None] + s - n, torch.arange(s)[None]
        seen = (key <= row) & (key > row - width) if width else key <= row
        shown = seen.expand(q.shape[0], 1, n, s) if mask is None else seen & mask[:, None, None, :s].bool()
        return sdpa(q, k, v, shown, scale=options["scaling"], enable_gqa=True).transpose(1, 2), None

    AttentionInterface.register("toy_flash", toy)
    AttentionMaskInterface.register("toy_flash", flash_attention_mask)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=99, num_key_value_heads=2, eos_token_id=None, sliding_window=window, **sizes)
    model = MistralForCausalLM(config).eval()
    model.config._attn_implementation_internal = "toy_flash"  # by its name transformers would look for a package
    for mask in (torch.ones(2, 12), torch.cat([torch.zeros(2, 4), torch.ones(2, 8)], 1)):
        ids = torch.randint(3, 99, (2, 12))
        with avow.auditing(model, rate=1.0) as report:
            model.generate(ids, attention_mask=mask.long(), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert report.healthy, str(report)
        assert {layer.kernel for layer in report.layers.values()} >= {"toy_flash"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_answers_that_are_not_finite_are_alarms_and_inputs_that_are_not_are_unjudged(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = heads()
    spoilt = v.clone()
    spoilt[0, 0, 3, 1] = bad
    with avow.auditing(rate=1.0) as report:
        sdpa(q, k, spoilt)
    (layer,) = report.layers.values()
    assert (layer.unjudged, layer.recomputed, layer.alarms) == (32, 224, 0)
    asked = attention_audit._Asked(torch.float32, "cpu", 16, 32, 16, 0.25, False, False)
    found = judged(asked, np.array([bad, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None])
    assert found.least[0] == math.inf > found.allowed[0]


def test_each_row_is_drawn_with_the_probability_that_is_stated() -> None:
    report = AttentionAudit(0.1, None, 0.99, seed=5)
    drawn = [report._draw(50, 0.1) for _ in range(4000)]
    counts = torch.zeros(50)
    for some in drawn:
        assert some == sorted(set(some)) and all(0 <= row < 50 for row in some)
        counts[some] += 1
    # 4,000 draws of probability 0.1: five deviations are 95.
    assert bool(((counts - 400).abs() < 95).all())
    assert report._draw(7, 1.0) == list(range(7)) and report._draw(0, 0.5) == []


def test_what_is_said_of_the_other_rows_is_the_inequality() -> None:
    report = AttentionAudit(1e-3, None, 0.99, seed=0)
    assert (1 - 1e-3) ** (report.beyond + 1) <= 0.01 < (1 - 1e-3) ** report.beyond
    assert AttentionAudit(1.0, None, 0.99, seed=0).beyond == 0


def test_the_report_is_json(broken: Any) -> None:
    with avow.auditing(broken, rate=0.1, seed=2) as report:
        written(broken)
    document = json.loads(report.to_json())
    assert not document["healthy"] and [x["name"] for x in document["layers"] if x["alarms"]] == names(report)
    assert repr(report).startswith("<AttentionAudit of 6 layers: ALARM in 1 layer")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0}, "rate=0 must be above 0 and at most 1"),
        ({"rate": 1.5}, "rate=1.5 must be above 0 and at most 1"),
        ({"rate": "much"}, "rate='much' must be above 0"),
        ({"tol": -1.0}, "tol=-1.0 must be a number above 0"),
        ({"confidence": 1.0}, "confidence=1.0 must lie strictly between 0 and 1"),
        ({"model": 3}, "model=3 must be a torch.nn.Module"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        avow.auditing(**options)


def test_rows_of_many_heads_have_the_errors_that_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared keys, a mask of each head, values that no row sees: all rows at once, and in parts of one row each."""
    torch.manual_seed(7)
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 3, 14, 16), torch.randn(2, 3, 14, 16)
    mask = torch.rand(2, 6, 9, 14) < 0.6
    mask[..., 0], mask[:, 2:4, :, 5] = True, False
    k[:, 1, 5] = v[:, 1, 5] = math.nan
    found = []
    for most in (2**24, 1):
        monkeypatch.setattr(attention_audit, "_MOST", most)
        with avow.auditing(rate=1.0, seed=0) as report:
            torch.nn.functional.scaled_dot_product_attention(q, k.nan_to_num(), v.nan_to_num(), mask, enable_gqa=True)
        (layer,) = report.layers.values()
        found.append((layer.recomputed, layer.unjudged, layer.alarms, round(math.log2(layer.error), 3)))
    assert found[0] == found[1] and found[0][:3] == (108, 0, 0)
    call = attention_audit.Call(q, k, v, 0.25, mask)
    places = [(head, row) for head in range(6) for row in range(9)]
    together, _ = call.measure((1,), places, None)
    alone = torch.cat([call.measure((1,), [place], None)[0] for place in places])
    assert bool(together.isfinite().all())
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-14)


def test_a_token_that_is_changed_after_a_cache_was_given_it_is_reported() -> None:
    """By whoever holds it, a cache among them, while the audit has only a reference: no alarm and no silence."""
    for changed in (True, False):
        shadow = attention_audit._Shadow(0, "TheirLayer")
        k, v = (torch.randn(1, 2, 1, 8, requires_grad=True) * 2 for _ in range(2))
        shadow.append(k, v, attention_audit.versions_of(k, v), k)
        assert not any(x.requires_grad for x in shadow._given[0][:2])
        if changed:
            k.detach().mul_(2.0)
        assert (shadow.of(0) is None) is changed
        assert ("changed in place" in shadow.wrong) is changed
