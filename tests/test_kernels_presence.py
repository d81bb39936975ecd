"""Where kernels cannot run, the reason is said."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from avow.kernels.availability import why_not


def test_each_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not(cpu) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert why_not(cpu) == "kernels run on CUDA devices, and these tensors are on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(gpu) == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not(gpu) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not(gpu) == "Triton is not installed"
