"""What each kernel of a decoding step computes, in plain torch on any device: slow, and the reference of its tests.

Import it after it is settled whether kernels are interpreted.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
import triton
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor

from avow.kernels import choice, planning, sample_bounds, sampling, sketch_pass
from avow.kernels.choice import PLACES, Chosen, Draws, spans_of
from avow.kernels.finalize import UNIT, Decoded, rounding_of
from avow.kernels.pausing import Used
from avow.kernels.planning import BINS, CIRCLE, WIDTH, Goal
from avow.kernels.sample_bounds import ABOVE, BELOW, FUZZY, NONE, Logs
from avow.kernels.sketch_pass import Terms
from avow.kernels.sparse_decode import Lengths, Stages, decode
from avow.kernels.step_constants import FEWEST, LIMIT, STEPS, absolute_error, relative_error
from avow.kernels.work_partition import TILE, Parts, programs
from avow.numerics.norms import slack
from avow.numerics.sketch import GROUP, Sketch, unpacked


def value_lengths(v: Float[Tensor, "b g s e"]) -> Lengths:
    """Bounds on the lengths of values, which look at nothing but their own head."""
    wide = v.detach().float()
    largest = wide.abs().amax((-1, -2), keepdim=True)  # (b, g, 1, 1)
    # A power of two near the largest entry, so that no square overflows or vanishes.
    size = torch.exp2(torch.floor(torch.log2(largest.double().clamp(min=2.0**-149))))
    norms = torch.linalg.vector_norm((wide / size).float(), dim=-1).double()  # (b, g, s)
    error = slack(v.shape[-1], v.dtype)
    size = size[..., 0]
    # Entries below 2^-60 of the largest may vanish when squared; rounding to bfloat16 takes 2^-8 at most.
    each = (norms * (1 + error) + torch.where(norms.amax(-1, keepdim=True) > 0, 2.0**-50, 0.0)) * size
    each = torch.where(each > 0, each * (1 + 2.0**-7) + 2.0**-126, 0.0).to(torch.bfloat16)
    least = (norms.amax(-1) * (1 - error) - 2.0**-50).clamp(min=0) * size[..., 0]
    most = least.float() * (1 - 2.0**-22)
    return Lengths(each, torch.where(largest[..., 0, 0] == 0, 0.0, torch.where(most > 2.0**-100, most, math.nan)))


def bounded_reference(
    q: Tensor,
    sketch: Sketch,
    lengths: Tensor,
    most: Float32[Tensor, "b g"],
    hint: Float32[Tensor, "b h"] | None,
    scale: float,
    used: Used,
    counts: Int32[Tensor, "bh circle"],
    least: float = 0.0,
) -> Terms:
    """What the kernel of that name computes, as one program."""
    b, h, d = q.shape
    g, c = sketch.codes.shape[1:3]
    heads, r = b * g, h // g
    x = q.reshape(heads, r, d).float()
    exponent = (x.abs().amax(-1).view(torch.int32) >> 23 & 255).clamp(32, 253)
    power, inverse = (exponent << 23).view(torch.float32), (254 - exponent << 23).view(torch.float32)
    x = x * inverse.unsqueeze(-1)
    factor = scale * math.log2(math.e) * STEPS
    grown = (sketch.size.reshape(heads, 1) * factor * power.double()).float().unsqueeze(1)  # (bg, 1, r)
    shift = (sketch.zero.float().reshape(heads, c, d) @ x.transpose(-1, -2) * grown).unsqueeze(2)
    square = x.square()
    spread = (square @ sketch.metric.reshape(heads, d, 1)).transpose(1, 2).sqrt() * (1 + 2.0**-13) + 2.0**-60
    length = square.sum(-1).unsqueeze(1).sqrt() * (1 + 2.0**-13) + 2.0**-60
    spread = spread * grown * (1 + 2.0**-18)
    unit = most.reshape(heads)
    wide = unit if hint is None else torch.fmax(hint.reshape(heads, -1).amax(-1), unit * least)
    wide = torch.where((wide > unit * 2.0**-20) & (wide < unit), wide, unit)
    nu = torch.where(wide > 0, wide, 1.0)
    x = x * sketch_pass._LIFT.value
    steps = sketch.scale.reshape(heads, c, 1, d).float()
    codes = unpacked(sketch.codes, 4).reshape(heads, c, GROUP, d).float()
    sums = codes @ (x.unsqueeze(1) * steps).half().float().transpose(-1, -2)  # (bg, c, G, r)
    middle = sums * (grown / sketch_pass._LIFT.value).unsqueeze(1) + shift
    radius = sketch.radius.reshape(heads, c, GROUP, 1).float()
    long = lengths[:, :, : c * GROUP].reshape(heads, c, GROUP, 1).float()
    error, absolute = length * grown * relative_error(d), grown * absolute_error(d)
    margin = (error * sketch.reach.reshape(heads, c, 1) + absolute).unsqueeze(2)
    extra = STEPS * torch.log2(1 + long / nu[:, None, None, None]) + sketch_pass._PAD.value
    half = spread.unsqueeze(1) * radius + margin
    term = middle + half + extra
    place = torch.where(term < LIMIT, term, LIMIT).clamp(min=-LIMIT).round().int()
    top = place.amax(2) if c else place.new_empty(heads, 0, r)
    offset = (top.unsqueeze(2) - place).clamp(max=255).to(torch.uint8)
    peaks = top.amax(1, keepdim=True) if c else top.new_full((heads, 1, r), -LIMIT)
    own = torch.exp2((top - peaks) / STEPS)
    masses = (own * torch.exp2((middle - sketch_pass._DOUBT.value * half - top.unsqueeze(2)) / STEPS).sum(2)).sum(1)
    offset = offset.permute(0, 3, 1, 2).reshape(b * h, c * GROUP).contiguous()
    lengths = lengths.reshape(heads, -1)
    terms = Terms(offset, top, shift.squeeze(2), nu, counts, peaks, masses.unsqueeze(1), lengths, used)
    counts += counts_reference(terms)
    return terms


def counts_reference(terms: Terms) -> Int32[Tensor, "bh circle"]:
    """What the sketch pass counts of these terms."""
    heads, c, r = terms.top.shape
    # Where few rows share a head, groups are counted in pairs.
    pair = torch.arange(c, device=terms.top.device) // (2 if 2 * r <= FEWEST else 1)
    stride = stride_of(c, heads * r)
    here = (pair - pair // stride * 5) % stride == 0
    term = widest_reference(terms)[:, None] - steps_below(terms)
    bins = ((term + planning.ORIGIN) // WIDTH % CIRCLE).view(heads * r, c, GROUP)[:, here].flatten(1).long()
    return torch.zeros_like(terms.counts).scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.int32))


def widest_reference(terms: Terms) -> Int32[Tensor, "bh"]:
    """The largest term of each head."""
    return terms.peaks.amax(1).flatten()


def stride_of(c: int, rows: int) -> int:
    """Of how many groups one is counted, for so many rows of all heads."""
    return 1 << min(planning.RAREST, max(1, c * GROUP // planning.enough(rows)).bit_length() - 1)


def foreseen_reference(terms: Terms) -> tuple[Tensor, Int32[Tensor, "bh bins"], Tensor]:
    """The mass that is expected, how far bins are below the largest term, and how much each and all after it are."""
    c = terms.top.shape[1]
    widest, apart = widest_reference(terms), terms.peaks - terms.peaks.amax(1, keepdim=True)
    expected = (terms.masses * torch.exp2(apart / STEPS)).sum(1).flatten()
    bins = torch.arange(BINS, device=widest.device)
    place = ((widest + planning.ORIGIN) // WIDTH)[:, None] - bins
    above = WIDTH - 1 - (widest + planning.ORIGIN) % WIDTH
    edges = (bins * WIDTH - above[:, None]).clamp(min=0)
    sizes = terms.counts.gather(1, (place % CIRCLE).long()) * torch.exp2(-edges / STEPS)
    sizes = sizes * float(stride_of(c, len(widest)))
    return expected, edges, sizes.flip(-1).cumsum(-1).flip(-1) + c * GROUP * planning.BEYOND


def own_span(heads: int, s: int) -> tuple[int, int]:
    """How many spans s tokens of a head have, and how many of these are a span."""
    spans, _ = spans_of(heads, s)
    return spans, triton.cdiv(triton.cdiv(s, choice.BLOCK), spans) * choice.BLOCK


def steps_below(terms: Terms) -> Int32[Tensor, "bh rows"]:
    """How many steps each term is below its head's largest."""
    heads, c, r = terms.top.shape
    top = terms.top.transpose(1, 2).reshape(heads * r, c)
    return widest_reference(terms)[:, None] - top.repeat_interleave(GROUP, 1) + terms.offset.int()


