"""A named method answers the calls it is for, exact attention the others, and each certificate says which and why."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import avow
from avow.core import Certificate
from avow.core.record import Record
from avow.errors import ParameterError, ToleranceUnreachable
from avow.integrations.transformers import CertifiedCache, Setting, enable, routing
from avow.integrations.transformers.call_view import CallView
from avow.integrations.transformers.enabling import USUAL_TOL, own_cache
from avow.methods.sparse import Sparse
from avow.numerics.norms import row_norms
from tests.helpers.layer_audit import audited
from tests.helpers.model_folders import LLAMA, long_model
from tests.helpers.tiny_models import ARCHITECTURES, WORDS

NEW = 4
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
UNCACHED = "the keys are not in a CertifiedCache"


def ids(length: int = 200, batch: int = 1) -> Tensor:
    return torch.randint(3, WORDS, (batch, length))


def parts(certificates: Record) -> tuple[list[Certificate], list[Certificate]]:
    """The certificates of the prompt, and those of the tokens that were written one by one, of two layers."""
    assert len(certificates) == 2 * NEW
    every = [certificate for _, certificate in certificates]
    return every[:2], every[2:]


def methods(certificates: list[Certificate]) -> set[str]:
    return {certificate.method for certificate in certificates}


@pytest.mark.parametrize("limits", [{}, {"tol": 0.2}, {"rtol": 0.5}])
def test_a_method_that_selects_tokens_writes_and_exact_attention_reads(limits: dict[str, Any]) -> None:
    model = long_model()
    enable(model, method="sparse", **limits)
    with avow.record() as certificates, audited() as found:
        model.generate(ids(), **GREEDY)
    prompt, written = parts(certificates)
    assert methods(prompt) == {"exact"} and methods(written) == {"sparse"}
    named = ", ".join(f"{name}={value:g}" for name, value in (limits or {"tol": USUAL_TOL}).items())
    assert all(x.reason.startswith(f"sparse ({named}) is for few queries, and these are 200") for x in prompt)
    assert certificates.keeps(**(limits or {"tol": USUAL_TOL})) and all(audit.kept for audit in found)
    assert max(float(audit.errors.amax()) for audit in found[2:]) > 1e-6, "tokens were left out"


def test_the_name_of_an_implementation_follows_the_same_rules(tmp_path: Any) -> None:
    long_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="avow|sparse").eval()
    with avow.record() as certificates:
        model.generate(ids(), **GREEDY, past_key_values=CertifiedCache(model.config))
    prompt, written = parts(certificates)
    assert methods(prompt) == {"exact"} and methods(written) == {"sparse"} and certificates.keeps(USUAL_TOL)


def test_without_our_cache_a_method_that_selects_tokens_says_that_it_does_not_run() -> None:
    model = LLAMA.build(attn_implementation="avow|sparse", max_position_embeddings=512)
    with (
        avow.record() as certificates,
        pytest.warns(UserWarning, match=r"After enable\(model, ...\) generate\(\) keep"),
    ):
        out = model.generate(ids(), **GREEDY, return_dict_in_generate=True)
    assert type(out.past_key_values) is DynamicCache
    _, written = parts(certificates)
    assert methods(written) == {"exact"}
    assert all(x.reason.startswith(f"sparse (tol=0.01) is for caches, and {UNCACHED}") for x in written)


def test_padding_is_read_exactly_and_that_is_said() -> None:
    model, text = long_model(), ids(40, batch=2)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    enable(model, method="sparse")
    with avow.record() as certificates, pytest.warns(UserWarning, match=r"with padding"):
        model.generate(text, attention_mask=mask, **GREEDY)
    _, written = parts(certificates)
    assert methods(written) == {"exact"}
    assert all("is for caches, and a mask hides some tokens" in x.reason for x in written)


@pytest.mark.parametrize("window", [None, 9])
def test_with_padding_no_key_or_value_is_measured_again(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache knows of lengths is enough; and it is right, also within a window."""
    model, text = ARCHITECTURES[1].build(sliding_window=window, max_position_embeddings=512), ids(40, batch=2)
    mask = torch.ones_like(text)
    mask[0, :35] = 0
    measured = []

    def counted(x: Tensor, name: str, *more: Any, **named: Any) -> Tensor:
        measured.append((name, x.shape[-2]))
        return row_norms(x, name, *more, **named)

    monkeypatch.setattr("avow.core.problem.row_norms", counted)
    enable(model, tol=1e-2)
    with audited() as found:
        model.generate(text, attention_mask=mask, **GREEDY)
    assert all(audit.kept and audit.certificate.keeps(1e-2) for audit in found) and len(found) == 2 * NEW
    assert {n for name, n in measured if name in "kv"} == {40}, "only those of the prompt"


