"""Every public function, every argument, given what people pass by mistake: an answer, or an error in four parts.

What a module's `forward` is given is left to torch: there it would be looked at in every pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import nn

import avow
from avow import distributed, optim, training
from avow import nn as modules
from avow.errors import AvowError, ParameterError
from avow.integrations import transformers as hugging
from avow.integrations.transformers import Verification
from avow.theory import constructions
from tests.helpers.tiny_models import ARCHITECTURES

WRONG: tuple[Any, ...] = (
    *(None, "words", b"x", True, -1, 0, 1j, 10**30, math.nan, [], {}, [None], ["a"], {"a": 1}, object(), int),
    *(lambda: 0, torch.zeros(0), torch.zeros(2, 2, dtype=torch.int64), torch.full((1, 2, 3), math.nan)),
    *([torch.ones(2)], {"a": torch.ones(2)}),
)
SURFACES = (avow, constructions, modules, optim, training, hugging, distributed)

# What the library makes of an answer, and what its users only read: they hold what they are given.
RECORDS = {
    *(
        "Attended",
        "Audit",
        "Plan",
        "Record",
        "Certificate",
        "Cost",
        "Method",
        "Sizes",
        "Problem",
        "all_methods",
        "record",
        "register",
    ),
    *("AverageQuery", "CopyQuery", "MixtureQuery", "NoiseAnalysis", "Program", "ProjectOut", "RobustHeads", "Router"),
    *("ReluLinear", "ReluSquare", "ReluSquareDeep", "ReluPiecewise"),
    *("Shard", "Equivariance", "GradientHorizon", "Cache"),
    *("Answer", "Bin", "Corpus", "Document", "Outcome", "Progress", "Question", "Reading", "TextLoss", "TokenDocument"),
    *("ByteTokenizer", "FileTokenizer", "IdTokenizer", "Tokenizer", "Trained"),
    *("DecodePlan", "ModelPlan", "Profile", "Speed", "Statement", "Steps", "Verdict"),
}


class Call(NamedTuple):
    """A call that works, every argument by its name."""

    function: Callable[..., Any]
    given: dict[str, Any]


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names of all that may be given by its own name."""
    return [x.name for x in inspect.signature(function).parameters.values() if x.kind is not x.VAR_KEYWORD]


def _attention() -> dict[str, Call]:
    q = torch.randn(1, 2, 5, 4)
    about = {"mask": None, "causal": False, "scale": None, "enable_gqa": False}
    sdpa = {"attn_mask": None, "is_causal": None, "dropout_p": 0.0}
    kernel = {"kernel": "dot", "sigma": None}
    wish = {"tol": 0.1, "rtol": 0.5, "confidence": None, "coverage": None}
    asked = {"q": q, "k": q, "v": q, **about, **kernel}
    certificate = avow.attend(q, q, q).certificate
    few = {name: about[name] for name in ("causal", "scale", "enable_gqa")} | {"is_causal": None}
    drop_in = {"query": q, "key": q, "value": q, **sdpa, "is_causal": False, "scale": None, "enable_gqa": False}
    return {
        "attend": Call(avow.attend, {**asked, **wish, **sdpa, "method": "auto", "generator": None}),
        "plan": Call(avow.plan, {**asked, **wish, **sdpa, "keys": 9}),
        "audit": Call(
            avow.audit,
            {**asked, **sdpa, "out": q, "coverage": 0.9, "confidence": 0.9, "method": "exact", "generator": None},
        ),
        "scaled_dot_product_attention": Call(avow.scaled_dot_product_attention, {**drop_in, "tol": 0.1, "rtol": 0.5}),
        "features_needed": Call(avow.features_needed, {"q": q, "k": q, "tol": 0.1, "confidence": 0.9, **few}),
        "plan_decode": Call(
            avow.plan_decode,
            {"tokens": 64, "heads": 2, "key_heads": 2, "dim": 4, "value_dim": 4, "dtype": torch.float32, "batch": 1}
            | {"queries": 1, "device": "cpu", "kept": 0.1, "window": 64, "tell": str, "again": False}
            | {"layers": 2, "memory": 10**9},
        ),
        "auditing": Call(avow.auditing, {"model": None, "rate": 0.1, "tol": 0.1, "confidence": 0.9, "seed": 0}),
        "AttentionAudit": Call(avow.AttentionAudit, {"rate": 0.1, "tol": 0.1, "confidence": 0.9, "seed": 0}),
        "bound_selection": Call(
            avow.bound_selection,
            {"q": q, "k": q, "v": q, **about, "read": torch.ones(5, 5, dtype=torch.bool)}
            | {"attn_mask": None, "is_causal": None},
        ),
        "bound_quantised": Call(
            avow.bound_quantised,
            {"q": q, "k": q, "v": q, "k_hat": q.clone(), "v_hat": q.clone(), **about}
            | {"key_residuals": None, "value_residuals": None, "attn_mask": None, "is_causal": None},
        ),
        "apply": Call(avow.apply, {"model": ARCHITECTURES[0].build(), "plan": "there is none"}),
        "look": Call(avow.look, {"model": "there is none", "text": "x", "tokenizer": None, "asking": (), "write": 0}),
        "Problem.of": Call(avow.Problem.of, asked),
        "Sizes.with_keys": Call(avow.Problem.of(q, q, q).sizes.with_keys, {"keys": 7}),
        "Certificate.keeps": Call(certificate.keeps, {"tol": 0.1, "rtol": 0.5}),
        "Certificate.from_json": Call(avow.Certificate.from_json, {"text": certificate.to_json()}),
    }


