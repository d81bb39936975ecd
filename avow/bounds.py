r"""What it costs others to leave keys unread, or to keep them in fewer bits: a proved bound for every row.

**Keys left unread.** Of a row's weights let the keys that are read have the share :math:`1 - \tau` and the mean
:math:`\mu_h` of their values, the others :math:`\tau` and :math:`\mu_t`. The true answer is
:math:`(1-\tau)\mu_h + \tau\mu_t`, so the answer over the keys that are read, :math:`\mu_h`, is off by exactly
:math:`\tau\|\mu_t - \mu_h\|` (the head-tail identity, arXiv 2512.07647). Here both means and the odds
:math:`\tau/(1-\tau)` are computed in float64. With logits off by at most :math:`\delta`, each sum of weights is off
by a factor within :math:`e^{\pm\delta}`, the odds by :math:`e^{\pm2\delta}`, and each mean by what
`reference_error` bounds.

**Keys and values replaced.** If the originals are given, the error is computed, and that of float64 added. From norms
:math:`r_j \ge \|k_j - \hat k_j\|` alone: logits move by at most :math:`e_j = |scale|\|q\| r_j`, so the true weights are
:math:`\alpha_j = \hat\alpha_j e^{\epsilon_j}/Z` with :math:`|\epsilon_j| \le e_j` and
:math:`Z_- \le Z \le Z_+`, where :math:`Z_\pm = \sum_j \hat\alpha_j e^{\pm e_j}`. Hence
:math:`|\alpha_j - \hat\alpha_j| \le \hat\alpha_j m_j` with :math:`m_j = \max(e^{e_j}/Z_- - 1, 1 - e^{-e_j}/Z_+)`, and,
because these differences add up to zero, for any centre c

.. math:: \|\textstyle\sum_j (\alpha_j - \hat\alpha_j) \hat v_j\| \le \sum_j \hat\alpha_j m_j \|\hat v_j - c\|.

It is at most :math:`2\tanh(\max_j e_j/2) \max_j \|\hat v_j - c\|`, too [claim softmax-perturbation]. The values' own
part is at most :math:`\sum_j \alpha_j \|v_j - \hat v_j\| \le \sum_j \hat\alpha_j (1 + m_j) \|v_j - \hat v_j\|`.

What the kernel itself rounds is added to either, for one of which nothing is known but the type of its sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from avow.attend import own_arithmetic
from avow.core import SOFTMAX, Certificate, Computed, Problem, check_tensor, dtype_name
from avow.core.audit import logit_error, reference_error, top_at_zero
from avow.core.certify import absolute_errors, certify
from avow.core.sdpa_names import mask_and_causal
from avow.errors import DtypeError, NonFiniteError, ParameterError, ShapeError, value_text
from avow.methods.exact import Exact
from avow.numerics import rounding
from avow.numerics.heads import longest_seen, per_query_head
from avow.numerics.masks import masked, row_tiles, seen_by
from avow.numerics.norms import length_floors, lengths, norm_floor, widened
from avow.numerics.rounding import SAFETY

__all__ = [
    "Blocks",
    "Quantised",
    "QuantisedBound",
    "SelectionBound",
    "SkipThreshold",
    "Window",
    "bound_quantised",
    "bound_selection",
]

_U = rounding.unit(torch.float64)
# Pairs of a row and a key whose logits are held at once.
_PAIRS = 2**22


class AnyOrder(Exact):
    """Exact attention by a kernel of which nothing is known but the type of its sums."""

    averages: ClassVar[bool] = False  # the answers that are judged are not available

    def _many_at_once(self, p: Problem) -> bool:
        return False


@dataclass(frozen=True)
class Window:
    """The last keys that a row sees, and the first.

    Attributes:
        size: how many of the last.
        sinks: how many of the first.
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("sinks", 0)):
            _whole(f"Window.{name}", getattr(self, name), least)

    def _read(self, seen: Tensor, logits: Tensor, first: int) -> Tensor:
        place = seen.cumsum(-1)
        return (place <= self.sinks) | (place > place[..., -1:] - self.size)


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys for blocks of rows.

    Attributes:
        mask: True at blocks that are read, broadcast to (batch, heads, blocks of rows, blocks of keys).
        rows: rows in a block.
        keys: keys in a block.
    """

    mask: Tensor
    rows: int
    keys: int

    def __post_init__(self) -> None:
        check_tensor("Blocks.mask", self.mask)
        if self.mask.dtype != torch.bool or self.mask.ndim < 2:
            rule = "must be booleans with two axes or more"
            raise DtypeError("Blocks.mask", value_text(self.mask), rule, "True means that a block is read")
        for name in ("rows", "keys"):
            _whole(f"Blocks.{name}", getattr(self, name), 1)

    def _check(self, p: Problem) -> None:
        wanted = (*p.q.shape[:2], -(-p.q.shape[-2] // self.rows), -(-p.k.shape[-2] // self.keys))
        _broadcast("Blocks.mask", self.mask, wanted)

    def _read(self, seen: Tensor, logits: Tensor, first: int) -> Tensor:
        (n, s), (rows, keys) = logits.shape[-2:], self.mask.shape[-2:]
        row = torch.arange(first, first + n, device=logits.device) // self.rows % rows
        key = torch.arange(s, device=logits.device) // self.keys % keys
        return self.mask.to(logits.device)[..., row, :][..., key]


@dataclass(frozen=True)
class SkipThreshold:
    """Tiles of keys are left unread if exp(largest logit of the tile - largest logit so far) is below `factor`/keys.

    A tile is left unread only if that holds for every row of a block.

    Attributes:
        factor: what is divided by the number of keys.
        keys: keys in a tile.
        rows: rows in a block.
    """

    factor: float
    keys: int = 128
    rows: int = 1

    def __post_init__(self) -> None:
        if not 0 <= float(self.factor) < math.inf:
            raise ParameterError("SkipThreshold.factor", self.factor, "must be a number of at least 0", "try 587")
        for name in ("rows", "keys"):
            _whole(f"SkipThreshold.{name}", getattr(self, name), 1)

    def _read(self, seen: Tensor, logits: Tensor, first: int) -> Tensor:
        s, n = logits.shape[-1], logits.shape[-2]
        tiles, blocks = -(-s // self.keys), -(-n // self.rows)
        shown = torch.nn.functional.pad(logits, (0, tiles * self.keys - s), value=-math.inf)
        tops = shown.unflatten(-1, (tiles, self.keys)).amax(-1)
        least = math.log(self.factor / s) if self.factor else -math.inf
        low = (tops - tops.cummax(-1).values < least) | (tops == -math.inf)
        together = torch.nn.functional.pad(low, (0, 0, 0, blocks * self.rows - n), value=True)
        skipped = together.unflatten(-2, (blocks, self.rows)).all(-2).repeat_interleave(self.rows, -2)[..., :n, :]
        return ~skipped.repeat_interleave(self.keys, -1)[..., :s]


@dataclass(frozen=True)
class _Keys:
    """The keys that a mask shows, or a list names for each row."""

    mask: Tensor | None = None
    index: Tensor | None = None

    @staticmethod
    def of(read: Tensor, p: Problem) -> _Keys:
        check_tensor("read", read)
        wanted = (*p.q.shape[:3], p.k.shape[-2])
        if read.dtype == torch.bool:
            _broadcast("read", read, wanted)
            return _Keys(mask=read.to(p.q.device))
        if read.is_floating_point() or read.is_complex():
            rule = "must hold booleans, or whole numbers padded with -1"
            raise DtypeError("read.dtype", read.dtype, rule, "use .long() for indices, or .bool() for a mask")
        _broadcast("read", read, (*wanted[:3], read.shape[-1] if read.ndim else 0))
        index = read.long().to(p.q.device)
        if index.numel():
            low, high = (int(x) for x in torch.aminmax(index))
            if low < -1 or high >= wanted[-1]:
                rule = f"must lie between -1 and {wanted[-1] - 1}"
                raise ParameterError("read", low if low < -1 else high, rule, "pad lists of keys with -1")
            listed = index.sort(-1).values
            if bool(((listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] >= 0)).any()):
                rule = "names a key twice for one row, which a kernel would count twice"
                raise ParameterError("read", value_text(read), rule, "name each key once, and pad with -1")
        return _Keys(index=index)

    def _read(self, seen: Tensor, logits: Tensor, first: int) -> Tensor:
        given = self.mask if self.index is None else self.index
        assert given is not None
        some = given if given.ndim < 2 or given.shape[-2] == 1 else given[..., first : first + logits.shape[-2], :]
        if self.index is None:
            return some
        some = some.expand(*logits.shape[:-1], some.shape[-1])
        found = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
        return found.scatter_(-1, some + 1, True)[..., 1:]  # -1 goes to a place of its own


Selection = Tensor | Window | Blocks | SkipThreshold


@dataclass(frozen=True)
class SelectionBound:
    """What keys that are left unread cost each row.

    Attributes:
        certificate: a bound on the error of an answer over the keys that are read, its kernel's rounding included.
        loss: the bound without that rounding, relative to the longest value that the row sees, (batch, heads, n).
        mass: the largest share of the weight that the unread keys may have, (batch, heads, n).
        least_mass: the smallest that they may have, (batch, heads, n).
        kept: the share of the keys that a row sees which are read, (batch, heads, n).
    """

    certificate: Certificate
    loss: Float64[Tensor, "*rows"]
    mass: Float64[Tensor, "*rows"]
    least_mass: Float64[Tensor, "*rows"]
    kept: Float64[Tensor, "*rows"]

    def __str__(self) -> str:
        most, kept = (
            float(x) if x.numel() else 0.0
            for x in (self.mass.amax() if self.mass.numel() else self.mass, self.kept.mean())
        )
        return f"{kept:.1%} of the keys are read; the others weigh at most {most:.2e}\n{self.certificate}"


@dataclass(frozen=True)
class QuantisedBound:
    """What keys and values in fewer bits cost each row.

    Attributes:
        certificate: a bound on the error of an answer from these keys and values, its kernel's rounding included.
        loss: the bound without that rounding, relative to the longest value that the row sees, (batch, heads, n).
        keys: the part of the keys, (batch, heads, n).
        values: the part of the values, (batch, heads, n).
    """

    certificate: Certificate
    loss: Float64[Tensor, "*rows"]
    keys: Float64[Tensor, "*rows"]
    values: Float64[Tensor, "*rows"]

    def __str__(self) -> str:
        parts = [float(x.amax()) if x.numel() else 0.0 for x in (self.keys, self.values)]
        return f"keys cost at most {parts[0]:.2e}, values {parts[1]:.2e}, of the longest value\n{self.certificate}"


@dataclass(frozen=True)
class Quantised:
    """Keys or values as (code - zero)·scale, in one of the layouts that caches have.

    Attributes:
        codes: whole numbers, (batch, heads, s, dim); numbers of float8_e4m3fn or float8_e5m2; or, with `bits=4`, bytes
            of two numbers each along the last axis, the low half first.
        scale: broadcast to the codes; an axis may also be shorter by a whole factor, for groups of neighbours.
        zero: as `scale`; None is zero.
        bits: 8, or 4 for two numbers in a byte.
        signed: whether numbers of four bits are -8 to 7, and not 0 to 15.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    bits: int = 8
    signed: bool = False

    def values(self) -> Float64[Tensor, "b g s d"]:
        """The numbers, in float64."""
        check_tensor("codes", self.codes)
        if self.bits not in (4, 8) or (self.bits == 4 and self.codes.dtype != torch.uint8):
            rule = "must be 8, or 4 with codes of type uint8"
            raise ParameterError("Quantised.bits", self.bits, rule, "pack two numbers of four bits into a byte")
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).short()
            codes = torch.where(codes > 7, codes - 16, codes) if self.signed else codes
        codes = codes.double()
        zero = 0.0 if self.zero is None else _grouped("Quantised.zero", self.zero, codes)
        return (codes - zero) * _grouped("Quantised.scale", self.scale, codes)


