"""Long random runs: whatever a job does between two steps, the optimizer is where plain float64 formulas put it.

hypothesis chooses what happens: steps with and without closures, gradients that are missing or not finite, options that
change, groups that are added, parameters that are frozen, checkpoints, copies, errors. A model in numpy does the same.
After each step they are compared, and then the model goes on from the numbers of the optimizer: so errors do not add
up, and the tolerance is that of the roundings of one step.
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
    Known,
    Psi,
    Sample,
    array,
    finite_part,
    same_bits,
)
from proxmo import ProxOptimizer

Direction = tuple[Array, Array, NDArray[np.bool_]]
"""A direction, with 0 where it is not finite; the sum of the magnitudes that it was made of; where it is not finite."""

ROUNDINGS = 32
"""Of one step, in units of eps·(|x| + lr·|terms of the direction|): 3 in the average, 3 in x − lr·m, a handful in a
prox, and in a norm or a sum one for each of up to 24 elements, of which half at most is lost."""

seeds = st.integers(0, 2**32 - 1)
numbers = st.integers(0, 11)
missing = st.sampled_from([0.0, 0.3])


def event(**draws: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule after which the job goes on for some steps, with full or missing gradients."""

    def make(happen: Callable[..., None]) -> Callable[..., None]:
        @rule(**draws, steps_after=st.lists(seeds, max_size=3), missing_after=missing)
        @functools.wraps(happen)
        def happen_and_go_on(self: Run, *, steps_after: list[int], missing_after: float, **arguments: Any) -> None:
            happen(self, **arguments)
            self.the_optimizer_is_where_the_model_is()
            for seed in steps_after:
                self.step(Sample(self.known, seed, missing=missing_after), closure=True)

        return happen_and_go_on

    return make