def _constructions() -> dict[str, Call]:
    c, eye, x = constructions, torch.eye(3, dtype=torch.float64), sympy.Symbol("x")
    eps, dtype = {"eps": 0.1}, {"dtype": torch.float64}
    laws = {"GaussianLaw": {"mean": 1.0, "variance": 0.5}, "AnyScale": {"least": 0.5, "most": 2.0}}
    laws["DiscreteLaw"] = {"values": [1, 2], "probabilities": [0.5, 0.5]}  # type: ignore[dict-item]
    heads = {"least": None, "away": True, "keys": None, "tolerance": None, "noisy": 0, "other": 1}
    law = c.GaussianLaw()
    found = {
        "copy_query": {"keys": eye, "target": 0, "shortest": False, **eps, **dtype},
        "average_query": {"keys": eye, "subset": (0, 1), **eps, **dtype},
        "mixture_query": {"keys": eye, "weights": [0.5, 0.5, 0], **eps, **dtype},
        "relu_linear": {"m": 1, "b": 2, "interval": (0, 1), **dtype},
        "relu_square": {"deep": False, **eps, **dtype},
        "relu_piecewise": {"f": sympy.exp(x), "interval": (0, 1), **eps, **dtype},
        "project_out": {"a": torch.tensor([[1.0], [0.0]]), "b": torch.tensor([[1.0], [1.0]])},
        "router": {"tokens": eye, "routes": {0: 1}, "carry": None, **eps},
        "program": {"tokens": eye, "hops": [{0: 1}], "carry": None, "residual": True, **eps},
        "feature_map": {"features": eye, "gains": (1.0, 2.0, 3.0)},
        "route_by_weights": {"beta": 3.0},
        "robust_heads": {"n": 5, "law": law, **heads, **eps, **dtype},
        "noise_analysis": {"n": 5, "heads": [{0: 9.0, 1: 9.0}], "law": law, "eta": 0.1, "noisy": 0, "target": None},
        **laws,
    }
    calls = {name: Call(getattr(c, name), given) for name, given in found.items()}
    for name, given in laws.items():
        calls[f"{name}.probability"] = Call(getattr(c, name)(**given).probability, {"least": 0.0, "most": 1.0})
    return calls


