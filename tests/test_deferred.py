"""Answers that wait for no device: nothing is read from it between a call and the first look at the certificate."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import avow
import avow.kernels.availability
from avow import deferred
from avow.core import LazyCertificate
from avow.errors import DtypeError, NonFiniteError, ParameterError
from avow.methods import exact
from tests.helpers.truth import judge

# What brings numbers of a device to the host.
# The compiler itself warns, of TorchScript and of tensors between two graphs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
OPERATIONS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero"}
FUNCTIONS = {"tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__", "__array__"}


class Reads(TorchDispatchMode):
    """Counts what is read from tensors, as if they were on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in OPERATIONS:
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """The same of functions that do not reach an operation on a CPU."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in FUNCTIONS:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def reads(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it read."""
    with Reads() as counted, Calls(counted.names):
        result = call()
    return result, counted.names


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU, treated as a device that answers late."""
    monkeypatch.setattr(deferred, "waits_freely", lambda device: False)
    yield


def qkv(dtype: torch.dtype = torch.float32, n: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(2, 4, n, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 70, 16, generator=generator).unbind()
    return q.to(dtype), k.to(dtype), v.to(dtype)


MASK = torch.arange(70)[None, None, None, :] > 3
CALLS: dict[str, dict[str, Any]] = {
    "automatic": {},
    "exact": {"method": "exact"},
    "float64": {"method": "exact", "precision": "float64"},
    "causal": {"causal": True, "scale": 0.3},
    "masked": {"mask": MASK},
}
every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


def attended(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    return avow.attend(*qkv(dtype), enable_gqa=True, **options)


@every_call
@every_dtype
def test_nothing_is_read_from_a_device_before_somebody_looks(
    options: dict[str, Any], dtype: torch.dtype, device: None
) -> None:
    attended(options, dtype)  # a CPU's kernel is examined once
    (out, certificate), read = reads(lambda: attended(options, dtype))
    assert read == [] and isinstance(certificate, LazyCertificate) and out.dtype == dtype
    _, read = reads(lambda: certificate.bound)
    assert read and math.isfinite(certificate.bound)


@pytest.mark.parametrize("options", [{}, {"method": "exact", "precision": "float64"}, {"causal": True}], ids=str)
def test_nothing_is_read_from_a_gpu_as_pytorch_pretends_to_have_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without numbers: whatever reads one raises, and the code is that of a GPU but for its kernel."""
    monkeypatch.setattr(sys.modules["avow.attend"], "check_numbers", lambda name, x: None)
    monkeypatch.setattr(sys.modules["avow.kernels.availability"], "is_available", lambda device: False)
    monkeypatch.setattr(exact, "_quickest", lambda *_: [SDPBackend.EFFICIENT_ATTENTION])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, n, 16, device="cuda") for n in (50, 70, 70))
        out, certificate = avow.attend(q, k, v, **options)
        assert out.shape == q.shape and vars(certificate)["_follows"]
        for look in (lambda: certificate.bound, lambda: avow.attend(q, k, v, tol=1e-2)):
            with pytest.raises(DataDependentOutputException):
                look()


@every_call
def test_a_call_that_waits_is_seen_to_read(options: dict[str, Any]) -> None:
    (_, certificate), read = reads(lambda: attended(options))
    assert "tolist" in read or "aten::_local_scalar_dense" in read
    assert vars(certificate)["bound"] == certificate.bound, "known at once"


