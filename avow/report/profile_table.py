"""What a profile and a verdict say in words and tables; the same for terminals and for pages."""

from __future__ import annotations

import statistics
from collections import Counter

from avow.core.chart import Table
from avow.integrations.transformers.model_plan import Speed, Verdict
from avow.integrations.transformers.profiling import KINDS, Profile
from avow.report.formatting import NOTHING, error


def headline(profile: Profile) -> str:
    """The profile in a sentence."""
    plan = profile.plan
    if not plan.changed:
        return (
            f"{profile.model}: no head keeps {profile.tol:g} within {profile.budget:.0%} of what exact attention costs"
        )
    served = (
        f"{plan.changed} of {plan.heads} heads keep {profile.tol:g} at {profile.budget:.0%} of exact attention or less"
    )
    return f"{profile.model}: {served}" + ("" if profile.speed is None else f"; {profile.speed.verdict}")


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
        rows.append(
            (
                method,
                f"{len(able)} of {len(heads)}",
                _percent([offer.predicted for offer in able]),
                _percent(measured),
                f"{len(best)} of {len(heads)}",
                error(statistics.median(bounds) if bounds else None),
                error(min(bounds) if bounds else None),
            )
        )
    headings = (
        "method",
        f"prove {profile.tol:g}",
        "predicted",
        "measured",
        f"within {profile.budget:.0%}",
        "bound",
        "least",
    )
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
    headings = [
        "layer",
        "head",
        "kind",
        "|q|",
        "|k|",
        "|v|",
        "logits",
        "spread",
        "entropy",
        "90%",
        "99%",
        "99.9%",
        "rank",
        "first",
        "exact",
        "plan",
        "bound",
        "share",
    ]
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
    return Table("Every head", headings, rows)


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
    return Table(
        f"{v.plan.model}: {v.plan.changed} of {v.plan.heads} heads planned, tol {v.plan.tol:g}", ("", ""), rows
    )


def verdict_line(verdict: Verdict) -> str:
    """Whether it is safe, as far as this text tells."""
    v = verdict
    if not v.kept:
        return "a certificate was broken: please report this"
    proved = f"every layer is proved within {v.plan.tol:g}"
    if not v.within:
        proved = f"layers are proved within {v.certificates.bound:.1e} only, which exact attention's rounding takes"
    same = (
        "the same" if v.agreement == 1 and v.matched == v.generated else f"the same at {v.agreement:.1%} of the places"
    )
    found = f"on this text the predictions are {same}, perplexity changes by {v.change:+.2%}; {proved}"
    # On a CPU short caches are read in full, whatever the plan allows.
    return found if v.partial else f"{found}; all tokens were read everywhere, so this plan saves nothing here"


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%}" if shares else NOTHING
