"""The tokens of exact attention at the price of sparse steps: several are drafted, and verified together.

A model that was enabled with `verify=k` is exact. When it is asked for the token behind what a `CertifiedCache` holds,
it drafts up to k tokens by certified sparse attention, forgets what that appended, and reads them all again by exact
attention in one pass. The next calls are answered from the rows of that pass, as long as they ask for what was drafted;
at the first other token the rest is forgotten. So whoever calls the model chooses every token from logits of exact
attention, by whatever rule: `generate()` and a loop of one's own are the same to it, and nothing that a draft got wrong
can reach the text. How drafts are chosen, a `Choice`, only decides how many are right.

Sampling is speculative sampling with shared random numbers. Let p be the distribution that exact attention gives the
next token, and p' that of the draft. Torch draws the token x with the largest p(x)/e(x), where e is an exponential
number for each word. The draft is drawn with the same numbers, which the loop then draws again: the token has the
distribution p whatever p' is, and differs from the draft with a probability of at most 2t/(1 + t), where t is the total
variation between p and p'. With the same seed it is the token that exact attention alone would draw.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from avow.core import Certificate
from avow.core.quantities import count
from avow.decode.kernel_steps import ROWS
from avow.decode.step_rates import share_read
from avow.integrations.transformers.cache import CertifiedCache, CertifiedLayer
from avow.integrations.transformers.graphs import Run, StepGraphs, captures, passes, why_called

MOST = 31
"""The most drafts of a pass: caches answer up to 32 queries at once."""
_FIRST, _FEWEST = 4, 4
# After a pass most of whose drafts were wrong, so many tokens are read without drafts; twice as many each time.
_REST, _LONGEST_REST = 8, 128
# What a call may name. `return_dict` and `use_cache` say what happens here anyway; `generate()` hands the tokenizer of
# stop strings on to the model, which does nothing with it.
_SERVED = {
    "input_ids",
    "past_key_values",
    "position_ids",
    "attention_mask",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}
_SERVED |= {"tokenizer"}
# Processors of transformers that remember their calls.
_REMEMBER = {"SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}

_drafting: contextvars.ContextVar[list[Certificate] | None] = contextvars.ContextVar("avow_drafting", default=None)


def drafting() -> list[Certificate] | None:
    """Where certificates of drafts are noted; None unless a draft is being made."""
    return _drafting.get()


@dataclass
class Verification:
    """What was drafted and verified behind one cache.

    Every token that was asked for one by one got logits of exact attention: `accepted` of them from a pass that read
    drafts, the others from a pass or step of their own.

    Attributes:
        tokens: how many were asked for.
        passes: how many passes of exact attention that took, those for a single token included.
        drafted: how many tokens were drafted.
        accepted: drafts that were asked for.
        redrawn: drafts in whose place another token was asked for. What was drafted after these was dropped.
        undrafted: how many tokens were read without a draft, by the reason.
        tol: what every layer's answer to every draft keeps.
        bound: the largest bound of the answers that were looked at: all layers', in one draft of each pass.
        looked: how many answers those are.
        read: the share of the tokens that these read in full, on average.
    """

    tol: float | None = None
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    redrawn: int = 0
    undrafted: dict[str, int] = field(default_factory=dict)
    bound: float = 0.0
    looked: int = 0
    read: float = 0.0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were right among those that were compared."""
        return self.accepted / max(1, self.accepted + self.redrawn)

    def look(self, certificates: list[Certificate]) -> None:
        """Note what the answers of one draft promise, and what they read.

        Args:
            certificates: those of all layers' answers.
        """
        for one in certificates:
            self.bound = max(self.bound, one.bound)
            self.looked += 1
            self.read += (share_read(one) - self.read) / self.looked

    def __str__(self) -> str:
        passes = "1 pass" if self.passes == 1 else f"{self.passes:,} passes"
        lines = [
            f"{count(self.tokens, 'token')} by exact attention, in {passes}",
            f"{self.drafted:,} drafted: {self.accepted:,} accepted and {self.redrawn:,} redrawn "
            f"({self.acceptance:.1%} accepted), {self.drafted - self.accepted - self.redrawn:,} not compared",
        ]
        if self.looked:
            asked = "" if self.tol is None else f"; all keep {self.tol:g}"
            lines.append(
                f"drafts read {self.read:.1%} of the tokens, within {self.bound:.1e} of exact attention in each layer "
                f"({count(self.looked, 'answer')} looked at{asked})"
            )
        lines += [f"{count(many, 'token')} without drafts: {why}" for why, many in self.undrafted.items()]
        return "\n".join(lines)