@every_call
@every_dtype
def test_a_late_look_finds_what_an_early_one_would_have_and_a_bound_that_holds(
    options: dict[str, Any], dtype: torch.dtype, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(dtype)
    mask = options.get("mask")
    options = options | ({} if mask is None else {"mask": mask.clone()})
    out, late = avow.attend(q, k, v, enable_gqa=True, **options)
    early = copy.copy(avow.attend(q, k, v, enable_gqa=True, **options).certificate)
    problem = avow.Problem.of(*(x.clone() for x in (q, k, v)), mask=mask, enable_gqa=True, **_shape(options))
    given = out.clone()
    for x in (q, k, v, out):
        x.fill_(math.nan)  # what others write into them afterwards
    if mask is not None:
        options["mask"].fill_(False)
    assert late == early
    method = avow.all_methods()["exact"]()
    assert judge(method, problem, given, late.rows, None).broken == 0
    assert judge(method, problem, given, late.rows * 1e-4, None).broken > 0
    monkeypatch.undo()
    immediate = avow.attend(problem.q, problem.k, problem.v, mask=mask, enable_gqa=True, **_named(options))
    assert immediate.certificate.bound == pytest.approx(late.bound, rel=1e-3) and torch.equal(immediate.out, given)
    assert immediate.certificate.relative == pytest.approx(late.relative, rel=1e-3)


def _shape(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name in ("causal", "scale")}


def _named(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name != "mask"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", "qkv")
def test_a_bad_number_is_an_error_at_the_look(which: str, bad: float, device: None) -> None:
    tensors: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    tensors[which][1, 1, 7, 3] = bad
    attended({})
    (_, certificate), read = reads(lambda: avow.attend(**tensors, enable_gqa=True))
    assert read == []
    for look in (lambda: certificate.bound, lambda: certificate.keeps(1.0), lambda: str(certificate)):
        with pytest.raises(NonFiniteError, match=rf"{which}\[1, 1, 7\]=nan or inf in this row must be finite; remove"):
            look()


def test_a_bad_number_is_an_error_at_once_where_to_look_costs_nothing() -> None:
    q, k, v = qkv()
    k[0, 1, 2, 3] = math.nan
    with pytest.raises(NonFiniteError, match=r"k\[0, 1, 2, 3\]=nan"):
        avow.attend(q, k, v, enable_gqa=True)


def test_numbers_that_leave_the_type_have_no_bound_and_the_reason_says_what_to_do(device: None) -> None:
    q, k, v = (1e19 * x for x in qkv())
    certificate = avow.attend(q, k, v, enable_gqa=True).certificate
    assert certificate.kind == "none" and certificate.bound == certificate.relative == math.inf
    assert not certificate.keeps(1e9) and bool((certificate.rows == math.inf).all())
    assert 'use method="exact", precision="float64"' in certificate.reason
    wide = avow.attend(q, k, v, enable_gqa=True, method="exact", precision="float64").certificate
    assert wide.kind == "deterministic" and wide.bound <= 2.001


def test_a_tolerance_is_kept_on_a_device_too(device: None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        out, certificate = avow.attend(*qkv(dtype), enable_gqa=True, tol=1e-2)
        assert certificate.bound <= 1e-2 and bool(torch.isfinite(out).all())
        waited, read = reads(lambda: avow.attend(*qkv(), enable_gqa=True, tol=1e-2))
        assert isinstance(waited.certificate, LazyCertificate) and read == ["tolist"], "norms, and nothing else"
        assert "polynomial" in waited.certificate.reason
    hidden = avow.attend(*qkv()[:2], 1e-30 * qkv()[2], enable_gqa=True, tol=1e-2)
    assert hidden.certificate.bound <= 1e-2 and not isinstance(hidden.certificate, LazyCertificate)
    with pytest.raises(NonFiniteError, match=r"v\[0, 0, 0\]"):
        q, k, v = qkv()
        v[0, 0, 0, 0] = math.nan
        avow.attend(q, k, v, enable_gqa=True, tol=1e-2)


def test_tensors_without_numbers_are_refused_on_a_device_too(device: None) -> None:
    q = torch.empty(1, 1, 3, 4, device="meta")
    with pytest.raises(DtypeError, match="meta device has no numbers"):
        avow.attend(q, q, q)


def test_gradients_are_those_of_an_answer_that_waited(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        leaves = [x.requires_grad_() for x in qkv()]
        out, certificate = avow.attend(*leaves, enable_gqa=True, causal=True)
        out.square().sum().backward()
        assert not certificate.rows.requires_grad
        return [x.grad for x in leaves if x.grad is not None]

    late = gradients()
    monkeypatch.undo()
    assert len(late) == 3 and all(torch.equal(a, b) for a, b in zip(late, gradients(), strict=True))


@pytest.mark.parametrize("late", [True, False], ids=["on a device", "on a CPU"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("method", ["exact", "auto", "separable"])
def test_it_compiles_into_one_graph_with_the_certificate_of_eager_code(
    method: str, backend: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setattr(deferred, "waits_freely", lambda device: False)
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, avow.Certificate]:
        out, certificate = avow.attend(q, k, v, method=method, causal=True, enable_gqa=True)
        return 2 * out, certificate

    torch._dynamo.reset()
    out, certificate = torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
    expected = avow.attend(q, k, v, method=method, causal=True, enable_gqa=True)
    assert torch.equal(out, 2 * expected.out) and certificate == expected.certificate
    assert isinstance(certificate, LazyCertificate)


@pytest.mark.parametrize("mask", [MASK, torch.where(MASK, 0.5, -1.0)], ids=["booleans", "numbers"])
def test_masks_go_into_the_graph_and_so_do_tolerances_on_a_cpu(mask: Tensor) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return avow.attend(q, k, v, mask=mask, enable_gqa=True, tol=1e-2)

    torch._dynamo.reset()
    out, certificate = torch.compile(call, fullgraph=True, backend="eager")(*qkv())
    expected = call(*qkv())
    assert torch.equal(out, expected.out) and certificate == expected.certificate and certificate.keeps(1e-2)


def test_a_compiled_call_on_a_cpu_raises_at_once() -> None:
    q, k, v = qkv()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: avow.attend(*x, enable_gqa=True), fullgraph=True, backend="eager")
    assert compiled(q, k, v)[1].keeps(1e-3)
    k[0, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"k\[0, 0, 0, 0\]"):
        compiled(q, k, v)


@pytest.mark.parametrize("tol", [math.inf, math.nan])
def test_a_compiled_call_says_what_is_wrong_with_a_tolerance(tol: float) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: avow.attend(*x, tol=tol, enable_gqa=True), fullgraph=True, backend="eager")
    with pytest.raises(ParameterError, match=f"tol={tol} must be a number above 0"):
        compiled(*qkv())


def test_gradients_and_generators_end_the_graph_and_an_exported_program_cannot_hold_it() -> None:
    q, k, v = qkv()
    for call, tensors in (
        (lambda *x: avow.attend(*x, enable_gqa=True).out, [x.requires_grad_() for x in qkv()]),
        (lambda *x: avow.attend(*x, enable_gqa=True, generator=torch.Generator()).out, [q, k, v]),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, fullgraph=True, backend="eager")(*tensors)  # type: ignore[no-untyped-call]
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="eager")(*tensors), call(*tensors))

    class Module(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return avow.attend(q, q, q).out

    with pytest.raises(ParameterError, match=r"call=avow\.attend cannot be exported"):
        torch.export.export(Module(), (q,))


@pytest.mark.parametrize("tokens", [2, 300])
def test_what_a_cache_knows_of_its_tokens_is_no_list_of_their_lengths(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in float64 keeps the extremes of each head as exactly as lengths are measured; a late look needs all."""
    monkeypatch.setattr(deferred, "waits_freely", lambda device: False)
    cache = avow.nn.KeyValueCache(2, 16, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, tokens, 16, dtype=torch.float64)
    cache.append(k, v)
    q = torch.randn(1, 4, 1, 16, dtype=torch.float64)
    out, certificate = cache.attend(q, 1e-2, method="exact")
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    truth = torch.softmax(q @ wide[0].mT / 4, -1) @ wide[1]
    apart = torch.linalg.vector_norm(out - truth, dim=-1)
    assert bool((apart <= certificate.rows * torch.linalg.vector_norm(wide[1], dim=-1).amax(-1, keepdim=True)).all())
    assert certificate.bound < 1e-10
