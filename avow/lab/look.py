"""The lab's first page for one model and one text, as a file or in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avow import file_io
from avow.errors import ParameterError, value_text
from avow.lab.rendering import render_alone
from avow.lab.stories import script_of
from avow.parameters import declared

_NAME = "own"


class ReadingPage:
    """A page that needs no server and no network: `save` writes it, and a notebook shows it.

    Attributes:
        html: the whole page.
    """

    def __init__(self, html: str, words: int, heads: int) -> None:
        self.html = html
        self._about = f"{words} tokens read by {heads} heads"

    def save(self, path: str | Path) -> None:
        """Write the page, whole or not at all.

        Args:
            path: of the file.

        Raises:
            FileError: it cannot be written.
        """
        file_io.write(Path(path), self.html)

    def _repr_html_(self) -> str:
        """A frame of its own, so that neither page changes the other."""
        style = "width:100%;height:52rem;border:1px solid #8884;border-radius:.5rem"
        return f'<iframe srcdoc="{html.escape(self.html)}" title="What the model reads" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"ReadingPage({self._about}; save('page.html') writes it)"


@declared()
def look(model: Any, text: str, tokenizer: Any = None, asking: Sequence[str | int] = (), write: int = 0) -> ReadingPage:
    """What every head of a model reads of a text, and what it provably need not: the lab's first page.

    Args:
        model: a model of transformers that continues texts; or a folder, a GGUF file, an installed package or a name
            in the local Hugging Face cache.
        text: what it reads, at most 1,023 tokens.
        tokenizer: the model's; not needed if the model is named.
        asking: words that can ask besides the last one, by their text or position.
        write: so many words the model writes on; each of them can ask.

    Returns:
        The page.

    Raises:
        MissingPackage: an optional package is missing; the message says which extra brings it.
        ParameterError: the text is empty or too long, a word that asks is not in it, or there is no tokenizer.
        FileError: the model that was named cannot be loaded.
    """
    from avow.integrations.transformers.model_files import load_unpacked
    from avow.integrations.transformers.reading import reading_of
    from avow.lab.reading_data import plain_reading

    name = ""
    if isinstance(model, str | Path):
        model, tokenizer, name = load_unpacked(str(model))
    elif not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        rule = "must be the tokenizer of a model that is already loaded"
        raise ParameterError("tokenizer", value_text(tokenizer), rule, "pass it, or name the model instead")
    reading = reading_of(model, tokenizer, text, asking, write, name)
    plain = plain_reading(reading, title=reading.model, about="the text that was given")
    page = render_alone("reading", {"name": _NAME, "title": reading.model, "about": ""}, script_of(_NAME, plain))
    return ReadingPage(page, reading.prompt, reading.layers * reading.heads)
