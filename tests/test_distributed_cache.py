"""A cache in shards answers as one that holds all tokens, token after token, and names the process that strays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from avow.core import Sizes
from avow.distributed import ShardedCache
from avow.distributed.cache import dealt
from avow.distributed.point_to_point import PAGE, counted
from avow.distributed.sparse import sparse_traffic
from avow.errors import ParameterError
from avow.nn import KeyValueCache
from tests.helpers.caches import errors
from tests.helpers.processes import message, together

pytestmark = pytest.mark.processes

# What each process holds before they meet; then all append so many at a time.
BEFORE = {2: (300, 70), 4: (130, 0, 64, 1)}
APPENDED = (1, 1, 150, 1, 63, 1)
TOLERANCES: tuple[tuple[float | None, float | None], ...] = ((0.3, None), (0.05, None), (0.3, 0.9), (None, None))
ASKED = [(torch.float32, *one) for one in TOLERANCES]
ASKED += [(dtype, *one) for dtype in (torch.float64, torch.bfloat16) for one in TOLERANCES[1:3]]
KEY_HEADS, HEADS, DIM, VALUE_DIM = 2, 6, 16, 5


class Step(NamedTuple):
    """What one process got, and how many bytes it sent for that."""

    out: Tensor
    bound: Tensor
    kind: str
    method: str
    read: str
    sent: int
    lengths: tuple[int, ...]


def tokens(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    k, v = (torch.randn(1, KEY_HEADS, count, dim, generator=draw) for dim in (DIM, VALUE_DIM))
    v[:, 1] *= 1e-3
    return k.to(dtype), v.to(dtype)


def query(k: Tensor, upto: int) -> Tensor:
    """A query near one of the tokens so far: heads that look at few of them, as trained ones do."""
    aim = k[:, :, (upto * 7919) % upto if upto % 2 else upto // 2].repeat_interleave(HEADS // KEY_HEADS, 1)
    noise = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(upto))
    return (3 * aim.double() + noise).to(k.dtype).unsqueeze(2)


def fresh(dtype: torch.dtype = torch.float32, **options: Any) -> KeyValueCache:
    return KeyValueCache(KEY_HEADS, DIM, value_dim=VALUE_DIM, dtype=dtype, **options)


def decoded(dtype: torch.dtype, tol: float | None, confidence: float | None) -> list[Step]:
    """Appending and attending in turn."""
    rank, before = dist.get_rank(), BEFORE[dist.get_world_size()]
    k, v = tokens(sum(before) + sum(APPENDED), dtype)
    own, start = fresh(dtype), sum(before[:rank])
    own.append(k[:, :, start : start + before[rank]], v[:, :, start : start + before[rank]])
    cache, held, found = ShardedCache(own), sum(before), []
    for count in APPENDED:
        cache.append(k[:, :, held : held + count], v[:, :, held : held + count])
        held += count
        with counted() as traffic:
            out, certificate = cache.attend(query(k, held), tol, confidence)
        assert cache.length == held and cache.lengths[rank] == own.length
        facts = certificate.kind, certificate.method, certificate.reason
        found.append(Step(out, certificate.rows, *facts, traffic.sent, cache.lengths))
    return found


def mistakes(odd: bool) -> dict[str, str]:
    """What each process is told where the last one does something else."""
    k, v = tokens(100, torch.float32)
    q = query(k, 100)

    def filled() -> ShardedCache:
        cache = ShardedCache(fresh())
        cache.append(k, v)
        return cache

    missed, behind = filled(), filled()
    if not odd:
        missed.append(k[:, :, :1], v[:, :, :1])
    if odd:
        behind.cache.append(k[:, :, :1], v[:, :, :1])
    whole = filled()
    wrong = message(lambda: whole.append(k * (math.nan if odd else math.inf), v))
    return {
        "made": message(lambda: ShardedCache(fresh(bits=8 if odd else 4))),
        "window": message(lambda: ShardedCache(fresh(window=64))),
        "bits": message(lambda: ShardedCache(fresh(bits=None))),
        "tol": message(lambda: whole.attend(q, tol=0.25 if odd else 0.5)),
        "confidence": message(lambda: whole.attend(q, tol=0.5, confidence=0.5 if odd else 0.9)),
        "generator": message(lambda: whole.attend(q, tol=0.5, generator=7 if odd else None)),  # type: ignore[arg-type]
        "query": message(lambda: whole.attend(q + odd, tol=0.5)),
        "nan": message(lambda: whole.attend(q * math.nan, tol=0.5)),
        "type": message(lambda: whole.attend(q.double(), tol=0.5)),
        "several": message(lambda: whole.attend(q.expand(-1, -1, 2, -1), tol=0.5)),
        "missed": message(lambda: missed.attend(q, tol=0.5)),
        "behind": message(lambda: behind.attend(q, tol=0.5)),
        "empty": message(lambda: ShardedCache(fresh()).attend(q, tol=0.5)),
        "tolerance": message(lambda: whole.attend(q, tol=1e-9)),
        "wrong tokens": wrong.partition("=")[0] + f", {whole.length} held",
    }


def ask() -> dict[str, Any]:
    found: dict[str, Any] = {"mistakes": mistakes(dist.get_rank() == dist.get_world_size() - 1)}
    for dtype, tol, confidence in ASKED:
        found[f"{dtype} {tol} {confidence}"] = decoded(dtype, tol, confidence)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {count: together(count, ask, tmp_path_factory.mktemp("caches")) for count in BEFORE}


@pytest.mark.parametrize("count", list(BEFORE))
@pytest.mark.parametrize(("dtype", "tol", "confidence"), ASKED)
def test_every_step_is_within_its_bound(
    said: dict[int, list[dict[str, Any]]], count: int, dtype: torch.dtype, tol: float | None, confidence: float | None
) -> None:
    first, *others = (one[f"{dtype} {tol} {confidence}"] for one in said[count])
    k, v = tokens(sum(BEFORE[count]) + sum(APPENDED), dtype)
    held = sum(BEFORE[count])
    for number, step in enumerate(first):
        held += APPENDED[number]
        for other in (one[number] for one in others):
            assert torch.equal(step.out, other.out) and torch.equal(step.bound, other.bound)
            assert step.lengths == other.lengths
        assert sum(step.lengths) == held and step.out.dtype == dtype
        # A chance of one in ten for each row: far rarer in fact, and these draws are always the same.
        found = errors(query(k, held), k[:, :, :held], v[:, :, :held], step.out)
        assert bool((found <= step.bound + (0.0 if step.method == "sparse" else 1e-14)).all())
        assert tol is None or float(step.bound.max()) <= tol
        assert step.method == ("exact" if tol is None else "sparse")
        assert step.kind == ("deterministic" if confidence is None else "statistical")
    if tol == 0.3:
        shares = [float(step.read.removeprefix("read ").partition("%")[0]) for step in first]
        assert 0 < max(shares) < 60


@pytest.mark.parametrize("count", list(BEFORE))
def test_shards_become_level_and_send_what_is_known(said: dict[int, list[dict[str, Any]]], count: int) -> None:
    for one in said[count]:
        steps = one[f"{torch.float32} 0.3 None"]
        assert max(steps[-1].lengths) == max(max(BEFORE[count]), -(-sum(steps[-1].lengths) // count))
        sizes = Sizes(1, HEADS, KEY_HEADS, 1, steps[-1].lengths[0], DIM, VALUE_DIM)
        known = [(count - 1) * PAGE + sparse_traffic(sizes, count, reports).sent for reports in (1, 2, 3)]
        assert all(step.sent in known for step in steps)


@pytest.mark.parametrize("count", list(BEFORE))
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("made", "InputError: cache: bits at rank {last}=8"),
        ("window", "ParameterError: cache: window=64 has no form over shards; leave window out; a window fits on one"),
        ("bits", "ParameterError: cache: bits=None must be from 1 to 8: a sketch says what to read; make the cache"),
        ("tol", "InputError: tol at rank {last}=0.25 must be as at rank 0, 0.5; give all processes the same"),
        ("confidence", "InputError: confidence at rank {last}=0.5 must be as at rank 0, 0.9; give all processes"),
        ("generator", "ParameterError: rank {last}: generator=7 must be a torch.Generator; pass torch.Generator().man"),
        ("query", "InputError: digest of q at rank {last}="),
        ("nan", "NonFiniteError: q[0, 0, 0, 0]=nan must be finite; remove NaN and inf from q"),
        ("type", "DtypeError: "),
        ("several", "ShapeError: q.shape=(1, 6, 2, 16) must be (batch, heads, 1, dim): a query sees every token; att"),
        ("missed", "InputError: lengths of shards at rank {last}="),
        ("behind", "ShapeError: rank {last}: cache.length="),
        ("empty", "ShapeError: cache.length=0 must be at least 1; append keys and values first"),
        ("tolerance", "ToleranceUnreachable: tol=1e-09 is less than can be proved, "),
        ("wrong tokens", "NonFiniteError: k[0, 0, 0, 0], 100 held"),
    ],
)
def test_all_are_told_who_strays(said: dict[int, list[dict[str, Any]]], count: int, name: str, words: str) -> None:
    first, *others = (one["mistakes"][name] for one in said[count])
    assert all(other == first for other in others)
    assert words.format(last=count - 1) in first


def test_caches_of_processes_that_never_met_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"call torch\.distributed\.init_process_group first"):
        ShardedCache(fresh())


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_dealt_to_the_shortest(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(50, (5,), generator=draw).tolist()
    for count in (0, 1, 2, 17, 500):
        shares = dealt(lengths, count)
        after = [length + share for length, share in zip(lengths, shares, strict=True)]
        assert sum(shares) == count and min(shares) >= 0
        taking = [height for height, share in zip(after, shares, strict=True) if share]
        # Nobody takes one that a shard shorter by two could have.
        assert not taking or max(taking) <= min(after) + 1
