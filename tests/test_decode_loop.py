"""The decoding loop counts what it says it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from avow.attend import Attended
from avow.nn import KeyValueCache
from benchmarks.loop import loop


def test_every_row_of_every_step_is_judged() -> None:
    result = loop(40, 100, 1.0)
    (row,) = result.rows
    assert result.failures == [] and (row["steps"], row["rows"], row["violations"]) == (40, 320, 0)
    assert float(row["largest bound"] or 1) <= 1e-2 and "live tensors grew by 0 bytes" in result.remarks[1]


def test_a_tensor_without_memory_is_not_counted() -> None:
    meta = torch.zeros(1000, device="meta")
    result = loop(40, 100, 1.0)
    assert meta.nbytes == 4000 and "live tensors grew by 0 bytes" in result.remarks[1]


def test_a_wrong_answer_and_a_leak_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, kept = KeyValueCache.attend, list[Tensor]()

    def careless(self: KeyValueCache, *arguments: Any, **options: Any) -> Attended:
        out, certificate = honest(self, *arguments, **options)
        kept.append(out + 1)
        return Attended(kept[-1], certificate)

    monkeypatch.setattr(KeyValueCache, "attend", careless)
    broken, leak = loop(40, 100, 1.0).failures
    assert broken == "320 rows outside their bounds"
    assert leak == f"live tensors grew by {8 * 8 * 64 * 2:,} bytes"
