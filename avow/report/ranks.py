"""Plans for many ranks: as a table, in a sentence or two, and weak scaling as a chart."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from avow.chart import Chart
from avow.contract import Sizes, named
from avow.links import Link
from avow.report import words
from avow.scaling import Offer, Weak

_SOFTMAX = "softmax attention"


def ranks_table(made: list[Offer], sizes: Sizes, ranks: int, link: Link, source: str) -> Table:
    """Ways from the fastest down, each in its best sharding."""
    z = sizes
    heads = f"{z.heads} heads" if z.heads == z.key_heads else f"{z.heads} heads on {z.key_heads}"
    shape = f"{heads} × {z.queries:,} queries × {z.keys:,} keys × {z.dim}{', causal' if z.causal else ''}"
    kind = named(z.dtype)
    title = Text.assemble(
        (f"plan for {ranks} ranks, {size(link.bandwidth)}/s and {time(link.latency)} a message", "bold"),
        f"\n{shape}, {kind}\n{source}",
    )
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("way", no_wrap=True)
    for heading in ("over\nheads", "over\ntokens", "computing", "links", "in all", "sent", "links\nrule"):
        table.add_column(heading, justify="right", no_wrap=True)
    for offer in made:
        other = offer.way.method.target != _SOFTMAX
        name = f"{offer.way.name}{'*' if other else ''}"
        times = map(time, (offer.spent.computing, offer.spent.sending, offer.spent.whole))
        table.add_row(*map(Text, (name, *map(str, offer.sharding), *times, size(offer.load.sent), _rule(offer))))
    notes = [
        "sent: bytes of one rank a call; links rule: from so many ranks on they take longer than computing (! now)"
    ]
    notes += ["* a mechanism of its own, no approximation of softmax attention"]
    table.caption, table.caption_justify, table.caption_style = "\n".join(notes), "left", "dim"
    return table


def shardings_table(made: list[Offer]) -> Table:
    """The fastest exact way in every sharding."""
    exact = next(offer for offer in made if offer.way.method.name == "exact")
    table = Table(title=Text(f"{exact.way.name}, by sharding"), title_justify="left", title_style="bold", box=None)
    table.pad_edge = False
    for heading in ("over heads", "over sequence", "computing", "links", "in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for sharding, spent in exact.priced:
        table.add_row(*map(str, sharding), *map(time, (spent.computing, spent.sending, spent.whole)))
    return table


def _rule(offer: Offer) -> str:
    now = "!" if offer.dominated == "communication" else ""
    return "never" if offer.from_ranks is None else f"{offer.from_ranks}{now}"


def verdict(made: list[Offer], ranks: int) -> list[str]:
    """The fastest exact way, what an approximation would take, and what holds the fastest back."""
    exact = next(offer for offer in made if offer.way.method.name == "exact")
    lines = [f"{exact.way.name}: {exact.sharding}, {time(exact.spent.whole)}, {_held(exact)}"]
    softer = [o for o in made if o.way.method.target == _SOFTMAX and o.spent.whole < exact.spent.whole]
    if softer:
        gain = exact.spent.whole / softer[0].spent.whole if softer[0].spent.whole else 1.0
        lines.append(
            f"{softer[0].way.name}: {softer[0].sharding}, {time(softer[0].spent.whole)}, "
            f"{gain:.1f} times as fast where it proves the tolerance"
        )
    ruled = [offer.way.name for offer in made if offer.dominated == "communication"]
    if ruled and ranks > 1:
        lines.append(f"links take longer than computing: {words.listed(ruled)}")
    return lines


def _held(offer: Offer) -> str:
    if offer.dominated == "communication":
        longer = words.ratio(offer.spent.sending / max(offer.spent.computing, 1e-300))
        return f"held back by links: {longer} its computing"
    return f"{offer.efficiency:.0%} of it computing"


def time(x: float) -> str:
    """Seconds in a few digits.

    >>> time(3e-7), time(2.5e-5), time(0.25), time(90.0)
    ('0.3 µs', '25 µs', '250 ms', '90 s')
    """
    return f"{x * 1e6:.3g} µs" if x < 1e-3 else f"{x * 1e3:.3g} ms" if x < 1 else f"{x:.3g} s"


def size(count: float) -> str:
    """Bytes in a few digits.

    >>> size(1536), size(4e11), size(0)
    ('1.54 kB', '400 GB', '0 B')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} B"


def weak_chart(scaled: Mapping[str, Weak], sizes: Sizes, ranks: int, link: Link) -> Chart:
    """Seconds of each way as ranks and the sequence grow together."""
    each = -(-sizes.keys // ranks)
    title = f"Weak scaling over the sequence: {each:,} keys a rank, links of {size(link.bandwidth)}/s"
    series = {name: (found.ranks, found.seconds) for name, found in scaled.items()}
    return Chart(title, "ranks", "seconds", series, log_x=True, log_y=True)
