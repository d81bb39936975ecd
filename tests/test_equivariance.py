"""Modules without a notion of place are told from those with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avow.errors import DtypeError, InputError, NonFiniteError, ParameterError, ShapeError
from avow.nn import Attention, ModelConfig, Rotary, build
from avow.nn.equivariance import Equivariance, check_permutation_equivariance


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Layer(nn.Module):
    """A layer of torch's encoder, with a causal mask or learned positions if asked."""

    def __init__(self, causal: bool = False, positions: bool = False, norm_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        self.causal, self.table = causal, nn.Parameter(0.02 * torch.randn(64, 8)) if positions else None

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        if self.table is not None:
            x = x + self.table[:n]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1) if self.causal else None
        return self.layer(x, src_mask=mask)


class Residual(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x)


class Everywhere(nn.Module):
    """The same answer at every place, whatever enters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 3.0)


@pytest.mark.parametrize(
    "module",
    [
        Layer(),
        Layer(norm_first=False),
        nn.Sequential(Layer(), Layer(norm_first=False)),
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
        Residual(nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.RMSNorm(8),
        nn.Identity(),
        Everywhere(),
    ],
    ids=["pre-norm", "post-norm", "two layers", "feed-forward", "residual", "norm", "identity", "constant"],
)
def test_layers_without_positions_or_masks_are_equivariant(module: nn.Module) -> None:
    found = check_permutation_equivariance(module.eval(), (2, 11, 8))
    assert found.holds and found.witness is None and found.deviation <= found.tolerance < 1e-5


class Ramp(nn.Module):
    """An answer that depends on the place alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[-2]).to(x)[:, None].expand_as(x)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize(
    "module",
    [Layer(causal=True), Layer(positions=True), Ramp(), Recurrence()],
    ids=["causal mask", "positions", "ramp", "recurrence"],
)
def test_a_mask_or_positions_break_it_and_the_witness_shows_it(module: nn.Module) -> None:
    module.eval()
    x = torch.randn(2, 11, 8)
    found = check_permutation_equivariance(module, x)
    assert not found.holds and found.witness is not None and found.deviation > 100 * found.tolerance
    order = torch.tensor(found.witness)
    assert sorted(found.witness) == list(range(11))
    with torch.no_grad():
        straight, permuted = module(x)[:, order], module(x[:, order])
    size = max(float(straight.abs().max()), float(permuted.abs().max()))
    assert float((straight - permuted).abs().max()) / size == pytest.approx(found.deviation, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_tolerance_follows_the_type_and_the_size_of_the_answer(dtype: torch.dtype) -> None:
    plain, causal = Layer().eval().to(dtype), Layer(causal=True).eval().to(dtype)
    for size in (1e-3, 1.0, 1e3):
        kept = check_permutation_equivariance(lambda x, size=size: size * plain(x), torch.randn(2, 9, 8).to(dtype))
        assert kept.holds and kept.tolerance == torch.finfo(dtype).eps ** 0.75
        broken = check_permutation_equivariance(lambda x, size=size: size * causal(x), torch.randn(2, 9, 8).to(dtype))
        assert not broken.holds
    assert check_permutation_equivariance(causal, (2, 9, 8), tolerance=10.0).holds


class Words(nn.Module):
    """A model of ids, with positions or without."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(30, 8), Layer(positions=positions)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids))


def test_models_of_ids_are_judged_too() -> None:
    ids = torch.randint(30, (2, 10))
    assert check_permutation_equivariance(Words(positions=False).eval(), ids).holds
    assert not check_permutation_equivariance(Words(positions=True).eval(), ids).holds


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
def test_attention_by_any_method_is_equivariant_until_it_is_causal_or_rotary(method: str) -> None:
    def judged(**options: Any) -> bool:
        return check_permutation_equivariance(Attention(8, 2, method, **options).eval(), (2, 9, 8)).holds

    assert judged() and judged(key_heads=1)
    assert not judged(causal=True)
    assert not judged(positions=Rotary(4, 16))


def test_a_language_model_knows_its_places_by_its_positions_and_its_mask() -> None:
    model = build(ModelConfig(vocabulary=20, block=16, layers=1, heads=2, width=8)).eval()
    assert not check_permutation_equivariance(model, torch.randint(20, (2, 10))).holds


def test_a_fault_in_one_place_only_is_found() -> None:
    def first_is_special(x: Tensor) -> Tensor:
        return torch.cat([2 * x[..., :1, :], x[..., 1:, :]], -2)

    assert not check_permutation_equivariance(first_is_special, (50, 1), trials=1).holds


def test_the_same_seed_tries_the_same_and_leaves_the_generator_of_torch_alone() -> None:
    module = Layer(causal=True).eval()
    before = torch.get_rng_state()
    one, other = (check_permutation_equivariance(module, (2, 7, 8), seed=4) for _ in range(2))
    assert one == other and torch.equal(before, torch.get_rng_state())


def test_a_finding_reads_as_a_sentence() -> None:
    kept, broken = Equivariance(True, 3e-7, 6e-6, 8, None), Equivariance(False, 0.5, 6e-6, 8, (1, 0))
    assert str(kept) == "permutation equivariant under 8 permutations (deviation 3e-07, tolerance 6e-06)"
    assert str(broken) == "not permutation equivariant (deviation 0.5, tolerance 6e-06): see the order (1, 0)"


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_dropout_may_stay_where_it_is_off() -> None:
    assert check_permutation_equivariance(Attending().eval(), (2, 5, 8)).holds
    assert check_permutation_equivariance(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), (2, 5, 8)).holds


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: check_permutation_equivariance(Layer(), (2, 5, 8)),
            ParameterError,
            "dropout of Layer.layer.self_attn=0.1 draws at random in training; call module.eval()",
        ),
        (
            lambda: check_permutation_equivariance(Attending(), (2, 5, 8)),
            ParameterError,
            "dropout of Attending.attention=0.25 draws at random in training; call module.eval()",
        ),
        (
            lambda: check_permutation_equivariance(nn.functional.dropout, (2, 5, 8)),
            ParameterError,
            "module=dropout must answer one input alike; call module.eval(), and fix what it draws at random",
        ),
        (
            lambda: check_permutation_equivariance(nn.Identity(), (1, 8)),
            ShapeError,
            "example=(1, 8) must be a shape (…, n, d) with n ≥ 2; try (2, 16, d)",
        ),
        (
            lambda: check_permutation_equivariance(nn.Identity(), torch.zeros(3, 1, 8)),
            ShapeError,
            "example.shape=(3, 1, 8) must have at least two tokens: (…, n, d), or (…, n) for ids; give a sequence with"
            " n ≥ 2",
        ),
        (
            lambda: check_permutation_equivariance(nn.Identity(), (2, 8), trials=0),
            ParameterError,
            "trials=0 must be a whole number of at least 1; try trials=8",
        ),
        (
            lambda: check_permutation_equivariance(nn.Identity(), (2, 8), tolerance=-1.0),
            ParameterError,
            "tolerance=-1.0 must be at least 0; leave it out for the type's own",
        ),
        (
            lambda: check_permutation_equivariance(nn.RNN(8, 8).eval(), (2, 5, 8)),
            DtypeError,
            "module's answer=tuple must be one tensor; wrap it: lambda x: module(x)[0]",
        ),
        (
            lambda: check_permutation_equivariance(lambda x: x.argmax(-1), (2, 5, 8)),
            DtypeError,
            "module's answer=torch.int64 must be floating point; return numbers, not choices",
        ),
        (
            lambda: check_permutation_equivariance(lambda x: x.mean(-2), (2, 5, 8)),
            ShapeError,
            "module's answer=(2, 8) must be (…, 5, e): one row for each token; put the tokens on the last axis but one",
        ),
        (
            lambda: check_permutation_equivariance(lambda x: x / 0, (2, 5, 8)),
            NonFiniteError,
            "module's answer=nan or inf must be finite; try a smaller example",
        ),
        (
            lambda: check_permutation_equivariance(nn.Identity(), True),
            ParameterError,
            "example=True must be a torch.Tensor or a sequence; wrap it with torch.as_tensor",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_value_rule_and_remedy(
    act: Callable[[], object], error: type[InputError], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        act()
