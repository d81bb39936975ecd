"""Models from local files: a folder, a GGUF file, or an installed package that carries one. Nothing is fetched."""

from __future__ import annotations

import contextlib
import io
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from avow import file_io
from avow.errors import FileError, ParameterError, is_out_of_memory


class Loaded(NamedTuple):
    """A model, ready to run, its tokenizer and its name."""

    model: PreTrainedModel
    tokenizer: Any
    name: str


def load_model(source: str) -> Loaded:
    """The model in a folder, in a GGUF file, or in the installed package of that name, whose code is not run."""
    from safetensors import SafetensorError

    place = _place(source)
    for file in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
        file_io.check_header(file, "model", "name a model of transformers")
    gguf = place.name if place.is_file() else None
    folder = place.parent if gguf else place
    more: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # some progress bars of transformers have no switch
            family = AutoModelForCausalLM if gguf else _family(folder)
            model = family.from_pretrained(folder, dtype=torch.float32, **more).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError("model", source, f"cannot be loaded ({lines[0]})", "name a model of transformers") from error
    return Loaded(model, tokenizer, place.stem if gguf else place.name)


def _place(source: str) -> Path:
    """The folder or the GGUF file that is meant."""
    path = Path(source)
    if path.is_file():
        if path.suffix != ".gguf":
            remedy = "name a folder, a .gguf file or an installed package"
            raise FileError("model", source, "is not a GGUF file", remedy)
        return path
    if path.is_dir():
        return _within(source, path)
    # Where a top-level package lies; finding it imports nothing.
    spec = PathFinder.find_spec(source) if source.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        rule = "is neither a folder, nor a file, nor an installed package"
        raise FileError("model", source, rule, "name a model that is on this machine; nothing is fetched")
    return _within(source, Path(next(iter(spec.submodule_search_locations))))


def _within(source: str, folder: Path) -> Path:
    """A folder that transformers saved, or the one GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        held = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        raise FileError("model", source, f"holds {held}", "name the folder or the file of one model")
    return files[0]


def _family(folder: Path) -> Any:
    """The class that the model's own configuration names; if it names none, a causal language model's."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in config.architectures or ():
        if (kind := getattr(transformers, name, None)) is not None:
            return kind
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel


def read_text(path: Path) -> str:
    """A text in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileError("text", path, "does not exist", "check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError("text", path, f"cannot be read ({why})", "name a text file in UTF-8") from error


def tokens_of(loaded: Loaded, text: str, tokens: int | None) -> Tensor:
    """The first `tokens` tokens of a text, (1, n); by default all that the model has positions for."""
    ids: Tensor = loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids
    most = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    held = ids.shape[1]
    if tokens is not None and tokens > held:
        raise ParameterError("tokens", tokens, f"exceeds the text's {held}", "give a longer text or ask for fewer")
    if tokens is not None and most is not None and tokens > most:
        raise ParameterError("tokens", tokens, f"exceeds the model's {most} positions", f"ask for at most {most}")
    wanted = tokens if tokens is not None else min(held, most or held)
    if wanted < 2:
        rule = "is too short a text" if tokens is None else "is too few"
        raise ParameterError("tokens", wanted, rule, "give at least 2 tokens")
    return ids[:, :wanted]