def _modules() -> dict[str, Call]:
    m, linear = modules, nn.Linear(4, 4)
    sizes = {"vocabulary": 9, "block": 64, "layers": 3, "heads": 2, "key_heads": None, "width": 16}
    more = {"attention": "exact", "settings": {}, "positions": "learned", "dropout": 0.0, "latents": 4}
    config, cell = m.ModelConfig(**sizes), m.RecurrentCell(2, 3)  # type: ignore[arg-type]
    latent = dataclasses.replace(config, attention="latent")
    attention = {"method": "exact", "key_heads": None, "cross": False, "causal": False, "dropout": 0.0, "bias": True}
    cache = {
        "value_dim": 4,
        "batch": 1,
        "dtype": torch.float32,
        "device": "cpu",
        "bits": 4,
        "window": None,
        "capacity": None,
    }
    return {
        "ModelConfig": Call(m.ModelConfig, {**sizes, **more, "latent_layers": 1}),
        "ModelConfig.from_json": Call(m.ModelConfig.from_json, {"text": config.to_json()}),
        "ModelConfig.of": Call(m.ModelConfig.of, {"given": sizes}),
        "build": Call(m.build, {"config": config}),
        "TransformerLM": Call(m.TransformerLM, {"config": config}),
        "PerceiverLM": Call(m.PerceiverLM, {"config": latent}),
        "Attention": Call(m.Attention, {"width": 16, "heads": 2, **attention, "positions": None}),
        "Attention.forward": Call(
            m.Attention(4, 2).forward, {"x": torch.randn(1, 5, 4), "context": None, "mask": None, "shard": None}
        ),
        "Block": Call(m.Block, {"width": 16, "attention": m.Attention(16, 2), "dropout": 0.0}),
        "check_permutation_equivariance": Call(
            m.check_permutation_equivariance,
            {"module": linear, "example": (2, 5, 4), "trials": 2, "tolerance": None, "seed": 0},
        ),
        "share_of_heads": Call(
            m.share_of_heads, {**dict.fromkeys("qkv", torch.randn(1, 2, 5, 4)), "tol": 0.1, "scale": 1}
        ),
        "KeyValueCache": Call(m.KeyValueCache, {"key_heads": 2, "dim": 4, "offload": False, "hot": None, **cache}),
        "Learned": Call(m.Learned, {"block": 8, "width": 4}),
        "Sinusoidal": Call(m.Sinusoidal, {"block": 8, "width": 4, "amplitude": 1.0}),
        "Rotary": Call(m.Rotary, {"dim": 4, "block": 8}),
        "RecurrentCell": Call(m.RecurrentCell, {"inputs": 2, "width": 3, "activation": "tanh", "order": "outside"}),
        "gradient_horizon": Call(
            m.gradient_horizon, {"cell": cell, "steps": 4, "inputs": torch.randn(4, 2), "start": torch.zeros(3)}
        ),
    }


