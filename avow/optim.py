"""What training asks of `torch.optim` and does not find there: conversions, averages, groups and an honest schedule.

The optimisers are torch's own; nothing of them is rewritten here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LambdaLR

from avow.errors import DtypeError, ParameterError, ShapeError
from avow.parameters import as_float, declared

# Tables that are looked up, and gains: what they hold does not multiply activations as a matrix does.
_EXEMPT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


@declared()
def momentum_from_average(beta: float, delta: float) -> tuple[float, float]:
    r"""(momentum, learning rate) of `torch.optim.SGD` that walk as an average of gradients does.

    The average :math:`v \leftarrow \beta v + (1-\beta)g`, stepped by :math:`-\delta v` from v = 0, is SGD with
    momentum β and learning rate δ(1 − β), and with no other pair [claim momentum-ema]. Leave `dampening` at 0: torch
    does not dampen the first gradient, so that dampening by β is another walk.

    Args:
        beta: β, the weight of the old average, from 0 to below 1.
        delta: δ, the step along the average.

    Returns:
        Momentum and learning rate.

    Raises:
        ParameterError: a number is out of range.

    >>> from avow.optim import momentum_from_average
    >>> momentum_from_average(0.75, 2.0)
    (0.75, 0.5)
    """
    _share("beta", beta)
    _at_least_zero("delta", delta, "a step size such as delta=0.1")
    return float(beta), delta * (1 - beta)


@declared()
def average_from_momentum(momentum: float, learning_rate: float) -> tuple[float, float]:
    """(β, δ) of the average of gradients that walks as `torch.optim.SGD` with this momentum does.

    Args:
        momentum: that of SGD, from 0 to below 1.
        learning_rate: that of SGD.

    Returns:
        β and δ.

    Raises:
        ParameterError: a number is out of range.

    >>> from avow.optim import average_from_momentum
    >>> average_from_momentum(0.75, 0.5)
    (0.75, 2.0)
    """
    _share("momentum", momentum)
    _at_least_zero("learning_rate", learning_rate, "a step size such as learning_rate=0.1")
    return float(momentum), learning_rate / (1 - momentum)


@declared()
def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, which decay, and everything else, which does not.

    A parameter decays when it has at least two axes and no embedding or norm owns it: biases, gains and tables of
    embeddings keep their size. One that several modules share is counted once, and is spared if any of them is an
    embedding or a norm. Every parameter of the model is in exactly one group, frozen ones too.

    Args:
        model: whose parameters are grouped.
        weight_decay: that of the matrices.

    Returns:
        What `torch.optim` takes for parameters.

    Raises:
        ParameterError: the model has no parameters, or the decay is negative.

    >>> import torch
    >>> from avow.optim import decay_groups
    >>> [len(group["params"]) for group in decay_groups(torch.nn.Linear(2, 2), weight_decay=0.1)]
    [1, 1]
    """
    _at_least_zero("weight_decay", weight_decay, "0 for none, or weight_decay=0.1")
    spared = {id(p) for owner in model.modules() if isinstance(owner, _EXEMPT) for p in owner.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for p in model.parameters():
        (matrices if p.ndim >= 2 and id(p) not in spared else others).append(p)
    if not matrices and not others:
        remedy = "pass a module that has weights"
        raise ParameterError("model", type(model).__name__, "has no parameters to optimise", remedy)
    return [{"params": matrices, "weight_decay": float(weight_decay)}, {"params": others, "weight_decay": 0.0}]


@declared()
def adamw(
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    fused: bool = False,
) -> torch.optim.AdamW:
    r"""AdamW over `decay_groups`: each step takes ηλ off every matrix, whatever its gradients [claim adam-l2-vs-w].

    Args:
        model: whose parameters are optimised.
        learning_rate: η.
        weight_decay: λ.
        betas: decay of the mean gradient and of the mean square.
        epsilon: what is added to the root of the mean square.
        fused: whether the whole step is one kernel: faster, and rounded a little differently.

    Returns:
        The optimiser.

    Raises:
        ParameterError: a number is out of range.

    >>> import torch
    >>> from avow.optim import adamw
    >>> adamw(torch.nn.Linear(2, 2), 1e-3).param_groups[1]["weight_decay"]
    0.0
    """
    return torch.optim.AdamW(**_adam(model, learning_rate, weight_decay, betas, epsilon, fused))


@declared()
def adam_l2(
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    fused: bool = False,
) -> torch.optim.Adam:
    r"""Adam with the penalty (λ/2)‖θ‖² in the loss, over the same groups as `adamw`: the one to compare it with.

    The penalty's gradient λθ goes through the preconditioner, so a step takes :math:`\eta\lambda/(\sqrt{\hat v} +
    \epsilon)` off a weight: less where gradients are large [claim adam-l2-vs-w].

    Args:
        model: whose parameters are optimised.
        learning_rate: η.
        weight_decay: λ.
        betas: decay of the mean gradient and of the mean square.
        epsilon: what is added to the root of the mean square.
        fused: whether the whole step is one kernel.

    Returns:
        The optimiser.

    Raises:
        ParameterError: a number is out of range.

    >>> import torch
    >>> from avow.optim import adam_l2
    >>> type(adam_l2(torch.nn.Linear(2, 2), 1e-3)).__name__
    'Adam'
    """
    return torch.optim.Adam(**_adam(model, learning_rate, weight_decay, betas, epsilon, fused))


@declared()
def warmup_cosine(optimizer: torch.optim.Optimizer, warmup: int, total: int, floor: float = 0.1) -> LambdaLR:
    """A schedule that rises for `warmup` steps, falls by a cosine until step `total`, and stays there.

    The share of the learning rate is (t + 1)/(warmup + 1) while t < warmup, 1 at t = warmup, and `floor` at t = total
    and at every step after it. Call `.step()` once after each step of the optimiser.

    Args:
        optimizer: whose learning rate follows.
        warmup: steps in which it rises.
        total: the step from which on it stays.
        floor: the share of the learning rate that is left then.

    Returns:
        The schedule.

    Raises:
        ParameterError: the numbers do not fit together.

    >>> import torch
    >>> from avow.optim import warmup_cosine
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    >>> warmup_cosine(optimizer, warmup=3, total=10).get_last_lr()
    [0.25]
    """
    for name, steps, least in (("warmup", warmup, 0), ("total", total, 1)):
        if steps < least:
            raise ParameterError(name, steps, f"must be at least {least}", "count the optimiser's steps")
    if warmup >= total:
        raise ParameterError("warmup", warmup, f"must be below total={total}", "warm up for about a tenth of the steps")
    if not 0 <= as_float(floor) <= 1:
        remedy = "floor=0.1 ends at a tenth of the learning rate"
        raise ParameterError("floor", floor, "must be a share from 0 to 1", remedy)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (total - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return _Resumed(optimizer, share)


class _Resumed(LambdaLR):
    """A schedule whose loaded state also reaches the optimiser: torch would keep the first rate for one step more.

    The rate is what this schedule has for that step, should the state be of one with another `total`.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._last_lr = [x * f(self.last_epoch) for x, f in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


class AveragedWeights:
    r"""The exponential average of a model's weights, free of the pull of where it started from.

    After t updates the average is :math:`v_t/(1-\beta^t)` with :math:`v_t = \beta v_{t-1} + (1-\beta)\theta_t` and
    :math:`v_0 = 0`; its weights sum to 1 [claim ema-bias]. It is kept as

    .. math:: m_t = m_{t-1} + \frac{1-\beta}{1-\beta^t}(\theta_t - m_{t-1}),

    the same numbers, so that weights which do not change are their own average to the last bit. Averages of 16-bit
    weights are kept in float32, where a small step is not lost. Buffers are not averaged.

    Args:
        model: whose weights are averaged.
        decay: β, the weight of the old average, from 0 to below 1.

    Raises:
        ParameterError: the model has no parameters, or the decay is out of range.

    >>> import torch
    >>> from avow.optim import AveragedWeights
    >>> averages = AveragedWeights(model := torch.nn.Linear(2, 1), decay=0.99)
    >>> averages.update()  # after each step of the optimiser
    >>> with averages.swapped():
    ...     out = model(torch.ones(1, 2))  # the averaged model
    """

    @declared()
    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        _share("decay", decay)
        self.model, self.decay, self.updates = model, float(decay), 0
        self._swapped = False
        self._averages = {
            name: torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32), requires_grad=False)
            for name, weight in model.named_parameters()
        }
        if not self._averages:
            remedy = "pass a module that has weights"
            raise ParameterError("model", type(model).__name__, "has no parameters to average", remedy)

    def __repr__(self) -> str:
        return f"AveragedWeights({type(self.model).__name__}, decay={self.decay}, updates={self.updates})"

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present weights into the average."""
        self._refuse_while_swapped("update")
        self.updates += 1
        # 1 − β^t without cancellation for β near 1.
        whole = -math.expm1(self.updates * math.log(self.decay)) if self.decay else 1.0
        share = 1.0 if self.updates == 1 else (1 - self.decay) / whole
        for name, weight in self.model.named_parameters():
            average = self._averages[name].to(weight.device)
            self._averages[name] = average.lerp_(weight.to(average.dtype), share)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """The model with averaged weights inside the block, and with its own, bit for bit, after it.

        Returns:
            A context manager that gives the model.

        Raises:
            ParameterError: there is no average yet, or the model holds its averages already.
        """
        self._refuse_while_swapped("swapped")
        if not self.updates:
            remedy = "call update() after a step of the optimiser"
            raise ParameterError("AveragedWeights: updates", 0, "must be at least 1 for an average to exist", remedy)
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._swapped = True
        try:
            self._write(self._averages)
            yield self.model
        finally:
            self._write(own)
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Decay and count of updates as numbers, averages as tensors by the names of their parameters.

        Returns:
            What `load_state_dict` takes.
        """
        averages = {name: average.clone() for name, average in self._averages.items()}
        return {"decay": self.decay, "updates": self.updates, "averages": averages}

    @declared()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved average of the same model.

        Args:
            state: what `state_dict` returned.

        Raises:
            ParameterError: it is of another decay, or not such a state.
            ShapeError: it is of another model.
        """
        self._refuse_while_swapped("load_state_dict")
        if missing := sorted({"decay", "updates", "averages"} - state.keys()):
            raise ParameterError("state", list(state), f"lacks {missing[0]}", "pass what state_dict() returned")
        if state["decay"] != self.decay:
            remedy = f"build AveragedWeights(model, decay={state['decay']})"
            raise ParameterError("decay", self.decay, f"must equal the saved {state['decay']}", remedy)
        saved, updates, wanted = state["averages"], state["updates"], self._averages
        remedy = "load the average of the same model"
        if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
            rule = "must be a whole number of at least 0"
            raise ParameterError("updates", repr(updates)[:40], rule, "pass what state_dict() returned")
        if not isinstance(saved, Mapping) or not all(isinstance(x, Tensor) for x in saved.values()):
            rule = "must map names of parameters to tensors"
            raise ParameterError("averages", type(saved).__name__, rule, "pass what state_dict() returned")
        if differing := sorted(set(map(str, saved)) ^ set(wanted)):
            raise ParameterError("averages", differing[0], "must be both in the model and in what was saved", remedy)
        for name, average in wanted.items():
            if saved[name].shape != average.shape:
                rule = f"must have the model's shape {tuple(average.shape)}"
                raise ShapeError(f"averages[{name!r}].shape", tuple(saved[name].shape), rule, remedy)
            if not saved[name].is_floating_point():
                rule = f"must be floating-point, as {average.dtype} is"
                raise DtypeError(f"averages[{name!r}].dtype", saved[name].dtype, rule, remedy)
        self.updates = updates
        self._averages = {name: saved[name].to(average, copy=True) for name, average in wanted.items()}

    @torch.no_grad()
    def _write(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])

    def _refuse_while_swapped(self, act: str) -> None:
        if self._swapped:
            rule = "is not for a model that holds its averages"
            raise ParameterError("AveragedWeights", f"{act}()", rule, "leave the swapped() block first")


def _adam(
    model: nn.Module, rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float, fused: bool
) -> dict[str, Any]:
    """The arguments of torch's optimiser, checked."""
    _at_least_zero("learning_rate", rate, "a step size such as learning_rate=1e-3")
    if len(betas) != 2:
        raise ParameterError("betas", tuple(betas), "must be two", "try betas=(0.9, 0.95)")
    for index, beta in enumerate(betas):
        _share(f"betas[{index}]", beta)
    _at_least_zero("epsilon", epsilon, "epsilon=1e-8")
    # None lets torch choose its multi-tensor loop; False would forbid that too.
    groups = decay_groups(model, weight_decay)
    return {"params": groups, "lr": rate, "betas": betas, "eps": epsilon, "fused": fused or None}


def _share(name: str, value: float) -> None:
    if not 0 <= as_float(value) < 1:
        raise ParameterError(name, value, "must be at least 0 and below 1", f"try {name}=0.9")


def _at_least_zero(name: str, value: float, remedy: str) -> None:
    if not 0 <= as_float(value) < math.inf:
        raise ParameterError(name, value, "must be a number of at least 0", f"use {remedy}")
