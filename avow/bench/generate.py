"""Tokens of a whole model of a Llama-like shape: weights are random, and so cost what they cost; queries and keys are
those of real heads, so that attention has as much to read as in a trained model.

Keys and values fill the caches before anything is measured. Queries take the place of the model's own behind the rotary
embedding, each at its own position, so that a draft and its verification ask the same.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from avow.bench import cases
from avow.bench.cases import Case
from avow.bench.clock import Clock
from avow.bench.results import Result, Row, attempted, tell_row
from avow.extras import require

require("transformers", "safetensors", purpose="for a whole model")

TOL, DRAFTS, SURE = 1e-2, 16, 0.999
# The size of embeddings beside which the other weights' is 0.02.
_LOUD = 1.5
# How many queries of real heads are asked in turn.
_QUERIES = 64
# Tokens behind which all graphs of verified generation are captured: passes of 4 and of 8, and some of 16.
WARM = 6 * DRAFTS


class Sizes(NamedTuple):
    """A model's shape, the tokens behind which it writes, and how many are timed: rounds of calls."""

    lengths: tuple[int, ...]
    layers: int
    hidden: int
    inner: int
    words: int
    heads: int
    groups: int
    rounds: int
    calls: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def room(self) -> int:
        """For how many more tokens a static cache needs room, those before the clock starts included."""
        return (self.rounds + 1) * self.calls + WARM + 64


# The shape of an 8B model; on a CPU a small one.
FULL = {
    "cpu": Sizes((16384, 65536), 4, 512, 1536, 8192, 8, 2, 5, 2 * (DRAFTS + 1), torch.float32),
    "cuda": Sizes((32768, 131072, 524288), 32, 4096, 14336, 128256, 32, 8, 5, 2 * DRAFTS),
}
QUICK = {
    "cpu": Sizes((4224,), 2, 256, 512, 512, 4, 2, 2, 2 * (DRAFTS + 1), torch.float32),
    "cuda": Sizes((8192,), 4, 1024, 2048, 8192, 8, 2, 3, 2 * DRAFTS),
}


def run(device: str, sizes: Sizes, folder: Path | None, tell: Callable[[str], None]) -> list[Result]:
    """Milliseconds of a token in every way, behind each text's heads at every length."""
    rows, failures = list[Row](), list[str]()
    model = _model(device, sizes)
    bandwidth = Clock(device, sizes.rounds, sizes.calls).bandwidth() if device == "cuda" else None
    texts = {"sharp": None} if folder is None else cases.stored(folder)
    for n in sizes.lengths:
        for text, loads in texts.items():
            shape = cases.Sizes((n,), sizes.heads, sizes.groups, 0, 0, sizes.dtype, queries=_QUERIES)
            case = _sharp(device, shape, n) if loads is None else cases.real(device, shape, n, loads, text)
            tell(f"{text}, n = {n}")
            found, faults = _measured(device, sizes, model, case, bandwidth)
            failures += [f"{text}, n = {n}: {fault}" for fault in faults]
            for row in found:
                rows.append({"keys": text, "n": n, **row})
                tell_row(rows[-1])
    about = f"{sizes.layers} layers, {sizes.heads}/{sizes.groups} heads of 128, {sizes.hidden} wide"
    remarks = ["words follow words, so that drafts are right about as often as a trained model's: see accepted"]
    remarks += ["ideal: matrix products and SDPA over buffers that do not move, on a GPU in one CUDA graph"]
    if bandwidth is not None:
        remarks.append(
            f"of limit: the bytes that a way has to read, caches and weights, at {bandwidth / 1e12:.2f} TB/s"
        )
    return [
        Result(
            f"generate: a token of a model of {about}, {str(sizes.dtype).removeprefix('torch.')}",
            rows,
            [],
            remarks,
            failures,
        )
    ]


def _sharp(device: str, shape: cases.Sizes, n: int) -> Case:
    generator = torch.Generator(device).manual_seed(n)
    sizes = ((1, shape.heads, _QUERIES, 128), (1, shape.groups, n, 128), (1, shape.groups, n, 128))
    q, k, v = (torch.randn(x, generator=generator, device=device).to(shape.dtype) for x in sizes)
    return Case("sharp", 6 * q, k, v, 128**-0.5)


def _model(device: str, sizes: Sizes) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.words,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        head_dim=128,
        max_position_embeddings=2**20,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    # Each word asks for the one behind it, loudly enough to be heard: between words that are as likely as each other,
    # as those of random weights are, rounding decides, and no draft of a trained model is so uncertain.
    with torch.no_grad():
        words = model.get_input_embeddings().weight.normal_(std=_LOUD)
        model.lm_head.weight.copy_(words.roll(1, 0)).mul_(config.initializer_range / _LOUD)
    return model


