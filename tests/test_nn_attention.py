"""Attention as a module: any method, PyTorch's weights in both directions, one draw for life."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import avow
from avow.errors import ParameterError, ShapeError, ToleranceUnreachable, UnknownMethod
from avow.nn import Attention, Rotary
from avow.nn import attention as nn_attention

SETTINGS: dict[str, dict[str, Any]] = {"random_features": {"features": 16}, "low_rank": {"rank": 4}}
every_method = pytest.mark.parametrize("method", list(avow.all_methods()))
either_way = pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])


def attention(method: str, width: int = 12, heads: int = 4, **options: Any) -> Attention:
    return Attention(width, heads, method, **(SETTINGS.get(method, {}) | options))


def test_a_method_added_to_the_library_is_tested_here_too() -> None:
    assert {"exact", "separable", "random_features", "low_rank"} <= set(avow.all_methods())


@every_method
@either_way
@pytest.mark.parametrize("key_heads", [None, 2, 1])
@torch.no_grad()
def test_it_computes_what_attend_computes_between_its_projections(
    method: str, causal: bool, key_heads: int | None
) -> None:
    module = attention(method, causal=causal, key_heads=key_heads).double()
    x = torch.randn(3, 9, 12, dtype=torch.float64)
    out, certificate = module.certified(x)
    torch.testing.assert_close(module(x), out)
    assert certificate.method == method and certificate.bound >= 0
    q, k, v = module._projected(x, None)
    target = avow.all_methods()[method](**SETTINGS.get(method, {})).reference(module._problem(q, k, v, None))
    whole = module.outward(target.transpose(1, 2).flatten(2))
    if certificate.kind == "deterministic":
        errors = (out - whole).norm(dim=-1).max()
        largest = v.norm(dim=-1).max() * 4**0.5 * torch.linalg.matrix_norm(module.outward.weight, 2)
        assert float(errors) <= float(largest) * certificate.bound + 1e-12
    assert module(x).shape == x.shape


@torch.no_grad()
def test_what_is_certified_sees_the_same_keys_and_keeps_what_is_asked() -> None:
    x, context, seen = torch.randn(2, 5, 12), torch.randn(2, 9, 12), torch.rand(2, 9) < 0.6
    seen[:, 0] = True
    module = attention("sparse", cross=True).eval()
    out, certificate = module.certified(x, context, seen, tol=0.05)
    assert certificate.bound <= 0.05
    torch.testing.assert_close(out, attention_of("exact", module)(x, context, seen), rtol=0, atol=0.3)
    assert not torch.allclose(out, module.certified(x, context, tol=0.05).out, atol=1e-3), "hidden keys were seen"
    features = attention("random_features", cross=True)
    assert features.certified(x, context, confidence=0.9).certificate.confidence == 0.9
    with pytest.raises(ToleranceUnreachable, match=r"random_features: tol=1e-05"):
        features.certified(x, context, tol=1e-5, confidence=0.9)


def attention_of(method: str, given: Attention) -> Attention:
    """The same weights under another method, by way of PyTorch's own module."""
    return Attention.from_torch(given.to_torch(), method, cross=given.cross)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cross", [True, False])
@torch.no_grad()
def test_weights_from_pytorch_give_its_outputs(bias: bool, cross: bool) -> None:
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True).eval()
    for parameter in theirs.parameters():
        parameter.normal_()
    mine = Attention.from_torch(theirs, cross=cross)
    x, context = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
    seen = torch.tensor([[True, True, True, False, True], [True, False, True, True, True]])
    if not cross:
        context, seen = x, torch.rand(2, 7) < 0.6
        seen[:, 0] = True
    expected = theirs(x, context, context, key_padding_mask=~seen, need_weights=False)[0]
    out = mine(x, context if cross else None, seen)
    scale = float(expected.abs().max())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * scale)
    mine.inward.weight[0, 0] += 1.0
    assert float((mine(x, context if cross else None, seen) - expected).abs().max()) > 1e-6 * scale


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@torch.no_grad()
def test_weights_given_to_pytorch_give_our_outputs(key_heads: int) -> None:
    mine = Attention(24, 4, key_heads=key_heads, causal=True).eval()
    x = torch.randn(2, 7, 24)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    theirs = mine.to_torch()
    out = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(out, mine(x), rtol=0, atol=1e-6)
    assert not torch.allclose(theirs(x, x, x, need_weights=False)[0], mine(x), atol=1e-3)
    if key_heads == 4:
        back = Attention.from_torch(theirs, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(back.parameters(), mine.parameters(), strict=True))


def test_a_module_from_pytorch_keeps_type_mode_and_dropout() -> None:
    theirs = nn.MultiheadAttention(8, 2, dropout=0.25, dtype=torch.float64).eval()
    mine = Attention.from_torch(theirs)
    assert mine.inward.weight.dtype == torch.float64 and not mine.training and mine.dropout.p == 0.25
    back = mine.to_torch()
    assert back.in_proj_weight.dtype == torch.float64 and not back.training and back.dropout == 0.25


