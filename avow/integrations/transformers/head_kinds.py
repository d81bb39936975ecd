r"""What a head does, read from the weights of some of its rows and the ids of the tokens.

Positions count from 0, :math:`\alpha_{ij}` is the weight that the row at position i gives the token at position j, and
:math:`\rho_i = \sum_{j \ge 1} \alpha_{ij}` is what that row *reads*: its mass without the first token, on which heads
put what they have no use for. Rows 0 and 1 see too little and do not count. For a set of tokens :math:`T_i` that a row
may be looking for, with :math:`R` the rows in which there is one,

.. math::
    A_T = \frac{\sum_{i \in R} \sum_{j \in T_i} \alpha_{ij}}{\sum_{i \in R} \rho_i}, \qquad
    C_T = \frac{\sum_{i \in R} \rho_i \, |T_i| / i}{\sum_{i \in R} \rho_i}

are the share of what is read that goes there, and the share that would by chance. A head is of the first kind whose
inequalities hold:

- *induction*: :math:`T_i = \{1 < j \le i : x_{j-1} = x_i\}`, the tokens that followed earlier occurrences of the row's
  own token; *same*: :math:`T_i = \{1 \le j < i : x_j = x_i\}`, the earlier occurrences themselves, without the token
  itself. Either if :math:`A_T \ge 1/3`, :math:`A_T \ge 4 C_T`, :math:`|R| \ge 8` and
  :math:`E_R[\sum_{j \in T_i} \alpha_{ij}] \ge 0.02`; if both, the one with the larger :math:`A_T`;
- *resting*: :math:`E[\alpha_{i0}] \ge 1/2`;
- *previous*: :math:`\arg\max_{j \ge 1} \alpha_{ij} = i - 1` in at least 2/3 of the rows;
- *local*: :math:`A_T \ge 1/2` for :math:`T_i = \{j \ge 1 : |i - j| < 16\}`, over rows behind position 64;
- *wide*: none of these.

Heads that look for a token rest wherever there is none to be found, and so most of the time. They are judged by the
rows in which there is one, and before it is asked whether a head rests; the last inequality keeps heads out that never
read anything. Sums are over mass and not averages over rows, so rows that rest have no say in what is read.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

HeadKind = Literal["resting", "previous", "same", "induction", "local", "wide"]
KINDS: dict[HeadKind, str] = {
    "resting": "At least half of the weight is on the first token, so little is read.",
    "previous": "In at least two thirds of the rows, the token before has the largest weight of those read.",
    "same": "At least a third of what is read is earlier occurrences of the same token, where there are any.",
    "induction": "At least a third of what is read is tokens that followed earlier occurrences of the same token, "
    "where there are any.",
    "local": "At least half of what is read is the nearest 16 tokens.",
    "wide": "None of these: many tokens are read, or distant ones.",
}
"""Each kind, and its rule in words; what is read is a row's weight without that of the first token."""
NEAR = 16
"""Tokens nearer than this are local; only rows behind four times as many count."""

_FOUND, _CHANCE, _ROWS, _MASS = 1 / 3, 4.0, 8, 0.02


def head_kind(weights: Float[Tensor, "r s"], rows: Int[Tensor, "r"] | None, ids: Int[Tensor, "s"] | None) -> HeadKind:
    """The kind of a head, from some rows of its weights.

    Args:
        weights: after softmax; tokens that a row does not see have 0.
        rows: the position of each row. None for queries from another sequence: such a head is resting or wide.
        ids: the tokens. Without them no head is called same or induction.

    >>> weights = torch.eye(32).roll(-1, 1)  # each row reads the token before
    >>> head_kind(weights, torch.arange(32), None)
    'previous'
    """
    if rows is None:
        return "resting" if bool(weights[:, 0].mean() >= 0.5) else "wide"
    counted = rows >= 2
    if not bool(counted.any()):
        return "wide"
    weights, rows = weights[counted], rows[counted]
    if ids is not None and (sought := _sought(weights, rows, ids)) is not None:
        return sought
    if float(weights[:, 0].mean()) >= 0.5:
        return "resting"
    if float((weights[:, 1:].argmax(-1) + 1 == rows - 1).double().mean()) >= 2 / 3:
        return "previous"
    distance = (rows[:, None] - torch.arange(weights.shape[-1], device=weights.device)).abs()
    far = rows >= 4 * NEAR
    if bool(far.any()) and _share(weights[far], distance[far] < NEAR) >= 0.5:
        return "local"
    return "wide"


def _sought(weights: Float[Tensor, "r s"], rows: Int[Tensor, "r"], ids: Int[Tensor, "s"]) -> HeadKind | None:
    """Same or induction, if the head looks for either."""
    i, j = rows[:, None], torch.arange(weights.shape[-1], device=weights.device)
    equal = ids[rows][:, None] == ids  # (r, s)
    sought: dict[HeadKind, Bool[Tensor, "r s"]] = {
        "induction": equal.roll(1, -1) & (j > 1) & (j <= i),
        "same": equal & (j > 0) & (j < i),
    }
    shares: dict[HeadKind, float] = {}
    for kind, tokens in sought.items():
        present = tokens.any(-1)
        if int(present.sum()) < _ROWS:
            continue
        some, tokens = weights[present], tokens[present]
        share, read = _share(some, tokens), some[:, 1:].sum(-1)
        chance = float((read * tokens.sum(-1) / rows[present]).sum() / read.sum().clamp(min=1e-30))
        mass = float((some * tokens).sum(-1).mean())
        if share >= max(_FOUND, _CHANCE * chance) and mass >= _MASS:
            shares[kind] = share
    return max(shares, key=lambda kind: shares[kind], default=None)


def _share(weights: Float[Tensor, "r s"], tokens: Bool[Tensor, "r s"]) -> float:
    """The part of what rows read that is on these tokens."""
    read = weights[:, 1:]
    return float((read * tokens[:, 1:]).sum() / read.sum().clamp(min=1e-30))
