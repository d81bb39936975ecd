"""Where kernels cannot run, the reason is said."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from avow.kernels.availability import absent


def test_each_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert absent(cpu) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert absent(cpu) == "kernels run on CUDA devices, and these tensors are on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert absent(gpu) == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert absent(gpu) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert absent(gpu) == "Triton is not installed"
