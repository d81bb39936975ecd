"""Next tokens by CUDA graphs on a GPU: `python -m tests.gpu_generate`. What must hold before anything is timed.

A small random Llama in float32 writes a text by every way, through `generate()` and in a loop; tokens must be those of
SDPA, logits within what float32 rounds, and every certificate within its tolerance. Then the same model in bfloat16 is
held to itself layer by layer, caches are cropped, filled and moved, and calls that no graph may repeat say why.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import avow
from avow.integrations.transformers import CertifiedCache, enable, graphs
from avow.nn import KeyValueCache

PROMPT, NEW = 6000, 120
SIZES = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 2048, "head_dim": 64}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2**15}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
GREEDY |= {"output_logits": True, "pad_token_id": 0}

faults: list[str] = []


def check(name: str, holds: bool, told: object = "") -> None:
    """Print a line, and remember what does not hold."""
    print(f"{'ok  ' if holds else 'FAIL'} {name} {told}", flush=True)
    if not holds:
        faults.append(name)


def built(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.06)
        # Sharp enough that few tokens matter.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(2.5)
    return model.to("cuda", dtype)


@torch.no_grad()
def loop(model: Any, cache: Any, ids: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens behind a prompt, and their logits, as a plain loop has them."""
    out = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:]
    tokens, logits = [], []
    for _ in range(many):
        logits.append(out[:, -1].clone())
        tokens.append(out.argmax(-1))
        out = model(tokens[-1], past_key_values=cache).logits
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def ways() -> dict[str, dict[str, Any]]:
    """How a model is enabled."""
    return {
        "exact": {},
        "sparse": {"tol": 1e-2, "method": "sparse"},
        "auto": {"tol": 1e-2},
        "drawn": {"tol": 3e-2, "confidence": 0.999, "method": "sparse"},
        "verified": {"tol": 1e-2, "method": "sparse", "verify": 16},
    }


