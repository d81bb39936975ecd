"""Modules of random and of impossible shapes: what decodes equals what reads at once, what cannot be made says why."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avow.errors import AvowError
from avow.methods import all_methods
from avow.nn import (
    Attention,
    ModelConfig,
    RecurrentCell,
    Rotary,
    Sinusoidal,
    build,
    check_permutation_equivariance,
    gradient_horizon,
)
from tests.soak.calls import NUMBERS, ODD
from tests.soak.turns import Case, Found, Wrong, tried

# Counts that there is memory for.
FEW = tuple(x for x in ODD if not isinstance(x, int) or x < 10**6)
SMALL: dict[str, Any] = {
    "low_rank": {"rank": 2},
    "random_features": {"features": 8},
    "latent": {"segment": 3},
    "separable": {"temperature": 2.0},
}


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Modules drawn from seeds alone."""
    yield lambda seed: random.Random(seed).choice((_model, _model, _attention, _cell, _oddities))(seed)


def _config(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 3, 4))
    attention = rng.choice([*all_methods(), "latent"])
    config: dict[str, Any] = {
        "vocabulary": rng.choice((1, 2, 9)),
        "block": rng.choice((1, 2, 7, 16)),
        "layers": rng.choice((1, 2, 3, 4)),
        "heads": heads,
        "key_heads": rng.choice((None, 1, heads, 2)),
        "width": heads * rng.choice((1, 2, 4, 6)),
        "attention": attention,
        "settings": SMALL.get(attention, {}) if rng.random() < 0.8 else {},
        "positions": rng.choice(("learned", "sinusoidal", "rotary")),
        "dropout": rng.choice((0.0, 0.1, 0.9)),
        "latents": rng.choice((1, 2, 5)),
        "latent_layers": rng.choice((1, 2)),
    }
    if rng.random() < 0.15:
        config[rng.choice(list(config))] = rng.choice(ODD)
    return config


def _model(seed: int) -> Found:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    given = _config(rng)
    config = tried(lambda: ModelConfig(**given))
    if isinstance(config, AvowError):
        return Found("no config")
    if ModelConfig.from_json(config.to_json()) != config:
        raise Wrong("a config that does not come back from JSON")
    if config.layers * config.width * max(config.vocabulary, config.block) > 1e6:
        return Found("too large")
    model = tried(lambda: build(config))
    if isinstance(model, AvowError):
        return Found("no model")
    model.eval()
    dtype = rng.choice((torch.float32, torch.float32, torch.float64))
    model.to(dtype)
    length, batch = rng.choice((1, config.block, rng.randint(1, config.block))), rng.choice((1, 2))
    ids = torch.randint(config.vocabulary, (batch, length))
    if rng.random() < 0.2:
        ids = _wrong_ids(rng, ids, config)
        found = tried(lambda: model(ids))
        return Found("ids refused" if isinstance(found, AvowError) else "odd ids read")
    whole = tried(lambda: model(ids))
    if isinstance(whole, AvowError):
        return Found(f"{config.attention} refused to read")
    whole = whole.detach()
    if whole.shape != (batch, length, config.vocabulary) or not bool(torch.isfinite(whole).all()):
        raise Wrong(f"logits {tuple(whole.shape)}, or nan in them")
    other = build(config).to(dtype).eval()
    other.load_state_dict(model.state_dict())
    if not torch.equal(other(ids), whole):
        raise Wrong("the same weights answer otherwise")
    return _decoded(rng, model, config, ids, whole)


def _decoded(rng: random.Random, model: Any, config: ModelConfig, ids: torch.Tensor, whole: torch.Tensor) -> Found:
    """Token by token, in parts of random lengths, from copies of a cache: the same as at once."""
    cache = tried(lambda: model.start(ids.shape[0]))
    if isinstance(cache, AvowError):
        return Found(f"{config.attention} does not decode")
    parts, first = [], 0
    while first < ids.shape[1]:
        last = min(ids.shape[1], first + rng.choice((1, 1, 2, 5)))
        if rng.random() < 0.3:
            before = copy.deepcopy(cache)
            model.step(torch.zeros_like(ids[:, :1]), before)
            _ = tried(functools.partial(model.step, torch.zeros(7, 1, dtype=torch.long), cache))
        logits, cache = model.step(ids[:, first:last], cache)
        parts.append(logits)
        first = last
    stepped = torch.cat(parts, 1)
    if cache.length != ids.shape[1]:
        raise Wrong(f"a cache of {cache.length} tokens after {ids.shape[1]}")
    gap = float((stepped - whole).abs().max() / whole.abs().max().clamp(min=1e-3))
    if gap > (1e-3 if whole.dtype == torch.float32 else 1e-9):
        raise Wrong(f"{config.attention}: token by token differs by {gap:.1e}")
    if cache.length == config.block and not isinstance(tried(lambda: model.step(ids[:, :1], cache)), AvowError):
        raise Wrong("more tokens than the block were read")
    return Found(f"{config.attention} decodes")


def _wrong_ids(rng: random.Random, ids: torch.Tensor, config: ModelConfig) -> Any:
    return rng.choice(
        (
            ids + config.vocabulary,
            ids - 1,
            ids.double(),
            ids[0],
            ids[:, :0],
            ids.repeat(1, config.block + 1),
            ids.bool(),
            None,
            [[1]],
            ids.int(),
        )
    )


