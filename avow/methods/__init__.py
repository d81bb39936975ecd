"""One file, one method; installed packages add methods of their own by an entry point of the group `avow.methods`.

avow's own methods stand in a table here as well as among the entry points of pyproject.toml (a test holds the two
together): entry points are written when a package is installed, so a checkout that is only on the path has none, and
an editable install has those of the day it was made.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from avow.core import Method
from avow.errors import ParameterError, UnknownMethod, value_text
from avow.parameters import check_parameters, suggestion

GROUP = "avow.methods"
OWN = {
    "exact": "avow.methods.exact:Exact",
    "latent": "avow.methods.latent:Latent",
    "low_rank": "avow.methods.low_rank:LowRank",
    "polynomial": "avow.methods.polynomial:Polynomial",
    "random_features": "avow.methods.random_features:RandomFeatures",
    "separable": "avow.methods.separable:Separable",
    "sparse": "avow.methods.sparse:Sparse",
}


def all_methods() -> dict[str, type[Method]]:
    """Every method by name, `exact` first, the others in the order of their names. One that fails to load is left out.

    The first call warns of each that fails to load; `method_named` says why.

    Returns:
        Classes by name; `avow.attend(..., method=name)` runs them.

    >>> import avow
    >>> list(avow.all_methods())[0]
    'exact'
    """
    return dict(_loaded()[0])


def method_named(name: str) -> type[Method]:
    """The method of that name."""
    methods, failures = _loaded()
    if isinstance(name, str) and name in methods:
        return methods[name]
    if isinstance(name, str) and name in failures:
        raise UnknownMethod("method", repr(name), failures[name], "repair or uninstall the package that provides it")
    remedy = suggestion(name, methods, f"known methods: {', '.join(methods)}")
    if isinstance(name, str) and any(sign in name for sign in ":./\\"):
        # A file or a class was named.
        remedy += f"; one of your own is installed with pip, as an entry point of the group {GROUP}"
    raise UnknownMethod("method", value_text(name), "is not a method", remedy)


def exact_method() -> type[Method]:
    """The method whose only error is rounding."""
    return method_named("exact")


def checked_class(method: str | Method, parameters: Mapping[str, Any]) -> type[Method]:
    """The class of a method that is given by name, with `parameters` that must fit it, or as an object, without."""
    if not isinstance(method, Method):
        kind = method_named(method)
        check_parameters(kind.name, kind, dict(parameters))
        return kind
    for name, value in parameters.items():
        rule = "is given with a method object, which has its own parameters"
        remedy = f"write method={type(method).__name__}(...) with all its parameters"
        raise ParameterError(name, value_text(value), rule, remedy)
    return type(method)


def method_from(method: str | Method, parameters: Mapping[str, Any]) -> Method:
    """The method given by name and parameters, or as an object."""
    kind = checked_class(method, parameters)
    return method if isinstance(method, Method) else kind(**parameters)


def named_form(method: str | Method) -> tuple[str, dict[str, Any]]:
    """A method's name and the parameters it was given, for those who keep names: caches, plans of models."""
    if not isinstance(method, Method):
        return method, {}
    if all_methods().get(method.name) is not type(method):
        remedy = f"make it an entry point of the group {GROUP}, or call avow.attend"
        raise UnknownMethod("method", method, "is not known by its name", remedy)
    default = {p.name: p.default for p in method.declared()}
    return method.name, {name: value for name, value in method.parameters.items() if value != default[name]}


@functools.cache
def _loaded() -> tuple[dict[str, type[Method]], dict[str, str]]:
    """The methods by name, and why others could not be loaded."""
    methods: dict[str, type[Method]] = {}
    failures: dict[str, str] = {}
    own = [EntryPoint(name, value, GROUP) for name, value in OWN.items()]
    for entry in (*own, *sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))):
        if OWN.get(entry.name) == entry.value and entry.name in methods:
            continue
        fault = _fault(entry, methods)
        if fault:
            failures.setdefault(entry.name, fault)
            warnings.warn(f"the method {entry.name!r} ({entry.value}) {fault}", RuntimeWarning, stacklevel=4)
        else:
            methods[entry.name] = entry.load()
    return dict(sorted(methods.items(), key=lambda pair: (pair[0] != "exact", pair[0]))), failures


def _fault(entry: EntryPoint, methods: Mapping[str, type[Method]]) -> str:
    """Why an entry point gives no method; empty if it gives one."""
    if entry.name in methods:
        return f"has a name that is taken by {methods[entry.name].__module__}"
    try:
        kind = entry.load()
    except Exception as error:  # whatever a package raises while it is imported
        return f"could not be loaded ({type(error).__name__}: {error})"
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        return "is not a subclass of avow.Method"
    if kind.__abstractmethods__:
        return f"does not define {', '.join(sorted(kind.__abstractmethods__))}"
    if getattr(kind, "name", None) != entry.name:
        return f"calls itself {getattr(kind, 'name', None)!r}"
    return ""
