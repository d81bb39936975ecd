"""SDPA's own names in avow's functions, and the function that stands in for SDPA itself."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import avow
from avow.attend import run_certified
from avow.errors import NonFiniteError, ParameterError

ROOT = Path(__file__).parent.parent
THEIRS = functional.scaled_dot_product_attention


def qkv(*shape: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, *(shape or (2, 4, 9, 8)), **options).unbind()
    return q, k, v


VERBS: dict[str, Callable[..., Any]] = {
    "attend": lambda *x, **options: avow.attend(*x, **options).out.tolist(),
    "plan": lambda *x, **options: [str(c.cost) for c in avow.plan(*x, tol=1e-2, **options).ranked],
    "audit": lambda q, k, v, **options: avow.audit(q, q, k, v, **options).errors.tolist(),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


@every_verb
def test_the_names_of_sdpa_mean_what_avows_own_mean(verb: Callable[..., Any]) -> None:
    x, seen = qkv(), torch.rand(9, 9) < 0.7
    seen[:, 0] = True
    assert verb(*x, is_causal=True) == verb(*x, causal=True) != verb(*x, is_causal=False)
    assert verb(*x, attn_mask=seen) == verb(*x, mask=seen) != verb(*x)
    assert verb(*x, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) == verb(*x)
    assert verb(*x, attn_mask=seen, mask=seen, is_causal=True, causal=True) == verb(*x, mask=seen, causal=True)


@every_verb
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"causal": True, "is_causal": False},
            "causal=True and is_causal=False are two names of one argument, and differ; pass one of them; is_causal is "
            "PyTorch's name",
        ),
        (
            {"mask": torch.ones(9, 9).bool(), "attn_mask": torch.ones(9).bool()},
            "mask=a bool tensor of shape (9, 9) and attn_mask=a bool tensor of shape (9,) are two names of one "
            "argument, and differ; pass one of them; attn_mask is PyTorch's name",
        ),
        (
            {"dropout_p": 0.1},
            "dropout_p=0.1 must be 0: dropped attention weights are random, and no certificate covers them; leave it "
            "out; torch.nn.functional.dropout may be applied to the output",
        ),
        ({"is_causal": torch.ones(9)}, "is_causal=a float32 tensor of shape (9,) must be True or False; "),
    ],
    ids=["causal", "mask", "dropout", "a tensor for a flag"],
)
def test_what_contradicts_itself_or_cannot_be_had_is_said(
    verb: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ParameterError, match=f"^{re.escape(words)}"):
        verb(*qkv(), **options)


def test_the_features_of_causal_rows_are_counted_under_either_name() -> None:
    q, k, _ = qkv(1, 2, 64, 8)
    asked = functools.partial(avow.features_needed, 0.2 * q, 0.2 * k, tol=0.5)
    assert asked(is_causal=True) == asked(causal=True)
    with pytest.raises(ParameterError, match="two names of one argument"):
        asked(causal=True, is_causal=False)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_names_of_sdpa_mean_the_same_over_shards(alone: None) -> None:
    x, seen = qkv(), torch.rand(9, 9) < 0.7
    attend = avow.distributed.attend
    assert torch.equal(attend(*x, is_causal=True).out, attend(*x, causal=True).out)
    assert torch.equal(attend(*x, attn_mask=seen).out, attend(*x, mask=seen).out)
    assert not torch.equal(attend(*x, attn_mask=seen).out, attend(*x).out)
    with pytest.raises(ParameterError, match="causal=True and is_causal=False are two names of one argument"):
        attend(*x, causal=True, is_causal=False)
    with pytest.raises(ParameterError, match="dropout_p=1 must be 0"):
        attend(*x, dropout_p=1)


def parameters(schema: torch.FunctionSchema) -> list[tuple[str, bool, Any]]:
    """Name, whether by name alone, and default of each argument of an operator."""
    return [(x.name, x.kwarg_only, x.default_value) for x in schema.arguments]


def own_parameters(function: Callable[..., Any]) -> list[tuple[str, bool, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(x.name, x.kind is x.KEYWORD_ONLY, None if x.default is x.empty else x.default) for x in found]


def test_the_signature_is_that_of_pytorch_and_two_tolerances() -> None:
    theirs = parameters(torch.ops.aten.scaled_dot_product_attention.default._schema)
    own = own_parameters(avow.scaled_dot_product_attention)
    assert own == [*theirs, ("tol", True, None), ("rtol", True, None)]
    written = re.match(r"scaled_dot_product_attention\((.*?)\) -> Tensor", THEIRS.__doc__ or "", re.DOTALL)
    assert written is not None
    assert [part.split("=")[0].strip() for part in written[1].split(",")] == [name for name, *_ in theirs]


def test_a_signature_in_another_order_is_told_apart() -> None:
    def other(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attn_mask: None = None) -> None: ...

    theirs = parameters(torch.ops.aten.scaled_dot_product_attention.default._schema)
    assert own_parameters(other) != theirs[: len(own_parameters(other))]


@pytest.fixture
def patched() -> Iterator[None]:
    functional.scaled_dot_product_attention = avow.scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = THEIRS


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(9, 9).tril().bool(), "scale": 0.5},
        {"attn_mask": torch.arange(81.0).reshape(9, 9) / 81},
    ],
    ids=["plain", "causal", "boolean mask", "additive mask"],
)
def test_it_answers_as_sdpa_does_and_certifies_it(patched: None, options: dict[str, Any]) -> None:
    q, k, v = qkv()
    with avow.record() as certificates:
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, THEIRS(q, k, v, **options))
    (entry,) = certificates
    assert entry.layer == "scaled_dot_product_attention" and entry.certificate.bound < 1e-4


def test_arguments_by_position_and_grouped_heads_are_those_of_sdpa() -> None:
    q, k, v = qkv()
    seen = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(avow.scaled_dot_product_attention(q, k, v, seen, 0.0, False), THEIRS(q, k, v, seen))
    few = k[:, :2], v[:, :2]
    out = avow.scaled_dot_product_attention(q, *few, enable_gqa=True)
    torch.testing.assert_close(out, THEIRS(q, *few, enable_gqa=True))


def test_a_tolerance_can_be_bound_for_every_call() -> None:
    within = functools.partial(avow.scaled_dot_product_attention, tol=1e-2)
    with avow.record() as certificates:
        within(*qkv())
    assert certificates.keeps(1e-2) and not certificates.keeps(1e-12)
    with pytest.raises(avow.ToleranceUnreachable):
        avow.scaled_dot_product_attention(*qkv(dtype=torch.bfloat16), tol=1e-6)


def test_a_module_of_pytorch_trains_through_it(patched: None) -> None:
    module, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 9, 16, requires_grad=True)
    with avow.record() as certificates:
        out = module(x, x, x, need_weights=False)[0]
    out.square().sum().backward()
    functional.scaled_dot_product_attention = THEIRS
    own, x.grad = x.grad, None
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    torch.testing.assert_close(own, x.grad)
    assert len(certificates) == 1
    module.dropout = 0.5
    functional.scaled_dot_product_attention = avow.scaled_dot_product_attention
    with pytest.raises(ParameterError, match=r"dropout_p=0\.5 must be 0"):
        module.train()(x, x, x, need_weights=False)


def test_autocast_narrows_what_sdpa_would_narrow() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k, v), (q, k, v.bfloat16()), (q.double(), k.double(), v.double())):
            own, theirs = avow.scaled_dot_product_attention(*given), THEIRS(*given)
            assert own.dtype == theirs.dtype
            torch.testing.assert_close(own, theirs)
    with pytest.raises(avow.InputError, match=r"v\.dtype"):
        avow.scaled_dot_product_attention(q, k, v.bfloat16())


def test_replacing_sdpa_before_avow_loads_its_methods_does_not_recurse() -> None:
    """Methods are loaded at the first call, when the name in torch is avow's function already."""
    code = (
        "import torch, avow, sys\n"
        "assert 'avow.methods.exact' not in sys.modules\n"
        "f = torch.nn.functional\n"
        "f.scaled_dot_product_attention = avow.scaled_dot_product_attention\n"
        "x = torch.randn(1, 2, 5, 4)\n"
        "with avow.record() as certificates: f.scaled_dot_product_attention(x, x, x)\n"
        "assert len(certificates) == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 2 * avow.scaled_dot_product_attention(q + 1, k, v, is_causal=True)


def test_a_compiled_model_leaves_its_graph_for_a_record_and_the_certificate_is_that_of_eager_code() -> None:
    q, k, v = qkv()
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with avow.record() as compiled:
        out = torch.compile(doubled, backend=backend)(q, k, v)
    with avow.record() as eager:
        assert torch.equal(out, doubled(q, k, v))
    assert compiled[0].certificate == eager[0].certificate
    calls = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) == 2 and len(calls) == 2, "nothing of avow itself is compiled"
    with avow.record(), pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
        torch._dynamo.reset()
        torch.compile(doubled, backend="eager", fullgraph=True)(q, k, v)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(doubled, backend="eager", fullgraph=True)(q, k, v), doubled(q, k, v))