def _grouped(name: str, x: Tensor, codes: Tensor) -> Tensor:
    """Scales or zeros in float64, one for each code or broadcast to them."""
    check_tensor(name, x)
    x = x.double().reshape((1,) * (codes.ndim - x.ndim) + tuple(x.shape))
    for axis, (have, want) in enumerate(zip(x.shape, codes.shape, strict=True)):
        if have not in (1, want):
            if not have or want % have:
                rule = f"must broadcast to the codes {tuple(codes.shape)}, or divide them into groups"
                raise ShapeError(f"shape of {name}", tuple(x.shape), rule, "give one for each channel, token or group")
            x = x.repeat_interleave(want // have, axis)
    return x


@own_arithmetic
def bound_selection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    read: Selection,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> SelectionBound:
    """What it costs each row to read some keys alone: the mass of the others, and a proved bound on the error.

    A row that reads nothing is taken to be answered with zeros. Keys that a row may not see do not count, read or not.

    Args:
        q: queries, (batch, heads, n, dim).
        k: keys, (batch, key heads, s, dim).
        v: values, (batch, key heads, s, value dim).
        read: which keys a row reads: booleans, broadcast to (batch, heads, n, s); whole numbers, broadcast to (batch,
            heads, n, any), lists of keys padded with -1; or a `Window`, `Blocks` or `SkipThreshold` of `avow.bounds`.
        mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.

    Returns:
        The bounds, the mass and the share of keys that are read, for every row.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> bound = avow.bound_selection(q, k, v, read=avow.bounds.Window(16, sinks=4), causal=True)
    >>> bool((bound.mass[..., :20] == 0).all()), bound.certificate.kind
    (True, 'deterministic')
    """
    p, wide = _problems(q, k, v, mask, causal, scale, enable_gqa, attn_mask, is_causal)
    rule: Any = _Keys.of(read, p) if isinstance(read, Tensor) else read
    if not isinstance(rule, Window | Blocks | SkipThreshold | _Keys):
        remedy = "pass booleans, indices padded with -1, or a Window, Blocks or SkipThreshold of avow.bounds"
        raise ParameterError("read", value_text(read), "is no selection of keys", remedy)
    if isinstance(rule, Blocks):
        rule._check(p)
    if p.empty:
        zeros = wide.q.new_zeros(p.q.shape[:-1])
        nothing = p.v.new_zeros(*p.q.shape[:-1], p.v.shape[-1])
        certificate, loss = _certificate(p, wide, "selection", {}, zeros, zeros, nothing, zeros)
        return SelectionBound(certificate, *(x.reshape(*p.leading, -1) for x in (loss, zeros, zeros, zeros)))
    delta, own = logit_error(wide), reference_error(wide)
    step = rule.rows if isinstance(rule, SkipThreshold) else 1
    parts: list[tuple[Tensor, ...]] = []
    for rows, logits, seen, values in _tiles(wide, step):
        shown = rule._read(seen, logits, rows.start) & seen
        count, all_seen = shown.expand_as(logits).sum(-1), seen.expand_as(logits).sum(-1)
        (heavy, head), (light, tail) = (
            _mean(torch.where(x, logits, -math.inf), values) for x in (shown, seen & ~shown)
        )
        off = 2 * (delta[..., rows] + 8 * _U * 746 + 2 * rounding.gamma(values.shape[-2] + 8, _U))
        off = off + 8 * _U * (heavy.abs().nan_to_num(0.0, 0.0, 0.0) + light.abs().nan_to_num(0.0, 0.0, 0.0))
        odds = torch.where(count == all_seen, -math.inf, torch.where(count == 0, math.inf, light - heavy))
        most, least = ((torch.sigmoid(odds + side * off) * (1 + side * 1e-12)).clamp(0, 1) for side in (1, -1))
        most = torch.where(count < all_seen, most.clamp(min=1e-300), 0.0)  # shares may be smaller than numbers are
        truth = (1 - least.unsqueeze(-1)) * head + least.unsqueeze(-1) * tail
        # The true answer is this with the true share, which is at most `most − least` from the one that is taken.
        gap = lengths(head - tail)
        parts.append(
            (most, least, gap, length_floors(truth) - (most - least) * gap, count / all_seen.clamp(min=1), head)
        )
    most, least, gap, length, kept = (torch.cat([part[i] for part in parts], -1) for i in range(5))
    out = torch.cat([part[5] for part in parts], -2)
    longest = longest_seen(wide, wide.norms.v)
    means = torch.where(kept > 0, 2.0, 1.0) * own * longest + _lost(wide)
    absolute = torch.minimum(most * (gap + means), most * torch.where(kept > 0, 2.0, 1.0) * longest) * SAFETY
    absolute = torch.where((most > 0) & (longest > 0), absolute, 0.0)
    unit = norm_floor(longest, wide.norms.slack, wide.v.shape[-1]).expand_as(absolute)
    named = {"read": type(read).__name__}
    certificate, loss = _certificate(p, wide, "selection", named, absolute, length - means, out, unit)
    assumes = ["a row that reads nothing is answered with zeros"] if bool((kept == 0).any()) else []
    if isinstance(rule, SkipThreshold):
        assumes.append("the kernel skips the tiles that float64 finds below the threshold")
    certificate = dataclasses.replace(certificate, assumptions=(*certificate.assumptions, *assumes))
    tensors = (x.reshape(*p.leading, -1) for x in (loss, most, least, kept.double()))
    return SelectionBound(certificate, *tensors)


@own_arithmetic
def bound_quantised(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_hat: Tensor | Quantised,
    v_hat: Tensor | Quantised,
    *,
    key_residuals: Tensor | None = None,
    value_residuals: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> QuantisedBound:
    """What it costs each row that keys and values are replaced, by those of a quantised cache say: a proved bound.

    With k and v the errors themselves are computed. Without them, norms of what each key and value lost bound them.

    Args:
        q: queries, (batch, heads, n, dim).
        k: keys, (batch, key heads, s, dim); None if they are gone.
        v: values, (batch, key heads, s, value dim); None if they are gone.
        k_hat: what the kernel reads in their place: numbers, or `Quantised` codes of `avow.bounds`.
        v_hat: the same for values.
        key_residuals: without k, at least the length of what each key lost, broadcast to (batch, key heads, s).
        value_residuals: without v, the same for values.
        mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
            numbers that are added to the logits, -inf at keys that may not.
        causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
        scale: what q·k is multiplied by; None is 1/sqrt(dim).
        enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
        attn_mask: PyTorch's name for `mask`.
        is_causal: PyTorch's name for `causal`.

    Returns:
        The bounds, with the parts of keys and values, for every row.

    Raises:
        RangeError: norms are beyond what float64 can carry.
        ShapeError: sizes do not fit together.
        DtypeError: something is not a tensor, or of a type or on a device that does not fit.
        NonFiniteError: q, k, v, their replacements or the mask hold nan, or inf where that is not allowed.
        ParameterError: an option has a value that it must not have; the message names it.

    >>> import torch, avow
    >>> q, k, v = torch.randn(3, 1, 8, 64, 16).unbind()
    >>> bound = avow.bound_quantised(q, k, v, k.to(torch.float8_e4m3fn).float(), v)
    >>> bool((bound.values < 1e-9).all()), bool(bound.keys.max() > 1e-3)
    (True, True)
    """
    check_tensor("q", q)
    if not q.dtype.is_floating_point:
        raise DtypeError("q.dtype", q.dtype, "must be a floating point type", "convert q, say by q.float()")
    kh, vh = _numbers("k_hat", k_hat), _numbers("v_hat", v_hat)
    narrow = [rounding.saturating_cast(x, q.dtype) for x in (kh, vh)]
    p, wide = _problems(q, narrow[0], narrow[1], mask, causal, scale, enable_gqa, attn_mask, is_causal)
    wide = dataclasses.replace(wide, k=kh.reshape(wide.k.shape), v=vh.reshape(wide.v.shape)).measure_norms()
    known = k is not None and v is not None
    for name, original, residuals in (("k", k, key_residuals), ("v", v, value_residuals)):
        if (original is None) != (not known) or (residuals is None) != known:
            rule = "must be given with k, v and without residual norms, or the other way round"
            raise ParameterError(name, value_text(original), rule, "give both k and v, or both norms of what was lost")
        if isinstance(original, Tensor) and original.shape != (kh if name == "k" else vh).shape:
            rule = f"must be that of {name}_hat, {tuple((kh if name == 'k' else vh).shape)}"
            raise ShapeError(f"{name}.shape", tuple(original.shape), rule, "replace each number by one")
    if p.empty:
        zeros = wide.q.new_zeros(p.q.shape[:-1])
        found = (zeros, zeros, zeros, zeros, zeros, p.v.new_zeros(*p.q.shape[:-1], p.v.shape[-1]))
    elif k is not None and v is not None:
        found = _replaced(_problems(q, k, v, mask, causal, scale, enable_gqa, attn_mask, is_causal)[1], wide)
    else:
        named = (("key_residuals", key_residuals), ("value_residuals", value_residuals))
        found = _from_residuals(wide, *(_residuals(name, x, wide) for name, x in named))
    total, keys, values, unit, length, out = found
    basis = {"known": "k and v" if known else "residual norms"}
    certificate, loss = _certificate(p, wide, "quantised", basis, total, length, out, unit)
    tensors = (x.reshape(*p.leading, -1) for x in (loss, _over(keys, unit), _over(values, unit)))
    return QuantisedBound(certificate, *tensors)


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _replaced(true: Problem, hat: Problem) -> _Parts:
    """Errors and their parts, computed in float64: in all, of keys, of values, the unit, the answers' least lengths."""
    parts: list[tuple[Tensor, ...]] = []
    for (_, logits, _, values), (_, moved, _, other) in zip(_tiles(true), _tiles(hat), strict=True):
        (_, truth), (_, middle), (_, answer) = _mean(logits, values), _mean(moved, values), _mean(moved, other)
        ends = (answer - truth, middle - truth, answer - middle)
        parts.append((*map(lengths, ends), length_floors(truth), answer))
    total, keys, values, length = (torch.cat([part[i] for part in parts], -1) for i in range(4))
    longest, other = (longest_seen(x, x.norms.v) for x in (true, hat))
    own = reference_error(true) + reference_error(hat)
    off = own * torch.maximum(longest, other) + _lost(true) + _lost(hat)
    unit = norm_floor(longest, true.norms.slack, true.v.shape[-1]).expand_as(total)
    total, keys, values = ((x + off) * SAFETY for x in (total, keys, values))
    out = torch.cat([part[4] for part in parts], -2)
    return total, keys, values, unit, length - off, out


def _from_residuals(hat: Problem, key: Tensor, value: Tensor) -> _Parts:
    """The same from the norms of what keys and values lost."""
    key, value = (per_query_head(x, hat.q.shape[1]).unsqueeze(-2) for x in (key, value))  # (b, h, 1, s)
    own, norms = reference_error(hat), hat.norms
    delta = logit_error(hat) + 8 * _U * 746 + 4 * rounding.gamma(hat.k.shape[-2] + 8, _U)
    parts: list[tuple[Tensor, ...]] = []
    for rows, logits, seen, values in _tiles(hat):
        weights = torch.softmax(logits, -1).nan_to_num(0.0)
        mean = weights @ values
        # What logits may move, with what float64 may have moved them.
        moved = (abs(hat.scale) * norms.q[..., rows, None] * key + delta[..., rows, None]) * SAFETY
        moved = torch.where(seen, moved, 0.0)
        most = moved.amax(-1)
        up, down = (weights * torch.exp(side * moved) for side in (1, -1))
        low, high = down.sum(-1, keepdim=True), up.sum(-1, keepdim=True)
        shift = torch.maximum(torch.exp(moved) / low - 1, 1 - torch.exp(-moved) / high) * SAFETY + 1e-9
        # ‖v − c‖² from three products; what cancels is added again.
        sizes, centre = values.square().sum(-1)[..., None, :], mean.square().sum(-1)[..., None]
        apart = (sizes + centre - 2 * mean @ values.mT).clamp(min=0.0)
        apart = torch.sqrt(apart + rounding.gamma(4 * values.shape[-1] + 16, _U) * (sizes + centre)) * SAFETY
        usual = (sizes + centre > 1e-250) & (sizes + centre < math.inf)  # squares that float64 holds
        apart = torch.where(
            usual, apart, per_query_head(norms.v, hat.q.shape[1])[..., None, :] + lengths(mean)[..., None]
        )
        apart = torch.where(seen, apart, 0.0)
        lost = torch.where(seen, value, 0.0)
        whole = rounding.softmax_l1_bound(most) * apart.amax(-1)
        keys = torch.fmin((weights * shift * apart).sum(-1).nan_to_num(math.inf, math.inf), whole)
        values_part = torch.fmin((weights * (1 + shift) * lost).sum(-1).nan_to_num(math.inf, math.inf), lost.amax(-1))
        floors = norm_floor(per_query_head(norms.v, hat.q.shape[1]), norms.slack, values.shape[-1]).unsqueeze(-2)
        unit = torch.where(seen, floors - value, 0.0).amax(-1).clamp(min=0.0) / SAFETY
        parts.append((keys, values_part, unit, length_floors(mean), mean))
    keys, values, unit, length = (
        torch.cat([part[i].expand(*part[0].shape[:2], -1) for part in parts], -1) for i in range(4)
    )
    off = own * longest_seen(hat, norms.v) + _lost(hat)
    keys, values = ((x * (1 + 1e-9) + off) * SAFETY for x in (keys, values))
    total = (keys + values) * SAFETY
    return total, keys, values, unit, length - off - total, torch.cat([part[4] for part in parts], -2)


def _problems(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    attn_mask: Tensor | None,
    is_causal: bool | None,
) -> tuple[Problem, Problem]:
    """The problem as it is, checked, and in float64 without each row's largest bias."""
    mask, causal = mask_and_causal(mask, causal, attn_mask, is_causal)
    p = Problem.of(q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa).detached().measure_norms()
    wide = dataclasses.replace(p, q=widened(p.q), k=widened(p.k), v=widened(p.v))
    return p, top_at_zero(wide).with_norms(p.norms)


def _tiles(p: Problem, step: int = 1) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some rows at a time, a whole number of steps: which, their logits, the keys that they see, and the values."""
    keys, values = (per_query_head(x, p.q.shape[1]) for x in (p.k, p.v))
    per_row = p.q.shape[0] * p.q.shape[1] * p.k.shape[-2]
    for rows in row_tiles(-(-p.q.shape[-2] // step), per_row * step, _PAIRS):
        some = slice(rows.start * step, min(rows.stop * step, p.q.shape[-2]))
        logits = masked(p, p.scale * (p.q[..., some, :] @ keys.mT), some)
        yield some, logits, seen_by(p, some), values


def _mean(logits: Float[Tensor, "b h l s"], values: Tensor) -> tuple[Tensor, Tensor]:
    """The log of the sum of weights, and the average of values under them; zero if there is none."""
    if not logits.shape[-1]:
        return logits.new_full(logits.shape[:-1], -math.inf), logits.new_zeros(*logits.shape[:-1], values.shape[-1])
    return torch.logsumexp(logits, -1), torch.softmax(logits, -1).nan_to_num(0.0) @ values


def _lost(p: Problem) -> float:
    """What products below the smallest normal number may cost an average."""
    return (p.k.shape[-2] + 4) * math.sqrt(p.v.shape[-1]) * rounding.tiny(torch.float64)


def _certificate(
    p: Problem,
    wide: Problem,
    method: str,
    parameters: dict[str, Any],
    absolute: Tensor,
    length: Tensor,
    out: Tensor,
    unit: Tensor,
) -> tuple[Certificate, Tensor]:
    """The certificate of errors up to `absolute` and of the kernel's rounding, and these errors in units of the longest
    value, which is at least `unit`; true answers are at least as long as `length`.
    """
    read = dataclasses.replace(p, k=wide.k, v=wide.v).with_norms(wide.norms)
    fits = p.empty or AnyOrder().fits(read, *wide.norms.most)
    total, assumes = absolute, ["what is read is averaged in real arithmetic, but for the kernel's rounding"]
    if fits:
        rounded = certify(AnyOrder(), read, Computed(rounding.saturating_cast(out, p.q.dtype), 1.0), 1.0)
        assumes += rounded.assumptions
        # The answer that is rounded last may be longer than this one, by what was rounded before.
        more = rounded.rows.reshape(absolute.shape) * (1 + rounding.unit(p.q.dtype))
        total = (absolute + absolute_errors(more, longest_seen(wide, wide.norms.v))) * SAFETY
    rows, loss, own = (_over(*x) for x in ((total, unit), (absolute, unit), (total, length)))
    if not fits:
        rows, own = torch.full_like(rows, math.inf), torch.full_like(own, math.inf)
    bound, relative = (float(x.amax()) if x.numel() else 0.0 for x in (rows, own))
    rows, own = (x.reshape(*p.leading, p.q.shape[-2]) for x in (rows, own))
    certificate = Certificate(
        method=method,
        parameters=parameters,
        target=SOFTMAX,
        kind="deterministic" if fits else "none",
        bound=bound,
        rows=rows,
        assumptions=tuple(assumes),
        reason="" if fits else f"{dtype_name(p.q.dtype)} may overflow",
        relative=relative,
        relative_rows=own,
    )
    return certificate, loss


def _over(absolute: Tensor, unit: Tensor) -> Tensor:
    """Errors in a unit that is at least so long; infinite if that is not known to be anything."""
    # Units may be anything above 0: one that is replaced by a longer one would make errors look small.
    relative = torch.where(unit > 0, absolute * SAFETY**2 / torch.where(unit > 0, unit, 1.0), math.inf)
    return torch.where(absolute > 0, relative, 0.0)


def _residuals(name: str, x: Tensor | None, p: Problem) -> Tensor:
    """Norms that somebody gives, as float64 of the size of the keys."""
    assert x is not None
    check_tensor(name, x)
    wanted = tuple(p.k.shape[:3])
    _broadcast(name, x, wanted)
    wide = x.double().expand(wanted)
    if wide.numel() and not bool((wide >= 0).all() & (wide < math.inf).all()):
        raise NonFiniteError(
            name, value_text(x), "must hold finite numbers of at least 0", "give the norms of what was lost"
        )
    return wide


def _numbers(name: str, x: object) -> Tensor:
    """The numbers that a kernel reads, in float64."""
    x = x.values() if isinstance(x, Quantised) else x
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    if not x.is_floating_point():
        raise DtypeError(f"{name}.dtype", x.dtype, "must be a float type", "pass codes with their scales, as Quantised")
    wide = x.double() if x.dtype.itemsize == 1 else widened(x)
    if not bool(torch.isfinite(wide).all()):
        raise NonFiniteError(
            name, "nan or inf", "must be finite", f"remove NaN and inf from {name}, or from its scales"
        )
    return wide


def _broadcast(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    """Raise unless a tensor broadcasts to a shape."""
    shape = (1,) * (len(wanted) - x.ndim) + tuple(x.shape)
    if len(shape) != len(wanted) or any(have not in (1, want) for have, want in zip(shape, wanted, strict=True)):
        raise ShapeError(f"shape of {name}", tuple(x.shape), f"must broadcast to {wanted}", "give it these axes")


def _whole(name: str, value: object, least: int) -> None:
    """Raise unless something is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(
            name, value_text(value), f"must be a whole number of at least {least}", f"try {max(least, 128)}"
        )
