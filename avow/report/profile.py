"""A model's profile and the verdict on a plan: the page with its heat maps, and tables for pages and terminals."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from html import escape
from typing import Any

from avow.core.chart import Table
from avow.integrations.transformers.model_plan import Speed, Verdict
from avow.integrations.transformers.profiling import CERTIFIED, KINDS, NEAR, ROWS, Head, Profile
from avow.report.formatting import NOTHING, error, number
from avow.report.page import render
from avow.report.style import LOOKS

Figure = dict[str, Any]
# From pale to strong on white and on black alike: the middle of both is where most heads are.
_SCALE = "Viridis"
_FIGURES = ("|q|", "|k|", "|v|", "logits", "spread", "entropy", "90%", "99%", "99.9%", "rank", "first")
_HEADINGS = ("layer", "head", "kind", *_FIGURES, "exact", "plan", "bound", "share")
# Maps of single numbers: title, what it is, the number of a head, whether its scale is logarithmic.
_MAPS: dict[str, tuple[str, str, Callable[[Head], float], bool]] = {
    "tokens": (
        "Tokens for 99% of the mass",
        "The fewest tokens that together have 99% of a row's weight, on average.",
        lambda head: head.figures.tokens[1],
        True,
    ),
    "entropy": (
        "Entropy",
        "Of a row's weights, in nats: its exponential is how many tokens it is as good as spread over.",
        lambda head: head.figures.entropy,
        False,
    ),
    "spread": (
        "Spread of logits",
        "The largest logit of a row less its smallest. Random features need it small.",
        lambda head: head.figures.spread,
        False,
    ),
    "rank": (
        "Effective rank",
        "Of the sampled rows' weights: how many directions they use. Landmarks need it small.",
        lambda head: head.figures.effective_rank,
        False,
    ),
}


def profile_page(profile: Profile, command: str, machine: str) -> str:
    """The report as a page; `command` is what made it, `machine` where."""
    figures: dict[str, Figure] = {"kinds": kinds_figure(profile), "reading": reading_figure(profile, "sparse")}
    figures |= {id: number_figure(profile, value, log) for id, (_, _, value, log) in _MAPS.items()}
    return render(
        "profile.html",
        figures,
        title="avow profile",
        headline=headline(profile),
        profile=profile,
        speed=None if profile.speed is None else speed_table(profile.speed),
        kinds=kinds_table(profile),
        methods=methods_table(profile),
        heads=heads_table(profile),
        maps={id: (title, words) for id, (title, words, _, _) in _MAPS.items()},
        rem=min(6 + 1.3 * max(len(heads) for heads in profile.layers.values()), 40),
        near=NEAR,
        rows=ROWS,
        certified=CERTIFIED,
        command=command,
        machine=machine,
    )


def headline(profile: Profile) -> str:
    """The profile in a sentence."""
    plan, tol, budget = profile.plan, f"{profile.tol:g}", f"{profile.budget:.0%}"
    if not plan.changed:
        return f"{profile.model}: no head keeps {tol} within {budget} of what exact attention costs"
    sentence = (
        f"{profile.model}: {plan.changed} of {plan.heads} heads keep {tol} at {budget} of exact attention or less"
    )
    return sentence if profile.speed is None else f"{sentence}; {profile.speed.verdict}"


def speed_table(speed: Speed) -> Table:
    """What a new token costs, three ways."""
    rows = [
        ("as it is", f"{speed.as_it_is:.1f}", "1.00"),
        ("avow enabled", f"{speed.enabled:.1f}", f"{speed.enabled_ratio:.2f}"),
        ("with the plan", f"{speed.planned:.1f}", f"{speed.planned_ratio:.2f}"),
    ]
    title = f"A new token behind {speed.tokens:,} ({speed.clock}, medians of {speed.rounds} rounds in turns)"
    return Table(title, ("the model", "ms per token", "beside as it is"), rows)


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
    counted = Counter(head.figures.kind for head in profile.heads)
    rows = []
    for kind in KINDS:
        own = [head.figures for head in profile.heads if head.figures.kind == kind]
        tokens = [statistics.median(x.tokens[i] for x in own) if own else None for i in range(3)]
        entropy = statistics.median(x.entropy for x in own) if own else None
        rows.append((kind, counted[kind], *tokens, entropy))
    return Table("Kinds of heads", ("kind", "heads", "90%", "99%", "99.9%", "entropy"), rows)


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


def kinds_figure(profile: Profile) -> Figure:
    """Which kind each head is, by colour and by the first letter of its name."""
    steps = [(i / len(KINDS), LOOKS[i].colour) for i in range(len(KINDS))]
    scale = [[edge, colour] for low, colour in steps for edge in (low, low + 1 / len(KINDS))]
    figure = _map(profile, lambda head: KINDS.index(head.figures.kind), "kind", lambda head: head.figures.kind)
    trace = figure["data"][0]
    trace |= {"colorscale": scale, "zmin": -0.5, "zmax": len(KINDS) - 0.5, "zsmooth": False}
    trace["colorbar"] |= {"tickvals": list(range(len(KINDS))), "ticktext": list(KINDS)}
    letters = [[None if x is None else KINDS[x][0] for x in row] for row in trace["z"]]
    trace |= {"text": letters, "texttemplate": "%{text}", "textfont": {"color": "#fff", "size": 11}}
    return figure


def reading_figure(profile: Profile, method: str) -> Figure:
    """What the cheapest certified setting of a method costs each head by itself, relative to exact attention."""

    def share(head: Head) -> float | None:
        offer = head.within_tolerance(method, profile.tol)
        return None if offer is None else offer.share if offer.measured is None else offer.measured

    def words(head: Head) -> str:
        of_exact = share(head)
        return "no promise" if of_exact is None else f"{of_exact:.0%}"

    figure = _map(profile, share, "", words)
    figure["data"][0] |= {"zmin": 0, "zmax": 1, "reversescale": True}
    figure["data"][0]["colorbar"] |= {"tickformat": ".0%"}
    return figure


def number_figure(profile: Profile, value: Callable[[Head], float], log: bool = False) -> Figure:
    """Any number of each head; on a logarithmic scale of colours where it spans decades."""
    if not log:
        return _map(profile, value, "", lambda head: number(value(head)))
    figure = _map(profile, lambda head: math.log10(max(value(head), 1e-300)), "", lambda head: f"{value(head):.3g}")
    numbers = [x for row in figure["data"][0]["z"] for x in row if x is not None]
    low, high = math.floor(min(numbers)), max(math.ceil(max(numbers)), math.floor(min(numbers)) + 1)
    ticks = list(range(low, high + 1))
    trace = figure["data"][0]
    trace |= {"zmin": low, "zmax": high}
    trace["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    return figure


def _map(profile: Profile, value: Callable[[Head], float | None], title: str, words: Callable[[Head], str]) -> Figure:
    layers = list(profile.layers.values())
    most = max(len(heads) for heads in layers)

    def grid(cell: Callable[[int, Head], Any]) -> list[list[Any]]:
        return [
            [cell(i, heads[row]) if row < len(heads) else None for i, heads in enumerate(layers)] for row in range(most)
        ]

    names = [escape(name) for name in profile.layers]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": grid(lambda _, head: value(head)),
        "customdata": grid(lambda i, head: f"{names[i]}, {words(head)}"),
        "hovertemplate": "head %{y} of %{customdata}<extra></extra>",
        "colorscale": _SCALE,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": title}},
    }
    axes = {
        "xaxis": {"title": {"text": "layer"}, "showgrid": False, "dtick": 1 if len(layers) <= 16 else 5},
        "yaxis": {"title": {"text": "head"}, "showgrid": False, "dtick": 1 if most <= 12 else 4},
    }
    axes["yaxis"]["autorange"] = "reversed"
    return {"data": [trace], "layout": axes}
