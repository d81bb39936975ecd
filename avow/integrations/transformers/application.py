"""Putting a plan into a model, head by head."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from avow.errors import ParameterError
from avow.integrations.transformers.fingerprint import fingerprint
from avow.integrations.transformers.layers import Layer, mark, replaceable
from avow.integrations.transformers.model_plan import ModelPlan, read_plan
from avow.integrations.transformers.setting import Setting
from avow.integrations.transformers.switch import enable


def apply(model: PreTrainedModel, plan: ModelPlan | str | Path) -> None:
    """Have each head of a model attend as a plan, or the file of one, says; `disable` takes it back.

    A plan that was made for another model is refused, and the model stays as it was. `sparse` heads read the tokens
    that may matter when they go on from a text; a text that is read at once is answered in the cheapest way that keeps
    the tolerance. Where a head's method cannot prove its tolerance, that answer is exact, and its certificate says so.
    """
    made = plan if isinstance(plan, ModelPlan) else read_plan(plan)
    if not isinstance(model, PreTrainedModel):
        rule = "must be a transformers.PreTrainedModel"
        raise ParameterError("model", type(model).__name__, rule, "pass a model that transformers made")
    own = fingerprint(model)
    if own != made.fingerprint:
        rule = f"was made for a model with the fingerprint {made.fingerprint}, and this one's is {own}"
        raise ParameterError("plan", made.model, rule, "run avow profile on this model")
    found = replaceable(model)
    if list(found) != list(made.layers):
        missing = sorted(set(found) ^ set(made.layers)) or list(found)
        rule = f"does not name the model's attention layers ({missing[0]})"
        raise ParameterError("plan", made.model, rule, "run avow profile on this model")
    many = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    for name, heads in made.layers.items():
        if many is not None and len(heads) != many:
            raise ParameterError("heads of the plan", len(heads), f"must be the model's {many} in {name}", "profile it")
    enable(model)
    for name, module in found.items():
        mark(module, Layer(name, Setting(), made.layers[name]))
