"""Each kind of head is what it says, the same for the same seed; files are read whole or refused in four parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import avow
from avow.bench.workloads import KINDS, Workload, read, workload
from avow.errors import FileError, ParameterError


def weights(w: Workload) -> Tensor:
    """Softmax weights of a small workload in float64, (heads, n, s)."""
    logits = w.q[0].double() @ w.k[0].double().mT / w.q.shape[-1] ** 0.5
    if w.causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(logits, -1)


def effective_keys(w: Workload) -> Tensor:
    """How many keys each row spreads over: 1/Σα²."""
    return 1 / weights(w).square().sum(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_copying_row_puts_all_its_weight_on_one_key(causal: bool) -> None:
    top = weights(workload("copying", 2, 128, 64, causal=causal)).amax(-1)
    assert float(top.min()) > 0.999


def test_an_averaging_row_spreads_evenly_over_a_small_group() -> None:
    spread = effective_keys(workload("averaging", 2, 256, 64))
    assert 2 < float(spread.mean()) < 40
    shares = weights(workload("averaging", 2, 256, 64))
    kept = torch.where(shares > 1e-6, shares, torch.nan)
    assert float((kept.nan_to_num(0).amax(-1) - kept.nan_to_num(1).amin(-1)).max()) < 1e-6


def test_a_diffuse_row_spreads_over_nearly_all_keys() -> None:
    assert float(effective_keys(workload("diffuse", 2, 128, 64)).min()) > 0.95 * 128


@pytest.mark.parametrize("causal", [False, True])
def test_low_rank_certifies_clustered_heads_and_not_copying_ones(causal: bool) -> None:
    bounds = {}
    for kind in ("clustered", "copying"):
        w = workload(kind, 2, 256, 64, causal=causal)
        generator = torch.Generator().manual_seed(0)
        bounds[kind] = avow.attend(w.q, w.k, w.v, method="low_rank", rank=16, generator=generator, **w.call)[1].bound
    assert bounds["clustered"] < 0.1 < 1 < bounds["copying"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_decides_everything(kind: str) -> None:
    one, again, other = (workload(kind, 2, 40, 16, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(getattr(one, x), getattr(again, x)) for x in "qkv")
    assert not torch.equal(one.q, other.q)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7])
def test_every_kind_works_at_odd_lengths_and_in_half_precision(kind: str, length: int) -> None:
    w = workload(kind, 3, length, 5, dtype=torch.bfloat16)
    assert w.q.shape == w.k.shape == w.v.shape == (1, 3, length, 5)
    assert w.q.dtype == torch.bfloat16 and bool(w.q.isfinite().all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kind": "wild"},
            "kind='wild' is not a kind of workload; known kinds: copying, averaging, diffuse, clustered",
        ),
        ({"kind": "copying", "heads": 0}, "heads=0 must be at least 1; try heads=64"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_four_parts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        workload(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


def saved(folder: Path, **tensors: Tensor) -> Path:
    path = folder / "heads.safetensors"
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, path)
    return path


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def test_a_file_is_read_with_and_without_a_batch_axis(tmp_path: Path) -> None:
    q, k, v = (drawn(2, 9, 4) for _ in range(3))
    bare = read(saved(tmp_path, q=q, k=k, v=v))
    full = read(saved(tmp_path, q=q[None], k=k[None], v=v[None]))
    assert torch.equal(bare.q, q[None]) and torch.equal(bare.q, full.q) and torch.equal(bare.v, full.v)


def test_positions_decide_what_a_causal_row_sees(tmp_path: Path) -> None:
    q, k, v = drawn(4, 3, 8), drawn(2, 10, 8), drawn(2, 10, 8)
    places = torch.tensor([1, 4, 9])
    w = read(saved(tmp_path, q=q, k=k, v=v, q_positions=places), causal=True)
    out, _ = avow.attend(w.q, w.k, w.v, **w.call)
    for row, place in enumerate(places.tolist()):
        seen = w.k[:, :, : place + 1], w.v[:, :, : place + 1]
        alone, _ = avow.attend(w.q[:, :, row : row + 1], *seen, enable_gqa=True)
        torch.testing.assert_close(out[:, :, row : row + 1], alone)
    # The test can fail: a row one place further on sees another key.
    later = read(saved(tmp_path, q=q, k=k, v=v, q_positions=torch.tensor([2, 4, 9])), causal=True)
    moved, _ = avow.attend(later.q, later.k, later.v, **later.call)
    assert not torch.allclose(moved[:, :, 0], out[:, :, 0])


def test_positions_do_nothing_without_causality(tmp_path: Path) -> None:
    w = read(saved(tmp_path, q=drawn(1, 2, 4), k=drawn(1, 6, 4), v=drawn(1, 6, 4), q_positions=torch.tensor([1, 3])))
    assert w.call["mask"] is None and not w.call["causal"]


def test_positions_in_order_are_plain_causality(tmp_path: Path) -> None:
    x = drawn(1, 6, 4)
    w = read(saved(tmp_path, q=x, k=x, v=x, q_positions=torch.arange(6)), causal=True)
    assert w.call["mask"] is None and w.call["causal"]


def test_a_prefix_keeps_the_rows_that_stand_in_it(tmp_path: Path) -> None:
    places = torch.tensor([1, 4, 9])
    w = read(saved(tmp_path, q=drawn(1, 3, 4), k=drawn(1, 10, 4), v=drawn(1, 10, 4), q_positions=places), causal=True)
    short = w.first(5)
    assert short.q.shape[-2] == 2 and short.k.shape[-2] == 5
    assert short.call["mask"].sum(-1).tolist() == [2, 5]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    with pytest.raises(FileError) as caught:
        read(path)
    assert str(caught.value) == f"input={path} does not exist; check the path"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"is not a plain file; name one that is$"):
        read(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    x = drawn(1, 4, 4)
    path = saved(tmp_path, q=x, k=x, v=x)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FileError, match=r"is truncated or no safetensors file .*; write it again with"):
        read(path)


def test_a_file_without_q_says_what_it_holds(tmp_path: Path) -> None:
    path = saved(tmp_path, k=drawn(1, 4, 4), v=drawn(1, 4, 4))
    with pytest.raises(FileError) as caught:
        read(path)
    assert str(caught.value) == f"input={path} lacks q (it holds k, v); save tensors named q, k and v"


@pytest.mark.parametrize(
    "places", [torch.tensor([0, 6]), torch.tensor([0.0, 1.0]), torch.tensor([1]), torch.tensor([-1, 2])]
)
def test_impossible_positions_are_refused(tmp_path: Path, places: Tensor) -> None:
    path = saved(tmp_path, q=drawn(1, 2, 4), k=drawn(1, 6, 4), v=drawn(1, 6, 4), q_positions=places)
    with pytest.raises(FileError, match="q_positions that are not 2 whole numbers from 0 to 5"):
        read(path)


def test_shapes_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path, q=drawn(1, 2, 4), k=drawn(1, 6, 3), v=drawn(1, 6, 4))
    with pytest.raises(avow.InputError, match=r"k.shape\[-1\]=3"):
        read(path)


def test_the_last_queries_see_what_they_saw() -> None:
    w = workload("diffuse", heads=2, length=16, dim=8, causal=True)
    whole = avow.attend(w.q, w.k, w.v, **w.call).out
    for count in (1, 5, 16):
        last = w.last(count)
        torch.testing.assert_close(avow.attend(last.q, last.k, last.v, **last.call).out, whole[..., -count:, :])
    assert w.last(1).call["mask"] is None
    with pytest.raises(ParameterError, match="queries=17 must be from 1 to the 16 there are; try queries=1"):
        w.last(17)
