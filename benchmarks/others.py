"""What other people's methods keep and lose at their usual settings: measured, proved, and perplexity beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import avow
from avow.bench import workloads
from avow.bench.results import Goal, Result, Row
from avow.bounds import Quantised, QuantisedBound, Selection, SelectionBound, SkipThreshold, Window
from avow.integrations.transformers.model_files import load_unpacked
from benchmarks.model import FOLDER, manual
from benchmarks.options import Options

# Rows of each head, from the second half of its text; tokens that the model reads, and predicts the second half of.
_ROWS, _TOKENS = 64, 2048
# Errors below this are rounding, and no measure of a bound.
_NOTHING = 1e-9
# Of the heads every so many-th row is stored.
_STORED = 4

# Called with q (b, h, n, d), k (b, h, s, d), the keys that each row sees and the scale: the keys that are read.
Choose = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Store = Callable[[Tensor, Tensor], tuple[Quantised, Quantised]]


@dataclass(frozen=True)
class Other:
    """A method of other people at a setting of theirs: what it reads, or how it stores keys and values."""

    name: str
    setting: str
    choose: Choose | None = None
    store: Store | None = None
    rule: Selection | None = None
    """What `bound_selection` is told; None tells it the keys that were chosen."""
    block: int = 1
    """Rows that are decided upon together."""
    sampled: Choose | None = None
    """What is read of rows of which only some are stored; None chooses as it does."""


def top_keys(count: int) -> Choose:
    """The keys with the largest logits: what every choice of as many keys is measured by."""

    def choose(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
        logits = (scale * (q @ k.mT)).masked_fill(~seen, -math.inf)
        best = logits.topk(min(count, k.shape[-2]), -1).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True) & seen

    return choose


def best_pages(budget: int, page: int = 16) -> Choose:
    """The pages whose boxes of keys allow the largest logits, so many tokens of them, as Quest chooses them."""

    def choose(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
        s = k.shape[-2]
        pages = -(-s // page)
        whole = torch.nn.functional.pad(k, (0, 0, 0, pages * page - s)).unflatten(-2, (pages, page))
        q = q * math.copysign(1.0, scale)
        most = q.clamp(min=0) @ whole.amax(-2).mT + q.clamp(max=0) @ whole.amin(-2).mT  # (b, h, n, pages)
        begun = torch.nn.functional.pad(seen, (0, pages * page - s)).unflatten(-1, (pages, page)).any(-1)
        best = most.masked_fill(~begun, -math.inf).topk(min(budget // page, pages), -1).indices
        read = torch.zeros_like(most, dtype=torch.bool).scatter_(-1, best, True)
        return read.repeat_interleave(page, -1)[..., :s] & seen

    return choose


def window(size: int, sinks: int) -> Choose:
    """The last tokens that a row sees, and the first."""

    def choose(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
        place = seen.cumsum(-1)
        return seen & ((place <= sinks) | (place > place[..., -1:] - size))

    return choose


def loud_tiles(factor: float, rows: int, tile: int = 128) -> Choose:
    """Tiles whose largest logit is not far below the largest so far, for any row of a block."""

    def choose(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
        logits = (scale * (q @ k.mT)).masked_fill(~seen, -math.inf)
        s = logits.shape[-1]
        tops = torch.nn.functional.pad(logits, (0, -s % tile), value=-math.inf).unflatten(-1, (-1, tile)).amax(-1)
        loud = torch.exp(tops - tops.cummax(-1).values) >= factor / s
        n = loud.shape[-2]
        blocks = torch.nn.functional.pad(loud, (0, 0, 0, -n % rows)).unflatten(-2, (-1, rows)).any(-2)
        read = blocks.repeat_interleave(rows, -2)[..., :n, :]
        return read.repeat_interleave(tile, -1)[..., :s] & seen

    return choose


def rounded(x: Tensor, bits: int, axis: int, group: int | None = None, symmetric: bool = False) -> Quantised:
    """Numbers in so many bits, one scale for each group of neighbours along an axis."""
    size = group or x.shape[axis]
    parts = x.unflatten(axis, (-1, size))
    inner = axis if axis < 0 else axis + 1
    if symmetric:
        scale = parts.abs().amax(inner) / (2 ** (bits - 1) - 1)
        zero = torch.zeros_like(scale)
    else:
        low = parts.amin(inner)
        scale = (parts.amax(inner) - low) / (2**bits - 1)
        zero = torch.round(-low / scale.clamp(min=1e-20))
    scale = scale.clamp(min=1e-20)
    spread, shift = (y.repeat_interleave(size, axis) for y in (scale, zero))
    codes = torch.round(x / spread + shift)
    if symmetric:
        return Quantised(codes.to(torch.int8), scale)
    codes = codes.clamp(0, 2**bits - 1).to(torch.uint8)
    return Quantised(codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes, scale, zero, bits=bits)


def narrow(dtype: torch.dtype) -> Store:
    """Numbers of eight bits without a scale."""
    one = torch.ones(())
    return lambda k, v: (Quantised(k.to(dtype), one), Quantised(v.to(dtype), one))


def others() -> list[Other]:
    """Every method at its usual settings."""
    found = [Other("top-k", f"{n} keys", top_keys(n)) for n in (64, 256, 1024)]
    found += [Other("pages (Quest)", f"{n} tokens", best_pages(n)) for n in (256, 1024)]
    found += [Other("window and sinks", f"{n} + 4", window(n, 4), rule=Window(n, 4)) for n in (256, 1024)]
    for block, words in ((1, "a row"), (128, "128 rows")):
        for n in (105, 587, 3293):
            # Of the rows that are stored every fourth is there.
            few = -(-block // _STORED)
            rule, sampled = SkipThreshold(n, rows=few), loud_tiles(n, few)
            found.append(Other("skipped tiles", f"{n:,}, {words}", loud_tiles(n, block), None, rule, block, sampled))
    caches: dict[tuple[str, str], Store] = {
        ("int8", "by token"): lambda k, v: (rounded(k, 8, -1, symmetric=True), rounded(v, 8, -1, symmetric=True)),
        ("int8", "keys by channel"): lambda k, v: (
            rounded(k, 8, -2, symmetric=True),
            rounded(v, 8, -1, symmetric=True),
        ),
        ("int4", "by token"): lambda k, v: (rounded(k, 4, -1), rounded(v, 4, -1)),
        ("int4", "groups of 32, keys by channel"): lambda k, v: (rounded(k, 4, -2, 32), rounded(v, 4, -1, 32)),
        ("fp8", "e4m3, no scale"): narrow(torch.float8_e4m3fn),
        ("fp8", "e5m2, no scale"): narrow(torch.float8_e5m2),
    }
    return found + [Other(name, setting, store=store) for (name, setting), store in caches.items()]


class Rows(NamedTuple):
    """Some rows of the heads of a layer in float32, and which keys each sees."""

    layer: str
    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor

    @staticmethod
    def of(work: workloads.Workload, count: int, run: int = 1) -> Rows:
        """So many rows of the second half, in runs of so many that are stored one after the other."""
        places = work.positions if work.positions is not None else torch.arange(work.q.shape[-2])
        late = torch.nonzero(places >= work.k.shape[-2] // 2).flatten()
        starts = torch.linspace(0, len(late) - run, max(1, count // run)).long().unique()
        some = late[(starts[:, None] + torch.arange(run)).flatten()]
        seen = torch.arange(work.k.shape[-2]) <= places[some, None]
        q, k, v = (x.float() for x in (work.q[..., some, :], work.k, work.v))
        return Rows(work.kind, q, k, v, seen[None, None])

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], 1)

    def average(self, k: Tensor, v: Tensor, read: Tensor) -> Tensor:
        """Softmax attention over some keys in float64, by its definition."""
        k, v = (self.repeated(x.double()) for x in (k, v))
        logits = (self.q.double() @ k.mT) / math.sqrt(self.q.shape[-1])
        return torch.softmax(logits.masked_fill(~read, -math.inf), -1).nan_to_num(0.0) @ v


class Loss(NamedTuple):
    """What a method keeps and loses in some rows: shares, errors, and bounds."""

    kept: Tensor
    mass: Tensor
    error: Tensor
    relative: Tensor
    loss: Tensor
    bound: Tensor
    norms: Tensor

    @staticmethod
    def together(parts: list[Loss]) -> Loss:
        return Loss(*(torch.cat([x.flatten() for x in one]) for one in zip(*parts, strict=True)))

    @property
    def broken(self) -> int:
        """Rows whose error, as measured, is above a bound; what float64 rounds is 1e-13."""
        return int((self.error > torch.minimum(self.loss, self.norms) + 1e-13).sum() + (self.error > self.bound).sum())

    def row(self, other: Other) -> Row:
        some = self.error > _NOTHING
        selects = other.choose is not None
        tight = [(bound[some] / self.error[some]).median() if some.any() else None for bound in (self.loss, self.norms)]
        return {
            "method": other.name,
            "setting": other.setting,
            "rows": self.error.numel(),
            "keeps": float(self.kept.mean()),
            "mass": float(self.mass.median()) if selects else None,
            "most mass": float(self.mass.amax()) if selects else None,
            "error": float(self.error.median()),
            "largest error": float(self.error.amax()),
            "of the answer": float(self.relative.median()),
            "certified": float(self.bound.amax()),
            "bound over error": None if tight[0] is None else float(tight[0]),
            "from norms": None if selects or tight[1] is None else float(tight[1]),
            "broken": self.broken,
        }


def lost(other: Other, rows: Rows) -> Loss:
    """What a method keeps and loses in some rows."""
    truth = rows.average(rows.k, rows.v, rows.seen)
    lengths = torch.linalg.vector_norm(rows.repeated(rows.v.double()), dim=-1)
    unit = torch.where(rows.seen, lengths[..., None, :], 0.0).amax(-1)
    options: dict[str, Any] = {"mask": rows.seen, "enable_gqa": True}
    bound: SelectionBound | QuantisedBound
    if other.choose is not None:
        choose = other.sampled or other.choose
        read = choose(rows.q, rows.repeated(rows.k), rows.seen, rows.q.shape[-1] ** -0.5)
        answer = rows.average(rows.k, rows.v, read)
        bound = avow.bound_selection(rows.q, rows.k, rows.v, read=read if other.rule is None else other.rule, **options)
        kept, mass, norms = bound.kept, bound.mass, bound.loss
    else:
        assert other.store is not None
        k_hat, v_hat = other.store(rows.k, rows.v)
        answer = rows.average(k_hat.values(), v_hat.values(), rows.seen)
        bound = avow.bound_quantised(rows.q, rows.k, rows.v, k_hat, v_hat, **options)
        residuals = [
            1.000001 * torch.linalg.vector_norm(x - y.values(), dim=-1) for x, y in ((rows.k, k_hat), (rows.v, v_hat))
        ]
        named = dict(zip(("key_residuals", "value_residuals"), residuals, strict=True))
        norms = avow.bound_quantised(rows.q, None, None, k_hat, v_hat, **named, **options).loss
        kept = torch.full_like(norms, (stored(k_hat) + stored(v_hat)) / 2)
        mass = torch.zeros_like(norms)
    off = torch.linalg.vector_norm(answer - truth, dim=-1)
    relative = off / torch.linalg.vector_norm(truth, dim=-1)
    return Loss(kept, mass, off / unit, relative, bound.loss, bound.certificate.rows, norms)


def stored(x: Quantised) -> float:
    """Bytes of codes, scales and zeros in two bytes each, relative to numbers of two bytes."""
    numbers = x.codes.numel() * (2 if x.bits == 4 else 1)
    beside = x.scale.numel() * (1 if x.zero is None else 2) if x.scale.ndim else 0
    return (x.codes.numel() + 2 * beside) / (2 * numbers)


class Reader:
    """SmolLM2 on Python's manual: its perplexity with any method in the place of attention."""

    def __init__(self, tokens: int) -> None:
        loaded = load_unpacked(str(FOLDER))
        self.model: Any = loaded.model
        self.ids = manual(loaded.tokenizer, tokens)
        self.other: Other | None = None
        AttentionInterface.register("others", self._attend)
        AttentionMaskInterface.register("others", sdpa_mask)
        self.model.set_attn_implementation("others")

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        n, s = q.shape[-2], k.shape[-2]
        seen = torch.ones(n, s, dtype=torch.bool).tril()[None, None]
        if self.other is not None and self.other.store is not None:
            k, v = (x.values().to(q) for x in self.other.store(k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scale = options["scaling"]
        read = seen if self.other is None or self.other.choose is None else self.other.choose(q, k, seen, scale)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, read, scale=scale)
        return out.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def perplexity(self, other: Other | None) -> float:
        self.other = other
        half = self.ids.shape[1] // 2
        logits = self.model(self.ids, logits_to_keep=half + 1).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, self.ids[0, -half:]).exp())


