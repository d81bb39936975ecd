"""SmolLM2-135M, verified, beside itself under SDPA: the same tokens, what they cost, and what the cache takes.

Texts are of kinds that differ in what their heads read. The weights are float32: in bfloat16 the two likeliest words
are often equally likely to the last bit, and SDPA itself answers otherwise when it reads a text in other pieces.
"""

from __future__ import annotations

import gettext
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from avow.bench.results import Goal, Result, Row, tell_row
from avow.integrations.transformers import CertifiedCache, disable, enable
from avow.integrations.transformers.enabling import enabled
from avow.integrations.transformers.model_files import load_model
from benchmarks.extract_heads import TEXTS
from benchmarks.model import FOLDER
from benchmarks.options import Options

DRAFTS, LONG = 16, 7680
TOL = 1e-2
# Two logits that are nearer to each other than this are a tie: what SDPA rounds otherwise when it reads several tokens
# at once was up to a tenth of it.
TIE = 1e-3


def _licences() -> str:
    """Licences of packages that avow needs, as they are installed."""
    files = [file for name in ("numpy", "torch", "transformers") for file in importlib.metadata.files(name) or ()]
    found = [Path(str(file.locate())) for file in files if "LICENSE" in file.name.upper()]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(found) if file.is_file())


def _json() -> str:
    return (Path(torch.__file__).parent / "_dynamo" / "graph_break_registry.json").read_text(encoding="utf-8")


def _german() -> str:
    """What two programs of Debian say in German; nothing if this machine does not have it."""
    said: list[str] = []
    for name in ("bash", "coreutils"):
        if gettext.find(name, "/usr/share/locale", ["de"]):
            catalogue: Any = gettext.translation(name, "/usr/share/locale", ["de"])
            said += [text for text in catalogue._catalog.values() if len(text) > 20]
    return "\n".join(said)


KINDS: dict[str, tuple[int, Callable[[], str]]] = {
    "code": (LONG, TEXTS["code"][1]),
    "licences": (LONG, _licences),
    "JSON": (4096, _json),
    "German": (5120, _german),
}


