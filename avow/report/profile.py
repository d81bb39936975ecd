"""A model's profile and the verdict on a plan: the page with its heat maps, and tables for pages and terminals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from avow.core.chart import Table
from avow.integrations.transformers.head_kinds import KINDS, HeadKind
from avow.integrations.transformers.model_plan import Speed, Verdict
from avow.integrations.transformers.profiling import CERTIFIED, ROWS, SHOWN, Head, Profile
from avow.report.formatting import NOTHING, error, number

Figure = dict[str, Any]
_FIGURES = ("|q|", "|k|", "|v|", "logits", "spread", "entropy", "90%", "99%", "99.9%", "rank", "first")
_HEADINGS = ("layer", "head", "kind", *_FIGURES, "exact", "plan", "bound", "share")
# Maps of single numbers, by the id of their figure: title, the number of a head, whether its scale is logarithmic.
_MAPS: dict[str, tuple[str, Callable[[Head], float], bool]] = {
    "tokens": ("Tokens for 99% of the mass", lambda head: head.figures.tokens[1], True),
    "entropy": ("Entropy", lambda head: head.figures.entropy, False),
    "spread": ("Spread of logits", lambda head: head.figures.spread, False),
    "rank": ("Effective rank", lambda head: head.figures.effective_rank, False),
}


def profile_page(profile: Profile, command: str, machine: str, words: Sequence[str] = ()) -> str:
    """The report as a page; `command` is what made it, `machine` where, `words` the tokens as they are written."""
    from avow.report.page import render

    figures: dict[str, Figure] = {"reading": reading_figure(profile, "sparse")}
    figures |= {id: number_figure(profile, title, value, log) for id, (title, value, log) in _MAPS.items()}
    return render(
        "profile.html",
        figures,
        title="avow profile",
        headline=profile.headline,
        profile=profile,
        speed=None if profile.speed is None else speed_table(profile.speed),
        kinds=kinds_table(profile),
        methods=methods_table(profile),
        heads=heads_table(profile),
        rem=min(6 + 1.3 * max(len(heads) for heads in profile.layers.values()), 40),
        rules=kind_rules(profile),
        opened=heads_to_open(profile, words),
        sampled={"rows": ROWS, "certified": CERTIFIED, "shown": SHOWN},
        command=command,
        machine=machine,
    )


def speed_table(speed: Speed) -> Table:
    """What a new token costs, three ways."""
    rows = [
        ("as it is", f"{speed.as_it_is:.1f}", "1.00"),
        ("avow enabled", f"{speed.enabled:.1f}", f"{speed.enabled_ratio:.2f}"),
        ("with the plan", f"{speed.planned:.1f}", f"{speed.planned_ratio:.2f}"),
    ]
    title = f"One more token after {speed.tokens:,} ({speed.clock}, medians of {speed.rounds} rounds in turns)"
    return Table(title, ("the model", "ms per token", "relative to as it is"), rows)


def methods_table(profile: Profile) -> Table:
    """What each method can do for how many heads."""
    heads, rows = profile.heads, []
    for method in heads[0].methods:
        able = [offer for head in heads if (offer := head.within_tolerance(method, profile.tol)) is not None]
        best = [offer for head in heads if (offer := head.within_budget(method, profile.budget)) is not None]
        bounds = [offer.bound for offer in best if offer.bound is not None]
        measured = [offer.share for offer in able if offer.measured is not None]
        proved = f"{len(able)} of {len(heads)}", _percent([offer.predicted for offer in able]), _percent(measured)
        median, least = (statistics.median(bounds), min(bounds)) if bounds else (None, None)
        rows.append((method, *proved, f"{len(best)} of {len(heads)}", error(median), error(least)))
    prove, within = f"prove {profile.tol:g}", f"within {profile.budget:.0%}"
    headings = ("method", prove, "predicted", "measured", within, "bound", "least")
    return Table("What each method offers", headings, rows)


def kinds_table(profile: Profile) -> Table:
    """How many heads of each kind there are, and what they need."""
    rows = []
    for kind in KINDS:
        own = [(*head.figures.tokens, head.figures.entropy) for head in profile.heads if head.figures.kind == kind]
        medians = [statistics.median(column) for column in zip(*own, strict=True)] if own else [None] * 4
        rows.append((kind, len(own), *medians))
    title = "Kinds of heads, and in how many tokens they have 90%, 99% and 99.9% of the weight"
    return Table(title, ("kind", "heads", "90%", "99%", "99.9%", "entropy"), rows)


def heads_table(profile: Profile) -> Table:
    """Every figure of every head."""
    rows = []
    for i, heads in enumerate(profile.layers.values()):
        for j, head in enumerate(heads):
            f, chosen = head.figures, head.chosen(profile.tol, profile.budget)
            numbers = (f.query_norm, f.key_norm, f.value_norm, f.largest_logit, f.spread, f.entropy, *f.tokens)
            planned = ("exact", error(head.exact_bound), "100%")
            if chosen is not None:
                planned = (chosen.method, error(chosen.bound), f"{chosen.share:.0%}")
            shown = (*(f"{x:.3g}" for x in (*numbers, f.effective_rank)), f"{f.first:.0%}", error(head.exact_bound))
            rows.append((i, j, f.kind, *shown, *planned))
    return Table("Every head", _HEADINGS, rows)


def verdict_table(verdict: Verdict) -> Table:
    """What was measured, and what is proved."""
    v = verdict
    rows = [
        ("perplexity, exact", f"{v.exact_perplexity:.4f}"),
        ("perplexity, plan", f"{v.perplexity:.4f} ({v.change:+.3%})"),
        ("likeliest token the same", f"{v.agreement:.2%} of {v.places} places"),
        ("KL(exact ‖ plan)", f"{v.divergence:.1e} nats on average, {v.largest_divergence:.1e} at most"),
        ("written greedily", f"{v.matched} of {v.generated} tokens the same before the first that differs"),
        ("answers from a part of the tokens", f"{v.partial:,} of {len(v.certificates):,}"),
        ("largest bound of a layer", f"{v.certificates.bound:.1e} (proved)"),
        ("largest error of a row", f"{v.largest_error:.1e} ({v.audited:,} rows recomputed in float64)"),
    ]
    title = f"{v.plan.model}: {v.plan.changed} of {v.plan.heads} heads planned, tol {v.plan.tol:g}"
    return Table(title, ("", ""), rows)


def verdict_line(verdict: Verdict) -> str:
    """Whether it is safe, as far as this text tells."""
    v = verdict
    if not v.kept:
        return "a certificate was broken: please report this"
    proved = f"every layer is proved within {v.plan.tol:g}"
    if not v.within:
        proved = f"layers are proved within {v.certificates.bound:.1e} only, which exact attention's rounding takes"
    everywhere = v.agreement == 1 and v.matched == v.generated
    same = "the same" if everywhere else f"the same at {v.agreement:.1%} of the places"
    line = f"on this text the predictions are {same}, perplexity changes by {v.change:+.2%}; {proved}"
    # On a CPU short caches are read in full, whatever the plan allows.
    return line if v.partial else f"{line}; all tokens were read everywhere, so this plan saves nothing here"


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%}" if shares else NOTHING


def kind_rules(profile: Profile) -> list[tuple[HeadKind, int, str]]:
    """Each kind, how many heads are of it, and its rule."""
    return [(kind, profile.kinds[kind], rule) for kind, rule in KINDS.items()]


def heads_to_open(profile: Profile, words: Sequence[str]) -> dict[str, Any]:
    """What the page shows of a head that is opened, for every head; `first` is open before anything is chosen."""

    def shown(head: Head) -> dict[str, Any]:
        figures, offer = head.figures, head.within_tolerance("sparse", profile.tol)
        facts = [f"{figures.first:.0%} of the weight on the first token", f"99% on {figures.tokens[1]:.3g} tokens"]
        if offer is not None and offer.measured is not None:
            facts.append(f"reads {min(offer.measured, 1.0):.0%} of keys and values for {profile.tol:g} (sparse)")
        rows = [
            (row.position, [(j, round(100 * mass)) for j, mass in row.tokens]) for row in head.readings if row.tokens
        ]
        return {"kind": figures.kind, "rule": KINDS[figures.kind], "facts": " · ".join(facts), "readings": rows}

    # A head that looks for words says more than one that rests.
    telling: tuple[HeadKind, ...] = ("induction", "same", "previous", "local", "wide", "resting")
    places = [(i, j) for i, heads in enumerate(profile.layers.values()) for j in range(len(heads))]
    layers = list(profile.layers.values())
    first = min(places, key=lambda place: telling.index(layers[place[0]][place[1]].figures.kind))
    return {"words": list(words), "heads": [[shown(head) for head in heads] for heads in layers], "first": first}


def reading_figure(profile: Profile, method: str) -> Figure:
    """What the cheapest certified setting of a method costs each head by itself, relative to exact attention."""

    def share(head: Head) -> float | None:
        offer = head.within_tolerance(method, profile.tol)
        return None if offer is None else offer.share if offer.measured is None else offer.measured

    def words(head: Head) -> str:
        of_exact = share(head)
        return "no promise" if of_exact is None else f"{of_exact:.0%}"

    colours = {"range": [0, 1], "reversed": True, "format": "%"}
    return _map(profile, f"What {method} reads for each head", share, words, colours)


def number_figure(profile: Profile, title: str, value: Callable[[Head], float], log: bool = False) -> Figure:
    """Any number of each head; on a logarithmic scale of colours where it spans decades."""
    if not log:
        numbers = [value(head) for head in profile.heads]
        return _map(profile, title, value, lambda head: number(value(head)), {"range": [min(numbers), max(numbers)]})

    def logarithm(head: Head) -> float:
        return math.log10(max(value(head), 1e-300))

    decades = [logarithm(head) for head in profile.heads]
    low = math.floor(min(decades))
    ticks = list(range(low, max(math.ceil(max(decades)), low + 1) + 1))
    colours = {"ticks": ticks, "labels": [f"{10.0**tick:g}" for tick in ticks], "range": [low, ticks[-1]]}
    return _map(profile, title, logarithm, lambda head: f"{value(head):.3g}", colours)


def _map(
    profile: Profile,
    title: str,
    value: Callable[[Head], float | None],
    words: Callable[[Head], str],
    colours: Mapping[str, Any],
) -> Figure:
    """A square for each head, layers from left to right, as chart.js draws it.

    `colours` are the numbers at the ends of its scale of colours (`range`) and how they are written.
    """
    layers = list(profile.layers.items())
    most = max(len(heads) for _, heads in layers)

    def grid(cell: Callable[[str, Head], Any]) -> list[list[Any]]:
        return [[cell(name, heads[i]) if i < len(heads) else None for name, heads in layers] for i in range(most)]

    texts = [
        [None if cell is None else f"head {i} of {cell}" for cell in row]
        for i, row in enumerate(grid(lambda name, head: f"{name}: {words(head)}"))
    ]
    return {
        "title": title,
        "x": {"title": "layer", "names": [str(i) for i in range(len(layers))]},
        "y": {"title": "head", "names": [str(i) for i in range(most)]},
        "cells": grid(lambda _, head: value(head)),
        "texts": texts,
        "colours": dict(colours),
    }
