"""Names and capitalised spans in documents of the form `Name. text`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

# A document begins with its name: `Name. text`. The stop of an initial, as in `Douglas P. Fry. `, or of `St. ` does
# not end a name.
END = re.compile(r"(?<!\b\w)(?<!\bSt)\. ")


def name_end(text: str) -> int:
    """Where the text after the name begins, past the full stop and its space; 0 for a document without a name.

    >>> text = "Douglas P. Fry. Born in Boston."
    >>> text[: name_end(text)]
    'Douglas P. Fry. '
    """
    end = END.search(text)
    return end.end() if end else 0


def name_of(text: str) -> str:
    """The name that a document begins with; nothing for a document without one.

    >>> name_of("Ada Holm. Born in Arden.")
    'Ada Holm'
    """
    return text[: name_end(text)].removesuffix(". ")


# A word takes its apostrophes and hyphens along (O'Connell, Saint-Denis), but no possessive.
WORD = re.compile(r"[^\W\d_]\w*(?:['’-](?!s\b)\w+)*")
JOINT = re.compile(r",? (?:(?:of|de|the) )*")


def candidates(text: str) -> list[tuple[int, int]]:
    """Where the spans worth asking for begin and end, all of them after the name.

    >>> text = "Ada Holm. Holm was born in Columbus, Ohio and read at the University of Lorne."
    >>> [text[begin:end] for begin, end in candidates(text)]
    ['Columbus, Ohio', 'Columbus', 'Ohio', 'University of Lorne']
    """
    first = name_end(text)
    own = set(WORD.findall(text[:first]))
    spans = []
    for run in _runs(text, first):
        # Columbus, Ohio is asked for as a whole and in its parts.
        parts: list[list[re.Match[str]]] = [[run[0]]]
        for before, word in itertools.pairwise(run):
            if text[before.end()] == ",":
                parts.append([])
            parts[-1].append(word)
        # Nobody who has read the name needs to remember it.
        whole_and_parts = [run, *parts] if len(parts) > 1 else [run]
        spans += [(words[0].start(), words[-1].end()) for words in whole_and_parts if words[0][0] not in own]
    return spans


def _runs(text: str, first: int) -> Iterator[list[re.Match[str]]]:
    """Capitalised words from `first` on, those that belong together in one list."""
    run: list[re.Match[str]] = []
    for word in WORD.finditer(text, first):
        if not word[0][0].isupper():
            continue
        if run and not JOINT.fullmatch(text, run[-1].end(), word.start()):
            yield run
            run = []
        run.append(word)
    if run:
        yield run
