"""`avow plan --ranks`: the same attention over many ranks; time by way and sharding, and where links are the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from avow.calibration import rates
from avow.cli.options import files
from avow.cli.output import document, wrote
from avow.cli.parsing import dtype_named, duration, operations, speed
from avow.core import Sizes
from avow.distributed.parallel_plan import Interconnect, Machine, Offer, Roofline, check, offers, weak_scaling
from avow.errors import ParameterError


class Asked(NamedTuple):
    """What the command line says, as it was typed."""

    ranks: int
    length: int
    heads: int
    dim: int
    causal: bool
    device: str
    png: Path | None
    as_json: bool
    link: str | None = None
    latency: str = "5us"
    compute: str | None = None
    memory: str | None = None
    kept: float = 0.1
    queries: int | None = None
    batch: int = 1
    key_heads: int | None = None
    dtype: str = "float32"


def plan_ranks(asked: Asked) -> None:
    """Print what each way over so many ranks takes."""
    from avow import file_io
    from avow.report.charts import png
    from avow.report.ranks import ranks_table, shardings_table, verdict, weak_chart
    from avow.report.terminal import bold, show

    sizes = _sizes(asked)
    check(sizes, asked.ranks)
    if asked.link is None:
        rule = "needs to know how fast ranks are connected"
        raise ParameterError("ranks", asked.ranks, rule, "add --link, such as --link 400GB/s")
    link = Interconnect(speed("link", asked.link), duration("latency", asked.latency))
    machine, source = _machine(asked)
    written = files(png=asked.png)
    made = offers(sizes, asked.ranks, link, machine)
    if asked.png is not None:
        scaled = weak_scaling(sizes, asked.ranks, link, machine)
        file_io.write(asked.png, png(weak_chart(scaled, sizes, asked.ranks, link)))
    if asked.as_json:
        document(_plain(made, sizes, asked.ranks, link, source))
    else:
        show(ranks_table(made, sizes, asked.ranks, link, source), "", shardings_table(made), "")
        show(*map(bold, verdict(made, asked.ranks)))
    wrote(written)


def _sizes(asked: Asked) -> Sizes:
    queries = asked.length if asked.queries is None else asked.queries
    key_heads = asked.heads if asked.key_heads is None else asked.key_heads
    counted = {"length": asked.length, "queries": queries, "batch": asked.batch, "heads": asked.heads}
    for name, value in {**counted, "key-heads": key_heads, "dim": asked.dim}.items():
        if value < 1:
            raise ParameterError(name, value, "must be at least 1", f"try --{name} 8")
    if asked.heads % key_heads:
        rule = f"must divide the {asked.heads} heads that share them"
        raise ParameterError("key-heads", key_heads, rule, f"try --key-heads {asked.heads}")
    kind = dtype_named(asked.dtype)
    return Sizes(
        asked.batch,
        asked.heads,
        key_heads,
        queries,
        asked.length,
        asked.dim,
        asked.dim,
        kind,
        asked.device,
        asked.causal,
    )


def _machine(asked: Asked) -> tuple[Machine, str]:
    """What a rank computes with: a device by its figures, or one like this machine."""
    if not 0 <= asked.kept <= 1:
        raise ParameterError("kept", asked.kept, "must be from 0 to 1", "try --kept 0.1")
    if asked.compute is None and asked.memory is None:
        known = rates(asked.device)
        return known, f"ranks like this machine, {known.source}"
    if asked.compute is None or asked.memory is None:
        lacking = "compute" if asked.compute is None else "memory"
        rule, remedy = "is needed beside the other figure of a device", "give --compute 400TFLOP/s and --memory 3TB/s"
        raise ParameterError(lacking, None, rule, remedy)
    roof = Roofline(operations("compute", asked.compute), speed("memory", asked.memory), asked.kept)
    return roof, f"ranks of {asked.compute} and {asked.memory}"


def _plain(made: list[Offer], sizes: Sizes, ranks: int, link: Interconnect, source: str) -> dict[str, Any]:
    """A plan as JSON has it."""
    return {
        "ranks": ranks,
        "bandwidth": link.bandwidth,
        "latency": link.latency,
        "machine": source,
        "keys": sizes.keys,
        "queries": sizes.queries,
        "ways": [
            {
                "way": offer.strategy.name,
                "target": offer.strategy.method.target,
                "parameters": offer.strategy.method.parameters,
                "over_heads": offer.sharding.heads,
                "over_sequence": offer.sharding.sequence,
                "computing_seconds": offer.time.computing,
                "sending_seconds": offer.time.sending,
                "seconds": offer.time.whole,
                "bytes_sent": offer.traffic.sent,
                "messages": offer.traffic.messages,
                "dominated_by": offer.dominated,
                "communication_dominates_from": offer.from_ranks,
                "shardings": [
                    {
                        "over_heads": one.sharding.heads,
                        "over_sequence": one.sharding.sequence,
                        "seconds": one.time.whole,
                    }
                    for one in offer.shardings
                ],
            }
            for offer in made
        ],
    }
