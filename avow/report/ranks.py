"""Plans for many ranks: as a table, in a sentence or two, and weak scaling as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from avow.core import Sizes, named
from avow.core.chart import Chart
from avow.distributed.parallel_plan import Interconnect, Offer, Time, WeakScaling
from avow.report import formatting
from avow.report.terminal import Columns

_SOFTMAX = "softmax attention"


def ranks_table(made: list[Offer], sizes: Sizes, ranks: int, link: Interconnect, source: str) -> Columns:
    """Ways from the fastest down, each in its best sharding."""
    links = f"{formatting.size(link.bandwidth)}/s and {formatting.seconds(link.latency)} a message"
    kind = named(sizes.dtype)
    title = Text.assemble(
        (f"plan for {formatting.count(ranks, 'rank')}, {links}", "bold"),
        f"\n{formatting.shape(sizes)}, {kind}\n{source}",
    )
    rows = []
    for offer in made:
        name = f"{offer.strategy.name}{'*' if offer.strategy.method.target != _SOFTMAX else ''}"
        sent = formatting.size(offer.traffic.sent)
        rows.append([name, *map(str, offer.sharding), *_times(offer.time), sent, _rule(offer)])
    headings = ("way", "over\nheads", "over\ntokens", "computing", "links", "in all", "sent", "links\nrule")
    notes = [
        "sent: bytes of one rank a call; links rule: from so many ranks on they take longer than computing (! now)",
        "* a mechanism of its own, no approximation of softmax attention",
    ]
    return Columns("lrrrrrrr", headings, rows, title, notes)


def shardings_table(made: list[Offer]) -> Columns:
    """The fastest exact way in every sharding."""
    exact = next(offer for offer in made if offer.strategy.method.is_exact)
    rows = [[*map(str, sharding), *_times(time)] for sharding, time in exact.shardings]
    headings = ("over heads", "over sequence", "computing", "links", "in all")
    return Columns("rrrrr", headings, rows, f"{exact.strategy.name}, by sharding")


def _times(time: Time) -> Iterator[str]:
    return map(formatting.seconds, (time.computing, time.sending, time.whole))


def _rule(offer: Offer) -> str:
    now = "!" if offer.dominated == "communication" else ""
    return "never" if offer.from_ranks is None else f"{offer.from_ranks}{now}"


def verdict(made: list[Offer], ranks: int) -> list[str]:
    """The fastest exact way, what an approximation would take, and what holds the fastest back."""
    exact = next(offer for offer in made if offer.strategy.method.is_exact)
    lines = [f"{exact.strategy.name}: {exact.sharding}, {formatting.seconds(exact.time.whole)}, {_held(exact)}"]
    softer = [o for o in made if o.strategy.method.target == _SOFTMAX and o.time.whole < exact.time.whole]
    if softer:
        gain = exact.time.whole / softer[0].time.whole if softer[0].time.whole else 1.0
        lines.append(
            f"{softer[0].strategy.name}: {softer[0].sharding}, {formatting.seconds(softer[0].time.whole)}, "
            f"{gain:.1f} times as fast where it proves the tolerance"
        )
    ruled = [offer.strategy.name for offer in made if offer.dominated == "communication"]
    if ruled and ranks > 1:
        lines.append(f"links take longer than computing: {formatting.listed(ruled)}")
    return lines


def _held(offer: Offer) -> str:
    if offer.dominated == "communication":
        longer = formatting.ratio(offer.time.sending / max(offer.time.computing, 1e-300))
        return f"held back by links: {longer} its computing"
    return f"{offer.efficiency:.0%} of it computing"


def weak_chart(scaled: Mapping[str, WeakScaling], sizes: Sizes, ranks: int, link: Interconnect) -> Chart:
    """Seconds of each way as ranks and the sequence grow together."""
    each = -(-sizes.keys // ranks)
    title = f"Weak scaling over the sequence: {each:,} keys a rank, links of {formatting.size(link.bandwidth)}/s"
    series = {name: (found.ranks, found.seconds) for name, found in scaled.items()}
    return Chart(title, "ranks", "seconds", series, log_x=True, log_y=True)
