"""Models keep a tolerance relative to each layer's own answers, from a text read at once and while they generate."""

from __future__ import annotations

import json
import math

import pytest
import torch

import avow
from avow.errors import ParameterError, ToleranceUnreachable
from avow.integrations.transformers import enable
from avow.integrations.transformers.enabling import Setting
from avow.integrations.transformers.model_plan import _plain, _setting
from tests.helpers.tiny_models import ARCHITECTURES

LLAMA = ARCHITECTURES[0]


def test_every_layer_keeps_a_relative_tolerance() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs()
    enable(model, rtol=1e-5)
    with torch.no_grad(), avow.record() as certificates:
        model(**inputs)
    assert len(certificates) == 2 and certificates.keeps(rtol=1e-5)
    assert 0 < certificates.relative <= 1e-5 and certificates.bound < certificates.relative
    assert certificates.relative == max(certificate.relative for _, certificate in certificates)
    assert not certificates.keeps(certificates.bound, certificates.relative / 2)
    assert "of answer" in str(certificates) and "relative to the true answer's own length" in str(certificates)
    for found in json.loads(certificates.to_json()).values():
        assert all(0 < one["relative"] <= 1e-5 for one in found)
    with pytest.raises(ParameterError, match=r"^tol, rtol=None, None must not both be left out"):
        certificates.keeps()


def test_generation_keeps_a_relative_tolerance() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs()
    enable(model, tol=1e-2, rtol=1e-3)
    with avow.record() as certificates:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert len(certificates) == 6 and certificates.keeps(1e-2, 1e-3)


def test_a_model_refuses_a_relative_tolerance_that_nothing_proves() -> None:
    model, inputs = LLAMA.build(), LLAMA.inputs()
    with pytest.raises(ParameterError, match=r"^rtol=-1 must be a number above 0"):
        enable(model, rtol=-1)
    enable(model, rtol=1e-15)
    with torch.no_grad(), pytest.raises(ToleranceUnreachable, match=r"^rtol=1e-15 is below"):
        model(**inputs)


def test_what_is_asked_of_a_head_survives_a_file() -> None:
    for setting in (Setting(1e-2), Setting(rtol=0.1), Setting(1e-2, "low_rank", 0.9, {"rank": 4}, 0.5)):
        assert _setting(json.loads(json.dumps(_plain(setting)))) == setting
    assert Setting().exact and not Setting(rtol=0.1).exact and math.isclose(Setting(rtol=0.1).rtol or 0, 0.1)
