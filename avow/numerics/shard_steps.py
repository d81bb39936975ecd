"""Steps of a computation on tokens that may lie in shards: what a step yields, all shards add up or compare.

One process that has all tokens runs its steps `alone`; over shards, `avow.distributed` runs them. Steps that are
yielded are taken, and the reply is their result: `torch.compile` does not follow `yield from`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from jaxtyping import Bool
from torch import Tensor


class Sum(NamedTuple):
    """The reply is the sum of this over all shards."""

    x: Tensor


class Max(NamedTuple):
    """The reply is the largest of this over all shards."""

    x: Tensor


class AnyTrue(NamedTuple):
    """The reply holds something true if this does in any shard."""

    x: Bool[Tensor, "*shape"]


class Done(NamedTuple):
    """The last step: the result."""

    result: Any


Steps = Generator[Any, Any, None]
"""Of `Sum`, `Max`, `AnyTrue` and other steps; the last is `Done`."""


def alone(steps: Steps) -> Any:
    """The result of steps if there are no other shards."""
    stack, reply = [steps], None
    while stack:
        request = stack[-1].send(reply)
        if isinstance(request, Done):
            stack.pop()
            reply = request.result
        elif isinstance(request, Sum | Max | AnyTrue):
            reply = request.x
        else:
            stack.append(request)
            reply = None
    return reply
