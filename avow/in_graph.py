"""`attend` inside of `torch.compile`: one operator, so that no compiler changes the arithmetic that a bound is about.

The operator runs `attend` as it runs outside of a graph. What its certificate says leaves the graph as tensors, and is
put together when somebody looks. Calls that need gradients, a generator or a `Method` object end the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import torch
from torch import Tensor

from avow import deferred
from avow.core import Certificate, LazyCertificate
from avow.deferred import Origin

# Room for what a certificate says beside its rows; a longer reason is cut off.
_ROOM = 2**14
_SAID_IN_WORDS = (bool, int, float, str, type(None))


def spoken(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """The options of a call as the operator takes them; empty if it cannot answer this call."""
    plain = {name: x for name, x in options.items() if name not in ("mask", "attn_mask")}
    if torch.compiler.is_exporting() or len(arguments) != 3 or plain.pop("generator", None) is not None:
        return ""
    if not all(isinstance(x, _SAID_IN_WORDS) for x in plain.values()):
        return ""
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments):
        return ""
    return _words(**plain)


def _words(**options: Any) -> str:
    return json.dumps(options)


# For the compiler, which need not look inside: words follow from what a graph is made for.
vars(_words).update(_dynamo_marked_constant=True)


def attend(words: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Certificate]:
    """The answer and its certificate, by the operator."""
    masks = options.get("mask"), options.get("attn_mask")
    out, rows, own, said = torch.ops.avow.attend(q, k, v, *masks, words)
    if said.numel():
        return out, LazyCertificate.of(functools.partial(_reported, rows, own, said))
    kept = tuple(None if x is None else x.clone() for x in masks)
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    return out, LazyCertificate.of(functools.partial(_stated, words, shapes, q.dtype, q.device, kept, rows))


def _origin(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor | None, ...], words: str) -> Origin | None:
    """What a promise rests on that is stated later; None if all of it is stated at once."""
    from avow.attend import later_method

    if deferred.waits_freely(q.device) or any(x is not None and x.dtype != torch.bool for x in masks):
        return None
    options = json.loads(words) | {"mask": masks[0], "attn_mask": masks[1]}
    problem, method = later_method(q, k, v, **options)
    return None if method is None else Origin.of(method, problem)


# Written out, since annotations may be those of a wrapper that checks shapes.
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? attn_mask, str words) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("avow::attend", mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.nondeterministic_seeded,))
def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_mask: Tensor | None, words: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The answer; the bounds of rows in both units, and the rest of the certificate in JSON.

    If the certificate is stated later: the answer, the lengths that it follows from, and nothing twice.
    """
    from avow.attend import attend as attend_eagerly

    origin = _origin(q, k, v, (mask, attn_mask), words)
    if origin is not None:
        out, lengths = deferred.answer(origin.method, origin.filled(q, k, v))
        return out.reshape(*q.shape[:-1], v.shape[-1]), lengths, *_nothing(q)
    out, certificate = attend_eagerly(q, k, v, mask=mask, attn_mask=attn_mask, **json.loads(words))
    said = certificate.to_json(rows=False).encode()
    if len(said) > _ROOM:
        said = dataclasses.replace(certificate, reason=certificate.reason[: _ROOM // 8]).to_json(rows=False).encode()
    room = torch.frombuffer(bytearray(said.ljust(_ROOM)), dtype=torch.uint8)
    return out, certificate.rows.clone(), certificate.relative_rows.clone(), room


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_mask: Tensor | None, words: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, rows = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float64)
    if _origin(q, k, v, (mask, attn_mask), words) is None:
        return out, rows, torch.empty_like(rows), torch.empty(_ROOM, dtype=torch.uint8, device="cpu")
    many = sum(math.prod(x.shape[:-1]) for x in (q, k, v, q))
    return out, q.new_empty(many, dtype=torch.float64), *_nothing(q)


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.uint8, device="cpu")


def _reported(rows: Tensor, own: Tensor, said: Tensor) -> dict[str, Any]:
    plain = json.loads(bytes(said.tolist()))
    whole = {"shape": [0], "values": []}
    known = Certificate.from_json(json.dumps(plain | {"rows": whole, "relative_rows": whole}))
    return vars(known) | {"rows": rows.detach(), "relative_rows": own.detach()}


def _stated(
    words: str,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    masks: tuple[Tensor | None, ...],
    lengths: Tensor,
) -> dict[str, Any]:
    q, k, v = (torch.zeros(1, dtype=dtype, device=device).expand(shape) for shape in shapes)
    origin = _origin(q, k, v, masks, words)
    assert origin is not None
    return deferred.certificate_fields(origin, lengths.detach())
