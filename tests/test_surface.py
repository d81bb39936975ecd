"""The names avow offers: a list held here on purpose, so that it changes only on purpose."""

from __future__ import annotations

import types

import pytest

import avow

PUBLIC = {
    "Attended",
    "AttentionAudit",
    "Audit",
    "AvowError",
    "Certificate",
    "Cost",
    "InputError",
    "Method",
    "Plan",
    "Problem",
    "Record",
    "Sizes",
    "ToleranceUnreachable",
    "__version__",
    "all_methods",
    "apply",
    "attend",
    "audit",
    "auditing",
    "bound_quantised",
    "bound_selection",
    "features_needed",
    "plan",
    "look",
    "plan_decode",
    "record",
    "scaled_dot_product_attention",
}


def faults(surface: types.ModuleType) -> list[str]:
    """What is wrong with the public names of a module, in words."""
    listed = list(getattr(surface, "__all__", []))
    found = [f"{name} is missing from __all__" for name in sorted(PUBLIC - set(listed))]
    found += [f"{name} is offered but not held here" for name in sorted(set(listed) - PUBLIC)]
    found += [f"{name} is listed twice" for name in sorted({name for name in listed if listed.count(name) > 1})]
    for name in sorted(PUBLIC & set(listed)):
        if not hasattr(surface, name):
            found.append(f"{name} does not resolve")
        elif not name.startswith("__") and not described(getattr(surface, name)):
            found.append(f"{name} has no docstring")
    return found


def described(thing: object) -> bool:
    """Whether someone wrote a docstring; a dataclass writes `Name(field, ...)` into the gap by itself."""
    text = thing.__doc__ or ""
    return bool(text.strip()) and not text.startswith(f"{getattr(thing, '__name__', '')}(")


def test_the_public_names_are_these_and_each_is_described() -> None:
    assert faults(avow) == []


class _Undescribed:
    __doc__ = None


def whole() -> types.ModuleType:
    """A surface with nothing to complain about."""
    module = types.ModuleType("surface")
    module.__dict__.update({name: types.SimpleNamespace(__doc__="Something.") for name in PUBLIC})
    module.__dict__["__all__"] = sorted(PUBLIC)
    return module


def test_a_whole_surface_has_no_faults() -> None:
    assert faults(whole()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"__all__": sorted(PUBLIC - {"plan"})}, "plan is missing from __all__"),
        ({"__all__": sorted(PUBLIC | {"helper"}), "helper": print}, "helper is offered but not held here"),
        ({"__all__": [*sorted(PUBLIC), "plan"]}, "plan is listed twice"),
        ({"attend": _Undescribed}, "attend has no docstring"),
    ],
)
def test_a_spoilt_surface_is_caught(change: dict[str, object], fault: str) -> None:
    surface = whole()
    surface.__dict__.update(change)
    assert faults(surface) == [fault]


def test_a_name_that_does_not_resolve_is_caught() -> None:
    surface = whole()
    del surface.__dict__["attend"]
    assert faults(surface) == ["attend does not resolve"]
