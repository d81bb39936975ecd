"""What is asked: q, k, v and a mask as every method receives them, their sizes, norms and number types."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from avow.errors import DtypeError, NonFiniteError, ParameterError, ShapeError, value_text
from avow.numerics.norms import check_range, row_norms, slack
from avow.parameters import as_float, declared

MaskKind = Literal["none", "keys", "full"]
# From fine to coarse.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """A problem without its numbers: all that a cost depends on.

    Attributes:
        batch: sequences.
        heads: query heads.
        key_heads: heads of keys and values; they divide the query heads.
        queries: rows of each head.
        keys: keys of each head.
        dim: features of a query and of a key.
        value_dim: features of a value.
        dtype: type of q, k and v.
        device: kind of their device, such as "cpu".
        causal: whether row i sees keys 0 to i alone.
        mask: "none", "keys" if every row sees the same keys, or "full".
        biased: whether numbers are added to the logits.
        own_masks: whether query heads that share keys hide different ones.

    >>> from avow import Sizes
    >>> Sizes(1, 32, 8, queries=1, keys=4096, dim=128, value_dim=128).with_keys(8192).keys
    8192
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    causal: bool = False
    mask: MaskKind = "none"
    biased: bool = False
    own_masks: bool = False

    @property
    def item(self) -> int:
        """Bytes of one input number."""
        return self.dtype.itemsize

    @property
    def linear_key_heads(self) -> int:
        """Key heads a linear method sums over: all query heads if they mask a shared key differently."""
        return self.heads if self.own_masks else self.key_heads

    @declared()
    def with_keys(self, keys: int) -> Sizes:
        """The same problem with another number of keys, and of queries if there are as many, as in self-attention.

        Args:
            keys: how many keys there are.

        Returns:
            The sizes of that problem.
        """
        queries = keys if self.queries == self.keys > 1 else self.queries
        return dataclasses.replace(self, queries=queries, keys=keys)


