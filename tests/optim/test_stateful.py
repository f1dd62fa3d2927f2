"""Long random runs: whatever happens between two steps, the optimizer agrees with float64 formulas in numpy.

hypothesis chooses what happens: steps with and without closures, gradients that are missing or not finite, changed
options, added groups, frozen parameters, checkpoints, copies, errors. A model in numpy does the same. After each step
the two are compared, and the model takes over the numbers of the optimizer. So errors do not accumulate, and the
tolerance is the rounding of a single step.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from torch import Tensor

import proxmo
from optim.stateful_model import (
    NONE,
    OTHER_FIELDS,
    PENALTIES,
    RATES,
    SHAPES,
    Array,
    ClosureError,
    Group,
    Psi,
    Sample,
    Tracked,
    array,
    finite_part,
    same_bits,
)
from proxmo import ProxOptimizer

Direction = tuple[Array, Array, NDArray[np.bool_]]
"""A direction with 0 in place of non-finite entries, the sum of the magnitudes of its terms, the non-finite mask."""

ROUNDINGS = 32
"""Rounding errors allowed in one step, in units of eps·(|x| + lr·|terms of the direction|): 3 in the average, 3 in
x − lr·m, a few in a prox, and half a rounding in a norm or a sum for each of up to 24 elements."""

seeds = st.integers(0, 2**32 - 1)
numbers = st.integers(0, 11)
missing = st.sampled_from([0.0, 0.3])


def event(**draws: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a rule that is followed by a few steps, with all or only some of the gradients."""

    def make(action: Callable[..., None]) -> Callable[..., None]:
        @rule(**draws, steps_after=st.lists(seeds, max_size=3), missing_after=missing)
        @functools.wraps(action)
        def action_and_steps(self: Run, *, steps_after: list[int], missing_after: float, **arguments: Any) -> None:
            action(self, **arguments)
            self.optimizer_equals_model()
            for seed in steps_after:
                self.step(Sample(self.tracked, seed, missing=missing_after), closure=True)

        return action_and_steps

    return make


