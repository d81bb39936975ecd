"""A plan for a whole model: its file, putting it in, whether it is safe (`verify`) and whether it pays (`Speed`)."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from avow import file_io
from avow.core import Certificate, Problem
from avow.core.record import Record, record
from avow.errors import AvowError, FileError, ParameterError
from avow.integrations.transformers import enabling
from avow.integrations.transformers.cache import CertifiedLayer
from avow.integrations.transformers.enabling import Layer, Setting, enabled, pretrained, replaceable
from avow.integrations.transformers.observers import watching
from avow.numerics.heads import longest_seen
from avow.numerics.softmax import softmax_average
from avow.parameters import declared

FORMAT = "avow plan 1"
# Evenly spaced numbers of each parameter that are looked at: training or quantising again moves nearly all of them.
_SAMPLE = 64
# Rows of each answer that are recomputed in float64 and held against their bounds.
_AUDITED = 4
# Ratios of times within this of 1 say nothing on a machine that does other things too.
_ALIKE = 0.03
# Tokens under a plan between two lines about how far `verify` is.
_PORTION = 16
_WARM = 2


@dataclass(frozen=True)
class ModelPlan:
    """How each head of each attention layer attends.

    Attributes:
        model: name of the model.
        fingerprint: that of the weights it was made for.
        tol: the tolerance that every row of every head keeps.
        layers: the setting of each head, by the layer's name.
    """

    model: str
    fingerprint: str
    tol: float
    layers: Mapping[str, tuple[Setting, ...]]

    def __repr__(self) -> str:
        return (
            f"<ModelPlan of {self.model}: {self.changed} of {self.heads} heads within {self.tol:g}, the others exact>"
        )

    @property
    def changed(self) -> int:
        """How many heads may answer with an error."""
        return sum(setting.tol is not None for heads in self.layers.values() for setting in heads)

    @property
    def heads(self) -> int:
        return sum(len(heads) for heads in self.layers.values())

    def to_json(self) -> str:
        """The plan as its file has it, a line for each head.

        Returns:
            The JSON.
        """
        about = {"format": FORMAT, "model": self.model, "fingerprint": self.fingerprint, "tol": self.tol}
        layers = []
        for name, heads in self.layers.items():
            lines = ",\n".join(f"   {json.dumps(_plain(setting))}" for setting in heads)
            layers.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        start = json.dumps(about, indent=1).removesuffix("\n}")
        return "\n".join([f'{start},\n "layers": {{', ",\n".join(layers), " }", "}", ""])

    @staticmethod
    def from_json(text: str) -> ModelPlan:
        """The plan that `to_json` wrote.

        Args:
            text: the JSON.

        Returns:
            The plan.

        Raises:
            InputError: this is not a plan.
        """
        plain = json.loads(text)
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, not {FORMAT!r}")
        layers = {str(name): tuple(_setting(head) for head in heads) for name, heads in plain["layers"].items()}
        return ModelPlan(str(plain["model"]), str(plain["fingerprint"]), float(plain["tol"]), layers)


def _plain(setting: Setting) -> dict[str, Any]:
    plain = {"confidence": setting.confidence, "rtol": setting.rtol, "parameters": dict(setting.parameters) or None}
    given = {name: value for name, value in plain.items() if value is not None}
    return {"method": setting.method, "tol": setting.tol, **given}


def _setting(plain: dict[str, Any]) -> Setting:
    known = {field.name for field in dataclasses.fields(Setting)}
    if unknown := sorted(set(plain) - known):
        raise ValueError(f"{unknown[0]!r} is not a setting of a head")
    return Setting(**{"tol": plain["tol"], "method": plain["method"], **plain})


@declared()
def read_plan(path: str | Path) -> ModelPlan:
    """The plan in a file.

    Args:
        path: the file.

    Returns:
        The plan.

    Raises:
        FileError: the file is missing or is not a plan.
    """
    try:
        return ModelPlan.from_json(file_io.read_document(Path(path)))
    except FileNotFoundError as error:
        raise FileError("plan", path, "does not exist", "write one with avow profile MODEL --plan") from error
    except OSError as error:
        raise FileError("plan", path, f"cannot be read ({error.strerror})", "name a readable file") from error
    except AvowError as error:
        raise FileError("plan", path, f"holds a wrong setting ({error})", "profile the model again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is not a plan for a model ({type(error).__name__}: {error})"
        raise FileError("plan", path, rule, "write one with avow profile MODEL --plan") from error


def check_places(tokens: int, places: int) -> None:
    """Raise if a text of so many tokens does not have so many last ones to predict."""
    if tokens < places + 2:
        rule = f"is too short a text to predict its last {places} from at least one before them"
        raise ParameterError("tokens", tokens, rule, f"use {places + 2} tokens or more, or fewer places")


def _loaded(plan: ModelPlan | str | Path) -> ModelPlan:
    return plan if isinstance(plan, ModelPlan) else read_plan(plan)


@declared()
def apply(model: Any, plan: ModelPlan | str | Path) -> None:
    """Make each head of a model attend as a plan, or the file of one, says; `disable` undoes it.

    A plan that was made for another model is refused, and the model stays as it was. When a text is continued, layers
    whose heads all have the method `auto` and one tolerance read the tokens that may matter, if their cache finds that
    this pays; the others read all tokens, once for all heads. A text that is read at once is answered by each head's
    method. If that cannot prove the tolerance, the answer is exact, and its certificate says so.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        plan: a `ModelPlan`, or the path of its file.

    Raises:
        ParameterError: this is not such a model, or the plan is for another one.
        FileError: the file is missing or is not a plan.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> plan = avow_transformers.profile(model, torch.arange(48)[None]).plan
    >>> avow_transformers.apply(model, plan)
    >>> avow_transformers.disable(model)
    """
    plan, model = _loaded(plan), pretrained(model)
    own = fingerprint(model)
    if own != plan.fingerprint:
        rule = f"was made for a model with the fingerprint {plan.fingerprint}, and this one's is {own}"
        raise ParameterError("plan", plan.model, rule, "run avow profile on this model")
    modules = replaceable(model)
    if list(modules) != list(plan.layers):
        missing = sorted(set(modules) ^ set(plan.layers)) or list(modules)
        rule = f"does not name the model's attention layers ({missing[0]})"
        raise ParameterError("plan", plan.model, rule, "run avow profile on this model")
    many = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    for name, heads in plan.layers.items():
        if many is not None and len(heads) != many:
            raise ParameterError("heads of the plan", len(heads), f"must be the model's {many} in {name}", "profile it")
    enabling.enable(model)
    for name, module in modules.items():
        enabling.mark(module, Layer(name, Setting(), plan.layers[name]))


def fingerprint(model: nn.Module) -> str:
    """Twelve hexadecimal digits that change with any parameter's name, shape, type or sampled numbers."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLE, flat.numel()), dtype=torch.float64).long()
        numbers = flat[places.to(flat.device)].double().cpu().tolist()
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype), numbers)).encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Statement:
    """The certificates of one run, and its logits beside those of the model as it was before.

    Attributes:
        certificates: those of all layers.
        change: the largest difference in any logit that is not padding's.
        agreement: the share of places whose largest logit is the same.
        places: how many places were compared.
    """

    certificates: Record
    change: float
    """The largest difference in any logit that is not padding's."""
    agreement: float
    """The share of places whose largest logit is the same."""
    places: int

    def __str__(self) -> str:
        measured = f"measured: logits changed by at most {self.change:.1e}; the likeliest token is the same at "
        return f"{self.certificates}\n{measured}{self.agreement:.2%} of {self.places} places"


