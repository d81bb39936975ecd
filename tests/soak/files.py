"""Files and texts that avow reads, after accidents: read as what they say, or refused; never a traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import safetensors.torch
import torch

import avow
from avow import calibration
from avow.bench import workloads
from avow.calibration import Rate
from avow.calibration_file import forget_memory
from avow.core import Certificate
from avow.core.compose import compose
from avow.errors import AvowError
from avow.integrations.transformers import ModelPlan, Setting, read_plan
from avow.nn import ModelConfig
from avow.training import TrainConfig, read_config, read_corpus
from tests.helpers.runs import small
from tests.soak.damage import bytes_of, text_of
from tests.soak.turns import Case, Found, Wrong, tried


class Kind(NamedTuple):
    """A file: its name, what a good one holds, how it is read, and what must be true of anything that was read."""

    name: str
    good: Callable[[random.Random], bytes]
    read: Callable[[Path], Any]
    holds: Callable[[Any], object] = str
    names_path: bool = True


@contextlib.contextmanager
def surface(folder: Path) -> Iterator[Case]:
    """Every kind of file, in a folder of its own."""
    home = folder / "files"
    home.mkdir()
    config = small(folder)
    kinds = _kinds(config, folder)

    def case(seed: int) -> Found:
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache"), "AVOW_CALIBRATION": "on"}):
            return read(seed)

    def read(seed: int) -> Found:
        rng = random.Random(seed)
        kind = rng.choice(kinds)
        path = home / kind.name
        good = kind.good(rng)
        whole = rng.random() < 0.1
        binary = path.suffix in (".safetensors", ".toml", ".txt", ".tsv")
        data = good if whole else bytes_of(rng, good) if binary else text_of(rng, good.decode()).encode()
        path.write_bytes(data)
        found = tried(lambda: kind.read(path))
        if path.read_bytes() != data:
            raise Wrong(f"{kind.name} was changed by reading it")
        if isinstance(found, AvowError):
            if whole:
                raise Wrong(f"a good {kind.name} was refused: {found}")
            if kind.names_path and str(path) not in str(found):
                raise Wrong(f"{kind.name}: a refusal that does not name the file: {found}")
            return Found(f"{kind.name} refused")
        said = tried(lambda: kind.holds(found))
        return Found(f"{kind.name} {'unfit' if isinstance(said, AvowError) else 'read'}")

    yield case


def certificate_of(rng: random.Random) -> Certificate:
    """A certificate of a small call."""
    q = torch.randn(1, 2, rng.choice((1, 3)), 4, generator=torch.Generator().manual_seed(rng.getrandbits(30)))
    method = rng.choice(("exact", "low_rank", "random_features", "sparse", "separable", "latent"))
    options: dict[str, Any] = {"rank": 1} if method == "low_rank" else {}
    return avow.attend(q, q, q, method=method, **options).certificate


def check_certificate(found: Certificate) -> None:
    """What is true of every certificate, wherever it came from."""
    if found.kind not in ("deterministic", "statistical", "sampled", "none"):
        raise Wrong(f"a certificate of kind {found.kind!r} was read")
    numbers = (found.bound, found.confidence, found.coverage)
    if not all(isinstance(x, float | int) and x >= 0 for x in numbers) or max(numbers[1:]) > 1:
        raise Wrong(f"a certificate with {numbers} was read")
    if found.rows.numel() and not bool((found.rows >= 0).all()):
        raise Wrong("a certificate with rows below zero, or nan, was read")
    if found.rows.numel() and float(found.rows.amax()) > found.bound:
        raise Wrong("a certificate whose bound is below a row's was read")
    if found.cost is not None:
        _ = found.cost + found.cost
    if not str(found) or Certificate.from_json(found.to_json()) != found:
        raise Wrong("a certificate that does not come back again")
    found.keeps(0.1)
    tried(lambda: compose([found, found], 0))


def check_rates(found: calibration.Rates) -> None:
    """Predicted times are numbers, whatever stands in the file."""
    for kind in avow.all_methods().values():
        for method in kind.grid(SIZES):
            seconds = found.seconds(method, SIZES)
            if not 0 <= seconds < math.inf:
                raise Wrong(f"{method.name} would take {seconds} s")


SIZES = avow.Problem.of(*(torch.zeros(1, 1, 8, 4) for _ in range(3))).sizes


def _rates(path: Path) -> calibration.Rates:
    """The rates of a cache that holds what the file does."""
    place = calibration.rates_file("cpu")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(path.read_bytes())
    forget_memory()
    q = torch.zeros(1, 1, 8, 4)
    avow.attend(q, q, q, tol=0.1)
    return calibration.rates("cpu", measure=False)


def _kinds(config: TrainConfig, folder: Path) -> list[Kind]:
    rate = dataclasses.asdict(Rate(1e-6, 1e-10, 1e-12))
    names = [f"{name}{end}" for name in avow.all_methods() for end in ("", "/causal")]
    about = {"date": "2026-01-01T00:00:00+00:00", "fault": ""}
    rates = json.dumps(about | {"found": dict.fromkeys(names, rate)}).encode()
    heads = (Setting(0.1, "sparse"), Setting(), Setting(0.2, "low_rank", 0.9, {"rank": 4}))
    plan = ModelPlan("model", "0" * 16, 0.1, {"a.0": heads, "a.1": heads}).to_json().encode()
    model = ModelConfig(vocabulary=9, width=16, heads=2, settings={}).to_json().encode()
    toml = b'[data]\nsources = ["%s"]\nbatch = 8\n[schedule]\nsteps = 14\n' % str(folder / "corpus").encode()
    corpus = {name: (folder / "corpus" / name).read_bytes() for name in os.listdir(folder / "corpus")}

    def tensors(rng: random.Random) -> bytes:
        made = {name: torch.randn(2, 5, 4) for name in "qkv"}
        more = {"q_positions": torch.arange(5)} if rng.random() < 0.5 else {}
        return safetensors.torch.save(made | more)

    def with_corpus(path: Path) -> Any:
        beside = path.parent.parent / "beside"
        beside.mkdir(exist_ok=True)
        for name, content in corpus.items():
            (beside / name).write_bytes(path.read_bytes() if name == path.name else content)
        return read_corpus(beside)

    return [
        Kind(
            "certificate.json",
            lambda rng: certificate_of(rng).to_json(rng.random() < 0.8).encode(),
            lambda path: Certificate.from_json(path.read_text()),
            check_certificate,
            names_path=False,
        ),
        Kind("plan.json", lambda _: plan, read_plan, lambda made: (made.to_json(), made.changed, made.heads)),
        Kind("rates.json", lambda _: rates, _rates, check_rates, names_path=False),
        Kind("model.json", lambda _: model, lambda path: ModelConfig.from_json(path.read_text()), names_path=False),
        Kind("config.json", lambda _: json.dumps(config.plain()).encode(), read_config, names_path=False),
        Kind("config.toml", lambda _: toml, read_config, names_path=False),
        Kind("run.toml", lambda _: config.to_toml().encode(), read_config, names_path=False),
        Kind("heads.safetensors", tensors, workloads.read, lambda made: avow.attend(made.q, made.k, made.v, tol=0.1)),
        *(Kind(name, lambda _, name=name: corpus[name], with_corpus, names_path=False) for name in corpus),  # type: ignore[misc]
    ]