class Run(RuleBasedStateMachine):
    """One training run. Each subclass is for one optimizer: its options, its formulas and how to take a step."""

    method: ClassVar[type[ProxOptimizer]]
    direction_key: ClassVar[str]
    """Name of the direction in the state; the rest of the state must be exact."""
    own_options: ClassVar[dict[str, list[Any]]]
    penalty: ClassVar[Psi]
    """Penalty of the first group."""
    steps_taken: ClassVar[int]
    """Number of steps taken by all runs of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Group] = []

    @abstractmethod
    def call(self, sample: Sample, *, closure: bool) -> None:
        """Call ``optimizer.step`` with a closure, or without one after setting the gradients."""

    @abstractmethod
    def closure_calls(self) -> int:
        """Return how often the next step calls its closure, if only frozen parameters get no gradient."""

    @abstractmethod
    def gradients_used(self, tracked: Tracked, sample: Sample, index: int) -> list[Tensor | None]:
        """Return the gradients of a parameter that a step uses."""

    @abstractmethod
    def compute_direction(self, tracked: Tracked, group: Group, sample: Sample, index: int) -> Direction:
        """Return the direction of a step, and update the state in the model."""

    @abstractmethod
    def skip(self, tracked: Tracked) -> None:
        """Update the state in the model after a step without a gradient of the parameter."""

    @abstractmethod
    def initialize_state(self, tracked: Tracked, group: Group) -> None:
        """Update the state in the model after a step with lr = 0 and zero gradients."""

    @property
    def tracked(self) -> list[Tracked]:
        return [tracked for group in self.groups for tracked in group.tracked]

    # Rules

    @initialize(first=seeds, others=st.lists(seeds, max_size=1), distributed=st.booleans())
    def start(self, first: int, others: list[int], distributed: bool) -> None:
        self.groups = [self.new_group(first, self.penalty), *map(self.new_group, others)]
        self.optimizer = self.method([group.arguments() for group in self.groups])
        if distributed:
            self.request_state()

    def request_state(self) -> None:
        """Initialise state as distributed checkpoints do: by a step with lr = 0 and zero gradients."""
        for tracked in self.tracked:
            tracked.param.grad = torch.zeros_like(tracked.param)
        rates = [self.live(group)["lr"] for group in self.groups]
        for group in self.groups:
            self.live(group)["lr"] = torch.tensor(0.0) if group.tensor_lr else 0.0
        self.optimizer.step()
        for group, lr in zip(self.groups, rates, strict=True):
            self.live(group)["lr"] = lr
            for tracked in group.tracked:
                self.initialize_state(tracked, group)
        self.record_gradients()

    def new_group(self, seed: int, penalty: Psi | None = None) -> Group:
        """Make a group from a seed; separate draws by hypothesis would coincide in too many runs."""
        rng = np.random.default_rng([seed, PENALTIES.index(self.penalty)])

        def choose(values: list[Any]) -> Any:
            return values[rng.integers(len(values))]

        penalty = penalty or choose(PENALTIES)
        choices: dict[str, list[Any]] = {
            "lr": RATES,
            "momentum": [0.0, 0.5, 0.9],
            "nonfinite": ["propagate", "raise", "skip"],
            "maximize": [False, True],
            "foreach": [None, True, False],
            **self.own_options,
        }
        options = {name: choose(values) for name, values in choices.items()}
        tracked = []
        for _ in range(rng.integers(1, 3)):
            shape = choose([shape for shape in SHAPES if len(shape) >= penalty.axes])
            p = torch.as_tensor(rng.standard_normal(shape), dtype=choose([torch.float64, torch.float32]))
            if p.dim() == 4 and choose([False, True]):
                p = p.to(memory_format=torch.channels_last)
            tracked.append(Tracked(p.requires_grad_(), array(p)))
        return Group(tracked, penalty, options, tensor_lr=choose([False, True]))

    @event(
        seed=seeds,
        count=st.integers(1, 4),
        scale=st.sampled_from([0.0, 1e-3, 1.0]),
        missing=missing,
        closure=st.booleans(),
    )
    def train(self, seed: int, count: int, scale: float, missing: float, closure: bool) -> None:
        for k in range(count):
            self.step(Sample(self.tracked, seed + k, scale, missing), closure=closure)

    @event(seed=seeds, bad=st.sampled_from([math.nan, math.inf, -math.inf]), closure=st.booleans())
    def step_with_a_bad_gradient(self, seed: int, bad: float, closure: bool) -> None:
        self.step(Sample(self.tracked, seed, bad=bad), closure=closure)

    @event(seed=seeds, calls=st.integers(0, 1))
    def raise_in_the_closure(self, seed: int, calls: int) -> None:
        """Raise after gradients have been set, at the first or second call of the closure."""
        sample, before = Sample(self.tracked, seed), self.snapshot()

        def closure() -> float:
            sample()
            if len(sample.points) > min(calls, self.closure_calls() - 1):
                raise ClosureError
            return 1.5

        with pytest.raises(ClosureError):
            self.optimizer.step(closure)
        assert same_bits(self.snapshot(), before)
        self.record_gradients()

    @event(which=numbers, lr=st.sampled_from(RATES), as_tensor=st.booleans())
    def set_lr(self, which: int, lr: float, as_tensor: bool) -> None:
        group = self.groups[which % len(self.groups)]
        group.options["lr"], group.tensor_lr = lr, as_tensor
        self.live(group)["lr"] = group.lr()

    @event(which=numbers, choice=numbers)
    def set_penalty(self, which: int, choice: int) -> None:
        group = self.groups[which % len(self.groups)]
        if group.penalty is NONE:
            return
        changes = next(changes for name, changes in OTHER_FIELDS.items() if name in group.penalty.fields)
        fields = changes[choice % len(changes)]
        penalty = self.live(group)["penalty"]
        if "high" in fields:
            penalty.high = math.inf  # the new low bound may lie above the old high one
        for name, value in fields.items():
            setattr(penalty, name, value)
        group.penalty = replace(group.penalty, fields={**group.penalty.fields, **fields})

    @event(which=numbers, momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
    def set_momentum(self, which: int, momentum: float) -> None:
        group = self.groups[which % len(self.groups)]
        self.live(group)["momentum"] = group.options["momentum"] = momentum

    @event(which=numbers, nonfinite=st.sampled_from(["propagate", "raise", "skip"]))
    def set_nonfinite(self, which: int, nonfinite: str) -> None:
        group = self.groups[which % len(self.groups)]
        self.live(group)["nonfinite"] = group.options["nonfinite"] = nonfinite

    @event(seed=seeds, gamma=st.sampled_from([0.5, 0.9]))
    def schedule(self, seed: int, gamma: float) -> None:
        """Take a step with a scheduler of lr, and with one of strength if a penalty has it."""
        schedulers: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)]
        if any("strength" in group.penalty.fields for group in self.groups):
            schedulers.append(proxmo.StrengthScheduler(self.optimizer, lambda k: gamma**k))
        self.step(Sample(self.tracked, seed), closure=True)
        for scheduler in schedulers:
            scheduler.step()
        for group in self.groups:
            group.options["lr"] *= gamma
            if "strength" in group.penalty.fields:
                strength = group.penalty.fields["strength"] * gamma
                group.penalty = replace(group.penalty, fields={**group.penalty.fields, "strength": strength})

    @precondition(lambda self: len(self.groups) < 4)
    @event(seed=seeds)
    def add_group(self, seed: int) -> None:
        self.groups.append(self.new_group(seed))
        self.optimizer.add_param_group(self.groups[-1].arguments())

    @event(which=numbers)
    def freeze_or_unfreeze(self, which: int) -> None:
        tracked = self.tracked[which % len(self.tracked)]
        tracked.param.requires_grad_(not tracked.param.requires_grad)
        tracked.param.grad = tracked.grad = None

    @event(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.record_gradients()

    @event()
    def save_and_load(self) -> None:
        """Load into an optimizer with other options and strengths, which the checkpoint must replace."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        for tracked in self.tracked:
            frozen = not tracked.param.requires_grad
            tracked.param = tracked.param.detach().clone().requires_grad_(not frozen)
            tracked.grad = None
        arguments = [group.arguments() for group in self.groups]
        for argument in arguments:
            argument.update(lr=7.0, momentum=0.25, nonfinite="propagate")
            if hasattr(argument["penalty"], "strength"):
                argument["penalty"].strength = 9.0
        self.optimizer = self.method(arguments)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        for group, argument in zip(self.groups, arguments, strict=True):
            assert self.live(group)["penalty"] is argument["penalty"]

    @event(by_pickle=st.booleans())
    def copy(self, by_pickle: bool) -> None:
        """Continue with a copy, which has its own parameters."""
        original, before = self.optimizer, self.snapshot()
        self.optimizer = pickle.loads(pickle.dumps(original)) if by_pickle else copy.deepcopy(original)
        for group in self.groups:
            for tracked, p in zip(group.tracked, self.live(group)["params"], strict=True):
                assert p is not tracked.param
                assert p.requires_grad == tracked.param.requires_grad
                tracked.param = p
        assert same_bits(self.snapshot(), before)
        self.record_gradients()

    @event(which=numbers)
    def refuse_a_checkpoint_of_another_penalty(self, which: int) -> None:
        checkpoint, before = copy.deepcopy(self.optimizer.state_dict()), self.snapshot()
        for saved in checkpoint["state"].values():
            for tensor in saved.values():
                tensor += 1
        for saved in checkpoint["param_groups"]:
            saved["lr"] = 5.0
        checkpoint["param_groups"][which % len(self.groups)]["penalty"] = {"MCP": {"strength": 1.0}}
        with pytest.raises(ValueError, match="made with penalty MCP into one with penalty"):
            self.optimizer.load_state_dict(checkpoint)
        assert same_bits(self.snapshot(), before)

    # Invariant

    @invariant()
    def optimizer_equals_model(self) -> None:
        for group in self.groups:
            live = self.live(group)
            assert {name: live[name] for name in group.options} == group.options
            assert isinstance(live["lr"], Tensor) == group.tensor_lr
            assert live["penalty"] == (None if group.penalty is NONE else group.penalty.build())
        for tracked in self.tracked:
            assert np.array_equal(array(tracked.param), tracked.x)
            state = self.optimizer.state.get(tracked.param, {})
            assert state.keys() == tracked.state.keys()
            for name, value in state.items():
                assert isinstance(value, Tensor)
                assert np.array_equal(array(value), tracked.state[name])
            assert (tracked.param.grad is None) == (tracked.grad is None)
            assert tracked.grad is None or same_bits(tracked.param.grad, tracked.grad)
        assert self.optimizer.state.keys() <= {tracked.param for tracked in self.tracked}

    # Checks of a step

    def step(self, sample: Sample, *, closure: bool) -> None:
        before, refusal = self.snapshot(), None
        try:
            self.call(sample, closure=closure)
        except (FloatingPointError, RuntimeError) as error:
            refusal = error
        for tracked, gradient in zip(self.tracked, sample.gradients[0], strict=True):
            assert (tracked.param.grad is None) == (gradient is None)
            assert gradient is None or same_bits(tracked.param.grad, gradient)
        self.record_gradients()
        assert repr(refusal) == repr(self.expected_refusal(sample))
        if refusal is not None or self.strictest_option(sample) == "skip":
            assert same_bits(self.snapshot(), before)
        else:
            type(self).steps_taken += 1
            self.check_step(sample)

    def expected_refusal(self, sample: Sample) -> Exception | None:
        """Return the error with which the optimizer must refuse the step, if it must."""
        if self.strictest_option(sample) != "raise":
            return None
        return FloatingPointError("a gradient is not finite; parameters and state are as they were")

    def strictest_option(self, sample: Sample) -> str:
        """Return the strictest ``nonfinite`` of the groups that have a bad gradient."""
        options, index = {"propagate"}, 0
        for group in self.groups:
            for tracked in group.tracked:
                found = [g for g in self.gradients_used(tracked, sample, index) if g is not None]
                if not all(bool(g.isfinite().all()) for g in found):
                    options.add(group.options["nonfinite"])
                index += 1
        return next(option for option in ("raise", "skip", "propagate") if option in options)

    def check_step(self, sample: Sample) -> None:
        index = 0
        for group in self.groups:
            for tracked in group.tracked:
                if sample.gradients[0][index] is None:
                    self.skip(tracked)
                else:
                    self.check_param(tracked, group, sample, index)
                index += 1

    def check_param(self, tracked: Tracked, group: Group, sample: Sample, index: int) -> None:
        lr = group.options["lr"]
        direction, terms, bad = self.compute_direction(tracked, group, sample, index)
        y = np.asarray(tracked.x + (lr if group.options["maximize"] else -lr) * direction)
        expected, margin = (y, np.zeros_like(y)) if group.penalty is NONE else group.penalty.prox(y, lr)
        size = np.abs(tracked.x) + lr * terms
        if group.penalty.coupled and size.size:
            size = np.full_like(size, size.max())
        allowed = ROUNDINGS * torch.finfo(tracked.param.dtype).eps * size
        found, affected = array(tracked.param), group.penalty.spread(bad)
        unaffected = ~affected
        assert (np.abs(found - expected)[unaffected] <= allowed[unaffected]).all()
        # A zero of the model that rounding cannot move must be exact. (The assertion above covers the converse.)
        assert not found[(expected == 0) & (margin > allowed) & unaffected].any()
        if group.penalty.kind != "Box":  # a box has the same nearest point for inf as for large numbers
            assert not np.isfinite(found[bad]).any()
        state = self.optimizer.state.get(tracked.param, {})
        assert state.keys() == tracked.state.keys()
        for name, value in tracked.state.items():
            buffer = array(state[name])
            if name == self.direction_key:
                allowed_in_direction = ROUNDINGS * torch.finfo(state[name].dtype).eps * terms
                assert (np.abs(buffer - value)[~bad] <= allowed_in_direction[~bad]).all()
                assert not np.isfinite(buffer[bad]).any()
            else:
                assert np.array_equal(buffer, value)
        self.repair(tracked, bad, affected)
        tracked.x = array(tracked.param)
        tracked.state = {name: array(value) for name, value in state.items()}

    def repair(self, tracked: Tracked, bad: NDArray[np.bool_], affected: NDArray[np.bool_]) -> None:
        """Replace non-finite numbers, so that the run can continue."""
        with torch.no_grad():
            if affected.any():
                before = torch.from_numpy(tracked.x).to(tracked.param.dtype)
                tracked.param.copy_(torch.where(torch.from_numpy(affected), before, tracked.param))
            if bad.any() and self.direction_key in tracked.state:
                self.optimizer.state[tracked.param][self.direction_key].masked_fill_(torch.from_numpy(bad), 0.0)

    # Helpers

    def live(self, group: Group) -> dict[str, Any]:
        return self.optimizer.param_groups[next(i for i, other in enumerate(self.groups) if other is group)]

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [k.param.detach().clone() for k in self.tracked], copy.deepcopy(self.optimizer.state_dict())

    def record_gradients(self) -> None:
        """Expect the current gradients from now on; call this where the optimizer did not write them."""
        for tracked in self.tracked:
            tracked.grad = None if tracked.param.grad is None else tracked.param.grad.clone()


