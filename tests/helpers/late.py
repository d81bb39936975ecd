"""Answers whose certificates are stated when somebody looks, for those who judge certificates."""

from __future__ import annotations

from avow import deferred
from avow.attend import Attended
from avow.core import Method, Problem


def stated_later(method: Method, p: Problem) -> Attended | None:
    """The answer as a call without a tolerance gives it on a GPU; None if that promises nothing."""
    if not deferred.fits(method, p):
        return None
    out, lengths = deferred.answer(method, p.with_norms(None))
    certificate = deferred.certificate(deferred.Origin.of(method, p), lengths)
    return None if certificate.kind == "none" else Attended(out.reshape(*p.leading, *out.shape[-2:]), certificate)
