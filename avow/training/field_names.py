"""What people call the fields of a configuration elsewhere, and the field that is meant.

A name without its section is accepted if it means one field and the same thing: `lr=1e-3`, `batch_size=32`. Others are
answered with the field to use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

# Names of other trainers and libraries; the field here, or what to know about it.
USUAL_NAMES = {
    **dict.fromkeys(("lr", "learning_rate", "rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("weight_decay", "wd", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip_grad", "clip_norm"), "optimizer.clip"),
    **dict.fromkeys(("beta1", "adam_beta1"), "optimizer.beta1"),
    **dict.fromkeys(("beta2", "adam_beta2"), "optimizer.beta2"),
    **dict.fromkeys(("batch_size", "bs", "train_batch_size", "per_device_train_batch_size"), "data.batch"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "accumulation_steps"), "data.accumulate"),
    **dict.fromkeys(("data", "dataset", "corpus", "train_data", "files"), "data.sources"),
    **dict.fromkeys(("val_split", "validation_split", "test_size", "val_fraction", "validation"), "data.held_out"),
    **dict.fromkeys(("objective", "loss_type"), "data.task"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"), "model.layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead"), "model.heads"),
    **dict.fromkeys(("n_kv_head", "n_kv_heads", "num_kv_heads", "num_key_value_heads"), "model.key_heads"),
    **dict.fromkeys(("n_embd", "d_model", "dim", "embed_dim", "hidden_size", "hidden_dim"), "model.width"),
    **dict.fromkeys(
        ("block_size", "context_length", "context", "n_ctx", "seq_len", "max_seq_len", "sequence_length", "max_length"),
        "model.block",
    ),
    **dict.fromkeys(("vocab_size", "n_vocab"), "model.vocabulary"),
    **dict.fromkeys(("max_steps", "max_iters", "num_steps", "iterations", "iters", "train_steps"), "schedule.steps"),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs", "epoch"), "schedule.epochs"),
    **dict.fromkeys(("warmup_steps", "warmup_iters"), "schedule.warmup"),
    **dict.fromkeys(("min_lr", "lr_min", "eta_min"), "schedule.floor"),
    **dict.fromkeys(("dtype", "amp", "bf16", "fp16", "mixed_precision"), "run.precision"),
    **dict.fromkeys(("random_seed", "manual_seed"), "run.seed"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_every"), "run.save_every"),
    **dict.fromkeys(("logging_steps", "log_interval"), "run.log_every"),
    **dict.fromkeys(("eval_every", "eval_steps", "eval_interval", "evaluation_steps"), "run.evaluate_every"),
    **dict.fromkeys(("init_from", "resume_from_checkpoint", "checkpoint"), "run.start"),
}

# Usual names that mean something else here, or take other values, and what to do instead.
OTHER_MEANINGS = {
    **dict.fromkeys(("vocab_size", "n_vocab"), "leave it out: the vocabulary follows from data.tokenizer"),
    **dict.fromkeys(
        ("dtype", "amp", "bf16", "fp16", "mixed_precision"), "use run.precision=bfloat16 or run.precision=float32"
    ),
    **dict.fromkeys(("min_lr", "lr_min", "eta_min"), "use schedule.floor, a share of optimizer.lr"),
    **dict.fromkeys(
        ("grad_accum", "gradient_accumulation_steps", "accumulation_steps"),
        "use data.accumulate, which cuts data.batch into micro-batches and does not multiply it",
    ),
    "per_device_train_batch_size": "use data.batch, the examples of a step over all processes",
    **dict.fromkeys(("data", "dataset", "corpus", "train_data", "files"), "use --data FILE, or data.sources=FILE"),
    **dict.fromkeys(("objective", "loss_type"), "use data.task"),
    **dict.fromkeys(("init_from", "checkpoint"), "use run.start=CHECKPOINT"),
    "resume_from_checkpoint": "use --resume, or run.start=CHECKPOINT for a new run",
    **dict.fromkeys(("validation", "test_size"), "use data.held_out, a share of the examples"),
    "rate": "use optimizer.lr",
    "decay": "use optimizer.weight_decay",
}


def field_named(name: str, fields: Mapping[str, Sequence[str]]) -> str | None:
    """The field, `section.name`, that a name without a section means; None if that is not certain.

    >>> field_named("batch_size", {"data": ("batch",)}), field_named("min_lr", {"schedule": ("floor",)})
    ('data.batch', None)
    """
    homes = [f"{home}.{name}" for home, names in fields.items() if name in names]
    usual = None if name in OTHER_MEANINGS else USUAL_NAMES.get(name)
    return homes[0] if len(homes) == 1 else usual if not homes else None


def meant(section: str, name: str, fields: Mapping[str, Sequence[str]]) -> str | None:
    """The field, `section.name`, that an unknown one most likely means; None if none is near.

    `fields` are the known names of every section.

    >>> meant("", "lr", {"optimizer": ("lr",)}), meant("schedule", "step", {"schedule": ("steps",)})
    ('optimizer.lr', 'schedule.steps')
    """
    own = [f"{section}.{field}" for field in fields.get(section, ())]
    homes = [f"{home}.{name}" for home, names in fields.items() if name in names]
    near = difflib.get_close_matches(f"{section}.{name}", own, 1, 0.8)
    usual = [USUAL_NAMES[name]] if name in USUAL_NAMES else []
    everywhere = {field: f"{home}.{field}" for home, names in fields.items() for field in names}
    anywhere = [everywhere[field] for field in difflib.get_close_matches(name, everywhere, 1, 0.8)]
    return next(iter((*homes, *usual, *near, *anywhere)), None)
