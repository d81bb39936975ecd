"""Which of transformers' own tests of a model apply to its attention, and that they hold with avow in SDPA's place.

`make test-transformers` fetches them and runs this; `make test` does not. Every test they have is in one of the lists
below: a version that brings another one fails here until it is looked at.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.theirs import FAMILIES, Family, Outcome, names, run, their_mixin

pytestmark = pytest.mark.filterwarnings("ignore")

MIXIN = their_mixin(Path(os.environ.get("AVOW_THEIR_TESTS", Path(sys.prefix) / "transformers")))

# Tests in which models attend, and the reason that some models give for skipping them.
ATTEND = {
    "test_eager_matches_sdpa_inference": "Model does not support output_attentions",
    "test_eager_matches_batched_and_grouped_inference": "does not support grouped_mm",
    "test_all_tensors_are_parameter_or_buffer": "",
    "test_batching_equivalence": "",
    "test_can_capture_specific_layers_hidden_states": "does not propagate hidden states correctly",
    "test_capture_outputs_decorator": "",
    "test_causal_lm_loss_honors_shift_labels": "No decoder-only language modeling head",
    "test_determinism": "",
    "test_enable_input_require_grads_with_gradient_checkpointing": "",
    "test_encoder_decoder_loss_no_double_shift": "No sequence-to-sequence language modeling head",
    "test_feed_forward_chunking": "",
    "test_hidden_states_output": "",
    "test_inputs_embeds": "",
    "test_inputs_embeds_matches_input_ids": "",
    "test_load_with_mismatched_shapes": "",
    "test_model_forward_default_config_values": "",
    "test_model_outputs_equivalence": "",
    "test_model_rope_scaling_from_config": "This model does not support RoPE scaling",
    "test_output_router_logits_from_config": "This model has no `output_router_logits` in its config",
    "test_problem_types": "",
    "test_resize_embeddings_untied": "",
    "test_resize_tokens_embeddings": "",
    "test_save_load": "",
    "test_training": "",
    "test_training_gradient_checkpointing": "",
    "test_training_gradient_checkpointing_use_reentrant_false": "",
    "test_training_gradient_checkpointing_use_reentrant_true": "",
}
# Tests that switch models between implementations by name; nothing attends in them.
SWITCH = [
    "test_can_set_attention_dynamically",
    "test_config_attn_implementation_setter",
    "test_sdpa_can_dispatch_non_composite_models",
]
# Tests that ask for attention weights, which avow refuses; the others that do are told that there are none.
REFUSED = {"test_capture_outputs_decorator", "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions"}
WITHOUT_WEIGHTS = {"test_model_outputs_equivalence"}

# Everything else, and why it says nothing of our attention function.
OTHERS = {
    "looks at attention weights, and sets eager attention to have them": (
        r"attention_outputs|retain_grad_hidden_states_attentions|sliding_window_mask"
    ),
    "is about another attention function": r"flash_attn_.*|flex_attention_with_grads|kernels_can_load_without_crashing",
    "needs an accelerator, or a package for one": (
        r"sdpa_can_compile_dynamic|sdpa_can_dispatch_on_flash|torch_compile_for_training|model_parallelism"
        r"|(cpu|disk)_offload.*|can_load_with_(device_context_manager|global_device_set)|.*_with_deepspeed.*"
    ),
    "is about models made of several, or of images and sound": (
        r"(attn_implementation|can_set_attention_dynamically|sdpa_can_dispatch)_composite_models?|vision_axial_rope"
        r"|internal_model_config_and_subconfig_are_same|get_(text|image|audio|video)_features_.*"
    ),
    "wants their generation tests, which the distribution does not have": "generation_tester_mixin_inheritance",
    "makes, names, saves, loads or resizes weights; nothing attends": (
        r"base_model_prefix_loads_base_weights|bc_torch_dtype|can_be_initialized_on_meta|can_init_all_missing_weights"
        r"|can_load_from_already_mapped_keys|can_load_ignoring_mismatched_shapes|can_use_safetensors"
        r"|cannot_load_with_meta_device_context_manager|correct_missing_keys|from_pretrained_no_checkpoint"
        r"|init_weights_can_init_buffers|keep_in_fp32_modules(_exist)?|load_contiguous_weights"
        r"|load_save_without_tied_weights|model_base_model_prefix|model_get_set_embeddings|model_is_small"
        r"|model_main_input_name|model_weights_reload_no_missing_tied_weights|num_layers_is_small"
        r"|resize_embeddings_untied_no_reinit_on_post_init|resize_position_vector_embeddings|reverse_loading_mapping"
        r"|save_load_keys_to_ignore_on_save|tied_head_has_a_tp_plan_entry|tied_weights_keys|torch_save_load"
        r"|tp_plan_matches_params"
    ),
    "switches checkpointing or recording on and off, or computes frequencies; nothing attends": (
        r"enable_input_require_grads|gradient_checkpointing_.*|peft_gradient_checkpointing_enable_disable"
        r"|format_of_can_record_outputs|moe_models_record_router_logits|model_rope_scaling_frequencies"
        r"|model_rope_with_partial_rotation"
    ),
}


def plain(name: str) -> str:
    """A test's name without the number and the words of its parameters."""
    return next((known for known in ATTEND if re.fullmatch(rf"{known}(_\d+(_\w+)?)?", name)), name)


