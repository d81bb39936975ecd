"""Is a plan safe for a model? Its predictions beside exact attention's, and the certificates of every layer."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from avow.core import Certificate, Problem
from avow.core.record import Record, record
from avow.errors import ParameterError
from avow.integrations.transformers.enabling import as_it_was, own_cache, without
from avow.integrations.transformers.hooks import watching
from avow.integrations.transformers.layers import pretrained
from avow.integrations.transformers.model_plan import ModelPlan, apply, read_plan
from avow.numerics.heads import longest_seen
from avow.numerics.softmax import softmax_average
from avow.parameters import declared

# Rows of each answer that are recomputed in float64 and held against their bounds.
_AUDITED = 4


@dataclass(frozen=True)
class Verdict:
    """What a plan did to a model on one text. Only certificates are proved, of layers; the rest was measured."""

    plan: ModelPlan
    tokens: int
    places: int
    """Predictions compared: the text's last tokens, each predicted from all before it."""
    exact_perplexity: float
    perplexity: float
    agreement: float
    """The share of places whose likeliest token is the same."""
    divergence: float
    """The mean of KL(exact ‖ plan), in nats."""
    largest_divergence: float
    generated: int
    matched: int
    """How many tokens, written greedily after the text, are the same before the first that differs."""
    certificates: Record
    largest_error: float
    """The largest true error among the rows that were recomputed in float64."""
    audited: int
    kept: bool
    """Whether every one of those is within its own bound."""
    seconds: float

    @property
    def change(self) -> float:
        """The relative change in perplexity."""
        return self.perplexity / self.exact_perplexity - 1

    @property
    def partial(self) -> int:
        """How many answers of layers were not from all tokens: where there is none, the plan changes nothing here."""
        return sum(certificate.method != "exact" for _, certificate in self.certificates)

    @property
    def within(self) -> bool:
        """Whether every layer's certificate promises the plan's tolerance, or more."""
        return self.certificates.keeps(self.plan.tol)

    def plain(self) -> dict[str, Any]:
        """The verdict as JSON has it."""
        names = "tokens places exact_perplexity perplexity change agreement divergence largest_divergence generated"
        names += " matched partial largest_error audited kept within seconds"
        plain = {name: getattr(self, name) for name in names.split()}
        bounds = {name: max(x.bound for x in found) for name, found in self.certificates.layers.items()}
        planned = {"model": self.plan.model, "fingerprint": self.plan.fingerprint, "tol": self.plan.tol}
        return {"plan": planned | {"heads": self.plan.heads, "changed": self.plan.changed}, **plain, "bounds": bounds}


@declared()
@torch.no_grad()
def verify(model: Any, plan: ModelPlan | str | Path, ids: Tensor, places: int = 128, generate: int = 32) -> Verdict:
    """The model's predictions under a plan beside its own, for the last `places` tokens of a text (1, n), and beyond.

    The text before them is read once, by the model as it is. Under the plan the rest is read as `generate()` writes it:
    token by token, from the cache that it uses. The model is left as it was.
    """
    started = time.perf_counter()
    made, model = plan if isinstance(plan, ModelPlan) else read_plan(plan), pretrained(model)
    _check(model, ids, places, generate)
    with as_it_was(model):
        apply(model, made)
        start = ids.shape[1] - places - 1
        past = own_cache(model)
        with without(model):
            model.base_model(ids[:, :start], past_key_values=past, use_cache=True)
            exact, written = _read_on(model, [ids[:, start:]], copy.deepcopy(past), generate)
        audit = _Audit()
        with record() as certificates, watching(audit):
            planned, rewritten = _read_on(model, ids[:, start:].split(1, 1), past, generate)
    return _verdict(
        made, ids, exact[:-1], planned[:-1], written, rewritten, certificates, audit, time.perf_counter() - started
    )


def _check(model: Any, ids: Tensor, places: int, generate: int) -> None:
    decodes = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
    if not decodes:
        rule = "does not predict the next token of a text"
        raise ParameterError("model", type(model).__name__, rule, "verify plans of decoder-only language models")
    for name, value, least in (("places", places, 1), ("generate", generate, 0)):
        if value < least:
            raise ParameterError(name, value, f"must be at least {least}", f"try {name}=32")
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ParameterError("ids.shape", tuple(ids.shape), "must be (1, length)", "pass one text")
    if ids.shape[1] < places + 2:
        rule = f"is too short a text to predict its last {places} from at least one before them"
        raise ParameterError("tokens", ids.shape[1], rule, "give a longer text or ask for fewer places")


def _read_on(model: PreTrainedModel, parts: Iterable[Tensor], past: Any, generate: int) -> tuple[Tensor, list[int]]:
    """The logits of all these tokens, (n, words), and the tokens that are likeliest one after another behind them."""
    read = [model(ids, past_key_values=past, use_cache=True).logits[0].float() for ids in parts]
    logits, written = torch.cat(read), []
    last = logits[-1]
    for _ in range(generate):
        written.append(int(last.argmax()))
        ids = torch.tensor([written[-1:]], device=logits.device)
        last = model(ids, past_key_values=past, use_cache=True).logits[0, -1]
    return logits, written


def _verdict(
    plan: ModelPlan,
    ids: Tensor,
    exact: Tensor,
    planned: Tensor,
    written: list[int],
    rewritten: list[int],
    certificates: Record,
    audit: _Audit,
    seconds: float,
) -> Verdict:
    truth = ids[0, -len(exact) :]
    logs = [functional.log_softmax(x.double(), -1) for x in (exact, planned)]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).clamp(min=0)
    perplexity = [float(functional.nll_loss(x, truth).exp()) for x in logs]
    same = [a == b for a, b in zip(written, rewritten, strict=True)]
    return Verdict(
        plan=plan,
        tokens=ids.shape[1],
        places=len(exact),
        exact_perplexity=perplexity[0],
        perplexity=perplexity[1],
        agreement=float((exact.argmax(-1) == planned.argmax(-1)).double().mean()),
        divergence=float(kl.mean()),
        largest_divergence=float(kl.amax()),
        generated=len(written),
        matched=same.index(False) if False in same else len(same),
        certificates=certificates,
        largest_error=audit.largest,
        audited=audit.rows,
        kept=audit.kept,
        seconds=seconds,
    )


class _Audit:
    """A watcher that recomputes some rows of every answer in float64, by the definition of attention."""

    def __init__(self) -> None:
        self.largest, self.rows, self.kept = 0.0, 0, True

    def __call__(self, layer: str, problem: Problem, out: Tensor, certificate: Certificate) -> None:
        n = problem.q.shape[-2]
        index = torch.linspace(0, n - 1, min(_AUDITED, n), dtype=torch.float64).long().to(out.device)
        some = problem.rows(index)
        truth = softmax_average(some)
        most = longest_seen(some, torch.linalg.vector_norm(some.v.double(), dim=-1))
        off = torch.linalg.vector_norm(out[:, :, index].double() - truth, dim=-1)
        errors = torch.where(most > 0, off / most.clamp(min=1e-300), off)
        bounds = certificate.rows.reshape(1, -1, n)[..., index.to(certificate.rows.device)].to(errors.device)
        # What float64 rounds in the truth itself is far below what any float32 answer can be proved to.
        self.kept = self.kept and bool((errors <= bounds + 1e-12).all())
        self.largest = max(self.largest, float(errors.amax()))
        self.rows += errors.numel()
