"""Shards that talk in rounds: a script says what one of them tells and hears; it runs over processes or in one.

A script is a generator. It yields what its shard tells the others and is sent what all of them told, combined, until it
returns its answer. Every shard runs the same script, so all tell in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Answer = TypeVar("_Answer")
_Combined = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class Told(NamedTuple):
    """Numbers of one shard, to be combined with those of all others."""

    how: Literal["max", "sum"]
    numbers: Tensor

    @property
    def bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size()


Script = Generator[Told, Tensor, _Answer]


def over_processes(script: Script[_Answer], group: dist.ProcessGroup | None) -> _Answer:
    """What the script of this process's shard returns; the other processes of the group run theirs."""
    heard: Tensor | None = None
    while True:
        try:
            told = script.send(heard)  # type: ignore[arg-type]  # a generator starts by being sent None
        except StopIteration as done:
            answer: _Answer = done.value
            return answer
        # What is summed is summed once, wherever that is, and sent to all: every process hears the same bits.
        heard = told.numbers.contiguous().clone()
        dist.all_reduce(heard, op=_Combined[told.how], group=group)


def side_by_side(scripts: Sequence[Script[_Answer]]) -> tuple[list[_Answer], list[Told]]:
    """What the scripts of all shards return when they run in this process, and what the first of them told."""
    heard: Tensor | None = None
    log: list[Told] = []
    while True:
        told: list[Told] = []
        answers: list[_Answer] = []
        for script in scripts:
            try:
                told.append(script.send(heard))  # type: ignore[arg-type]  # as above
            except StopIteration as done:
                answers.append(done.value)
        if not told:
            return answers, log
        assert len(told) == len(scripts) and len({(one.how, one.numbers.shape) for one in told}) == 1
        numbers = torch.stack([one.numbers for one in told])
        heard = numbers.amax(0) if told[0].how == "max" else numbers.sum(0)
        log.append(told[0])