class Choice(LogitsProcessorList):  # type: ignore[misc]  # its types are not read
    """The logits processors of one `generate()`; chooses drafts as its loop chooses tokens."""

    def __init__(self, processors: LogitsProcessorList, config: Any) -> None:
        super().__init__(processors)
        self.config = config
        self.start = -1
        self.ids: Tensor | None = None
        """The sequences so far, and how many tokens the prompts have."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        self.ids = input_ids
        self.start = input_ids.shape[1] if self.start < 0 else self.start
        processed: Tensor = super().__call__(input_ids, scores, **more)
        return processed

    def draft(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The token of each sequence behind `ids` that the loop would choose by these logits, (b, 1)."""
        scores = logits.to(torch.float32, copy=True)
        for one in filter(_is_pure, self):
            scores = one(ids, scores)
        if self.config.do_sample:
            tokens = torch.multinomial(torch.softmax(scores, -1), 1)
        else:
            tokens = scores.argmax(-1, keepdim=True)
        if self.config.eos_token_id is not None and self.config.pad_token_id is not None:
            ends = torch.as_tensor(self.config.eos_token_id, device=ids.device)
            ended = torch.isin(ids[:, self.start :], ends).any(-1, keepdim=True)
            tokens = torch.where(ended, self.config.pad_token_id, tokens)
        return tokens

    @property
    def left(self) -> int:
        """How many tokens the loop may still ask for behind the one it is asking for."""
        most = self.config.max_length
        return MOST + 1 if most is None or self.ids is None else int(most) - self.ids.shape[1] - 1


class _Step(NamedTuple):
    """One call: a token of each sequence behind what a cache holds."""

    cache: CertifiedCache
    token: Tensor
    position: Tensor | None


@dataclass
class _Ahead:
    """The rows of one pass of exact attention over a token and drafts; the cache holds them all."""

    length: int
    """How many tokens callers know of."""
    held: int
    drafts: Tensor
    logits: Tensor
    position: Tensor | None
    """The token's own, if it was given; drafts were read at those behind it."""
    kind: type
    """What the model returns; the output itself would refer back to the cache."""
    used: int = 0

    def take(self, step: _Step) -> bool | None:
        """Move on by a draft, if it is this token; None if the cache changed in between, or the place is another."""
        held = {one.cache.position for one in step.cache.layers}
        if step.cache.get_seq_length() != self.length or held != {self.held} or len(self.drafts) != len(step.token):
            return None
        # Both are asked at once: the host waits for the answer.
        found = [(self.drafts[:, self.used : self.used + 1] == step.token).all()]
        if self.position is not None and step.position is not None and self.position.shape == step.position.shape:
            found.append((self.position + self.used + 1 == step.position).all())
        elif self.position is not step.position:
            return None
        right, *placed = torch.stack(found).tolist()
        if not all(placed):
            return None
        if not right:
            return False
        self.used += 1
        self.length += 1
        _show(step.cache, self.length)
        return True

    def output(self, cache: CertifiedCache) -> Any:
        """What the model returns for the token that was taken last."""
        return self.kind(logits=self.logits[:, self.used : self.used + 1], past_key_values=cache)