@dataclass(frozen=True)
class Problem:
    r"""One attention call in canonical form: four axes, one mask, one bias, one scale.

    The target of the softmax family is, over the keys j that row i may see,

    .. math:: o^*_i = \sum_j \alpha_{ij} v_j, \quad
              \alpha_{ij} \propto \exp(\mathrm{scale} \cdot q_i \cdot k_j + \mathrm{bias}_{ij})

    in real arithmetic. A row that may see no key has :math:`o^*_i = 0`.

    Attributes:
        q: queries, (b, h, n, d).
        k: keys, (b, g, s, d), where g divides h.
        v: values, (b, g, s, e).
        allowed: True at keys that a row may see, broadcast to (b, h, n, s); None if all are seen. Causality is not in
            it.
        bias: what is added to the logits, broadcast to (b, h, n, s); None for nothing.
        causal: whether row i sees keys 0 to i alone.
        scale: what q·k is multiplied by.
        default_scale: whether that is 1/sqrt(d) because nobody said otherwise.
        kernel: "dot", or "rbf", whose part that depends on keys is in `bias`.
        leading: the axes of q before n and d, as they were given.

    >>> import torch
    >>> from avow import Problem
    >>> q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    >>> Problem.of(q, k, v, causal=True).sizes.keys
    9
    """

    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    allowed: Bool[Tensor, "#b #h #n s"] | None
    bias: Float[Tensor, "#b #h #n s"] | None
    causal: bool
    scale: float
    default_scale: bool
    kernel: Literal["dot", "rbf"]
    leading: tuple[int, ...]
    known_norms: Norms | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    """`norms` if they were measured or given already. `dataclasses.replace` never copies them."""

    def __repr__(self) -> str:
        return _fields_text(self)

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        kernel: str = "dot",
        sigma: float | None = None,
    ) -> Problem:
        """The canonical problem, after every check that does not need to read the numbers of q, k and v.

        Args:
            q: queries, (batch, heads, n, dim). Further batch axes may come before these four, and batch and heads may
                be left out.
            k: keys, (batch, key heads, s, dim).
            v: values, (batch, key heads, s, value dim).
            mask: which keys a row sees, broadcast to (batch, heads, n, s): booleans, True at keys that may be seen, or
                numbers that are added to the logits, -inf at keys that may not.
            causal: whether row i sees keys 0 to i alone; a `mask` hides more of them.
            scale: what q·k is multiplied by; None is 1/sqrt(dim).
            enable_gqa: whether key heads may be fewer than query heads, each shared by heads/key heads of them.
            kernel: "dot" for weights exp(scale·q·k), or "rbf" for exp(-‖q - k‖²/(2·sigma)).
            sigma: width of the RBF kernel; for `kernel="rbf"` alone.

        Returns:
            The problem with four axes, one mask, one bias and one scale.

        Raises:
            ShapeError: sizes do not fit together.
            DtypeError: something is not a tensor, or of a type or on a device that does not fit.
            NonFiniteError: the mask holds nan or +inf.
            ParameterError: an option has a value that it must not have; the message names it.
        """
        _check_tensors(q, k, v, enable_gqa)
        leading = tuple(q.shape[:-2])
        q4, k4, v4 = (_four(x) for x in (q, k, v))
        allowed, bias = _split_mask(mask, leading, q4.shape[-2], k4.shape[-2], q)
        default_scale = scale is None
        if not isinstance(causal, bool):
            raise ParameterError("causal", value_text(causal), "must be True or False", "pass other masks with mask=")
        if kernel == "dot":
            if sigma is not None:
                raise ParameterError("sigma", sigma, 'belongs to kernel="rbf"', 'leave it out or pass kernel="rbf"')
            factor = 1 / math.sqrt(q.shape[-1]) if scale is None else as_float(scale)
            if not math.isfinite(factor):
                raise ParameterError("scale", scale, "must be finite", "leave scale out for 1/sqrt(dim)")
        elif kernel == "rbf":
            if scale is not None:
                raise ParameterError("scale", scale, 'has no meaning for kernel="rbf"', "set sigma instead")
            width = as_float(sigma)
            if not 0 < width < math.inf or math.isinf(factor := 1 / width):
                raise ParameterError("sigma", sigma, "must be a positive number", 'pass sigma=1.0 with kernel="rbf"')
            # softmax over keys of −‖q−k‖²/2σ: the ‖q‖² term is constant in a row and cancels  [claim rbf-equals-dot]
            shift = -(k4.double() ** 2).sum(-1).unsqueeze(-2) * (0.5 * factor)  # (b, g, 1, s)
            shift = shift.repeat_interleave(q4.shape[1] // max(k4.shape[1], 1), dim=1)
            bias = shift if bias is None else bias.double() + shift
        else:
            remedy = 'pass kernel="dot" or kernel="rbf"'
            raise ParameterError("kernel", value_text(kernel), "must be dot or rbf", remedy)
        shape: Literal["dot", "rbf"] = "dot" if kernel == "dot" else "rbf"
        return Problem(q4, k4, v4, allowed, bias, causal, factor, default_scale, shape, leading)

    @property
    def mask_kind(self) -> MaskKind:
        """`keys` when every row sees the same keys with the same bias, `full` when rows differ."""
        present = [x for x in (self.allowed, self.bias) if x is not None]
        if not present:
            return "none"
        return "keys" if all(x.shape[-2] == 1 for x in present) else "full"

    @property
    def sizes(self) -> Sizes:
        b, h, n, d = self.q.shape
        g, s, e = self.v.shape[1:]
        own_masks = h != g and any(x.shape[1] != 1 for x in (self.allowed, self.bias) if x is not None)
        kind, device, biased = self.q.dtype, self.q.device.type, self.bias is not None
        return Sizes(b, h, g, n, s, d, e, kind, device, self.causal, self.mask_kind, biased, own_masks)

    @property
    def empty(self) -> bool:
        """Whether there are no keys or no queries."""
        return self.q.numel() == 0 or self.k.shape[-2] == 0 or self.v.numel() == 0

    @property
    def norms(self) -> Norms:
        """Norms of every row, measured once; raises if a number is nan or inf, or a norm beyond float64's reach."""
        if self.known_norms is None:
            for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
                check_numbers(name, x)
            with torch.no_grad():
                values = row_norms(self.v, "v", faithful=True)
                error = slack(max(self.q.shape[-1], self.v.shape[-1]), self.q.dtype)
                norms = Norms(row_norms(self.q, "q"), row_norms(self.k, "k"), values, error)
            norms.check(self.scale)
            object.__setattr__(self, "known_norms", norms)
        assert self.known_norms is not None
        return self.known_norms

    def measure_norms(self) -> Problem:
        """This problem, its norms measured by now; raises if numbers are bad."""
        assert self.norms is not None
        return self

    def with_norms(self, norms: Norms | None) -> Problem:
        """The same problem with norms that are known already.

        Args:
            norms: the norms; None forgets them.

        Returns:
            A problem that shares its tensors with this one.
        """
        copy = dataclasses.replace(self)
        object.__setattr__(copy, "known_norms", norms)
        return copy

    def detached(self) -> Problem:
        """The same numbers, outside autograd."""
        parts = {name: getattr(self, name) for name in ("q", "k", "v", "allowed", "bias")}
        detached = dataclasses.replace(self, **{name: x.detach() for name, x in parts.items() if x is not None})
        return detached.with_norms(self.known_norms)

    def head(self, batch: int, head: int, key_head: int) -> Problem:
        """The problem of one head, every axis kept.

        Args:
            batch: which sequence.
            head: which query head.
            key_head: which key head.

        Returns:
            A problem with one head.
        """
        at, key = ((slice(batch, batch + 1), slice(i, i + 1)) for i in (head, key_head))
        full = self.q.shape[:2]
        allowed, bias = (None if x is None else x.expand(*full, *x.shape[2:])[at] for x in (self.allowed, self.bias))
        q, k, v = self.q[at], self.k[key], self.v[key]
        return dataclasses.replace(self, q=q, k=k, v=v, allowed=allowed, bias=bias, leading=(1, 1))

    def rows(self, index: Tensor) -> Problem:
        """The problem of some query rows of every head; `index` selects along n. Causality becomes a mask.

        Args:
            index: places of rows along n, a tensor of whole numbers.

        Returns:
            A problem with these rows.
        """
        n, s = self.q.shape[-2], self.k.shape[-2]
        allowed, bias = (
            x[..., index, :] if x is not None and x.shape[-2] == n and n > 1 else x for x in (self.allowed, self.bias)
        )
        if self.causal:
            past = torch.arange(s, device=index.device)[None, :] <= index[:, None]
            allowed = past[None, None] if allowed is None else allowed & past
        return dataclasses.replace(self, q=self.q[..., index, :], allowed=allowed, bias=bias, causal=False)


def _fields_text(thing: Problem | Norms) -> str:
    """The fields in one line, tensors by their shape and type."""
    fields = [field.name for field in dataclasses.fields(thing) if field.repr]
    return f"{type(thing).__name__}({', '.join(f'{name}={value_text(getattr(thing, name))}' for name in fields)})"


def _four(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    lead = x.shape[:-2]
    heads = lead[-1] if lead else 1
    return x.reshape(math.prod(lead[:-1]), heads, *x.shape[-2:])


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    # What most calls pass is recognised at once: on a GPU this is a part of every call's time.
    if _all_plain(q, k, v):
        queries, keys, values = q.shape, k.shape, v.shape
        if queries[:2] == keys[:2] and queries[3] == keys[3] > 0 and keys[:3] == values[:3]:
            return
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim < 2:
            raise ShapeError(f"{name}.shape", tuple(x.shape), "must be (..., length, dim)", "add the missing axes")
        check_dtype(f"{name}.dtype", x.dtype, f"convert with {name}.float()")
        if x.dtype != q.dtype:
            raise DtypeError(f"{name}.dtype", x.dtype, f"must equal q.dtype={q.dtype}", f"use {name}.to(q.dtype)")
        if x.device != q.device:
            raise DtypeError(f"{name}.device", x.device, f"must equal q.device={q.device}", f"use {name}.to(q.device)")
        if x.ndim != q.ndim:
            raise ShapeError(f"{name}.ndim", x.ndim, f"must equal q.ndim={q.ndim}", "give all three the same axes")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        rule = f"must equal q.shape[-1]={q.shape[-1]} and be at least 1"
        raise ShapeError("k.shape[-1]", k.shape[-1], rule, "project queries and keys to one head dimension")
    if k.shape[-2] != v.shape[-2]:
        rule = f"must equal k.shape[-2]={k.shape[-2]}"
        raise ShapeError("v.shape[-2]", v.shape[-2], rule, "each key needs one value")
    if k.shape[:-2] != v.shape[:-2] or q.shape[:-3] != k.shape[:-3]:
        rule = f"must agree with k {tuple(k.shape)} and q {tuple(q.shape)} in batch and heads"
        raise ShapeError("v.shape", tuple(v.shape), rule, "expand the smaller one")
    if q.ndim >= 3 and q.shape[-3] != k.shape[-3]:
        heads, groups = q.shape[-3], k.shape[-3]
        if not enable_gqa:
            rule, fits = f"must equal q's {heads} heads", groups > 0 and heads % groups == 0
            remedy = "pass enable_gqa=True for grouped queries" if fits else "give each query head its own keys"
            raise ShapeError("k heads", groups, rule, remedy)
        if groups == 0 or heads % groups:
            raise ShapeError("k heads", groups, f"must divide q's {heads} heads", "regroup the heads")


def _all_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing is unusual about three tensors of four axes, one type and one device."""
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor:
        return False
    if not (q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype):
        return False
    strided, mapped = torch.strided, torch._C._functorch.is_functorch_wrapped_tensor
    plain = q.dtype in DTYPES and q.device == k.device == v.device
    return plain and all(x.layout is strided and not x.is_nested and not mapped(x) for x in (q, k, v))


def _split_mask(
    mask: Tensor | None, leading: tuple[int, ...], n: int, s: int, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Which keys a row may see, and what is added to their logits: −inf means the first, never the second."""
    if mask is None:
        return None, None
    check_tensor("mask", mask)
    full = (*leading, n, s)
    # torch.broadcast_shapes loads SymPy first, for a second.
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.ndim > len(full) or not all(given == 1 or given == wanted for given, wanted in pairs):
        rule = f"must broadcast to {full}"
        raise ShapeError("mask.shape", tuple(mask.shape), rule, "use (length, keys) or (batch, 1, 1, keys)")
    if mask.device != q.device:
        raise DtypeError("mask.device", mask.device, f"must equal q.device={q.device}", "use mask.to(q.device)")
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        remedy = "use mask.bool(): True means visible"
        raise DtypeError("mask.dtype", mask.dtype, "must be bool or a float type", remedy)
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + tuple(mask.shape))
    if len(full) > 4:
        mask = mask.expand(*leading[:-1], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    else:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    mask = mask.expand(*mask.shape[:-1], s)
    if mask.dtype == torch.bool:
        return mask, None
    visible = mask.detach() > -math.inf
    # nan compares false with everything and +inf sorts above all numbers: both show in these two reductions.
    if mask.numel() and not bool((visible | (mask == -math.inf)).all() & (mask.amax() < math.inf)):
        raise NonFiniteError("mask", "nan or +inf", "must hold finite numbers or -inf", "use -inf to hide a key")
    return (None, mask) if bool(visible.all()) else (visible, mask.masked_fill(~visible, 0))


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of every row, in float64: true norm ≤ entry, and entry·(1 − slack) ≤ true norm.

    Attributes:
        q: of queries, (b, h, n).
        k: of keys, (b, g, s).
        v: of values, (b, g, s).
        slack: how far an entry may exceed the true norm, relative to itself.
    """

    q: Float[Tensor, "b h n"]
    k: Float[Tensor, "b g s"]
    v: Float[Tensor, "b g s"]
    slack: float

    def __repr__(self) -> str:
        return _fields_text(self)

    @functools.cached_property
    def _ends(self) -> list[float]:
        """The largest norm of q, of k and of v, and the smallest of v: from a device in one transfer."""
        ends = [x.amax() if x.numel() else x.new_zeros(()) for x in (self.q, self.k)]
        shortest, longest = self.v.aminmax() if self.v.numel() else (self.v.new_zeros(()),) * 2
        least: list[float] = torch.stack([*ends, longest, shortest]).tolist()
        return least

    @property
    def most(self) -> tuple[float, float, float]:
        """The largest norm of a query, of a key and of a value."""
        q, k, v, _ = self._ends
        return q, k, v

    @property
    def least_value(self) -> float:
        """The smallest norm of a value."""
        return self._ends[3]

    def check(self, scale: float) -> None:
        """Raise if a row holds nan or inf, or is too long for float64.

        Args:
            scale: what q·k is multiplied by.

        Raises:
            NonFiniteError: a row of q, k or v holds nan or inf.
            RangeError: squares or logits would leave float64.
        """
        for name, x, most in zip("qkv", (self.q, self.k, self.v), self.most, strict=True):
            if not math.isfinite(most):
                place = (~torch.isfinite(x)).nonzero()[0].tolist()
                where, remedy = f"{name}[{', '.join(map(str, place))}]", f"remove NaN and inf from {name}"
                raise NonFiniteError(where, "nan or inf in this row", "must be finite", remedy)
        check_range(*self.most, scale)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as a sentence has it.

    Args:
        dtype: a type of torch.

    Returns:
        Such as "float32".
    """
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, dtype: torch.dtype, remedy: str) -> None:
    """Raise if nothing can be computed in a type.

    Args:
        name: what an error calls it.
        dtype: a type of torch.
        remedy: what to do about another.

    Raises:
        DtypeError: it is not one of float64, float32, bfloat16 and float16.
    """
    if dtype not in DTYPES:
        raise DtypeError(name, dtype, f"must be one of {', '.join(map(dtype_name, DTYPES))}", remedy)


def check_tensor(name: str, x: object) -> None:
    """Raise if something is not a plain tensor: dense, of one shape, and not mapped over.

    Args:
        name: what an error calls it.
        x: anything.

    Raises:
        DtypeError: it is not such a tensor.
    """
    if not isinstance(x, Tensor):
        raise DtypeError(name, type(x).__name__, "must be a torch.Tensor", "wrap it with torch.as_tensor")
    if x.is_nested:
        remedy = f"use {name}.to_padded_tensor(0.0) with a mask, or call once for each sequence"
        raise DtypeError(name, "a nested tensor", "must have one length", remedy)
    if x.layout is not torch.strided:
        raise DtypeError(f"{name}.layout", x.layout, "must be torch.strided", f"use {name}.to_dense()")
    if x.is_quantized:
        raise DtypeError(f"{name}.dtype", x.dtype, "must not be quantised", f"use {name}.dequantize()")
    if not torch.compiler.is_compiling() and _is_mapped(x):
        rule = "cannot be mapped by vmap: which arithmetic proves the bound depends on the numbers"
        raise DtypeError(name, "a tensor inside vmap", rule, "pass the mapped axis as a batch axis, in one call")


def check_numbers(name: str, x: Tensor) -> None:
    """Raise if a tensor has a shape but no numbers (meta, fake): no bound follows from a shape alone.

    Args:
        name: what an error calls it.
        x: a tensor.

    Raises:
        DtypeError: it has no numbers.
    """
    if x.is_meta or (not torch.compiler.is_compiling() and isinstance(x, FakeTensor)):
        kind = "on the meta device" if x.is_meta else "a FakeTensor"
        remedy = "pass a tensor with numbers; for prices alone use Problem.of(q, k, v).sizes and a method's cost"
        raise DtypeError(name, kind, "has no numbers, which a certificate is about", remedy)


def _is_mapped(x: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over a tensor, perhaps inside a derivative."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def has_tangents(*tensors: Tensor | None) -> bool:
    """Whether derivatives of some tensors are carried forward (`torch.func.jvp`); never inside a compiled graph.

    Args:
        *tensors: tensors, or None.

    Returns:
        Whether any of them does.
    """
    # The level is what `unpack_dual` asks first, too, of each tensor.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
