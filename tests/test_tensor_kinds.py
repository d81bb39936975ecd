"""Tensors that are not plain ones: derivatives forward are right, and what cannot be done is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vjp, vmap

import avow
from avow.errors import DtypeError, NotDifferentiable
from avow.nn import Attention, KeyValueCache, ModelConfig, TransformerLM

# What torch loads for derivatives forward is written in its older compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SETTINGS: dict[str, dict[str, Any]] = {"low_rank": {"rank": 6}, "random_features": {"features": 12}}
METHODS = [kind.name for kind in avow.all_methods().values()]
every_method = pytest.mark.parametrize("method", [*METHODS, "auto"])


def tensors(*lead: int, n: int = 10, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*lead, 2, n, 4, dtype=dtype) for _ in range(3)]


def attended(method: str, causal: bool = False) -> Callable[..., Tensor]:
    """Attention as a function of q, k and v, with the same draw each time."""
    more = {"tol": 0.5} if method == "auto" else SETTINGS.get(method, {})

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return avow.attend(q, k, v, method=method, causal=causal, generator=generator, **more).out

    return call


def assert_forward_is_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """⟨J t, u⟩ = ⟨t, Jᵀ u⟩ for the derivative J as each mode has it."""
    tangents = [torch.randn_like(x) for x in inputs]
    out, forward = jvp(call, tuple(inputs), tuple(tangents))
    torch.testing.assert_close(out, call(*inputs), rtol=1e-4, atol=1e-5)
    seed = torch.randn_like(out)
    _, pull = vjp(call, *inputs)
    backward = sum((t * g).double().sum() for t, g in zip(tangents, pull(seed), strict=True))
    expected = (forward * seed).double().sum().detach()
    assert float(expected.abs()) > 0
    torch.testing.assert_close(backward, expected, rtol=1e-3, atol=1e-3)


@every_method
@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_forward_are_those_backward(method: str, causal: bool) -> None:
    assert_forward_is_backward(attended(method, causal), tensors(1))


def test_derivatives_forward_of_grouped_and_masked_heads() -> None:
    q, k, v = torch.randn(1, 4, 5, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    bias = torch.randn(5, 7)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return avow.attend(q, k, v, mask=bias, enable_gqa=True).out

    assert_forward_is_backward(call, [q, k, v, bias])


def test_a_cache_refuses_derivatives_forward() -> None:
    cache, q = KeyValueCache(2, 8), torch.randn(1, 4, 1, 8)
    cache.append(*torch.randn(2, 1, 2, 9, 8).unbind())
    with pytest.raises(NotDifferentiable, match=r"q=a dual tensor asks for .*; use avow\.attend with its keys"):
        jvp(lambda q: cache.attend(q).out, (q,), (q,))


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
def test_modules_have_derivatives_forward(method: str) -> None:
    module = Attention(8, 2, method, causal=True).eval()
    assert_forward_is_backward(module, [torch.randn(2, 12, 8)])


REMEDY = "pass the mapped axis as a batch axis, in one call"
RULE = "cannot be mapped by vmap: which arithmetic proves the bound depends on the numbers"
MAPPED = f"=a tensor inside vmap {RULE}; {REMEDY}"


@every_method
def test_vmap_is_refused_with_the_remedy_that_works(method: str) -> None:
    inputs = tensors(3, 1)
    with pytest.raises(DtypeError, match=re.escape(f"q{MAPPED}")):
        vmap(attended(method), randomness="same")(*inputs)
    with pytest.raises(DtypeError, match=re.escape(f"q{MAPPED}")):
        vmap(grad(lambda q, k, v: attended(method)(q, k, v).sum()), randomness="same")(*inputs)
    assert attended(method)(*inputs).shape == (3, 1, 2, 10, 4)


def test_vmap_over_caches_and_modules_is_refused() -> None:
    cache = KeyValueCache(2, 4)
    tokens = torch.randn(3, 1, 2, 5, 4)
    with pytest.raises(DtypeError, match=re.escape(f"k{MAPPED}")):
        vmap(lambda k: cache.append(k, k))(tokens)
    cache.append(tokens[0], tokens[0])
    with pytest.raises(DtypeError, match=re.escape(f"q{MAPPED}")):
        vmap(lambda q: cache.attend(q).out)(tokens)
    with pytest.raises(DtypeError, match=re.escape(f"x{MAPPED}")):
        vmap(Attention(4, 2))(torch.randn(3, 1, 5, 4))


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 5, 4), torch.randn(2, 7, 4)], layout=layout)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(1, 2, 10, 4)


NO_NUMBERS = "has no numbers, which a certificate is about; pass a tensor with numbers"
KINDS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "coo": (lambda: torch.randn(1, 2, 10, 4).to_sparse(), ".layout=torch.sparse_coo must be torch.strided; use "),
    "csr": (lambda: torch.randn(10, 4).to_sparse_csr(), ".layout=torch.sparse_csr must be torch.strided; use "),
    "mkldnn": (lambda: torch.randn(1, 2, 10, 4).to_mkldnn(), ".layout=torch._mkldnn must be torch.strided; use "),
    "nested": (lambda: nested(torch.strided), "=a nested tensor must have one length; use "),
    "jagged": (lambda: nested(torch.jagged), "=a nested tensor must have one length; use "),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.randn(1, 2, 10, 4), 0.1, 0, torch.qint8),
        ".dtype=torch.qint8 must not be quantised; use ",
    ),
    "meta": (lambda: torch.empty(1, 2, 10, 4, device="meta"), f"=on the meta device {NO_NUMBERS}"),
    "fake": (fake, f"=a FakeTensor {NO_NUMBERS}"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|quant|Sparse|CSR).*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_tensors_are_refused_by_name(kind: str) -> None:
    make, words = KINDS[kind]
    x, plain = make(), torch.randn(1, 2, 10, 4)
    cache = KeyValueCache(2, 4)
    calls: dict[str, Callable[[], object]] = {
        "q": lambda: avow.attend(x, x, x),
        "q ": lambda: avow.plan(x, x, x, tol=0.1),
        "q  ": lambda: avow.audit(plain, x, x, x),
        "out": lambda: avow.audit(x, plain, plain, plain),
        "k": lambda: cache.append(x, x),
    }
    if kind not in ("meta", "fake"):
        calls["mask"] = lambda: avow.attend(plain, plain, plain, mask=x)
        calls["x"] = lambda: Attention(4, 2)(x)
    for name, call in calls.items():
        with pytest.raises(DtypeError, match="^" + re.escape(name.strip() + words)):
            call()


def test_sizes_of_tensors_without_numbers_have_a_price() -> None:
    sizes = avow.Problem.of(*(torch.empty(1, 2, 10, 4, device="meta") for _ in range(3))).sizes
    assert avow.all_methods()["exact"]().cost(sizes).flops > 0


@pytest.mark.parametrize("first", [0, 3, 200])
def test_a_cache_of_inference_mode_goes_on_outside_it_and_back(first: int) -> None:
    parts = [torch.randn(2, 1, 2, n, 8).unbind() for n in (first, 30, 150, 1)]
    outside = KeyValueCache(2, 8)
    with torch.inference_mode():
        inside = KeyValueCache(2, 8)
        inside.append(*parts[0])
        if first:
            inside.attend(torch.randn(1, 2, 1, 8), 0.1)
    for k, v in parts[1:3]:
        inside.append(k, v)
    with torch.inference_mode():
        inside.append(*parts[3])
    for k, v in parts:
        outside.append(k, v)
    assert all(torch.equal(a, b) for a, b in zip(inside.tokens, outside.tokens, strict=True))
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    for tol in (None, 0.1):
        torch.testing.assert_close(*(cache.attend(q, tol).out for cache in (inside, outside)))


@pytest.mark.parametrize("attention", ["exact", "separable", "random_features"])
def test_a_models_cache_of_inference_mode_goes_on_outside_it(attention: str) -> None:
    made = TransformerLM(ModelConfig(vocabulary=20, block=12, layers=2, heads=2, width=8, attention=attention)).eval()
    ids = torch.randint(20, (1, 12))
    with torch.inference_mode():
        cache = made.start(1)
        found = [made.step(ids[:, :5], cache)[0]]
    found.append(made.step(ids[:, 5:6], cache)[0])
    with torch.no_grad():
        found.append(made.step(ids[:, 6:], cache)[0])
        torch.testing.assert_close(torch.cat(found, 1), made(ids), rtol=1e-4, atol=1e-5)
