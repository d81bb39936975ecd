"""avow inside other people's libraries. Each is optional, and loaded when it is first used."""

from typing import TYPE_CHECKING

from avow.core.lazy_modules import lazy_modules

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_modules(__name__, ("transformers",))