def _twin(model: Any) -> Any:
    """A model with settings of its own and the same weights."""
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config)).eval()
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.model.rotary_emb = model.model.rotary_emb
    return twin


def _measured(
    device: str, sizes: Sizes, model: Any, case: Case, bandwidth: float | None
) -> tuple[list[Row], list[str]]:
    """A row for every way; and what is wrong."""
    clock = Clock(device, sizes.rounds, sizes.calls)
    table = case.q * (case.scale * 128**0.5)  # the model's own scale is 1/sqrt(128)
    seconds: dict[str, float] = {}
    facts: dict[str, _Facts] = {}
    with torch.no_grad(), _asking(table):
        # On a GPU a cache fills much of its memory: one after the other. On a CPU in turns, slowed alike if it is busy.
        ways_here = _ways(device, sizes, model, case, table)
        made = ((name, attempted(name, partial(_tried, make))) for name, make in ways_here)
        if device == "cuda":
            for name, way in made:
                if way is not None:
                    if name.startswith("avow"):
                        for _ in range(WARM):
                            way()
                    seconds[name] = clock.seconds(way, graph=name.startswith("ideal"))
                    facts[name] = _Facts.of(model, way, case.length)
                del way
                # What was compiled keeps the cache that it was compiled for.
                torch.compiler.reset()
                gc.collect()
                torch.cuda.empty_cache()
        else:
            ways = {name: way for name, way in made if way is not None}
            seconds = dict(zip(ways, clock.in_turns(*ways.values()), strict=True))
            facts = {name: _Facts.of(model, way, case.length) for name, way in ways.items()}
    ideal = min(x for name, x in seconds.items() if name.startswith("ideal"))
    theirs = min((x for name, x in seconds.items() if name.startswith("transformers")), default=float("nan"))
    rows: list[Row] = []
    failures: list[str] = []
    for name, taken in seconds.items():
        own = facts[name]
        row: Row = {"way": name, "ms": 1e3 * taken, "tokens/s": 1 / taken, "times ideal": ideal / taken}
        row |= {"times transformers": theirs / taken, "accepted": own.accepted, "read": own.read}
        if bandwidth is not None:
            row |= {
                "of limit": own.bytes / bandwidth / taken,
                "KiB per token": own.held / 1024,
                "by graphs": own.graphs,
            }
            if own.called:
                failures.append(f"{name}: {own.called}")
        rows.append(row)
        if own.bound is not None and not own.bound <= TOL:
            failures.append(f"drafts within {own.bound:.1e}, beyond {TOL:g}")
    return rows, failures


def _tried(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """A way to write a token that has written one: a kernel may refuse a shape only when it is called."""
    way = make()
    way()
    return way


class _Facts(NamedTuple):
    """What a way has to read for a token and holds of one, in bytes; of ours also what was drafted, read and proved."""

    bytes: float
    held: float
    accepted: float | None = None
    read: float | None = None
    bound: float | None = None
    graphs: float | None = None
    """The share of calls that CUDA graphs ran, but for those of each graph's beginning."""
    called: str = ""
    """Why other calls ran layer by layer."""

    @staticmethod
    def of(model: Any, way: Any, tokens: int) -> _Facts:
        from avow.integrations.transformers import CertifiedCache
        from avow.integrations.transformers.graphs import FIRST

        words = model.get_input_embeddings().weight
        weights = sum(x.nbytes for x in model.parameters()) - words.nbytes
        token = 2 * len(model.model.layers) * model.config.num_key_value_heads * 128 * words.element_size()
        whole, cache = weights + tokens * token, way.cache
        if not isinstance(cache, CertifiedCache):
            return _Facts(whole, token)
        caches = [layer.cache for layer in cache.layers]
        overhead = caches[0].overhead
        held = token * (1 + overhead)
        made, steps = cache.verification, cache.steps
        ran = {} if steps is None else {"graphs": steps.replayed / max(1, steps.replayed + sum(steps.called.values()))}
        others = [] if steps is None else [why for why in steps.called if why != FIRST]
        ran |= {"called": "; ".join(others)}
        if made is None:
            reports = [x for one in caches if (x := one.last_report) is not None]
            read = float(torch.stack([x[4].mean() for x in reports]).mean()) if reports else 1.0
            return _Facts(weights + tokens * token * min(1.0, read + overhead), held, None, read, **ran)
        read = made.read if made.looked else 1.0
        sparse = weights + tokens * token * min(1.0, read + overhead)
        # Every draft is read by a sparse step, and once more by a pass of exact attention with all others.
        each = (made.drafted * sparse + made.passes * whole) / max(1, made.tokens)
        return _Facts(each, held, made.acceptance, read, made.bound, **ran)


@contextlib.contextmanager
def _asking(table: Tensor) -> Iterator[None]:
    """Have attention functions of transformers ask these queries, each at its own place, as long as the block runs."""
    from transformers import modeling_utils

    # Our functions are registered when they are imported.
    from avow.integrations.transformers.enabling import NAME

    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS

    def asked(function: Any) -> Any:
        def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
            places = more["position_ids"][0] % table.shape[2]
            return function(module, table.index_select(2, places), key, value, mask, **more)

        return forward

    names = ("sdpa", NAME)
    for name in names:
        functions[name] = asked(functions[name])
    try:
        yield
    finally:
        for name in names:
            del functions[name]


class _Loop:
    """One more token of a model at every call, greedily."""

    def __init__(self, model: Any, cache: Any, case: Case) -> None:
        self.model, self.cache = model, cache
        self.token = torch.ones(1, 1, dtype=torch.long, device=case.k.device)

    def __call__(self) -> None:
        logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))


