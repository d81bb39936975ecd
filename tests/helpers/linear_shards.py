"""Linear attention asked of two and of four processes, all cases at once: what each of them answered, and as one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import avow
from avow.attend import Attended
from avow.core import Certificate, Method, Problem, Sizes
from avow.distributed import attend as attend_shards
from avow.distributed import protocols, states
from avow.distributed.low_rank import low_rank_traffic
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.protocols import Protocol, combine_message, gather_message, traffic
from avow.distributed.states import states_traffic
from avow.methods.low_rank import LowRank
from avow.methods.random_features import RandomFeatures
from avow.methods.separable import Separable
from avow.numerics import cholesky, features, rounding
from avow.numerics.scan import State
from tests.helpers.processes import message, together
from tests.helpers.truth import Verdict, judge

COUNTS = (2, 4)
# How near to one process's answers and gradients several come, by type.
NEAR = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2}
METHODS: dict[str, Method] = {
    "separable": Separable(),
    "separable, cold": Separable(0.3),
    "features": RandomFeatures(64),
    "few features": RandomFeatures(5, orthogonal=False),
    "one feature": RandomFeatures(1),
    "landmarks": LowRank(24),
    "few landmarks": LowRank(3),
}
# What each process holds of the sequence. One may hold nothing.
LENGTHS = {2: (37, 59), 4: (30, 0, 45, 21)}
# How many rows each process asks for, where they need not be those of its keys.
OWN_ROWS = {2: (0, 25), 4: (9, 16, 0, 5)}
# More than all of which may become landmarks, and more than all of which make a frame.
LONG = {2: (1500, 2900), 4: (1, 2000, 2300, 99)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and how much of it each process holds."""

    method: Method
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = False
    dtype: torch.dtype = torch.float64
    hostile: str = ""
    small: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(sum(self.keys))
        d = 4 if self.small else 8

        def some(heads: int, length: int, dim: int) -> Tensor:
            return torch.randn(1 if self.small else 2, heads, length, dim, generator=draw, dtype=torch.float64)

        n, s = sum(self.rows), sum(self.keys)
        q, k, v, weight = 0.6 * some(4, n, d), 0.6 * some(2, s, d), some(2, s, 5), some(4, n, 5)
        if isinstance(self.method, LowRank):
            q[..., 3:], k[..., 3:] = (
                0.05 * q[..., 3:],
                0.05 * k[..., 3:],
            )  # few directions, so that a bound says something
        if self.hostile == "loud keys":
            # The squares of norms lose digits where landmarks need them, so that theirs are less loud.
            loud = 20.0 if isinstance(self.method, LowRank) else 1e6
            k[..., s // 3, :], k[..., 2 * s // 3, :] = loud, 2 * loud
        if self.hostile == "late loud values":
            v[..., s // 2 :, :] *= 1e25
        if self.hostile == "vanishing values":
            v *= 1e-30
        if self.hostile == "equal keys":
            k[:] = k[..., :1, :]
        q, k, v, weight = (x.to(self.dtype) for x in (q, k, v, weight))
        return q, k, v, weight

    @property
    def problem(self) -> Problem:
        q, k, v, _ = self.inputs()
        return Problem.of(q, k, v, causal=self.causal, enable_gqa=True)

    def piece(self, x: Tensor, lengths: tuple[int, ...], rank: int) -> Tensor:
        return x.split(list(lengths), -2)[rank]

    @functools.cache  # noqa: B019  # cases live as long as the tests
    def alone(self) -> tuple[Attended, list[Tensor]]:
        """The answer of one process, and the gradients of q, k and v."""
        q, k, v, weight = self.inputs()
        inputs = [x.requires_grad_() for x in (q, k, v)]
        attended = avow.attend(
            q,
            k,
            v,
            method=self.method.name,
            causal=self.causal,
            enable_gqa=True,
            generator=seeded(),
            **self.method.parameters,
        )
        (attended.out * weight).sum().backward()
        return attended, [x.grad for x in inputs if x.grad is not None]

    def compare(self, answers: list[Answer], near: float) -> None:
        """Answers and gradients of several processes against those of one."""
        alone, gradients = self.alone()
        longest = float(self.problem.v.double().abs().amax())
        out = torch.cat([x.out for x in answers], -2)
        assert out.dtype == self.dtype
        torch.testing.assert_close(out / longest, alone.out.detach() / longest, rtol=near, atol=near)
        # Gradients may be nothing but rounding, of loud keys or of one feature: then what they might be is the measure.
        usual = [longest, longest, 1.0]
        for index, whole in enumerate(gradients):
            found = torch.cat([x.gradients[index] for x in answers], -2)
            size = usual[index] if self.hostile else max(float(whole.abs().amax()), 1e-2 * usual[index])
            torch.testing.assert_close(found / size, whole / size, rtol=near, atol=near)

    def keeps(self, answers: list[Answer]) -> None:
        """Certificates of several processes against the truth, and beside those of one."""
        out, rows = joined(answers)
        assert rows.shape == out.shape[:-1]
        verdict = self.judged(out, rows)
        assert verdict.broken == 0, verdict.story
        alone = self.alone()[0].certificate
        assert float(rows.max()) <= 1.3 * alone.bound + 1e-30
        for one in answers:
            if one.out.numel():
                assert _words(one.certificate) == _words(alone)

    def judged(self, out: Tensor, bounds: Tensor) -> Verdict:
        p = self.problem
        return judge(self.method, p, out, bounds, None)


def _words(c: Certificate) -> tuple[object, ...]:
    return c.method, dict(c.parameters), c.target, c.kind, c.confidence, c.coverage, c.rounding, c.assumptions


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def cases(count: int) -> dict[str, Case]:
    """What so many processes are asked."""
    lengths, long = LENGTHS[count], LONG[count]
    found = {}
    for causal in (False, True):
        word = "causal" if causal else "whole"
        for name, method in METHODS.items():
            found[f"{name}, {word}, float64"] = Case(method, lengths, lengths, causal)
        for name in ("separable", "features", "landmarks"):
            for dtype in (torch.float32, torch.bfloat16):
                found[f"{name}, {word}, {str(dtype)[6:]}"] = Case(METHODS[name], lengths, lengths, causal, dtype)
            for hostile in ("loud keys", "late loud values") if causal else ("vanishing values", "equal keys"):
                case = Case(METHODS[name], lengths, lengths, causal, torch.float32, hostile)
                found[f"{name}, {word}, {hostile}"] = case
            small = METHODS["few landmarks" if name == "landmarks" else name]
            found[f"{name}, {word}, long"] = Case(small, long, long, causal, small=True)
    for name in ("separable", "features", "landmarks"):
        found[f"{name}, own rows"] = Case(METHODS[name], OWN_ROWS[count], lengths)
    return found


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
    """Over shards."""
    given: dict[str, Any] = {"generator": seeded(), "shared_queries": False, **case.method.parameters, **options}
    return attend_shards(q, k, v, method=case.method.name, causal=case.causal, enable_gqa=True, **given)


@dataclasses.dataclass
class Answer:
    """What one process has to say of one case."""

    out: Tensor
    certificate: Certificate
    gradients: list[Tensor]
    sent: int
    sent_back: int


def answer(case: Case, rank: int, autocast: bool = False, **options: Any) -> Answer:
    q, k, v, weight = case.inputs()
    lengths = (case.rows, case.keys, case.keys)
    mine = [case.piece(x, some, rank).clone().requires_grad_() for x, some in zip((q, k, v), lengths, strict=True)]
    with counted() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, certificate = attend(case, *mine, **options)
    with counted() as backward:
        (out * case.piece(weight, case.rows, rank)).sum().backward()
    gradients = [x.grad for x in mine if x.grad is not None]
    return Answer(out.detach(), certificate, gradients, forward.sent, backward.sent)


def unscaled(held: Tensor, tops: Tensor) -> Tensor:
    """Sums of several ranks as if all had the same reference."""
    whole = tops.amax(0) if len(tops) else tops.new_full(tops.shape[1:], -math.inf)
    return torch.cat([held.sum(0), whole], -1)


def apart(shard: Any, state: State) -> Protocol[State]:
    """As if this process's keys were all there are."""
    return state._replace(steps=64)
    yield  # a protocol without rounds


@contextlib.contextmanager
def one_way() -> Iterator[None]:
    """Gradients stay where they are, as if nothing had been exchanged."""
    with mock.patch.object(protocols._Exchange, "backward", staticmethod(lambda ctx, gradient: (gradient, None))):
        yield


SABOTAGES: dict[str, Callable[[], Any]] = {
    "references forgotten": lambda: mock.patch.object(states, "_added", unscaled),
    "nothing exchanged": lambda: mock.patch.multiple("avow.distributed.states", joined=apart),
    "gradients kept": one_way,
}

# The sum over one rank before needs no reference, so that two processes are asked for the whole.
SABOTAGED = ("separable, whole, float64", "features, whole, float64", "landmarks, whole, float64")


def mistakes(rank: int) -> dict[str, str]:
    """What each process is told where the second one asks for something else."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    second = rank == 1

    def asked(
        method: Method, *tensors: Tensor, causal: bool = False, seed: int = 0, **options: Any
    ) -> Callable[[], Any]:
        case = Case(method, (8,), (8,), causal)
        given = tensors or (q, k, v)
        return lambda: attend(case, *given, generator=seeded(seed), **options)

    def other_directions() -> object:
        def draw(*sizes: Any) -> Tensor:
            return drawn(*sizes) * (1.5 if second else 1.0)

        drawn = features.draw
        with mock.patch.object(features, "draw", draw):
            return asked(RandomFeatures(4))()

    few = Case(Separable(), (8,), (8,), True)
    ask = {
        "generators": asked(RandomFeatures(4), seed=rank),
        "generators of landmarks": asked(LowRank(4), seed=rank),
        "directions": other_directions,
        "features": asked(RandomFeatures(4 + rank)),
        "causal": asked(Separable(), causal=second),
        "confidence": asked(RandomFeatures(4), confidence=0.9 if second else 0.99),
        "type": asked(Separable(), *(x.double() if second else x for x in (q, k, v))),
        "heads": asked(Separable(), *(x[:, :1] if second else x for x in (q, k, v))),
        "nan": asked(Separable(), q, k * (math.nan if second else 1.0), v),
        "gradient": asked(Separable(), q, k.clone().requires_grad_(second), v),
        "rows": lambda: attend(few, q[:, :, : 8 - second], k, v),
        "rank": asked(LowRank(99)),
        "scale": asked(Separable(), scale=0.5),
        "range": asked(
            LowRank(3), q.double() * (1 if second else 1e149), k.double() * (1e149 if second else 1), v.double()
        ),
        "latent": lambda: attend_shards(q, k, v, method="latent"),
        "shared": asked(Separable(), shared_queries=True),
        "tol": asked(LowRank(2), tol=1e-3),
    }
    return {name: message(call) for name, call in ask.items()}


def unseeded(rank: int) -> dict[str, Tensor]:
    """Answers of processes that brought no generators and whose own differ."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    torch.manual_seed(rank)
    found = {}
    for name in ("features", "few landmarks"):
        found[name] = attend(Case(METHODS[name], (8,), (8,)), q, k, v, generator=None).out
        found[f"{name}, again"] = attend(Case(METHODS[name], (8,), (8,)), q, k, v, generator=None).out
    return found


# What pairs among four processes are asked, each pair by itself.
PAIRED = ("separable, causal, float64", "features, whole, float64", "landmarks, whole, float64")


def pairs(rank: int, count: int) -> dict[str, Answer]:
    """Answers of processes that form pairs along one axis of a mesh."""
    if count != 4:
        return {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "sequence"))["sequence"]
    return {name: answer(cases(2)[name], rank % 2, group=mesh) for name in PAIRED}


def nothing() -> dict[str, Answer]:
    """Where no process has a key, or none a row."""
    rank, count = dist.get_rank(), dist.get_world_size()
    rows, none = (3,) * count, (0,) * count
    return {
        f"{name}, {word}": answer(Case(method, *lengths), rank)
        for name, method in METHODS.items()
        if name in ("separable", "features", "few landmarks")
        for word, lengths in {"no keys": (rows, none), "no rows": (none, rows)}.items()
    }


def ask() -> dict[str, Any]:
    rank, count = dist.get_rank(), dist.get_world_size()
    asked = cases(count)
    found: dict[str, Any] = {name: answer(case, rank) for name, case in asked.items()}
    some = {name: case for name, case in asked.items() if "causal, float32" in name}
    found["again"] = {name: answer(case, rank) for name, case in some.items()}
    found["autocast"] = {name: answer(case, rank, autocast=True) for name, case in some.items()}
    found["sabotaged"] = {}
    for word, sabotage in SABOTAGES.items():
        with sabotage():
            for name in SABOTAGED:
                with mock.patch("avow.distributed.low_rank.joined", states.joined):
                    found["sabotaged"][word, name] = answer(asked[name], rank)
    return found | {
        "mistakes": mistakes(rank),
        "unseeded": unseeded(rank),
        "nothing": nothing(),
        "pairs": pairs(rank, count),
    }


@functools.cache
def said(count: int) -> list[dict[str, Any]]:
    """What so many processes said, by rank; asked once."""
    with tempfile.TemporaryDirectory() as folder:
        return together(count, ask, Path(folder))


def joined(answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """The answer of all processes, and its bounds."""
    return torch.cat([x.out for x in answers], -2), torch.cat([x.certificate.rows for x in answers], -1)


def sent_forward(case: Case, count: int) -> int:
    """The bytes that one of so many processes sends for an answer, a page to agree among them."""
    method, z = case.method, case.problem.sizes
    if isinstance(method, LowRank):
        return (count - 1) * PAGE + low_rank_traffic(method, z, count, max(case.keys)).sent
    return (count - 1) * PAGE + states_traffic(method, z, count).sent


def sent_backward(method: Method, z: Sizes, count: int) -> int:
    """The bytes that one process sends for gradients: what was agreed without them, norms and choices, has none."""
    heads, kind = (z.batch, z.key_heads), rounding.accumulator(z.dtype)
    if isinstance(method, LowRank):
        free = [gather_message(*heads, 5, ranks=count)]
        d, rank, few = z.dim, method.rank, cholesky.candidates(z.keys, method.rank)
        each = [(span.stop - span.start) * (1 + d + span.start) for span in cholesky.rounds(rank)]
        sought = [] if few == z.keys else [min(few, -(-z.keys // count))]
        free += [combine_message(1, 1, heads[0] * heads[1], width, ranks=count) for width in [*sought, *each]]
        return low_rank_traffic(method, z, count).sent - traffic(free, count).sent
    free = [gather_message(*heads, 5, ranks=count)]
    if isinstance(method, RandomFeatures) and not z.causal:
        free.append(gather_message(*heads, 1, dtype=kind, ranks=count))
    return states_traffic(method, z, count).sent - traffic(free, count).sent
