"""Plans for many ranks: as a table, in a sentence or two, and weak scaling as a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from avow.core import SOFTMAX, Sizes, dtype_name
from avow.core.chart import Chart
from avow.distributed.parallel_plan import Interconnect, Offer, Time
from avow.report import formatting
from avow.report.terminal import Columns


def ranks_table(offers: list[Offer], sizes: Sizes, ranks: int, link: Interconnect, source: str) -> Columns:
    """Ways from the fastest down, each in its best sharding."""
    links = f"{formatting.size(link.bandwidth)}/s and {formatting.seconds(link.latency)} a message"
    heading = f"plan for {formatting.count(ranks, 'rank')}, {links}"
    title = Text.assemble((heading, "bold"), f"\n{formatting.shape(sizes)}, {dtype_name(sizes.dtype)}\n{source}")
    rows = []
    for offer in offers:
        name = f"{offer.strategy.name}{'*' if offer.strategy.method.target != SOFTMAX else ''}"
        rule = "never" if offer.from_ranks is None else f"{offer.from_ranks}{'!' if _held_back(offer) else ''}"
        sent = formatting.size(offer.traffic.sent)
        rows.append([name, *map(str, offer.sharding), *_times(offer.time), sent, rule])
    headings = ("strategy", "over\nheads", "over\ntokens", "computing", "links", "in all", "sent", "links\nrule")
    notes = [
        "sent: bytes of one rank a call; links rule: from so many ranks on they take longer than computing (! now)",
        "* a mechanism of its own, no approximation of softmax attention",
    ]
    return Columns("lrrrrrrr", headings, rows, title, notes)


def shardings_table(offers: list[Offer]) -> Columns:
    """The fastest exact way in every sharding."""
    exact = next(offer for offer in offers if offer.strategy.method.is_exact)
    rows = [[*map(str, time.sharding), *_times(time)] for time in exact.shardings]
    headings = ("over heads", "over sequence", "computing", "links", "in all")
    return Columns("rrrrr", headings, rows, f"{exact.strategy.name}, by sharding")


def _times(time: Time) -> Iterator[str]:
    return map(formatting.seconds, (time.computing, time.sending, time.whole))


def _held_back(offer: Offer) -> bool:
    """Whether links take longer than computing."""
    return offer.dominated == "communication"


def verdict(offers: list[Offer], ranks: int) -> list[str]:
    """The fastest exact way, what an approximation would take, and what holds the fastest back."""
    exact = next(offer for offer in offers if offer.strategy.method.is_exact)
    limit = f"{exact.efficiency:.0%} of it computing"
    if _held_back(exact):
        longer = formatting.ratio(exact.time.sending / max(exact.time.computing, 1e-300))
        limit = f"held back by links: {longer} its computing"
    lines = [f"{exact.strategy.name}: {exact.sharding}, {formatting.seconds(exact.time.whole)}, {limit}"]
    softer = [o for o in offers if o.strategy.method.target == SOFTMAX and o.time.whole < exact.time.whole]
    if softer:
        best, whole = softer[0], softer[0].time.whole
        gain = f"{exact.time.whole / whole if whole else 1.0:.1f} times as fast where it proves the tolerance"
        lines.append(f"{best.strategy.name}: {best.sharding}, {formatting.seconds(whole)}, {gain}")
    ruled = [offer.strategy.name for offer in offers if _held_back(offer)]
    if ruled and ranks > 1:
        lines.append(f"links take longer than computing: {formatting.listed(ruled)}")
    return lines


def weak_chart(
    scaled: Mapping[str, tuple[list[int], list[float]]], sizes: Sizes, ranks: int, link: Interconnect
) -> Chart:
    """Seconds of each way as ranks and the sequence grow together."""
    each = -(-sizes.keys // ranks)
    title = f"Weak scaling over the sequence: {each:,} keys a rank, links of {formatting.size(link.bandwidth)}/s"
    return Chart(title, "ranks", "seconds", scaled, log_x=True, log_y=True)