def cuts_reference(terms: Terms, most: Float32[Tensor, "b g"], drop: float) -> Int32[Tensor, "bh"]:
    """How many steps below its largest term a head stops reading."""
    expected, _, behind = foreseen_reference(terms)
    budget = expected * drop * (most.reshape(-1) / terms.nu).repeat_interleave(terms.top.shape[2])
    budget = torch.where(budget < torch.inf, budget, -1.0)[:, None]
    over = (~(behind <= budget)).sum(-1)
    above = WIDTH - 1 - (widest_reference(terms) + planning.ORIGIN) % WIDTH
    return torch.where(over >= BINS, 2**30, over.clamp(min=1) * WIDTH - above).int()


def marked_reference(terms: Terms, most: Float32[Tensor, "b g"], drop: float, s: int) -> Chosen:
    """What the kernel of that name computes."""
    heads, c, r = terms.top.shape
    below = steps_below(terms)
    wanted = (below < cuts_reference(terms, most, drop)[:, None]).view(heads, r, -1).any(1)
    flags = torch.nn.functional.pad(wanted, (0, s - c * GROUP), value=True)
    deep = torch.minimum(below, choice._DEEPEST.value + terms.offset.int())
    left = ((127 << 23) - (deep << 20)).view(torch.float32) * ~wanted.repeat_interleave(r, 0)
    spans, span = own_span(heads, s)
    tails = torch.nn.functional.pad(left, (0, spans * span - c * GROUP)).view(heads * r, spans, -1).sum(-1)
    return listed_reference(flags.int(), tails, widest_reference(terms))


