"""A pass forward and backward as one command to the GPU: recorded once for every shape, then replayed.

A small model keeps a GPU busy for less time than Python takes to call its kernels one by one. A recorded graph of them
starts at once, and does exactly what was recorded: the same kernels on the same memory, with new draws of dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from avow.errors import ParameterError, is_out_of_memory

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
# Kernels choose their algorithms and buffers the first few times they run, and none of that may be recorded.
_REHEARSALS = 3


# A graph, the tensors that it reads (ids, targets, their number), and the loss that it writes.
Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor], Tensor]


class Replayed:
    """The same as `run(ids, targets, whole)`, which adds to the gradients of `parameters` and returns the loss."""

    def __init__(self, run: Pass, parameters: Iterable[nn.Parameter]) -> None:
        self._run, self._parameters = run, [p for p in parameters if p.requires_grad]
        if any(parameter.device.type != "cuda" for parameter in self._parameters):
            raise ParameterError("run: graphs", True, "needs a model on a GPU", "use run.device=cuda, or leave it out")
        self._recorded: dict[torch.Size, Recorded] = {}
        # Graphs never run at the same time, so they share what memory they need in between.
        self._pool = torch.cuda.graph_pool_handle()
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # Recorded addresses: never replaced, only zeroed.

    def __call__(self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"], whole: float) -> Float[Tensor, ""]:
        """The loss, in memory that the next call with the same shape overwrites."""
        if ids.shape not in self._recorded:
            self._recorded[ids.shape] = self._record(ids, targets, whole)
        graph, given, loss = self._recorded[ids.shape]
        given[0].copy_(ids, non_blocking=True)
        given[1].copy_(targets, non_blocking=True)
        given[2].fill_(whole)
        graph.replay()
        return loss

    def _record(self, ids: Tensor, targets: Tensor, whole: float) -> Recorded:
        device = self._parameters[0].device
        given = (ids.to(device), targets.to(device), torch.tensor(whole, device=device))
        before = [gradient.clone() for gradient in self._gradients]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_REHEARSALS):
                self._run(*given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads go on fetching batches meanwhile, which would void a recording of the whole process.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                loss = self._run(*given)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            rule = f"cannot record this model ({str(error).splitlines()[0]})"
            raise ParameterError("run: graphs", True, rule, "use run.graphs=false") from error
        for gradient, old in zip(self._gradients, before, strict=True):
            gradient.copy_(old)
        return graph, given, loss
