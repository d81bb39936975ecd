"""JSON schemas: made from a class, met by all that is written, and by nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema_rs
import pytest
import torch

import avow
from avow.core.schema import json_schema


def faults(document: Any, schema: dict[str, Any]) -> list[str]:
    """What a validator says against a document, and against the schema itself."""
    jsonschema_rs.meta.validate(schema)
    return [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(document)]


def certificates() -> list[avow.Certificate]:
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    features = {"method": "random_features", "features": 64}
    attended = [
        avow.attend(q, k, v),
        avow.attend(q, k, v, method="separable", tol=0.1),
        avow.attend(0.1 * q, 0.1 * k, v, confidence=0.9, **features),
        avow.attend(0.1 * q, 0.1 * k, v, coverage=0.9, **features),
        avow.attend(q, k, torch.zeros_like(v)),
    ]
    empty = dataclasses.replace(attended[0].certificate, kind="none", reason="nothing is known", cost=None)
    return [*(one.certificate for one in attended), empty]


@pytest.mark.parametrize("rows", [True, False])
def test_every_certificate_follows_its_schema(rows: bool) -> None:
    made = certificates()
    assert {one.kind for one in made} == {"deterministic", "statistical", "sampled", "none"}
    for one in made:
        document = json.loads(one.to_json(rows=rows))
        assert document["schema"] == "avow.certificate/1" and ("rows" in document) == rows
        assert faults(document, avow.Certificate.json_schema()) == []


def test_the_schema_says_what_each_field_means() -> None:
    for name, field in avow.Certificate.json_schema()["properties"].items():
        assert name == "schema" or len(field["description"]) > 10, name


@pytest.mark.parametrize(
    "spoilt",
    [
        {"schema": "avow.certificate/2"},
        {"kind": "certain"},
        {"bound": -1.0},
        {"bound": "small"},
        {"confidence": 1.5},
        {"rows": [1.0]},
        {"rows": {"shape": [1], "values": ["many"]}},
        {"cost": {"flops": 1}},
        {"assumptions": "none"},
        {"method": None},
        {"unheard": 1},
    ],
    ids=str,
)
def test_a_document_that_is_no_certificate_is_refused_by_the_schema(spoilt: dict[str, Any]) -> None:
    document = json.loads(certificates()[0].to_json())
    assert faults(document | spoilt, avow.Certificate.json_schema()) != []
    assert faults({name: document[name] for name in document if name != "method"}, avow.Certificate.json_schema()) != []


def test_a_certificate_of_another_version_is_not_read() -> None:
    text = certificates()[0].to_json()
    with pytest.raises(avow.InputError, match=r"its schema is 'avow\.certificate/2', and this version reads"):
        avow.Certificate.from_json(text.replace("avow.certificate/1", "avow.certificate/2"))


class Inner(TypedDict):
    """A part."""

    size: int
    note: NotRequired[str]


@dataclasses.dataclass
class Outer:
    """The whole.

    More of it.

    Attributes:
        parts: what it is made of.
    """

    parts: tuple[Inner, ...]
    names: Mapping[str, float]
    mood: Literal["calm", "loud"]
    share: Annotated[float, {"type": "number", "maximum": 1}]
    end: str | None = None
    extra: bool = False


GOOD = {"parts": [{"size": 1}], "names": {"a": "inf"}, "mood": "calm", "share": 1, "end": None, "schema": "outer/1"}


def test_schemas_are_made_of_dataclasses_and_typed_dicts() -> None:
    schema = json_schema(Outer, "outer/1", optional=("extra",))
    assert (
        schema["description"] == "The whole." and schema["properties"]["parts"]["description"] == "what it is made of."
    )
    assert faults(GOOD, schema) == [] and faults(GOOD | {"extra": True, "end": "x"}, schema) == []


@pytest.mark.parametrize(
    "spoilt",
    [
        {"parts": [{"size": 1.5}]},
        {"parts": [{}]},
        {"parts": [{"size": 1, "note": 2}]},
        {"names": {"a": "much"}},
        {"mood": "sad"},
        {"share": 2},
        {"end": 3},
        {"extra": 1},
        {"schema": "outer/2"},
    ],
    ids=str,
)
def test_what_does_not_follow_the_class_is_refused(spoilt: dict[str, Any]) -> None:
    assert len(faults(GOOD | spoilt, json_schema(Outer, "outer/1", optional=("extra",)))) == 1


def test_a_type_without_a_schema_is_refused_when_the_schema_is_made() -> None:
    @dataclasses.dataclass
    class Odd:
        what: complex

    with pytest.raises(KeyError):
        json_schema(Odd, "odd/1")
