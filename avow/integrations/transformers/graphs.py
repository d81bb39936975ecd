"""Calls of a model for the next tokens as CUDA graphs: the host launches one thing for a token, and not each kernel.

Behind a `CertifiedCache` on a GPU all that a call does depends on two inputs that stay where they are, tokens and
their places, and on what the cache holds: its lengths are on the device. The host keeps its own count, which a replay
does not advance: `StepGraphs` does, by `KeyValueCache.recount`.

A call is captured when it comes for the third time behind tokens that lie where they lay. The first runs as ever: it
compiles kernels, and shows whether every layer is answered by its cache. The second runs in the form that a graph
repeats, with a mask that says what it means and asks nothing of the device, and fails before any graph could if
something does ask. What stands in the way is counted by reason (`Steps`), and the call runs layer by layer.

Nothing here may refer to itself: what waits for the garbage collector may be freed while a graph is captured, and a
CUDA graph that is freed then ends the capture.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from avow.core.quantities import count
from avow.errors import AvowError
from avow.integrations.transformers.cache import CertifiedCache, CertifiedLayer
from avow.integrations.transformers.observers import observed
from avow.nn import KeyValueCache
from avow.numerics.sketch import GROUP

_MARK = "avow_sees_up_to_itself"
# How many rows may share a key head in one answer of the kernels, and the most tokens of a call.
_ROWS, _TOKENS = 64, 32
# The tolerance that any finite bound keeps.
_LARGEST = torch.finfo(torch.float32).max
# Bounds are looked at after so many replays at first, and at most this many apart.
_LOOK = 16
# Rotary embeddings that change with the length of the text, by a number that the host reads.
_CHANGING = ("dynamic", "longrope")
# Layers whose mask follows from causality and a window.
_PLAIN = {"full_attention", "sliding_attention"}
# Operators whose results, or the sizes of these, the host waits for.
_WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
FIRST = "the first two of a kind behind tokens that do not move"
"""Why a call that a graph will repeat runs layer by layer."""
# What models return that a graph does, too.
_KNOWN = ("logits", "past_key_values")

# Runs the model over tokens (b, n) at their places (b, n), or at those it knows itself, with a mask.
Run = Callable[[Tensor, Tensor | None, Tensor | None], Any]


@dataclass
class Steps:
    """How the calls for the next tokens behind one cache were run, if its model is on a GPU.

    Attributes:
        replayed: how many by a CUDA graph.
        captured: how many graphs there were.
        called: how many layer by layer, by the reason.
    """

    replayed: int = 0
    captured: int = 0
    called: dict[str, int] = field(default_factory=dict)

    def note(self, why: str) -> None:
        """Count a call that ran layer by layer.

        Args:
            why: the reason.
        """
        self.called[why] = self.called.get(why, 0) + 1

    def __str__(self) -> str:
        lines = [f"{count(self.replayed, 'call')} by {count(self.captured, 'CUDA graph')}"]
        return "\n".join(lines + [f"{count(many, 'call')} layer by layer: {why}" for why, many in self.called.items()])


class Unrepeatable(Exception):
    """A call depends on what a CUDA graph does not follow."""


_repeatable: contextvars.ContextVar[bool] = contextvars.ContextVar("avow_repeatable", default=False)
_uncached: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("avow_uncached", default=None)


def note_uncached(why: str) -> None:
    """Take note of a layer that its cache does not answer: a graph would read the same tokens again and again."""
    if _repeatable.get():
        raise Unrepeatable(why)
    if (reasons := _uncached.get()) is not None:
        reasons.append(why)


def sees_up_to_itself(mask: object) -> bool:
    """Whether a mask says that each query sees all tokens up to its own, whatever it looks like."""
    marked = getattr(mask, _MARK, False)
    if _repeatable.get() and not marked:
        raise Unrepeatable("the model changes its mask")
    return marked


def captures(device: torch.device) -> bool:
    """Whether there are CUDA graphs for a device."""
    return device.type == "cuda"


def why_called(model: PreTrainedModel, cache: CertifiedCache, token: Tensor) -> str:
    """Why a call for the next tokens must run layer by layer; empty if it may be a graph's. Asks nothing of the device.

    Args:
        model: the model.
        cache: what is behind the tokens; all its layers keep keys and values.
        token: the tokens, (b, n).

    Returns:
        The reason, or nothing.
    """
    reasons = {
        "gradients are enabled": torch.is_grad_enabled(),
        "autocast is on": torch.is_autocast_enabled(token.device.type),
        "the model is in training mode": model.training,
        "the model was compiled": torch.compiler.is_compiling(),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), "") or observed():
        return why
    for i, layer in enumerate(cache.layers):
        held = layer.cache
        if why := held.without_kernels:
            return f"layer {i}: {why}"
        if not held.counted_by_host:
            return f"layer {i}: the device alone knows how many tokens there are"
        if held.device != token.device:
            return f"layer {i} is on another device"
    length: int = cache.get_seq_length()
    if length < GROUP:
        return f"fewer than {GROUP} tokens"
    return "" if all(layer.length == length for layer in cache.layers) else "layers have different lengths"


def passes(model: PreTrainedModel, drafts: int) -> int:
    """How many drafts to verify in one call, so that few sizes of calls, each with a graph of its own, are enough."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", 1)
    siblings = max(1, heads // (getattr(config, "num_key_value_heads", None) or heads))
    return int(2 ** (min(drafts + 1, max(1, _ROWS // siblings), _TOKENS).bit_length() - 1)) - 1


class _Inputs(NamedTuple):
    """Inputs of a graph, which stay where they are."""

    tokens: Tensor
    places: Tensor


class _Graph(NamedTuple):
    replay: Callable[[], None]
    logits: Tensor
    reports: list[Tensor | None]
    """What the layers' answers promise: each replay writes them. None where kernels promised nothing."""


@dataclass
class _Kind:
    """Calls for so many tokens, all of them drafts or none."""

    inputs: _Inputs
    why: str = ""
    """Why no graph repeats them."""
    rehearsed: bool = False
    """Whether one ran in the form that a graph repeats."""
    graph: _Graph | None = None


class StepGraphs:
    """The graphs of calls behind one cache, and how its calls were run."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._placements: list[object] = []
        self._landing: tuple[Tensor, torch.cuda.Event | None] | None = None
        """The largest bound of some call on its way to the host, and the event that says when it is there."""
        self._limit: float | None = None
        """What that bound must be within; None if nobody waits for it."""
        self._replays, self._next_look = 0, 1
        self._forget()

    def __reduce__(self) -> tuple[type[StepGraphs], tuple[()]]:
        """Copies and files start over: a graph knows where tokens lay."""
        return StepGraphs, ()

    def _forget(self) -> None:
        """Keep no graph: what they read has moved."""
        self._kinds: dict[tuple[int, int, bool], _Kind] = {}
        """By batch, tokens, and whether they are drafts."""
        self._crop: tuple[Callable[[], None], Tensor] | None = None
        self._state: list[object] = []
        """The model that graphs are of."""
        self._held: list[Tensor] = []
        """What graphs read of it."""
        self._memory: tuple[Any, Any] | None = None

    def read(
        self,
        run: Run,
        model: PreTrainedModel,
        cache: CertifiedCache,
        tokens: Tensor,
        places: Tensor | None,
        drafting: bool = False,
        limit: float | None = None,
    ) -> Any:
        """What the model returns for tokens behind a cache, which holds them then.

        Args:
            run: runs the model.
            model: the model.
            cache: what is behind the tokens.
            tokens: the tokens, (b, n).
            places: their places, (b or 1, n); None lets them follow the tokens that there are.
            drafting: whether the tokens are drafts.
            limit: the tolerance that every layer keeps; None if there is none.

        Returns:
            The model's output. A graph's has no `past_key_values`, and its logits (b, n, words) are written over by the
            next call.
        """
        layers, length, (b, n) = cache.layers, cache.get_seq_length(), tokens.shape
        given = tokens, places
        now = [cache.placement for cache in _caches(layers)]
        if not _same(now, self._placements):
            self._forget()
            self._placements = now
        if any(cache.room < length + n for cache in _caches(layers)):
            self._forget()
            return self._called(run, given, "the room of the cache was full, and it grew")
        kind = self._kinds.get((b, n, drafting))
        if kind is not None and kind.why and not _same(self._state, _state_of(model)):
            self._forget()
            kind = None
        if kind is None:
            return self._first(run, model, given, drafting)
        if kind.why:
            return self._called(run, given, kind.why)
        if self._is_ill:
            for held in _caches(layers):
                held.doubt()
            return self._called(run, given, "the kernels proved less than the tolerance in an earlier call")
        try:
            self._settle(layers, length)
            _fill(kind.inputs, given, length)
            if kind.graph is None:
                if not (kind.rehearsed and _same(self._state, _state_of(model))):
                    return self._rehearse(run, model, layers, kind, length)
                kind.graph = self._captured(run, layers, kind, length)
            outputs = self._replayed(kind.graph, model, layers, n, length, _LARGEST if limit is None else limit)
            if outputs is not None:
                return outputs
            self._take_back(layers, length)
            self._forget()
            return self._first(run, model, given, drafting)
        except (Unrepeatable, AvowError, RuntimeError) as error:
            # What a graph cannot repeat runs as ever: if anything is wrong with it, it says so then.
            kind.why, kind.graph = str(error).partition("\n")[0], None
            self._take_back(layers, length)
            return self._called(run, given, kind.why)
        except BaseException:
            self._take_back(layers, length)
            raise

    def _called(self, run: Run, given: tuple[Tensor, Tensor | None], why: str) -> Any:
        self.steps.note(why)
        return run(*given, None)

    def _first(self, run: Run, model: PreTrainedModel, given: tuple[Tensor, Tensor | None], drafting: bool) -> Any:
        """A call that runs as ever, which shows whether caches answer every layer."""
        reasons: list[str] = []
        token = _uncached.set(reasons)
        try:
            outputs = self._called(run, given, FIRST)
        finally:
            _uncached.reset(token)
        reasons += [f"the model returns {name}" for name, x in outputs.items() if x is not None and name not in _KNOWN]
        with torch.inference_mode(False):  # they are written to outside, too
            inputs = _Inputs(torch.empty_like(given[0]), torch.empty_like(given[0]))
        self._kinds[*given[0].shape, drafting] = _Kind(inputs, reasons[0] if reasons else "")
        self._output = type(outputs)
        if reasons:
            self._follow(model)
        return outputs

    def _follow(self, model: PreTrainedModel) -> None:
        """Keep no graph of the model as it was."""
        state = _state_of(model)
        if not _same(self._state, state):
            for kind in self._kinds.values():
                kind.rehearsed, kind.graph = False, None
            self._state = state
            self._held = [x.detach() for x in (*model.parameters(), *model.buffers())]

    def _rehearse(
        self, run: Run, model: PreTrainedModel, layers: Sequence[CertifiedLayer], kind: _Kind, length: int
    ) -> Any:
        """The call in the form that a graph repeats; raises if it asks anything of the device."""
        self._follow(model)
        _check_model(model)
        with _Watch(), _as_repeated(layers):  # type: ignore[no-untyped-call]  # torch says no types here
            outputs = run(*kind.inputs, _marked_mask(kind.inputs.tokens))
        kind.rehearsed = True
        self.steps.note(FIRST)
        return outputs

    def _captured(self, run: Run, layers: Sequence[CertifiedLayer], kind: _Kind, length: int) -> _Graph:
        inputs = kind.inputs

        def call() -> Tensor:
            logits: Tensor = run(*inputs, _marked_mask(inputs.tokens)).logits
            return logits

        with _as_repeated(layers):
            replay, logits = self._capture(call, inputs.tokens.device)
        # Nothing ran yet: what the host counted meanwhile is not there.
        _count(layers, length)
        return _Graph(replay, logits, [cache.last_report for cache in _caches(layers)])

    def _capture(self, call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        if self._memory is None:
            self._memory = shared_memory(device)
        made = capture(call, device, *self._memory)
        self.steps.captured += 1
        return made

    def _replayed(
        self,
        graph: _Graph,
        model: PreTrainedModel,
        layers: Sequence[CertifiedLayer],
        n: int,
        length: int,
        limit: float,
    ) -> Any:
        """The output by a graph; None if the model has changed since it was captured."""
        graph.replay()
        # The host looks through the model while the device works, which reads what is held, in use or not.
        if not _same(self._state, _state_of(model)):
            return None
        _count(layers, length + n)
        for cache, report in zip(_caches(layers), graph.reports, strict=True):
            cache.last_report = report
        self.steps.replayed += 1
        self._replays += 1
        if self._replays >= self._next_look:
            self._next_look = self._replays + min(self._replays, _LOOK)
            self._send([x for x in graph.reports if x is not None], limit)
        return self._output(logits=graph.logits)

    def _settle(self, layers: Sequence[CertifiedLayer], length: int) -> None:
        """Have the device forget what the layers have forgotten."""
        if all(cache.length == length for cache in _caches(layers)):
            return
        if self._crop is not None:
            replay, kept = self._crop
            kept.fill_(length)
            replay()
            _count(layers, length)
            return
        self._take_back(layers, length)
        caches = _caches(layers)
        with torch.inference_mode(False):
            kept = torch.empty(caches[0].batch, dtype=torch.int32, device=caches[0].device)

        def call() -> None:
            for cache in caches:
                cache.crop_on_device(kept)

        self._crop = self._capture(call, kept.device)[0], kept

    @staticmethod
    def _take_back(layers: Sequence[CertifiedLayer], length: int) -> None:
        """Have caches forget all behind so many tokens, whether the host counted them or not."""
        for cache in _caches(layers):
            cache.crop(length)
        for layer in layers:
            layer.length = layer.seen = length

    def _send(self, reports: Sequence[Tensor], limit: float) -> None:
        """Have the largest bound go to the host, which does not wait for it."""
        worst, self._limit = torch.stack([report[0].amax() for report in reports]).amax(), limit
        if not worst.is_cuda:
            self._landing = worst, None
            return
        if self._landing is None or self._landing[1] is None:
            self._landing = torch.empty((), pin_memory=True), torch.cuda.Event()
        there, done = self._landing
        assert done is not None
        there.copy_(worst, non_blocking=True)
        done.record()

    @property
    def _is_ill(self) -> bool:
        """Whether the bound of some answer that is known to be given is above its tolerance; said once."""
        limit = self._limit
        if self._landing is None or limit is None:
            return False
        bound, done = self._landing
        if done is not None and not done.query():
            return False
        self._limit = None
        return not bool(bound <= limit)


def _caches(layers: Sequence[CertifiedLayer]) -> list[KeyValueCache]:
    """What layers hold, which is something."""
    return [layer.cache for layer in layers if layer.cache is not None]


def _count(layers: Sequence[CertifiedLayer], length: int) -> None:
    """Have the host know how many tokens layers hold."""
    for cache in _caches(layers):
        cache.recount(length)
    for layer in layers:
        layer.length = layer.seen = length


def _fill(own: _Inputs, given: tuple[Tensor, Tensor | None], length: int) -> None:
    """Write the inputs of a graph."""
    tokens, places = given
    own.tokens.copy_(tokens)
    if places is None:
        places = torch.arange(length, length + tokens.shape[1], device=tokens.device)
    own.places.copy_(places.expand_as(own.places))


def _marked_mask(tokens: Tensor) -> Tensor:
    """A mask that says what causality says. It has four axes: such ones models hand on as they are."""
    mask = torch.ones(1, 1, tokens.shape[1], 1, dtype=torch.bool, device=tokens.device)
    setattr(mask, _MARK, True)
    return mask


@contextlib.contextmanager
def _as_repeated(layers: Sequence[CertifiedLayer]) -> Iterator[None]:
    """Have calls be such as a graph repeats, as long as the block runs."""
    token = _repeatable.set(True)
    for cache in _caches(layers):
        cache.host_counts = True
    try:
        yield
    finally:
        for cache in _caches(layers):
            cache.host_counts = False
        _repeatable.reset(token)


class _Watch(TorchDispatchMode):
    """Raises if a call asks anything of the device, or of the host: a number, or how many there are of something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func._schema.name.partition("::")[2], kwargs or {}
        waits = name in _WAIT
        if name in ("index", "index_put", "index_put_"):
            waits = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        elif name == "_to_copy":
            waits = named.get("device") not in (None, args[0].device)
        elif name == "copy_":
            waits = args[0].device != args[1].device
        if waits:
            raise Unrepeatable(f"the model asks for numbers on their way to another device, or for sizes ({name})")
        return func(*args, **named)


def _state_of(model: nn.Module) -> list[object]:
    """What a graph of a model rests on: modules, how each is set, and where its tensors lie."""
    state: list[object] = [
        ALL_ATTENTION_FUNCTIONS.get("avow"),
        bool(_global_forward_hooks or _global_forward_pre_hooks),
    ]
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        own = vars(module)
        state += (module, own.get("_avow_layer"), bool(own["_forward_hooks"] or own["_forward_pre_hooks"]))
        state += (x.data_ptr() for x in own["_parameters"].values() if x is not None)
        state += (x.data_ptr() for x in own["_buffers"].values() if x is not None)
        state.append(own.get("forward"))
        waiting += (x for x in own["_modules"].values() if x is not None)
    return state


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(a is b or a == b for a, b in zip(one, other, strict=True))


def _check_model(model: PreTrainedModel) -> None:
    """Raise if a graph of this model would not follow it."""
    devices = {x.device for x in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise Unrepeatable(f"the model is on {len(devices)} devices")
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()) - _PLAIN
    if kinds:
        raise Unrepeatable(f"the model has layers of {', '.join(sorted(kinds))}")
    if _global_forward_hooks or _global_forward_pre_hooks:
        raise Unrepeatable("all modules have hooks")
    for name, module in model.named_modules():
        own = vars(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            raise Unrepeatable(f"{name or 'the model'} has hooks")
        if module is not model and "forward" in own:
            raise Unrepeatable(f"the forward of {name} was replaced")
        if any(kind in str(own.get("rope_type", "")) for kind in _CHANGING):
            raise Unrepeatable("rotary embeddings change with the length of the text")


def shared_memory(device: torch.device) -> tuple[Any, Any]:
    """The memory that graphs of a device share, which never run at once, and the stream that they are captured on."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def capture(call: Callable[[], Any], device: torch.device, pool: Any, stream: Any) -> tuple[Callable[[], None], Any]:
    """What repeats a call on the device, and what the call returns: each time the same tensors, with new numbers.

    Args:
        call: what to capture. Nothing runs yet.
        device: where it runs.
        pool: the memory that graphs share.
        stream: what they are captured on.

    Returns:
        What to call for each replay, and the result.
    """
    graph, before, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), gc.isenabled()
    gc.disable()
    try:
        memory = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.device(device), torch.cuda.graph(graph, **memory):
            result = call()
    finally:
        # A capture that failed leaves its own stream behind.
        torch.cuda.set_stream(before)
        if collects:
            gc.enable()
    return graph.replay, result