def _optim() -> dict[str, Call]:
    linear = nn.Linear(4, 4)
    optimiser, averages = torch.optim.SGD(linear.parameters(), lr=0.1), optim.AveragedWeights(linear)
    adam = {"model": linear, "learning_rate": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
    return {
        "momentum_from_average": Call(optim.momentum_from_average, {"beta": 0.9, "delta": 0.1}),
        "average_from_momentum": Call(optim.average_from_momentum, {"momentum": 0.9, "learning_rate": 0.1}),
        "decay_groups": Call(optim.decay_groups, {"model": linear, "weight_decay": 0.1}),
        "adamw": Call(optim.adamw, {**adam, "fused": False}),
        "adam_l2": Call(optim.adam_l2, {**adam, "fused": False}),
        "warmup_cosine": Call(optim.warmup_cosine, {"optimizer": optimiser, "warmup": 2, "total": 9, "floor": 0.1}),
        "AveragedWeights": Call(optim.AveragedWeights, {"model": linear, "decay": 0.9}),
        "AveragedWeights.load_state_dict": Call(averages.load_state_dict, {"state": averages.state_dict()}),
    }


def _training(folder: Path) -> dict[str, Call]:
    t, corpus, home = training, training.invent(4, 2), folder / "corpus"
    t.write_corpus(corpus, home)
    tokenizer = t.tokenizer_of("characters", corpus)
    flags = ["schedule.steps=1", "model.layers=1", "model.width=16", "model.heads=2", "model.block=64", "data.batch=4"]
    config = t.read_config(flags=[*flags, f"data.sources={home}"])
    model = modules.build(config.model).eval()
    read = {"documents": corpus.documents, "tokenizer": tokenizer, "block": 64}
    spans = t.SpanExamples(**read, seed=0)
    steps = {"accumulate": 1, "rank": 0, "world": 1, "position": 0, "narrowest": 1}
    known = {"model": model, "tokenizer": tokenizer}
    few = corpus.dev[:1]
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found: dict[str, dict[str, Any]] = {
        "invent": {"people": 4, "seed": 2, "documents": 2},
        "write_corpus": {"corpus": corpus, "folder": folder / "again"},
        "read_corpus": {"folder": home},
        "read_documents": {"path": home / "wiki.txt"},
        "read_questions": {"path": home / "train.tsv"},
        "corpus_of": {"name": str(home)},
        "read_data": {"sources": [str(home)]},
        "tokenizer_of": {"name": "bytes", "corpus": corpus},
        "CharacterTokenizer": {"known": "abc"},
        "prompt": {"question": "Where?", "tokenizer": tokenizer, "where": "here"},
        "SpanExamples": {**read, "seed": 0, "spans": None, "after_name": 0.7, "from_start": False},
        "ClozeExamples": {**read, "seed": 0, "window": 8, "bare": 0.3, "spans": None},
        "LanguageExamples": read,
        "QuestionExamples": {"questions": corpus.train, "tokenizer": tokenizer, "block": 64, "loss": "answer"},
        "Spans": {"shortest": 4, "longest": 0.5, "masked": 0.25},
        "Recipe": {"language": 1, "spans": 1, "cloze": 1, "questions": 1, "after_name": 0.7, "window": 24, "bare": 0.3}
        | {"facts": 1, "reverse": 1, "phrasings": 4, "odds": True, "full_name": True, "permuted": True},
        "Mixture": {"parts": [spans], "weights": [1]},
        "Batches": {"examples": spans, "size": 4, "seed": 0, "block": 64, **steps},
        "always": {"answer": "x", "questions": few, "confidence": 1.0},
        "majority": {"train_questions": corpus.train, "dev_questions": few},
        "answers": {**known, "questions": few, "longest": 2},
        "evaluate": {**known, "questions": few, "documents": corpus.documents},
        "sample": {**known, "text": "Where", "length": 2, "temperature": 1.0, "generator": None, "masks": True},
        "text_loss": {**known, "examples": spans, "size": 4},
        "load_model": {"path": folder / "run"},
        "read_config": {"path": None, "flags": flags, "defaults": ()},
        "TrainConfig": sections,
        "train": {
            "config": config,
            "folder": folder / "run",
            "resume": True,
            "progress": None,
            "tell": None,
            "wait": 0.0,
        },
        "Evaluation": {"outcomes": t.always("x", few).outcomes},
    }
    calls = {name: Call(getattr(t, name), given) for name, given in found.items()}
    return calls | {
        "CharacterTokenizer.of": Call(t.CharacterTokenizer.of, {"texts": ["ab", "c"]}),
        "CharacterTokenizer.encode": Call(tokenizer.encode, {"text": "W", "where": "here"}),
        "CharacterTokenizer.decode": Call(tokenizer.decode, {"numbers": [2, 3]}),
        "TrainConfig.of": Call(t.TrainConfig.of, {"values": {"schedule": {"steps": 2}}}),
    }


def _hugging(folder: Path) -> dict[str, Call]:
    h, model, ids = hugging, ARCHITECTURES[0].build(), torch.randint(3, 99, (1, 12))
    plan = folder / "plan.json"
    plan.write_text(h.profile(model, ids).plan.to_json())
    h.enable(model, 0.1)
    return {
        "enable": Call(
            h.enable, {"model": model, "tol": 0.1, "rtol": None, "method": "auto", "confidence": None, "verify": 0}
        ),
        "disable": Call(h.disable, {"model": ARCHITECTURES[0].build()}),
        "Setting": Call(h.Setting, {"tol": 0.1, "rtol": None, "method": "auto", "confidence": None, "parameters": {}}),
        "Verification": Call(h.Verification, vars(h.Verification())),
        "CertifiedCache": Call(
            h.CertifiedCache,
            {"config": model.config, "bits": 4, "offloading": False, "hot": None, "capacity": 64},
        ),
        "profile": Call(
            h.profile, {"model": model, "ids": ids, "tol": 0.1, "budget": 0.5, "name": "small", "tell": print}
        ),
        "read_plan": Call(h.read_plan, {"path": plan}),
        "apply": Call(h.apply, {"model": model, "plan": plan}),
        "statement": Call(lambda model: h.statement(model, input_ids=ids), {"model": model}),
        "decoding_speed": Call(h.decoding_speed, {"model": model, "plan": plan, "ids": ids, "rounds": 1}),
        "verify": Call(h.verify, dict(zip(parameters(h.verify), (model, plan, ids, 2, 1, print), strict=True))),
    }


def _distributed() -> dict[str, Call]:
    q = torch.randn(1, 2, 5, 4)
    asked = {
        "group": None,
        "tol": 0.1,
        "rtol": None,
        "method": "auto",
        "shared_queries": True,
        "mask": None,
        "causal": False,
    }
    more = {"scale": None, "enable_gqa": False, "confidence": None, "generator": None, "link": None}
    more |= {"attn_mask": None, "is_causal": None, "dropout_p": 0.0}
    return {
        "attend": Call(distributed.attend, {"q": q, "k": q, "v": q, **asked, **more}),
        "Interconnect": Call(distributed.Interconnect, {"bandwidth": 1e9, "latency": 1e-5}),
        "ShardedCache": Call(distributed.ShardedCache, {"cache": modules.KeyValueCache(2, 4), "group": None}),
    }


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Call]]:
    """A call that works of every public function, by surface and name, in a group of one process."""
    folder = tmp_path_factory.mktemp("calls")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = {
        "avow": _attention(),
        "avow.theory.constructions": _constructions(),
        "avow.nn": _modules(),
        "avow.optim": _optim(),
        "avow.training": _training(folder),
        "avow.integrations.transformers": _hugging(folder),
        "avow.distributed": _distributed(),
    }
    with contextlib.chdir(folder):  # a word may be a path, and what is written there must go
        yield {f"{surface}.{name}": call for surface, found in made.items() for name, call in found.items()}
    dist.destroy_process_group()