def listed_reference(
    flags: Int32[Tensor, "bg s"],
    tails: Tensor | None = None,
    widest: Tensor | None = None,
    draws: Draws | None = None,
) -> Chosen:
    """Lists of tokens whose flags are not 0 but one more than the step of their odds; elsewhere in a list stands −1."""
    heads, s = flags.shape
    spans, span = own_span(heads, s)
    room = spans_of(heads, s)[1] * choice.BLOCK
    listed = torch.full((heads, spans, room), -1, dtype=torch.int32, device=flags.device)
    flags = torch.nn.functional.pad(flags, (0, spans * span - s)).view(heads, spans, span)
    for head, part in itertools.product(range(heads), range(spans)):
        place = flags[head, part].nonzero()[:, 0]
        steps = flags[head, part, place] - 1
        listed[head, part, : len(place)] = (place + part * span).int() | steps << PLACES
    return Chosen(listed.flatten(1), (flags > 0).sum(-1, dtype=torch.int32), tails, widest, draws)


def rims_reference(terms: Terms, most: Float32[Tensor, "b g"], goal: Goal, logs: Logs) -> Float32[Tensor, "bh 2"]:
    """The rims that the kernel of `drawn_reference` plans."""
    expected, edges, behind = foreseen_reference(terms)
    whole, widest = behind[:, 0], widest_reference(terms)
    slim = (terms.nu / most.reshape(-1)).repeat_interleave(terms.top.shape[2])
    aim = (goal.room - goal.narrow * slim).clamp(max=goal.drop)
    long = planning._USUAL.value / slim
    wide = (whole / (expected * (1 + long))).clamp(min=1.0).log2()
    mass = expected * torch.exp2(wide * 0.1).clamp(max=planning._DOUBTED.value)
    wide = (whole / (mass * (1 + long))).clamp(min=1.0).log2()
    fine = (wide * 0.5 + 1.4).floor().clamp(1.0, 3.0)
    wished = (aim * mass / slim)[:, None]
    share = (mass * (long.square() + 1).sqrt() / whole).clamp(max=1.0)[:, None]

    def solved(linear: Tensor | float, root: Tensor) -> Tensor:
        return ((root.square() + 4 * linear * wished).sqrt() - root) / (2 * linear)

    calm = solved(
        (logs.mean + torch.exp2(-fine) * 2.83 * logs.sum)[:, None], 1.42 * share * (2.4 * logs.sum * behind).sqrt()
    )
    rough = solved(0.95 * logs.sum + 2.83, 1.6 * (2 * logs.sum * share * behind).sqrt())
    size = torch.where((wide < fine + 0.5)[:, None], rough, torch.maximum(calm, rough))
    edge = torch.exp2(-edges / STEPS)
    edge[:, 0] = 2.0**30
    rim = torch.minimum(size.square(), edge).amax(-1)
    steps = torch.maximum((-STEPS * rim.log2()).ceil(), torch.where(widest < LIMIT, planning._HIGHEST.value, 1.0))
    sure = (expected > 0) & (expected < torch.inf) & (whole < torch.inf) & (rim > 0)
    sure &= (aim > 0) & (slim < torch.inf)
    cuts = torch.where(sure, steps, 2.0**30).int()
    return torch.stack([(widest - cuts).float() / STEPS, fine], -1)


