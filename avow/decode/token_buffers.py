r"""The tokens of a cache in buffers that grow: keys, values, a sketch of the keys and bounds on the lengths of values.

Groups of 64 tokens are sketched when they are complete: on a GPU at once, on a CPU, where short caches are read in
full, when the sketch is asked for. While there is room nothing moves; then all that is still seen moves to new buffers,
in which half is free.

Sequences of one length lie in one set of buffers. If lengths differ, kernels count the tokens of each in the same
buffers; elsewhere each sequence becomes a cache of its own (`_sequences`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor
from torch.autograd import forward_ad

from avow.core import check_dtype, check_numbers, check_tensor
from avow.decode.cache_file import Saved
from avow.decode.host_memory import ask_for_large_pages, refused, room
from avow.decode.kernel_steps import Replayed, absent, fits
from avow.errors import DtypeError, NonFiniteError, ParameterError, RangeError, ShapeError, value_text
from avow.numerics.norms import check_range, lengths, row_norms, slack
from avow.numerics.sketch import GROUP, Sketch, joined_spread, sketched, spread_holds
from avow.parameters import check_count, declared

if TYPE_CHECKING:
    from avow.kernels.append_tokens import TokenStore
    from avow.kernels.hot_rows import HotRows

# Groups whose numbers are this far from the first ones' are beyond a sketch: they are always read.
_BEYOND = 1e30
# Lengths of values for which float32 has room: shorter and longer ones are kept in float64.
_SHORTEST, _LONGEST = 2.0**-100, 2.0**100
# Lengths of tokens between these are far from where anything overflows or underflows.
_SHORT, _LONG = 2.0**-20, 2.0**40
# Devices whose look at a group wants its rows side by side.
_ACROSS = ("cpu",)
# Devices on which tokens are sketched when they come; elsewhere, when the sketch is asked for. So many groups at once:
# the arithmetic takes many times their memory.
_EAGER, _GROUPS_AT_ONCE = ("cuda",), 256
# What lies in host memory if a cache is offloaded; of that the device keeps this share by default, which
# with the sketch stays below a sixth of all in bfloat16.
_TOKENS, HOT = ("keys", "values"), 1 / 100
# The parts of a sketch that lie in buffers.
PARTS = ("codes", "scale", "zero", "radius", "reach")


class LengthBounds(NamedTuple):
    """Upper bounds on the longest key and value of each head; a lower bound on the shortest value of all."""

    keys: list[float]
    values: list[float]
    least: float


class Holding(NamedTuple):
    """The tokens of a cache, bounds on lengths, how far those may be off, and the sketch of whole groups, if any."""

    keys: Float[Tensor, "b g s d"]
    values: Float[Tensor, "b g s e"]
    lengths: Float64[Tensor, "b g s"]
    """Upper bounds on those of the values."""
    longest: Float64[Tensor, "b g"]
    """An upper bound on the length of any key."""
    slack: float
    sketch: Sketch | None


def is_plain_call() -> bool:
    """Whether no transform of `torch.func` is under way, and no derivative is carried forward."""
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


class TokenBuffers:
    """Keys and values of `key_heads` heads, to which tokens are appended."""

    _sequences: list[Self]
    """A cache for each sequence, if their lengths differed and kernels do not keep them."""

    @declared()
    def __init__(
        self,
        key_heads: int,
        dim: int,
        value_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        bits: int | None = 4,
        window: int | None = None,
        capacity: int | None = None,
        offload: bool = False,
        hot: int | None = None,
    ) -> None:
        value_dim = dim if value_dim is None else value_dim
        for name, value in (("key_heads", key_heads), ("dim", dim), ("value_dim", value_dim), ("batch", batch)):
            check_count(name, value, 64)
        if bits is not None and (not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8):
            raise ParameterError("bits", bits, "must be from 1 to 8", "try bits=4")
        if window is not None:
            check_count("window", window, 64)
        if capacity is not None:
            check_count("capacity", capacity, 64)
        check_dtype("dtype", dtype, "use torch.bfloat16")
        try:
            # Where tensors land: "cuda" is the current one of the GPUs, and theirs says which.
            place = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            raise ParameterError("device", repr(device), f"cannot be used here ({why})", 'try device="cpu"') from error
        self.key_heads, self.dim, self.value_dim, self.batch = key_heads, dim, value_dim, batch
        self.dtype, self.device, self.bits, self.window = dtype, place, bits, window
        self.capacity = capacity
        """How many tokens there is room for; None: buffers grow when they are full."""
        self._unfit = absent(place) or fits(dim, value_dim, dtype, bits, window is not None and capacity is None)
        """Why kernels do not keep and read these tokens; empty if they do."""
        self.offload, self.hot = offload, hot
        """Whether keys and values are in host memory, and how many bytes of them the device keeps besides, at most."""
        self._check_offload()
        self._hot: HotRows | None = None
        """The rows of keys and values that the device keeps."""
        self._store: TokenStore | None = None
        """The buffers as kernels know them, with how many tokens each head has."""
        self._append_one: dict[torch.dtype | None, Replayed | None] = {}
        """The append of one token, by the type of its counts, if any."""
        self._replayed = False
        """Whether a CUDA graph may append tokens that only the device counts."""
        self._uncounted = False
        """Whether the device alone knows how many tokens were appended; then the host has upper bounds."""
        self.host_counts = False
        """Whether calls are such as a CUDA graph repeats, and who replays it says how many tokens there are then
        (`recount`). They capture no graphs of their own.
        """
        self._counted = 0
        """How many tokens the longest sequence has."""
        self._counts: list[int] | None = None
        """How many tokens each sequence has, if kernels keep sequences whose lengths may differ."""
        self._sequences = []
        self._base = 0
        """The position of the first token that the buffers hold: the first of a group."""
        with torch.inference_mode(False):  # it is written to outside, too
            self._longest = torch.zeros(batch, key_heads, dtype=torch.float64, device=self.device)
        self._metric: Tensor | None = None
        self._size: Tensor | None = None
        self._spread: Tensor | None = None
        self._extremes = self._no_extremes()
        """A lower bound on the shortest, and an upper bound on the longest of all values so far."""
        self._known_bounds: LengthBounds | None = None
        """`_length_bounds` if it is known and no later token changed it."""
        self._unmeasured = 0
        """How many of the last tokens were only written; `_length_bounds` knows their lengths already."""
        self._sketched = 0
        """How many of the groups held have a sketch."""
        self._wide = dtype == torch.float64
        """Whether lengths of values need float64."""
        self.placement: object = None
        """Another object whenever what kernels read and write has moved."""
        self._buffers = self._allocate(self._first_room)
        self._bind()
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None
        """The buffer of keys, and `tokens` of it, as they were last asked for."""

    def _check_offload(self) -> None:
        """Raise if keys and values cannot be in host memory as they should."""
        if self.hot is not None:
            if self.hot < 0:
                raise ParameterError("hot", self.hot, "must be a whole number of bytes", "try hot=2**26")
            if not self.offload:
                rule = "is what a GPU keeps of keys and values that are in host memory, and these are not"
                raise ParameterError("hot", self.hot, rule, "add offload=True, or leave hot out")
        if not self.offload:
            return
        if why := refused(self.device):
            raise ParameterError("offload", True, why, "leave offload out")
        if self._unfit:
            rule = f"needs kernels that read rows where they are: {self._unfit}"
            raise ParameterError("offload", True, rule, "change that, or make the cache without offload")

    def __getstate__(self) -> dict[str, object]:
        """What copies and pickles hold: no views, which a pickle would store apart from what they are views of."""
        return vars(self) | {"_seen": None, "_append_one": {}, "_hot": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        if self.offload:
            # Copies of keys and values were made on the device.
            self._buffers = {
                name: self._room(*x.shape[2:]).copy_(x) if name in _TOKENS else x for name, x in self._buffers.items()
            }
        if self._store is not None:
            self._bind()
            self._longest = self._store.longest.view_as(self._longest)
            self._extremes = self._store.extremes.view_as(self._extremes)

    @property
    def _position(self) -> int:
        """How many tokens were appended in all; if the device alone counted them, it has to be asked."""
        if (self._replayed or self._uncounted) and self._store is not None and not is_capturing(self.device):
            used = self._store.used.view(self.batch, -1)[:, 0].tolist()
            self._uncounted = self._replayed
            self._set_counts(used, self._counts is not None and self._replayed)
        return self._counted

    @_position.setter
    def _position(self, position: int) -> None:
        self._counted = position

    @property
    def _first_room(self) -> int:
        """For how many tokens an empty cache has room."""
        return 0 if self.capacity is None else -(-self.capacity // GROUP) * GROUP

    def _set_counts(self, counts: list[int], may_differ: bool = False) -> None:
        """Have sequences be as long as this; they may be shorter than upper bounds say."""
        self._counted = max(counts)
        self._counts = counts if may_differ or len(set(counts)) > 1 else None

    @property
    def _ragged(self) -> bool:
        """Whether lengths of sequences differ, as far as the host knows."""
        return bool(self._sequences) or self._counts is not None

    @property
    def _positions(self) -> list[int]:
        """How many tokens were appended to each sequence; while a graph is captured, upper bounds."""
        if self._sequences:
            return [one._position for one in self._sequences]
        longest = self._position
        return [longest] * self.batch if self._counts is None else self._counts

    @property
    def length(self) -> int:
        """How many tokens the next query sees, at most the window's; if sequences differ, that of the longest.

        `position` counts those, too, that a window has forgotten.
        """
        return self._position if self.window is None else min(self._position, self.window)

    def __len__(self) -> int:
        """`length`, if all sequences have the same."""
        self._check_one_length("a cache has one length if they do not")
        return self.length

    def __bool__(self) -> bool:
        """True, also of an empty cache."""
        return True

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens the next query of each sequence sees."""
        return tuple(x if self.window is None else min(x, self.window) for x in self._positions)

    @property
    def position(self) -> int:
        """How many tokens were appended in all, to the longest sequence if they differ."""
        return self._position

    def _check_one_length(self, what: str) -> None:
        """Raise if lengths of sequences differ."""
        if self._ragged and len(set(self._positions)) > 1:
            rule = f"differ, and {what}"
            raise ShapeError("cache.lengths", list(self.lengths), rule, "crop the sequences to one length")

    @property
    def tokens(self) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]:
        """The keys and values of all tokens held, as they lie there: the next one may move them.

        Sequences of different lengths are not one tensor: that is an error.
        """
        if self._ragged:
            self._check_one_length("tokens are one tensor")
        if self._sequences:
            parts = [one.tokens for one in self._sequences]
            return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])
        keys, end = self._buffers["keys"], self._position - self._base
        if self._seen is None or self._seen[0] is not keys or self._seen[1].shape[2] != end:
            self._seen = (keys, keys[:, :, :end], self._buffers["values"][:, :, :end])
        return self._seen[1:]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, the room for tokens to come included."""
        held = (*self._buffers.values(), *(self._hot or ()))
        return sum(x.nbytes for x in held) + sum(one.nbytes for one in self._sequences)

    @property
    def host_nbytes(self) -> int:
        """The bytes of those that are in host memory; all others are on the device, with the rows that it keeps."""
        return sum(self._buffers[name].nbytes for name in _TOKENS) if self.offload else 0

    @property
    def overhead(self) -> float:
        """The bytes of the sketch and of norms, relative to those of keys and values."""
        sizes = {name: x.nbytes for name, x in self._allocate(GROUP).items()}
        return sum(sizes.values()) / (sizes["keys"] + sizes["values"]) - 1

    @property
    def holding(self) -> Holding:
        """All tokens held and what is known of them, as they lie there: the next one may move them."""
        if self._ragged:
            raise ShapeError("cache.lengths", list(self.lengths), "must never have differed", "use another cache")
        self._measure_written()
        lengths = self._buffers["norms"][:, :, : self._position - self._base].double()
        error = norm_slack(max(self.dim, self.value_dim), self.dtype, self.dtype == torch.float64)
        sketch = None if self.bits is None else self._sketch(0)
        return Holding(*self.tokens, lengths, self._longest, error, sketch)

    def checked_norms(
        self, k: Float[Tensor, "b g l d"], v: Float[Tensor, "b g l e"]
    ) -> tuple[Float64[Tensor, "b g l"], Float64[Tensor, "b g l"]]:
        """Upper bounds on the lengths of tokens' keys and values; raises if `append` would.

        Args:
            k: keys, (batch, key_heads, l, dim).
            v: values, (batch, key_heads, l, value_dim).

        Returns:
            Bounds for keys and for values, (batch, key_heads, l) each.
        """
        self._check(k, v)
        longest, norms = row_norms(k.detach(), "k"), row_norms(v.detach(), "v", faithful=True)
        key, value = (float(x.amax()) if x.numel() else 0.0 for x in (longest, norms))
        check_range(0.0, key, value, 1.0)
        return longest, norms

    def append(
        self,
        k: Float[Tensor, "b g l d"],
        v: Float[Tensor, "b g l e"],
        lengths: Sequence[int] | Int[Tensor, "b"] | None = None,
    ) -> None:
        """Remember tokens. If anything is wrong with them, or there is no memory, the cache stays as it was.

        Under `torch.inference_mode` as elsewhere the cache holds ordinary tensors: others could not be written to
        outside.

        Args:
            k: keys, (batch, key_heads, l, dim).
            v: values, (batch, key_heads, l, value_dim).
            lengths: sequence i takes the first `lengths[i]` of the l tokens; what stands behind is not read. On a GPU
                this may be a tensor there, which nobody waits for: numbers outside 0 to l then make bounds infinite.
                None: all.

        Raises:
            ShapeError: sizes do not fit, or there is no room left.
            DtypeError: they are of another type, or elsewhere.
            NonFiniteError: they hold nan or inf.
        """
        if torch.compiler.is_compiling() and not self._unfit:
            self._append_compiled(k, v, lengths)
        elif lengths is not None or self._sequences:
            self._append_some(k, v, lengths)
        elif not self._write_one(k, v):
            with torch.autocast(self.device.type, enabled=False):  # sketches and lengths are of numbers as they are
                self._append(k, v) if self._unfit else self._append_by_kernel(k, v)

    def _append_compiled(self, k: Tensor, v: Tensor, lengths: Sequence[int] | Tensor | None) -> None:
        """Remember tokens inside of `torch.compile`, which sees one operator: the device counts them."""
        from avow.kernels.operators import append_tokens

        if self.capacity is None:
            rule = "must be given, since nothing may move inside of torch.compile"
            raise ParameterError("capacity", None, rule, "make the cache with room for all tokens to come")
        if lengths is not None and not isinstance(lengths, Tensor):
            rule = "are numbers of the host, which compiled code would not read again"
            raise ParameterError("lengths", lengths, rule, f"use a tensor on {self.device}")
        self._check(k, v)
        if isinstance(lengths, Tensor):
            lengths = self._checked_tensor(lengths)
        assert self._store is not None
        self._replayed = True
        if lengths is not None:
            self._uncounted, self._counts = True, [self._counted] * self.batch
        append_tokens(k.detach(), v.detach(), self._stored, lengths)

    def crop(self, lengths: int | Sequence[int] | Int[Tensor, "b"]) -> None:
        """Keep the first tokens: `lengths` of every sequence, or of each its own number; with 0 it begins again.

        On a GPU `lengths` may be a tensor there, which nobody waits for.
        """
        bounds = self._bounds
        kept = self._checked_lengths([lengths] * self.batch if isinstance(lengths, int) else lengths, bounds)
        if isinstance(kept, Tensor):
            self._crop_by_kernel(kept, bounds, True)
            return
        if self.window is not None and any(0 < x < most for x, most in zip(kept, bounds, strict=True)):
            rule = "forgets tokens that a shorter sequence would see"
            raise ParameterError("window", self.window, rule, "crop to 0, or make the cache without a window")
        if not self._unfit:
            self._crop_by_kernel(self._on_device(kept), kept, False)
        elif not any(kept):
            if self._sequences:
                self._sequences, self._buffers = [], self._allocate(self._first_room)
            self._crop(0)
        elif not self._sequences and len(set(kept)) == 1:
            self._crop(kept[0])
        else:
            sequences = self._split()
            for one, length in zip(sequences, kept, strict=True):
                one._crop(length)
            self._keep_apart(sequences)

    @property
    def _bounds(self) -> list[int]:
        """At least the number of tokens of each sequence, without asking the device."""
        if self._sequences:
            return [one._counted for one in self._sequences]
        counts, room = self._counts or [self._counted] * self.batch, self._buffers["keys"].shape[2]
        return [room if self._replayed else min(x, room) for x in counts] if self._store is not None else counts

    def _crop_by_kernel(self, kept: Int[Tensor, "b"], bounds: list[int], unknown: bool) -> None:
        """Has the device keep the first tokens; `bounds` are upper bounds on how many, if the number is `unknown`."""
        from avow.kernels.append_tokens import crop

        if is_capturing(self.device):
            self._replayed = True
        self._uncounted |= unknown or self._replayed
        if self._store is not None and self._buffers["keys"].shape[2]:
            crop(self._store, kept)
        self._set_counts(bounds, unknown or (self._counts is not None and self._uncounted))
        if self._counted < GROUP:
            self._metric = self._size = self._spread = None

    @torch.inference_mode(False)
    def _crop(self, length: int) -> None:
        """Keep the first tokens of every sequence; what is known of the others is forgotten."""
        self._measure_written()
        self._position, self._known_bounds = length, None
        self._sketched = min(self._sketched, length // GROUP)
        # A bound is relative to the longest value that is left. Longer keys than those left bound these, too.
        self._extremes = self._no_extremes()
        if length:
            self._extremes = wider(self._extremes, self._buffers["norms"][:, :, :length])
        else:
            self._base, self._longest = 0, torch.zeros_like(self._longest)
        if length < GROUP:
            self._metric = self._size = self._spread = None

    def _checked_lengths(self, lengths: Sequence[int] | Tensor, most: list[int]) -> list[int] | Int[Tensor, "b"]:
        """Lengths as numbers from 0 to `most`; or as they are, if they are on the device of kernels."""
        if isinstance(lengths, Tensor):
            lengths = self._checked_tensor(lengths)
            if not self._unfit and lengths.device == self.device:
                return lengths.contiguous()
            lengths = lengths.tolist()
        if is_capturing(self.device):
            rule = "are numbers of the host, which a CUDA graph does not read again"
            raise ParameterError("lengths", lengths, rule, f"use a tensor on {self.device}")
        if not isinstance(lengths, Sequence) or len(lengths) != self.batch:
            rule = f"must be {self.batch} numbers, one for each sequence"
            raise ShapeError("lengths", str(lengths)[:80], rule, "name each, or leave lengths out")
        for i, (length, limit) in enumerate(zip(lengths, most, strict=True)):
            if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= limit:
                rule = f"must be a whole number from 0 to {limit}"
                raise ParameterError(f"lengths[{i}]", value_text(length), rule, "count the tokens of each sequence")
        return list(lengths)

    def _checked_tensor(self, lengths: Tensor) -> Int[Tensor, "b"]:
        """Lengths as they are, if they are numbers of all sequences."""
        if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape != (self.batch,):
            given = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
            rule = f"must be torch.int32 or torch.int64 of shape ({self.batch},)"
            raise ShapeError("lengths", given, rule, "give one number for each sequence")
        return lengths

    def _on_device(self, lengths: list[int]) -> Int[Tensor, "b"]:
        """Lengths where kernels read them; nothing waits for the copy."""
        return torch.tensor(lengths, dtype=torch.int32).to(self.device, non_blocking=True)

    def _append_some(self, k: Tensor, v: Tensor, lengths: Sequence[int] | Tensor | None) -> None:
        """Remember the first tokens of each sequence."""
        self._check(k, v)
        count = k.shape[2]
        given = [count] * self.batch
        counts = given if lengths is None else self._checked_lengths(lengths, given)
        if not isinstance(counts, Tensor) and len(set(counts)) == 1 and not self._sequences:
            self.append(k[:, :, : counts[0]], v[:, :, : counts[0]])
        elif not self._unfit:
            with torch.autocast(self.device.type, enabled=False):
                self._append_by_kernel(k, v, counts)
        else:
            assert not isinstance(counts, Tensor)
            self._append_to_each(k, v, counts)

    @torch.inference_mode(False)
    def _append_to_each(self, k: Tensor, v: Tensor, counts: list[int]) -> None:
        """Remember tokens in the cache of each sequence, or in none if one of them refuses."""
        behind = torch.arange(k.shape[2]) >= torch.tensor(counts).unsqueeze(-1)  # (b, l)
        hidden = behind[:, None, :, None].to(self.device)
        self.checked_norms(k.detach().masked_fill(hidden, 0), v.detach().masked_fill(hidden, 0))
        sequences = self._split()
        # What a cache appends is written behind its tokens, and what it knows of them is replaced.
        before = [dict(vars(one)) for one in sequences]
        try:
            for i, (one, count) in enumerate(zip(sequences, counts, strict=True)):
                if count:
                    one.append(k[i : i + 1, :, :count], v[i : i + 1, :, :count])
        except BaseException:
            for one, state in zip(sequences, before, strict=True):
                vars(one).update(state)
            raise
        self._keep_apart(sequences)

    def _keep_apart(self, sequences: list[Self]) -> None:
        """Have each sequence be in a cache of its own."""
        self._sequences, self._buffers = sequences, self._allocate(0)
        self._counted = max(one._counted for one in sequences)

    def _split(self) -> list[Self]:
        """A cache for each sequence, which goes on in this one's buffers while these have room."""
        return self._sequences or [self._sequence(i, length) for i, length in enumerate(self._positions)]

    def _sequence(self, i: int, length: int) -> Self:
        """The cache of one sequence, of this many tokens, in this one's buffers."""
        self._measure_written()
        sizes = self.key_heads, self.dim, self.value_dim
        one = type(self)(*sizes, dtype=self.dtype, device=self.device, bits=self.bits, window=self.window)
        one._unfit, one._wide, one.capacity, one.offload = self._unfit, self._wide, self.capacity, self.offload
        one._base, one._counted, one._sketched = self._base, length, self._sketched
        for name in ("longest", "extremes", "metric", "size", "spread"):
            of_all = getattr(self, f"_{name}")
            setattr(one, f"_{name}", None if of_all is None else of_all[i : i + 1])
        one._buffers = {name: x[i : i + 1] for name, x in self._buffers.items()}
        return one

    @torch.inference_mode(False)
    def _append_by_kernel(self, k: Tensor, v: Tensor, lengths: list[int] | Tensor | None = None) -> None:
        """One kernel writes, measures and sketches the tokens: nothing waits for the device, which alone can tell
        whether they are finite. If they are not, bounds are infinite from then on.
        """
        self._check(k, v)
        # A kernel reads numbers as they lie there, and a view may stand for their negatives.
        k, v, count = k.detach().resolve_neg(), v.detach().resolve_neg(), k.shape[2]
        if count == 0:
            return
        capturing = is_capturing(self.device) and not self.host_counts
        usual = lengths is None and self._counts is None and not (capturing or self._replayed or self._uncounted)
        sized = count < GROUP or self._metric is not None
        if usual and sized and self._counted + count <= self._buffers["keys"].shape[2]:
            self._counted += count
        else:
            self._count(k, lengths, capturing)
        counts = self._on_device(lengths) if isinstance(lengths, list) else lengths
        self._write_by_kernel(k, v, counts, capturing or self.host_counts)

    def recount(self, tokens: int) -> None:
        """Note how many tokens each sequence has after a CUDA graph was replayed that appended or cropped some.

        Args:
            tokens: how many; at least a group of 64, since a sketch is measured by the first.
        """
        self._set_counts([tokens] * self.batch)

    def crop_on_device(self, lengths: Int[Tensor, "b"]) -> None:
        """Have the device keep the first tokens of each sequence; `recount` brings the host up to date.

        Args:
            lengths: how many, on the device.
        """
        from avow.kernels.append_tokens import crop

        assert self._store is not None
        crop(self._store, lengths)

    @property
    def without_kernels(self) -> str:
        """Why kernels do not keep and read these tokens; empty if they do."""
        return self._unfit

    @property
    def counted_by_host(self) -> bool:
        """Whether all sequences have one length, which the host knows."""
        return not (self._sequences or self._replayed or self._uncounted) and self._counts is None

    @property
    def room(self) -> int:
        """How many tokens fit where the buffers lie."""
        return self._buffers["keys"].shape[2]

    def _count(self, k: Tensor, lengths: list[int] | Tensor | None, capturing: bool) -> None:
        """Make room for tokens that come, count them and measure the first."""
        count = k.shape[2]
        # At most so many come to each sequence.
        added = lengths if isinstance(lengths, list) else [count] * self.batch
        uncounted = capturing or self._replayed or self._uncounted or isinstance(lengths, Tensor)
        # Who replays a graph has said how many tokens there will be; the device counts, and says if they were more.
        if not capturing and not (uncounted and self.capacity is not None):
            self._make_room(added)
        if not uncounted:
            self._measure_first(k, added)
        if capturing:
            self._replayed = True
        before = self._counts or [self._counted] * self.batch
        after = before if capturing else list(map(operator.add, before, added))
        self._set_counts(after, isinstance(lengths, Tensor) or (self._counts is not None and uncounted))
        self._uncounted |= isinstance(lengths, Tensor)

    def _make_room(self, added: list[int]) -> None:
        """Have buffers hold this many more tokens of each sequence; asks the device only if bounds exceed the room."""
        room = self._buffers["keys"].shape[2]
        if not self._replayed and max(map(operator.add, self._bounds, added)) <= room:
            return
        after = max(map(operator.add, self._positions, added))
        if after <= room:
            return
        if self._replayed:
            rule = "would move the tokens that a captured CUDA graph writes to"
            raise ShapeError("tokens", after, rule, "make the cache with a capacity")
        self._sketched = self._groups
        self._buffers, _ = self._grown(0, after)
        self._bind()

    def _measure_first(self, k: Tensor, added: list[int]) -> None:
        """The first whole groups say how large keys are, and in which channels they lose most.

        Sketches are of one size: later groups, and a graph that is replayed, must not say it again.
        """
        assert self._store is not None
        metric, size = (x.unflatten(0, (self.batch, -1)) for x in (self._store.metric, self._store.size))
        if self._counts is None and len(set(added)) == 1:
            if self._metric is None and self._counted < GROUP <= added[0]:
                self._metric, self._size = _measured(k, added[0])
                metric.copy_(self._metric)
                size.copy_(self._size)
            return
        for i, (before, count) in enumerate(zip(self._bounds, added, strict=True)):
            if before < GROUP <= count:
                own_metric, own_size = _measured(k[i : i + 1], count)
                metric[i : i + 1].copy_(own_metric)
                size[i : i + 1].copy_(own_size)

    def _write_by_kernel(self, k: Tensor, v: Tensor, counts: Tensor | None, direct: bool) -> None:
        from avow.kernels.operators import append_tokens as append

        assert self._store is not None
        count, store = k.shape[2], self._stored
        if direct or count > 1 or not k.is_cuda:
            # A head's first group says how large its keys are, where nothing else did: it goes ahead of the others.
            ahead = GROUP if self._metric is None and count > GROUP else count
            if ahead < count:
                first, counts = (None,) * 2 if counts is None else (counts.clamp(max=ahead), counts - ahead)
                append(k[:, :, :ahead], v[:, :, :ahead], store, first)
                k, v, counts = k[:, :, ahead:], v[:, :, ahead:], None if counts is None else counts.clamp(min=0)
            append(k, v, store, counts)
        else:
            kind = None if counts is None else counts.dtype
            replayed = self._append_one.get(kind)
            if replayed is None:
                replayed = Replayed(lambda k, v, counts=None: append(k, v, store, counts))
                self._append_one[kind] = replayed
            replayed(*((k, v) if counts is None else (k, v, counts)))

    @torch.inference_mode(False)
    def _bind(self) -> None:
        """Have kernels write to the buffers as they are now, and to what is known of their tokens."""
        self.placement = object()
        if self._unfit:
            return
        from avow.kernels.append_tokens import TokenStore

        heads = self.batch * self.key_heads
        flat = {name: x.flatten(0, 1) for name, x in self._buffers.items()}
        self._append_one = {}
        self._hot = self._hot_rows(flat["keys"], flat["values"])
        owner = None if self._hot is None else self._hot.owner
        lie: dict[str, Any] = {"k": flat["keys"], "v": flat["values"], "owner": owner}
        lie |= {name: flat[name] for name in ("norms", *PARTS)}
        if self._store is not None:
            self._store = self._store._replace(**lie)
            return
        self._store = TokenStore(
            **lie,
            metric=torch.ones(heads, self.dim, device=self.device),
            size=torch.zeros(heads, dtype=torch.float64, device=self.device),
            longest=self._longest.flatten(),
            extremes=self._extremes.flatten(0, 1),
            most=torch.zeros(heads, device=self.device),
            used=torch.zeros(heads, dtype=torch.int32, device=self.device),
            flags=torch.zeros(heads, dtype=torch.int32, device=self.device),
        )

    def _hot_rows(self, k: Tensor, v: Tensor) -> HotRows | None:
        """Places for rows on the device, all of them empty."""
        if not self.offload or not k.shape[1]:
            return None
        from avow.kernels.choice import spans_of
        from avow.kernels.hot_rows import HotRows, bytes_of_place

        heads, each = len(k), bytes_of_place(self.dim, self.value_dim, k.element_size())
        count = round(HOT * (k.nbytes + v.nbytes)) if self.hot is None else self.hot
        places = min(count // (heads * each), k.shape[1])
        return HotRows.blank(k, v, places, spans_of(heads, k.shape[1])[0]) if places else None

    @property
    def _stored(self) -> list[Tensor]:
        """The tensors of the store."""
        assert self._store is not None
        return [x for x in self._store if x is not None]

    def _report_faults(self) -> None:
        """Raise if tokens that were appended have no bound; this waits for the device."""
        if self._store is None:
            return
        flags = functools.reduce(operator.or_, self._store.flags.tolist(), 0)
        if flags & 4:
            held = self._buffers["keys"].shape[2]
            raise ShapeError("tokens appended", f"more than {held}", "exceed the room of the cache", "raise capacity=")
        if flags & 8:
            rule = "were outside of 0 to the number of tokens given"
            raise ParameterError("lengths", "on the device", rule, "count the tokens of each sequence; crop it to 0")
        if flags & 1:
            remedy = "remove NaN and inf from them, and fill the cache again"
            raise NonFiniteError("k or v", "nan or inf", "was appended, and must be finite", remedy)
        if flags & 2:
            rule = "was appended; the kernels measure lengths from 2^-100 to 2^100"
            raise RangeError("a value's length", "out of range", rule, "scale the values, or use a cache on the CPU")

    @torch.inference_mode(False)
    def _append(self, k: Tensor, v: Tensor) -> None:
        self._measure_written()
        longest, norms = self.checked_norms(k, v)
        k, v = k.detach(), v.detach()
        count = k.shape[-2]
        if count == 0:
            return
        after = self._position + count
        # The first of these tokens sees a window that ends with itself.
        base = self._base if self.window is None else max(0, self._position - self.window + 1) // GROUP * GROUP
        buffers, base = self._grown(base, after)
        lengths, wide = _stored_norms(norms, self._wide)
        if wide and not self._wide:
            buffers = buffers | {"norms": buffers["norms"].double()}
        start, end = self._position - base, after - base
        fresh, begun = None, start % GROUP
        if self.device.type in _EAGER and self.bits is not None and begun + count >= GROUP:
            # A GPU's steps find the sketch in place, also those that a CUDA graph repeats.
            held = self._position - self._base
            fresh = self._groups_of(torch.cat([self._buffers["keys"][:, :, held - begun : held], k], 2))
        # Nothing below can fail: only now does the cache change.
        for name, x in (("keys", k), ("values", v), ("norms", lengths)):
            buffers[name][:, :, start:end] = x
        self._sketched = max(self._sketched - (base - self._base) // GROUP, 0)
        if fresh is not None:
            self._write_groups(buffers, fresh)
        self._longest = torch.maximum(self._longest, longest.amax(-1))
        self._extremes = wider(self._extremes, lengths)
        self._known_bounds = None
        self._buffers, self._base, self._position, self._wide = buffers, base, after, wide

    def _restore(self, saved: Saved) -> None:
        """Hold what a cache like this one held; it must be empty. Raises if `append` would."""
        # Keys and values are moved in parts: there may be room for one copy alone.
        tensors = {name: x if name in ("keys", "values") else x.to(self.device) for name, x in saved.tensors.items()}
        position, base, self._wide = (saved.state[name] for name in ("position", "base", "wide"))
        if self._wide and self.offload:
            rule = "needs lengths of values from 2^-100 to 2^100, which these are not"
            raise ParameterError("offload", True, rule, "scale the values, or load it without offload")
        if self._wide and not self._unfit:
            self._unfit, self._store = "lengths of values need float64", None
        self._metric, self._size = tensors.get("metric"), tensors.get("size")
        if self._store is not None and self._metric is not None and self._size is not None:
            self._store.metric.copy_(self._metric.flatten(0, 1))
            self._store.size.copy_(self._size.flatten())
        held = position - base
        # A window forgets when tokens come in parts; it never holds many.
        most = _GROUPS_AT_ONCE * GROUP if self.window is None else max(held, 1)
        for start in range(0, held, most):
            parts = (tensors[name][:, :, start : start + most] for name in ("keys", "values", "norms"))
            k, v, norms = (part.to(self.device) for part in parts)
            self.append(k, v)
            self._check_norms(norms, v, start)
        if held:
            self._measure_written()
            self._known_bounds = None
            # Measured together with others, lengths differ in their last digits.
            self._buffers["norms"][:, :, :held] = tensors["norms"]
            self._extremes.copy_(wider(self._no_extremes(), tensors["norms"]))
        self._base, self._position = base, position
        own = self._longest.clone()
        self._longest.copy_(torch.maximum(own, tensors["longest"]))
        # Of keys that a window forgot nothing else is left. Bounds differ a little with what is measured together.
        if self.window is None and bool((self._longest > 2 * own + 2.0**-40).any()):
            raise ParameterError("longest", float(self._longest.amax()), "exceeds the longest key", "save it again")
        if "spread" in tensors:
            own_spread = self._sketch(0).spread  # what these keys lose is known now; the file may say more
            self._spread = tensors["spread"]
            same = own_spread is not None and torch.equal(own_spread, self._spread)
            if not same and not spread_holds(self._sketch(0), self._buffers["keys"]):
                rule = "is less than the sketch lost of the keys"
                raise ParameterError("spread", float(self._spread.amax()), rule, "save it again")

    def _write_one(self, k: Tensor, v: Tensor) -> bool:
        """Whether this was one token of usual numbers, for which there is room on a CPU; if so, it is written.

        Decoding waits for this at every layer and token, so nothing else is done: the rest is made up for by
        `_measure_written` when it is asked for.
        """
        at, buffers = self._position - self._base, self._buffers
        keys, values = buffers["keys"], buffers["values"]
        usual = (
            self.device.type == "cpu"
            and self._unfit != ""
            and self.window is None
            and 0 < at < keys.shape[2]
            and isinstance(k, Tensor)
            and isinstance(v, Tensor)
            and k.shape == (self.batch, self.key_heads, 1, self.dim)
            and v.shape == (self.batch, self.key_heads, 1, self.value_dim)
            and k.dtype == v.dtype == self.dtype
            and k.device == v.device == self.device
            and not (k.requires_grad or v.requires_grad)
            and is_plain_call()
        )
        if not usual:
            return False
        known, own, lengths = self._length_bounds, row_lengths(k), row_lengths(v)
        # nan compares false with everything, each by itself: the largest of several may hide it.
        if not all(x <= _LONG for x in own) or not all(_SHORT <= x <= _LONG for x in lengths):
            return False
        keys[:, :, at : at + 1] = k
        values[:, :, at : at + 1] = v
        longest = list(map(max, known.keys, own)), list(map(max, known.values, lengths))
        self._known_bounds = LengthBounds(*longest, min(known.least, *lengths))
        self._position += 1
        self._unmeasured += 1
        return True

    def _measure_written(self) -> None:
        """Measures the tokens that `_write_one` only wrote."""
        if not self._unmeasured:
            return
        end = self._position - self._base
        k, v = (self._buffers[name][:, :, end - self._unmeasured : end] for name in ("keys", "values"))
        lengths, wide = _stored_norms(row_norms(v, "v", faithful=True), self._wide)
        if wide and not self._wide:
            self._buffers = self._buffers | {"norms": self._buffers["norms"].double()}
        self._buffers["norms"][:, :, end - self._unmeasured : end] = lengths
        self._longest = torch.maximum(self._longest, row_norms(k, "k").amax(-1))
        self._extremes = wider(self._extremes, lengths)
        self._wide, self._unmeasured = wide, 0

    def _check_norms(self, norms: Float[Tensor, "b g l"], v: Float[Tensor, "b g l e"], start: int) -> None:
        """Raise if norms from a file are not bounds on the lengths of values such as `append` finds; `start` is where
        they stand in the buffers.
        """
        self._measure_written()
        # Where they are the very numbers that were just found, they need no closer look.
        other = norms != self._buffers["norms"][:, :, start : start + norms.shape[2]]
        norms, v = norms[other], v[other]
        # What `lengths` computes exceeds a length by half a slack, and is off by less than a quarter of one.
        least = lengths(v) * (1 - slack(self.value_dim, torch.float64) / 8)
        most = least * (1 + 4 * slack(self.value_dim, self.dtype) + 2.0**-20) + 2.0**-59 * math.sqrt(self.value_dim)
        bad = (norms.double() < least) | (norms.double() > most)
        if bool(bad.any()):
            raise ParameterError("norms", float(norms[bad][0]), "is not the length of its value", "save it again")

    @property
    def _value_slack(self) -> float:
        """How far the bounds on lengths of values may be above the true ones, relatively."""
        return norm_slack(self.value_dim, self.dtype, self._wide)

    @property
    def _length_bounds(self) -> LengthBounds:
        """What is known of the tokens' lengths, in plain numbers."""
        if self._known_bounds is None:
            self._measure_written()
            shortest, longest = self._extremes.flatten(0, 1).T.tolist()
            self._known_bounds = LengthBounds(self._longest.flatten().tolist(), longest, min(shortest))
        return self._known_bounds

    @torch.inference_mode(False)
    def _no_extremes(self) -> Float64[Tensor, "b g 2"]:
        nothing = torch.tensor([math.inf, 0.0], dtype=torch.float64, device=self.device)
        return nothing.repeat(self.batch, self.key_heads, 1)

    @property
    def _groups(self) -> int:
        """Whole groups among the tokens held."""
        return (self._position - self._base) // GROUP

    @torch.inference_mode(False)
    def _allocate(self, tokens: int) -> dict[str, Tensor]:
        """Buffers for this many tokens; they are written into inside and outside of inference_mode."""
        b, g, groups = self.batch, self.key_heads, tokens // GROUP
        wide = torch.float64 if self._wide else torch.float32
        held = {
            "keys": self._room(tokens, self.dim),
            "values": self._room(tokens, self.value_dim),
            "norms": torch.empty(b, g, tokens, dtype=wide, device=self.device),
        }
        if self.bits is not None:
            for name, (shape, dtype) in _sketch_shapes(self.dim, self.bits).items():
                across = name == "codes" and self.device.type in _ACROSS
                part = torch.empty(b, g, groups, *shape[:: -1 if across else 1], dtype=dtype, device=self.device)
                held[name] = part.transpose(-1, -2) if across else part
        if self.device.type == "cpu":
            for part in held.values():
                ask_for_large_pages(part)
        return held

    def _room(self, tokens: int, width: int) -> Tensor:
        """Room for keys or values of all heads, in host memory if they are kept there."""
        shape = self.batch, self.key_heads, tokens, width
        if self.offload:
            return room(shape, self.dtype, self.device)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _grown(self, base: int, after: int) -> tuple[dict[str, Tensor], int]:
        """Buffers with room up to the position `after`, and the position they start from: at most `base`.

        While there is room nothing moves; then all from `base` on moves to new buffers, in which half is free.
        """
        held = self._buffers
        capacity = held["keys"].shape[2]
        if after - self._base <= capacity:
            return held, self._base
        if self.capacity is not None:
            rule = f"exceeds the capacity of {self.capacity}"
            raise ShapeError("tokens", after, rule, "make the cache with a larger capacity, or without one")
        needed = -(-(after - base) // GROUP) * GROUP
        room = self._allocate(max(2 * capacity, needed) if self.window is None else 2 * needed)
        start, end = base - self._base, min(self._position - self._base, capacity)
        for name, x in room.items():
            first, last = (start // GROUP, self._sketched) if name in PARTS else (start, end)
            old = held[name][:, :, first : max(last, first)]
            x[:, :, : old.shape[2]] = old
        return room, base

    def _groups_of(self, rows: Float[Tensor, "b g l d"]) -> Sketch:
        """The sketch of the whole groups among rows that follow those sketched before."""
        assert self.bits is not None
        size = self._size
        if size is None:
            largest = rows[:, :, : rows.shape[2] // GROUP * GROUP].double().abs().amax((2, 3))
            # Nothing but zeros says nothing of how large keys are.
            size = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest.clamp(min=1e-300)))), 1.0)
        fresh = sketched(rows, self.bits, self._metric, size)
        wild = ~(fresh.reach <= _BEYOND)
        if not bool(wild.any()):
            return fresh
        numbers = {x: getattr(fresh, x).masked_fill(wild.unsqueeze(-1), 0) for x in ("scale", "zero", "radius")}
        return dataclasses.replace(fresh, **numbers, reach=fresh.reach.masked_fill(wild, math.inf))

    def _write_groups(self, buffers: dict[str, Tensor], fresh: Sketch) -> None:
        """Have these groups be the next that are sketched."""
        self._metric, self._size, self._spread = fresh.metric, fresh.size, joined_spread(self._spread, fresh.spread)
        for name in PARTS:
            part = getattr(fresh, name)
            buffers[name][:, :, self._sketched : self._sketched + part.shape[2]] = part
        self._sketched += fresh.codes.shape[2]

    def _sketch(self, first: int) -> Sketch:
        """The sketch of the whole groups from a place in the buffers on; those that have none get theirs now."""
        assert self.bits is not None
        keys = self._buffers["keys"]
        while self._unfit and self._sketched < self._groups:
            last = min(self._groups, self._sketched + _GROUPS_AT_ONCE)
            self._write_groups(self._buffers, self._groups_of(keys[:, :, self._sketched * GROUP : last * GROUP]))
        metric, size = self._metric, self._size
        if self._store is not None:
            # A group that was filled token by token has its size on the device alone.
            metric, size = (x.unflatten(0, (self.batch, -1)) for x in (self._store.metric, self._store.size))
        if metric is None or size is None:
            return sketched(self._buffers["keys"][:, :, :0], self.bits)
        span = slice(first // GROUP, self._groups)
        codes, scale, zero, radius, reach = (self._buffers[name][:, :, span] for name in PARTS)
        return Sketch(codes, scale, zero, radius, reach, metric, size, self.bits, self._spread)

    def _check(self, k: Tensor, v: Tensor) -> None:
        """Raise if tokens are not of this cache's kind."""
        for name, x, width in (("k", k, self.dim), ("v", v, self.value_dim)):
            check_tensor(name, x)
            check_numbers(name, x)
            if x.dtype != self.dtype:
                remedy = f"convert it, or make the cache with dtype={x.dtype}"
                raise DtypeError(f"{name}.dtype", x.dtype, f"must equal the cache's {self.dtype}", remedy)
            if x.device != self.device:
                raise DtypeError(f"{name}.device", x.device, f"must equal the cache's {self.device}", "move it first")
            if x.ndim != 4 or (*x.shape[:2], x.shape[-1]) != (self.batch, self.key_heads, width):
                rule = f"must be ({self.batch}, {self.key_heads}, length, {width}), as the cache was made"
                raise ShapeError(f"{name}.shape", tuple(x.shape), rule, self._shape_remedy(name, tuple(x.shape), width))
        if k.shape[-2] != v.shape[-2]:
            rule = f"must equal k.shape[-2]={k.shape[-2]}"
            raise ShapeError("v.shape[-2]", v.shape[-2], rule, "each key needs one value")

    def _shape_remedy(self, name: str, shape: tuple[int, ...], width: int) -> str:
        """What to do about tokens of a shape that is not this cache's."""
        if len(shape) == 3 and (self.batch, *shape[::2]) == (1, self.key_heads, width):
            return f"use {name}[None]"
        if len(shape) != 4:
            return "add the missing axes"
        if (shape[0], *shape[2:]) == (self.batch, self.key_heads, width):
            return f"use {name}.transpose(1, 2)"
        made = {
            "batch": (shape[0], self.batch),
            "key_heads": (shape[1], self.key_heads),
            "dim" if name == "k" else "value_dim": (shape[3], width),
        }
        wanted = ", ".join(f"{option}={given}" for option, (given, own) in made.items() if given != own)
        repeated = ", or append them before they are repeated for query heads" if shape[1] > self.key_heads else ""
        return f"make the cache with {wanted}{repeated}"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _sketch_shapes(dim: int, bits: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape of each part of one group's sketch, and its type."""
    one = sketched(torch.zeros(1, 1, GROUP, dim, device="cpu"), bits)
    return {name: (getattr(one, name).shape[3:], getattr(one, name).dtype) for name in PARTS}


def _stored_norms(norms: Float64[Tensor, "b g l"], wide: bool) -> tuple[Float[Tensor, "b g l"], bool]:
    """Lengths in float32, rounded up, if all are within its range, else in float64; and whether float64 was needed."""
    if wide or not bool(((norms == 0) | ((norms >= _SHORTEST) & (norms <= _LONGEST))).all()):
        return norms, True
    near = norms.float()
    return torch.where(near.double() < norms, near.nextafter(torch.full_like(near, torch.inf)), near), False


def wider(extremes: Float64[Tensor, "b g 2"], lengths: Float[Tensor, "b g l"]) -> Float64[Tensor, "b g 2"]:
    """The shortest and the longest so far, with some more lengths."""
    shortest, longest = extremes.unbind(-1)
    return torch.stack([torch.minimum(shortest, lengths.amin(-1)), torch.maximum(longest, lengths.amax(-1))], -1)


def _measured(k: Float[Tensor, "b g s d"], count: int) -> tuple[Float32[Tensor, "b g d"], Float64[Tensor, "b g"]]:
    """The metric and the size of the sketch, from the first whole groups among the first `count` keys.

    One head after the other: in float64 all would take many times the memory of what is kept of them.
    """
    whole = k[:, :, : min(count // GROUP, _GROUPS_AT_ONCE) * GROUP]
    each = [sketched(head, 4) for head in whole.split(1, 1)]
    return torch.cat([one.metric for one in each], 1), torch.cat([one.size for one in each], 1)


def row_lengths(rows: Float[Tensor, "b h n d"]) -> list[float]:
    """Upper bounds on the norms of rows on a CPU, right to `slack` above 2^-20; nan or inf if a number is.

    As `row_norms` has them, without a look at how small they are: squares vanish in float32 below 2^-63, and so do
    subnormal numbers that a CPU may flush, which is far less than what is added.
    """
    dim = rows.shape[-1]
    grown, added = 1 + norm_slack(dim, rows.dtype, True) / 2, 2.0**-60 * math.sqrt(dim)
    return [x * grown + added for heads in row_sizes(rows).tolist() for head in heads for x in head]


@functools.cache
def norm_slack(dim: int, dtype: torch.dtype, wide: bool) -> float:
    """How far norms that a cache keeps may be above the true ones, relatively."""
    return slack(dim, dtype) + (0.0 if wide else 2.0**-22)  # those in float32 were rounded up once more


def row_sizes(rows: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n"]:
    """Norms of rows in their accumulator's type, as near as `slack`."""
    # A norm in the rows' own type takes half the time of one that has to convert them.
    same = rows.dtype in (torch.float32, torch.float64)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=None if same else torch.float32)