@dataclass
class Drafts:
    """The state of drafting behind one cache."""

    verification: Verification
    choice: Choice | None = None
    ahead: _Ahead | None = None
    many: int = _FIRST
    """How many tokens are drafted next."""
    wait: int = 0
    """How many tokens are read without drafts before that."""
    rest: int = _REST
    _seen: Tensor | None = None
    """On the device: the largest bound of answers that nobody fetched yet, and the sum of the shares that they read."""
    _looks: int = 0
    _answers: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: not the rules of a loop that is none of theirs."""
        return vars(self) | {"choice": None}

    def look(self, reports: list[Tensor | None], certificates: list[Certificate]) -> None:
        """Note what the answers of one draft promise, and what they read.

        Args:
            reports: what kernels say of all layers' answers, on the device, which nobody waits for; None if they gave
                none.
            certificates: those of the answers.
        """
        found = [x for x in reports if x is not None]
        if len(found) < len(reports):
            self.verification.look(certificates)
            return
        bounds, shares = (torch.stack([report[row] for report in found]) for row in (0, 4))
        fresh = torch.stack([bounds.amax(), shares.mean()])
        if self._seen is not None:
            fresh = torch.stack([torch.maximum(fresh[0], self._seen[0]), fresh[1] + self._seen[1]])
        self._seen, self._looks, self._answers = fresh, self._looks + 1, self._answers + len(found)

    def current_verification(self) -> Verification:
        """What was drafted and verified, with what was noted on the device."""
        made = self.verification
        if self._seen is not None:
            bound, read = self._seen.tolist()
            made.bound, looked = max(made.bound, bound), made.looked + self._answers
            made.read += (read / self._looks - made.read) * self._answers / looked
            made.looked, self._seen, self._looks, self._answers = looked, None, 0, 0
        return made

    def learn(self, accepted: int, drafted: int, most: int) -> None:
        """Set how many tokens are drafted next, after a pass of which so many drafts were right."""
        if accepted == drafted:
            self.many, self.rest = min(2 * self.many, most), _REST
        else:
            self.many = min(max(accepted, _FEWEST), most)
            if 4 * accepted < drafted:
                self.wait, self.rest = self.rest, min(2 * self.rest, _LONGEST_REST)


class DecodingForward:
    """The `forward` of a model that reads the next tokens by CUDA graphs, or verifies drafts of them.

    Without `most`, which says how many drafts are verified at once, nothing is drafted.
    """

    def __init__(self, model: PreTrainedModel, most: int | None, limits: tuple[Any, ...]) -> None:
        self.model, self.most, self.limits = model, most, limits
        self.before = vars(model).get("forward")
        """What stood in the place of the class's, if anything."""

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the class's: `generate()` asks which arguments there are."""
        return _signature(self.model)

    def __call__(self, *args: Any, **named: Any) -> Any:
        named |= dict(zip(_signature(self.model).parameters, args, strict=False))
        cache = named.get("past_key_values")
        if not isinstance(cache, CertifiedCache) or not _is_one_token(named) or not cache.get_seq_length():
            return self._run(**named)
        step = _served(named, cache)
        if self.most is None:
            return self._alone(named, self._graphs(cache, step, named), step)
        drafts = drafts_of(cache, self.limits)
        verification = drafts.verification
        verification.tokens += 1
        if isinstance(step, str):
            drafts.ahead = None
            return self._undrafted(verification, step, named, self._graphs(cache, step, named), step)
        ahead = drafts.ahead
        taken = None if ahead is None else ahead.take(step)
        if ahead is not None and taken is not None:
            verification.accepted += taken
            verification.redrawn += not taken
            if not taken or ahead.used == ahead.drafts.shape[1]:
                drafts.learn(ahead.used, ahead.drafts.shape[1], self.most)
        if ahead is not None and taken:
            drafts.ahead = None if ahead.used == ahead.drafts.shape[1] else ahead
            return ahead.output(cache)
        drafts.ahead = None
        graphs = self._graphs(cache, step, named)
        why, many = self._how_many(drafts, step)
        if graphs is not None:
            many = passes(self.model, many)
        if not many:
            return self._undrafted(verification, why, named, graphs, step)
        drafts.ahead = self._round(drafts, step, many, graphs)
        return drafts.ahead.output(cache)

    def _graphs(self, cache: CertifiedCache, step: _Step | str, named: dict[str, Any]) -> StepGraphs | None:
        """The graphs that may run this call, if its model is on a GPU, and nothing stands in the way."""
        ids = named["input_ids"]
        if not captures(ids.device):
            return None
        if cache.graphs is None:
            cache.graphs = StepGraphs()
        graphs: StepGraphs = cache.graphs
        places = named.get("position_ids")
        why = step if isinstance(step, str) else ""
        if not why and self.before is not None:
            why = "the forward of the model was replaced"
        if not why and "position_ids" not in _signature(self.model).parameters:
            why = "the model finds places by itself"
        if not why and places is not None and places.ndim != 2:
            why = f"places have {places.ndim} axes"
        if why := why or why_called(self.model, cache, ids):
            graphs.steps.note(why)
            return None
        return graphs

    def _run(self, **named: Any) -> Any:
        inner = self.before or functools.partial(type(self.model).forward, self.model)
        return inner(**named)

    def _undrafted(self, verification: Verification, why: str, *call: Any) -> Any:
        """The answer to one token of a model that drafts, without drafts."""
        verification.passes += 1
        verification.undrafted[why] = verification.undrafted.get(why, 0) + 1
        return self._alone(*call)

    def _alone(self, named: dict[str, Any], graphs: StepGraphs | None, step: _Step | str) -> Any:
        """The answer to one token by itself."""
        if graphs is None or isinstance(step, str):
            return self._run(**named)
        run, limit = self._reader(step.cache), None if self.most else self.limits[0]
        outputs = graphs.read(run, self.model, step.cache, step.token, step.position, False, limit)
        if outputs.past_key_values is None:
            return type(outputs)(logits=outputs.logits.clone(), past_key_values=step.cache)
        return outputs

    def _reader(self, cache: CertifiedCache) -> Run:
        """What runs the model over tokens behind a cache, with logits for all of them."""
        more: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "return_dict": True}
        keeps = "logits_to_keep" in _signature(self.model).parameters

        def run(tokens: Tensor, places: Tensor | None, mask: Tensor | None) -> Any:
            given = {
                "position_ids": places,
                "attention_mask": mask,
                "logits_to_keep": tokens.shape[1] if keeps else None,
            }
            return self._run(input_ids=tokens, **{name: x for name, x in given.items() if x is not None}, **more)

        return run

    def _how_many(self, drafts: Drafts, step: _Step) -> tuple[str, int]:
        """How many tokens to draft; if none, why."""
        if why := step.cache.layers[0].cache.why_exact(*self.limits):
            return f"drafts would not be sparse: {why}", 0
        if drafts.wait:
            drafts.wait -= 1
            return "most of the last drafts were wrong", 0
        most = self._most(step.cache)
        left = most if drafts.choice is None else drafts.choice.left - 1
        return "the last tokens", max(0, min(drafts.many, most, left))

    def _most(self, cache: CertifiedCache) -> int:
        """How many drafts one pass verifies at most: if tokens are in host memory, as many as one reading serves."""
        first, most = cache.layers[0], self.most or 0
        if not first.offloaded:
            return most
        heads = self.model.config.get_text_config(decoder=True).num_attention_heads
        return max(1, min(most, ROWS // (heads // first.cache.key_heads) - 1))

    def _round(self, drafts: Drafts, step: _Step, many: int, graphs: StepGraphs | None) -> _Ahead:
        """Draft so many tokens, and read them by exact attention."""
        cache, verification, run = step.cache, drafts.verification, self._reader(step.cache)
        length = cache.get_seq_length()

        def read(tokens: Tensor, first: int, drafting: bool = False) -> Any:
            places = None
            if step.position is not None:
                places = step.position + torch.arange(first, first + tokens.shape[1], device=step.position.device)
            if graphs is None:
                return run(tokens, places, None)
            limit = self.limits[0] if drafting else None
            return graphs.read(run, self.model, cache, tokens, places, drafting, limit)

        try:
            drafted = [step.token]
            with _as_the_loop(step.token.device):
                for i in range(many):
                    with _drafts() as certificates:
                        logits = read(drafted[-1], i, True).logits[:, -1]
                    drafted.append(_chosen(drafts.choice, torch.cat(drafted, 1), logits))
            drafts.look([layer.cache.last_report for layer in cache.layers], certificates)
            _show(cache, length)
            tokens = torch.cat(drafted, 1)
            outputs = read(tokens, 0)
            # The next call by the same graph writes over what this one returned.
            logits = outputs.logits if outputs.past_key_values is not None else outputs.logits.clone()
        except BaseException:
            _show(cache, length)
            raise
        _show(cache, length + 1)
        verification.drafted += many
        verification.passes += 1
        return _Ahead(length + 1, length + 1 + many, tokens[:, 1:], logits, step.position, type(outputs))


def drafts_of(cache: CertifiedCache, limits: tuple[Any, ...] = (None,)) -> Drafts:
    """The drafts behind a cache, from its first on."""
    if cache.drafts is None:
        cache.drafts = Drafts(Verification())
    cache.drafts.verification.tol = limits[0]
    return cache.drafts


def chooses(cache: CertifiedCache, processors: LogitsProcessorList, config: Any) -> LogitsProcessorList:
    """Logits processors that tell the drafts behind a cache how `generate()` chooses tokens."""
    drafts = drafts_of(cache)
    drafts.choice = Choice(processors, config)
    return drafts.choice


def _chosen(choice: Choice | None, tokens: Tensor, logits: Tensor) -> Tensor:
    """The next draft of each sequence, (b, 1)."""
    if choice is None or choice.ids is None:
        return logits.argmax(-1, keepdim=True)
    return choice.draft(torch.cat([choice.ids.to(tokens.device), tokens], 1), logits)


def _is_pure(processor: Any) -> bool:
    """Whether calling it for a draft changes nothing: nobody knows that of a user's own, so drafts do without these."""
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ not in _REMEMBER


def _signature(model: PreTrainedModel) -> inspect.Signature:
    return _of_function(type(model).forward)


@functools.cache
def _of_function(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a method without its first argument."""
    signature = inspect.signature(forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _is_one_token(named: dict[str, Any]) -> bool:
    ids = named.get("input_ids")
    return isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] == 1


def _served(named: dict[str, Any], cache: CertifiedCache) -> _Step | str:
    """The call in the form that drafts are made for; or why there are none."""
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, CertifiedLayer) or layer.cache is None:
            return f"layer {i} keeps other things than keys and values"
        if layer.window is not None:
            return f"layer {i} has a sliding window, whose tokens move and cannot be taken back"
    if (drafts := cache.drafts) and drafts.choice is not None and drafts.choice.config.num_beams > 1:
        return "beams are compared after every token"
    unknown = sorted({name for name, x in named.items() if x is not None and x is not False} - _SERVED)
    if unknown or named.get("use_cache") is False or named.get("return_dict") is False:
        return f"{', '.join(unknown) or 'use_cache or return_dict'} was asked for"
    mask = named.get("attention_mask")
    if mask is not None and (mask.ndim != 2 or not bool(mask.all())):
        return "a mask hides tokens"
    return _Step(cache, named["input_ids"], named.get("position_ids"))


def _show(cache: CertifiedCache, length: int) -> None:
    """Have every layer show so many of its tokens; the others are forgotten when the next are appended."""
    for layer in cache.layers:
        layer.length = length


@contextlib.contextmanager
def _drafts() -> Iterator[list[Certificate]]:
    """Have layers draft, as long as the block runs; yields what they promise."""
    certificates: list[Certificate] = []
    token = _drafting.set(certificates)
    try:
        yield certificates
    finally:
        _drafting.reset(token)


def _as_the_loop(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Draw the random numbers that will be drawn after the block, which knows nothing of it."""
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)
