"""What is shown of an object: one line, no address, and no tensor number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import avow
from avow import nn as modules
from avow.optim import AveragedWeights

Q = torch.randn(1, 2, 40, 8)


def cache(**options: Any) -> modules.KeyValueCache:
    made = modules.KeyValueCache(2, 8, **options)
    made.append(Q.to(made.dtype).expand(made.batch, -1, -1, -1), Q.to(made.dtype).expand(made.batch, -1, -1, -1))
    return made


def ragged() -> modules.KeyValueCache:
    made = cache(batch=2)
    made.crop([3, 7])
    return made


def recorded() -> Any:
    with avow.record() as found:
        avow.scaled_dot_product_attention(Q, Q, Q)
    return found


SHOWN: list[tuple[Callable[[], Any], str]] = [
    (lambda: avow.attend(Q, Q, Q), "Attended(out=a float32 tensor of shape (1, 2, 40, 8), certificate=<Certificate by"),
    (lambda: avow.attend(Q, Q, Q).certificate, "<Certificate by exact: every row is within "),
    (lambda: avow.audit(Q, Q, Q, Q), "Audit(rows=80, certificate=<Certificate by exact: every row is within"),
    (lambda: avow.Problem.of(Q, Q, Q), "Problem(q=a float32 tensor of shape (1, 2, 40, 8), k="),
    (lambda: avow.Problem.of(Q, Q, Q).norms, "Norms(q=a float64 tensor of shape (1, 2, 40), k="),
    (lambda: avow.Problem.of(Q, Q, Q).sizes, "Sizes(batch=1, heads=2, key_heads=2, queries=40"),
    (lambda: avow.plan(Q, Q, Q, tol=1e-2), "Plan(ranked=("),
    (recorded, "<Record of 1 answer of 1 layer>"),
    (
        cache,
        "KeyValueCache(batch=1, key_heads=2, length=40, dim=8, value_dim=8, float32, cpu, sketch of 4 bits, ",
    ),
    (lambda: cache(bits=None, dtype=torch.bfloat16), "KeyValueCache(batch=1, key_heads=2, length=40, dim=8, value_dim"),
    (ragged, "KeyValueCache(batch=2, key_heads=2, length=(3, 7), dim=8"),
    (lambda: AveragedWeights(nn.Linear(2, 2)), "AveragedWeights(Linear, decay=0.999, updates=0)"),
    (lambda: modules.Rotary(4, 8), "Rotary(dim=4, block=8)"),
    (lambda: modules.Sinusoidal(4, 8), "Sinusoidal(block=4, width=8)"),
]


def faults(text: str) -> list[str]:
    """What is wrong with what is shown."""
    wrong = {"an address": " at 0x", "numbers of a tensor": "tensor(", "several lines": "\n"}
    return [name for name, part in wrong.items() if part in text]


@pytest.mark.parametrize(("make", "start"), SHOWN, ids=[start.partition("(")[0] for _, start in SHOWN])
def test_an_object_is_shown_in_a_line_that_says_what_it_holds(make: Callable[[], Any], start: str) -> None:
    text = repr(make())
    assert text.startswith(start) and faults(text) == []


def test_addresses_and_tensors_are_noticed() -> None:
    assert faults(repr(object())) == ["an address"]
    assert faults(repr((Q, 1))) == ["numbers of a tensor", "several lines"]


def test_a_cache_shows_the_bytes_of_its_buffers() -> None:
    made = cache()
    assert repr(made).endswith(f"sketch of 4 bits, {made.nbytes:,} bytes)")
    assert "no sketch" in repr(cache(bits=None)) and "bfloat16" in repr(cache(dtype=torch.bfloat16))


def test_a_module_shows_its_method_with_its_settings() -> None:
    assert "random_features(features=8), heads=4" in repr(modules.Attention(16, 4, "random_features", features=8))
    assert "Rotary(dim=4, block=9)" in repr(modules.Attention(16, 4, positions=modules.Rotary(4, 9)))
