"""transformers' own tests of a model, from its source distribution, run on tiny models with avow in the place of SDPA.

The distribution has `tests/test_modeling_common.py` and no other test module that one imports: what that takes from
them is two empty base classes here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import avow.integrations.transformers  # noqa: F401  # registers the names
from avow.errors import ParameterError
from tests.helpers.tiny_models import ARCHITECTURES, WORDS, Architecture

_ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
_STANDS_FOR = "sdpa"


@dataclass(frozen=True)
class Family:
    """Model classes that share a configuration, and what is changed in it."""

    name: str
    classes: tuple[str, ...]
    changes: dict[str, Any]

    @property
    def architecture(self) -> Architecture:
        """The tiny architecture that has one of these classes."""
        return next(x for x in ARCHITECTURES if x.name in self.classes)


# Attention dropout is refused in training, and theirs train: it is turned off where it is on by default.
FAMILIES = [
    Family("Llama", ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"), {}),
    Family("Mistral", ("MistralModel", "MistralForCausalLM"), {}),
    Family("Mixtral", ("MixtralModel", "MixtralForCausalLM"), {"head_dim": 8}),
    Family("Qwen2", ("Qwen2Model", "Qwen2ForCausalLM"), {}),
    Family("GPT2", ("GPT2Model", "GPT2LMHeadModel"), {"attn_pdrop": 0.0}),
    Family(
        "Bert", ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), {"attention_probs_dropout_prob": 0.0}
    ),
    Family("Bart", ("BartModel", "BartForConditionalGeneration"), {}),
    Family("T5", ("T5Model", "T5ForConditionalGeneration"), {"dropout_rate": 0.0}),
]


@dataclass(frozen=True)
class Outcome:
    """What came of one of their tests: passed, idle (passed and never attended), refused, skipped or failed."""

    state: str
    why: str
    calls: int


class TinyInputs:
    """What their tests ask of a `model_tester`: a fresh configuration, inputs, and the sizes of both."""

    batch_size, seq_length, encoder_seq_length, decoder_seq_length = 3, 7, 7, 7
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32
    is_training = True

    def __init__(self, family: Family) -> None:
        self.family = family

    def get_config(self) -> Any:
        architecture = self.family.architecture
        return getattr(transformers, architecture.name).config_class(**architecture.sizes | self.family.changes)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        sides = ["", "decoder_"] if self.family.architecture.kind == "seq2seq" else [""]
        found = {}
        for side in sides:
            found[f"{side}input_ids"] = torch.randint(3, WORDS, (self.batch_size, self.seq_length))
            found[f"{side}attention_mask"] = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        return self.get_config(), found


def their_mixin(folder: Path) -> type:
    """The class of their tests, from the distribution of the version at hand; `parameterized` lies beside it."""
    tests = folder / f"transformers-{transformers.__version__}" / "tests"
    if not tests.is_dir():
        raise FileNotFoundError(f"{tests} is missing; run make test-transformers, which fetches it")
    if str(folder / "packages") not in sys.path:
        sys.path.append(str(folder / "packages"))
    _module("theirs", tests)
    for path, name in _ABSENT.items():
        _module(f"theirs.{path.partition('.')[0]}")
        setattr(_module(f"theirs.{path}"), name, type(name, (), {}))
    found: type = importlib.import_module("theirs.test_modeling_common").ModelTesterMixin
    return found


def _module(name: str, folder: Path | None = None) -> types.ModuleType:
    """An empty package, which finds its modules in a folder."""
    made = types.ModuleType(name)
    made.__path__ = [] if folder is None else [str(folder)]
    sys.modules[name] = made
    return made


def names(mixin: type) -> list[str]:
    """Their tests, every parameterisation by itself."""
    return sorted(name for name in dir(mixin) if name.startswith("test_") and callable(getattr(mixin, name)))


@contextlib.contextmanager
def in_the_place_of_sdpa(with_masks: bool = True) -> Iterator[list[str]]:
    """Have transformers find avow where it looks for SDPA; the layers that asked are listed.

    Without masks, what the name "sdpa" has no more is a mask function.
    """
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before, ours, asked = (functions[_STANDS_FOR], masks[_STANDS_FOR]), functions["avow"], []

    def noted(module: torch.nn.Module, *given: Any, **more: Any) -> Any:
        asked.append(type(module).__name__)
        return ours(module, *given, **more)

    AttentionInterface.register(_STANDS_FOR, noted)
    AttentionMaskInterface.register(_STANDS_FOR, masks["avow"])
    if not with_masks:
        del masks[_STANDS_FOR]
    try:
        yield asked
    finally:
        functions[_STANDS_FOR], masks[_STANDS_FOR] = before


class _Kept(unittest.TestResult):
    """A result that keeps the error itself, not only its words."""

    problem: BaseException | None = None

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.problem = err[1]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.problem = err[1]

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.problem = err[1]


def run(mixin: type, family: Family, name: str, weights: bool = True, with_masks: bool = True) -> Outcome:
    """What comes of one of their tests; `weights=False` tells it that the model gives out no attention weights."""
    members = {
        "all_model_classes": tuple(getattr(transformers, x) for x in family.classes),
        "is_encoder_decoder": family.architecture.kind == "seq2seq",
        "has_attentions": weights,
        "model_tester": TinyInputs(family),
    }
    case = type(family.name, (mixin, unittest.TestCase), members)(name)
    result = _Kept()
    with in_the_place_of_sdpa(with_masks) as asked:
        case.run(result)
    problem, calls = result.problem, len(asked)
    if isinstance(problem, ParameterError) and problem.name == "output_attentions":
        return Outcome("refused", str(problem), calls)
    if problem is not None:
        return Outcome("failed", f"{type(problem).__name__}: {problem}", calls)
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1], calls)
    return Outcome("passed" if calls else "idle", "", calls)