@every_method
def test_hidden_keys_change_nothing(method: str) -> None:
    module = attention(method, cross=True).double()
    x, context = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)
    seen = torch.ones(2, 9, dtype=torch.bool)
    seen[0, 6:] = seen[1, 4] = False
    out = module(x, context, seen)
    loud = torch.where(seen.unsqueeze(-1), context, 3 * torch.randn_like(context))
    torch.testing.assert_close(module(x, loud, seen), out)
    assert not torch.allclose(module(x, loud), out)


def test_a_sequence_that_may_see_nothing_reads_zeros() -> None:
    module = attention("exact", cross=True)
    x, context = torch.randn(1, 3, 12), torch.randn(1, 4, 12)
    zeros = module.outward(torch.zeros(1, 3, 12))
    assert torch.equal(module(x, context, torch.zeros(1, 4, dtype=torch.bool)), zeros)
    assert torch.equal(module(x, context[:, :0]), zeros)


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
def test_no_position_sees_its_future(method: str) -> None:
    module = attention(method, causal=True, positions=Rotary(4, 40), heads=3).double()
    x = torch.randn(2, 40, 12, dtype=torch.float64)
    other = x.clone()
    other[:, 25:] = torch.randn_like(other[:, 25:])
    assert torch.equal(module(other)[:, :25], module(x)[:, :25])
    assert not torch.allclose(module(other)[:, 25:], module(x)[:, 25:])


@every_method
def test_gradients_are_those_of_finite_differences(method: str) -> None:
    module = attention(method, width=4, heads=2, key_heads=1, causal=method != "low_rank").double()
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    # Landmarks are chosen anew when a key moves, and the choice has no gradient: only its weights are checked.
    inputs = (x, module.inward.weight) if method != "low_rank" else (module.outward.weight,)

    def out(*_: Tensor) -> Tensor:
        return module(x)

    assert torch.autograd.gradcheck(out, inputs)


def test_one_draw_serves_every_step_and_survives_saving() -> None:
    module = attention("random_features")
    x = torch.randn(2, 6, 12)
    out = module(x)
    assert torch.equal(module(x), out)
    other = attention("random_features")
    assert "draw.seed" in other.state_dict() and not torch.equal(other.draw.seed, module.draw.seed)
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored))
    assert torch.equal(other(x), out)
    with torch.no_grad():
        other.draw.seed.add_(1)  # as a broadcast between processes would
    assert not torch.allclose(other(x), out)


def test_a_draw_keeps_through_copies_and_changes_of_type() -> None:
    module = attention("random_features")
    x = torch.randn(2, 6, 12)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    torch.testing.assert_close(copy.deepcopy(module).double()(x.double()).float(), module(x))
    assert copy.deepcopy(module).bfloat16().draw.sample().dtype == torch.float64


def test_layers_draw_for_themselves_and_a_seed_repeats_them() -> None:
    torch.manual_seed(5)
    first, second = attention("random_features"), attention("random_features")
    assert not torch.equal(first.draw.sample(), second.draw.sample())
    torch.manual_seed(5)
    assert torch.equal(attention("random_features").draw.sample(), first.draw.sample())


def test_dropout_falls_on_the_output_while_training() -> None:
    module = attention("exact", width=64, dropout=0.5)
    x = torch.randn(4, 50, 64)
    dropped = module(x) == 0
    assert 0.45 < float(dropped.float().mean()) < 0.55
    assert not bool((module.eval()(x) == 0).any())


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
@torch.no_grad()
def test_autocast_narrows_the_projections_and_no_product_of_the_method(method: str) -> None:
    module = attention(method, causal=True, width=32)
    x = torch.randn(2, 70, 32)
    wide = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
        torch.testing.assert_close(out.float(), wide, rtol=0, atol=0.02)
        q, k, v = module._projected(x, None)
        narrowed = module._computed(module._problem(q, k, v, None))  # what would be computed if autocast went on
        module.outward = nn.Identity()
        heads = module(x)
    expected = module._computed(module._problem(q, k, v, None)).transpose(1, 2).flatten(2)
    assert out.dtype == q.dtype == heads.dtype == torch.bfloat16
    assert torch.equal(heads, expected)
    if method != "exact":
        assert not torch.equal(narrowed.transpose(1, 2).flatten(2), expected)


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
def test_it_compiles_into_one_graph(method: str) -> None:
    module = attention(method, causal=True, positions=Rotary(6, 20), heads=2)
    x = torch.randn(2, 20, 12)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