@declared()
@torch.no_grad()
def statement(model: Any, **inputs: Any) -> Statement:
    """What is proved of every layer for these inputs, and what is measured of the logits; runs the model twice.

    Args:
        model: one in which avow is enabled.
        **inputs: what the model is called with, such as `input_ids`.

    Returns:
        The certificates, and how far logits are from those of the model without avow.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> avow_transformers.enable(model, tol=1e-2)
    >>> avow_transformers.statement(model, input_ids=torch.arange(9)[None]).agreement
    1.0
    """
    model = pretrained(model)
    enabling.check_enabled(model)

    def logits() -> Tensor:
        """One row for each place that is not padding: its logits, or the first output of a model that has none."""
        outputs, mask = model(**inputs), inputs.get("attention_mask")
        rows: Tensor = outputs["logits"] if "logits" in outputs else outputs[0]
        return rows.flatten(0, -2) if mask is None or mask.shape != rows.shape[:-1] else rows[mask.bool()]

    with record() as certificates:
        here = logits()
    with enabling.without(model):
        there = logits()
    if not here.numel():
        return Statement(certificates, 0.0, 1.0, 0)
    return Statement(certificates, float((here - there).abs().amax()), _agreement(here, there), len(here))


def _agreement(a: Tensor, b: Tensor) -> float:
    """The share of rows whose largest entry is at the same place."""
    return float((a.argmax(-1) == b.argmax(-1)).double().mean())


