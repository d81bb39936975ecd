"""Models from local files: a folder, a GGUF file, an installed package that carries one, or a name of the Hugging Face
hub that is in the local cache. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import tempfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from avow import file_io
from avow.calibration_file import cache_folder
from avow.errors import FileError, ParameterError, is_out_of_memory
from avow.extras import require

# Files of tokenizers, whatever their kind: tokenizer.json, vocab.txt, spiece.model and so on.
_TOKENIZERS = ("*token*", "*vocab*", "*.model")


class Loaded(NamedTuple):
    """A model, ready to run, its tokenizer and its name."""

    model: PreTrainedModel
    tokenizer: Any
    name: str


def load_model(source: str) -> Loaded:
    """The model in a folder, a GGUF file, an installed package (its code is not run), or the Hugging Face cache.

    A name of the hub, such as `meta-llama/Llama-3.2-1B`, may be followed by `@` and a revision.
    """
    from safetensors import SafetensorError

    place, name, remedy = _place(source)
    for file in [place] if place.is_file() else sorted(place.glob("*.safetensors")):
        file_io.check_header(file, "model", remedy)
    gguf = place.name if place.is_file() else None
    if gguf:
        require("gguf", "accelerate", purpose="to read GGUF files")
    folder = place.parent if gguf else place
    more: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf} if gguf else {})
    model = None
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # some progress bars of transformers have no switch
            family = AutoModelForCausalLM if gguf else _family(folder)
            model = family.from_pretrained(folder, dtype=torch.float32, **more).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        if model is not None and Path(source).is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZERS):
            text = "save one there with tokenizer.save_pretrained; in Python, profile and verify also take token ids"
            raise FileError("model", source, "has no tokenizer", text) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError("model", source, f"cannot be loaded ({lines[0]})", remedy) from error
    return Loaded(model, tokenizer, name)


def load_unpacked(source: str, tell: Callable[[str], object] = lambda line: None) -> Loaded:
    """The same model as `load_model` gives, for who loads it often: of a GGUF file, an unpacked copy is kept.

    Unpacking takes a quarter of a minute, loading the copy two seconds. Copies are in float16 in
    `$XDG_CACHE_HOME/avow/models`, else `~/.cache/avow/models`, and may be removed at any time.
    """
    place, name, _ = _place(source)
    if not place.is_file():
        return load_model(source)
    with place.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    unpacked = cache_folder() / "models" / f"{place.stem}-{digest}"
    if not unpacked.is_dir():
        tell("unpacking the model, once")
        _save_copy(load_model(str(place)), unpacked)
    tell("loading the model")
    return load_model(str(unpacked))._replace(name=name)


def _save_copy(loaded: Loaded, folder: Path) -> None:
    """Save a model that came from a GGUF file as transformers does, whole or not at all."""
    config = copy.deepcopy(loaded.model.config)
    vars(config).pop("quantization_config", None)  # the weights are plain numbers by now
    with torch.device("meta"):
        plain = type(loaded.model)(config)
    plain.load_state_dict(loaded.model.state_dict(), assign=True)
    plain.tie_weights()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside, contextlib.redirect_stderr(io.StringIO()):
            plain.to(torch.float16).save_pretrained(Path(beside) / "model")
            loaded.tokenizer.save_pretrained(Path(beside) / "model")
            with contextlib.suppress(FileExistsError):  # somebody else was quicker
                (Path(beside) / "model").rename(folder)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise FileError("model's copy", folder, rule, "make room there, or set XDG_CACHE_HOME") from error


class _Place(NamedTuple):
    """A folder that transformers saved or a GGUF file, the model's name, and what to do if it cannot be loaded."""

    path: Path
    name: str
    remedy: str = "name a model of transformers"


def _place(source: str) -> _Place:
    """The folder or the GGUF file that is meant."""
    path = Path(source)
    if path.is_file():
        if path.suffix != ".gguf":
            remedy = "name a folder, a .gguf file, an installed package or a name of the hub"
            raise FileError("model", source, "is not a GGUF file", remedy)
        return _Place(path, path.stem)
    if path.is_dir():
        return _within(source, path)
    # Where a top-level package lies; finding it imports nothing. In pip's names underscores may be hyphens.
    module = source.replace("-", "_")
    spec = PathFinder.find_spec(module) if module.isidentifier() else None
    if spec is not None and spec.submodule_search_locations:
        return _within(source, Path(next(iter(spec.submodule_search_locations))))
    name, _, revision = source.partition("@")
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    folder, known = _snapshot(source, name, revision, download)
    return _within(source, folder, known)._replace(remedy=f"run {download}, which completes it; avow fetches nothing")


def _snapshot(source: str, name: str, revision: str, download: str) -> tuple[Path, str]:
    """A model's folder in the Hugging Face cache, and its name: of this revision, of `main`, or of the only one."""
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True)), source
    except HFValidationError as error:
        rule = "is neither a folder, nor a file, nor an installed package, nor a name of the Hugging Face hub"
        raise FileError("model", source, rule, "name a model that is on this machine; nothing is fetched") from error
    except LocalEntryNotFoundError as error:
        if (partial := getattr(error, "snapshot_path", None)) is not None:
            return Path(partial), source  # what is missing may be files that transformers does not need
        found = _revisions(name)
        if len(set(found.values())) == 1 and not revision:
            only, folder = next(iter(found.items()))
            return folder, f"{name}@{only}"
        if found:
            rule = f"is not in the Hugging Face cache, which has the revisions {', '.join(found)}"
            remedy = f"use {name}@{next(iter(found))}, or run {download} first; avow fetches nothing"
            raise FileError("model", source, rule, remedy) from error
        rule = f"is not a folder, a file, an installed package, or in the Hugging Face cache {constants.HF_HUB_CACHE}"
        raise FileError("model", source, rule, f"run {download} first; avow fetches nothing") from error


def _revisions(name: str) -> dict[str, Path]:
    """The cached snapshots of a model, by their branches and tags, or by their commits."""
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    snapshots = [x for repo in repos if (repo.repo_type, repo.repo_id) == ("model", name) for x in repo.revisions]
    return dict(sorted((ref, x.snapshot_path) for x in snapshots for ref in x.refs or [x.commit_hash]))


def _within(source: str, folder: Path, name: str = "") -> _Place:
    """A folder that transformers saved, or the one GGUF file in it."""
    if (folder / "config.json").is_file():
        return _Place(folder, name or folder.name)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        held = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        remedy = f"name one of them, such as {files[0]}" if files else "name the folder or the file of one model"
        raise FileError("model", source, f"holds {held}", remedy)
    return _Place(files[0], name or files[0].stem)


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


def words_of(loaded: Loaded, ids: Tensor) -> list[str]:
    """Each token of a text (1, n) as it is written."""
    return [loaded.tokenizer.decode([id]) for id in ids[0].tolist()]