class Run(RuleBasedStateMachine):
    """One job. Subclasses are for one optimizer each: its options, its formulas and how to take a step."""

    method: ClassVar[type[ProxOptimizer]]
    average: ClassVar[str]
    """The name of the direction in the state; all else in it is exact."""
    own_options: ClassVar[dict[str, list[Any]]]
    penalty: ClassVar[Psi]
    """Of the first group."""
    steps_taken: ClassVar[int]
    """By all jobs of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Group] = []

    @abstractmethod
    def call(self, sample: Sample, *, closure: bool) -> None:
        """``optimizer.step``, with a closure or with gradients that are there before."""

    @abstractmethod
    def calls_of_closure(self) -> int:
        """In the next step."""

    @abstractmethod
    def used(self, known: Known, sample: Sample, index: int) -> list[Tensor | None]:
        """The gradients of a parameter that a step looks at."""

    @abstractmethod
    def direct(self, known: Known, group: Group, sample: Sample, index: int) -> Direction:
        """The direction in a step; updates the state that the model has."""

    @abstractmethod
    def pass_over(self, known: Known) -> None:
        """What happens to the state of a parameter that has no gradient, in a step."""

    @abstractmethod
    def give_state(self, known: Known, group: Group) -> None:
        """What a step with lr = 0 and zero gradients does to the state."""

    @property
    def known(self) -> list[Known]:
        return [known for group in self.groups for known in group.known]

    # What happens

    @initialize(first=seeds, others=st.lists(seeds, max_size=1), distributed=st.booleans())
    def start(self, first: int, others: list[int], distributed: bool) -> None:
        self.groups = [self.new_group(first, self.penalty), *map(self.new_group, others)]
        self.optimizer = self.method([group.arguments() for group in self.groups])
        if distributed:
            self.ask_for_state()

    def ask_for_state(self) -> None:
        """As distributed checkpoints do: by a step with lr = 0 and zero gradients, which must not move anything."""
        for known in self.known:
            known.param.grad = torch.zeros_like(known.param)
        rates = [self.live(group)["lr"] for group in self.groups]
        for group in self.groups:
            self.live(group)["lr"] = torch.tensor(0.0) if group.tensor_lr else 0.0
        self.optimizer.step()
        for group, lr in zip(self.groups, rates, strict=True):
            self.live(group)["lr"] = lr
            for known in group.known:
                self.give_state(known, group)
        self.note_gradients()

    def new_group(self, seed: int, penalty: Psi | None = None) -> Group:
        """From a seed, where separate choices of hypothesis would be alike in too many runs."""
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
        known = []
        for _ in range(rng.integers(1, 3)):
            shape = choose([shape for shape in SHAPES if len(shape) >= penalty.axes])
            p = torch.as_tensor(rng.standard_normal(shape), dtype=choose([torch.float64, torch.float32]))
            if p.dim() == 4 and choose([False, True]):
                p = p.to(memory_format=torch.channels_last)
            known.append(Known(p.requires_grad_(), array(p)))
        return Group(known, penalty, options, tensor_lr=choose([False, True]))

    @event(
        seed=seeds,
        count=st.integers(1, 4),
        scale=st.sampled_from([0.0, 1e-3, 1.0]),
        missing=missing,
        closure=st.booleans(),
    )
    def train(self, seed: int, count: int, scale: float, missing: float, closure: bool) -> None:
        for k in range(count):
            self.step(Sample(self.known, seed + k, scale, missing), closure=closure)

    @event(seed=seeds, bad=st.sampled_from([math.nan, math.inf, -math.inf]), closure=st.booleans())
    def meet_a_bad_gradient(self, seed: int, bad: float, closure: bool) -> None:
        self.step(Sample(self.known, seed, bad=bad), closure=closure)

    @event(seed=seeds, calls=st.integers(0, 1))
    def meet_an_error(self, seed: int, calls: int) -> None:
        """In the closure, after it has written gradients, at its first or second call."""
        sample, before = Sample(self.known, seed), self.everything()

        def closure() -> float:
            sample()
            if len(sample.points) > min(calls, self.calls_of_closure() - 1):
                raise ClosureError
            return 1.5

        with pytest.raises(ClosureError):
            self.optimizer.step(closure)
        assert same_bits(self.everything(), before)
        self.note_gradients()

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
        """A step with a scheduler of lr, and one of strength if there is any."""
        schedulers: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)]
        if any("strength" in group.penalty.fields for group in self.groups):
            schedulers.append(proxmo.StrengthScheduler(self.optimizer, lambda k: gamma**k))
        self.step(Sample(self.known, seed), closure=True)
        for scheduler in schedulers:
            scheduler.step()
        for group in self.groups:
            group.options["lr"] *= gamma
            if "strength" in group.penalty.fields:
                strength = group.penalty.fields["strength"] * gamma
                group.penalty = replace(group.penalty, fields={**group.penalty.fields, "strength": strength})

    @precondition(lambda self: len(self.groups) < 4)
    @event(seed=seeds)
    def add_a_group(self, seed: int) -> None:
        self.groups.append(self.new_group(seed))
        self.optimizer.add_param_group(self.groups[-1].arguments())

    @event(which=numbers)
    def freeze_or_unfreeze(self, which: int) -> None:
        known = self.known[which % len(self.known)]
        known.param.requires_grad_(not known.param.requires_grad)
        known.param.grad = known.grad = None

    @event(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.note_gradients()

    @event()
    def save_and_load(self) -> None:
        """Into an optimizer with other options and other strengths, which the checkpoint has to bring along."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        for known in self.known:
            frozen = not known.param.requires_grad
            known.param = known.param.detach().clone().requires_grad_(not frozen)
            known.grad = None
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
        """Go on with a copy, which has parameters of its own; the original must not notice."""
        original, before = self.optimizer, self.everything()
        self.optimizer = pickle.loads(pickle.dumps(original)) if by_pickle else copy.deepcopy(original)
        for group in self.groups:
            for known, p in zip(group.known, self.live(group)["params"], strict=True):
                assert p is not known.param
                assert p.requires_grad == known.param.requires_grad
                known.param = p
        assert same_bits(self.everything(), before)
        self.note_gradients()

    @event(which=numbers)
    def load_a_checkpoint_of_another_penalty(self, which: int) -> None:
        checkpoint, before = copy.deepcopy(self.optimizer.state_dict()), self.everything()
        for saved in checkpoint["state"].values():
            for tensor in saved.values():
                tensor += 1
        for saved in checkpoint["param_groups"]:
            saved["lr"] = 5.0
        checkpoint["param_groups"][which % len(self.groups)]["penalty"] = {"MCP": {"strength": 1.0}}
        with pytest.raises(ValueError, match="made with penalty MCP into one with penalty"):
            self.optimizer.load_state_dict(checkpoint)
        assert same_bits(self.everything(), before)

    # What must be so afterwards

    @invariant()
    def the_optimizer_is_where_the_model_is(self) -> None:
        for group in self.groups:
            live = self.live(group)
            assert {name: live[name] for name in group.options} == group.options
            assert isinstance(live["lr"], Tensor) == group.tensor_lr
            assert live["penalty"] == (None if group.penalty is NONE else group.penalty.build())
        for known in self.known:
            assert np.array_equal(array(known.param), known.x)
            state = self.optimizer.state.get(known.param, {})
            assert state.keys() == known.state.keys()
            for name, value in state.items():
                assert isinstance(value, Tensor)
                assert np.array_equal(array(value), known.state[name])
            assert (known.param.grad is None) == (known.grad is None)
            assert known.grad is None or same_bits(known.param.grad, known.grad)
        assert self.optimizer.state.keys() <= {known.param for known in self.known}

    # How a step is followed

    def step(self, sample: Sample, *, closure: bool) -> None:
        before = self.everything() if sample.bad is not None else None
        refusal = None
        try:
            self.call(sample, closure=closure)
        except FloatingPointError as error:
            refusal = error
        for known, gradient in zip(self.known, sample.gradients[0], strict=True):
            assert (known.param.grad is None) == (gradient is None)
            assert gradient is None or same_bits(known.param.grad, gradient)
        self.note_gradients()
        decided = self.decision(sample)
        assert (refusal is not None) == (decided == "raise")
        if decided in ("raise", "skip"):
            assert same_bits(self.everything(), before)
        else:
            type(self).steps_taken += 1
            self.follow(sample)

    def decision(self, sample: Sample) -> str:
        """Of the groups that have a bad gradient, the strictest has its way."""
        decisions, index = {"propagate"}, 0
        for group in self.groups:
            for known in group.known:
                found = [g for g in self.used(known, sample, index) if g is not None]
                if not all(bool(g.isfinite().all()) for g in found):
                    decisions.add(group.options["nonfinite"])
                index += 1
        return next(decision for decision in ("raise", "skip", "propagate") if decision in decisions)

    def follow(self, sample: Sample) -> None:
        index = 0
        for group in self.groups:
            for known in group.known:
                if sample.gradients[0][index] is None:
                    self.pass_over(known)
                else:
                    self.follow_param(known, group, sample, index)
                index += 1

    def follow_param(self, known: Known, group: Group, sample: Sample, index: int) -> None:
        lr = group.options["lr"]
        direction, terms, bad = self.direct(known, group, sample, index)
        y = np.asarray(known.x + (lr if group.options["maximize"] else -lr) * direction)
        expected, margin = (y, np.zeros_like(y)) if group.penalty is NONE else group.penalty.prox(y, lr)
        size = np.abs(known.x) + lr * terms
        if group.penalty.coupled and size.size:
            size = np.full_like(size, size.max())
        room = ROUNDINGS * torch.finfo(known.param.dtype).eps * size
        found, affected = array(known.param), group.penalty.spread(bad)
        unaffected = ~affected
        assert (np.abs(found - expected)[unaffected] <= room[unaffected]).all()
        # Where the model has a zero that rounding cannot make a non-zero, it is exact. (The other way round is above.)
        assert not found[(expected == 0) & (margin > room) & unaffected].any()
        if group.penalty.kind != "Box":  # which has the same nearest point for inf as for large numbers
            assert not np.isfinite(found[bad]).any()
        state = self.optimizer.state.get(known.param, {})
        assert state.keys() == known.state.keys()
        for name, value in known.state.items():
            buffer = array(state[name])
            if name == self.average:
                loss = ROUNDINGS * torch.finfo(state[name].dtype).eps * terms
                assert (np.abs(buffer - value)[~bad] <= loss[~bad]).all()
                assert not np.isfinite(buffer[bad]).any()
            else:
                assert np.array_equal(buffer, value)
        self.repair(known, bad, affected)
        known.x = array(known.param)
        known.state = {name: array(value) for name, value in state.items()}

    def repair(self, known: Known, bad: NDArray[np.bool_], affected: NDArray[np.bool_]) -> None:
        """Put numbers where there are none any more, so that the run can go on."""
        with torch.no_grad():
            if affected.any():
                before = torch.from_numpy(known.x).to(known.param.dtype)
                known.param.copy_(torch.where(torch.from_numpy(affected), before, known.param))
            if bad.any() and self.average in known.state:
                self.optimizer.state[known.param][self.average].masked_fill_(torch.from_numpy(bad), 0.0)

    # Small things

    def live(self, group: Group) -> dict[str, Any]:
        return self.optimizer.param_groups[next(i for i, other in enumerate(self.groups) if other is group)]

    def everything(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [k.param.detach().clone() for k in self.known], copy.deepcopy(self.optimizer.state_dict())

    def note_gradients(self) -> None:
        """The gradients of now are the right ones: not the optimizer wrote them."""
        for known in self.known:
            known.grad = None if known.param.grad is None else known.param.grad.clone()


class SGDRun(Run):
    method = proxmo.ProxSGD
    average = "momentum_buffer"
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

    def calls_of_closure(self) -> int:
        return 1

    def used(self, known: Known, sample: Sample, index: int) -> list[Tensor | None]:
        return [sample.gradients[0][index]]

    def direct(self, known: Known, group: Group, sample: Sample, index: int) -> Direction:
        g, bad = finite_part(sample.gradients[0][index])
        momentum = group.options["momentum"]
        idle = group.options["lr"] == 0
        if known.state and not known.state["started"] and not idle:
            known.state = {}  # it was asked for, but has not begun
        started = known.state.get("started", np.ones(()))
        m = known.state.get("momentum_buffer")
        if m is not None:
            average, terms = momentum * m + (1 - momentum) * g, np.abs(m) + np.abs(g)
        elif momentum == 0:
            return g, np.abs(g), bad
        elif group.options["initial"] == "zero":
            average, terms, bad = np.zeros_like(g), np.zeros_like(g), np.zeros_like(bad)
        else:
            average, terms = g, np.abs(g)
        if m is None and idle and not g.any() and not bad.any():
            started = np.zeros(())
        known.state = {"momentum_buffer": average, "started": started}
        return average, terms, bad

    def pass_over(self, known: Known) -> None:
        """Its average waits."""

    def give_state(self, known: Known, group: Group) -> None:
        if group.options["momentum"] != 0:
            known.state = {"momentum_buffer": np.zeros_like(known.x), "started": np.zeros(())}


class STORMRun(Run):
    method = proxmo.ProxSTORM
    average = "estimate"
    own_options: ClassVar[dict[str, list[Any]]] = {"momentum": [0.0, 0.5, 0.9, 1.0]}

    def call(self, sample: Sample, *, closure: bool) -> None:
        calls = self.calls_of_closure()
        assert self.optimizer.step(sample) == 1.5
        assert len(sample.points) == calls

    def calls_of_closure(self) -> int:
        return 2 if any(map(self.started, self.known)) else 1

    def started(self, known: Known) -> bool:
        return bool(known.state) and bool(known.state["step"] > 0)

    def used(self, known: Known, sample: Sample, index: int) -> list[Tensor | None]:
        return [call[index] for call in sample.gradients[: 1 + self.started(known)]]

    def direct(self, known: Known, group: Group, sample: Sample, index: int) -> Direction:
        g, bad = finite_part(sample.gradients[0][index])
        estimate, terms, count = g, np.abs(g), np.zeros(())
        if self.started(known):
            assert np.array_equal(array(sample.points[1][index]), known.state["previous"])
            old = sample.gradients[1][index]
            before, bad_before = finite_part(torch.zeros(g.shape) if old is None else old)
            last, count, bad = known.state["estimate"], known.state["step"], np.asarray(bad | bad_before)
            estimate = group.options["momentum"] * (last - before) + g
            terms = np.abs(last) + np.abs(before) + np.abs(g)
        known.state = {"step": count + 1, "estimate": estimate, "previous": known.x}
        return estimate, terms, bad

    def pass_over(self, known: Known) -> None:
        """Its estimate starts anew when it has a gradient again."""
        if known.state:
            known.state.update(step=np.zeros(()), previous=known.x)

    def give_state(self, known: Known, group: Group) -> None:
        known.state = {"step": np.zeros(()), "estimate": np.zeros_like(known.x), "previous": known.x}


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize(("method", "examples", "steps"), [(SGDRun, 9, 300), (STORMRun, 4, 100)])
def test_long_random_runs_follow_the_formulas(method: type[Run], examples: int, steps: int, penalty: Psi) -> None:
    """And they are long: in all, thousands of steps that changed something were compared."""
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
