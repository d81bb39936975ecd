"""Every mistake in a call of the one verb is told what to do about it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import avow
from avow.errors import AvowError, DtypeError, NonFiniteError, ParameterError, ShapeError, UnknownMethod


def nan_at(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[0, 1, 2, 3] = value
    return x


_Q = torch.zeros(1, 2, 5, 4)
_BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], type[AvowError], str]] = [
    (
        "key dimension",
        (_Q, _Q[..., :3], _Q),
        {},
        ShapeError,
        "k.shape[-1]=3 must equal q.shape[-1]=4 and be at least 1; project queries and keys to one head dimension",
    ),
    (
        "values without keys",
        (_Q, _Q, _Q[..., :4, :]),
        {},
        ShapeError,
        "v.shape[-2]=4 must equal k.shape[-2]=5; each key needs one value",
    ),
    (
        "batches",
        (_Q, _Q.expand(3, 2, 5, 4), _Q.expand(3, 2, 5, 4)),
        {},
        ShapeError,
        "v.shape=(3, 2, 5, 4) must agree with k (3, 2, 5, 4) and q (1, 2, 5, 4) in batch and heads; "
        "expand the smaller one",
    ),
    (
        "heads",
        (_Q, _Q[:, :1], _Q[:, :1]),
        {},
        ShapeError,
        "k heads=1 must equal q's 2 heads; pass enable_gqa=True for grouped queries",
    ),
    (
        "heads that no grouping could share",
        (_Q, _Q.expand(2, 2, 5, 4).reshape(1, 4, 5, 4)[:, :3], _Q.expand(2, 2, 5, 4).reshape(1, 4, 5, 4)[:, :3]),
        {},
        ShapeError,
        "k heads=3 must equal q's 2 heads; give each query head its own keys",
    ),
    (
        "tolerance of zero",
        (_Q, _Q, _Q),
        {"tol": 0},
        ParameterError,
        "tol=0 must be a number above 0; try tol=1e-2, or leave it out for exact",
    ),
    (
        "method that was nearly spelt",
        (_Q, _Q, _Q),
        {"method": "exat"},
        UnknownMethod,
        "method='exat' is not a method; did you mean exact?",
    ),
    (
        "parameter that was nearly spelt",
        (_Q, _Q, _Q),
        {"method": "random_features", "feature": 64},
        ParameterError,
        "random_features: feature=64 is not a parameter; did you mean features?",
    ),
    (
        "heads that do not divide",
        (_Q, _Q.expand(2, 2, 5, 4).reshape(1, 4, 5, 4)[:, :3], _Q.expand(2, 2, 5, 4).reshape(1, 4, 5, 4)[:, :3]),
        {"enable_gqa": True},
        ShapeError,
        "k heads=3 must divide q's 2 heads; regroup the heads",
    ),
    ("axes", (_Q, _Q[0], _Q[0]), {}, ShapeError, "k.ndim=3 must equal q.ndim=4; give all three the same axes"),
    (
        "one axis",
        (_Q[0, 0, 0], _Q, _Q),
        {},
        ShapeError,
        "q.shape=(4,) must be (..., length, dim); add the missing axes",
    ),
    (
        "integers",
        (_Q.int(), _Q.int(), _Q.int()),
        {},
        DtypeError,
        "q.dtype=torch.int32 must be one of float64, float32, bfloat16, float16; convert with q.float()",
    ),
    (
        "float8",
        (_Q, _Q.to(torch.float8_e4m3fn), _Q),
        {},
        DtypeError,
        "k.dtype=torch.float8_e4m3fn must be one of float64, float32, bfloat16, float16; convert with k.float()",
    ),
    (
        "mixed types",
        (_Q, _Q, _Q.double()),
        {},
        DtypeError,
        "v.dtype=torch.float64 must equal q.dtype=torch.float32; use v.to(q.dtype)",
    ),
    (
        "no tensor",
        (_Q.tolist(), _Q, _Q),
        {},
        DtypeError,
        "q=list must be a torch.Tensor; wrap it with torch.as_tensor",
    ),
    (
        "mask of integers",
        (_Q, _Q, _Q),
        {"mask": torch.ones(5, 5, dtype=torch.int64)},
        DtypeError,
        "mask.dtype=torch.int64 must be bool or a float type; use mask.bool(): True means visible",
    ),
    (
        "mask of another shape",
        (_Q, _Q, _Q),
        {"mask": torch.ones(4, 5, dtype=torch.bool)},
        ShapeError,
        "mask.shape=(4, 5) must broadcast to (1, 2, 5, 5); use (length, keys) or (batch, 1, 1, keys)",
    ),
    (
        "mask of more batches",
        (_Q, _Q, _Q),
        {"mask": torch.ones(3, 2, 5, 5, dtype=torch.bool)},
        ShapeError,
        "mask.shape=(3, 2, 5, 5) must broadcast to (1, 2, 5, 5); use (length, keys) or (batch, 1, 1, keys)",
    ),
    (
        "mask with nan",
        (_Q, _Q, _Q),
        {"mask": torch.full((5, 5), math.nan)},
        NonFiniteError,
        "mask=nan or +inf must hold finite numbers or -inf; use -inf to hide a key",
    ),
    (
        "mask with inf",
        (_Q, _Q, _Q),
        {"mask": torch.full((5, 5), math.inf)},
        NonFiniteError,
        "mask=nan or +inf must hold finite numbers or -inf; use -inf to hide a key",
    ),
    (
        "nan in q",
        (nan_at(_Q, math.nan), _Q, _Q),
        {},
        NonFiniteError,
        "q[0, 1, 2, 3]=nan must be finite; remove NaN and inf from q",
    ),
    (
        "inf in k",
        (_Q, nan_at(_Q, math.inf), _Q),
        {},
        NonFiniteError,
        "k[0, 1, 2, 3]=inf must be finite; remove NaN and inf from k",
    ),
    (
        "-inf in v",
        (_Q, _Q, nan_at(_Q, -math.inf)),
        {},
        NonFiniteError,
        "v[0, 1, 2, 3]=-inf must be finite; remove NaN and inf from v",
    ),
    (
        "negative tolerance",
        (_Q, _Q, _Q),
        {"tol": -1e-3},
        ParameterError,
        "tol=-0.001 must be a number above 0; try tol=1e-2, or leave it out for exact",
    ),
    (
        "nan tolerance",
        (_Q, _Q, _Q),
        {"tol": math.nan},
        ParameterError,
        "tol=nan must be a number above 0; try tol=1e-2, or leave it out for exact",
    ),
    (
        "tolerance in words",
        (_Q, _Q, _Q),
        {"tol": "small"},
        ParameterError,
        "tol='small' must be a number above 0; pass a number, without quotes",
    ),
    (
        "confidence",
        (_Q, _Q, _Q),
        {"confidence": 1.5},
        ParameterError,
        "confidence=1.5 must be above 0 and at most 1; try confidence=0.99",
    ),
    (
        "coverage",
        (_Q, _Q, _Q),
        {"coverage": 1.0},
        ParameterError,
        "coverage=1.0 must lie strictly between 0 and 1; try coverage=0.99",
    ),
    (
        "unknown method",
        (_Q, _Q, _Q),
        {"method": "magic"},
        UnknownMethod,
        f"method='magic' is not a method; known methods: {', '.join(avow.all_methods())}",
    ),
    (
        "a method by the name it has elsewhere",
        (_Q, _Q, _Q),
        {"method": "performer"},
        UnknownMethod,
        "method='performer' is not a method; did you mean random_features?",
    ),
    (
        "unknown parameter",
        (_Q, _Q, _Q),
        {"method": "low_rank", "landmarks": 3},
        ParameterError,
        "low_rank: landmarks=3 is not a parameter; known parameters: rank",
    ),
    (
        "parameter without a method",
        (_Q, _Q, _Q),
        {"rank": 3},
        ParameterError,
        "rank=3 belongs to a named method; add method='low_rank'",
    ),
    (
        "misspelt argument",
        (_Q, _Q, _Q),
        {"tolerance": 1e-2},
        ParameterError,
        "tolerance=0.01 is not an argument, nor a parameter of any method; did you mean tol?",
    ),
    (
        "rank above the keys",
        (_Q, _Q, _Q),
        {"method": "low_rank", "rank": 6},
        ParameterError,
        'low_rank: rank=6 exceeds 5 keys; use rank<=5 or method="exact"',
    ),
    (
        "no features",
        (_Q, _Q, _Q),
        {"method": "random_features", "features": 0},
        ParameterError,
        "random_features: features=0 must be from 1 to 16777216; the default is 256 (random directions)",
    ),
    (
        "no kernel",
        (_Q, _Q, _Q),
        {"kernel": "box"},
        ParameterError,
        'kernel=\'box\' must be dot or rbf; pass kernel="dot" or kernel="rbf"',
    ),
    (
        "rbf without a width",
        (_Q, _Q, _Q),
        {"kernel": "rbf"},
        ParameterError,
        'sigma=None must be a positive number; pass sigma=1.0 with kernel="rbf"',
    ),
    (
        "dot with a width",
        (_Q, _Q, _Q),
        {"sigma": 1.0},
        ParameterError,
        'sigma=1.0 belongs to kernel="rbf"; leave it out or pass kernel="rbf"',
    ),
    (
        "infinite scale",
        (_Q, _Q, _Q),
        {"scale": math.inf},
        ParameterError,
        "scale=inf must be finite; leave scale out for 1/sqrt(dim)",
    ),
    *(
        (
            f"{name} of {type(value).__name__}",
            (_Q, _Q, _Q),
            {name: value} | more,
            UnknownMethod if name == "method" else ParameterError,
            text,
        )
        for name, value, more, text in (
            ("scale", b"1", {}, "scale=b'1' must be finite; leave scale out for 1/sqrt(dim)"),
            ("scale", 10**400, {}, "scale=an integer of 1329 bits must be finite; leave scale out for 1/sqrt(dim)"),
            ("scale", [], {}, "scale=[] must be finite; leave scale out for 1/sqrt(dim)"),
            (
                "tol",
                10**400,
                {},
                "tol=an integer of 1329 bits must be a number above 0; try tol=1e-2, or leave it out for exact",
            ),
            ("sigma", "1", {"kernel": "rbf"}, 'sigma=1 must be a positive number; pass sigma=1.0 with kernel="rbf"'),
            (
                "sigma",
                1e-320,
                {"kernel": "rbf"},
                'sigma=1e-320 must be a positive number; pass sigma=1.0 with kernel="rbf"',
            ),
            ("causal", [], {}, "causal=[] must be True or False; pass other masks with mask="),
            ("generator", 7, {}, "generator=7 must be a torch.Generator; pass torch.Generator().manual_seed(0)"),
            ("method", {}, {}, f"method={{}} is not a method; known methods: {', '.join(avow.all_methods())}"),
        )
    ),
]


@pytest.mark.parametrize(("inputs", "options", "kind", "text"), [case[1:] for case in _BAD], ids=[c[0] for c in _BAD])
def test_a_mistake_is_told_its_name_value_rule_and_remedy(
    inputs: tuple[Any, ...], options: dict[str, Any], kind: type[AvowError], text: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(text)}$") as caught:
        avow.attend(*inputs, **options)
    assert type(caught.value) is kind and isinstance(caught.value, avow.InputError)


@pytest.mark.parametrize(
    "options",
    [{"confidence": "0.9"}, {"coverage": "most"}, {"scale": "big"}, {"mask": [True] * 5}, {"tol": True}],
    ids=str,
)
def test_a_word_where_a_number_belongs_is_told_so_too(options: dict[str, Any]) -> None:
    with pytest.raises(avow.InputError, match=next(iter(options))):
        avow.attend(_Q, _Q, _Q, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: avow.audit(_Q, _Q, _Q, _Q, tol=0.1), "tol=0.1 is not an argument of audit; ask the certificate: "),
        (
            lambda: avow.audit(_Q, _Q, _Q, _Q, samples=9),
            "samples=9 is not an argument of audit; coverage= and confidence= say",
        ),
        (
            lambda: avow.audit(_Q, _Q, _Q, _Q, coverag=0.9),
            "coverag=0.9 is not an argument of audit; did you mean coverage?",
        ),
        (lambda: avow.plan(_Q, _Q, _Q, method="exact"), "method='exact' is not an argument of plan; name it to attend"),
        (lambda: avow.features_needed(_Q, _Q, v=_Q, tol=0.1), "v=a float32 tensor of shape (1, 2, 5, 4) is not an"),
        (lambda: avow.record("x"), "model='x' must be a torch.nn.Module; pass one, or leave it out"),
    ],
)
def test_an_argument_that_there_is_not_is_answered_with_one_that_there_is(call: Any, words: str) -> None:
    with pytest.raises(ParameterError) as refused:
        call()
    assert str(refused.value).startswith(words)
    with pytest.raises(TypeError, match=r"^audit\(\) missing a required argument: 'v'$"):
        avow.audit(_Q, _Q, _Q)
