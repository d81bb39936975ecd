"""Small random models of many architectures, from the configurations that transformers itself has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

WORDS = 99
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_HALVES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}


@dataclass(frozen=True)
class Architecture:
    """A class of models, its configuration, and the kind of inputs it reads."""

    name: str
    sizes: dict[str, Any]
    kind: str = "decoder"

    def build(self, **changes: Any) -> Any:
        """A model of this architecture with random weights, large enough for attention to have a say."""
        family = getattr(transformers, self.name)
        config = family.config_class(**self.sizes | changes)
        model = family(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(0, 0.3)
        return model.eval()

    def inputs(self, padding: str = "") -> dict[str, Tensor]:
        """Two sequences; with padding on a side, the first is shorter."""
        ids = torch.randint(3, WORDS, (2, 12))
        mask = torch.ones_like(ids)
        if padding:
            mask[0, {"left": slice(0, 4), "right": slice(8, 12)}[padding]] = 0
        ids = torch.where(mask == 0, 0, ids)
        more = {"decoder_input_ids": torch.randint(3, WORDS, (2, 9))} if self.kind == "seq2seq" else {}
        if self.name.startswith("Roberta"):
            # It counts positions from what is no padding's id, so that changing padding would move the text.
            more = {"position_ids": torch.arange(2, 14).expand(2, -1)}
        return {"input_ids": ids, "attention_mask": mask, **more}


ARCHITECTURES = [
    Architecture("LlamaForCausalLM", _GROUPED),
    Architecture("MistralForCausalLM", _GROUPED | {"sliding_window": 5}),
    Architecture("MixtralForCausalLM", _GROUPED | {"num_local_experts": 4, "sliding_window": None}),
    Architecture("Qwen2ForCausalLM", _GROUPED),
    Architecture("Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}),
    Architecture("Gemma2ForCausalLM", _GROUPED | _HALVES | {"attn_logit_softcapping": None}),
    Architecture("Gemma3ForCausalLM", _GROUPED | _HALVES),
    Architecture("Phi3ForCausalLM", _GROUPED | {"sliding_window": None}),
    Architecture("GPTNeoXForCausalLM", _SIZES),
    Architecture(
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
        | {"eos_token_id": 2, "pad_token_id": 0},
    ),
    Architecture("OPTForCausalLM", _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Architecture("BertForMaskedLM", _SIZES, "encoder"),
    Architecture("RobertaForMaskedLM", _SIZES, "encoder"),
    Architecture(
        "DistilBertForMaskedLM",
        {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "encoder",
    ),
    Architecture(
        "ModernBertForMaskedLM",
        _SIZES | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 6, "global_attn_every_n_layers": 2},
        "encoder",
    ),
    Architecture("BartForConditionalGeneration", _SEQ2SEQ, "seq2seq"),
    Architecture(
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
        "seq2seq",
    ),
]
