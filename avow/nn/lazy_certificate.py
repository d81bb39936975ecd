"""A certificate that is completed when somebody looks at it.

Decoding hands out one for every layer and token, and few are read. What a certificate rests on is captured when the
answer is given (norms and lengths, never tensors that others may write into), so a late look states the same bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from avow.core import Certificate


class LazyCertificate(Certificate):
    """A certificate some of whose fields are computed at the first look at any of them."""

    @staticmethod
    def of(later: Callable[[], dict[str, Any]], **known: Any) -> LazyCertificate:
        """The certificate with the fields `known` now; `later` gives the others, once."""
        made = LazyCertificate.__new__(LazyCertificate)
        made.__dict__.update(known, _later=later)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are complete certificates."""
        return _complete, ({field.name: getattr(self, field.name) for field in dataclasses.fields(Certificate)},)


class _Late:
    """A field that is not there yet; once it is, the certificate's own entry is found before this one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, certificate: Any, owner: type) -> Any:
        if certificate is None:
            return self
        fields = certificate.__dict__
        # Two threads may look at once: then both complete it, to the same.
        if (later := fields.get("_later")) is not None:
            known = {name: value for name, value in fields.items() if name != "_later"}
            fields.update(vars(Certificate(**(later() | known))))
            fields.pop("_later", None)
        return fields[self._name]


def _complete(fields: dict[str, Any]) -> Certificate:
    return Certificate(**fields)


for _field in dataclasses.fields(Certificate):
    setattr(LazyCertificate, _field.name, _Late(_field.name))
