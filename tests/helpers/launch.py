"""Processes as `torchrun` starts, watches and restarts them, born of one that has loaded what they need already."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# What takes torch seconds to load when it is first needed: by an optimiser, by divided tensors.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch._dynamo", "avow.training", "avow.training.sharding", "tests.helpers.runs"]
)


def launched(work: Callable[..., None], *given: object, ranks: int, words: Path, restarts: int = 0) -> None:
    """So many processes do this work; where one fails, all are started again, so many times at most.

    What each says goes to a file below `words`. They are not forked from here: the agent has threads, and what one of
    them holds at that moment would be held forever in the child.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        logs_specs=DefaultLogsSpecs(str(words), Std.ALL),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="forkserver",
    )
    elastic_launch(config, _told)(work, *given)


def said(words: Path, attempt: int, rank: int) -> str:
    """What a process said on stderr."""
    (path,) = words.glob(f"*/attempt_{attempt}/{rank}/stderr.log")
    return path.read_text(encoding="utf-8")


def _told(work: Callable[..., None], *given: object) -> None:
    try:
        work(*given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