@dataclass(frozen=True)
class Verdict:
    """What a plan did to a model on one text. Only certificates are proved, of layers; the rest was measured.

    Attributes:
        plan: the plan.
        tokens: length of the text.
        places: predictions compared: the text's last tokens, each predicted from all before it.
        exact_perplexity: that of the model as it is.
        perplexity: that under the plan.
        agreement: the share of places whose likeliest token is the same.
        divergence: the mean of KL(exact ‖ plan), in nats.
        largest_divergence: the largest of any place.
        generated: tokens written after the text, greedily.
        matched: how many of them are the same before the first that differs.
        certificates: those of all layers.
        largest_error: the largest true error among the rows that were recomputed in float64.
        audited: how many rows those are.
        kept: whether every one of them is within its own bound.
        seconds: what finding out took.
    """

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
        """How many answers of layers were not from all tokens: if there is none, the plan changes nothing here."""
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
        bounds = {name: max(x.bound for x in layer) for name, layer in self.certificates.layers.items()}
        planned = {name: getattr(self.plan, name) for name in ("model", "fingerprint", "tol", "heads", "changed")}
        return {"plan": planned, **plain, "bounds": bounds}


@declared()
@torch.no_grad()
def verify(
    model: Any,
    plan: ModelPlan | str | Path,
    ids: Tensor,
    places: int = 128,
    generate: int = 32,
    tell: Callable[[str], None] = lambda step: None,
) -> Verdict:
    """The model's predictions under a plan beside its own, for the last `places` tokens of a text (1, n), and beyond.

    The text before them is read once, by the model as it is. Under the plan the rest is read as `generate()` writes it:
    token by token, from the cache that it uses. The model is left as it was.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        plan: a `ModelPlan` for it, or the path of its file.
        ids: the text, (1, n).
        places: how many of its last tokens are predicted.
        generate: how many tokens are written after it.
        tell: called with a line about each step, `verify_steps(places, generate)` in all; those from the third on take
            about as long as each other.

    Returns:
        Perplexities, divergences, matching tokens, certificates and an audit.

    Raises:
        ParameterError: the plan is for another model, or the text is too short.
    """
    started = time.perf_counter()
    plan, model = _loaded(plan), pretrained(model)
    _check_decoder(model, "does not predict the next token of a text", "verify plans of")
    for name, value, least in (("places", places, 1), ("generate", generate, 0)):
        if value < least:
            raise ParameterError(name, value, f"must be at least {least}", f"try {name}=32")
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ParameterError("ids.shape", tuple(ids.shape), "must be (1, length)", "pass one text")
    check_places(ids.shape[1], places)

    def portion(read: int) -> None:
        if read % _PORTION == 0:
            last = min(read + _PORTION, places + 1 + generate)
            tell(f"tokens {read + 1} to {last} of {places + 1 + generate} under the plan")

    with enabling.as_it_was(model):
        apply(model, plan)
        start = ids.shape[1] - places - 1
        past = enabling.own_cache(model)
        with enabling.without(model):
            tell("the text before, by exact attention")
            model.base_model(ids[:, :start], past_key_values=past, use_cache=True)
            tell(f"{places + 1 + generate} tokens by exact attention")
            exact, written = _read_on(model, [ids[:, start:]], copy.deepcopy(past), generate)
        audit = _Audit()
        with record() as certificates, watching(audit):
            planned, rewritten = _read_on(model, ids[:, start:].split(1, 1), past, generate, portion)
    logs = [functional.log_softmax(x[:-1].double(), -1) for x in (exact, planned)]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).clamp(min=0)
    perplexity = [float(functional.nll_loss(x, ids[0, -places:]).exp()) for x in logs]
    same = [a == b for a, b in zip(written, rewritten, strict=True)]
    return Verdict(
        plan=plan,
        tokens=ids.shape[1],
        places=places,
        exact_perplexity=perplexity[0],
        perplexity=perplexity[1],
        agreement=_agreement(exact[:-1], planned[:-1]),
        divergence=float(kl.mean()),
        largest_divergence=float(kl.amax()),
        generated=len(written),
        matched=same.index(False) if False in same else len(same),
        certificates=certificates,
        largest_error=audit.largest,
        audited=audit.rows,
        kept=audit.kept,
        seconds=time.perf_counter() - started,
    )