# The compiler looks at tensors between two graphs in a way that torch itself warns of.
between_graphs = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@between_graphs
@pytest.mark.parametrize("method", ["low_rank", "sparse"])
def test_a_method_that_draws_by_its_inputs_leaves_the_graph_and_answers_the_same(method: str) -> None:
    module, x = attention(method), torch.randn(2, 20, 12)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="aot_eager")(x), module(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
        torch.compile(module, backend="eager", fullgraph=True)(x)
    with pytest.raises(
        ParameterError, match=f"call=Attention by {method} cannot be exported: what it does depends on numbers"
    ):
        torch.export.export(module, (x,))


@between_graphs
@pytest.mark.parametrize("method", ["exact", "random_features"])
def test_a_compiled_module_in_a_record_leaves_the_graph_and_is_certified(method: str) -> None:
    module, x = attention(method), torch.randn(2, 20, 12)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    out = compiled(x)
    with avow.record() as certificates:
        torch.testing.assert_close(compiled(x), out)
    assert len(certificates) == 1
    assert torch.equal(compiled(x), out) and len(certificates) == 1


@pytest.mark.parametrize("method", ["exact", "separable", "random_features", "latent"])
@either_way
def test_it_is_exported_as_one_program(method: str, causal: bool) -> None:
    module, x = attention(method, causal=causal), torch.randn(2, 20, 12)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


@either_way
def test_exact_attention_is_exported_for_any_length(causal: bool) -> None:
    module, x = attention("exact", causal=causal), torch.randn(2, 20, 12)
    lengths = ({1: torch.export.Dim("n", min=2, max=4096)},)
    program = torch.export.export(module, (x,), dynamic_shapes=lengths).module()
    for n in (2, 33, 800):
        other = torch.randn(2, n, 12)
        torch.testing.assert_close(program(other), module(other))


@every_method
def test_activation_checkpointing_changes_no_gradient(method: str) -> None:
    module = attention(method, dropout=0.1)
    x = torch.randn(2, 9, 12, requires_grad=True)

    def gradients(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(call(x).square().sum(), [x, *module.parameters()]))

    kept = gradients(lambda x: checkpoint(module, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(module), strict=True))


# What code that called nn.MultiheadAttention gives `forward`, and the error.
UNKNOWN: list[tuple[str, Any, str]] = [
    (
        "key_padding_mask",
        torch.zeros(2, 3, dtype=torch.bool),
        "key_padding_mask=a bool tensor of shape (2, 3) is not an argument of Attention.forward; use "
        "mask=~key_padding_mask: True at the keys that may be seen",
    ),
    (
        "need_weights",
        False,
        "need_weights=False is not an argument of Attention.forward; leave it out: the output alone",
    ),
    ("average_attn_weights", True, "average_attn_weights=True is not an argument of Attention.forward; leave it out"),
    ("is_causal", True, "is_causal=True is not an argument of Attention.forward; use causal=True in the constructor"),
    (
        "attn_mask",
        None,
        "attn_mask=None is not an argument of Attention.forward; use causal=True in the constructor, or",
    ),
    (
        "key",
        None,
        "key=None is not an argument of Attention.forward; use cross=True in the constructor and pass context",
    ),
    ("tol", 1e-2, "tol=0.01 is not an argument of Attention.forward; use attention.certified(x, tol=0.01)"),
    ("contxt", None, "contxt=None is not an argument of Attention.forward; did you mean context?"),
    ("dim", 3, "dim=3 is not an argument of Attention.forward; known arguments: x, context, mask, shard"),
]


def test_a_compiled_module_refuses_an_unknown_argument_in_the_same_words() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention("exact"), backend="eager")
    with pytest.raises(ParameterError, match=r"is_causal=True is not an argument of Attention.forward; use"):
        compiled(torch.randn(2, 5, 12), is_causal=True)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: Attention(10, 4), ParameterError, "width=10 must be divisible by heads=4; use width=12"),
        (
            lambda: Attention(12, 4, key_heads=3),
            ParameterError,
            "key_heads=3 must divide heads=4; use 1, 2 or 4",
        ),
        (lambda: Attention(12, 0), ParameterError, "heads=0 must be a whole number of at least 1"),
        (lambda: Attention(12, 4, "exakt"), UnknownMethod, "method='exakt' is not a method; did you mean exact?"),
        (
            lambda: Attention(12, 4, rank=3),
            ParameterError,
            "rank=3 is neither an argument of Attention nor a parameter of exact; known parameters: precision",
        ),
        (
            lambda: Attention(12, 4, batch_first=True),
            ParameterError,
            "batch_first=True is neither an argument of Attention nor a parameter of exact; leave it out: batches come "
            "first",
        ),
        (
            lambda: Attention(12, 4, kv_heads=2),
            ParameterError,
            "kv_heads=2 is neither an argument of Attention nor a parameter of exact; did you mean key_heads?",
        ),
        (
            lambda: Attention(12, 4, tol=1e-2),
            ParameterError,
            "tol=0.01 is neither an argument of Attention nor a parameter of exact; give it to certified: "
            "attention.certified(x, tol=0.01)",
        ),
        (
            lambda: Attention(embed_dim=12, num_heads=4),
            ParameterError,
            "embed_dim=12 is not an argument of Attention; did you mean width?",
        ),
        (lambda: Attention(12), TypeError, "Attention() missing a required argument: 'heads'"),
        (
            lambda: Attention.from_torch(torch.nn.Linear(12, 12)),  # type: ignore[arg-type]
            ParameterError,
            "given=Linear must be an nn.MultiheadAttention; pass one",
        ),
        (
            lambda: Attention(12, 4).bfloat16().certified(torch.ones(2, 3, 12).bfloat16(), tol=1e-5),
            ToleranceUnreachable,
            "the best bound that can be proved in bfloat16; run the module in float32",
        ),
        (lambda: Attention(12, 4, dropout=1.0), ParameterError, "dropout=1.0 must be at least 0 and below 1"),
        (
            lambda: Attention(12, 4, positions="rotary"),
            ParameterError,
            "positions='rotary' must be a Rotary; make",
        ),
        (
            lambda: Attention(12, 4)(torch.zeros(2, 3, 11)),
            ShapeError,
            "x.shape=(2, 3, 11) must be (batch, length, 12); add the missing axes or project it first",
        ),
        (
            lambda: Attention(12, 4)(torch.zeros(2, 3, 12), torch.zeros(2, 3, 12)),
            ParameterError,
            "context=a float32 tensor of shape (2, 3, 12) is given to a module that attends to x itself; leave it out",
        ),
        (
            lambda: Attention(12, 4, cross=True)(torch.zeros(2, 3, 12)),
            ParameterError,
            "context=None must be given to a module with cross=True; pass context",
        ),
        (
            lambda: Attention(12, 4, cross=True)(torch.zeros(2, 3, 12), torch.zeros(1, 3, 12)),
            ShapeError,
            "context.shape[0]=1 must be x's 2",
        ),
        (
            lambda: Attention(12, 4)(torch.zeros(2, 3, 12), mask=torch.zeros(2, 3)),
            ShapeError,
            "mask=float32 (2, 3) must be bool (2, 3); say for each key of each sequence whether it may be seen",
        ),
        *(
            (
                lambda name=name, value=value: Attention(12, 4)(torch.zeros(2, 3, 12), **{name: value}),
                ParameterError,
                words,
            )
            for name, value, words in UNKNOWN
        ),
        (
            lambda: Attention(12, 4, "low_rank")(torch.zeros(2, 3, 12)),
            ParameterError,
            "low_rank: rank=64 exceeds 3 keys",
        ),
        (lambda: Attention(12, 4, "separable").to_torch(), ParameterError, "method=separable is not softmax attention"),
        (
            lambda: Attention(12, 3, positions=Rotary(4, 8)).to_torch(),
            ParameterError,
            "positions=Rotary have no counterpart in nn.MultiheadAttention; add positions to the input instead",
        ),
        (
            lambda: Attention.from_torch(nn.MultiheadAttention(12, 4, kdim=6)),
            ParameterError,
            "kdim=6 has no counterpart in Attention; make the nn.MultiheadAttention without it",
        ),
        (
            lambda: Attention.from_torch(nn.MultiheadAttention(12, 4, add_zero_attn=True)),
            ParameterError,
            "add_zero_attn=True has no counterpart",
        ),
        (
            lambda: Attention.from_torch(nn.MultiheadAttention(12, 4, add_bias_kv=True)),
            ParameterError,
            "add_bias_kv=True has no counterpart",
        ),
    ],
)
def test_what_does_not_fit_is_said(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_certified_answers_keep_a_tolerance_relative_to_the_answer() -> None:
    certificate = Attention(12, 4).certified(torch.randn(2, 9, 12), rtol=1e-2).certificate
    assert certificate.relative <= 1e-2
    with pytest.raises(ToleranceUnreachable, match=r"rtol=1e-09 is below"):
        Attention(12, 4).certified(torch.randn(2, 9, 12), rtol=1e-9)


def test_causal_landmarks_are_warned_of_once_and_in_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    nn_attention._warn_of_landmarks.cache_clear()
    module, x = Attention(12, 4, "low_rank", rank=4, causal=True), torch.randn(2, 9, 12)
    module.eval()(x)
    Attention(12, 4, "low_rank", rank=4)(x)
    assert caplog.messages == []
    for _ in range(2):
        module.train()(x)
    (told,) = caplog.messages
    assert told.startswith(
        "low_rank chooses its landmarks among all keys: in training, causal positions learn something"
    )