def run(options: Options) -> list[Result]:
    """The same tokens, and processor time, behind each text."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(options)
    finally:
        torch.set_num_threads(threads)


def _run(options: Options) -> list[Result]:
    loaded = load_model(str(FOLDER))
    model: Any = loaded.model
    written, rounds = (24, 2) if options.quick else (512, 5)
    rows, speeds, remarks, failures = [], [], [], []
    for kind, (many, text) in KINDS.items():
        many = 320 if options.quick else many
        ids = loaded.tokenizer(text()[: 12 * many], return_tensors="pt").input_ids[:, :many]
        if ids.shape[1] < many:
            remarks.append(f"{kind}: left out, this machine has only {ids.shape[1]:,} tokens of it")
            continue
        row, ties, faults, past = compared(model, ids, written)
        rows.append({"text": kind, **row})
        tell_row(rows[-1])
        remarks += [f"{kind}: {tie}" for tie in ties]
        failures += [f"{kind}: {fault}" for fault in faults]
        speeds.append({"text": kind, **speed(model, ids, past, rounds)})
        tell_row(speeds[-1])
    total, same = (sum(int(row[name] or 0) for row in rows) for name in ("tokens", "same"))
    long = [row for row in speeds if int(row["behind"] or 0) >= LONG] or speeds
    slowest = min(float(row["SDPA over verified"] or 0) for row in long)
    return [
        Result(
            f"verified: greedy tokens of SmolLM2-135M, drafts within {TOL:g}, at most {DRAFTS} at once",
            rows,
            [Goal("every token is SDPA's, but for ties", f"{same:,} of {total:,}", not failures)],
            remarks,
            failures,
        ),
        Result(
            "verified: processor time of a token on one thread, in turns",
            speeds,
            [Goal(f"behind {LONG:,} tokens SDPA takes at least as long", f"{slowest:.3g} times", slowest >= 1)],
        ),
    ]


@torch.no_grad()
def compared(model: Any, ids: Tensor, many: int) -> tuple[Row, list[str], list[str], DynamicCache]:
    """How many tokens verified generation writes as SDPA does; behind another token both go on from SDPA's.

    Ties, differences that are none, and SDPA's cache of the text.
    """
    asked = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    _off(model)
    wanted = model.generate(ids, max_new_tokens=many, **asked)
    theirs = wanted.sequences[0]
    closest = min(float(-x[0].topk(2).values.diff()) for x in wanted.logits)
    enable(model, tol=TOL, method="sparse", verify=DRAFTS)
    start, end, same = ids.shape[1], ids.shape[1] + many, 0
    told = []
    ties: list[str] = []
    faults: list[str] = []
    while start < end:
        out = model.generate(theirs[None, :start], max_new_tokens=end - start, **asked)
        told.append(out.past_key_values.verification)
        other = (out.sequences[0, start:end] != theirs[start:end]).nonzero()
        first = int(other[0]) if len(other) else end - start
        same += first
        if start + first < end:
            mine = out.sequences[0, start + first]
            row = wanted.logits[start + first - ids.shape[1]][0]
            gap = float(row.max() - row[mine])
            words = f"token {start + first:,}: SDPA's logits of the two words are {gap:.1e} apart"
            (ties if gap <= TIE else faults).append(words)
        start += first + 1
    disable(model)
    drafted, accepted, redrawn = (sum(getattr(x, name) for x in told) for name in ("drafted", "accepted", "redrawn"))
    row = {
        "behind": ids.shape[1],
        "tokens": many,
        "same": same,
        "drafted": drafted,
        "accepted": accepted / max(1, accepted + redrawn),
        "drafts read": statistics.fmean(x.read for x in told),
        "largest bound": max(x.bound for x in told),
        "closest call": closest,
    }
    past = wanted.past_key_values
    past.crop(ids.shape[1] - past.get_seq_length())
    return row, ties, faults, past


@torch.no_grad()
def speed(model: Any, ids: Tensor, past: DynamicCache, rounds: int) -> Row:
    """Processor time of a token, SDPA's and verified in turns; the bytes of the caches; tokens that are drawn."""
    _off(model)
    mine = CertifiedCache(model.config)
    for layer, other in zip(mine.layers, past.layers, strict=True):
        layer.update(other.keys, other.values)
    caches, last = {"sdpa": past, "verified": mine}, dict.fromkeys(("sdpa", "verified"), ids[:, -1:])
    times: dict[str, list[float]] = {"sdpa": [], "verified": []}
    for _ in range(rounds + 1):
        for way, cache in caches.items():
            if way == "verified":
                enable(model, tol=TOL, method="sparse", verify=DRAFTS)
            # A round ends where a pass does, so that every pass is paid by those who asked for it.
            start, tokens = time.process_time(), 0
            while tokens < 2 * (DRAFTS + 1) or (way == "verified" and mine.drafts.ahead is not None):
                logits = model(last[way], past_key_values=cache).logits
                last[way] = logits[:, -1].argmax(-1, keepdim=True)
                tokens += 1
            times[way].append(1e3 * (time.process_time() - start) / tokens)
            _off(model)
    a, b = times["sdpa"][1:], times["verified"][1:]
    tokens, acceptance = mine.get_seq_length(), mine.verification.acceptance
    held = sum(x.cache.holding.keys.nbytes + x.cache.holding.values.nbytes for x in mine.layers)
    overhead = mine.layers[0].cache.overhead
    theirs = _sampled(model, ids, past)
    enable(model, tol=TOL, method="sparse", verify=DRAFTS)
    mine.drafts = None
    ours = _sampled(model, ids, mine)
    _off(model)
    return {
        "behind": ids.shape[1],
        "SDPA ms": statistics.median(a),
        "verified ms": statistics.median(b),
        "SDPA over verified": statistics.median(x / y for x, y in zip(a, b, strict=True)),
        "accepted": acceptance,
        "rounds": rounds,
        "KiB a token": held / tokens / 1024,
        "verified KiB a token": held * (1 + overhead) / tokens / 1024,
        "sampled": len(theirs),
        "sampled same": int((ours == theirs).cumprod(0).sum()),
        "sampled accepted": mine.verification.acceptance,
    }


def _sampled(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Tokens behind a text that are drawn with the same random numbers every time; a cache holds the text, and more."""
    torch.manual_seed(0)
    cache.crop(ids.shape[1] - 1 - cache.get_seq_length())
    asked = {"do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": None, "max_new_tokens": 128}
    found: Tensor = model.generate(ids, past_key_values=cache, **asked)
    return found[0, ids.shape[1] :]


def _off(model: Any) -> None:
    """The model as it was loaded."""
    if enabled(model):
        disable(model)
