"""Whatever one process is given, all of them raise one error in time, and it names the rank.

Every way in is asked with every bad input in one process of a group whose numbers are not those of the world.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from avow.distributed import ShardedCache, attend
from avow.distributed.point_to_point import group_device
from avow.distributed.ring import ring_attention
from avow.errors import AvowError
from avow.nn import KeyValueCache
from tests.helpers.processes import together

pytestmark = pytest.mark.processes

WORLD, MEMBERS, ODD = 3, (1, 2), 2
HEADS, KEYS, DIM = 2, 12, 4
# Seconds that processes wait for each other: nothing here should take as long.
TIMEOUT = 60.0

Given = dict[str, Any]
Call = Callable[..., object]


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x[0]])


def ragged(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x[0, 0], x[0, 0, :1]], layout=torch.jagged)


TENSORS: dict[str, Callable[[Tensor], object]] = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": nested,
    "ragged": ragged,
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "whole numbers": lambda x: x.int(),
    "complex": lambda x: x.to(torch.complex64),
    "flat": lambda x: x.flatten(),
    "other heads": lambda x: x.expand(-1, -1, -1, -1).repeat(1, 3, 1, 1),
    "nan": lambda x: x * math.nan,
    "double": lambda x: x.double(),
}
OPTIONS: dict[str, dict[str, object]] = {
    "scale": {"scale": "wide", "scale ": math.nan, "scale  ": [1.0], "scale   ": torch.ones((), device="meta")},
    "causal": {"causal": 1, "causal ": "yes"},
    "tol": {"tol": -1.0, "tol ": "small"},
    "confidence": {"confidence": 2.0, "confidence ": "sure"},
    "method": {"method": "sprase", "method ": ["sparse"], "method  ": None},
    "mask": {
        "mask": torch.ones(KEYS, device="meta") > 0,
        "mask ": (torch.ones(KEYS) > 0).to_sparse(),
        "mask  ": [True] * KEYS,
        "mask   ": nested(torch.ones(1, 1, KEYS)),
    },
    "generator": {"generator": 7},
    "bits": {"bits": 99, "bits ": "four"},
    "features": {"features": 0, "features ": "many"},
    "rank": {"rank": 0, "rank ": "high"},
    "temperature": {"temperature": -1.0},
}
# Each way in, and the options it knows.
WAYS: dict[str, tuple[Call, Given, tuple[str, ...]]] = {
    "exact": (attend, {"method": "exact"}, ("scale", "causal", "tol", "method", "mask", "generator")),
    "ring": (attend, {"method": "exact", "shared_queries": False}, ("scale", "causal", "tol", "method", "mask")),
    "sparse": (attend, {"method": "sparse", "tol": 0.5}, ("scale", "tol", "confidence", "method", "mask", "bits")),
    "separable": (attend, {"method": "separable", "shared_queries": False}, ("causal", "mask", "temperature")),
    "features": (
        attend,
        {"method": "random_features", "features": 8, "shared_queries": False},
        ("scale", "causal", "confidence", "generator", "features"),
    ),
    "landmarks": (attend, {"method": "low_rank", "rank": 4, "shared_queries": False}, ("scale", "causal", "rank")),
    "auto": (attend, {"tol": 0.5}, ("scale", "causal", "tol", "confidence", "mask", "generator", "bits")),
    "auto apart": (attend, {"tol": 0.5, "shared_queries": False}, ("scale", "causal", "tol", "confidence", "mask")),
    "unpromised ring": (ring_attention, {}, ("scale", "causal")),
}


def shard() -> Given:
    """What a process holds: the same queries as the others."""
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(1, HEADS, KEYS, DIM, generator=draw) for name in "qkv"}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except AvowError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"RAW {type(error).__name__}: {error}"
    return "no error"


def faults() -> dict[str, Given]:
    """What is given instead, to each way in: of a tensor, or of an option."""
    found: dict[str, Given] = {}
    for way, (_, _, known) in WAYS.items():
        for name, x in shard().items():
            for kind, spoil in TENSORS.items():
                if way == "unpromised ring" and kind == "nan":
                    continue  # Numbers are not read there.
                found[f"{way}, {kind} {name}"] = {name: spoil(x)}
        for option in known:
            for key, value in OPTIONS[option].items():
                found[f"{way}, {key}"] = {option: value}
    return found


def filled(group: dist.ProcessGroup) -> ShardedCache:
    held = ShardedCache(KeyValueCache(HEADS, DIM), group)
    given = shard()
    held.append(given["k"], given["v"])
    return held


def cache_faults(group: dist.ProcessGroup, odd: bool) -> dict[str, str]:
    """What processes are told where one makes, fills or asks its cache otherwise."""
    given, told = shard(), {}
    k, v, query = given["k"], given["v"], given["q"][:, :, :1]
    for name, other in {"no cache": None, "a tensor": k, "other bits": KeyValueCache(HEADS, DIM, bits=8)}.items():
        mine: Any = other if odd else KeyValueCache(HEADS, DIM)
        told[f"made, {name}"] = outcome(lambda mine=mine: ShardedCache(mine, group))  # type: ignore[misc]
    for kind, spoil in TENSORS.items():
        asked: Any = spoil(query) if odd else query
        told[f"asked, {kind}"] = outcome(lambda asked=asked: filled(group).attend(asked, tol=0.5))  # type: ignore[misc]
    for option in ("scale", "tol", "confidence", "generator"):
        for key, value in OPTIONS[option].items():
            words: Given = {"tol": 0.5} | ({option: value} if odd else {})
            told[f"asked, {key}"] = outcome(lambda words=words: filled(group).attend(query, **words))  # type: ignore[misc]
    fills: dict[str, list[tuple[Tensor, Tensor]]] = {
        "other keys": [(k + 1, v)],
        "other values": [(k, v + 1)],
        "another order of tokens": [(k.flip(-2), v.flip(-2))],
        "another order of calls": [(k[:, :, 6:], v[:, :, 6:]), (k[:, :, :6], v[:, :, :6])],
        "values in another order": [(k, v.flip(-2))],
        "one bit": [(k.clone().index_fill_(2, torch.tensor(3), -0.0), v)],
    }
    usual = [(k[:, :, :6], v[:, :, :6]), (k[:, :, 6:], v[:, :, 6:])]
    plain = {name: usual if name == "another order of calls" else [(k, v)] for name in fills}
    plain["one bit"] = [(k.clone().index_fill_(2, torch.tensor(3), 0.0), v)]
    fills["other steps"], plain["other steps"] = usual, [(k, v)]
    for name, parts in fills.items():
        for tol in (0.5, None):
            held = ShardedCache(KeyValueCache(HEADS, DIM), group)
            for keys, values in parts if odd else plain[name]:
                held.append(keys, values)
            told[f"filled, {name}, {tol}"] = outcome(lambda held=held, tol=tol: held.attend(query, tol=tol))  # type: ignore[misc]
    for kind, spoil in TENSORS.items():
        held = filled(group)
        refused = outcome(lambda held=held, spoil=spoil: held.append(spoil(k) if odd else k, v))  # type: ignore[misc]
        assert refused.startswith("RAW") is False and (refused == "no error") is not odd, (kind, refused)
        told[f"appended, {kind}"] = outcome(lambda held=held: held.attend(query, tol=0.5))  # type: ignore[misc]
    return told


def losses(group: dist.ProcessGroup, odd: bool) -> dict[str, str]:
    """What processes are told that differentiate different losses of an answer they share."""
    told = {}
    for name, share in {"twice": 2.0, "nan": math.nan, "inf": math.inf}.items():
        for method in ("exact", "sparse"):
            given = {key: x.requires_grad_() for key, x in shard().items()}
            out, _ = attend(**given, method=method, tol=0.5, group=group)
            loss = (out * (share if odd else 1.0)).sum()
            told[f"loss, {method}, {name}"] = outcome(loss.backward)
    return told


def failures(group: dist.ProcessGroup, odd: bool) -> dict[str, str]:
    """What processes are told where one of them runs out of memory, while it checks or while it computes."""

    def full(*given: object, **options: object) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    places = {
        "exact": ("avow.core.problem.row_norms", "avow.distributed.exact.partial_answer"),
        "ring": ("avow.core.problem.row_norms", "avow.distributed.ring.partial_answer"),
        "auto apart": ("avow.distributed.attend.own_rates",),
    }
    told = {}
    for way, names in places.items():
        call, options, _ = WAYS[way]
        for name in names:
            given = shard() | options
            with mock.patch(name, full) if odd else contextlib.nullcontext():
                told[f"failed, {way}, {name}"] = outcome(lambda call=call, given=given: call(**given, group=group))  # type: ignore[misc]
    return told


def ask() -> dict[str, str]:
    group, rank = dist.new_group(list(MEMBERS)), dist.get_rank()
    if rank not in MEMBERS:
        return {}
    assert isinstance(group, dist.ProcessGroup)
    told, odd = {}, rank == ODD
    for name, wrong in faults().items():
        call, options, _ = WAYS[name.partition(",")[0]]
        given = shard() | options | (wrong if odd else {})
        told[name] = outcome(lambda call=call, given=given: call(**given, group=group))  # type: ignore[misc]
    told |= failures(group, odd)
    # What is wrong with all is said of all, also by one that holds nothing.
    for kind in ("meta", "sparse", "mkldnn", "nested"):
        spoiled = {name: TENSORS[kind](x) for name, x in shard().items()}
        told[f"everyone, {kind}"] = outcome(lambda spoiled=spoiled: attend(**spoiled, group=group))  # type: ignore[misc]
    empty = {name: x[:, :, :0] for name, x in shard().items()}
    for causal in (False, True):
        given = empty if odd else shard()
        words: Given = {"method": "separable", "shared_queries": False, "scale": 0.5, "causal": causal}
        told[f"empty, {causal}"] = outcome(lambda given=given, words=words: attend(**given, **words, group=group))  # type: ignore[misc]
    told |= cache_faults(group, odd) | losses(group, odd)
    # All of them go on afterwards.
    told["after"] = outcome(lambda: attend(**shard(), group=group))
    return told


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    everyone: list[dict[str, str]] = together(WORLD, ask, tmp_path_factory.mktemp("faults"), TIMEOUT)
    return [everyone[rank] for rank in MEMBERS]


@pytest.mark.parametrize("name", list(faults()))
def test_a_bad_input_in_one_process_is_told_to_all(said: list[dict[str, str]], name: str) -> None:
    first, second = (one[name] for one in said)
    assert first == second and f"rank {ODD}" in first and not first.startswith(("RAW", "LostRank")), first


def test_caches_made_filled_or_asked_otherwise_are_told_to_all(said: list[dict[str, str]]) -> None:
    names = [name for name in said[0] if name.startswith(("made", "asked", "filled", "appended"))]
    assert len(names) > 50
    for name in names:
        first, second = (one[name] for one in said)
        assert first == second and f"rank {ODD}" in first and not first.startswith(("RAW", "LostRank")), (name, first)
        if name.startswith("filled"):
            word = "calls of append" if "other steps" in name else "digest of appended tokens"
            assert first.startswith(f"InputError: {word} at rank {ODD}="), (name, first)


def test_losses_that_differ_are_told_by_the_ranks_of_the_world(said: list[dict[str, str]]) -> None:
    names = [name for name in said[0] if name.startswith("loss")]
    assert len(names) == 6
    for name in names:
        first, second = (one[name] for one in said)
        assert first == second and first.startswith(f"InputError: norm of the gradient at rank {ODD}="), (name, first)
        assert f"must be as at rank {MEMBERS[0]}, " in first


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_shard_raises_what_all_others_do(said: list[dict[str, str]], causal: bool) -> None:
    first, second = (one[f"empty, {causal}"] for one in said)
    assert first == second and first.startswith("ParameterError: separable: scale=0.5 has no meaning"), first


@pytest.mark.parametrize("kind", ["meta", "sparse", "mkldnn", "nested"])
def test_what_all_are_given_is_refused_by_all(said: list[dict[str, str]], kind: str) -> None:
    first, second = (one[f"everyone, {kind}"] for one in said)
    rule = "must be dense over shards; pass a dense tensor with the numbers of q"
    assert first == second and first.startswith("DtypeError: storage of q=") and first.endswith(rule), first


def test_a_failure_in_one_process_is_told_to_all(said: list[dict[str, str]]) -> None:
    names = [name for name in said[0] if name.startswith("failed")]
    assert len(names) == 5
    words = f"InputError: rank {ODD}: call=RuntimeError failed (DefaultCPUAllocator: can't allocate memory); "
    for name in names:
        assert all(one[name].startswith(words) for one in said), (name, said[0][name])


def test_processes_go_on_after_an_error(said: list[dict[str, str]]) -> None:
    assert [one["after"] for one in said] == ["no error"] * 2


@pytest.mark.parametrize(
    ("kinds", "where"), [(("cpu",), "cpu"), (("cuda",), "cuda"), (("cuda", "cpu"), "cpu"), ((), "cpu")]
)
def test_words_travel_where_the_group_says_and_not_where_a_tensor_is(kinds: tuple[str, ...], where: str) -> None:
    group: Any = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    assert group_device(group).type == where


def test_an_outcome_tells_raw_errors_and_none_at_all() -> None:
    assert outcome(lambda: None) == "no error"
    assert outcome(lambda: [][1]).startswith("RAW IndexError")