def test_an_exported_program_cannot_hold_it() -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return doubled(q, k, v)

    with pytest.raises(
        ParameterError,
        match=r"call=avow\.attend cannot be exported: .* exported program does not know; export avow\.nn\.A",
    ):
        torch.export.export(Module(), qkv())


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e19])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_without_a_record_or_a_tolerance_the_answer_is_the_same_and_nothing_is_certified(
    size: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(3, 2, 3, 70, 8).unbind()
    q, k = size * q, size * k  # squares of the largest leave float32
    expected = avow.attend(q, k, v, **options).out
    certified: list[object] = []
    monkeypatch.setattr(
        sys.modules["avow.attend"], "run_certified", lambda *given: certified.append(given) or run_certified(*given)
    )
    assert torch.equal(avow.scaled_dot_product_attention(q, k, v, **options), expected) and not certified
    with avow.record() as certificates:
        assert torch.equal(avow.scaled_dot_product_attention(q, k, v, **options), expected)
    assert len(certified) == len(certificates) == 1
    avow.scaled_dot_product_attention(q, k, v, tol=4.0, **options)
    assert len(certified) >= 2


def test_without_a_record_inputs_are_checked_all_the_same() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    with pytest.raises(NonFiniteError, match="remove NaN and inf from k"):
        avow.scaled_dot_product_attention(q, k / 0 * 0, v)
    assert avow.scaled_dot_product_attention(q[:, :, :0], k, v).shape == (1, 2, 0, 4)
    assert bool((avow.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0]) == 0).all())