class SGDRun(Run):
    method = proxmo.ProxSGD
    direction_key = "momentum_buffer"
    own_options: ClassVar[dict[str, list[Any]]] = {
        "initial": ["gradient", "gradient", "zero"],
        "momentum_dtype": [None, None, torch.float64],
    }

    def call(self, sample: Sample, *, closure: bool) -> None:
        if closure:
            assert self.optimizer.step(sample) == 1.5
        else:
            sample()
            assert self.optimizer.step() is None

    def closure_calls(self) -> int:
        return 1

    def gradients_used(self, tracked: Tracked, sample: Sample, index: int) -> list[Tensor | None]:
        return [sample.gradients[0][index]]

    def compute_direction(self, tracked: Tracked, group: Group, sample: Sample, index: int) -> Direction:
        g, bad = finite_part(sample.gradients[0][index])
        is_zero = not g.any() and not bad.any()
        momentum = group.options["momentum"]
        idle = group.options["lr"] == 0
        if tracked.state and not tracked.state["started"] and not idle:
            tracked.state = {}  # the state was requested, but the average has not started
        started = tracked.state.get("started", np.ones(()))
        m = tracked.state.get("momentum_buffer")
        if m is not None:
            average, terms = momentum * m + (1 - momentum) * g, np.abs(m) + np.abs(g)
        elif momentum == 0:
            return g, np.abs(g), bad
        elif group.options["initial"] == "zero":
            average, terms, bad = np.zeros_like(g), np.zeros_like(g), np.zeros_like(bad)
        else:
            average, terms = g, np.abs(g)
        if m is None and idle and is_zero:
            started = np.zeros(())
        tracked.state = {"momentum_buffer": average, "started": started}
        return average, terms, bad

    def skip(self, tracked: Tracked) -> None:
        """The average is kept."""

    def initialize_state(self, tracked: Tracked, group: Group) -> None:
        if group.options["momentum"] != 0:
            tracked.state = {"momentum_buffer": np.zeros_like(tracked.x), "started": np.zeros(())}


