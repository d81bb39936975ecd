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
        "Exact attention with its certificate next to PyTorch's SDPA: 8 heads, d = 64, float32.",
        "benchmarks.overhead",
        3,
        ("overhead; n, causal, SDPA seconds, median ratio, ratio of minima, on top as on top %",),
    ),
    Benchmark(
        "linear",
        "How much faster linear methods are",
        "Whole calls with certificates next to PyTorch's SDPA and performer-pytorch: 256 features, rank 64, 8 heads, "
        "d = 64, float32. Speed-ups are medians over rounds.",
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
        "4,096 to 65,536 keys: 8 heads, d = 64, float32, 256 features, rank 64. Slopes are log-log: 1 is linear.",
        "benchmarks.scaling",
        5,
        ("scaling; method, slope of time, slope of memory, seconds at 65536, MiB at 65536",),
    ),
    Benchmark(
        "planner",
        "What the planner predicts",
        "Predicted against measured time and peak memory of `compute`, with rates fitted at the start of the run. "
        "Errors are medians over the points of a method.",
        "benchmarks.planner",
        4,
        ("planner; method, causal, points, error of time as error of time %, error of memory as error of memory %",),
    ),
    Benchmark(
        "plan_decode",
        "What a decode loop is planned to cost",
        "Steps of a `KeyValueCache` (`append` and `attend`) of real heads beside what `avow plan-decode` predicts of "
        "them from steps measured just before, and PyTorch's SDPA with `enable_gqa=True` on the same tokens. Sparse "
        "steps are priced for the share of the tokens that they read, and for the share that steps over 8,192 tokens "
        "read. One thread: processor time.",
        "benchmarks.plan_decode",
        8,
        (
            "plan_decode; heads, type, threads, tokens, exact ms, predicted / exact, sparse ms, read as read %, "
            "predicted / sparse, with that / sparse, SDPA ms, predicted / SDPA, SDPA / exact",
        ),
        ("heads",),
    ),
    Benchmark(
        "compare",
        "Every method on heads whose behaviour is known",
        "One head of 8,192 keys and queries, d = 64, float32, one thread: the time of a whole call relative to exact "
        "attention, the largest error of 459 rows recomputed in float64, and the bound (2 says nothing). Second "
        "table: the last of 32,768 queries, from a cache.",
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
        "One query of each head at tol = 1e-2, whole calls with certificates, against the faster of PyTorch's two "
        "forms: 9 query heads on 3 key heads of a trained model, d = 64, keys drawn in runs of neighbours.",
        "benchmarks.cache",
        8,
        ("cache; layer, tokens, type, PyTorch ms, cache ms, times as fast, at best, sparse answers",),
        ("heads",),
    ),
    Benchmark(
        "tokens",
        "One more token",
        "A step from the cache against a pass over all 2,048 tokens: 4 layers, 8 heads, width 256.",
        "benchmarks.tokens",
        1,
        ("tokens; attention, step ms, whole pass ms, times faster",),
    ),
    Benchmark(
        "knowledge",
        "The knowledge experiment, invented people",
        "`avow knowledge` with its defaults: 64 questions.",
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
        "200 moves of a slider on every page of the lab in Chromium, alone and with a proof at work in a second tab, "
        "from the event to the end of the frame that shows it; and processor time of one preview. Then the first page: "
        "seconds from the printed address until its slider has moved.",
        "benchmarks.lab",
        6,
        (
            "lab; page, slider, p50 ms, p95 ms, largest ms, preview ms",
            "lab; starts, address s, first move s, slowest s",
        ),
        ("browser",),
    ),
    Benchmark(
        "heads",
        "Certificates on the heads of a trained model",
        "Four layers of SmolLM2-135M, 8,192 tokens, half precision; the error of every row in float64 against its "
        "bound. `mask`: rows at their positions; `causal`: a causal problem as long as the keys, by the linear path.",
        "benchmarks.heads",
        8,
        ("heads; method, rows by, rows checked, broken, least bound, worst bound, worst error",),
        ("heads",),
        quiet=False,
    ),
    Benchmark(
        "others",
        "What other people's methods keep and lose",
        "Four layers of SmolLM2-135M, 8,192 tokens, rows of the second half of the text: what each method reads or "
        "stores, the weight of what it leaves out, errors in float64 relative to the longest value, and proved bounds. "
        "`certified` includes the rounding of a kernel in float32; `from norms` is the bound from residual norms alone "
        "over the error. Perplexity: the second half of 2,048 tokens of Python's manual.",
        "benchmarks.others",
        25,
        (
            "others; method, setting, keeps as keeps %, mass, most mass, error, largest error, of the answer, "
            "certified, bound over error, from norms, broken, change as perplexity %",
        ),
        ("heads", "model"),
        quiet=False,
    ),
    Benchmark(
        "auditing",
        "What watching attention finds, and costs",
        "`avow.auditing` around SmolLM2-135M that writes 100 tokens: with a kernel whose values are off by one token "
        "in one layer, with caches of four bits, and as it is. Then healthy calls of many types and sizes, and "
        "processor time of a token with and without watching, in alternation.",
        "benchmarks.auditing",
        10,
        (
            "auditing; model, named, layers with alarms, first alarm, rows recomputed",
            "auditing; calls, rows recomputed, alarms",
            "auditing; device, tokens, rate, watched ratio as watched, recomputing as recomputing %",
        ),
        ("model",),
    ),
    Benchmark(
        "sparse",
        "What trained heads let sparse attention leave out",
        "128 decoding steps of every query head of a layer, SmolLM2-135M on 8,192 tokens, four-bit sketches. Bytes: "
        "sketch and tokens read, relative to all keys and values in 16 bits.",
        "benchmarks.sparse",
        8,
        ("sparse; layer, tol, confidence, tokens as tokens %, bytes as bytes %, bound, error",),
        ("heads",),
        quiet=False,
    ),
    Benchmark(
        "loop",
        "A long decoding loop",
        "1,000 steps from a `KeyValueCache`, each with an append; the error of every answer in float64 against its "
        "bound.",
        "benchmarks.loop",
        1,
        ("loop; steps, answered by sparse, rows, violations, worst error/bound, overhead as overhead %",),
        quiet=False,
    ),
    Benchmark(
        "shards",
        "What shards send",
        "Each strategy over 256 shards in one process that pass real tensors.",
        "benchmarks.commands:shards",
        2,
        ("shards; shards=256; way, sent, modelled, messages, apart",),
        quiet=False,
    ),
    Benchmark(
        "fuzz",
        "Certificates on random problems",
        "Each case is a head with its own q, k and v, of any method, size, mask, type and layout; the error of every "
        "row against its bound. `make fuzz` runs more.",
        "benchmarks.commands:fuzz",
        6,
        ("fuzz; cases, rows, broken, statistical rows, misses",),
        quiet=False,
    ),
    Benchmark(
        "model",
        "A trained model that decodes",
        "SmolLM2-135M reads 600 tokens of Python's manual after 7,500, one at a time at tol = 1e-2, next to exact "
        "attention; every third step recomputed in float64.",
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
        "SmolLM2-135M (9 query heads on 3 key heads of 64, 30 layers) after a context of Python's manual, from the "
        "caches that `generate()` uses: with SDPA, with `enable(model, tol=1e-2)`, and with a plan of `avow profile`. "
        "Processor time of all threads, in alternation; ratios are medians over rounds.",
        "benchmarks.model_speed",
        4,
        (
            "model_speed; dtype, tokens, as it is ms, enabled ms, plan ms, enabled ratio as enabled, plan ratio as "
            "with the plan",
        ),
        ("model",),
    ),
    Benchmark(
        "verified",
        "A trained model that verifies its drafts",
        'SmolLM2-135M in float32 writes behind four texts with `enable(model, tol=1e-2, method="sparse", verify=16)`, '
        "beside itself under SDPA: greedy tokens, then processor time of one thread in alternation, and tokens drawn "
        "at temperature 1 with the same seed.",
        "benchmarks.verified",
        20,
        (
            "verified; text, behind, tokens, same, drafted, accepted as accepted %, drafts read as drafts read %, "
            "largest bound, closest call",
            "verified; text, behind, SDPA ms, verified ms, SDPA over verified as times as fast, KiB a token, verified "
            "KiB a token",
        ),
        ("model",),
    ),
    Benchmark(
        "profile",
        "A trained model, head by head",
        "`avow profile` of SmolLM2-135M on 4,096 tokens of Python's manual at tol = 1e-2 and budget 0.5, then `avow "
        "verify` of its plan on the next 512. Third table: profiling 1,024 tokens, with every core.",
        "benchmarks.model:profiled",
        6,
        (
            "profile; heads, resting, previous, same, induction, local, wide, planned sparse, share of bytes as bytes "
            "of all %, sparse reads as sparse reads %, predicted as predicted %",
            "profile; same token as same token %, perplexity as perplexity %, KL, largest bound, largest error, "
            "rows recomputed",
            "profile; tokens, profile s",
        ),
        ("model",),
        quiet=False,
    ),
    Benchmark(
        "gpu_calls",
        "A certified step of decoding on a GPU, as it is called",
        "32 query heads on 8 key heads of 128, bfloat16. `captured`: in one CUDA graph, replayed while the cache "
        "grows; `step`: called from Python. Every output is checked first.",
        "benchmarks.gpu:calls",
        5,
        (
            "gpu_calls; keys=prose|table|real|sharp|diffuse; keys, n, confidence, captured ms, captured exact ms, "
            "captured times faster, step ms, exact ms, times faster, error, bound, tokens read as tokens read %",
            "gpu_calls; shape, text, n, captured ms, captured exact ms, captured times faster, step ms, exact ms, "
            "times faster, error, bound, tokens read as tokens read %",
            "gpu_calls; single steps, text, n, median ms, slowest ms, slowest over median",
        ),
        ("gpu", "heads"),
    ),
    Benchmark(
        "gpu_linear",
        "Kernels of linear attention on a GPU",
        "Times of kernels alone: `avow.attend` also computes norms and a certificate. Forward passes and steps are "
        "replayed in a CUDA graph, training passes launched from Python; flash-linear-attention (fla) and exact "
        "attention are timed the same way. bfloat16, 16 heads, 131,072 tokens unless stated. Every kernel is compared "
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
        "gpu_attend",
        "What attend costs on a GPU",
        "Whole calls by the clock on the wall next to PyTorch's SDPA, called from Python and captured in a CUDA graph; "
        "the planner's predictions; modules forward and backward.",
        "benchmarks.gpu_attend",
        4,
        (
            "gpu_attend; n, SDPA ms, attend ms, tol ms, chosen, captured SDPA ms, captured attend ms",
            "gpu_attend; n, plain ms, avow ms, ratio",
            "gpu_attend; n, exact ms, separable ms, random_features ms",
        ),
        ("gpu",),
    ),
    Benchmark(
        "hot_rows",
        "Rows that a GPU keeps of a cache in host memory",
        "A simulation: the share of the rows that single steps read which are on the device already, if it keeps one "
        "row of so many, by places and by the time of last use. Stored queries are four tokens apart.",
        "benchmarks.hot_rows",
        2,
        (
            "hot_rows; layer, confidence, read as read %, read by the step before as by the step before %, 1/100, "
            "1/16, 1/16 by last use, 1/8, 1/8 by last use, 1/4, 1/4 by last use",
        ),
        ("heads",),
        quiet=False,
    ),
    Benchmark(
        "gpu_offload",
        "Caches in host memory",
        "Keys and values in host memory, the sketch on the GPU: a step of one layer in a CUDA graph beside "
        "transformers' offloaded cache and beside exact attention on the device, device memory, and hits of "
        "consecutive steps. Every answer is checked first.",
        "benchmarks.gpu_offload",
        3,
        ("gpu_offload; n, step, ms, transformers ms, on device ms, times faster, over on device, device bytes, hits",),
        ("gpu", "heads"),
    ),
    Benchmark(
        "gpu_offload_models",
        "Models whose caches are in host memory",
        "Tokens of a model of an 8B shape with random weights and real heads' queries and keys, beside transformers' "
        "offloaded cache.",
        "benchmarks.gpu_offload:models",
        4,
        ("gpu_offload_models; n, way, ms a token, accepted",),
        ("gpu", "heads"),
    ),
    Benchmark(
        "gpu_generate",
        "Tokens of a whole model on a GPU",
        "`avow bench generate`: a model of an 8B shape with random weights whose queries and keys are real heads', "
        "enabled and verified, beside transformers' caches and a loop of matrix products and SDPA in one CUDA graph.",
        "benchmarks.gpu:generation",
        7,
        (
            "gpu_generate; n, way, ms, tokens/s, times ideal, times transformers, accepted, read as read %, of limit "
            "as of limit %",
        ),
        ("gpu", "heads"),
    ),
    Benchmark(
        "gpu_rows",
        "Certificates of the kernels",
        "Hostile caches on a GPU: errors of rows in float64 against deterministic bounds, and statistical ones at "
        "0.999.",
        "benchmarks.gpu:rows",
        2,
        ("gpu_rows; deterministic, read again, broken, statistical, sampled, missed",),
        ("gpu",),
        quiet=False,
    ),
    Benchmark(
        "gpu_auditing",
        "What watching attention costs on a GPU",
        "Tokens of a model of Llama's shape with random weights in bfloat16, with and without `avow.auditing` at a "
        "rate of 1e-3, in alternation.",
        "benchmarks.auditing:cost_on_gpu",
        3,
        ("gpu_auditing; device, asked, tokens, rate, watched ratio as watched, recomputing as recomputing %",),
        ("gpu",),
    ),
    Benchmark(
        "gpu_training",
        "Pretraining on a GPU",
        "650 epochs of 2,937 short texts, span corruption, 3.3 million weights, next to the plain loop with padded "
        "batches in float32.",
        "benchmarks.training",
        4,
        ("gpu_training; loop, seconds, ms a step, tokens/s, MFU as MFU %, times faster",),
        ("gpu", "corpus"),
    ),
    Benchmark(
        "gpu_knowledge",
        "The knowledge experiment, real people",
        "2,000 training and 250 dev questions; bfloat16, batches of 256, 7,000 steps, rotary positions.",
        "benchmarks.gpu:knowledge",
        10,
        (
            "gpu_knowledge; arm, right, asked, accuracy as accuracy %, least as at least %, most as at most %, "
            "at half as at half %, weights, seconds",
        ),
        ("gpu", "corpus"),
        quiet=False,
    ),
    Benchmark(
        "gpu_recipe",
        "The knowledge experiment, steps of its recipe",
        "Each step alone and all together, over three seeds: the mean, and the middle run with its interval. Exact "
        "attention, 3,500 steps.",
        "benchmarks.gpu:recipe",
        10,
        (
            "gpu_recipe; arm, seeds, mean accuracy as mean accuracy %, lowest as lowest %, highest as highest %, "
            "right, asked, least as at least %, most as at most %, at half as at half %, weights, seconds",
        ),
        ("gpu", "corpus"),
        quiet=False,
    ),
)
