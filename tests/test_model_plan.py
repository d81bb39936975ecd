"""A plan goes into its own model and no other; each head then answers as the plan says, and verify measures that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import avow
from avow.core import Certificate
from avow.errors import AvowError, FileError, ParameterError
from avow.integrations.transformers import ModelPlan, Setting, disable, enable, read_plan, verify
from avow.integrations.transformers.call_view import CallView
from avow.integrations.transformers.enabling import layers, own_cache, replaceable
from avow.integrations.transformers.model_plan import _Audit, fingerprint, verify_steps
from avow.integrations.transformers.routing import by_heads
from avow.numerics.softmax import softmax_average
from avow.report.profile import verdict_line
from tests.helpers.layer_audit import ask_sketches, audited
from tests.helpers.model_folders import LLAMA, long_model
from tests.helpers.tiny_models import ARCHITECTURES, WORDS

LOOSE, TIGHT, EXACT, SPARSE = Setting(0.3), Setting(1e-2), Setting(method="exact"), Setting(0.3, "sparse")
RANDOM = Setting(0.5, "random_features", 0.9, {"features": 8})
LANDMARKS = Setting(1.0, "low_rank", None, {"rank": 8})


def ids(length: int = 200) -> Tensor:
    return torch.randint(3, WORDS, (1, length))


def planned(model: Any, *heads: Setting, tol: float = 0.3) -> ModelPlan:
    return ModelPlan("tiny", fingerprint(model), tol, {name: heads for name in replaceable(model)})


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = planned(long_model(), LOOSE, EXACT, RANDOM, SPARSE)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path / "plan.json") == plan
    assert (plan.heads, plan.changed) == (8, 6)
    assert repr(plan) == f"<ModelPlan of {plan.model}: 6 of 8 heads within {plan.tol:g}, the others exact>"


@torch.no_grad()
def test_each_head_answers_under_its_own_setting() -> None:
    q, k, v = 0.2 * torch.randn(1, 4, 6, 16), 0.2 * torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    settings = (LANDMARKS, EXACT, TIGHT, LANDMARKS)
    out, certificate = by_heads(settings, q, CallView(k, v, None, False))
    truth = softmax_average(avow.Problem.of(q, k, v, enable_gqa=True))
    longest = torch.linalg.vector_norm(v, dim=-1).amax(-1).repeat_interleave(2, 1)
    errors = torch.linalg.vector_norm(out - truth, dim=-1) / longest.unsqueeze(-1)
    bounds, wrong = certificate.rows[0].amax(-1), errors[0].amax(-1)
    assert bool((errors <= certificate.rows).all())
    assert bool((bounds[[1, 2]] < 1e-3).all()) and bool((bounds[[0, 3]] > 1e-2).all())
    assert bool((wrong[[0, 3]] > 1e-4).all()) and bool((wrong[[1, 2]] < 1e-4).all()), "two heads did approximate"
    assert set(certificate.method.split(" + ")) == {"low_rank", "exact"}


@torch.no_grad()
@pytest.mark.parametrize("own_cache", [True, False])
def test_a_planned_model_keeps_every_certificate_when_it_reads_and_when_it_writes(
    own_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_sketches(monkeypatch)
    model = long_model()
    plan = planned(model, LOOSE, EXACT, TIGHT, LOOSE)
    all_alike = {**plan.layers, "model.layers.1.self_attn": (LOOSE,) * 4}
    avow.apply(model, dataclasses.replace(plan, layers=all_alike))
    more = {} if own_cache else {"past_key_values": DynamicCache(config=model.config)}
    with audited() as found, avow.record() as certificates:
        model.generate(ids(), max_new_tokens=4, min_new_tokens=4, do_sample=False, **more)
    assert len(found) == 8 and all(audit.kept for audit in found)
    assert certificates.keeps(0.3)
    assert max(float(audit.errors[:, 2].amax()) for audit in found[::2]) <= 1e-2
    assert (max(float(audit.errors.amax()) for audit in found) > 1e-4) == own_cache, "a sketch leaves tokens out"
    # A cache is read once for all heads of a layer: in full, if one of them is exact.
    first, second = ({x.method for x in made} for made in certificates.layers.values())
    assert first == {"exact"} and second == ({"exact", "sparse"} if own_cache else {"exact"})
    last = [made[-1].reason for made in certificates.layers.values()]
    shared = "heads with different settings share one cache"
    assert last[0].startswith(shared) if own_cache else "the keys are not in a CertifiedCache" in last[1]


@torch.no_grad()
def test_under_a_plan_no_keys_are_copied_for_a_new_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = long_model()
    avow.apply(model, planned(model, LOOSE, EXACT, TIGHT, LOOSE))
    past = own_cache(model)
    model(ids(), past_key_values=past)
    shapes: list[tuple[int, ...]] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                shapes.append(tuple(out.shape))
            return out

    with Spy():  # type: ignore[no-untyped-call]
        model(ids(1), past_key_values=past)
    assert len(shapes) > 50
    assert not [shape for shape in shapes if len(shape) == 4 and shape[2] >= 200], "nothing as long as the text is made"


@torch.no_grad()
def test_a_text_that_is_read_at_once_is_not_answered_token_by_token() -> None:
    model = long_model()
    avow.apply(model, planned(model, *[TIGHT] * 4))
    with avow.record() as certificates:
        model(ids())
    assert {x.method for _, x in certificates} == {"exact"} and certificates.keeps(1e-2)


@torch.no_grad()
def test_a_plan_may_ask_for_a_method_by_name_and_for_that_alone() -> None:
    model = long_model()
    avow.apply(model, planned(model, *[SPARSE] * 4))
    past = own_cache(model)
    with avow.record() as certificates:
        model(ids(), past_key_values=past)
        model(ids(1), past_key_values=past)
    read, written = certificates[:2], certificates[2:]
    assert {x.method for _, x in read} == {"exact"} and {x.method for _, x in written} == {"sparse"}
    assert all(x.reason.startswith("sparse (tol=0.3) is for few queries, and these are 200") for _, x in read)


def test_disable_takes_a_plan_back() -> None:
    model, text = long_model(), ids(30)
    with torch.no_grad():
        before = model(text).logits
        avow.apply(model, planned(model, *[LOOSE] * 4))
        disable(model)
        assert torch.equal(model(text).logits, before)
    assert not [name for module in model.modules() for name in vars(module) if "avow" in name]


def test_a_plan_of_another_model_is_refused_and_nothing_changes() -> None:
    model, other = long_model(), long_model()
    plan = planned(other, *[LOOSE] * 4)
    with pytest.raises(ParameterError) as caught:
        avow.apply(model, plan)
    own = fingerprint(model)
    words = f"plan=tiny was made for a model with the fingerprint {plan.fingerprint}, and this one's is {own}; run avow"
    assert str(caught.value).startswith(words)
    assert model.config._attn_implementation == "sdpa"
    enable(model, tol=0.1)
    before = layers(model)
    with pytest.raises(ParameterError):
        verify(model, plan, ids(), places=8)
    assert layers(model) == before


def test_a_fingerprint_tells_weights_types_and_shapes_apart_and_survives_a_copy() -> None:
    model = LLAMA.build()
    own = fingerprint(model)
    assert own == fingerprint(model) and len(own) == 12
    assert fingerprint(model.to(torch.bfloat16)) != own
    model = model.float()
    rounded = fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert fingerprint(model) != rounded


def test_a_plan_for_other_layers_or_heads_is_refused() -> None:
    model = long_model()
    plan = planned(model, *[LOOSE] * 4)
    fewer = dataclasses.replace(plan, layers=dict(list(plan.layers.items())[:1]))
    with pytest.raises(ParameterError, match=r"plan=tiny does not name the model's attention layers \(model.layers.1"):
        avow.apply(model, fewer)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ParameterError, match=r"heads of the plan=3 must be the model's 4 in model.layers.0.self_attn"):
        avow.apply(model, planned(model, *[LOOSE] * 3))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; write one with avow profile MODEL --plan"),
        ("[]", "is not a plan for a model (TypeError: "),
        ("{", "is not a plan for a model (JSONDecodeError: "),
        ('{"format": "x"}', "is not a plan for a model (ValueError: its format is 'x', not 'avow plan 1')"),
        ('{"format": "avow plan 1"}', "is not a plan for a model (KeyError: 'layers')"),
        (
            '{"format": "avow plan 1", "layers": {"a": [{"method": "none", "tol": 1}]}}',
            "holds a wrong setting (method='none' is not a method; ",
        ),
        (
            '{"format": "avow plan 1", "layers": {"a": [{"method": "exact", "tol": 1, "rows": 2}]}}',
            "is not a plan for a model (ValueError: 'rows' is not a setting of a head)",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"plan={path} {words}")


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(
        ParameterError, match=r"model=Linear must be a transformers.PreTrainedModel, or wrap one as peft does; "
    ):
        avow.apply(torch.nn.Linear(2, 2), planned(long_model(), *[LOOSE] * 4))


def test_an_exact_plan_changes_nothing_and_a_loose_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_sketches(monkeypatch)
    model, text = long_model(), ids()
    same = verify(model, planned(model, *[EXACT] * 4), text, places=24, generate=6)
    assert (same.agreement, same.matched, same.places, same.generated) == (1, 6, 24, 6)
    assert abs(same.change) < 1e-5 and same.divergence < 1e-9 and same.kept
    loose = verify(model, planned(model, *[Setting(1.0)] * 4, tol=1.0), text, places=24, generate=6)
    assert loose.divergence > 1e-4 > same.divergence and loose.largest_error > 1e-2
    assert loose.kept and loose.within and loose.certificates.bound <= 1.0
    assert (same.partial, loose.partial) == (0, 2 * (24 + 1 + 6))
    assert loose.exact_perplexity == pytest.approx(same.exact_perplexity)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("places", "generate"), [(15, 0), (15, 1), (1, 0)])
def test_verify_tells_of_as_many_steps_as_it_says(places: int, generate: int) -> None:
    model, steps = long_model(), list[str]()
    verify(model, planned(model, *[EXACT] * 4), ids(40), places, generate, steps.append)
    assert len(steps) == verify_steps(places, generate) == 3 + generate
    assert steps[-1].startswith(f"tokens {17 if generate else 1} to ")


def test_verify_measures_what_generate_does_here() -> None:
    # On a CPU short caches are read in full, whatever a plan allows: then nothing changes, and that is said.
    model = long_model()
    found = verify(model, planned(model, *[Setting(1.0)] * 4, tol=1.0), ids(), places=8, generate=4)
    assert found.partial == 0 and found.divergence < 1e-9 and found.matched == 4
    assert "this plan saves nothing here" in verdict_line(found)


def test_a_plan_that_is_applied_already_stays_applied() -> None:
    model = long_model()
    avow.apply(model, planned(model, *[LOOSE] * 4))
    before = layers(model)
    verify(model, planned(model, *[EXACT] * 4), ids(60), places=8, generate=0)
    assert layers(model) == before


@torch.no_grad()
def test_an_answer_beyond_its_bound_would_be_seen() -> None:
    problem = avow.Problem.of(*torch.randn(3, 1, 2, 30, 8))
    out, certificate = avow.attend(problem.q, problem.k, problem.v)
    honest, lying = _Audit(), _Audit()
    honest("layer", problem, out, certificate)
    lying("layer", problem, out + 0.1, certificate)
    assert honest.kept and honest.rows == 8 and not lying.kept
    boast: Certificate = dataclasses.replace(certificate, rows=certificate.rows * 0)
    lying = _Audit()
    lying("layer", problem, out, boast)
    assert not lying.kept


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ids": ids(20), "places": 19}, "tokens=20 is too short a text to predict its last 19 from at least one"),
        ({"places": 0}, "places=0 must be at least 1; try places=32"),
        ({"generate": -1}, "generate=-1 must be at least 0; try generate=32"),
        ({"ids": torch.ones(2, 90, dtype=torch.long)}, "ids.shape=(2, 90) must be (1, length); pass one text"),
    ],
)
def test_what_cannot_be_verified_is_named(arguments: dict[str, Any], words: str) -> None:
    model = long_model()
    with pytest.raises(AvowError) as caught:
        more: dict[str, Any] = {"ids": ids(90), "places": 8} | arguments
        verify(model, planned(model, *[EXACT] * 4), **more)
    assert str(caught.value).startswith(words)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_write_is_named() -> None:
    model = next(x for x in ARCHITECTURES if x.name == "BertForMaskedLM").build()
    with pytest.raises(
        ParameterError, match=r"model=BertForMaskedLM does not predict the next token of a text; verify"
    ):
        verify(model, planned(model, *[EXACT] * 4), ids(40), places=8)