def layers(options: Options) -> Iterator[dict[int, Rows]]:
    """Rows of every layer that is stored, spread evenly, and of blocks of 128 places."""
    assert options.heads is not None
    files = sorted(options.heads.glob("*.safetensors"))
    for file in files[:1] if options.quick else files:
        work = workloads.read(file, causal=True)
        run = min(128 // _STORED, work.q.shape[-2] // 4)
        yield {
            1: Rows.of(work, 4 if options.quick else _ROWS),
            128: Rows.of(work, run if options.quick else _ROWS, run),
        }


def run(options: Options) -> list[Result]:
    """Every method on every layer, then on a text."""
    methods = others()
    by_layer: list[Row] = []
    losses: dict[int, list[Loss]] = {i: [] for i in range(len(methods))}
    for layer in layers(options):
        for i, other in enumerate(methods):
            rows = layer[other.block]
            losses[i].append(lost(other, rows))
            by_layer.append({"layer": rows.layer} | losses[i][-1].row(other))
    reader = Reader(64 if options.quick else _TOKENS)
    exact = reader.perplexity(None)
    table = []
    for i, other in enumerate(methods):
        perplexity = reader.perplexity(other)
        row = Loss.together(losses[i]).row(other)
        table.append(row | {"perplexity": perplexity, "change": perplexity / exact - 1})
    held, broken = (sum(int(row[name] or 0) for row in table) for name in ("rows", "broken"))
    goal = Goal("no row beyond its bound", f"{broken} of {held}", broken == 0)
    remark = f"perplexity of exact attention on the same text: {exact:.4g}"
    return [
        Result("others: what methods keep and lose", table, [goal], [remark], [f"{broken} rows"] if broken else []),
        Result("others: by layer", by_layer),
    ]
