r"""What each head of a model does with a text, what each method can do for it, and the plan that follows.

Figures are of a sample of a head's rows, in float64, and averages are taken over the sampled rows that see two keys or
more. `head_kinds` has the rules by which a head is resting, previous, same, induction, local or wide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from avow.calibration import Rates, rates
from avow.core import Certificate, Kind, Method, Norms, Problem, notebook
from avow.core.certify import certify
from avow.core.timing import least_seconds
from avow.errors import AvowError, ParameterError
from avow.integrations.transformers import enabling
from avow.integrations.transformers.enabling import Setting, pretrained, replaceable, softmax_methods
from avow.integrations.transformers.head_kinds import KINDS, HeadKind, head_kind
from avow.integrations.transformers.model_plan import ModelPlan, Speed, fingerprint
from avow.integrations.transformers.observers import watching
from avow.methods import exact_method, method_named
from avow.numerics.sketch import sketched
from avow.numerics.softmax import softmax_weights
from avow.parameters import as_float, declared

SHARES = (0.9, 0.99, 0.999)
ROWS = 128
"""Rows of each head whose weights are looked at, evenly spaced over the text."""
CERTIFIED = 16
"""Rows of each head for which every method is run and certified, evenly spaced over the text's second half."""
SHOWN, READ = 8, 4
"""Rows of each head of which it is kept what they read, and how many tokens of each."""
CONFIDENCE = 0.99
"""At which methods that draw at random state their promise."""
# A bound of 2 says nothing: answer and target are both averages of values.
_TRIVIAL = 2.0


class ProfileInterrupted(UserWarning):
    """A profile is of the layers that were measured before it was interrupted."""


@dataclass(frozen=True)
class HeadFigures:
    """One head: averages over the sampled rows, unless a name says otherwise."""

    kind: HeadKind
    query_norm: float
    key_norm: float
    value_norm: float
    largest_logit: float
    """An upper bound on the size of any logit: scale · the longest query · the longest key."""
    spread: float
    """The largest logit of a row less its smallest."""
    entropy: float
    tokens: tuple[float, float, float]
    """How many tokens have 90%, 99% and 99.9% of the mass."""
    seen: float
    effective_rank: float
    """exp of the entropy of the normalised singular values of the sampled rows' weights; at most their number."""
    top: float
    """The mass of the heaviest token."""
    first: float
    """The mass of the text's first token."""
    flatness: float
    """exp(entropy) relative to the tokens seen."""


@dataclass(frozen=True)
class RowReading:
    """What one row reads: the tokens with the most weight, heaviest first, as positions and weights."""

    position: int
    tokens: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Offer:
    """One setting of a method for one head.

    `predicted` and `measured` are shares of exact attention's cost. For `sparse` that is bytes read to continue the
    text, sketch included: predicted from the tokens that have all but tol/2 of the mass, which would suffice if they
    were known beforehand; measured as what had to be read for the proof. For the others, and if a layer sees all of a
    text at once and never continues it, it is time over the whole text: predicted by the planner, measured only if the
    bound is within the tolerance.
    """

    method: str
    parameters: dict[str, Any]
    bound: float | None
    """None if nothing is promised."""
    kind: Kind
    predicted: float
    measured: float | None = None
    together: float | None = None
    """What is read for all query heads that share this one's keys: some of it serves several, all of it is read."""

    @property
    def share(self) -> float:
        """The cost that a plan counts: measured if it was, else predicted."""
        return next(x for x in (self.together, self.measured, self.predicted) if x is not None)

    def keeps(self, tol: float) -> bool:
        return self.bound is not None and self.bound <= tol


@dataclass(frozen=True)
class Head:
    """What one head does, and what each setting of each method offers it."""

    figures: HeadFigures
    exact_bound: float
    offers: tuple[Offer, ...]
    readings: tuple[RowReading, ...] = ()
    """Of each part of the text, the sampled row with the largest weight on a token other than the first."""

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(offer.method for offer in self.offers))

    def within_budget(self, method: str, budget: float) -> Offer | None:
        """The setting with the smallest bound that costs no more than `budget` of exact attention."""
        offers = [x for x in self.offers if x.method == method and x.bound is not None and x.share <= budget]
        return min(offers, key=lambda offer: offer.bound or 0.0, default=None)

    def within_tolerance(self, method: str, tol: float) -> Offer | None:
        """The cheapest setting of a method that proves `tol`."""
        return self.chosen(tol, math.inf, method)

    def chosen(self, tol: float, budget: float, method: str | None = None) -> Offer | None:
        """The cheapest setting, of any method, that proves `tol` within the budget; None means exact attention."""
        offers = [x for x in self.offers if x.keeps(tol) and x.share <= budget and method in (None, x.method)]
        return min(offers, key=lambda offer: offer.share, default=None)