def drawn_reference(
    terms: Terms,
    most: Float32[Tensor, "b g"],
    goal: Goal,
    logs: Logs,
    seed: Int64[Tensor, "1"],
    s: int,
    rims: Float32[Tensor, "bh 2"] | None = None,
) -> Chosen:
    """What the kernel of that name computes, or by some rims."""
    heads, c, r = terms.top.shape
    rims = rims_reference(terms, most, goal, logs) if rims is None else rims
    cuts = (widest_reference(terms) - rims[:, 0] * STEPS).round().int()
    above = (cuts[:, None] - steps_below(terms)).view(heads, r, c * GROUP).amax(1)
    rare = torch.nn.functional.pad((-above).clamp(0, sampling._RAREST.value), (0, s - c * GROUP))
    chance = (16 - (rare & 7)) << (sampling._BITS - 4 - (rare >> 3))
    wanted = draws_reference(seed, heads, s) < chance
    draws = Draws(rims, terms.nu, terms.lengths, logs, seed)
    return listed_reference(torch.where(wanted, rare + 1, 0), draws=draws)


def draws_reference(seed: Int64[Tensor, "1"], heads: int, s: int) -> Int32[Tensor, "bg s"]:
    """Uniform whole numbers of 16 bits."""
    mask = 2**32 - 1
    keys = [keys_reference(int(seed), head) for head in range(heads)]
    key, y = torch.tensor(keys, device=seed.device).unsqueeze(-1).unbind(1)  # each (bg, 1)
    place = torch.arange(s, device=seed.device)
    x = place >> 2
    for _ in range(sampling._ROUNDS.value):
        product = x * sampling._FACTOR.value
        x, y = (product >> 32 & mask) ^ key ^ y, product & mask
        key = key + sampling._GROWTH.value & mask
    return (torch.where(place & 2 > 0, y, x) >> (place & 1) * sampling._BITS & 2**sampling._BITS - 1).int()