def verify_steps(places: int, generate: int) -> int:
    """How many steps `verify` tells of."""
    return 2 + math.ceil((places + 1 + generate) / _PORTION)


def _check_decoder(model: PreTrainedModel, rule: str, verb: str) -> None:
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ParameterError("model", type(model).__name__, rule, f"{verb} decoder-only language models")


def _read_on(
    model: PreTrainedModel,
    parts: Iterable[Tensor],
    past: Any,
    generate: int,
    tell: Callable[[int], None] = lambda read: None,
) -> tuple[Tensor, list[int]]:
    """The logits of all these tokens, (n, words), and the tokens that are likeliest one after another behind them.

    `tell` is called before each call of the model, with the number of tokens that were read.
    """
    read = 0

    def logits_of(ids: Tensor) -> Tensor:
        nonlocal read
        tell(read)
        read += ids.shape[1]
        logits: Tensor = model(ids, past_key_values=past, use_cache=True).logits[0]
        return logits

    logits = torch.cat([logits_of(ids).float() for ids in parts])
    written: list[int] = []
    last = logits[-1]
    for _ in range(generate):
        written.append(int(last.argmax()))
        last = logits_of(torch.tensor([written[-1:]], device=logits.device))[-1]
    return logits, written


class _Audit:
    """A watcher that recomputes some rows of every answer in float64, and compares their errors with their bounds."""

    def __init__(self) -> None:
        self.largest, self.rows, self.kept = 0.0, 0, True

    def __call__(self, layer: str, problem: Problem, out: Tensor, certificate: Certificate) -> None:
        n = problem.q.shape[-2]
        index = torch.linspace(0, n - 1, min(_AUDITED, n), dtype=torch.float64).long().to(out.device)
        some = problem.rows(index)
        truth = softmax_average(some)
        most = longest_seen(some, torch.linalg.vector_norm(some.v.double(), dim=-1))
        distance = torch.linalg.vector_norm(out[:, :, index].double() - truth, dim=-1)
        errors = torch.where(most > 0, distance / most.clamp(min=1e-300), distance)
        bounds = certificate.rows.reshape(1, -1, n)[..., index.to(certificate.rows.device)].to(errors.device)
        # What float64 rounds in the truth itself is far below what any float32 answer can be proved to.
        self.kept = self.kept and bool((errors <= bounds + 1e-12).all())
        self.largest = max(self.largest, float(errors.amax()))
        self.rows += errors.numel()


