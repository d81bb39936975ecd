"""What a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def machine(device: str = "cpu") -> str:
    """The processor, its cores, and the torch that ran on them; or the GPU."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}, CPU"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.machine()
