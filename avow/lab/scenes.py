"""Which scene of the lab shows what a claim speaks of: the links from a claim to a page, and back."""

from __future__ import annotations

from typing import NamedTuple

from avow.theory.claims import catalogue


class Scene(NamedTuple):
    """A page of the lab, the inputs in its address, and what a link to it says."""

    page: str
    query: str
    words: str


_COPY = Scene("explorer", "", "Copy a key by hand")
_AVERAGE = Scene("explorer", "show=average", "Average two keys by hand")
_NOISE = Scene("explorer", "show=noise", "Scale a key under one head")
_TWO_HEADS = Scene("explorer", "show=noise&heads=two", "Scale a key under two heads")
_FEATURES = Scene("bench", "method=random_features&kind=diffuse", "Stretch the queries until random features break")
_LOW_RANK = Scene("bench", "method=low_rank&kind=diffuse", "Change the rank, and watch the error")
_SPARSE = Scene("bench", "", "Leave tokens unread, and watch the error")
_SQUARE = Scene("relu", "", "Build the network for x²")
_GRADIENT = Scene("dynamics", "", "Follow a gradient through time")
_EXPLODING = Scene("dynamics", "activation=relu&gain=2", "Follow a gradient that grows")
_STEPS = Scene("dynamics", "", "Compare the optimisers' steps")

# Claims that no page shows are not here.
SCENES: dict[str, Scene] = {
    "copy-gap": _COPY,
    "copy-separated": _COPY,
    "copy-shortest": _COPY,
    "copy-possible": _COPY,
    "average-two": _AVERAGE,
    "mixture-any": _AVERAGE,
    "noise-isotropic": _NOISE,
    "noise-one-key-discrete": _NOISE,
    "noise-one-key-gauss": Scene("explorer", "show=noise&law=Gaussian&variance=0.5", "Draw a Gaussian scale"),
    "heads-identical": _NOISE,
    "heads-discrete": _TWO_HEADS,
    "heads-gauss": Scene("explorer", "show=noise&heads=two&law=Gaussian", "Draw a Gaussian scale under two heads"),
    "heads-both-noises": _TWO_HEADS,
    "self-attend-copies-self": Scene("explorer", "show=route&ahead=0", "Let every token read itself"),
    "route-by-weights": Scene("explorer", "show=route", "Route tokens by hand"),
    "features-unbiased": _FEATURES,
    "features-variance": _FEATURES,
    "features-cost": _FEATURES,
    "svd-energy": _LOW_RANK,
    "svd-kth": _LOW_RANK,
    "svd-spectral": _LOW_RANK,
    "low-rank-cost": _LOW_RANK,
    "residual-cauchy-schwarz": _LOW_RANK,
    "tail-mass-output": _SPARSE,
    "dropped-mass": _SPARSE,
    "relu-linear-a": Scene("relu", "follow=a+formula&formula=x+%2B+1", "Build the network for a line"),
    "relu-linear-b": Scene("relu", "follow=a+formula&formula=x+%2B+1", "Build the network for a line"),
    "relu-square": _SQUARE,
    "relu-square-line": _SQUARE,
    "relu-square-deep": Scene("relu", "layers=many", "Build the deep network for x²"),
    "rnn-vanishing": _GRADIENT,
    "rnn-chain": _GRADIENT,
    "rnn-exploding": _EXPLODING,
    "rnn-exploding-ratio": _EXPLODING,
    "momentum-ema": _STEPS,
    "ema-unrolled": _STEPS,
    "ema-bias": _STEPS,
    "sgd-l2-decay": _STEPS,
    "adam-l2-vs-w": _STEPS,
    "adam-l2-magnitude": _STEPS,
    "adam-l2-line": _STEPS,
    "l2-only-sgd": _STEPS,
}


def claims_about(page: str) -> dict[str, str]:
    """The sentences of the claims that a page shows, by id."""
    return {id: catalogue()[id].plain for id, scene in SCENES.items() if scene.page == page}
