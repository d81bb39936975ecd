"""How many rows that a step reads are on the device already, if it keeps some of those read before: a simulation.

The lists are those of the reference of the kernels, on stored heads whose queries are four tokens apart; neighbouring
tokens read more alike. Places are those of `avow.kernels.hot_rows`, beside a set from which the row goes that was read
longest ago.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from avow.bench.results import Result, Row, tell_row
from avow.bench.workloads import read
from benchmarks.options import Options

_TOL, _WARM = 1e-2, 8
_AIM = {1.0: 0.6, 0.999: 0.45}
"""The share of the tolerance that a cache aims at with what it does not read."""
_KEPT = (100, 32, 16, 8, 4)
"""The device keeps one row of so many."""


def run(options: Options) -> Result:
    """Hits for every layer but the first, which looks everywhere."""
    assert options.heads is not None
    rows = list[Row]()
    for path in sorted(options.heads.glob("*.safetensors"))[1:]:
        for confidence in _AIM:
            steps = list(_steps(path, confidence, 12 if options.quick else 64))
            heads = list(zip(*steps, strict=True))
            tokens = int(torch.cat([x for own in heads for x in own]).max()) + 1
            again = [_share(torch.isin(x, before)) for own in heads for before, x in itertools.pairwise(own)]
            row: Row = {"layer": path.stem, "confidence": confidence}
            row |= {"read": sum(len(x) for own in heads for x in own) / len(heads) / len(steps) / tokens}
            row |= {"read by the step before": sum(again) / len(again)}
            for part in _KEPT:
                for name, way in (("", _placed), (" by last use", _by_last_use)):
                    found = [way(own, tokens // part) for own in heads]
                    row[f"1/{part}{name}"] = sum(x for x, _ in found) / sum(y for _, y in found)
            rows.append(row)
            tell_row(row)
    return Result("hot rows: the share of reads that the device serves, by the share of the rows that it keeps", rows)


def _steps(path: Path, confidence: float, many: int) -> Iterator[list[Tensor]]:
    """The tokens that each key head reads in each of the last steps of a text."""
    from avow.kernels.choice import PLACES
    from avow.kernels.finalize import blank_report
    from avow.kernels.sparse_decode import decode
    from avow.numerics.sketch import sketched
    from tests.helpers.decode_references import REFERENCES, value_lengths

    layer, seed = read(path, causal=True).problem, torch.tensor([7])
    q, k, v = (x.bfloat16() for x in (layer.q[:, :, -many:], layer.k, layer.v))
    sketch, lengths = sketched(k), value_lengths(v)
    report, lists = blank_report(1, q.shape[1], q.device), list[list[Tensor]]()

    def attended(q: Tensor, k: Tensor, v: Tensor, chosen: object, *more: object) -> object:
        listed, found = chosen.listed, chosen.found  # type: ignore[attr-defined]
        spans = listed.unflatten(1, (found.shape[1], -1)) & (2**PLACES - 1)
        lists.append(
            [torch.cat([x[:n] for x, n in zip(own, many, strict=True)]) for own, many in zip(spans, found, strict=True)]
        )
        return REFERENCES.attended(q, k, v, chosen, *more)

    stages = REFERENCES._replace(attended=attended)  # type: ignore[arg-type]
    for i in range(many):
        draws = seed if confidence < 1 else None
        options = _AIM[confidence] * _TOL, layer.scale, None, _TOL, confidence, draws, stages
        decode(q[:, :, i].contiguous(), k, v, sketch, lengths, *options, report=report)
        yield lists.pop()


def _share(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else 1.0


def _placed(steps: tuple[Tensor, ...], places: int) -> tuple[int, int]:
    """Hits and reads: a token has one place, which it loses to one that a step reads when that does not read it."""
    owner, hits, reads = torch.full((places,), -1), 0, 0
    for i, tokens in enumerate(steps):
        spot = tokens.long() % places
        near = owner[spot] == tokens
        free = torch.ones(places, dtype=torch.bool)
        free[spot[near]] = False
        come = ~near & free[spot]
        # Of several that want a place any may be the first.
        owner[spot[come]] = tokens[come].long()
        hits, reads = hits + int(near.sum()) * (i >= _WARM), reads + len(tokens) * (i >= _WARM)
    return hits, reads


def _by_last_use(steps: tuple[Tensor, ...], places: int) -> tuple[int, int]:
    """The same where the row goes that was read longest ago."""
    kept, hits, reads = OrderedDict[int, None](), 0, 0
    for i, tokens in enumerate(steps):
        for token in tokens.tolist():
            near = token in kept
            kept[token] = None
            kept.move_to_end(token)
            if len(kept) > places:
                kept.popitem(last=False)
            hits, reads = hits + near * (i >= _WARM), reads + (i >= _WARM)
    return hits, reads