class STORMRun(Run):
    method = proxmo.ProxSTORM
    direction_key = "estimate"
    own_options: ClassVar[dict[str, list[Any]]] = {"momentum": [0.0, 0.5, 0.9, 1.0]}

    def call(self, sample: Sample, *, closure: bool) -> None:
        calls = self.closure_calls()
        assert self.optimizer.step(sample) == 1.5
        assert len(sample.points) == calls

    def closure_calls(self) -> int:
        gives_gradients = any(tracked.param.requires_grad for tracked in self.tracked)
        return 2 if gives_gradients and any(map(self.started, self.tracked)) else 1

    def expected_refusal(self, sample: Sample) -> Exception | None:
        if all(gradient is None for gradient in sample.gradients[0]):
            return RuntimeError("closure must call backward, got no gradient for any parameter of the optimizer")
        return super().expected_refusal(sample)

    def started(self, tracked: Tracked) -> bool:
        return bool(tracked.state) and bool(tracked.state["step"] > 0)

    def gradients_used(self, tracked: Tracked, sample: Sample, index: int) -> list[Tensor | None]:
        return [call[index] for call in sample.gradients[: 1 + self.started(tracked)]]

    def compute_direction(self, tracked: Tracked, group: Group, sample: Sample, index: int) -> Direction:
        g, bad = finite_part(sample.gradients[0][index])
        estimate, terms, count = g, np.abs(g), np.zeros(())
        if self.started(tracked):
            assert np.array_equal(array(sample.points[1][index]), tracked.state["previous"])
            old = sample.gradients[1][index]
            before, bad_before = finite_part(torch.zeros(g.shape) if old is None else old)
            last, count, bad = tracked.state["estimate"], tracked.state["step"], np.asarray(bad | bad_before)
            estimate = group.options["momentum"] * (last - before) + g
            terms = np.abs(last) + np.abs(before) + np.abs(g)
        tracked.state = {"step": count + 1, "estimate": estimate, "previous": tracked.x}
        return estimate, terms, bad

    def skip(self, tracked: Tracked) -> None:
        """The estimate restarts at the next gradient."""
        if tracked.state:
            tracked.state.update(step=np.zeros(()), previous=tracked.x)

    def initialize_state(self, tracked: Tracked, group: Group) -> None:
        tracked.state = {"step": np.zeros(()), "estimate": np.zeros_like(tracked.x), "previous": tracked.x}


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize(
    ("method", "examples", "steps"),
    [
        (SGDRun, 5, 150),
        (STORMRun, 4, 100),
        pytest.param(SGDRun, 30, 1000, marks=pytest.mark.slow),
        pytest.param(STORMRun, 30, 800, marks=pytest.mark.slow),
    ],
)
def test_long_random_runs_follow_the_formulas(method: type[Run], examples: int, steps: int, penalty: Psi) -> None:
    """Also check that the runs are long: a minimum number of steps changed something and were compared."""
    run = type(f"{method.__name__}{penalty}", (method,), {"penalty": penalty, "steps_taken": 0})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    run_state_machine_as_test(run, settings=chosen)
    assert run.steps_taken > steps
