"""The stories of the first page: texts that a real model has read, as scripts that need no server.

`texts.toml` has the texts. `python -m benchmarks.stories` writes the scripts, which it needs the model for.
"""

from __future__ import annotations

import functools
import json
import tomllib
from importlib import resources
from typing import Any

_FOLDER = resources.files(__name__)


@functools.cache
def story_texts() -> dict[str, dict[str, Any]]:
    """Title, subject, text and words that ask of each story, by its name."""
    texts = tomllib.loads((_FOLDER / "texts.toml").read_text(encoding="utf-8"))
    return {name: {**story, "text": story["text"].strip("\n")} for name, story in texts.items()}


def story_names() -> list[str]:
    """The stories in the order they are shown."""
    return list(story_texts())


@functools.cache
def story_script(name: str) -> str:
    """The script that gives a page this story."""
    return (_FOLDER / f"{name}.js").read_text(encoding="ascii")


def script_of(name: str, plain: dict[str, Any]) -> str:
    """A reading as a script: pages that were opened from a disk may load scripts, but no other files."""
    return f"(window.avowStories ??= {{}})[{json.dumps(name)}] = {json.dumps(plain, separators=(',', ':'))};\n"


def story_from(script: str) -> dict[str, Any]:
    """The reading that a script holds."""
    plain: dict[str, Any] = json.loads(script.partition("] = ")[2].rstrip().removesuffix(";"))
    return plain
