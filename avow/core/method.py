"""What a way to compute attention owes its callers."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from avow.core.certificate import SOFTMAX, Cost, Kind, Promise
from avow.core.problem import Problem, Sizes
from avow.parameters import Parameter, check_parameters, parameters_of


@dataclass(frozen=True)
class Computed:
    """An answer, and what the method must remember to certify it.

    Attributes:
        out: the answer, (b, h, n, e), in the type of q.
        trace: whatever `promise` needs to know of this run.
        lengths: the lengths of the answers as `avow.numerics.norms.lengths` gives them, if they were measured.
    """

    out: Float[Tensor, "b h n e"]
    trace: Any = None
    lengths: Float[Tensor, "b h n"] | None = None


@dataclass(frozen=True)
class BoundEstimate:
    """What a method expects to promise before it runs; `bound` is proved when `certain`, else a guess.

    Attributes:
        bound: what is expected, relative to the longest value; infinite if nothing is.
        kind: what the promise would be.
        certain: whether the bound is proved already.
        reason: why there is none.
        of_answer: the part of the bound that is relative to the answer, as rounding the output is; it counts as if the
            answer were as long as the longest value.
    """

    bound: float
    kind: Kind
    certain: bool
    reason: str = ""
    of_answer: float = 0.0

    def for_answers(self, ratio: float) -> BoundEstimate:
        """The bound that is expected of answers of some length: a guess.

        Args:
            ratio: how long they are beside the longest value.

        Returns:
            The same estimate with that bound.
        """
        shorter = self.of_answer * (1 - min(ratio, 1.0))
        return dataclasses.replace(self, bound=self.bound - shorter if shorter else self.bound, certain=False)


@dataclass(frozen=True)
class Method(ABC):
    """A way to compute one mechanism of attention. A subclass is a frozen dataclass of its declared parameters.

    Planner, caches, shards, modules and pages ask for the properties below, never for a method's name or class.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    target: ClassVar[str] = SOFTMAX
    """The mechanism that answers are compared with."""
    is_exact: ClassVar[bool] = False
    """Whether rounding is the only error: others are priced against this method, and it runs if none of them may."""
    random: ClassVar[bool] = False
    """Whether the answer depends on a random draw."""
    rests_on_lengths: ClassVar[bool] = False
    """Whether the promise follows from sizes, norms and the lengths of answers, for `trace` None: it may come later."""
    averages: ClassVar[bool] = False
    """Whether the target's rows are averages of values they see: errors are then at most ‖answer‖ + longest value."""
    selects_tokens: ClassVar[bool] = False
    """Whether a row reads only some of the tokens in full. That saves memory traffic, not arithmetic, so it pays where
    a key-value cache is read for few queries.
    """
    selects_landmarks: ClassVar[bool] = False
    """Whether some of the keys are chosen to stand for all: a causal row's error then depends on later keys, too."""

    def __post_init__(self) -> None:
        check_parameters(self.name, type(self), self.parameters)

    @classmethod
    def declared(cls) -> tuple[Parameter, ...]:
        """The parameters of this method, with rules and help.

        Returns:
            One `Parameter` for each field that the class declares with `param`.
        """
        return parameters_of(cls)

    @property
    def parameters(self) -> dict[str, Any]:
        return {p.name: getattr(self, p.name) for p in self.declared()}

    @property
    def label(self) -> str:
        """The name with what tells this setting from others: the first parameter, and all that are not the default."""
        values = [(p, getattr(self, p.name)) for p in self.declared()]
        shown = [f"{p.name}={value}" for i, (p, value) in enumerate(values) if i == 0 or value != p.default]
        return f"{self.name}({', '.join(shown)})"

    @classmethod
    def tune(
        cls, parameters: Mapping[str, Any], sizes: Sizes, tol: float | None, confidence: float
    ) -> Mapping[str, Any]:
        """The parameters, and those that a tolerance decides if they were not given; most methods have none.

        Args:
            parameters: those that the caller gave.
            sizes: those of the problem.
            tol: the bound to aim at, relative to the longest value; None if there is no limit.
            confidence: the probability with which it must hold.

        Returns:
            All parameters to make the method with.
        """
        return parameters

    def check(self, sizes: Sizes) -> None:
        """Raise when these parameters do not fit these sizes.

        Args:
            sizes: those of the problem.

        Raises:
            ParameterError: the parameters do not fit.
        """

    def state_features(self, dim: int) -> int | None:
        """How many features per head the running state has that stands for all keys so far; None without such a state.

        The state's size is that times the value dimension, however many keys there were. A method that has one can
        decode token by token, by `initial_state`, `step` and `read_on`, and combine the states of shards.

        Args:
            dim: the head dimension.

        Returns:
            The number, or None.
        """
        return None

    @property
    def has_state(self) -> bool:
        """Whether there is a running state."""
        return self.state_features(1) is not None

    def initial_state(self, problem: Problem, sample: Tensor | None = None) -> Any:
        """The running state before any key, for problems like this one, under what `draw` gave if that is known.

        Args:
            problem: a problem of the sizes and types that will be read.
            sample: what `draw` gave, if the caller keeps it.

        Returns:
            The state.
        """
        raise NotImplementedError(f"{self.name} has no running state")

    def read_on(self, problem: Problem, state: Any) -> tuple[Float[Tensor, "b h n e"], Any]:
        """The answers to queries whose keys follow those of the state, and the state after them.

        Args:
            problem: the next queries, keys and values; causal.
            state: the state before them, which is not changed.

        Returns:
            The answers, (b, h, n, e), and the new state.
        """
        raise NotImplementedError(f"{self.name} has no running state")

    def step(self, problem: Problem, state: Any) -> Float[Tensor, "b h 1 e"] | None:
        """The same for one more token, which the state takes in, in place; None if no kernel does that.

        Args:
            problem: the next query, key and value.
            state: the state before it, which is changed in place.

        Returns:
            The answer, (b, h, 1, e), or None.
        """
        return None

    def draw(self, dim: int, generator: torch.Generator | None, device: torch.device) -> Tensor | None:
        """All that is drawn at random for heads of `dim` dimensions, if that does not depend on q, k and v.

        A module draws it once and passes it to `initial_state`. None: nothing, or draws depend on the inputs.

        Args:
            dim: the head dimension.
            generator: what to draw from; None is torch's own generator.
            device: where the draw is used.

        Returns:
            The draw, or None.
        """
        return None

    def arithmetic(self, dtype: torch.dtype) -> torch.dtype:
        """The type that inputs of a type are converted to before anything is computed.

        Args:
            dtype: the type of q, k and v.

        Returns:
            That type, or a wider one.
        """
        return dtype

    @property
    def statistical(self) -> bool:
        """Whether the promise holds with a probability, over what is drawn."""
        return False

    @abstractmethod
    def compute(self, problem: Problem, generator: torch.Generator | None = None) -> Computed:
        """The answer. All chance in it is `generator`'s, or that of torch's own generator if none is given.

        Nothing else draws from torch's own, so that a seed set by the caller is the caller's: what is drawn to measure
        or to guess comes from generators with a seed of their own.

        Args:
            problem: what is asked; none of its axes is empty.
            generator: where chance comes from.

        Returns:
            The answer, (b, h, n, e), in the type of q, and in `trace` whatever `promise` needs.
        """

    def promise(self, problem: Problem, computed: Computed, confidence: float) -> Promise:
        """What can be said of the answer: nothing, unless a method has a proof.

        Args:
            problem: what was asked; its `norms` are known.
            computed: what `compute` returned for it.
            confidence: the probability to state the promise at, if it is not certain.

        Returns:
            A bound for each row, its kind, and what it rests on.
        """
        nothing = torch.full(problem.q.shape[:-1], math.inf, dtype=torch.float64, device=problem.q.device)
        return Promise("none", nothing, reason=f"{self.name} has no proof")

    @abstractmethod
    def cost(self, sizes: Sizes) -> Cost:
        """What the answer costs, the promise not included.

        Args:
            sizes: those of a problem; any of them may be 0.

        Returns:
            Operations, launches and bytes.
        """

    @abstractmethod
    def reference(self, problem: Problem) -> Tensor:
        """The target itself in float64, by its definition.

        Args:
            problem: what is asked.

        Returns:
            The target, (b, h, n, e), in float64.
        """

    def reference_error(self, problem: Problem) -> Tensor | None:
        """How far `reference` of a float64 problem may itself be off, in each row; None: as softmax averages are.

        Args:
            problem: a float64 problem.

        Returns:
            A bound for each row, (b, h, n), relative to the longest value; or None.
        """
        return None

    @classmethod
    def grid(cls, sizes: Sizes) -> Iterator[Method]:
        """The parameter values worth comparing at these sizes, cheapest first: the defaults, unless a method has more.

        Args:
            sizes: those of a problem.

        Returns:
            Methods, one for each setting.
        """
        yield cls()

    def estimate_bound(self, problem: Problem, confidence: float) -> BoundEstimate:
        """What the promise is expected to be, found out at a small part of the cost of computing.

        Args:
            problem: what is asked; its `norms` are known.
            confidence: the probability at which the promise would be stated.

        Returns:
            The expected bound, whether that is certain, and why there is none.
        """
        softmax = self.target == SOFTMAX
        reason = "does not say beforehand" if softmax else f"its target is {self.target}, not {SOFTMAX}"
        return BoundEstimate(math.inf, "none", True, reason)
