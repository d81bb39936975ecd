"""A cache of transformers that keeps its keys and values in avow's own, so that decoding reads only some of them."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from avow.errors import NotDifferentiable, ParameterError
from avow.nn import KeyValueCache
from avow.parameters import check_count, declared

_ORIGIN = "avow_cache"


def _all_or_none(method: Callable[..., None]) -> Callable[..., None]:
    """A method of `DynamicCache` that leaves every layer as it was if it fails: layers replace what they change."""

    @functools.wraps(method)
    def call(self: DynamicCache, *arguments: Any, **more: Any) -> None:
        before = [
            {key: copy.copy(x) if isinstance(x, list | dict) else x for key, x in vars(layer).items()}
            for layer in self.layers
        ]
        try:
            method(self, *arguments, **more)
        except BaseException:
            for layer, held in zip(self.layers, before, strict=True):
                vars(layer).clear()
                vars(layer).update(held)
            raise

    return call


class CertifiedCache(DynamicCache):  # type: ignore[misc]  # its types are not read
    """Keys and values of every layer of a model, with a sketch beside them; for `past_key_values=`.

    Layers with a sliding window forget what is beyond it. Layers that keep other things than keys and values are
    transformers' own. It is a `DynamicCache` because only of those does a model with an encoder forget tokens, as
    assisted decoding asks.

    Args:
        config: the model's.
        bits: bits of a number of the sketch, 1 to 8; None keeps no sketch, and every answer is exact.
        offloading: whether keys and values of layers without a window are in host memory, where a GPU reads the rows
            that it needs; the sketch is on the GPU.
        hot: how many bytes of them the GPU may keep besides in each layer; None is a hundredth.
        capacity: room for this many tokens from the start, and for twice as many whenever it is full; None: buffers
            grow as tokens come. While tokens do not move, calls on a GPU can be captured in CUDA graphs (`steps`).
            Layers with a sliding window have none.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from avow.integrations import transformers as avow_transformers
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> cache = avow_transformers.CertifiedCache(model.config)
    >>> avow_transformers.enable(model, tol=1e-2)
    >>> with torch.no_grad():
    ...     out = model(torch.arange(9)[None], past_key_values=cache)
    >>> cache.get_seq_length()
    9
    """

    drafts: Any = None
    """The state of `verified.Drafts`, once a model that verifies drafts read on from these tokens."""

    graphs: Any = None
    """The state of `graphs.StepGraphs`, once a model on a GPU read on from these tokens."""

    @declared()
    def __init__(
        self,
        config: PreTrainedConfig,
        bits: int | None = 4,
        offloading: bool = False,
        hot: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if capacity is not None:
            check_count("capacity", capacity, 4096)
        # Layers move nothing to and fro, as those would that transformers offloads.
        super().__init__(config=config.get_text_config(decoder=True))
        if hot is not None and not offloading:
            rule = "is what a GPU keeps of keys and values that are in host memory, and these are not"
            raise ParameterError("hot", hot, rule, "add offloading=True, or leave hot out")
        for i, layer in enumerate(self.layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                window = getattr(layer, "sliding_window", None)
                self.layers[i] = CertifiedLayer(bits, window, offloading and window is None, hot, capacity)

    @property
    def verification(self) -> Any:
        """What was drafted and verified behind these tokens (`Verification`); None if nothing was asked for so."""
        return None if self.drafts is None else self.drafts.current_verification()

    @property
    def steps(self) -> Any:
        """How many calls behind these tokens CUDA graphs ran, and why not the others (`Steps`); None without a GPU."""
        return None if self.graphs is None else self.graphs.steps

    # If one layer fails, all stay as they were.
    crop = _all_or_none(DynamicCache.crop)
    reorder_cache = _all_or_none(DynamicCache.reorder_cache)
    batch_repeat_interleave = _all_or_none(DynamicCache.batch_repeat_interleave)
    batch_select_indices = _all_or_none(DynamicCache.batch_select_indices)


class CertifiedLayer(CacheLayerMixin):  # type: ignore[misc]  # its types are not read
    """The keys and values of one layer; `keys` and `values` show those that the last tokens saw."""

    is_croppable = True

    def __init__(
        self,
        bits: int | None = 4,
        window: int | None = None,
        offloaded: bool = False,
        hot: int | None = None,
        capacity: int | None = None,
    ) -> None:
        self.is_initialized = False
        self.bits, self.window, self.offloaded, self.hot = bits, window, offloaded, hot
        self.capacity = capacity if window is None else None
        self.is_sliding = window is not None
        self.length = 0
        """How many tokens there were in all. Without a window the cache may hold more: the next take their place."""
        self.seen = 0
        """How many tokens the last ones saw, if there is a window."""
        self.cache: KeyValueCache | None = None

    @property
    def keys(self) -> Tensor | None:
        """The keys that the last tokens saw."""
        return None if self.cache is None else self._seen(self.cache)[0]

    @property
    def values(self) -> Tensor | None:
        """The values that the last tokens saw."""
        return None if self.cache is None else self._seen(self.cache)[1]

    def _seen(self, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
        keys, values = cache.tokens
        first, end = (0, self.length) if self.window is None else (keys.shape[2] - self.seen, keys.shape[2])
        return (keys, values) if end - first == keys.shape[2] else (keys[:, :, first:end], values[:, :, first:end])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make a cache for keys and values of these sizes."""
        self.cache = self._empty(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; returns all keys and values that they may see."""
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            rule = "keeps keys and values without their gradients"
            remedy = "decode under torch.no_grad(), or train with use_cache=False"
            raise NotDifferentiable("past_key_values", type(self).__name__, rule, remedy)
        if key_states.dtype != value_states.dtype:
            # Under autocast values may be narrower than keys; a wider type holds both as they are.
            wide = torch.promote_types(key_states.dtype, value_states.dtype)
            key_states, value_states = key_states.to(wide), value_states.to(wide)
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        before, _ = self.get_mask_sizes(0)
        cache = self._settled(self.cache)
        if self.capacity is not None and (after := self.length + key_states.shape[-2]) > cache.room:
            self.capacity = max(2 * cache.room, after)
            self._rebuild(*cache.tokens)
        self.cache.append(key_states, value_states)
        self.length += key_states.shape[-2]
        self.seen = before + key_states.shape[-2]
        keys, values = self._seen(self.cache)
        if self.offloaded and not before:
            # A whole text attends to itself: it need not cross the bus to come back.
            keys, values = key_states.view_as(key_states), value_states
        setattr(keys, _ORIGIN, _Origin(self.cache, values))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next tokens may see, themselves included, and the place of the first."""
        past = self.length if self.window is None else min(self.length, self.window - 1)
        return past + query_length, self.length - past

    def get_seq_length(self) -> int:
        """How many tokens there were in all."""
        return self.length

    def get_max_length(self) -> int:
        """The window, or −1 if there is none."""
        return -1 if self.window is None else self.window

    def offload(self) -> None:
        """Keep keys and values in host memory from now on; those that are there stay where they are."""
        if self.offloaded:
            return
        if self.window is not None:
            rule = "forgets tokens, and what it keeps is small"
            raise ParameterError("window", self.window, rule, "leave layers with a window on the device")
        self.offloaded = True
        if self.cache is not None:
            try:
                self._rebuild(*self._seen(self._settled(self.cache)))
            except BaseException:
                self.offloaded = False
                raise

    def prefetch(self) -> None:
        """Nothing: rows are read where they are."""

    def reset(self) -> None:
        """Forget everything."""
        self.cache = None
        self.length, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue each beam from the one it came from."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.cache is not None:
            rows = torch.arange(self.cache.batch, device=self.cache.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.cache is not None and self.length:
            keys, values = self._settled(self.cache).tokens
            rows = indices.to(keys.device)
            if not torch.equal(rows, torch.arange(keys.shape[0], device=keys.device)):
                self._rebuild(keys[rows], values[rows])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last n tokens, for the argument −n."""
        many = -tokens_to_remove
        if many < 0:
            remedy = f"use crop({-tokens_to_remove}) to forget as many tokens"
            raise ParameterError("tokens_to_remove", tokens_to_remove, "must be at most 0", remedy)
        if many == 0 or self.cache is None:
            return
        left = self.length - many
        if left <= 0:
            self.reset()
            return
        if self.window is None:
            # The cache itself forgets before it is used again: another layer may still fail.
            self.length = left
            return
        keys, values = self.cache.tokens
        if keys.shape[2] - many < min(left, self.window - 1):
            rule = f"reaches back beyond the window of {self.window} tokens"
            raise ParameterError("tokens_to_remove", tokens_to_remove, rule, "start again from the prompt")
        self._rebuild(keys[:, :, :-many], values[:, :, :-many])
        self.length = left

    def _settled(self, cache: KeyValueCache) -> KeyValueCache:
        """The cache, without the tokens that `crop` forgot."""
        if self.window is None and cache.length > self.length:
            cache.crop(self.length)
        return cache

    def _rebuild(self, keys: Tensor, values: Tensor) -> None:
        """Replace the tokens by these; if memory does not suffice, the layer stays as it was."""
        cache = self._empty(keys, values)
        cache.append(keys, values)
        self.cache, self.seen = cache, cache.length

    def _empty(self, keys: Tensor, values: Tensor) -> KeyValueCache:
        batch, heads, _, dim = keys.shape
        return KeyValueCache(
            heads,
            dim,
            values.shape[-1],
            batch,
            keys.dtype,
            keys.device,
            bits=self.bits,
            window=self.window,
            capacity=self.capacity,
            offload=self.offloaded,
            hot=self.hot if self.offloaded else None,
        )


class _Origin:
    """The cache that keys are from, and the values beside them. A copy of the keys is from no cache."""

    def __init__(self, cache: KeyValueCache | None = None, values: Tensor | None = None) -> None:
        # The cache holds these keys: a reference back would keep both until garbage is collected.
        self.cache = None if cache is None else weakref.ref(cache)
        self.position = -1 if cache is None else cache.position
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return _Origin, ()


def cache_of(key: Tensor, value: Tensor) -> KeyValueCache | None:
    """The cache whose next query sees exactly these keys and values.

    None for tensors that a model changed on the way from its cache to its attention function.
    """
    origin: _Origin | None = getattr(key, _ORIGIN, None)
    if origin is None or origin.values is not value or origin.cache is None:
        return None
    cache = origin.cache()
    seen = cache is not None and cache.length == key.shape[-2] and cache.position == origin.position
    return cache if seen else None
