"""A plan for a whole model put into it: the integration that knows the model's library is loaded at use."""

from __future__ import annotations

from typing import Any


def apply(model: Any, plan: Any) -> None:
    """Have each head of a Hugging Face model attend as a plan says; `plan` is one, or the path of its file.

    `avow profile` writes plans; `avow.integrations.transformers.disable` takes this one back. A plan that was made for
    another model is refused, and the model stays as it was.
    """
    from avow.integrations.transformers.model_plan import apply as into

    into(model, plan)
