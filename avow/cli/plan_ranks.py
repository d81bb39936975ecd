"""`avow plan-ranks`: how long each strategy takes over many ranks, in which sharding, and where links are the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from avow.calibration import rates
from avow.cli import options
from avow.cli.options import AsJson, Batch, Causal, Device, Dtype, KeyHeads, Png, Recalibrate, option, present
from avow.cli.parsing import dtype_named, duration, operations, speed
from avow.core import Sizes
from avow.distributed.parallel_plan import Interconnect, Machine, Offer, Roofline, Time, check, offers, weak_scaling
from avow.errors import ParameterError
from avow.parameters import check_key_heads


def plan_ranks(
    ranks: Annotated[int, option("Ranks to spread one attention call over.", min=1)],
    link: Annotated[str, option("Bandwidth of a rank's link, in bytes or bits a second, as 400GB/s.", metavar="SPEED")],
    latency: Annotated[str, option("Time until a message arrives, such as 5us or 0.1ms.", metavar="TIME")] = "5us",
    length: Annotated[int, option("Keys; queries too, unless --queries is given.", min=1)] = 131_072,
    heads: Annotated[int, option("Query heads.", min=1)] = 4,
    key_heads: KeyHeads = None,
    dim: Annotated[int, option("Dimension of each head.", min=1)] = 64,
    queries: Annotated[int | None, option("Only so many of the last queries; default: all.", min=1)] = None,
    batch: Batch = None,
    dtype: Dtype = None,
    causal: Causal = False,
    compute: Annotated[
        str | None, option("Arithmetic of a rank, such as 400TFLOP/s; default: this machine's.", metavar="SPEED")
    ] = None,
    memory: Annotated[
        str | None, option("Memory bandwidth of a rank, such as 4.8TB/s; needs --compute.", metavar="SPEED")
    ] = None,
    kept: Annotated[
        float, option("With --compute: share of the tokens that sparse attention reads, from 0 to 1.")
    ] = 0.1,
    device: Device = "cpu",
    recalibrate: Recalibrate = False,
    png: Png = None,
    as_json: AsJson = False,
) -> None:
    """How long attention takes over many ranks, by strategy.

    A plan looks at sizes alone: `avow plan` says which methods meet a tolerance. --png draws weak scaling up to this
    number of ranks.
    """
    device = options.place(device)
    groups = heads if key_heads is None else key_heads
    check_key_heads(heads, groups)
    shape = batch or 1, heads, groups, length if queries is None else queries, length, dim, dim
    sizes = Sizes(*shape, dtype_named("float32" if dtype is None else dtype), device, causal)
    check(sizes, ranks)
    interconnect = Interconnect(speed("link", link), duration("latency", latency))
    machine, source = _machine(compute, memory, kept, device, recalibrate)
    _present(sizes, ranks, interconnect, machine, source, png, as_json)


def _machine(
    compute: str | None, memory: str | None, kept: float, device: str, recalibrate: bool
) -> tuple[Machine, str]:
    """What a rank computes with: a device by its figures, or one like this machine."""
    if not 0 <= kept <= 1:
        raise ParameterError("kept", kept, "must be from 0 to 1", "try --kept 0.1")
    if compute is None and memory is None:
        known = rates(device, tell=options.tell, again=options.again(recalibrate))
        return known, f"ranks like this machine, {known.source}"
    if compute is None or memory is None:
        missing = "compute" if compute is None else "memory"
        rule, remedy = "is needed beside the other figure of a device", "give --compute 400TFLOP/s and --memory 3TB/s"
        raise ParameterError(missing, None, rule, remedy)
    if recalibrate:
        rule = "measures this machine, and ranks have figures of their own"
        raise ParameterError("recalibrate", True, rule, "leave it out, or --compute and --memory")
    roofline = Roofline(operations("compute", compute), speed("memory", memory), kept)
    return roofline, f"ranks of {compute} and {memory}"


def _present(
    sizes: Sizes, ranks: int, link: Interconnect, machine: Machine, source: str, png: Path | None, as_json: bool
) -> None:
    from avow import file_io
    from avow.report import charts
    from avow.report.ranks import ranks_table, shardings_table, verdict, weak_chart
    from avow.report.terminal import bold

    written = options.files(png=png)
    priced = offers(sizes, ranks, link, machine)
    if png is not None:
        chart = weak_chart(weak_scaling(sizes, ranks, link, machine), sizes, ranks, link)
        file_io.write(png, charts.png(chart))
    about = {"ranks": ranks, "bandwidth": link.bandwidth, "latency": link.latency, "machine": source}
    counts = {"keys": sizes.keys, "queries": sizes.queries}
    plain = {**about, **counts, "ways": [_plain_offer(offer) for offer in priced]}
    tables = ranks_table(priced, sizes, ranks, link, source), "", shardings_table(priced), ""
    present(as_json, plain, *tables, *map(bold, verdict(priced, ranks)), written=written)


def _plain_offer(offer: Offer) -> dict[str, Any]:
    method, time = offer.strategy.method, offer.time
    return {
        "way": offer.strategy.name,
        "target": method.target,
        "parameters": method.parameters,
        **_plain_sharding(time),
        "computing_seconds": time.computing,
        "sending_seconds": time.sending,
        "bytes_sent": offer.traffic.sent,
        "messages": offer.traffic.messages,
        "dominated_by": offer.dominated,
        "communication_dominates_from": offer.from_ranks,
        "shardings": [_plain_sharding(one) for one in offer.shardings],
    }


def _plain_sharding(time: Time) -> dict[str, Any]:
    return {"over_heads": time.sharding.heads, "over_sequence": time.sharding.sequence, "seconds": time.whole}
