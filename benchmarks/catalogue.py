"""Every benchmark: what it measures, what it needs, how long it takes on two cores, and what of it a page shows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from avow.bench.results import Result
from benchmarks.options import Options

# What a benchmark may need that not every machine has, and how to give it.
NEEDS = {
    "heads": "--heads DIR, a folder of *.safetensors files with q, k, v and q_positions, such as those that python -m "
    "benchmarks.extract_heads writes",
    "corpus": "--corpus DIR, a folder with wiki.txt, train.tsv and dev.tsv",
    "gpu": "a GPU",
    "model": "the weights that make test-model fetches",
    "browser": "chromium and playwright",
}


@dataclass(frozen=True)
class Benchmark:
    """One section of the page of numbers."""

    name: str
    title: str
    words: str
    run: str
    minutes: float
    shown: tuple[str, ...]
    needs: tuple[str, ...] = ()
    quiet: bool = True
    """Whether it measures time, so that nothing else should run beside it."""

    @property
    def command(self) -> str:
        given = "".join(f" --{need} DIR" for need in self.needs if need in ("heads", "corpus"))
        return f"python -m benchmarks.run --only {self.name}{given}"

    def measure(self, options: Options) -> list[Result]:
        """Its tables, measured now."""
        module, _, function = self.run.partition(":")
        run: Callable[[Options], Result | list[Result]] = getattr(importlib.import_module(module), function or "run")
        found = run(options)
        return found if isinstance(found, list) else [found]


ALL = (
    Benchmark(
        "overhead",
        "What a certificate costs",
        "Exact attention with its certificate beside PyTorch's alone: 8 heads, d = 64, float32.",
        "benchmarks.overhead",
        3,
        ("overhead; n, causal, SDPA seconds, median ratio, ratio of minima, on top as on top %",),
    ),
    Benchmark(
        "linear",
        "How much faster linear methods are",
        "Whole calls with their certificates beside PyTorch's SDPA and performer-pytorch: 256 features, rank 64, 8 "
        "heads, d = 64, float32. Speed-ups are medians over rounds.",
        "benchmarks.linear",
        4,
        (
            "linear; certificate=yes; contender, n, causal, seconds, speed-up over SDPA, by minima, "
            "over performer-pytorch",
        ),
    ),
    Benchmark(
        "scaling",
        "How time and memory grow",
        "From 4,096 keys to 65,536: 8 heads, d = 64, float32, 256 features, rank 64. The slope is that of a line on "
        "log-log paper: 1 is linear.",
        "benchmarks.scaling",
        5,
        ("scaling; method, slope of time, slope of memory, seconds at 65536, MiB at 65536",),
    ),
    Benchmark(
        "planner",
        "What the planner foresees",
        "Predicted over measured time and peak memory of computing, at 73 points over methods, lengths, heads and "
        "dimensions, by rates fitted at the start of the run. Errors are medians over the points of a method.",
        "benchmarks.planner",
        4,
        ("planner; method, causal, points, error of time as error of time %, error of memory as error of memory %",),
    ),
    Benchmark(
        "compare",
        "Every method on heads whose behaviour is known",
        "One head of 8,192 keys and queries, d = 64, float32, one thread: a whole call with its certificate relative "
        "to exact attention, the largest error of 459 rows recomputed in float64, and the bound. A bound of 2 says "
        "nothing. Below, the last of 32,768 queries from a cache. The README's picture is drawn by the same run.",
        "benchmarks.commands:compare",
        4,
        (
            "compare; heads, method, setting, time, error, bound, to softmax",
            "compare; confidence=1; heads, keys, tolerance, answered by, tokens read as tokens read %, times exact",
        ),
    ),
    Benchmark(
        "cache",
        "A long cache on a CPU",
        "One query of each head at tol = 1e-2, whole calls with certificates, over the faster of PyTorch's two forms: "
        "9 query heads on 3 key heads of a trained model, d = 64, keys drawn in runs of neighbours.",
        "benchmarks.cache",
        8,
        ("cache; layer, tokens, type, PyTorch ms, cache ms, times as fast, at best, sparse answers",),
        ("heads",),
    ),
    Benchmark(
        "tokens",
        "One more token",
        "From the cache or by a pass over the whole text of 2,048 tokens: 4 layers, 8 heads, width 256.",
        "benchmarks.tokens",
        1,
        ("tokens; attention, step ms, whole pass ms, times faster",),
    ),
    Benchmark(
        "knowledge",
        "The knowledge experiment, invented people",
        "What each attention has learnt of 64 questions; `avow knowledge` from its defaults.",
        "benchmarks.commands:knowledge",
        4,
        (
            "knowledge; arm, right, asked, accuracy as accuracy %, least as at least %, most as at most %, "
            "at half as at half %, weights, CPU seconds",
        ),
    ),
    Benchmark(
        "lab",
        "From a slider to the screen",
        "200 moves of a slider on every page of the lab in Chromium, from the browser's event to the end of the frame "
        "that shows it; and processor time of one preview.",
        "benchmarks.lab",
        5,
        ("lab; page, slider, p50 ms, p95 ms, largest ms, preview ms",),
        ("browser",),
    ),
    Benchmark(
        "heads",
        "Certificates on the heads of a trained model",
        "Four layers of SmolLM2-135M, 8,192 tokens, half precision; every row held to its bound against float64. "
        "`mask`: the rows at their positions; `causal`: a causal problem as long as the keys, so that the linear path "
        "runs.",
        "benchmarks.heads",
        8,
        ("heads; method, rows by, rows checked, broken, least bound, worst bound, worst error",),
        ("heads",),
        quiet=False,
    ),
    Benchmark(
        "sparse",
        "What trained heads let sparse attention leave out",
        "128 steps of decoding of every query head of a layer, SmolLM2-135M on 8,192 tokens, four-bit sketches. Bytes "
        "are those of the sketch and of what is read, beside those of all keys and values in 16 bits.",
        "benchmarks.sparse",
        8,
        ("sparse; layer, tol, confidence, tokens as tokens %, bytes as bytes %, bound, error",),
        ("heads",),
        quiet=False,
    ),
    Benchmark(
        "loop",
        "A long decoding loop",
        "1,000 steps from a `KeyValueCache`, each with an append, every answer held to its bound against float64.",
        "benchmarks.loop",
        1,
        ("loop; steps, answered by sparse, rows, violations, worst error/bound, overhead as overhead %",),
        quiet=False,
    ),
    Benchmark(
        "shards",
        "What shards send",
        "Every way over up to 256 shards in one process, which hand each other real tensors: bytes that left one "
        "shard, beside the planner's; and how far the answer is from one shard's.",
        "benchmarks.commands:shards",
        2,
        ("shards; shards=256; way, sent, modelled, messages, apart",),
        quiet=False,
    ),
    Benchmark(
        "fuzz",
        "Certificates on random problems",
        "Each case is a head with its own q, k and v, of any method, size, mask, type and layout; every row is held to "
        "its bound. `make fuzz` runs more.",
        "benchmarks.commands:fuzz",
        6,
        ("fuzz; cases, rows, broken, statistical rows, misses",),
        quiet=False,
    ),
    Benchmark(
        "model",
        "A trained model that decodes",
        "SmolLM2-135M reads 600 tokens of Python's manual after 7,500, token by token at tol = 1e-2, beside exact "
        "attention; answers of every third step recomputed in float64.",
        "benchmarks.model",
        12,
        (
            "model; certificates, recomputed, broken, tokens read as tokens read %, bytes read as bytes read %, "
            "same token, places, perplexity as perplexity %",
        ),
        ("model",),
        quiet=False,
    ),
    Benchmark(
        "model_speed",
        "What a new token of a trained model costs",
        "SmolLM2-135M (9 query heads on 3 key heads of 64, 30 layers) behind so many tokens (1,024 of Python's manual, "
        "again and again), from the caches that `generate()` uses: as it is (SDPA), with `enable(model, tol=1e-2)`, "
        "and with a plan of `avow profile`. Processor time of all threads, token by token in turns; ratios are medians "
        "of each round's own.",
        "benchmarks.model_speed",
        4,
        (
            "model_speed; dtype, tokens, as it is ms, enabled ms, plan ms, enabled ratio as enabled, plan ratio as "
            "with the plan",
        ),
        ("model",),
    ),
    Benchmark(
        "profile",
        "A trained model, head by head",
        "`avow profile` of SmolLM2-135M on 4,096 tokens of Python's manual at tol = 1e-2 and budget 0.5, then `avow "
        "verify` of its plan on the 512 after them.",
        "benchmarks.model:profiled",
        6,
        (
            "profile; heads, copying, local, diffuse, averaging, planned sparse, share of bytes as bytes of all %, "
            "sparse reads as sparse reads %, predicted as predicted %",
            "profile; same token as same token %, perplexity as perplexity %, KL, largest bound, largest error, "
            "rows recomputed",
        ),
        ("model",),
        quiet=False,
    ),
    Benchmark(
        "gpu_calls",
        "A certified step of decoding on a GPU, as it is called",
        "`KeyValueCache.append` of one token and `attend` at tol = 1e-2: called from Python, and captured in one CUDA "
        "graph and replayed while the cache grows; beside the fastest exact attention, called and captured the same "
        "way. 32 query heads over 8 key heads of 128, bfloat16. Every answer is checked first.",
        "benchmarks.gpu:calls",
        5,
        (
            "gpu_calls; keys, n, confidence, captured ms, captured exact ms, captured times faster, step ms, exact ms, "
            "times faster, error, bound, because",
            "gpu_calls; shape, text, n, captured ms, captured exact ms, captured times faster, step ms, exact ms, "
            "times faster, error, bound, because",
            "gpu_calls; single steps, text, n, median ms, slowest ms, slowest over median",
        ),
        ("gpu", "heads"),
    ),
    Benchmark(
        "gpu_linear",
        "Kernels of linear attention on a GPU",
        "Kernel times, not those of `avow.attend`, which also measures norms and makes a certificate: forward passes "
        "and steps replayed in a CUDA graph, training passes launched from Python, beside flash-linear-attention and "
        "exact attention timed the same way; bfloat16, 16 heads, 131,072 tokens unless said. Every kernel is compared "
        "with float64 first.",
        "benchmarks.gpu:linear",
        5,
        (
            "gpu_linear; kernel, shape, d, forward ms, of the limit as of the limit %, training ms, MB, faster as "
            "times fla, training faster as training times fla, fla MB",
            "gpu_linear; kernel, n, forward ms, exact ms, faster, training ms, exact training ms, training faster",
            "gpu_linear; step, batch, us, over the state's way",
        ),
        ("gpu",),
    ),
    Benchmark(
        "gpu_rows",
        "Certificates of the kernels",
        "Hostile caches on a GPU, rows held to deterministic bounds and to statistical ones at 0.999, against float64.",
        "benchmarks.gpu:rows",
        2,
        ("gpu_rows; deterministic, read again, broken, statistical, sampled, missed",),
        ("gpu",),
        quiet=False,
    ),
    Benchmark(
        "gpu_training",
        "Pretraining on a GPU",
        "650 epochs of 2,937 short texts, span corruption, 3.3 million weights, beside the plain loop with padded "
        "batches in float32.",
        "benchmarks.training",
        4,
        ("gpu_training; loop, seconds, ms a step, tokens/s, MFU as MFU %, times faster",),
        ("gpu", "corpus"),
    ),
    Benchmark(
        "gpu_knowledge",
        "The knowledge experiment, real people",
        "2,000 training questions and 250 to be judged by; bfloat16, batches of 256, 7,000 steps, rotary positions.",
        "benchmarks.gpu:knowledge",
        10,
        (
            "gpu_knowledge; arm, right, asked, accuracy as accuracy %, least as at least %, most as at most %, "
            "at half as at half %, weights, seconds",
        ),
        ("gpu", "corpus"),
        quiet=False,
    ),
)