@dataclass(frozen=True)
class Speed:
    """Milliseconds for a token behind `tokens` others, medians over rounds in which all three took turns.

    On a CPU this is processor time, of all threads together, which other programs disturb least; on a GPU it is the
    time that passed. Ratios are medians of each round's own.

    Attributes:
        tokens: length of the text before.
        rounds: how often all three took turns.
        as_it_is: without avow.
        enabled: with avow enabled at the plan's tolerance.
        planned: under the plan.
        enabled_ratio: enabled over without.
        planned_ratio: planned over without.
        clock: what was measured: processor time, or the time that passed.
    """

    tokens: int
    rounds: int
    as_it_is: float
    enabled: float
    planned: float
    enabled_ratio: float
    planned_ratio: float
    clock: str

    @property
    def verdict(self) -> str:
        """Whether the plan pays here."""
        if self.planned_ratio < 1 - _ALIKE:
            return f"the plan pays here: {self.planned_ratio:.2f} of the time"
        if self.enabled_ratio < 1 - _ALIKE:
            return f"enabling avow pays here ({self.enabled_ratio:.2f} of the time), a plan beside it does not"
        return "the plan does not pay here"


@declared()
@torch.no_grad()
def decoding_speed(model: Any, plan: ModelPlan, ids: Tensor, rounds: int = 12) -> Speed:
    """The cost of one more token behind the tokens (1, n): without avow, with it enabled at the plan's tolerance, and
    under the plan, from the caches that `generate()` uses. The model is left as it was.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        plan: a plan for it.
        ids: the text, (1, n).
        rounds: how often all three take turns.

    Returns:
        Milliseconds for a token, and ratios.

    Raises:
        ParameterError: the plan is for another model, or the text is too short.
    """
    model = pretrained(model)
    _check_decoder(model, "does not write a text token by token", "measure")
    if rounds < 1:
        raise ParameterError("rounds", rounds, "must be at least 1", "try rounds=12")
    with enabling.as_it_was(model):
        if enabled(model):
            enabling.disable(model)
        past = DynamicCache(config=model.config.get_text_config(decoder=True))
        model.base_model(ids, past_key_values=past, use_cache=True)
        return speed_behind(model, plan, past, ids[:, -1:], rounds)


@torch.no_grad()
def speed_behind(model: PreTrainedModel, plan: ModelPlan, past: DynamicCache, ids: Tensor, rounds: int) -> Speed:
    """The cost of the tokens (1, 1) behind what a cache holds, which grows; avow must not be enabled in the model."""
    tokens, on_cpu = past.get_seq_length(), ids.device.type == "cpu"
    turns: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: enabling.enable(model, plan.tol),
        lambda: apply(model, plan),
    )
    caches: list[Any] = [past]
    for switch in turns[1:]:
        with enabling.as_it_was(model):
            switch()
            caches.append(_filled(model, past))
    times: list[list[float]] = [[], [], []]  # of each turn, in each round
    for i in range(rounds + _WARM):
        for turn in ((i + offset) % 3 for offset in range(3)):
            with enabling.as_it_was(model):
                turns[turn]()
                start = _clock(on_cpu)
                model(ids, past_key_values=caches[turn], use_cache=True)
                times[turn].append(1e3 * (_clock(on_cpu) - start))
    warm = [x[_WARM:] for x in times]
    a, b, c = (statistics.median(x) for x in warm)
    ratios = [statistics.median(x / y for x, y in zip(other, warm[0], strict=True)) for other in warm[1:]]
    return Speed(tokens, rounds, a, b, c, ratios[0], ratios[1], "processor time" if on_cpu else "time")


def _filled(model: PreTrainedModel, past: DynamicCache) -> Any:
    """The cache that `generate()` would have now, with what another one holds."""
    cache = enabling.own_cache(model)
    for i, other in enumerate(past.layers):
        if isinstance(cache.layers[i], CertifiedLayer):
            cache.layers[i].update(other.keys, other.values)
        else:
            cache.layers[i] = copy.deepcopy(other)
    return cache


def _clock(on_cpu: bool) -> float:
    if on_cpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
