"""Decoding's operators: torch.compile and torch.export see a step as two nodes, and certificates hold there, too."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from avow.kernels.interpreted import interpret

interpret()

from avow.attend import Attended
from avow.errors import AvowError
from avow.kernels import pausing
from avow.kernels.finalize import blank_report
from avow.kernels.planning import blank_counts
from avow.nn import KeyValueCache
from tests.helpers.kernel_caches import answer_by_kernels, errors

# Inductor uses what torch deprecated.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TOL = 5e-2


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by_kernels(monkeypatch)
    torch._dynamo.reset()


def filled(tokens: int = 126, **options: Any) -> KeyValueCache:
    cache = KeyValueCache(2, 32, **({"dtype": torch.bfloat16, "capacity": 192} | options))
    cache.append(*drawn(cache, tokens))
    return cache


def drawn(cache: KeyValueCache, tokens: int = 1) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(cache.batch, 2, tokens, 32, dtype=cache.dtype) for _ in range(2))
    return k, v


def asked(queries: int = 1) -> Tensor:
    return (6 * torch.randn(1, 4, queries, 32)).bfloat16()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("confidence", "queries"), [(None, 1), (0.999, 1), (None, 3)])
def test_a_compiled_step_is_one_graph_whose_certificate_tells_of_the_last_step(
    backend: str, confidence: float | None, queries: int
) -> None:
    cache = filled()

    @torch.compile(fullgraph=True, backend=backend)
    def step(q: Tensor, k: Tensor, v: Tensor) -> Attended:
        cache.append(k, v)
        return cache.attend(q, tol=TOL, confidence=confidence)

    bounds = set()
    for _ in range(3):
        q = asked(queries)
        out, certificate = step(q, *drawn(cache, queries))
        assert certificate.keeps(TOL) and certificate.rows.shape == (1, 4, queries)
        assert bool((errors(cache, q, out) <= certificate.rows).all())
        bounds.add(certificate.bound)
    assert cache.length == 126 + 3 * queries and len(bounds) == 3


def test_a_step_is_exported_as_two_operators() -> None:
    class Step(nn.Module):
        def __init__(self, cache: KeyValueCache) -> None:
            super().__init__()
            self.cache = cache

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.append(k, v)
            return self.cache.attend(q, tol=TOL).out

    cache = filled()
    cache.attend(asked(), tol=TOL)
    program = torch.export.export(Step(cache), (asked(), *drawn(cache)))
    own = [str(node.target) for node in program.graph.nodes if "avow" in str(node.target)]
    assert own == ["avow.append_tokens.default", "avow.decode_step.default"]
    q = asked()
    out = program.module()(q, *drawn(cache))
    assert cache.length == 127 and float(errors(cache, q, out).max()) <= TOL


def test_a_cache_is_freed_at_once_with_its_graphs() -> None:
    """One that waited for the garbage collector would end a capture that it is freed in."""
    cache = filled()
    cache.append(*drawn(cache))
    cache.attend(asked(), tol=TOL)
    torch.compile(lambda q: cache.attend(q, tol=TOL), fullgraph=True, backend="eager")(asked())
    torch._dynamo.reset()
    gc.collect()
    gc.disable()
    try:
        left = [weakref.ref(x) for x in (cache, cache._steps)]
        del cache
        assert [x() for x in left] == [None, None]
    finally:
        gc.enable()


def test_what_one_operator_does_not_do_is_refused_in_compiled_code() -> None:
    cache, growing = filled(), filled(capacity=None)

    def compiled(call: Any) -> Any:
        return torch.compile(call, fullgraph=True, backend="eager")

    calls = (
        (lambda q, k, v: growing.append(k, v), "capacity=None must be given"),
        (lambda q, k, v: cache.append(k, v, lengths=[1]), "lengths=.* numbers of the host"),
        (lambda q, k, v: cache.append(k, v, lengths=torch.ones(3)), "lengths=.* must be torch.int32 or torch.int64"),
        (lambda q, k, v: cache.append(k[:, :1], v), "Dynamo does not know|k.shape"),
        (lambda q, k, v: cache.attend(q[:, :3], tol=TOL), "a multiple of 2, length, 32"),
        (lambda q, k, v: cache.attend(q.float(), tol=TOL), "q.dtype=torch.float32 must equal the cache's"),
        (lambda q, k, v: cache.attend(q), "is not answered by one operator"),
        (lambda q, k, v: cache.attend(q, rtol=TOL), "is not answered by one operator"),
        (lambda q, k, v: cache.attend(q.repeat(1, 1, 40, 1), tol=TOL), "80 queries share a key head"),
        (lambda q, k, v: cache.attend(q, tol=1e-3), "rounding takes most of the tolerance"),
        (lambda q, k, v: cache.attend(q, tol=-1.0), "rounding takes most of the tolerance"),
    )
    for call, words in calls:
        # Dynamo tells of an error in an error of its own.
        with pytest.raises((AvowError, torch._dynamo.exc.TorchDynamoException), match=words):
            compiled(call)(asked(), *drawn(cache))
    assert cache.length == 126 == growing.length


def test_the_operators_are_what_they_say() -> None:
    """Their schemas say what is written, and their stand-ins give the shapes of what they return."""
    cache = filled()
    store = cache._stored
    state, report = pausing.blank_state(torch.device("cpu")), blank_report(1, 4, torch.device("cpu"))
    counts = blank_counts(4, state.device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.avow.append_tokens.default, (*drawn(cache), store, None), test_utils=checks)
    given = asked(), store, [], state, report, counts, None, torch.randn(4), 0.02, TOL, 1.0, 32**-0.5, None
    torch.library.opcheck(torch.ops.avow.decode_step.default, given, test_utils=checks)
    away = filled(offload=True, hot=10_000)
    assert away._hot is not None
    given = asked(), away._stored[:-1], list(away._hot), *given[3:]
    torch.library.opcheck(torch.ops.avow.append_tokens.default, (*drawn(away), away._stored, None), test_utils=checks)
    torch.library.opcheck(torch.ops.avow.decode_step.default, given, test_utils=checks)
