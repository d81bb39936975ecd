"""JSON schemas of what avow writes, from the types of the class that it writes.

A document says which schema it follows: `"schema": "avow.certificate/1"`. The number grows when a reader of the older
documents could not read the newer ones. What fields mean is taken from the class's docstring. If a type alone says too
little, the schema stands beside it: `Annotated[float, {"type": "number", "minimum": 0}]`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from torch import Tensor

from avow.core.docstring import parse

# JSON has no infinities and no nan: they are written as words.
_NUMBER: dict[str, Any] = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
_PLAIN: dict[Any, dict[str, Any]] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: _NUMBER,
    types.NoneType: {"type": "null"},
    Tensor: {
        "type": "object",
        "properties": {
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "values": {"type": "array", "items": _NUMBER},
        },
        "required": ["shape", "values"],
        "additionalProperties": False,
    },
}


def json_schema(kind: type, name: str, optional: Collection[str] = ()) -> dict[str, Any]:
    """The schema, in JSON Schema's dialect of 2020-12, of documents that hold the fields of a class.

    Args:
        kind: a dataclass or a `TypedDict`, whose fields are the document's.
        name: what the document's field `schema` says, such as `avow.certificate/1`.
        optional: the fields that a document may leave out; those that a `TypedDict` marks so may be, too.

    Returns:
        The schema as a dictionary, for `json.dumps` or a validator.
    """
    document = _fields(kind, optional)
    document["properties"] = {"schema": {"const": name}} | document["properties"]
    document["required"] = ["schema", *document["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, **document}


def _fields(kind: type, optional: Collection[str] = ()) -> dict[str, Any]:
    """The schema of an object with the fields of a class."""
    hints, described = typing.get_type_hints(kind, include_extras=True), parse(kind.__doc__)
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(hints)
    left_out = {*optional, *(name for name in names if typing.get_origin(hints[name]) is NotRequired)}
    properties = {}
    for name in names:
        words = {"description": described.described[name]} if name in described.described else {}
        properties[name] = words | _type(hints[name])
    return {
        "type": "object",
        "description": described.text.partition("\n\n")[0],
        "properties": properties,
        "required": [name for name in names if name not in left_out],
        "additionalProperties": False,
    }


def _type(hint: Any) -> dict[str, Any]:
    """The schema of a type."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return dict(inside[1])
    if origin is NotRequired:
        return _type(inside[0])
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(one) for one in inside]}
    if origin is Literal:
        return {"enum": list(inside)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(inside[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _type(inside[0])}
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _fields(hint)
    return dict(_PLAIN[hint])
