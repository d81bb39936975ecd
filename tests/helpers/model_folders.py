"""Small models in folders and in Hugging Face caches, with a tokenizer of one token for each letter."""

from __future__ import annotations

import os
import shutil
import string
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.helpers.tiny_models import ARCHITECTURES, Architecture

LLAMA = ARCHITECTURES[0]
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 8


def long_model(architecture: Architecture = LLAMA, **changes: Any) -> Any:
    """A model with positions for a few hundred tokens."""
    return architecture.build(**({"max_position_embeddings": 512} | changes))


def saved(model: Any, folder: Path) -> Path:
    """The folder, with the model in it and a tokenizer that reads ASCII letter by letter."""
    words = {"<unk>": 0} | {letter: i for i, letter in enumerate(string.printable[:95], 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def cached(folder: Path, cache: Path, name: str, commit: str, ref: str = "") -> Path:
    """A snapshot of the folder in a Hugging Face cache, as the hub's own client lays it out; its folder."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    for file in folder.iterdir():
        blob = repo / "blobs" / f"{commit}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if ref:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot
