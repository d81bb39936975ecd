"""The fault matrix inside models: `python -m tests.faults_transformers`.

Small random models of some architectures, in every type, by every method that models take, under every switch of
`tests.faults`. What each layer was given is caught before avow sees it, and its answer is held to its certificate by
`tests.helpers.truth`. A case is left out, and counted, where the model itself fails without avow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import avow
from avow.errors import AvowError
from avow.integrations.transformers import enable
from tests.faults import FLOATS, SWITCHES, Answer, Outcome, Report, _judged, _refusal
from tests.faults import Case as Call
from tests.helpers import tiny_models
from tests.helpers.truth import Question

MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration")
ASKED: dict[str, dict[str, Any]] = {
    "exact": {},
    "auto": {"tol": 1e-2},
    "auto statistical": {"tol": 0.1, "confidence": 0.9},
    "low_rank": {"method": "low_rank", "rank": 1},
    "sparse": {"method": "sparse", "tol": 1e-2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its type, what avow is asked, a switch, how it runs, and its seed."""

    model: str
    dtype: str
    method: str
    switch: str
    run: str
    seed: int

    def __str__(self) -> str:
        return f"{self.model}, {self.run}, {self.method}, {self.dtype}, switch: {self.switch}"


def cases(seed: int = 0) -> list[Case]:
    """Every model in every type by every method; every model under every switch, in two types by two methods."""
    rng = random.Random(seed)
    runs = ("forward", "padded", "generate")
    found = [
        Case(model, dtype, method, "none", rng.choice(runs), rng.getrandbits(32))
        for model, dtype, method in itertools.product(MODELS, FLOATS, ASKED)
    ]
    for model, switch in itertools.product(MODELS, list(SWITCHES)[1:]):
        for method in rng.sample(list(ASKED), 2):
            found.append(Case(model, rng.choice(list(FLOATS)), method, switch, rng.choice(runs), rng.getrandbits(32)))
    return found


def run_case(case: Case) -> Outcome | None:
    """Run the model under the switch, judge every layer's answer outside of it; None where the model itself fails."""
    torch.manual_seed(case.seed)
    (architecture,) = (one for one in tiny_models.ARCHITECTURES if one.name == case.model)
    model = architecture.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.normal_(0, 6)
            elif name.endswith(("q.weight", "q_proj.weight", "query.weight")):
                weight.mul_(5)  # sharp heads, whose logits are large
    model.to(FLOATS[case.dtype])
    given = architecture.inputs("left" if case.run == "padded" else "")
    call = Call("attend", case.method, case.dtype, (("switch", case.switch),), case.seed)
    if case.switch == "gradients":
        case = dataclasses.replace(case, run="forward")
    with warnings.catch_warnings(), contextlib.suppress(AvowError):
        warnings.simplefilter("ignore")
        model.set_attn_implementation("eager")
        try:
            with SWITCHES[case.switch]():
                _ran(case, model, given)
        except Exception:  # whatever a model raises without avow is its own affair
            return None
        model.set_attn_implementation("sdpa")
    try:
        with warnings.catch_warnings(), _caught() as answers:
            warnings.simplefilter("ignore")
            enable(model, **ASKED[case.method])
            with SWITCHES[case.switch]():
                _ran(case, model, given)
    except AvowError as error:
        return _refusal(call, error)
    except Exception as error:  # any other error is what the matrix looks for
        return Outcome(call, wrong=f"{type(error).__name__}: {str(error)[:200]}")
    total = Outcome(call)
    for answer in answers:
        total = _judged(total, answer)
    if not answers:
        return total._replace(wrong="no layer asked avow")
    return total._replace(wrong=total.wrong and f"{case}: {total.wrong}")


def _ran(case: Case, model: Any, given: dict[str, Tensor]) -> None:
    if case.run == "generate" and model.can_generate():
        some = {name: x for name, x in given.items() if name != "decoder_input_ids"}
        model.generate(**some, max_new_tokens=4, do_sample=False)
        return
    with torch.set_grad_enabled(case.switch == "gradients"):
        model(**given)


@contextlib.contextmanager
def _caught() -> Iterator[list[Answer]]:
    """What every layer was given, and what it answered."""
    inner, found = ALL_ATTENTION_FUNCTIONS["avow"], []

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        with avow.record() as record:
            result = inner(module, query, key, value, mask, **more)
        (entry,) = record
        certificate = entry.certificate
        # As SDPA has it: autocast leaves float64 alone.
        narrowed = torch.is_autocast_enabled("cpu") and query.dtype != torch.float64
        cast = torch.get_autocast_dtype("cpu") if narrowed else query.dtype
        q, k, v = (x.detach().to(cast).clone() for x in (query, key, value))
        hidden = _hidden(q, k, mask, more.get("is_causal"), module, more.get("position_bias"))
        question = Question(q, k, v, hidden, scale=more.get("scaling"))
        out = result[0].transpose(1, 2)
        found.append(Answer(question, out, certificate.rows, certificate.kind, certificate.confidence))
        return result

    AttentionInterface.register("avow", watched)
    try:
        yield found
    finally:
        AttentionInterface.register("avow", inner)


def _hidden(q: Tensor, k: Tensor, mask: Any, causal: Any, module: Any, bias: Any) -> Tensor | None:
    """The mask and the bias of positions as one float64 mask, with −inf where a key is hidden.

    Models write numbers near the lowest of a type where they mean −inf.
    """
    n, s = q.shape[-2], k.shape[-2]
    total = torch.zeros(1, 1, n, s, dtype=torch.float64, device="cpu")
    if mask is None:
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and n > 1:
            seen = torch.ones(n, s, dtype=torch.bool, device="cpu").tril()
            total = total.masked_fill(~seen, -torch.inf)
    elif mask.dtype == torch.bool:
        total = total.masked_fill(~mask, -torch.inf)
    else:
        total = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if bias is None:
        return total
    shown = bias.detach().double()
    return torch.where(shown <= torch.finfo(bias.dtype).min / 2, -torch.inf, shown) + total


def main() -> int:
    """Print what was found; 1 where a certificate was broken."""
    torch.set_num_threads(1)
    report, failed = Report(), []
    for case in cases():
        outcome = run_case(case)
        if outcome is None:
            failed.append(case)
            continue
        report.add(outcome)
        if outcome.wrong:
            print(case, outcome.wrong, sep="\n    ", flush=True)
    print(report)
    print(f"{len(failed)} cases whose model fails without avow, under: {sorted({case.switch for case in failed})}")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
