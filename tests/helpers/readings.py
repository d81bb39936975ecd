"""A reading as a story holds it, made up: heads of every kind over a text, in the bytes that the page decodes."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from avow.numerics.sketch import GROUP

TEXT = (
    "The old house by the river had three kitchens, and in each of them stood a shelf with one pot on it. Marta "
    "hid the brass key in the blue teapot, because nobody drank tea in the winter. The red jug held buttons, and "
    "the green jar held letters that her brother had sent from the coast. In spring the visitors came. They "
    "walked through the rooms, looked at the clocks, and asked about the garden, which was still under water. Her "
    "uncle told them about the flood, the mill and the two bridges, and nobody listened for long. In the evening "
    "it rained again. A lamp was lit, the dog slept, and somebody remembered the locked door at the end of the "
    "passage. Who had the key? Marta smiled, went into the kitchen without a candle, reached up to the shelf, and "
    "took the key out of the blue"
)
WRITTEN = [" te", "apot", ".", " The", " door", " opened"]
STOPS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5]
METHODS = ["exact", "low_rank", "random_features", "polynomial"]
KINDS = ["resting"] * 11 + ["local"] * 5 + ["wide"] * 4 + ["previous"] * 3 + ["same"] * 2 + ["induction"] * 2
CODEBOOK = [0.0, *(float(x) for x in np.round(np.logspace(-3, 0, 255), 6))]


def codes(numbers: Any) -> Any:
    """Bounds as bytes, rounded up; what is below 1e-8 is 0."""
    numbers = np.maximum(np.asarray(numbers, dtype=float), 1e-300)
    return np.clip(np.ceil(255 + 32 * np.log10(numbers) - 1e-9), 0, 255).astype(np.uint8)


def tokens(text: str) -> list[str]:
    return re.findall(r" ?\w{1,7}|[^\w\s]|\s", text)


def story(
    text: str = TEXT,
    layers: int = 30,
    heads: int = 9,
    title: str = "The teapot",
    asking: Sequence[int] | None = None,
    written: Sequence[str] = WRITTEN,
) -> dict[str, Any]:
    """A reading of made-up heads: what they read depends on their kind, what they may skip on the mass of their tail.

    Three words of the text, its last one and all that was written can ask, or those at the positions `asking`. At the
    last two stops the next word is another one.
    """
    draws = np.random.default_rng(0)
    words = ["<start>", *tokens(text)]
    prompt = len(words)
    words += written
    total = layers * heads
    kinds = [KINDS[i] for i in draws.integers(len(KINDS), size=total)]
    able = {prompt // 4, prompt // 2, prompt * 3 // 4, *range(prompt - 1, len(words))}
    rows = sorted(able) if asking is None else list(asking)
    mixes = draws.gamma(2.0, 1.0, size=total)
    body, nexts, read, without = b"", [], [], []
    # No token goes on with the word before it: each is a whole word.
    starts = list(range(1, len(words)))
    for row in rows:
        n = row + 1
        weights = np.stack([_weights(kind, words[:n], mix, draws) for kind, mix in zip(kinds, mixes, strict=True)])
        tail = _tail(weights)
        levels = np.full((total, n), len(STOPS))
        for i in reversed(range(len(STOPS))):
            levels[2 * tail <= STOPS[i]] = i
        levels[:, n // GROUP * GROUP :] = len(STOPS)  # sketches hold whole groups
        kept = np.stack([levels > i for i in range(len(STOPS))])  # stop, head, token
        bounds = 2 * np.where(kept, 0, weights).sum(2).T + 1e-7
        errors = bounds * draws.uniform(0.001, 0.3, bounds.shape)
        body += np.clip(np.searchsorted(CODEBOOK, weights, "right") - 1, 0, 255).astype(np.uint8).tobytes()
        body += levels.astype(np.uint8).tobytes() + codes(bounds).tobytes() + codes(errors).tobytes()
        read.append([float(share) for share in kept.mean((1, 2)).round(4)])
        without.append([[[" sky", 0.2], [" te", 0.1]] for start in starts if start < row] if row < prompt else [])
        nexts.append(_next(words[row + 1] if row + 1 < len(words) else " quietly", draws))
    promises = np.where(
        draws.random((total, len(METHODS))) < 0.7, 0, codes(10 ** draws.uniform(-3, 0.2, (total, len(METHODS))))
    )
    promises[:, 0] = codes(3e-7)
    body += promises.astype(np.uint8).tobytes()
    return {
        "format": "avow reading 1",
        "model": "SmolLM2-135M",
        "title": title,
        "about": "a fact far back",
        "words": words,
        "prompt": prompt,
        "layers": layers,
        "heads": heads,
        "stops": STOPS,
        "rows": rows,
        "kinds": kinds,
        "next": nexts,
        "read": read,
        "starts": starts,
        "without": without,
        "methods": METHODS,
        "says": {"low_rank": "64 landmarks", "random_features": "256 features", "polynomial": "degree 2"},
        "weights": CODEBOOK,
        "data": base64.b64encode(zlib.compress(body, 9)).decode("ascii"),
    }


def script(name: str, reading: dict[str, Any]) -> str:
    """A story as the classic script that the page loads."""
    return f"(window.avowStories ??= {{}})[{json.dumps(name)}] = {json.dumps(reading)};\n"


def _weights(kind: str, words: list[str], mix: float, draws: Any) -> Any:
    """Attention weights of one head for the last word: a kind's own place, and a little everywhere."""
    n = len(words)
    back = np.arange(n)[::-1]
    logits = draws.normal(0, 0.6, n)
    same = [t for t in range(n - 1) if words[t].strip().lower() == words[-1].strip().lower()]
    match kind:
        case "resting":
            logits[0] += 6 + mix
        case "previous":
            logits[-2] += 6 + mix
        case "same":
            logits[same or [0]] += 6 + mix
        case "induction":
            logits[[t + 1 for t in same] or [0]] += 7 + mix
        case "local":
            logits += 5 * np.exp(-back / (3 * mix + 1))
        case _:
            logits[0] += 2
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _tail(weights: Any) -> Any:
    """For each token the mass of it and of everything lighter: what is lost by reading only what is heavier."""
    order = np.argsort(weights, axis=1)
    tail = np.empty_like(weights)
    np.put_along_axis(tail, order, np.cumsum(np.take_along_axis(weights, order, 1), 1), 1)
    return tail


def _next(word: str, draws: Any) -> dict[str, Any]:
    others = [" pot", " jar", " kettle", " cup", " box", " sky", " lid", " drawer"]
    others = [one for one in others if one != word][:7]
    shares = np.sort(draws.dirichlet(np.ones(7)) * 0.5)[::-1]
    exact = [[word, 0.29], *([one, round(float(p) * 0.5, 4)] for one, p in zip(others, shares, strict=True))]
    stops = []
    for i, stop in enumerate(STOPS):
        near = [[w, round(p * (1 + 0.4 * stop * (1 if w == word else -1)), 4)] for w, p in exact]
        if i >= len(STOPS) - 2:
            near[1][1] = 0.41
        stops.append(sorted(near, key=lambda pair: -float(pair[1])))
    return {"exact": sorted(exact, key=lambda pair: -float(pair[1])), "stops": stops}