class _Ideal:
    """The same token by matrix products and SDPA alone, over buffers that do not move."""

    cache = None

    def __init__(self, model: Any, case: Case, table: Tensor, backend: str) -> None:
        self.model, self.table, self.backend = model, table, backend
        self.token = torch.ones(1, 1, dtype=torch.long, device=case.k.device)
        self.place = torch.full((1, 1), case.length - 1, dtype=torch.long, device=case.k.device)
        self.held = [(case.k.clone(), case.v.clone()) for _ in model.model.layers]

    def __call__(self) -> None:
        inner = self.model.model
        x, position = inner.embed_tokens(self.token), self.place
        rotated = inner.rotary_emb(x, position_ids=position)
        for layer, (keys, values) in zip(inner.layers, self.held, strict=True):
            own, y = layer.self_attn, layer.input_layernorm(x)
            own.q_proj(y)  # what it costs; the query that is asked is a real head's
            # The newest token takes the last one's place: the shapes of a graph do not change.
            new = own.k_proj(y).view(1, 1, -1, 128).transpose(1, 2) * rotated[0].unsqueeze(1)
            keys.index_copy_(2, position[0], new)
            values.index_copy_(2, position[0], own.v_proj(y).view(1, 1, -1, 128).transpose(1, 2))
            query = self.table.index_select(2, position[0] % self.table.shape[2])
            attend = partial(cases.sdpa, self.backend) if self.backend else scaled_dot_product_attention
            out = attend(query, keys, values, enable_gqa=True)
            x = x + own.o_proj(out.transpose(1, 2).reshape(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.token.copy_(self.model.lm_head(inner.norm(x))[:, -1].argmax(-1, keepdim=True))


def _ways(device: str, sizes: Sizes, model: Any, case: Case, table: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every way to write a token, by its name; each fills a cache of its own when it is made."""
    from transformers import DynamicCache, StaticCache

    from avow.integrations.transformers import CertifiedCache, enable

    def filled(cache: Any) -> Any:
        for i in range(sizes.layers):
            cache.update(case.k, case.v, i)
        return cache

    def certified(**more: Any) -> _Loop:
        twin = _twin(model)
        enable(twin, tol=TOL, **more)
        return _Loop(twin, filled(CertifiedCache(twin.config, capacity=case.length + sizes.room)), case)

    def static(compiled: bool) -> _Loop:
        twin = _twin(model)
        cache = filled(StaticCache(twin.config, max_cache_len=case.length + sizes.room))
        if compiled:
            twin.forward = torch.compile(twin.forward, mode="reduce-overhead", fullgraph=True)
        return _Loop(twin, cache, case)

    for backend in ("cuDNN", "flash", "efficient") if device == "cuda" else ("",):
        name = f"ideal, {backend}" if backend else "ideal"
        yield name, partial(_Ideal, model, case, table, backend)
    yield "transformers, dynamic cache", lambda: _Loop(_twin(model), filled(DynamicCache(config=model.config)), case)
    yield "transformers, static cache", partial(static, False)
    if device == "cuda":
        yield "transformers, static cache, compiled", partial(static, True)
    yield f"avow, {TOL:g}", certified
    if device == "cuda":
        yield f"avow, {TOL:g} at {SURE:g}", partial(certified, confidence=SURE)
    yield f"avow, verified ({DRAFTS})", partial(certified, method="sparse", verify=DRAFTS)