def keys_reference(seed: int, head: int) -> tuple[int, int]:
    x, mask = seed + (head + 1) * 0x9E3779B97F4A7C15, 2**64 - 1
    x &= mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x & (2**32 - 1), x >> 32


def tiles_of(chosen: Chosen, count: int) -> tuple[list[Int32[Tensor, "tiles t"]], int]:
    """The tiles of each head's list, −1 where they have no token, and how many of them a program reads."""
    heads, spans = chosen.found.shape
    tiles = []
    for own, found in zip(chosen.listed.view(heads, spans, -1), chosen.found, strict=True):
        whole = [
            torch.nn.functional.pad(some[:number], (0, -number % TILE), value=-1)
            for some, number in zip(own, found.tolist(), strict=True)
        ]
        tiles.append(torch.cat(whole).view(-1, TILE))
    return tiles, max(1, triton.cdiv(sum(map(len, tiles)), count))


def attended_reference(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, used: Used) -> Parts:
    """What the kernel of that name computes; what no program writes is nan."""
    b, h, d = q.shape
    g, s, e = v.shape[1:]
    r, count = h // g, programs(b * g, s, h // g)
    peak, total, weighted, square, light, heavy = (
        torch.full((count + b * g, *shape), math.nan, device=q.device) for shape in ((r,), (r,), (r, e), (), (r,), (r,))
    )
    tiles, share = tiles_of(chosen, count)
    before = 0
    for head, own in enumerate(tiles):
        rows = q.reshape(b * g, r, d)[head].float()
        for program in range(before // share, (before + len(own) - 1) // share + 1 if len(own) else 0):
            places = own[max(program * share - before, 0) : program * share + share - before].flatten().long()
            places = places[places >= 0]
            rare = places >> PLACES if chosen.draws is not None else torch.zeros_like(places)
            places = places - (rare << PLACES)
            odds = ((127 << 23) - (rare << 20)).int().view(torch.float32)
            keys, carried = (x[head // g, head % g, places].float() for x in (k, v))
            logits = rows @ keys.T * (scale * math.log2(math.e)) - odds.log2()
            slot = program + head
            peak[slot] = logits.amax(-1)
            weights = torch.exp2(logits - peak[slot].unsqueeze(-1))
            total[slot], weighted[slot], square[slot] = weights.sum(-1), weights @ carried, keys.square().sum(-1).amax()
            if chosen.draws is not None:
                length = chosen.draws.lengths[head, places].float() / chosen.draws.nu[head]
                slanted = (length.square() + 1).sqrt()
                rim, fine = chosen.draws.rims[head * r : head * r + r, :, None].unbind(1)
                term = torch.exp2(torch.where(rare > 0, logits + slanted.log2() - (rim - fine), -math.inf))
                light[slot] = (term.clamp(max=ABOVE.value).square() * (1 - odds)).sum(-1)
                heavy[slot] = torch.where(term > BELOW.value, term * ((length + 1) / slanted), 0.0).sum(-1)
        before += len(own)
    found = Parts(peak, total, weighted, square)
    return found if chosen.draws is None else found._replace(light=light, heavy=heavy)


def at_most_reference(found: Tensor, largest: Tensor | float, log: float) -> Tensor:
    f = found / largest
    v = ((f + log / 2).sqrt() + math.sqrt(log / 2)).square()
    w = v
    for _ in range(2):
        w = w - (w - f - f * (w / f.clamp(min=1e-30)).clamp(min=1.0).log() - log) / (1 - f / w)
    return torch.where(f < sample_bounds._MANY.value, w, v) * largest * (1 + 2.0**-12)


def strayed_reference(variance: Tensor, largest: Tensor | float, log: float) -> Tensor:
    third = torch.as_tensor(largest * log / 3)
    return (third + (third.square() + 2 * variance * log).sqrt()) * (1 + 2.0**-12)


def missed_reference(
    light: Tensor, heavy: Tensor, unit: Tensor, fine: Tensor, mass: Tensor, reach: Tensor, logs: Logs
) -> Tensor:
    """What the kernel of that name computes."""
    most, variance = at_most_reference(heavy, fine, logs.mean), at_most_reference(light, 1.0, logs.variance)
    slant = (1 + reach.square()).sqrt()
    stray = strayed_reference(variance, 1.0, logs.sum)
    left = mass - unit * (stray + heavy)
    apart = torch.where(left > 0, unit * ((heavy + most) * reach.clamp(min=1.0) + stray * slant) / left, math.inf)
    stray = strayed_reference(variance + fine * most, fine, logs.sum)
    left = mass - unit * stray
    together = torch.where(left > 0, unit * stray * slant / left, math.inf)
    return torch.minimum(apart.nan_to_num(nan=math.inf), together.nan_to_num(nan=math.inf)) * (1 + 2.0**-10)


def merged_reference(
    q: Tensor,
    v: Tensor,
    parts: Parts,
    terms: Terms,
    chosen: Chosen,
    most: Float32[Tensor, "b g"],
    drop: float,
    scale: float,
    limit: float = math.inf,
    report: Float32[Tensor, "5 b h"] | None = None,
    sinks: None = None,
) -> Decoded:
    """What the kernel of that name computes."""
    assert sinks is None  # whole steps with sinks are held to float64
    (b, h, d), (g, _, e) = q.shape, v.shape[1:]
    r, (lists, tiles) = h // g, tiles_of(chosen, programs(b * g, v.shape[2], h // g))
    counts = torch.tensor([len(own) for own in lists], device=q.device)
    after, head = counts.cumsum(0), torch.arange(b * g, device=q.device)
    first, beyond = (after - counts) // tiles + head, (after - 1) // tiles + head + 1
    slots = torch.arange(len(parts.square), device=q.device)
    own_slots = (slots >= first[:, None]) & (slots < beyond[:, None])  # (bg, slots)
    mine = own_slots.repeat_interleave(r, 0)[:, :, None]  # (bh, slots, 1)

    def by_row(x: Float32[Tensor, "slots r *e"], blank: float) -> Float32[Tensor, "bh slots *e"]:
        """What each head's own slots hold."""
        x = x.movedim(1, 0).repeat(b * g, *[1] * (x.ndim - 1))
        return torch.where(mine if x.ndim == 3 else mine[..., 0], x, blank)

    peak = by_row(parts.peak, -math.inf)
    high = peak.amax(-1)
    weight = torch.exp2(peak - high[:, None])
    mass = (by_row(parts.total, 0.0) * weight).sum(-1)
    answer = (by_row(parts.weighted, 0.0) * weight.unsqueeze(-1)).sum(1) / mass[:, None]
    answer = answer.clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
    own, asked = (torch.linalg.vector_norm(x.double(), dim=-1) * (1 + 2.0**-13) for x in (answer, q.reshape(b * h, d)))
    square = torch.where(own_slots, parts.square, 0.0).amax(-1)
    longest = square.sqrt().repeat_interleave(r) * (1 + 2.0**-13) + 2.0**-58
    scale, logit_error, per_tile, narrow, halves, vanished = rounding_of(q, v, scale)
    count = (beyond - first).repeat_interleave(r)
    delta = scale * asked * longest * logit_error + (tiles + 2) * 2.0**-20 + 900 * UNIT.value
    delta = delta if chosen.draws is None else delta + 2.0**-15
    depth = (tiles * per_tile + count + 2 * TILE + 16) * UNIT.value
    rounding = torch.where(depth < 0.5, delta + halves + 2 * depth / (1 - depth) + 2.0**-20, math.inf)
    unit_length, wide = (x.reshape(-1).double().repeat_interleave(r) for x in (most, terms.nu))
    reach = (own + rounding * unit_length * 1.1) / wide
    grown = delta.exp() * (1 + rounding) * (1 + 2.0**-16)

    def above(top: Float64[Tensor, "bh"]) -> Float64[Tensor, "bh"]:
        """What stands that many octaves high, at most, beside the largest weight."""
        return torch.exp2(top - high + (top.abs() + high.abs() + 1) * 2.0**-21)

    if chosen.draws is not None and parts.light is not None and parts.heavy is not None:
        rim, fine = chosen.draws.rims.double().unbind(-1)
        light, heavy = (by_row(x, 0.0).double().sum(-1) * grown for x in (parts.light, parts.heavy))
        moved = missed_reference(
            light * grown + 2.0**-40, heavy, above(rim - fine), fine.exp2(), mass / grown, reach, chosen.draws.logs
        )
        moved = torch.where(delta < FUZZY.value, moved * (wide / unit_length), math.inf)
        moved = torch.where((rim < NONE.value) | (unit_length == 0), 0.0, moved)
    else:
        tail = mass.new_zeros(()) if chosen.tails is None else chosen.tails.double().sum(-1) * (1 + 2.0**-10)
        peak_term = high.double() * 0 if chosen.widest is None else chosen.widest.double() / STEPS
        moved = tail * above(peak_term) / mass * (wide / unit_length) * reach.clamp(min=1.0) * grown
        moved = torch.where((tail == 0) | (unit_length == 0), 0.0, moved)
    whole = (moved + rounding + narrow * own / unit_length + vanished / unit_length) * (1 + 2.0**-16)
    lengths = (1 + own / unit_length * (1 + narrow) + vanished / unit_length) * (1 + 2.0**-16)
    whole = torch.where(whole < lengths, whole, lengths)
    whole = (
        torch.where(unit_length == 0, torch.where(own == 0, 0.0, math.inf), whole)
        .nan_to_num(nan=math.inf, posinf=math.inf)
        .float()
    )
    within = (moved <= drop) & (whole <= limit) & (whole < math.inf)
    old = whole.new_full((b * h,), math.inf) if report is None else report[3].flatten()
    hint = torch.maximum(own * 1.1, torch.where(old < math.inf, old * 0.9, 0.0))
    share = (chosen.found.sum(-1) / v.shape[2]).float().repeat_interleave(r)
    told = torch.stack([whole, own.float(), unit_length.float(), hint.float(), share]).view(5, b, h)
    within = within.view(b, h)
    terms.counts.zero_()
    if chosen.draws is not None:
        chosen.draws.seed.add_(1)
    return Decoded(answer.to(q.dtype).view(b, h, e), told, within, chosen.found.sum(-1).int().view(b, g))


def read_again_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    most: Float32[Tensor, "b g"],
    scale: float,
    found: Decoded,
    sinks: None = None,
) -> None:
    """What the kernel of that name computes."""
    (b, h, _), (g, s, _) = q.shape, v.shape[1:]
    heads = b * g
    ill = ~found.within.view(heads, h // g).all(-1)
    everything = torch.arange(s, device=q.device, dtype=torch.int32).expand(heads, s)
    whole = Chosen(everything, ill.int()[:, None] * s, None, None)
    parts = attended_reference(q, k, v, whole, scale, terms.used)
    again = merged_reference(q, v, parts, terms, whole, most, math.inf, scale, report=found.report)
    rows = ill.repeat_interleave(h // g).view(b, h)
    found.out[rows] = again.out[rows]
    found.report[:, rows] = again.report[:, rows]


REFERENCES = Stages(
    bounded_reference,
    marked_reference,
    drawn_reference,
    attended_reference,
    merged_reference,
    read_again_reference,
)

decode_reference = functools.partial(decode, stages=REFERENCES)