@dataclass(frozen=True, repr=False)
class Profile:
    """Every head of every attention layer of a model over one text.

    Attributes:
        model: name of the model.
        fingerprint: that of its weights.
        tokens: length of the text.
        tol: what a plan must prove of every row of every head.
        budget: the share of exact attention's cost that a method may take.
        layers: what each head does and is offered, by the layer's name.
        seconds: what finding out took.
        unmeasured: the layers that were not measured, since the run was interrupted; exact in the plan.
        speed: what a new token costs with the plan, if that was measured (`decoding_speed`).
    """

    model: str
    fingerprint: str
    tokens: int
    tol: float
    budget: float
    layers: dict[str, tuple[Head, ...]]
    seconds: float
    unmeasured: tuple[str, ...] = ()
    speed: Speed | None = None

    @property
    def heads(self) -> list[Head]:
        return [head for heads in self.layers.values() for head in heads]

    @property
    def headline(self) -> str:
        """The profile in a sentence."""
        changed, tol, budget, model = self.plan.changed, f"{self.tol:g}", f"{self.budget:.0%}", self.model
        if self.unmeasured:
            model = f"{model}, {len(self.layers)} of {len(self.layers) + len(self.unmeasured)} layers"
        if not changed:
            return f"{model}: no head keeps {tol} within {budget} of what exact attention costs"
        sentence = f"{model}: {changed} of {len(self.heads)} heads keep {tol} at {budget} of exact attention or less"
        return sentence if self.speed is None else f"{sentence}; {self.speed.verdict}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {kind:11}{many}" for kind, many in self.kinds.items())])

    def __repr__(self) -> str:
        return f"<Profile of {self.headline}>"

    def _repr_html_(self) -> str:
        size = f"{self.tokens:,} tokens, {len(self.layers)} layers, {len(self.heads)} heads"
        lines = [("text", size), ("unit", "tolerances are relative to the longest value that a row sees")]
        if self.unmeasured:
            lines.append(("interrupted", f"not measured, and exact in the plan: {', '.join(self.unmeasured)}"))
        rows = [(kind, many, KINDS[kind]) for kind, many in self.kinds.items()]
        return notebook.card(self.headline, notebook.facts(lines), notebook.table(("kind", "heads", "rule"), rows))

    @property
    def kinds(self) -> dict[HeadKind, int]:
        """How many heads are of each kind."""
        return {kind: sum(head.figures.kind == kind for head in self.heads) for kind in KINDS}

    @property
    def share(self) -> float:
        """The part of keys and values that the plan reads to continue the text, if caches use their sketches.

        A layer with a head that is exact reads everything. Layers that were not measured do not count.
        """
        shares = []
        for heads in self.layers.values():
            offers = [head.chosen(self.tol, self.budget) for head in heads]
            shares += [1.0 if offer is None or None in offers else offer.share for offer in offers]
        return sum(shares) / max(len(shares), 1)

    @property
    def plan(self) -> ModelPlan:
        """The cheapest that proves the tolerance for each head, if it is within the budget; else exact."""
        layers = {name: tuple(self._setting(head) for head in heads) for name, heads in self.layers.items()}
        many = len(next(iter(self.layers.values()), ()))
        layers |= {name: (Setting(method="exact"),) * many for name in self.unmeasured}
        return ModelPlan(self.model, self.fingerprint, self.tol, layers)

    def _setting(self, head: Head) -> Setting:
        offer = head.chosen(self.tol, self.budget)
        if offer is None:
            return Setting(method="exact")
        confidence = None if offer.kind == "deterministic" else CONFIDENCE
        if method_named(offer.method).selects_tokens:
            # The cache knows at each length whether that pays.
            return Setting(self.tol, "auto", confidence)
        return Setting(self.tol, offer.method, confidence, offer.parameters)


