"""avow inside other people's libraries. Each is optional, and loaded when it is first used."""

from typing import TYPE_CHECKING

from avow.core.lazy_modules import lazy_modules

if TYPE_CHECKING:
    from avow.integrations.transformers import disable as disable
    from avow.integrations.transformers import enable as enable
else:
    _functions = {"enable": "transformers", "disable": "transformers"}
    _needs = dict.fromkeys(("transformers", *_functions), ("transformers", "huggingface_hub", "safetensors"))
    __getattr__, __dir__ = lazy_modules(__name__, ("transformers",), functions=_functions, needs=_needs)
