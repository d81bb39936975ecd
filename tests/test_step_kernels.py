"""The table of a step's launches: what each takes, and what it adds to the step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_kernels import Launch, launch_rows


def test_what_launches_take_apart_adds_up_to_the_steps_though_they_overlap() -> None:
    # Two steps of three launches, one of which waits for the one before while that runs; the last runs twice.
    step = [Launch("append", 0.0, 3.0), Launch("look", 1.0, 9.0), Launch("look", 8.0, 10.0)]
    launches = [x._replace(start=x.start + at, end=x.end + at) for at in (0.0, 10.0) for x in step]
    rows = launch_rows(launches, 2)
    assert rows == [
        {"launch": "append", "times a step": 1.0, "us": 3.0, "us apart": 3.0},
        {"launch": "look", "times a step": 2.0, "us": 5.0, "us apart": 3.5},
    ]
    assert sum(float(row["us apart"] or 0) * float(row["times a step"] or 0) for row in rows) == 10.0


def test_one_switch_turns_dependent_launches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from avow.kernels import tile_ops
    from benchmarks.step_kernels import _launches

    monkeypatch.setattr(tile_ops, "early", lambda device: True)
    for early in (True, False):
        with _launches(early):
            assert tile_ops.chained(torch.device("cpu")) == {"EARLY": early, "launch_pdl": early}
