r"""Latent attention: what lies behind is read through m averages of it, what is near is read itself. Linear in time.

Let :math:`S_i` be the keys that row i may see, and cut the sequence into segments of length L. The *horizon* of the row
is the start of the segment that holds its last visible key, :math:`h_i = L \lfloor \max S_i / L \rfloor`: behind it
lies :math:`P_i = \{j \in S_i : j < h_i\}`, near is the rest, :math:`O_i = S_i \setminus P_i`. Latents of fixed
directions :math:`z_r` look down on everything behind the horizon, each with a softmax of its own,

.. math:: \beta^{(i)}_{rj} \propto \exp(\mathrm{scale} \cdot z_r \cdot k_j + \mathrm{bias}_{ij}), \; j \in P_i, \quad
          \kappa^{(i)}_r = \sum_j \beta^{(i)}_{rj} k_j, \quad \upsilon^{(i)}_r = \sum_j \beta^{(i)}_{rj} v_j

and the row reads their keys and values, which share the mass of what they stand for, beside those that are near:

.. math:: out_i = \frac{\sum_r a_{ir} \upsilon^{(i)}_r + \sum_{j \in O_i} b_{ij} v_j}{\sum_r a_{ir} + \sum_j b_{ij}},
          \quad a_{ir} = \frac{\sum_{j \in P_i} e^{\mathrm{bias}_{ij}}}{m} e^{\mathrm{scale}\, q_i \cdot
          \kappa^{(i)}_r}, \quad b_{ij} = e^{\mathrm{scale}\, q_i \cdot k_j + \mathrm{bias}_{ij}}

A row's answer depends on nothing but what it sees: a causal row is the whole answer on its prefix, which misses no key
of the past and knows none of the future. With one segment it is softmax attention; so it is where all keys are equal.
:math:`z_0 = 0`, the plain mean; the other :math:`z_r` are fixed signs, of length √d and exact in every type.
Latents that learn are `avow.nn.PerceiverLM`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core import Computed, Cost, Method, Problem, Promise, Sizes
from avow.errors import ParameterError
from avow.numerics import heads, horizons, rounding
from avow.numerics.masks import at_rows, row_tiles, seen_by
from avow.parameters import at_least, from_to, param


class Trace(NamedTuple):
    """What the bound must know of a run: its type, additions a term went through, and rises of its reference."""

    wide: torch.dtype
    depth: int
    near: int
    rises: Float[Tensor, "b g m"] | None


@dataclass(frozen=True)
class Latent(Method):
    """The far past through m latents, the near past itself."""

    name: ClassVar[str] = "latent"
    summary: ClassVar[str] = "the past through m averages of it, the present itself; linear, its own mechanism"
    averages: ClassVar[bool] = True
    target: ClassVar[str] = "latent attention"

    latents: int = param(64, from_to(1, 2**20), "averages of the past")
    segment: int = param(64, at_least(1), "keys between one horizon and the next")

    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        p = heads.expand_gqa(self._checked(problem))
        wide = _arithmetic(p)
        s = p.k.shape[-2]
        if p.mask_kind == "full":
            return Computed(heads.cast_output(p, self._by_definition(p, wide)), Trace(wide, s, s, None))
        values, size = heads.scaled_values(p, wide)
        out, trace = self._causal(p, values) if p.causal else self._whole(p, values)
        return Computed(heads.cast_output(p, heads.rescaled(out, size)), trace)

    def _causal(self, p: Problem, values: Tensor) -> tuple[Tensor, Trace]:
        """Segment by segment: rows read the latents of all segments before theirs, and their own up to themselves."""
        n, s, groups, wide = p.q.shape[-2], p.k.shape[-2], p.k.shape[1], values.dtype
        size, count = self._segments(n)
        added = heads.key_log(p, wide)
        log = values.new_zeros(1, 1, s, 1) if added is None else added
        within = torch.ones(size, size, dtype=torch.bool, device=p.q.device).tril()
        past, rises = horizons.nothing(p.k, values, self.latents), values.new_zeros(*p.k.shape[:2], self.latents)
        last, parts = None, []
        for tile in row_tiles(count, p.q.shape[0] * p.q.shape[1] * size * (self.latents + size), horizons.TILE):
            span = slice(tile.start * size, tile.stop * size)
            k, v = horizons.cut(p.k, span, size, 0).to(wide), horizons.cut(values, span, size, 0)
            at = horizons.cut(log, span, size, -math.inf)  # (b, g, t, l, 1)
            before, past, rose = horizons.horizons(self._logs(p, k, at), k, v, past)
            rises = rises + rose
            near = torch.where(within, at.mT, -math.inf)  # (b, g, t, l, l)
            shown = horizons.Shown(*horizons.averages(before, p.k.shape[-1]), k, v, near)
            q = horizons.cut(heads.grouped(p.q, groups), span, size, 0).to(wide).transpose(2, 3)  # (b, g, t, r, l, d)
            out = horizons.read(q, shown, p.scale)
            if self._strays(p.sizes):
                earlier, last = horizons.last_to_show(last, shown._replace(added=at.mT))
                own = (near > -math.inf).any(-1)[:, :, :, None, :, None]
                out = torch.where(own, out, horizons.read(q, earlier, p.scale))
            parts.append(out.transpose(2, 3).flatten(3, 4))  # (b, g, r, t·l, e)
        return torch.cat(parts, -2)[..., :n, :], Trace(wide, size + 4 * count, size, rises)

    def _whole(self, p: Problem, values: Tensor) -> tuple[Tensor, Trace]:
        """One horizon for all rows."""
        n, s, groups, wide = p.q.shape[-2], p.k.shape[-2], p.k.shape[1], values.dtype
        added, seen = heads.key_log(p, wide), heads.key_seen(p)
        place = torch.arange(s, device=p.q.device)[:, None]  # (s, 1)
        # Keys from `end` on are never behind the horizon: hidden ones can only draw it nearer to the start.
        end = (s - 1) // self.segment * self.segment
        horizon: int | Tensor = end
        if seen is not None:
            horizon = torch.where(seen, place, 0).amax(-2, keepdim=True) // self.segment * self.segment
        log = values.new_zeros(1, 1, s, 1) if added is None else added
        behind = torch.where(place < horizon, log, -math.inf)
        past, rises = horizons.nothing(p.k, values, self.latents), values.new_zeros(*p.k.shape[:2], self.latents)
        per_segment = p.k.shape[0] * groups * self.latents * (p.k.shape[-1] + values.shape[-1] + self.segment)
        for tile in row_tiles(end // self.segment, per_segment, horizons.TILE):
            span = slice(tile.start * self.segment, tile.stop * self.segment)
            k, v, at = (horizons.cut(x, span, self.segment, 0) for x in (p.k, values, behind))
            k = k.to(wide)
            _, past, rose = horizons.horizons(self._logs(p, k, at), k, v, past)
            rises = rises + rose
        length = s - end if p.mask_kind == "none" else min(self.segment, s)
        near = (horizon + place[:length]).expand(*p.k.shape[:2], -1, 1)
        k, v, log = (torch.take_along_dim(x, near.clamp(max=s - 1), -2) for x in (p.k, values, log.expand_as(behind)))
        log = torch.where(near < s, log, -math.inf)
        all_past = horizons.Past(past.reference.unsqueeze(2), past.sums.unsqueeze(2))
        present = (x.unsqueeze(2) for x in (k.to(wide), v, log.mT))
        shown = horizons.Shown(*horizons.averages(all_past, p.k.shape[-1]), *present)
        q = heads.grouped(p.q, groups).unsqueeze(2)  # (b, g, 1, r, n, d)
        per_row = p.q.shape[0] * p.q.shape[1] * (self.latents + near.shape[-2])
        parts = [
            horizons.read(q[..., rows, :].to(wide), shown, p.scale) for rows in row_tiles(n, per_row, horizons.TILE)
        ]
        depth = min(self.segment, s) + 4 * (end // self.segment)
        return torch.cat(parts, -2).squeeze(2), Trace(wide, depth, near.shape[-2], rises)

    def _logs(self, p: Problem, k: Float[Tensor, "b g t l d"], added: Tensor) -> Float[Tensor, "b g t l m"]:
        """The logit of every key for every latent."""
        return (k @ directions(self.latents, k).T).mul_(p.scale).add_(added)

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        p, norms = heads.expand_gqa(self._checked(problem)), problem.norms
        trace: Trace = computed.trace
        wide, dtype, h = trace.wide, p.q.dtype, p.q.shape[1]
        products = rounding.products(wide, p.q.device.type)
        u, tiny, s, d, m = products.u, rounding.tiny(wide), p.k.shape[-2], p.q.shape[-1], self.latents
        scale, bias = abs(p.scale), 0.0 if p.bias is None else float(p.bias.abs().amax())
        longest = heads.per_query_head(norms.k.amax(-1, keepdim=True), h)  # (b, h, 1)
        reach = scale * norms.q * longest  # the largest logit of a row, by Cauchy–Schwarz: latent keys are no longer
        logit = products.dot(d + 8) + 8 * u
        misread = rounding.misread_logits(norms.q, longest, p.scale, d, dtype)
        floor = 8 * d * max(tiny, rounding.flush_threshold(dtype)) * (1 + scale)

        def argument(size: Tensor) -> Tensor:
            """Biasing rounds numbers as large as the bias; shifting, what is above underflow or twice a logit at most.

            The rounding of a logit is not in here.
            """
            return 4 * u * ((2 * size + 2 * bias).clamp(max=rounding.underflow_log(wide)) + bias)

        # A weight that counts was rescaled by as many exponentials as its reference rose; exp(0) is 1.
        rises = 0.0 if trace.rises is None else float(trace.rises.amax())
        exponentials = rounding.EXP_ULPS * u * (1 + rises)
        sums = 4 * products.dot(trace.depth + 16) + 8 * s * tiny
        # Down: logits scale·z·k, ‖z‖ ≤ √d, move by δ, so the weights of a latent by 2·tanh(δ/2) in sum of absolute
        # values; its key and its value then move by η times the longest of those it averages.
        sketch = scale * math.sqrt(d) * longest
        down = sketch * logit + floor + argument(sketch) + exponentials
        eta = rounding.softmax_l1_bound(down) + sums
        # Up: a logit scale·q·κ moves with κ and by its own rounding; the log of the mass by what its sum errs.
        logs = math.log(s) + math.log(m)
        mass = argument(torch.zeros_like(longest)) + exponentials + sums + 16 * u * (1 + logs + bias)
        lost = 8 * s * math.sqrt(d) * tiny * scale * norms.q
        up = reach * (eta + logit * (1 + eta)) + lost + misread + floor + mass + argument(reach + logs)
        up = up + rounding.EXP_ULPS * u
        # The weights sum to one, so errors of the values they meet are errors of the row, and add up.
        ends = 4 * products.dot(m + trace.near + 16) + 8 * (m + trace.near) * tiny
        relative = (rounding.softmax_l1_bound(up) + ends) * (1 + eta) + eta
        final = rounding.unit(dtype) if dtype != wide else 0.0
        rows = relative * (1 + final) + final + heads.underflow_bound(problem, 2 * (s + m + trace.near), wide)
        assumptions = ("exp is right to 64 ulp, exp(0) is 1, and log is right to 8",)
        return Promise("deterministic", heads.mask_bounds(p, rows * rounding.SAFETY), assumptions=assumptions)

    def reference(self, problem: Problem) -> Tensor:
        return self._by_definition(self._checked(problem), torch.float64)

    def reference_error(self, problem: Problem) -> Tensor:
        s = problem.k.shape[-2]
        return self.promise(problem, Computed(problem.q, Trace(torch.float64, s, s, None)), 1.0).rows

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Latent]:
        for latents in (16, 64):
            yield cls(latents)

    def _checked(self, p: Problem) -> Problem:
        if p.kernel != "dot":
            rule = "is not defined for latent attention"
            raise ParameterError("latent: kernel", p.kernel, rule, 'leave it out: kernel="dot"')
        return p

    def _segments(self, rows: int) -> tuple[int, int]:
        """The length of a segment and how many hold so many rows."""
        return (max(1, min(self.segment, rows)), -(-rows // self.segment))

    def _strays(self, z: Sizes) -> bool:
        """Whether a row's own segment may show it nothing, so that its horizon lies further back."""
        size, count = self._segments(z.queries)
        return z.mask != "none" or z.keys <= (count - 1) * size

    def cost(self, sizes: Sizes) -> Cost:
        z, m, d, e = sizes, self.latents, sizes.dim, sizes.value_dim
        item = 8 if z.biased else rounding.accumulator(z.dtype).itemsize
        rows, keys = z.batch * z.heads, z.batch * z.linear_key_heads
        if z.mask == "full":
            pairs = rows * z.queries * z.keys
            flops = 2 * keys * z.keys * m * d + 2 * (pairs * (m + 1) + rows * z.queries * m) * (d + e)
            return Cost(flops, 4 * pairs * (m + 2), 30, 3 * item * min(pairs * (m + 1), 2**24))
        if z.causal:
            size, count = self._segments(z.queries)
            behind, read, near, passes = count * size, count * size, size, 1 + self._strays(z)
        else:
            size, behind = self.segment, max(0, z.keys - 1) // self.segment * self.segment
            count, read, passes = behind // size, z.queries, 1
            near = z.keys - behind if z.mask == "none" else min(size, z.keys)
        flops = 2 * keys * behind * m * (2 * d + e + 1) + passes * 2 * rows * read * (m + near) * (d + e)
        work = 3 * keys * behind * m + passes * 4 * rows * read * (m + near)
        launches = 20 + count + 30 * (1 + rows * read * (m + near) // horizons.TILE)
        # A tile's rows: logits, three answers, the sums of its segments; and, where causal, the averages of these.
        at_once = min(read, max(size, horizons.TILE // max(1, rows * (m + near))))
        held = keys * (min(count, -(-at_once // size)) if z.causal else count) * m * (d + e + 1)
        reading = rows * at_once * (m + near + 3 * e) + held
        if z.causal:
            reading += held + at_once * near + (rows * at_once * d if z.heads != z.linear_key_heads else 0)
            reading += (passes - 1) * 3 * keys * at_once * (d + e)
        making = keys * min(behind, at_once) * m + 3 * held
        whole = (rows * read * e if at_once < read else 0) + (keys * z.keys * e if item != z.item else 0)
        return Cost(flops, work, launches, item * (max(reading, making) + whole), item / 4)

    def _by_definition(self, p: Problem, dtype: torch.dtype) -> Tensor:
        """Every weight written out: for masks that differ by row, and for the tests."""
        n, s, h = p.q.shape[-2], p.k.shape[-2], p.q.shape[1]
        seen = seen_by(p)
        k, v = p.k.to(dtype), heads.per_query_head(p.v.to(dtype), h)
        log = heads.per_query_head(p.scale * (directions(self.latents, k) @ k.mT), h)  # (b, h, m, s)
        k = heads.per_query_head(k, h)
        place = torch.arange(s, device=p.q.device)
        parts = []
        for rows in row_tiles(n, p.q.shape[0] * h * s * (self.latents + 1)):
            sees, bias = at_rows(seen, rows), log.new_zeros(1)
            if p.bias is not None:
                bias = at_rows(p.bias, rows).to(dtype)
            horizon = torch.where(sees, place, 0).amax(-1, keepdim=True) // self.segment * self.segment
            behind, near = sees & (place < horizon), sees & (place >= horizon)
            down, _ = horizons.softmax_and_log(
                torch.where(behind.unsqueeze(-2), log.unsqueeze(-3) + bias.unsqueeze(-2), -math.inf)
            )
            flat = down.flatten(2, 3)  # (b, h, n·m, s)
            latent_keys, latent_values = ((flat @ x).unflatten(2, (-1, self.latents)) for x in (k, v))
            _, mass = horizons.softmax_and_log(torch.where(behind, bias, -math.inf))
            q = p.q[..., rows, :].to(dtype)
            far = p.scale * (latent_keys @ q.unsqueeze(-1)).squeeze(-1) + mass - math.log(self.latents)
            own = torch.where(near, p.scale * (q @ k.mT) + bias, -math.inf)
            up, _ = horizons.softmax_and_log(torch.cat([far, own], -1))
            far, own = up.split((self.latents, s), -1)
            parts.append((far.unsqueeze(-2) @ latent_values).squeeze(-2) + own @ v)
        return torch.cat(parts, -2)


def directions(latents: int, like: Tensor) -> Float[Tensor, "m d"]:
    """Where latents look: nowhere in particular first, then along fixed signs that seem drawn at random."""
    d = like.shape[-1]
    x = torch.arange(latents * d, device=like.device).reshape(latents, d)
    for _ in range(2):
        # Two rounds of a multiplicative hash of 32 bits mix every bit of a place into the lowest.
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    signs = 1 - 2 * ((x >> 16) & 1)
    return torch.where(torch.arange(latents, device=like.device)[:, None] > 0, signs, 0).to(like.dtype)


def _arithmetic(p: Problem) -> torch.dtype:
    """The type to compute in: wide where logits, or sums of keys, would leave the narrower one."""
    wide = heads.linear_type(p)
    if wide == torch.float64 or torch.compiler.is_compiling():
        return wide
    d, scale, limit = p.q.shape[-1], abs(p.scale), rounding.safe(wide)
    if p.known_norms is None:
        query, key = (math.sqrt(d) * float(x.detach().abs().amax()) if x.numel() else 0.0 for x in (p.q, p.k))
    else:
        query, key, _ = p.known_norms.most
    largest = max(1.0, scale) * max(query, math.sqrt(d)) * max(key, 1.0)
    return torch.float64 if largest > limit or 0 < scale < 1 / limit else wide