def public(surface: ModuleType) -> Iterator[str]:
    """Names of what a module offers to be called."""
    for name in getattr(surface, "__all__", vars(surface)):
        thing = getattr(surface, name)
        own = getattr(thing, "__module__", "").startswith("avow.") and not name.startswith("_")
        error = isinstance(thing, type) and issubclass(thing, AvowError)
        if own and callable(thing) and not error and name not in RECORDS | {"declared", "as_float", "require"}:
            yield name


# Functions of classes that take what people write or choose.
METHODS = (
    *("avow.Problem.of", "avow.Sizes.with_keys", "avow.Certificate.keeps", "avow.Certificate.from_json"),
    *(f"avow.theory.constructions.{law}.probability" for law in ("GaussianLaw", "AnyScale", "DiscreteLaw")),
    *("avow.nn.ModelConfig.from_json", "avow.nn.ModelConfig.of", "avow.nn.Attention.forward"),
    *(f"avow.training.CharacterTokenizer.{name}" for name in ("of", "encode", "decode")),
    "avow.training.TrainConfig.of",
    "avow.optim.AveragedWeights.load_state_dict",
)
EVERY = sorted({f"{surface.__name__}.{name}" for surface in SURFACES for name in public(surface)} | {*METHODS})


# What a caller's own function raises is the caller's. A process that refused the others would leave its peers waiting.
LEFT = {
    "avow.nn.check_permutation_equivariance": {"module", "example"},
    "avow.integrations.transformers.profile": {"tell"},
    "avow.integrations.transformers.verify": {"tell"},
    "avow.plan_decode": {"tell"},
    # Filled by avow alone.
    "avow.AttentionAudit": {"rate", "tol", "confidence", "seed"},
    "avow.integrations.transformers.Verification": set(Verification.__dataclass_fields__),
    "avow.training.train": {"tell"},
    "avow.distributed.attend": {"shared_queries", "link"},
}


def stumbles(call: Call, left: Collection[str] = ()) -> list[str]:
    """Whatever ends in anything but an answer or an error in four parts, in words."""
    found = []
    for name in call.given.keys() - left:
        for wrong in WRONG:
            try:
                call.function(**{**call.given, name: wrong})
            except AvowError as refusal:
                parts = refusal.name, refusal.rule, refusal.remedy, str(refusal)
                if not all(isinstance(part, str) and part.strip() for part in parts):
                    found.append(f"{name}={wrong!r}: a refusal without its parts, {refusal!r}")
                if "tensor(" in repr(refusal):
                    found.append(f"{name}: a refusal that prints a tensor, {refusal}")
            except Exception as error:
                found.append(f"{name}={wrong!r}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("name", EVERY)
def test_a_wrong_argument_is_refused_in_four_parts(name: str, calls: dict[str, Call]) -> None:
    call = calls[name]
    assert {*call.given} == {*parameters(call.function)}
    assert stumbles(call, LEFT.get(name, ())) == []


def test_a_function_that_stumbles_is_caught() -> None:
    def halved(x: float) -> float:
        return x / 2

    def printing(x: float) -> None:
        raise ParameterError("x", repr(x), "is never right", "leave it out")

    assert any("prints a tensor" in line for line in stumbles(Call(printing, {"x": 1.0})))
    found = stumbles(Call(halved, {"x": 1.0}))
    assert "x=None: TypeError: unsupported operand type(s) for /: 'NoneType' and 'int'" in found
    assert not any(line.startswith("x=-1:") for line in found)
