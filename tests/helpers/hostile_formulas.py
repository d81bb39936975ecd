"""Formulas that nobody types by accident: code, towers, walls of brackets, letters from everywhere."""

from __future__ import annotations

import random

NAMES = (
    "x",
    "pi",
    "e",
    "__import__",
    "exec",
    "x.__class__",
    "os",
    "lambda",
    "self",
    "None",
    "True",
    "y",
    "ｘ",
    "х",
    "∞",
)
CODE = (
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "exec('x')",
    "open('/etc/passwd').read()",
    "(lambda: x)()",
    "[x for x in (1,)]",
    "x if x else 1",
    "x := 3",
    "f'{x}'",
    "x; x",
    "import os",
    "getattr(x, 'real')",
    "exp(x, x)",
    "exp(*[x])",
    "exp(x=1)",
    "sin",
    "x()",
    "x[0]",
    "x < 1",
    "not x",
    "1_000 * x",
    "0x10 * x",
    "1j * x",
    "b'x'",
    "...",
    "",
    " ",
    "\x00",
    "x\nx",
    "#x",
    "x ** x ** x ** x ** x",
    "9**9**9**9",
    "(10**6)**64 * x",
    "x**64**64",
    "2**-9999999",
    "1e999",
    "1e308*1e308*x",
    "log(0)",
    "log(-1)",
    "sqrt(-1)",
    "1/0",
    "1/(x-x)",
    "0**-1",
    "x/0.0",
    "tan(pi/2)",
    "exp(exp(exp(exp(9))))",
    "exp(exp(exp(exp(x))))",
    "1/x",
    "log(x)",
    "1/(x-1)",
    "sin(1e300*x)",
    "sin(x**64)",
    "tan(9*x)",
    "exp(99*x)",
    "x*1e300",
    "x*1e-300",
    "0*x",
    "7",
    "<script>alert(1)</script>",
    "x" * 201,
    "x" * 400,
    "9" * 300 + "*x",
)


def hostile(count: int, seed: int = 0) -> list[str]:
    """So many of them, the same for the same seed: those above, and more that are drawn."""
    rng = random.Random(seed)
    made = list(CODE)
    while len(made) < count:
        deep = rng.randrange(5, 99)
        match rng.randrange(7):
            case 0:
                made.append("(" * deep + "x" + ")" * rng.choice((deep, deep - 1)))
            case 1:
                made.append("-" * deep + "x")
            case 2:
                made.append("x" + f"**{rng.choice('x29')}" * rng.randrange(1, 12))
            case 3:
                made.append("".join(rng.choice(("exp(", "sin(", "sqrt(", "log(")) for _ in range(deep % 30)) + "x")
            case 4:
                made.append("".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(rng.randrange(1, 60))))
            case 5:
                made.append(f"{rng.choice(NAMES)}.__{rng.choice(NAMES)}__({rng.choice(NAMES)})")
            case 6:
                parts = [
                    f"{rng.choice(NAMES)}{rng.choice(('+', '-', '*', '/', '**', '//', '%', '@', '<<', '^'))}"
                    for _ in range(9)
                ]
                made.append("".join(parts) + "x")
    return made
