"""The fault matrix: `python -m tests.faults`. Every method by every way in, under every fault and every pair of them.

A fault is a level of a factor that is not its usual one: a mask of some type, a tensor behind odd strides, numbers of
an extreme size, a global switch of torch. The design is the same every time:

- every single fault, with every method, by every way in that takes it, in every type;
- every pair of faults of different factors: by exact attention in every type, and twice by something else.

Every answer is held to its certificate by `tests.helpers.truth`, which shares no code with the library. A call may
refuse with an error of avow's own where the numbers give it a reason; refusals are counted and shown. Any other error
is a failure. Statistical promises are judged by one row of each call, chosen before, so that misses are binomial.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from scipy.stats import binom
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import avow
from avow.core import Problem
from avow.core.compose import merge
from avow.distributed import attend as attend_shards
from avow.distributed.exact import Block, partial_answer
from avow.errors import AvowError
from avow.methods import all_methods
from avow.methods.sparse import Sparse
from avow.nn import KeyValueCache
from tests.fuzz_shards import over_shards
from tests.helpers.truth import Question, Verdict, verdict

FLOATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Rows of one answer that go to balls where floats cannot decide.
BALLS = 6
# How rarely chance alone may call a statistical promise broken.
RARE = 1e-6
CONFIDENCE = 0.9

LAYOUTS = ("contiguous", "channels last", "transposed", "strided", "skipping rows", "offset", "one row", "one head")
LAYOUTS = (*LAYOUTS, "one batch", "overlapping", "one number")
NUMBERS = ("unit", "near underflow", "subnormal", "smallest", "loud", "huge", "mixed", "far", "near-ties", "zero")
BIASES = tuple(f"{name} {kind}" for name in FLOATS for kind in ("sd 6", "60000", "-inf", "against", "lowest"))
SIZES: dict[str, tuple[int, int, int, int]] = {  # rows, keys, width of keys, width of values
    "usual": (5, 33, 8, 8),
    "one key": (3, 1, 4, 3),
    "one row": (1, 70, 8, 8),
    "more rows": (40, 7, 3, 2),
    "square": (70, 70, 16, 16),
    "many keys": (3, 300, 16, 5),
    "wide": (3, 9, 64, 130),
    "one number": (4, 20, 1, 1),
    "many equal keys": (1, 2**15, 16, 16),
}
SCALES = {"1": 1.0, "1e-30": 1e-30, "1e-310": 1e-310, "1e10": 1e10, "-0.5": -0.5, "0": 0.0}

# The levels of every factor; the first is the usual one, all others are faults.
FAULTS: dict[str, tuple[str, ...]] = {
    "size": tuple(SIZES),
    "heads": ("2 of 2", "1 of 1", "4 of 2"),
    "mask": ("none", "keys", "rows", "blind", *BIASES),
    "mask layout": ("contiguous", "one row", "transposed", "strided", "offset", "one number"),
    "causal": ("no", "yes"),
    "kernel": ("dot", "rbf 1", "rbf 0.01"),
    "scale": ("default", *SCALES),
    **{f"{name} layout": LAYOUTS for name in "qkv"},
    **{f"{name} numbers": NUMBERS for name in "qkv"},
}  # and "switch", below
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "exact native": {"method": "exact", "precision": "native"},
    "exact float32": {"method": "exact", "precision": "float32"},
    "exact float64": {"method": "exact", "precision": "float64"},
    "auto": {"tol": 1e-2},
    "auto statistical": {"tol": 0.1, "confidence": CONFIDENCE},
    "sparse": {"method": "sparse", "drop": 1e-2},
    "sparse statistical": {"method": "sparse", "drop": 0.1, "chance": 1 - CONFIDENCE},
    "low_rank": {"method": "low_rank", "rank": 6},
    "polynomial": {"method": "polynomial"},
    "polynomial of degree 2": {"method": "polynomial", "degree": 2},
    "random_features": {"method": "random_features", "features": 16, "confidence": CONFIDENCE},
    "separable": {"method": "separable"},
    "latent": {"method": "latent", "latents": 4, "segment": 8},
}
_CACHED = ("exact", "auto", "auto statistical", "sparse", "sparse statistical")
ENTRIES: dict[str, tuple[str, ...]] = {
    "attend": tuple(METHODS),
    "audit": ("exact", "separable", "latent"),
    "cache": _CACHED,
    "decoding": _CACHED,
    "merge": ("exact",),
    "shards": ("sparse", "sparse statistical"),
    "group": ("exact", "auto", "sparse", "low_rank", "random_features", "separable"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, a way in, a type, and the faults; it makes its own inputs, always the same."""

    entry: str
    method: str
    dtype: str
    faults: tuple[tuple[str, str], ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        faults = ", ".join(f"{factor}: {level}" for factor, level in self.faults) or "no fault"
        return f"{self.entry}, {self.method}, {self.dtype}, {faults}"

    def level(self, factor: str) -> str:
        return dict(self.faults).get(factor, FAULTS[factor][0])

    @property
    def fits(self) -> bool:
        """Whether the way in takes the method, the mechanism has these options, and each fault something to act on."""
        has = dict(self.faults)
        masked = has.get("mask", "none")
        if self.method not in ENTRIES[self.entry] or ("mask layout" in has and masked == "none"):
            return False
        if self.method == "separable" and has.keys() & {"scale", "kernel"}:
            return False
        if has.keys() >= {"kernel", "scale"} or (self.method == "latent" and "kernel" in has):
            return False
        if self.entry in ("cache", "decoding", "shards") and has.keys() & {"mask", "causal", "kernel"}:
            return False
        if self.entry in ("merge", "shards") and has.get("switch", "").startswith("autocast"):
            return False  # the group is the door to both, and stands outside autocast
        if self.entry == "merge" and ("kernel" in has or masked in BIASES):
            return False
        if self.entry == "group" and (
            "kernel" in has or masked in BIASES or (masked != "none" and self.method != "exact")
        ):
            return False
        if self.entry == "group" and self.method == "sparse" and "causal" in has:
            return False
        if self.entry == "group" and "causal" in has and has.get("size") in ("more rows", "one row", "one key"):
            return self.method == "exact"  # causal rows of the others are those of the keys beside them
        # Other methods take minutes with so many keys.
        quick = self.entry in ("attend", "cache") and (self.method == "auto" or self.method.startswith("exact"))
        return quick or has.get("size") != "many equal keys"

    @property
    def extreme(self) -> bool:
        """Whether some number is so large that leaving float64, or missing a tolerance, is no wonder."""
        sizes = [self.level(f"{name} numbers") for name in "qkv"]
        loud = bool({"loud", "huge", "mixed", "far"} & {*sizes})
        return loud or self.level("scale") in ("1e10", "1e-310", "1e-30") or self.level("kernel") == "rbf 0.01"


def cases(seed: int = 0) -> list[Case]:
    """Every single fault by everything that takes it, and every pair."""
    rng, found = random.Random(seed), []
    contexts = [(entry, method) for entry, methods in ENTRIES.items() for method in methods]
    for faults in [(), *((fault,) for fault in _levels())]:
        # A layout of the mask needs a mask.
        faults = faults if not faults or faults[0][0] != "mask layout" else (("mask", "float32 sd 6"), *faults)
        found += [Case(*at, dtype, faults, rng.getrandbits(32)) for at in contexts for dtype in FLOATS]
    for pair in itertools.combinations(_levels(), 2):
        if pair[0][0] == pair[1][0]:
            continue
        more = [(*rng.choice(contexts), rng.choice(list(FLOATS))) for _ in range(2)]
        exact = [("attend", "exact", dtype) for dtype in FLOATS]
        found += [Case(*at, pair, rng.getrandbits(32)) for at in dict.fromkeys([*exact, *more])]
    return [case for case in found if case.fits]


# What broke once, by the issue or by this matrix: these are always run.
_FLUSHED = (("v numbers", "subnormal"), ("switch", "flush"))
_DROWNED = (("q numbers", "subnormal"), ("k numbers", "huge"), ("scale", "1e10"), ("switch", "flush"))
ONCE_BROKEN = (
    *(Case("attend", "exact", name, (("mask", f"{name} against"),)) for name in ("bfloat16", "float16")),
    *(Case("attend", "auto", name, (("mask", f"{name} against"),)) for name in ("bfloat16", "float16")),
    Case("attend", "exact", "float32", (("size", "many equal keys"), ("v layout", "one row"))),
    Case("attend", "exact", "float32", _FLUSHED),
    Case("attend", "sparse", "float32", _FLUSHED),
    Case("cache", "sparse", "float32", _FLUSHED),
    Case("cache", "exact", "bfloat16", _FLUSHED),
    Case("decoding", "exact", "float64", _FLUSHED),
    Case("audit", "exact", "float32", _FLUSHED),
    Case("merge", "exact", "float32", _FLUSHED),
    Case("shards", "sparse", "float32", _FLUSHED),
    Case("attend", "auto", "float32", _DROWNED),
    Case("attend", "exact", "bfloat16", _DROWNED),
    Case("attend", "exact", "float32", (("q layout", "overlapping"),)),
    Case("group", "exact", "float64", (("q layout", "overlapping"),)),
    Case("decoding", "exact", "float32", (("q layout", "strided"),)),
    Case("decoding", "auto", "bfloat16", (("q layout", "transposed"),)),
    Case("cache", "exact", "float16", (("size", "one row"), ("q layout", "one number"))),
    Case("attend", "exact", "float64", (("switch", "sdpa efficient"),)),
    Case("attend", "exact", "float32", (("mask", "rows"), ("switch", "sdpa math"))),
    Case("attend", "exact", "float16", (("mask", "blind"), ("switch", "sdpa math"))),
    Case("audit", "exact", "float16", (("switch", "sdpa efficient"),)),
    Case("decoding", "auto statistical", "float64", (("switch", "sdpa efficient"),)),
    Case("audit", "separable", "float64", (("switch", "default device"),)),
    Case("decoding", "auto", "float32", (("switch", "default device"),)),
    Case("group", "exact", "float64", (("switch", "default device"),)),
    Case("cache", "exact", "float16", (("size", "square"), ("switch", "autocast"))),
)


def sample(count: int, seed: int = 0) -> list[Case]:
    """What broke once, and so many others."""
    return [*ONCE_BROKEN, *random.Random(seed).sample(cases(), count)]


def _levels() -> list[tuple[str, str]]:
    return [(factor, level) for factor, levels in FAULTS.items() for level in levels[1:]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a call is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def inputs(case: Case) -> Inputs:
    """The tensors and options of a case, on the CPU."""
    rng, drawn = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    n, s, d, e = SIZES[case.level("size")]
    heads, groups = map(int, case.level("heads").split(" of "))
    if case.entry == "audit" and case.method == "latent":
        s += 130  # an audit's latents look at segments of 64 keys
    batch, dtype = (1 if s > 1000 else 2), FLOATS[case.dtype]
    if case.level("causal") == "yes" and case.entry == "group":
        n = s
    shapes = {"q": (batch, heads, n, d), "k": (batch, groups, s, d), "v": (batch, groups, s, e)}
    tensors = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=drawn, dtype=torch.float64)
        if name == "k":
            # A mask against the logits needs some; equal weights for all keys let roundings of their sum add up.
            numbers *= 60 if case.level("mask").endswith("against") else 0 if s > 1000 else 1
        tensors[name] = layout(
            numbered(numbers, case.level(f"{name} numbers"), dtype, drawn), case.level(f"{name} layout")
        )
    options: dict[str, Any] = {}
    if case.level("scale") != "default":
        options["scale"] = SCALES[case.level("scale")]
    if case.level("kernel") != "dot":
        options |= {"kernel": "rbf", "sigma": float(case.level("kernel").split()[1])}
    if case.level("causal") == "yes":
        options["causal"] = True
    if heads != groups:
        options["enable_gqa"] = True
    if case.level("mask") != "none":
        scale = options.get("scale", 1 / options["sigma"] if "sigma" in options else 1 / math.sqrt(d))
        logits = scale * (tensors["q"].double() @ tensors["k"].double().repeat_interleave(heads // groups, 1).mT)
        mask = masked(case.level("mask"), logits, rng, drawn)
        options["mask"] = layout(mask, case.level("mask layout"))
    return Inputs(tensors["q"], tensors["k"], tensors["v"], options)


def numbered(x: Tensor, kind: str, dtype: torch.dtype, drawn: torch.Generator) -> Tensor:
    """Normal numbers made extreme, in a type."""
    finfo = torch.finfo(dtype)
    half = dtype == torch.float16
    if kind == "near underflow":
        x = x * finfo.tiny * 4
    elif kind == "subnormal":
        x = x * finfo.tiny * 0.1
    elif kind == "smallest":
        x = x.sign() * finfo.smallest_normal * finfo.eps * torch.randint(1, 5, x.shape, generator=drawn)
    elif kind == "loud":
        x = x * (300 if half else 3e4)
    elif kind == "huge":
        x = x * (1e4 if half else 1e30 if dtype != torch.float64 else 1e100)
    elif kind == "mixed":
        reach = 3 if half else 30
        x = x * 10 ** ((2 * torch.rand(*x.shape[:-1], 1, generator=drawn, dtype=torch.float64) - 1) * reach)
    elif kind == "far":
        # All rows share what their differences lose digits to.
        apart = 300 if half else 1e9 if dtype == torch.float64 else 1e4
        x = x + apart * torch.randn(x.shape[-1], generator=drawn, dtype=torch.float64)
    elif kind == "near-ties":
        # One number, and its neighbours: roundings go one way and add up.
        x = 1 + finfo.eps * torch.randint(0, 3, x.shape, generator=drawn).double()
    elif kind == "zero":
        x = torch.zeros_like(x)
    return x.clamp(-finfo.max / 4, finfo.max / 4).to(dtype)


def layout(x: Tensor, kind: str) -> Tensor:
    """Numbers behind other strides; where strides make numbers the same, they are."""
    if kind == "channels last":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if kind == "skipping rows":
        return torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :]
    if kind == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if kind == "one row":
        return x[..., :1, :].expand(x.shape)
    if kind == "one head":
        return x[:, :1].expand(x.shape)
    if kind == "one batch":
        return x[:1].expand(x.shape)
    if kind == "overlapping":
        rows, width = x.shape[-2:]
        flat = x.flatten(-2)
        some = torch.cat([flat, flat], -1)[..., : rows + width - 1].contiguous()
        return some.unfold(-1, width, 1)
    if kind == "one number":
        return x.flatten()[:1].reshape((1,) * x.ndim).expand(x.shape)
    return x


def masked(kind: str, logits: Tensor, rng: random.Random, drawn: torch.Generator) -> Tensor:
    """A mask for these logits (b, h, n, s)."""
    b, h, n, s = logits.shape
    shape = rng.choice([(b, h, n, s), (n, s), (1, 1, n, s)])
    some = torch.rand(shape, generator=drawn)
    if kind == "keys":
        return torch.rand(b, 1, 1, s, generator=drawn) < 0.7
    if kind == "rows":
        return some < 0.5
    if kind == "blind":
        seen = some < 0.5
        seen[..., ::2, :] = False
        return seen
    name, what = kind.split(" ", 1)
    dtype = FLOATS[name]
    numbers = 6 * torch.randn(shape, generator=drawn, dtype=torch.float64)
    if what == "60000":
        numbers = numbers.sign() * 60000
    elif what == "-inf":
        numbers = numbers.masked_fill(some < 0.4, -math.inf)
    elif what == "lowest":
        numbers = numbers.masked_fill(some < 0.4, torch.finfo(dtype).min)
    elif what == "against":
        # It takes the logits back: what is left of either is what the other was rounded by.
        most = torch.finfo(dtype).max / 4
        numbers = -logits.nan_to_num(0, 0, 0).clamp(-most, most) + numbers.expand(logits.shape) / 6
    return numbers.to(dtype)


@contextlib.contextmanager
def _set(change: Callable[[], Any], back: Callable[[], Any]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        back()


def _matmul_precision(word: str) -> Any:
    return _set(lambda: torch.set_float32_matmul_precision(word), lambda: torch.set_float32_matmul_precision("highest"))


def _fp32_precision(word: str) -> Any:
    def put(value: str) -> None:
        torch.backends.fp32_precision = value

    return _set(lambda: put(word), lambda: put("none"))


def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    return _set(lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(before))


def _threads(count: int) -> Any:
    before = torch.get_num_threads()
    return _set(lambda: torch.set_num_threads(count), lambda: torch.set_num_threads(before))


def _deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return _set(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    )


SWITCHES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "flush": lambda: _set(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "matmul high": lambda: _matmul_precision("high"),
    "matmul medium": lambda: _matmul_precision("medium"),
    "fp32 bf16": lambda: _fp32_precision("bf16"),
    "fp32 tf32": lambda: _fp32_precision("tf32"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast by keyword": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": _deterministic,
    "inference mode": torch.inference_mode,
    "gradients": contextlib.nullcontext,
    "default float64": lambda: _default_dtype(torch.float64),
    "default bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "three threads": lambda: _threads(3),
    "sdpa math": lambda: sdpa_kernel(SDPBackend.MATH),
    "sdpa efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
}
FAULTS["switch"] = tuple(SWITCHES)


class Answer(NamedTuple):
    """What was asked, what was answered, what is promised of each row, and how surely."""

    question: Question
    out: Tensor
    bounds: Tensor
    kind: str = "deterministic"
    confidence: float = 1.0


class Outcome(NamedTuple):
    """What came of one case: how it was refused, or what was wrong, or neither; and its rows that chance may fail."""

    case: Case
    refused: str = ""
    wrong: str = ""
    rows: int = 0
    worst: float = 0.0
    vacuous: int = 0
    chances: int = 0
    misses: int = 0


def run_case(case: Case) -> Outcome:
    """Make, ask under the switch, judge outside of it."""
    given = inputs(case)
    before = [x.clone() for x in (given.q, given.k, given.v)]
    if case.level("switch") == "gradients":
        given.q.requires_grad_(True)
    try:
        with warnings.catch_warnings(), SWITCHES[case.level("switch")]():
            warnings.simplefilter("ignore")
            answers = _ENTER[case.entry](case, given)
    except AvowError as error:
        return _refusal(case, error)
    except Exception as error:  # any other error is what the matrix looks for
        return Outcome(case, wrong=f"{type(error).__name__}: {str(error)[:200]}")
    total = Outcome(case)
    if not all(torch.equal(x, y) for x, y in zip(before, (given.q, given.k, given.v), strict=True)):
        return total._replace(wrong="an input was changed")
    for answer in answers:
        total = _judged(total, answer)
    return total


def _refusal(case: Case, error: AvowError) -> Outcome:
    kind = type(error).__name__
    if not all(str(part).strip() for part in (error.name, error.rule, error.remedy)):
        return Outcome(case, wrong=f"a refusal without its parts: {kind}: {error}")
    legitimate = (
        (kind == "ToleranceUnreachable" and ("auto" in case.method or "sparse" in case.method or case.extreme))
        or (kind == "RangeError" and (case.extreme or _narrow_by_name(case)))
        or (kind == "NotDifferentiable" and case.level("switch") == "gradients")
    )
    if legitimate:
        return Outcome(case, refused=kind)
    return Outcome(case, wrong=f"refused for no reason: {kind}: {error}")


def _narrow_by_name(case: Case) -> bool:
    """Arithmetic that was asked for by name and does not hold these values, or these biases."""
    faint = case.level("v numbers") in ("near underflow", "subnormal", "smallest")
    biased = case.level("mask") in BIASES or case.level("kernel") != "dot"
    half = case.dtype in ("bfloat16", "float16")
    if case.method == "exact native":
        return faint or (half and biased)
    return case.method == "exact float32" and faint


def _judged(total: Outcome, answer: Answer) -> Outcome:
    question, out = answer.question, answer.out.detach()
    typed = out.dtype == question.q.dtype or total.case.entry == "audit"  # one may audit an answer of any type
    if not typed or out.device != question.q.device or answer.bounds.is_meta:
        return total._replace(wrong=f"the answer is {out.dtype} on {out.device}, its bounds on {answer.bounds.device}")
    if answer.kind == "none":
        return total
    b, h, n, _ = question.shape
    bounds = answer.bounds.detach().reshape(b, h, n)
    chancy = answer.kind == "statistical"
    found: Verdict = verdict(question, out, bounds, BALLS)
    vacuous = total.vacuous + int((bounds.isfinite() & (bounds > 2.001)).sum())
    total = total._replace(rows=total.rows + found.rows, worst=max(total.worst, 0 if chancy else found.worst))
    total = total._replace(vacuous=vacuous)
    if chancy:
        rng = random.Random(total.case.seed)
        row = (rng.randrange(b), rng.randrange(h), rng.randrange(n))
        return total._replace(chances=total.chances + 1, misses=total.misses + (row in found.which))
    return total._replace(wrong=total.wrong or found.story)


def _asked(given: Inputs, **about: Any) -> Question:
    options = {name: x for name, x in given.options.items() if name != "enable_gqa"}
    return Question(given.q.detach(), given.k, given.v, **(options | about))


def _generator(case: Case) -> torch.Generator:
    """Draws that know nothing of the inputs."""
    return torch.Generator("cpu").manual_seed(case.seed + 1)


def _call(case: Case, function: Callable[..., Any], tensors: Mapping[str, Tensor], **options: Any) -> Any:
    """By position, or by keyword where that is the fault."""
    if case.level("switch") == "autocast by keyword":
        return function(**tensors, **options)
    return function(*tensors.values(), **options)


def _attend(case: Case, given: Inputs) -> list[Answer]:
    wish = dict(METHODS[case.method])
    if "rank" in wish:
        wish["rank"] = min(wish["rank"], given.k.shape[-2])
    tensors = {"q": given.q, "k": given.k, "v": given.v}
    out, certificate = _call(case, avow.attend, tensors, **wish, **given.options, generator=_generator(case))
    if "tol" in wish and not certificate.keeps(wish["tol"]):
        raise AssertionError(f"tol={wish['tol']} was asked for, and {certificate.bound} was answered")
    question = _asked(given, target=certificate.target, parameters=certificate.parameters)
    return [Answer(question, out, certificate.rows, certificate.kind, certificate.confidence)]


def _audit(case: Case, given: Inputs) -> list[Answer]:
    """An answer that the audit takes for perfect in some rows, the method's in others, and one that is wrong in others.

    Every audited row must be as near as the audit says. The first is the audit's own reference: its error is all there.
    """
    wish = METHODS[case.method]["method"]
    problem = Problem.of(given.q.detach(), given.k, given.v, **given.options)
    perfect = all_methods()[wish]().reference(problem).double()
    out = avow.attend(given.q.detach(), given.k, given.v, method=wish, **given.options).out.double()
    kind = torch.rand(out.shape[:-1], generator=_generator(case), dtype=torch.float64, device="cpu").unsqueeze(-1)
    out = torch.where(kind < 0.4, perfect, torch.where(kind < 0.8, out, out * (1 - 1e-3)))
    tensors = {"out": out, "q": given.q, "k": given.k, "v": given.v}
    report = _call(case, avow.audit, tensors, method=wish, **given.options, generator=_generator(case))
    parameters = {"latents": 64, "segment": 64} if wish == "latent" else {}
    question = _asked(given, target=report.certificate.target, parameters=parameters)
    bounds = torch.full(given.q.shape[:-1], math.inf, dtype=torch.float64, device="cpu")
    bounds[tuple(report.rows.T)] = report.errors
    assert report.certificate.bound >= float(report.errors.max())
    return [Answer(question, out, bounds)]


_WISHES: dict[str, dict[str, Any]] = {
    "exact": {},
    "auto": {"tol": 1e-2},
    "auto statistical": {"tol": 0.1, "confidence": CONFIDENCE},
    "sparse": {"tol": 1e-2, "method": "sparse"},
    "sparse statistical": {"tol": 0.1, "confidence": CONFIDENCE, "method": "sparse"},
}


def _new_cache(given: Inputs) -> KeyValueCache:
    b, g, _, d = given.k.shape
    return KeyValueCache(key_heads=g, dim=d, value_dim=given.v.shape[-1], batch=b, dtype=given.k.dtype)


def _from_cache(case: Case, cache: KeyValueCache, given: Inputs, rows: Tensor, tokens: int) -> Answer:
    wish = {name: x for name, x in given.options.items() if name == "scale"} | _WISHES[case.method]
    out, certificate = _call(case, cache.attend, {"q": rows}, **wish, generator=_generator(case))
    n = rows.shape[-2]
    with torch.device("cpu"):
        mask = torch.arange(tokens) <= torch.arange(tokens - n, tokens)[:, None]
    scale = given.options.get("scale")
    question = Question(rows.detach(), given.k[:, :, :tokens], given.v[:, :, :tokens], mask, scale=scale)
    return Answer(question, out, certificate.rows, certificate.kind, certificate.confidence)


def _cache(case: Case, given: Inputs) -> list[Answer]:
    """Tokens appended in pieces, then the last rows ask."""
    cache, s = _new_cache(given), given.k.shape[-2]
    for start, stop in itertools.pairwise([0, s // 3, s // 2, s]):
        cache.append(given.k[:, :, start:stop], given.v[:, :, start:stop])
    return [_from_cache(case, cache, given, given.q[:, :, -min(s, given.q.shape[-2]) :], s)]


def _decoding(case: Case, given: Inputs) -> list[Answer]:
    """A prompt, then tokens one by one, each of which asks."""
    cache, s = _new_cache(given), given.k.shape[-2]
    first, answers = max(0, s - 3), []
    cache.append(given.k[:, :, :first], given.v[:, :, :first])
    for token in range(first, s):
        cache.append(given.k[:, :, token : token + 1], given.v[:, :, token : token + 1])
        row = token % given.q.shape[-2]
        answers.append(_from_cache(case, cache, given, given.q[:, :, row : row + 1], token + 1))
    return answers


def _merge(case: Case, given: Inputs) -> list[Answer]:
    """Shards of the keys, each with its own certificate, merged."""
    s, mask = given.k.shape[-2], given.options.get("mask")
    scale = given.options.get("scale", 1 / math.sqrt(given.q.shape[-1]))
    parts = []
    for start, stop in itertools.pairwise([0, s // 4, s // 4, 2 * s // 3, s]):
        some = None
        if mask is not None:
            some = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))[..., start:stop]
        shift = -start if given.options.get("causal") else None
        block = Block(given.k[:, :, start:stop], given.v[:, :, start:stop], shift, some)
        parts.append(partial_answer(given.q.detach(), block, scale))
    out, certificate = functools.reduce(merge, parts).answer(given.q.dtype)
    return [Answer(_asked(given), out, certificate.rows, certificate.kind, certificate.confidence)]


def _shards(case: Case, given: Inputs) -> list[Answer]:
    """Sparse attention over shards, side by side."""
    s, wish = given.k.shape[-2], {name: x for name, x in METHODS[case.method].items() if name != "method"}
    problem = Problem.of(given.q.detach(), given.k, given.v, **({"enable_gqa": True} | given.options))
    draws = [torch.Generator("cpu").manual_seed(case.seed + 1 + rank) for rank in range(4)]
    found = over_shards(problem, [s // 4, s // 4, 2 * s // 3, s], Sparse(**wish), draws=draws).answer
    rows = found.certificate
    return [Answer(_asked(given), found.out, rows.rows, rows.kind, rows.confidence)]


def _group(case: Case, given: Inputs) -> list[Answer]:
    """A process group of one."""
    wish = dict(METHODS[case.method])
    if "rank" in wish:
        wish["rank"] = min(wish["rank"], given.k.shape[-2])
    shared = case.method in ("exact", "sparse", "auto")
    tensors = {"q": given.q, "k": given.k, "v": given.v}
    options = {"generator": _generator(case), "shared_queries": shared, **wish, **given.options}
    out, certificate = _call(case, attend_shards, tensors, **options)
    question = _asked(given, target=certificate.target, parameters=certificate.parameters)
    return [Answer(question, out, certificate.rows, certificate.kind, certificate.confidence)]


_ENTER: dict[str, Callable[[Case, Inputs], list[Answer]]] = {
    "attend": _attend,
    "audit": _audit,
    "cache": _cache,
    "decoding": _decoding,
    "merge": _merge,
    "shards": _shards,
    "group": _group,
}


@dataclasses.dataclass
class Report:
    """What a run of cases came to."""

    cases: int = 0
    rows: int = 0
    vacuous: int = 0
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[Outcome] = dataclasses.field(default_factory=list)
    worst: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    chances: int = 0
    misses: int = 0

    def merge(self, other: Report) -> None:
        for name in ("cases", "rows", "vacuous", "chances", "misses"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused += other.refused
        self.wrong += other.wrong
        for at, worst in other.worst.items():
            self.worst[at] = max(self.worst.get(at, 0.0), worst)

    def add(self, one: Outcome) -> None:
        self.cases += 1
        self.rows += one.rows
        self.vacuous += one.vacuous
        self.chances += one.chances
        self.misses += one.misses
        if one.refused:
            self.refused[f"{one.case.entry}, {one.case.method}: {one.refused}"] += 1
        if one.wrong:
            self.wrong.append(one)
        else:
            at = (one.case.method, one.case.dtype)
            self.worst[at] = max(self.worst.get(at, 0.0), one.worst)

    @property
    def sound(self) -> bool:
        """Nothing wrong, and no more statistical misses than chance explains once in a million."""
        return not self.wrong and self.misses <= binom.isf(RARE, max(self.chances, 1), 1 - CONFIDENCE)

    def __str__(self) -> str:
        lines = [
            f"{self.cases:,} cases, {self.rows:,} rows: {len(self.wrong)} wrong, {self.refused.total():,} refused, "
            f"{self.misses} misses in {self.chances:,} statistical rows at confidence {CONFIDENCE}, "
            f"{self.vacuous:,} bounds above 2"
        ]
        lines += [f"  refused {count:5}  {what}" for what, count in sorted(self.refused.items())]
        return "\n".join(lines)

    @property
    def stories(self) -> list[str]:
        return [f"{one.case}\n    {one.wrong}" for one in self.wrong]


def run(some: Sequence[Case]) -> Report:
    """All of these cases, one after the other."""
    report = Report()
    # One group for all: gloo does not survive thousands of them.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for case in some:
            report.add(run_case(case))
    finally:
        dist.destroy_process_group()
    return report


def _worker(some: Sequence[Case]) -> Report:
    torch.set_num_threads(1)
    return run(some)


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 1 where a certificate was broken."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=1, help="every so many-th case; 1: all")
    parser.add_argument("--entry", choices=list(ENTRIES), help="one way in alone")
    parser.add_argument("--fault", help="cases alone in whose description this stands")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--show", type=int, default=40, help="failures to print")
    chosen = parser.parse_args(arguments)
    some = [case for case in cases() if chosen.entry in (None, case.entry) and (chosen.fault or "") in str(case)]
    some = some[:: chosen.sample]
    print(f"{len(some):,} cases", flush=True)
    report, start = Report(), time.monotonic()
    pieces = [some[at : at + 500] for at in range(0, len(some), 500)]
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for piece in pool.imap_unordered(_worker, pieces):
            for story in piece.stories[: max(0, chosen.show - len(report.wrong))]:
                print(story)
            report.merge(piece)
            print(f"{report.cases:,} cases, {len(report.wrong)} wrong, {time.monotonic() - start:.0f} s", flush=True)
    print(report)
    by_fault = Counter(
        f"{one.case.entry}, {one.case.method}, {fault}" for one in report.wrong for fault in one.case.faults
    )
    for what, count in by_fault.most_common(30) if report.wrong else ():
        print(f"  wrong {count:5}  {what}")
    print(
        f"{time.monotonic() - start:.0f} s;", "every certificate was kept" if report.sound else "PROMISES WERE BROKEN"
    )
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