@declared()
@torch.no_grad()
def profile(
    model: Any,
    ids: Tensor,
    tol: float = 1e-2,
    budget: float = 0.5,
    name: str = "",
    tell: Callable[[str], None] = lambda step: None,
) -> Profile:
    """What each head needs, from one run over a text. Layers are measured as they run, and forgotten.

    The model is left as it was. If the run is interrupted (Ctrl-C) after the first layer, what was measured so far is
    returned, with a warning, and `unmeasured` names the other layers.

    Args:
        model: a model of transformers, or a wrapper such as peft's around one.
        ids: the text, (1, n).
        tol: what a plan must prove of every row of every head, relative to the longest value.
        budget: the share of exact attention's cost that a method may take.
        name: what the plan calls the model; empty for its own name.
        tell: called with a line about each layer.

    Returns:
        What every head does and is offered; `plan` is the plan that follows.

    Raises:
        ParameterError: this is not such a model, or an option does not fit.
        ShapeError: the text is too short, or not one text.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> profile = avow_transformers.profile(model, torch.arange(48)[None])
    >>> len(profile.heads), profile.plan.tol
    (8, 0.01)
    """
    if not 0 < as_float(tol) < math.inf:
        raise ParameterError("tol", tol, "must be above 0 and finite", "try tol=1e-2")
    if not 0 < budget <= 1:
        raise ParameterError("budget", budget, "must be above 0 and at most 1", "try budget=0.5")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ParameterError("ids.shape", tuple(ids.shape), "must be (1, length of at least 2)", "pass one text")
    started, model, stopped = time.perf_counter(), pretrained(model), False
    layers: dict[str, tuple[Head, ...]] = {}
    known = rates(ids.device.type, measure=False)

    def measure(layer: str, problem: Problem, out: Tensor, certificate: Certificate) -> None:
        # A layer that several blocks share is measured in the first of them.
        if layer not in layers:
            tell(layer)
            layers[layer] = _heads(problem, certificate, ids[0], tol, known)

    with enabling.as_it_was(model), watching(measure):
        enabling.enable(model)
        inputs: dict[str, Any] = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        if hasattr(model.config.get_text_config(decoder=True), "use_cache"):
            inputs["use_cache"] = False
        try:
            # The rest of the model only computes logits, which are not needed here.
            model.base_model(**inputs)
        except KeyboardInterrupt:
            if not layers:
                raise
            stopped = True
    every = list(replaceable(model))
    ordered = {layer: layers[layer] for layer in every if layer in layers}
    unmeasured = tuple(layer for layer in every if layer not in layers) if stopped else ()
    if stopped:
        what = f"interrupted after {len(ordered)} of {len(every)} layers; the profile is of these"
        warnings.warn(what, ProfileInterrupted, stacklevel=2)
    seconds = time.perf_counter() - started
    about = (name or type(model).__name__, fingerprint(model), ids.shape[1], tol, budget)
    return Profile(*about, ordered, seconds, unmeasured)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch use one thread inside the block.

    Measuring a layer is thousands of small operations. With several threads each of them waits for the slowest, which
    on a busy machine took ten times the processor time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _heads(
    problem: Problem, certificate: Certificate, ids: Int[Tensor, "n"], tol: float, known: Rates
) -> tuple[Head, ...]:
    """The figures and the offers of each head of a layer; offers are certified for some rows of the second half."""
    n = problem.q.shape[-2]
    rows = _some_rows(problem, sampled_rows(n, CERTIFIED, n // 2))
    # Tokens with a mass of m in all move a row by at most 2m of its unit when they are left out.
    needed = tokens_for(rows, 1 - tol / 2)
    by_method = []
    for kind in (kind for kind in softmax_methods() if not kind.is_exact):
        settings = list(kind.grid(problem.sizes))
        if parameters := kind.tune({}, problem.sizes, tol, 1.0):
            settings.append(kind(**parameters))  # the setting that it would aim at the tolerance
        for method in settings:
            if method.selects_tokens and _goes_on(problem):
                by_method.append(list(_selection_offers(method, rows, needed)))
            else:
                by_method.append(list(_whole_text_offers(method, problem, rows, known, tol)))
    bounds = certificate.rows.reshape(problem.q.shape[:-1])[0].amax(-1).tolist()
    parts = zip(head_figures(problem, ROWS, ids), bounds, zip(*by_method, strict=True), strict=True)
    return tuple(Head(figures, bound, offers, readings) for (figures, readings), bound, offers in parts)


def sampled_rows(n: int, many: int, start: int = 0) -> Int[Tensor, "r"]:
    """Rows evenly spaced from `start`, the last included."""
    return torch.linspace(start, n - 1, min(many, n - start), dtype=torch.float64).round().long()


@_one_thread()
def head_figures(
    problem: Problem, rows: int, ids: Int[Tensor, "n"] | None = None
) -> list[tuple[HeadFigures, tuple[RowReading, ...]]]:
    """The figures of every head of one layer that reads one text, and what some of its rows read."""
    p, index = problem, sampled_rows(problem.q.shape[-2], rows).to(problem.q.device)
    same_text = p.q.shape[-2] == p.k.shape[-2]
    keys = ids if same_text and ids is not None and len(ids) == p.k.shape[-2] else None
    some, found = _some_rows(p, index), []
    for whole, one, visible in zip(_by_head(p), _by_head(some), _visible(some), strict=True):
        weights = softmax_weights(one)[0, 0]  # (r, s)
        kind = head_kind(weights, index if same_text else None, keys)
        found.append((_figures(kind, whole, one, weights, visible), _readings(weights, index)))
    return found


def _readings(weights: Float[Tensor, "r s"], index: Int[Tensor, "r"]) -> tuple[RowReading, ...]:
    """Of each part of the rows, the one with the largest weight on a token other than the first, and what it reads."""
    if weights.shape[-1] < 2:
        return ()
    most, readings = weights[:, 1:].amax(-1), []
    for part in torch.arange(len(index), device=index.device).tensor_split(SHOWN):
        if len(part):
            row = int(part[most[part].argmax()])
            top = weights[row].topk(min(READ, weights.shape[-1]))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            readings.append(RowReading(int(index[row]), tuple((j, mass) for j, mass in pairs if mass >= 0.01)))
    return tuple(readings)


@_one_thread()
def tokens_for(problem: Problem, share: float) -> list[float]:
    """Of the tokens that some rows see, the part that has this share of each row's mass, head by head."""
    parts = []
    for one, visible in zip(_by_head(problem), _visible(problem), strict=True):
        many = visible.sum(-1)
        tokens = _token_counts(softmax_weights(one)[0, 0], many, share)
        parts.append(float(tokens.sum() / many.sum().clamp(min=1)))
    return parts


def _visible(p: Problem) -> Bool[Tensor, "h r s"]:
    """Which keys each row sees; causality must be part of the mask."""
    everything = torch.ones(p.q.shape[-2], p.k.shape[-2], dtype=torch.bool, device=p.q.device)
    visible = everything if p.allowed is None else p.allowed & everything
    return visible.expand(1, p.q.shape[1], -1, -1)[0]


def _some_rows(p: Problem, index: Int[Tensor, "r"]) -> Problem:
    """The problem of some rows, with its norms."""
    norms = dataclasses.replace(p.norms, q=p.norms.q[..., index])
    return p.rows(index.to(p.q.device)).with_norms(norms)


def _by_head(p: Problem) -> Iterator[Problem]:
    """The problem of each head, with its norms."""
    norms = p.norms
    for head in range(p.q.shape[1]):
        key = head // (p.q.shape[1] // p.k.shape[1])
        own = Norms(norms.q[:, head : head + 1], norms.k[:, key : key + 1], norms.v[:, key : key + 1], norms.slack)
        yield p.head(0, head, key).with_norms(own)


def _token_counts(weights: Float[Tensor, "r s"], many: Int[Tensor, "r"], *shares: float) -> Float[Tensor, "p r"]:
    """How many tokens have each share of a row's mass, heaviest first."""
    # Sorted in float32, which keeps seven digits of each weight, and summed in float64: a millionth is no mass.
    mass = weights.float().sort(-1, descending=True).values.double().cumsum(-1)
    return torch.stack([((mass < share - 1e-6).sum(-1) + 1).double().minimum(many.double()) for share in shares])


def _figures(
    kind: HeadKind, whole: Problem, one: Problem, weights: Float[Tensor, "r s"], visible: Bool[Tensor, "r s"]
) -> HeadFigures:
    """The figures of one head: norms are those of the whole text, the rest is of some rows and their weights."""
    norms, many = whole.norms, visible.sum(-1)  # (r,)
    singular = torch.linalg.eigvalsh(weights @ weights.T).clamp(min=0).sqrt()
    rank = float(torch.special.entr(singular / singular.sum().clamp(min=1e-300)).sum().exp())
    logits = one.scale * (one.q[0, 0].double() @ one.k[0, 0].double().T)
    if one.bias is not None:
        logits = logits + one.bias[0, 0].double()
    largest = logits.masked_fill(~visible, -math.inf).amax(-1)
    smallest = logits.masked_fill(~visible, math.inf).amin(-1)
    spread = (largest - smallest).clamp(min=0).nan_to_num(0.0, 0.0, 0.0)
    if bool((several := many >= 2).any()):
        weights, spread, many = weights[several], spread[several], many[several]
    entropy = torch.special.entr(weights).sum(-1)
    tokens = _token_counts(weights, many, *SHARES).mean(-1).tolist()
    top, flatness = float(weights.amax(-1).mean()), float((entropy.exp() / many).mean())
    return HeadFigures(
        kind=kind,
        query_norm=float(norms.q.mean()),
        key_norm=float(norms.k.mean()),
        value_norm=float(norms.v.mean()),
        largest_logit=abs(whole.scale) * norms.most[0] * norms.most[1],
        spread=float(spread.mean()),
        entropy=float(entropy.mean()),
        tokens=(tokens[0], tokens[1], tokens[2]),
        seen=float(many.double().mean()),
        effective_rank=rank,
        top=top,
        first=float(weights[:, 0].mean()),
        flatness=flatness,
    )


def _goes_on(p: Problem) -> bool:
    """Whether rows see what is before them, so that a text can be continued: the first does not see the last key."""
    if p.causal or p.q.shape[-2] != p.k.shape[-2]:
        return True
    return p.allowed is not None and p.allowed.shape[-2] > 1 and not bool(p.allowed[..., 0, -1].any())


def _selection_offers(method: Method, rows: Problem, needed: list[float]) -> Iterator[Offer]:
    """Offers of a method that selects tokens; its cost is what it reads."""
    with _one_thread():
        computed = method.compute(rows)
        certificate, trace = certify(method, rows, computed, 1.0), computed.trace
        seen, shared = _visible(rows).sum((-2, -1)).double(), rows.q.shape[1] // rows.k.shape[1]  # (h,)
        sketch = sketched(rows.k, method.parameters["bits"])
    sketch_share = sketch.bytes_per_row / ((rows.k.shape[-1] + rows.v.shape[-1]) * rows.k.element_size())
    for head, most in enumerate(seen.clamp(min=1)):
        read, union = (float(x.sum() / most) for x in (trace.read[0, head], trace.distinct[0, head // shared]))
        bound = float(certificate.rows[0, head].amax())
        yield Offer(
            method.name,
            method.parameters,
            bound if bound < _TRIVIAL else None,
            certificate.kind,
            predicted=min(needed[head], 1) + sketch_share,
            measured=read + sketch_share,
            together=min(union, 1.0) + sketch_share,
        )


def _whole_text_offers(method: Method, whole: Problem, rows: Problem, known: Rates, tol: float) -> Iterator[Offer]:
    """Offers of a method whose cost is that of whole texts; each head by itself: a head without a useful bound
    does not rule the others out.
    """
    exact = next(iter(exact_method().grid(whole.sizes)))
    for one, some in zip(_by_head(whole), _by_head(rows), strict=True):
        predicted = known.seconds(method, one.sizes) / known.seconds(exact, one.sizes)
        bound, kind = _bound(method, one, some)
        measured = None
        if bound is not None and bound <= tol and predicted < 1:
            bare, generator = one.with_norms(None), torch.Generator().manual_seed(0)
            calls = [functools.partial(x.compute, bare, generator) for x in (method, exact)]
            own, other = (least_seconds(call, bare.q.device, 1) for call in calls)
            measured = own / other
        yield Offer(method.name, method.parameters, bound, kind, predicted, measured)


@_one_thread()
def _bound(method: Method, whole: Problem, rows: Problem) -> tuple[float | None, Kind]:
    """The largest bound of the sampled rows, and its kind.

    A method is not run if it expects no useful bound. It estimates that from norms, or from a sample of the tokens, of
    which its landmarks leave a smaller residual than of all tokens.
    """
    try:
        method.check(rows.sizes)
        if method.estimate_bound(whole, CONFIDENCE).bound >= _TRIVIAL:
            return None, "none"
        computed = method.compute(rows, torch.Generator().manual_seed(0))
    except AvowError:
        return None, "none"
    certificate = certify(method, rows, computed, CONFIDENCE)
    useful = certificate.kind != "none" and certificate.bound < _TRIVIAL  # nan is not
    return (certificate.bound if useful else None), certificate.kind
