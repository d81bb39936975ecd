"""What is wrong with the kernels of decoding, beside their references and beside the truth."""

from __future__ import annotations

import math
from typing import Any

import torch

from avow.bench.cases import Case, distances, spread
from avow.numerics.sketch import GROUP, sketched


def faults_beside_references(device: str, lengths: tuple[int, ...]) -> list[str]:
    """What is wrong with the kernels at some lengths, beside their references and beside the truth."""
    kinds, shapes = (torch.bfloat16, torch.float16, torch.float32), ((4, 128), (8, 64), (1, 96))
    tasks = [(device, n, kind, shape) for n in lengths for kind in kinds for shape in shapes]
    return [fault for found in spread(device, faults_at, tasks) for fault in found]


def faults_at(device: str, n: int, kind: torch.dtype, shape: tuple[int, int]) -> list[str]:
    """What is wrong at one length, for one type, for so many sibling heads of one width."""
    from avow.kernels import choice, planning, sampling
    from avow.kernels.pausing import Used, blank_state
    from avow.kernels.sample_bounds import Logs
    from avow.kernels.sketch_pass import bounded
    from avow.kernels.sparse_decode import decode
    from avow.kernels.step_constants import STEPS
    from tests.helpers import decode_references as references

    faults = []
    r, d = shape
    generator = torch.Generator(device).manual_seed(d)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device).to(kind)
        for shape in ((1, 2 * r, d), (1, 2, n, d), (1, 2, n, d))
    )
    q, told = 3 * q, f"kernels at {n} tokens: {kind}, r = {r}, d = {d}"
    sketch, lengths, scale = sketched(k), references.value_lengths(v), d**-0.5
    used = Used(torch.full((2,), n, dtype=torch.int32, device=device), blank_state(q.device))
    mine = decode(q, k, v, sketch, lengths, 0.05, scale)
    errors = distances(Case("", q.unsqueeze(2), k, v, scale), mine.out.unsqueeze(2)).squeeze(2)
    if not bool((errors <= mine.bound).all() & (mine.bound < 0.1).all()):
        faults.append(f"{told}: error {float(errors.max()):.3g}, bound {float(mine.bound.max()):.3g}")
    counts = planning.blank_counts(2 * r, q.device)
    terms = bounded(q, sketch, lengths.each, lengths.most, None, scale, used, counts)
    # What follows from the same terms is whole numbers, and so the same.
    off = int((terms.counts - references.counts_reference(terms)).abs().sum())
    if off:
        faults.append(f"{told}: {off} terms miscounted")
    marked = choice.marked(terms, lengths.most, 0.05, n)
    if not same_lists(marked, references.marked_reference(terms, lengths.most, 0.05, n)):
        faults.append(f"{told}: the lists of tokens to read are others")
    logs, seed = Logs.of(0.999), torch.tensor([n], device=device)
    asked = lengths.most, planning.goal(0.5, None, kind), logs
    own = sampling.drawn(terms, *asked, seed, n)
    assert own.draws is not None
    rims, other_rims = own.draws.rims, references.rims_reference(terms, *asked)
    # Sums in another order may put a rim on the other side of a whole step.
    if not float((rims - other_rims).abs().max()) <= 1 / STEPS:
        faults.append(f"{told}: rims are off by {float((rims - other_rims).abs().max()):.3g} octaves")
    if not same_lists(own, references.drawn_reference(terms, *asked, seed, n, rims)):
        faults.append(f"{told}: the lists of tokens drawn are others")
    mine = decode(q, k, v, sketch, lengths, 0.5, scale, None, None, 0.999, seed)
    errors = distances(Case("", q.unsqueeze(2), k, v, scale), mine.out.unsqueeze(2)).squeeze(2)
    if int(seed) != n + 1:
        faults.append(f"{told}: the next step would draw the same")
    if not bool((errors <= mine.bound).all() & (mine.bound < 1).all()):
        faults.append(f"{told}, drawn: error {float(errors.max()):.3g}, bound {float(mine.bound.max()):.3g}")
    top = terms.top.transpose(1, 2).reshape(2 * r, -1).repeat_interleave(GROUP, 1)
    said = (top - terms.offset.int()).double() / STEPS
    keys, values = (x[:, :, : sketch.rows].double().repeat_interleave(r, 1)[0] for x in (k, v))
    logits = (keys @ q[0].double().unsqueeze(-1)).squeeze(-1) * (scale * math.log2(math.e))
    nu = terms.nu.double().repeat_interleave(r)[:, None]
    true = logits + torch.log2(1 + torch.linalg.vector_norm(values, dim=-1) / nu)
    if bool((true > said).any()) or float((said - true).median()) > 8:
        wide = float((said - true).median())
        faults.append(f"{told}: {int((true > said).sum())} terms understated, {wide:.3g} octaves off")
    return faults


def same_lists(mine: Any, other: Any) -> bool:
    """Whether two choices list the same tokens; what stands behind the tokens of a span is nothing."""
    heads, spans = mine.found.shape
    room = mine.listed.shape[1] // spans
    inside = torch.arange(room, device=mine.found.device) < mine.found.unsqueeze(-1)  # (bg, spans, room)
    return torch.equal(mine.found, other.found) and torch.equal(
        *(x.listed.view(heads, spans, room)[inside] for x in (mine, other))
    )
