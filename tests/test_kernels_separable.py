"""The kernels of separable attention: both softmaxes inside, over all keys and over those up to each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from avow.bench.linear_variants import siblings
from avow.errors import ParameterError, ShapeError
from avow.kernels.interpreted import interpret

interpret()

from avow.kernels.separable_attention import ColumnSums, separable_attention
from avow.kernels.separable_twin import separable_attention_twin
from tests.test_kernels_linear import judged, short_parts

pytestmark = pytest.mark.kernels

__all__ = ["short_parts"]


def formula(causal: bool, temperature: float):  # type: ignore[no-untyped-def]
    """Every weight written out."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = siblings(q, k, v)
        rows, log = torch.softmax(q / temperature, -1), k / temperature
        columns = torch.exp(log - log.detach().amax(-2, keepdim=True))
        if not causal:
            return rows @ ((columns / columns.sum(-2, keepdim=True)).mT @ v)
        return ((rows / columns.cumsum(-2)) @ columns.mT).tril() @ v

    return call


def remembered(state: ColumnSums) -> list[Tensor]:
    """What a state says of its columns, whatever it is relative to: their means, and the logarithms of their totals."""
    return [state.sums / state.total.unsqueeze(-1), state.top + state.total.log()]


def drawn(b: int, h: int, g: int, n: int, d: int, e: int, kind: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(kind) for shape in ((b, h, n, d), (b, g, n, d), (b, g, n, e))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("shape", "kind", "temperature"),
    [
        ((1, 2, 1, 140, 24, 40), torch.bfloat16, 1.0),
        ((1, 1, 1, 131, 16, 16), torch.float32, 0.5),
        ((1, 1, 1, 70, 16, 16), torch.float16, 2.0),
    ],
    ids=str,
)
def test_separable_attention_is_as_near_to_the_truth_as_the_formula(
    shape: tuple[int, int, int, int, int, int], kind: torch.dtype, temperature: float, causal: bool
) -> None:
    q, k, v = drawn(*shape, kind)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = separable_attention(q, k, v, causal, temperature)
        assert not found.lost
        return found.out

    judged(call, formula(causal, temperature), (q, k, v))


def test_rows_over_all_keys_need_not_be_as_many() -> None:
    q, k, v = drawn(1, 2, 1, 150, 16, 16)
    found, truth = (how(q[:, :, :33], k, v, False) for how in (separable_attention, separable_attention_twin))
    torch.testing.assert_close(found.out, truth.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(remembered(found.last), remembered(truth.last), rtol=1e-4, atol=1e-5)


def test_reading_on_equals_reading_at_once_and_sequences_stay_apart() -> None:
    q, k, v = drawn(1, 1, 1, 150, 16, 16)
    whole = separable_attention(q, k, v, True)
    first = separable_attention(q[:, :, :70], k[:, :, :70], v[:, :, :70], True)
    second = separable_attention(q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], True, 1.0, first.last)
    torch.testing.assert_close(torch.cat([first.out, second.out], 2), whole.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(remembered(second.last), remembered(whole.last), rtol=1e-4, atol=1e-5)
    packed = separable_attention(q, k, v, True, starts=torch.tensor([0, 70, 150]))
    alone = separable_attention(q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], True)
    torch.testing.assert_close(packed.out, torch.cat([first.out, alone.out], 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([x[1:] for x in remembered(packed.last)], remembered(alone.last), rtol=1e-4, atol=1e-5)


def test_large_keys_are_weighed_and_steep_ones_are_told() -> None:
    q, k, v = drawn(1, 1, 1, 100, 16, 16)
    k = 1000 * torch.sort(k, 2, descending=True).values
    found, truth = (how(q, k, v, True) for how in (separable_attention, separable_attention_twin))
    torch.testing.assert_close(found.out, truth.out, rtol=1e-4, atol=1e-4)
    assert not found.lost
    # Rising keys leave the rows before them nothing that float32 can hold beside what comes.
    assert separable_attention(q, k.flip(2), v, True).lost


def test_what_makes_no_sense_is_said() -> None:
    q, k, v = drawn(1, 1, 1, 8, 16, 16)
    with pytest.raises(ParameterError, match="causal=False must be True where sequences are packed; call once"):
        separable_attention(q, k, v, False, starts=torch.tensor([0, 8]))
    wide = torch.randn(1, 1, 8, 300)
    with pytest.raises(ShapeError, match="dim of q=300 must be at most 256; split the head"):
        separable_attention(wide, wide, v, True)