def reasons(name: str) -> list[str]:
    """Why a test does not apply; none for one that does."""
    return [why for why, pattern in OTHERS.items() if re.fullmatch(pattern, name.removeprefix("test_"))]


APPLY = [name for name in names(MIXIN) if plain(name) in ATTEND or name in SWITCH]
Tally = defaultdict[str, list[tuple[str, Outcome]]]


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """What came of every test in every family; written as a table at the end."""
    found: Tally = defaultdict(list)
    yield found
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print("", *table(found), sep="\n")


def table(found: Tally) -> list[str]:
    """How often each test ran, passed, was refused and did not apply, and why not; and how often avow was called."""
    states = ["passed", "refused", "idle", "skipped", "failed"]
    lines = [f"{'test':<60}" + "".join(f"{word:>9}" for word in ["runs", *states, "calls"])]
    for name, outcomes in found.items():
        count = Counter(outcome.state for _, outcome in outcomes)
        if name in SWITCH:
            count["passed"], count["idle"] = count["passed"] + count["idle"], 0
        figures = [len(outcomes), *(count[state] for state in states), sum(outcome.calls for _, outcome in outcomes)]
        lines.append(f"{name:<60}" + "".join(f"{figure:>9}" for figure in figures))
        for state in ("idle", "skipped"):
            families = sorted({family for family, outcome in outcomes if outcome.state == state})
            if families and name not in SWITCH:
                why = ATTEND[name] if state == "skipped" else "no class of these that it looks at"
                lines.append(f"    not for {', '.join(families)}: {why}")
    for why in OTHERS:
        left = sorted(name for name in names(MIXIN) if name not in APPLY and why in reasons(name))
        lines += [f"not applicable, {len(left)}: {why}", f"    {', '.join(left)}"]
    return lines


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("name", APPLY)
def test_theirs_hold(name: str, family: Family, tally: Tally) -> None:
    outcome = run(MIXIN, family, name, weights=name not in WITHOUT_WEIGHTS)
    tally[plain(name)].append((family.name, outcome))
    if outcome.state == "skipped":
        assert ATTEND.get(plain(name)) and ATTEND[plain(name)] in outcome.why
    elif outcome.state == "refused":
        assert name in REFUSED
    else:
        assert outcome.state != "failed", outcome.why


def test_every_test_that_applies_did_attend(tally: Tally) -> None:
    """A test that only ever ran on eager attention would show nothing."""
    reached = {name for name, outcomes in tally.items() if any(outcome.calls for _, outcome in outcomes)}
    assert reached == set(ATTEND) and set(tally) == {*ATTEND, *SWITCH}


def test_every_test_is_in_one_list() -> None:
    listed = {name: (plain(name) in ATTEND) + (name in SWITCH) + len(reasons(name)) for name in names(MIXIN)}
    assert {name: many for name, many in listed.items() if many != 1} == {}
    assert len(listed) > 150


EQUIVALENCE = "test_eager_matches_sdpa_inference_09_fp32_pad_left"


@pytest.mark.parametrize("family", [x for x in FAMILIES if x.name == "Mistral"], ids=lambda family: family.name)
def test_without_our_mask_the_equivalence_test_fails(family: Family) -> None:
    """The sabotage: a name without a mask function gets no mask, and the window stands open."""
    assert run(MIXIN, family, EQUIVALENCE).state == "passed"
    open_window = run(MIXIN, family, EQUIVALENCE, with_masks=False)
    assert open_window.state == "failed" and "mean relative difference" in open_window.why


def test_a_failure_in_a_part_of_a_test_is_a_failure() -> None:
    class Wrong:
        def test_part(self) -> None:
            with self.subTest("a part"):  # type: ignore[attr-defined]  # given by the runner
                raise ValueError("wrong")

    assert run(Wrong, FAMILIES[0], "test_part") == Outcome("failed", "ValueError: wrong", 0)