def tokens_are_sdpas() -> None:
    """Float32: exact and verified ways write SDPA's tokens; the others' logits are near."""
    model = built()
    ids = torch.randint(3, 2048, (1, PROMPT), device="cuda")
    wanted = model.generate(ids, **GREEDY)
    theirs, logits = loop(model, DynamicCache(config=model.config), ids, NEW)
    check("SDPA writes the same twice", torch.equal(theirs, wanted.sequences[:, PROMPT:]))
    gaps = logits.float().topk(2, -1).values
    print(f"     least gap between the two likeliest words: {float((gaps[..., 0] - gaps[..., 1]).amin()):.1e}")
    for name, asked in ways().items():
        own = copy.deepcopy(model)
        enable(own, **asked)
        start = time.monotonic()
        made = own.generate(ids, **GREEDY)
        cache = made.past_key_values
        steps = cache.steps
        told = f"({time.monotonic() - start:.1f} s)\n{steps}\n{cache.verification or ''}"
        same = int((made.sequences == wanted.sequences).sum()) - PROMPT
        exactly = name in ("exact", "verified")
        print(f"{name}, generate(): {same} of {NEW} tokens {told}")
        if exactly:
            near = float((torch.stack(made.logits, 1).float() - logits.float()).abs().amax())
            check(f"{name}: tokens and logits", same == NEW and near < 2e-3, f"{near:.1e}")
        replayed = steps.replayed > (NEW // 3 if name == "verified" else NEW - 10)
        check(f"{name}: graphs ran it", replayed and set(steps.called) == {graphs.FIRST}, steps.called)
        if cache.verification is not None:
            made_of = cache.verification
            check(f"{name}: drafts", made_of.accepted > NEW // 2 and 0 < made_of.bound <= 1e-2, made_of.bound)
        for capacity in (PROMPT + NEW + 8, None, PROMPT + 70):
            cache = CertifiedCache(own.config, capacity=capacity)
            mine, own_logits = loop(own, cache, ids, NEW)
            same, near = int((mine == theirs).sum()), float((own_logits.float() - logits.float()).abs().amax())
            print(f"{name}, loop, capacity {capacity}: {same} tokens; {cache.steps}")
            if exactly:
                check(f"{name}: tokens and logits", same == NEW and near < 2e-3, f"{near:.1e}")
            held = {int(x) for layer in cache.layers for x in layer.cache._store.used}
            check(f"{name}: counts", held == {cache.layers[0].cache.length}, held)


def sampled() -> None:
    """With the same seed, samples are those of exact attention alone."""
    model = built()
    ids = torch.randint(3, 2048, (2, PROMPT), device="cuda")
    asked = GREEDY | {"do_sample": True, "temperature": 0.8, "top_k": 20}
    texts = []
    for more in ({}, {"tol": 1e-2, "method": "sparse", "verify": 16}):
        own = copy.deepcopy(model)
        enable(own, **more)
        torch.manual_seed(3)
        made = own.generate(ids, **asked)
        texts.append(made.sequences)
    check("samples, a batch of two", torch.equal(*texts), made.past_key_values.verification)
    print(made.past_key_values.steps)


@torch.no_grad()
def as_layer_by_layer() -> None:
    """bfloat16: graphs give what the same kernels give when they are called one by one."""
    model = built(torch.bfloat16)
    ids = torch.randint(3, 2048, (1, PROMPT), device="cuda")
    for name in ("exact", "sparse"):
        enable(model, **ways()[name])
        found = []
        for watched in (False, True):
            cache = CertifiedCache(model.config, capacity=PROMPT + 200)
            model(ids, past_key_values=cache)
            logits = []
            for i in range(40):
                token = torch.full((1, 1), 5 + 7 * i, device="cuda")
                if i % 13 == 12:
                    cache.crop(-9)
                if watched:
                    with avow.record() as certificates:
                        out = model(token, past_key_values=cache)
                    bounds = [x.bound for _, x in certificates]
                    check(f"{name}: bounds", max(bounds) <= 1e-2, max(bounds)) if i == 30 else None
                else:
                    out = model(token, past_key_values=cache)
                logits.append(out.logits.float())
            found.append(torch.cat(logits, 1))
        apart = float((found[0] - found[1]).abs().amax() / found[1].abs().amax())
        check(f"{name}: graphs and layer by layer", apart < 5e-2, f"{apart:.1e}")


def exact_over_device_lengths() -> None:
    """The exact kernel captured by hand, while the cache grows and shrinks, against float64."""
    for kind, many in ((torch.bfloat16, 1), (torch.bfloat16, 16), (torch.float16, 8), (torch.float32, 5)):
        worst, bound = captured_exact(kind, many)
        check(f"exact kernel, {kind}, {many} queries", worst <= 1 and bound < 2e-2, f"{worst:.2f} of {bound:.1e}")


@torch.no_grad()
def captured_exact(kind: torch.dtype, many: int) -> tuple[float, float]:
    """The largest error in units of its bound over some replays, and the largest bound."""
    cache = KeyValueCache(2, 64, dtype=kind, device="cuda", capacity=9000)
    cache.host_counts = True
    cache.append(*torch.randn(2, 1, 2, 8000, 64, device="cuda").to(kind))
    q = torch.randn(1, 8, many, 64, device="cuda").to(kind)
    token = torch.randn(2, 1, 2, many, 64, device="cuda").to(kind)

    def step() -> Any:
        cache.append(token[0], token[1])
        return cache.attend(q)

    worst, bound = 0.0, 0.0
    step()
    graph, count = torch.cuda.CUDAGraph(), cache.length
    with torch.cuda.graph(graph):
        out, certificate = step()
    for i in range(6):
        token.copy_(torch.randn_like(token))
        q.copy_(3 * torch.randn_like(q))
        if i == 3:
            cache.recount(count)
            cache.crop(4321)
            count = 4321
        graph.replay()
        count += many
        cache.recount(count)
        k, v = (x.double().repeat_interleave(4, 1) for x in cache.tokens)
        seen = torch.ones(many, count, device="cuda", dtype=torch.bool).tril(count - many)
        logits = (q.double() @ k.mT / 8).masked_fill(~seen, float("-inf"))
        apart = torch.linalg.vector_norm(out.double() - torch.softmax(logits, -1) @ v, dim=-1)
        unit = torch.linalg.vector_norm(v, dim=-1)[:, :, None].masked_fill(~seen, 0.0).amax(-1)
        worst = max(worst, float((apart / unit / certificate.rows.to("cuda")).amax()))
        bound = max(bound, certificate.bound)
    return worst, bound


@torch.no_grad()
def refusals() -> None:
    """Calls that a graph may not repeat run layer by layer, and say why."""
    model = built()
    enable(model, tol=1e-2)
    ids = torch.randint(3, 2048, (1, 500), device="cuda")
    cache = CertifiedCache(model.config, capacity=1000)
    model(ids, past_key_values=cache)
    token = ids[:, :1]

    def some() -> None:
        for _ in range(3):
            model(token, past_key_values=cache)

    some()
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    some()
    handle.remove()
    some()
    mask = torch.ones(1, 1 + cache.get_seq_length(), device="cuda", dtype=torch.long)
    mask[:, :5] = 0
    model(token, past_key_values=cache, attention_mask=mask)
    told = set(cache.steps.called)
    check("reasons", {"model.norm has hooks", "a mask hides tokens"} <= told, cache.steps)
    beams = model.generate(ids, num_beams=3, max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True)
    print(beams.past_key_values.steps)
    part = model.model.layers[0].mlp
    plain = part.forward
    part.__class__ = type("Asking", (type(part),), {"forward": lambda self, x: plain(x) * float(x.isfinite().all())})
    cache = CertifiedCache(model.config, capacity=1000)
    model(ids, past_key_values=cache)
    some()
    check("a part that reads the device", cache.steps.captured == 0, cache.steps)
    check("random numbers still work", bool(torch.rand(3, device="cuda").isfinite().all()))


def main() -> int:
    start = time.monotonic()
    parts: tuple[Callable[[], None], ...] = (exact_over_device_lengths, as_layer_by_layer, tokens_are_sdpas, sampled)
    for part in (*parts, refusals):
        print(f"{part.__name__}: {(part.__doc__ or '').splitlines()[0]}", flush=True)
        part()
        torch.cuda.empty_cache()
    print(f"{len(faults)} faults in {time.monotonic() - start:.0f} s: {faults}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