@torch.no_grad()
def test_a_plans_exact_heads_share_keys_as_they_lie() -> None:
    """One token behind keys that are in no cache of ours: no head of them is copied. Nor where heads stand together."""
    exact, sparse = Setting(), Setting(1e-2, "sparse")
    query, key, value = torch.randn(1, 6, 1, 8), torch.randn(1, 3, 50, 8), torch.randn(1, 3, 50, 8)
    seen = []

    def counted(q: Tensor, k: Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append((tuple(q.shape), k.data_ptr()))
        return avow.attend(q, k, *arguments, **named)

    view = CallView(key, value, None, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "attend", counted)
        settings = (exact, sparse, exact, exact, sparse, exact)
        answer = routing.by_heads(settings, query, view)
        assert seen == [((1, 6, 1, 8), key.data_ptr())]
        assert answer.certificate.reason == "sparse (tol=0.01) is for caches, and the keys are not in a CertifiedCache"
        assert answer.certificate.keeps(1e-2)
        torch.testing.assert_close(answer.out, avow.attend(query, key, value, enable_gqa=True).out)
        seen.clear()
        several, features = torch.randn(1, 6, 40, 8), Setting(None, "random_features", parameters={"features": 16})
        text = CallView(torch.randn(1, 3, 40, 8), torch.randn(1, 3, 40, 8), None, True)
        routing.by_heads((features, features, exact, exact, exact, exact), several, text)
        assert ((1, 4, 40, 8), text.key[:, 1:].data_ptr()) in seen


def test_python_shows_a_warning_once() -> None:
    model = LLAMA.build(attn_implementation="avow|sparse", max_position_embeddings=512)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        routing.__dict__.pop("__warningregistry__", None)
        for length in (20, 30):
            model.generate(ids(length), **GREEDY)
    assert len(shown) == 1


@pytest.mark.parametrize("own", [True, False])
def test_a_method_for_whole_texts_reads_and_exact_attention_writes(own: bool) -> None:
    model = long_model()
    enable(model, method="random_features", features=16)
    past = own_cache(model) if own else DynamicCache(config=model.config)
    with avow.record() as certificates:
        model.generate(ids(), **GREEDY, past_key_values=past)
    prompt, written = parts(certificates)
    assert methods(prompt) == {"random_features"} and methods(written) == {"exact"}
    assert all(x.reason.startswith("random_features is for several queries at once, and this is one") for x in written)
    assert max(x.bound for x in written) < 1e-3


@torch.no_grad()
def test_a_method_that_cannot_prove_its_tolerance_gives_way_to_exact() -> None:
    model, rule = long_model(), r"low_rank: tol=0\.001 is below the .* it can prove"
    enable(model, 1e-3, "low_rank", rank=2)
    with avow.record() as certificates, pytest.warns(UserWarning, match=r"method='low_rank' could not answer every"):
        model(ids(40))
    assert certificates.keeps(1e-3) and len(certificates) == 2
    for _, certificate in certificates:
        assert certificate.method == "exact" and re.match(rule, certificate.reason)


@torch.no_grad()
def test_a_method_that_does_not_fit_a_short_text_gives_way_to_exact() -> None:
    model = LLAMA.build(attn_implementation="avow|low_rank", max_position_embeddings=512)
    with avow.record() as certificates, pytest.warns(UserWarning, match=r"method='low_rank' could not answer every"):
        model(ids(20))
        model(ids(100))
    short, long = [x for _, x in certificates[:2]], [x for _, x in certificates[2:]]
    assert methods(short) == {"exact"} and methods(long) == {"low_rank"}
    assert all(x.reason.startswith("low_rank: rank=64 exceeds 20 keys") for x in short)


@torch.no_grad()
def test_what_exact_attention_cannot_do_either_is_an_error() -> None:
    model = long_model().to(torch.bfloat16)
    for method in ("auto", "exact", "sparse"):
        enable(model, 1e-5, method)
        with pytest.raises(ToleranceUnreachable, match=r"the best bound that can be proved in bfloat16"):
            model(ids(20))


@torch.no_grad()
def test_few_queries_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method pays for few queries without a sketch, and weighing them takes longer than the answer."""
    model = long_model()
    enable(model, tol=1e-2)
    past = DynamicCache(config=model.config)
    model(ids(), past_key_values=past)
    monkeypatch.setattr("avow.planner.candidates", lambda *_: pytest.fail("the methods were weighed"))
    with avow.record() as certificates:
        model(ids(1), past_key_values=past)
        model(ids(5), past_key_values=past)
    assert len(certificates) == 4 and certificates.keeps(1e-2)
    one, few = "one query, and the keys are not in", "5 queries, and the keys are not in"
    assert [x.reason[: len(y)] for (_, x), y in zip(certificates, (one, one, few, few), strict=True)] == [
        one,
        one,
        few,
        few,
    ]
    enable(model)
    model(ids())
    enable(model, tol=1e-2)
    # A kind of problem that no method has failed on yet.
    with pytest.raises(pytest.fail.Exception, match=r"the methods were weighed"):
        model(ids()[:, :-1])


@torch.no_grad()
@pytest.mark.parametrize("method", ["auto", "sparse"])
def test_several_tokens_after_others_are_answered_by_the_cache(method: str) -> None:
    """As assisted decoding asks: the cache's answer to each of them is that of a token alone."""
    model, text = long_model(), ids(206)
    enable(model, 1e-2, method)
    alone, together = own_cache(model), own_cache(model)
    for past in (alone, together):
        model(text[:, :200], past_key_values=past)
    one_by_one = torch.cat([model(text[:, i : i + 1], past_key_values=alone).logits for i in range(200, 206)], 1)
    with avow.record() as certificates, audited() as found:
        at_once = model(text[:, 200:], past_key_values=together).logits
    assert {x.method for _, x in certificates} == {"exact" if method == "auto" else method}
    assert not any("the keys are not" in x.reason or "a mask hides" in x.reason for _, x in certificates)
    assert len(found) == 2 and all(audit.kept for audit in found) and found[0].certificate.rows.shape[-1] == 6
    assert float((one_by_one - at_once).abs().amax()) < (1e-4 if method == "auto" else 0.5)


@torch.no_grad()
def test_several_tokens_that_do_not_see_all_before_them_are_not_answered_by_the_cache() -> None:
    model, text = long_model(), ids(60)
    enable(model, method="sparse")
    sees = torch.ones(1, 1, 3, 60, dtype=torch.bool).tril(57)
    for change in ((2, 0), (0, 59), (1, 30)):
        past, mask = own_cache(model), sees.clone()
        mask[0, 0, *change] ^= True
        model(text[:, :57], past_key_values=past)
        with avow.record() as certificates, audited() as found, pytest.warns(UserWarning):
            model(text[:, 57:], past_key_values=past, attention_mask=mask)
        assert all("a mask hides some tokens" in x.reason for _, x in certificates)
        assert len(found) == 2 and all(audit.kept for audit in found)


@dataclass(frozen=True)
class Plugin(Sparse):
    """A method of somebody else's that selects tokens."""

    name: ClassVar[str] = "plugin"


def test_the_rules_ask_for_properties_and_not_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = avow.all_methods() | {"plugin": Plugin}
    monkeypatch.setattr("avow.methods._loaded", lambda: (known, {}))
    setting = Setting(method="plugin")
    assert setting.tol == USUAL_TOL
    applicable, reason = routing._applicable(setting, 70, "")
    assert applicable.method == "exact" and reason == "plugin (tol=0.01) is for few queries, and these are 70"
    assert routing._applicable(setting, 1, "") == (setting, "")


@pytest.mark.parametrize("parameter", [{"bits": 3}, {"drop": 0.1}, {"chance": 0.1}])
def test_what_the_cache_sets_is_not_a_parameter(parameter: dict[str, Any]) -> None:
    (name, value), *_ = parameter.items()
    words = rf"^sparse: {name}={value} is set by the cache of a model; leave it out; give tol= or confidence="
    with pytest.raises(ParameterError, match=words):
        enable(long_model(), method="sparse", **parameter)
    with pytest.raises(ParameterError, match=words):
        enable(long_model(), method=Sparse(**parameter))


@torch.no_grad()
def test_gradients_are_those_of_exact_attention_whatever_selects_tokens() -> None:
    model = long_model()
    enable(model, method="sparse")
    with torch.enable_grad(), avow.record() as certificates:
        model(ids(20), use_cache=False).logits.sum().backward()
    assert {x.method for _, x in certificates} == {"exact"}
    assert all(bool(weight.grad.abs().sum() > 0) for weight in model.parameters() if weight.ndim == 2)


@torch.no_grad()
def test_an_encoder_reads_by_the_method_and_decoders_look_at_it_exactly() -> None:
    model = next(x for x in ARCHITECTURES if x.name == "BartForConditionalGeneration").build()
    enable(model, method="random_features", features=8)
    with avow.record() as certificates:
        model.generate(ids(30), **GREEDY)
    layers = certificates.layers
    assert methods(layers["model.encoder.layers.0.self_attn"]) == {"random_features"}
    assert methods(layers["model.decoder.layers.0.encoder_attn"]) == {"exact"}
