"""The questions that `avow claims grade` knows: each takes its answer from a claim, which judges other answers."""

from __future__ import annotations

from avow.theory.claims.catalogue import efficient, lemmas, optimisers, queries, softmax
from avow.theory.claims.grading import Question

_KEYS = {"n": (2, 50), "eps": (0.01, 0.9)}
_SUMS = {"L": (0.1, 5), "U": (0.1, 5), "E": (0.1, 5), "Z": (0.1, 5)}

_ALL = (
    Question(
        "copy-gap-enough",
        "How far must one score exceed each of the other n − 1 for its weight to be at least 1/(1 + ε)?",
        softmax.copy_gap,
        {"n": "the number of keys", "eps": "ε"},
        "log((n - 1) / eps)",
        lambda formula: softmax.Gap(enough=formula),
        unique=False,
        spans=_KEYS,
    ),
    Question(
        "copy-gap-needed",
        "A weight is at least 1/(1 + ε). By how much, at least, does its score exceed every other?",
        softmax.copy_gap,
        {"eps": "ε"},
        "log(1 / eps)",
        lambda formula: softmax.Gap(needed=formula),
        spans=_KEYS,
    ),
    Question(
        "softmax-weight",
        "A key has the exponential e of its score, and all exponentials sum to Z. What is its weight?",
        softmax.softmax_categorical,
        {"a": "the key's own exponential, e to its score", "Z": "the sum of all"},
        "a / Z",
        spans=_SUMS | {"a": (0.1, 5)},
    ),
    Question(
        "moved-weights",
        "No logit moves by more than δ. How far can the weights move at most, in sum of absolute values?",
        lemmas.softmax_perturbation,
        {"delta": "δ, the most a logit moves"},
        "2 * tanh(delta / 2)",
        spans={"delta": (0.1, 4)},
    ),
    Question(
        "dropped-tail",
        "Keys of weight τ are dropped, and the rest renormalised. How far does the output move, as a multiple of the"
        " distance between the dropped values' mean and the kept values' mean?",
        lemmas.tail_mass_output,
        {"tau": "τ, the weight dropped"},
        "tau",
    ),
    Question(
        "dropped-mass",
        "The kept exponentials sum to at least L, the dropped ones to at most U. How much can the dropped weigh at"
        " most?",
        lemmas.dropped_mass,
        {"L": "the kept sum, at least", "U": "the dropped sum, at most"},
        "U / (L + U)",
        spans=_SUMS,
    ),
    Question(
        "ratio-error",
        "Unnormalised weights are off by E in all, and sum to Z as they are. How far can the normalised average move at"
        " most, in lengths of the longest value?",
        lemmas.ratio_error,
        {"E": "what is off, in all", "Z": "the sum of the weights as they are"},
        "2 * E / Z",
        unique=False,
        spans=_SUMS,
    ),
    Question(
        "residual",
        "Landmarks leave r and s of a positive semidefinite kernel at two points with themselves. How much can they"
        " leave between the two at most?",
        lemmas.residual_cauchy_schwarz,
        {"r": "what is left at the first point", "s": "what is left at the second"},
        "sqrt(r * s)",
    ),
    Question(
        "rounding",
        "Each of n roundings multiplies or divides by 1 + δ with |δ| ≤ u. How far is the result off at most? (n·u < 1)",
        lemmas.rounding_gamma,
        {"n": "the number of roundings", "u": "the most that one moves"},
        "n * u / (1 - n * u)",
        unique=False,
        spans={"n": (2, 5), "u": (0.01, 0.18)},
    ),
    Question(
        "rbf-logit",
        "Attention by the RBF kernel of bandwidth σ is softmax of which logits, given a = q·k and b = ‖k‖²?",
        efficient.rbf_equals_dot,
        {"a": "q·k", "b": "‖k‖²", "sigma": "σ"},
        "(a - b / 2) / sigma",
        unique=False,
        spans={"a": (0.1, 2), "b": (0.1, 2), "sigma": (0.5, 2)},
    ),
    Question(
        "copy-length",
        "Unit keys keep a distance of at least 1 from key 1. How long a query along key 1 leaves it a weight of at"
        " least 1/(1 + ε) among n keys?",
        queries.copy_separated,
        {"n": "the number of keys", "eps": "ε"},
        "2 * log(n / eps)",
        lambda formula: queries.Lengths(stated=formula),
        unique=False,
        spans=_KEYS,
    ),
    Question(
        "average-weight",
        "An exponential average v_t = βv_(t−1) + (1 − β)g_t starts from 0. What weight has g_i in v_t?",
        optimisers.ema_unrolled,
        {"beta": "β", "t": "the step", "i": "an earlier one"},
        "(1 - beta) * beta**(t - i)",
        spans={"beta": (0.1, 0.9), "t": (5, 9), "i": (1, 4)},
    ),
    Question(
        "average-bias",
        "Such an average of gradients whose mean is always the same: which part of that mean has v_t?",
        optimisers.ema_bias,
        {"beta": "β", "t": "the step"},
        "1 - beta**t",
        spans={"beta": (0.1, 0.9), "t": (2, 9)},
    ),
    Question(
        "weight-decay",
        "Adding γ‖θ‖² to the loss of plain SGD with step η shrinks the weights by which share at each step?",
        optimisers.sgd_l2_decay,
        {"eta": "η", "gamma": "γ"},
        "2 * eta * gamma",
    ),
)
QUESTIONS = {question.id: question for question in _ALL}