def _attention(seed: int) -> Found:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice((1, 2, 4))
    width = heads * rng.choice((1, 2, 4))
    method = rng.choice(list(all_methods()))
    options: dict[str, Any] = {
        "key_heads": rng.choice((None, 1, heads)),
        "cross": rng.random() < 0.3,
        "causal": rng.random() < 0.5,
        "dropout": rng.choice((0.0, 0.5)),
        "bias": rng.random() < 0.5,
        **(SMALL.get(method, {}) if rng.random() < 0.8 else {}),
    }
    if width // heads % 2 == 0 and rng.random() < 0.3:
        options["positions"] = Rotary(width // heads, 12)
    if rng.random() < 0.1:
        options[rng.choice(("key_heads", "dropout", "rank", "nonsense"))] = rng.choice(ODD)
    made = tried(lambda: Attention(width, heads, method, **options))
    if isinstance(made, AvowError):
        return Found("no attention")
    made.eval()
    size = rng.choice((1.0, 1.0, 1e-20, 1e15))
    x = size * torch.randn(rng.choice((1, 2)), rng.choice((0, 1, 5, 12)), width)
    context = torch.randn(x.shape[0], rng.choice((1, 6, 12)), width) if made.cross else None
    keys = x.shape[1] if context is None else context.shape[1]
    mask = torch.rand(x.shape[0], keys) < rng.choice((0.0, 0.5)) if rng.random() < 0.4 else None
    if rng.random() < 0.1:
        x = rng.choice((x[0], x[..., :-1]))
    if rng.random() < 0.1:
        mask = rng.choice((torch.ones(3, 3), torch.ones(x.shape[0], keys), torch.ones(keys, dtype=torch.bool)))
    out = tried(lambda: _one_kind(x, context, made, mask))
    if isinstance(out, AvowError):
        return Found("not read")
    if not bool(torch.isfinite(out).all()):
        raise Wrong(f"{method}: nan or inf out of {size:g}")
    certified = tried(lambda: made.certified(x, context, mask, tol=rng.choice((None, 0.1, 1e-9))))
    if not isinstance(certified, AvowError) and not bool(torch.isfinite(certified.out).all()):
        raise Wrong(f"{method}: nan or inf, certified")
    if method == "exact" and made.positions is None and context is None:
        back = Attention.from_torch(made.to_torch(), causal=made.causal).eval()
        torch.testing.assert_close(back(x, mask=mask), out, rtol=1e-4, atol=1e-5 * max(1.0, size))
    return Found(f"{method} reads")


def _one_kind(x: torch.Tensor, context: Any, made: Attention, mask: Any) -> torch.Tensor:
    """What a module gives; types that do not meet are torch's own affair, as in any of its modules."""
    try:
        return made(x, context, mask).detach()
    except RuntimeError as error:
        if "dtype" in str(error) and x.dtype != torch.float32:
            return torch.zeros(1)
        raise


def _cell(seed: int) -> Found:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    options: list[Any] = [rng.choice((1, 2, 5)), rng.choice((1, 3, 8)), rng.choice(("tanh", "relu", "sigmoid"))]
    if rng.random() < 0.1:
        options[rng.randrange(3)] = rng.choice(FEW)
    options.append(rng.choice(("inside", "outside")))
    made = tried(lambda: RecurrentCell(*options))
    if isinstance(made, AvowError):
        return Found("no cell")
    size = rng.choice((1.0, 1.0, 0.0, 1e-160, 30.0, 1e150, 1e-300))
    made.to(rng.choice((torch.float32, torch.float64)))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(min(size, 1e30) if weight.dtype == torch.float32 else size)
    steps: Any = rng.choice((1, 3, 20)) if rng.random() < 0.9 else rng.choice(FEW)
    inputs = None
    if rng.random() < 0.7 and type(steps) is int and 0 <= steps < 99:
        kind = next(made.parameters()).dtype
        inputs = rng.choice((1.0, 1e-9, 1e9)) * torch.randn(steps, options[0], dtype=kind)
    found = tried(lambda: gradient_horizon(made, steps, inputs))
    if isinstance(found, AvowError):
        return Found("no horizon")
    str(found)
    for name in ("bound", "product", "measured"):
        value = getattr(found, name, None)
        if isinstance(value, float) and value != value:
            raise Wrong(f"a horizon's {name} is nan")
    return Found("horizon")


def _oddities(seed: int) -> Found:
    """Things of the wrong kind where modules are made or checked."""
    rng = random.Random(seed)
    odd = rng.choice(NUMBERS)
    asked = rng.randrange(6)
    calls: list[Any] = [
        lambda: Rotary(odd, 4),
        lambda: Rotary(4, odd),
        lambda: Sinusoidal(odd, 4),
        lambda: Sinusoidal(4, 4, odd),
        lambda: check_permutation_equivariance(nn.Identity(), torch.randn(1, 3, 2), odd),
        lambda: check_permutation_equivariance(
            nn.Identity(), odd if rng.random() < 0.5 else torch.zeros(1, 3, 2), 2, odd
        ),
    ]
    found = tried(calls[asked])
    return Found("refused" if isinstance(found, AvowError) else "made")
