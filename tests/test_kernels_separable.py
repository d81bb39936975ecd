"""The kernels of separable attention: both softmaxes inside, over all keys and over those up to each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from avow.bench.linear_checks import repeat_heads
from avow.errors import ShapeError
from avow.kernels.interpreted import interpret

interpret()

from avow.kernels.separable_attention import separable_attention
from tests.helpers.linear_references import separable_attention_reference
from tests.test_kernels_linear import judged, short_parts

pytestmark = pytest.mark.kernels

__all__ = ["short_parts"]


def formula(causal: bool, temperature: float):  # type: ignore[no-untyped-def]
    """Every weight written out."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_heads(q, k, v)
        rows, log = torch.softmax(q / temperature, -1), k / temperature
        columns = torch.exp(log - log.detach().amax(-2, keepdim=True))
        if not causal:
            return rows @ ((columns / columns.sum(-2, keepdim=True)).mT @ v)
        return ((rows / columns.cumsum(-2)) @ columns.mT).tril() @ v

    return call


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
    found, truth = (how(q[:, :, :33], k, v, False) for how in (separable_attention, separable_attention_reference))
    torch.testing.assert_close(found.out, truth.out, rtol=1e-4, atol=1e-5)


def test_large_keys_are_weighed_and_steep_ones_are_told() -> None:
    q, k, v = drawn(1, 1, 1, 100, 16, 16)
    k = 1000 * torch.sort(k, 2, descending=True).values
    found, truth = (how(q, k, v, True) for how in (separable_attention, separable_attention_reference))
    torch.testing.assert_close(found.out, truth.out, rtol=1e-4, atol=1e-4)
    assert not found.lost
    # Rising keys leave the rows before them nothing that float32 can hold beside what comes.
    assert separable_attention(q, k.flip(2), v, True).lost


def test_what_makes_no_sense_is_said() -> None:
    v, wide = torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 300)
    with pytest.raises(ShapeError, match="dim of q=300 must be at most 256; split the head"):
        separable_attention(wide, wide, v, True)
