"""Targets: a schedule that trims penalties down to the share of weights or units that you want to keep."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.history import History
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.options import Group, is_frozen
from proxmo.optim.sparsity import trained
from proxmo.optim.units import seen_by_penalty, steps_of_units
from proxmo.penalties.trimmed import Trimmed

WINDOW = 0.1  # share of the ramp in which a block vanishes once it is no longer kept
UPDATES = 200  # how often the strength is set during the ramp: it looks at all weights
ROWS = 100  # how often the history is recorded in a run, for the same reason
HOLD = 1e10  # a strength at which nothing that is not kept survives a step


class KeepScheduler:
    r"""Lower ``keep`` of all trimmed penalties from 1 to a target during training, and set their strength.

    .. math::
        \mathrm{keep}_k = \mathrm{keep} + (1 - \mathrm{keep})\,(1 - p_k)^3, \qquad
        p_k = \frac{k - \mathrm{start}\cdot\mathrm{horizon}}{(\mathrm{end} - \mathrm{start})\cdot\mathrm{horizon}}
        \text{ cut to } [0, 1]

    Call ``step()`` after each ``optimizer.step()``, in addition to any lr scheduler. You need not choose a strength:
    during the ramp, the largest block that has to go vanishes within a tenth of the ramp, or within the remaining steps
    if those are fewer. When the ramp ends, exactly ``keep`` blocks are left, not shrunk, and training continues with
    them. If more blocks are left at the end of the run, it warns and gives the reason.

    Trimmed penalties of parameter groups that are added later join the ramp at its current point. ``history``, a
    `History`, has about a hundred records of the run.

    Args:
        optimizer: a proxmo optimizer with a `Trimmed` penalty in at least one parameter group.
        keep: the target for each of these groups, a share of the blocks in (0, 1].
        horizon: the number of steps of the run, ≥ 2.
        start: where the ramp starts, as a share of the horizon.
        end: where the ramp ends, as a share of the horizon; the remaining steps are for recovery.
        tune_strength: set the strengths of `L1`, `GroupL2` and `GroupLInf`; ``False`` leaves them to you.

    >>> import torch, proxmo
    >>> x = torch.tensor([0.1, 2.0, 0.2, 1.0], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.Trimmed(proxmo.L1(0.0), keep=1.0))
    >>> scheduler = KeepScheduler(optimizer, keep=0.5, horizon=20)
    >>> for _ in range(20):
    ...     x.grad = torch.zeros(4)
    ...     optimizer.step()
    ...     scheduler.step()
    >>> x.detach()
    tensor([0., 2., 0., 1.])
    """

    def __init__(
        self,
        optimizer: ProxOptimizer,
        keep: float,
        horizon: int,
        *,
        start: float = 0.05,
        end: float = 0.5,
        tune_strength: bool = True,
    ) -> None:
        if not isinstance(optimizer, ProxOptimizer):
            raise TypeError(f"optimizer must be a proxmo.ProxOptimizer, got {type(optimizer).__name__}")
        keep, horizon = checks.share("keep", keep), checks.count("horizon", horizon, least=2)
        start, end = checks.nonnegative("start", start), checks.nonnegative("end", end)
        if not start < end <= 1:
            raise ValueError(f"start and end must satisfy 0 <= start < end <= 1, got start={start} and end={end}")
        self.optimizer = optimizer
        self._keep, self._horizon, self._tune = keep, horizon, tune_strength
        self._penalties: list[Trimmed] = []
        self._strengths: list[float] = []
        self._find_penalties()
        if not self._penalties:
            raise ValueError(
                "optimizer must have a Trimmed penalty in one of its parameter groups, such as "
                "Trimmed(L1(0.01), keep=0.1), got none"
            )
        self._first = min(round(start * horizon), horizon - 2)
        self._last = min(max(round(end * horizon), self._first + 1), horizon - 1)  # met in the last step at the latest
        self.last_step = 0
        self.history = History()
        self._set_keep()
        self._set_strengths()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Set ``keep`` and the strengths for the next step.

        Args:
            loss: the loss of the last step, for ``history``; it changes nothing else.
        """
        self._find_penalties()
        self.last_step += 1
        if self.last_step % -(-self._horizon // ROWS) == 0 or self.last_step == self._horizon:
            self.history.record(self.optimizer, self.last_step, loss)
        self._set_keep()
        self._strengths = list(map(self._next_strength, self._penalties, self._strengths))
        self._set_strengths()
        met_from = self._last + 1 if self._tune else self._horizon
        if self.last_step == met_from:
            self._warn_if_missed()

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the strengths and the history, as plain data."""
        return {
            "last_step": self.last_step,
            "strengths": list(self._strengths),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned; load that of the optimizer first."""
        self._find_penalties()
        if len(state["strengths"]) != len(self._penalties):
            raise ValueError(
                f"cannot load the state of a scheduler for {len(state['strengths'])} trimmed penalties into one for "
                f"{len(self._penalties)}"
            )
        self.history.load_state_dict(state["history"])
        self.last_step, self._strengths = state["last_step"], list(state["strengths"])
        self._set_keep()
        self._set_strengths()

    def _find_penalties(self) -> None:
        """Take in the trimmed penalties of parameter groups that were added since the last step."""
        known = set(map(id, self._penalties))
        found = {id(p): p for group in self.optimizer.param_groups if isinstance(p := group["penalty"], Trimmed)}
        added = [penalty for key, penalty in found.items() if key not in known]
        if self._tune and added:
            _check_strengths([*self._penalties, *added])
        self._penalties += added
        self._strengths += [0.0] * len(added)

    def _groups(self, penalty: Trimmed) -> list[Group]:
        return [group for group in self.optimizer.param_groups if group["penalty"] is penalty]

    def _set_keep(self) -> None:
        progress = min(max((self.last_step - self._first) / (self._last - self._first), 0.0), 1.0)
        for penalty in self._penalties:
            penalty.keep = self._keep + (1 - self._keep) * (1 - progress) ** 3

    def _set_strengths(self) -> None:
        if self._tune:
            for penalty, strength in zip(self._penalties, self._strengths, strict=True):
                penalty.penalty.strength = strength

    def _next_strength(self, penalty: Trimmed, strength: float) -> float:
        """Return the strength for the next step, at least the present one."""
        remaining, ramp = self._last - self.last_step, self._last - self._first
        if remaining <= 0:
            return HOLD
        if not self._tune or self.last_step < self._first or (self.last_step - self._first) % max(1, ramp // UPDATES):
            return strength
        steps = min(max(1, round(WINDOW * ramp)), remaining)
        for group in self._groups(penalty):
            size = self._prox_steps(group)
            if float(group["lr"]) > 0 and size != 0:
                strength = max(strength, penalty.sufficient_strength(_tensors(group), size) / steps)
        return min(strength, HOLD)

    @torch.no_grad()
    def _prox_steps(self, group: Group) -> float | list[Tensor]:
        """Return the step of the prox for all tensors that the penalty ranks, or one for each."""
        units, params = trained(group)
        steps = self.optimizer.prox_steps(group, params)
        if units is None or not isinstance(steps, list):
            return steps
        return steps_of_units(units, steps, params)

    def _warn_if_missed(self) -> None:
        for penalty in self._penalties:
            for group in self._groups(penalty):
                tensors = _tensors(group)
                left, wanted = penalty.count_nonzero(tensors), penalty.count_spared(tensors)
                if left > wanted:
                    warnings.warn(_explain(penalty, group, left, wanted, self._tune), stacklevel=3)


def _check_strengths(penalties: list[Trimmed]) -> None:
    for penalty in penalties:
        if not penalty.knows_thresholds:
            raise ValueError(
                f"tune_strength knows the strengths of L1, GroupL2 and GroupLInf, got {penalty.penalty}; with "
                "tune_strength=False the penalty keeps its own"
            )
    if len({id(penalty.penalty) for penalty in penalties}) < len(penalties):
        raise ValueError("each trimmed penalty must trim a penalty object of its own, got one that is shared")


@torch.no_grad()
def _tensors(group: Group) -> list[Tensor]:
    """Return what the penalty of a group ranks: trained parameters, or matrices with units as rows."""
    return [x.detach() for x in seen_by_penalty(*trained(group))]


def _explain(penalty: Trimmed, group: Group, left: int, wanted: int, tuned: bool) -> str:
    message = f"{left} blocks of {penalty} are not zero, {wanted} were to be kept"
    if float(group["lr"]) == 0:
        return f"{message}: lr is 0, so that the prox changes nothing"
    if any(p.grad is None for p in group["params"] if not is_frozen(p)):
        return f"{message}: some parameters got no gradient, and a step leaves these alone"
    if not all(bool(shards.local(p).isfinite().all()) for p in group["params"]):
        return f"{message}: some weights are not finite"
    if not tuned:
        return f"{message}: its strength is too small for lr and horizon; increase it, or set tune_strength=True"
    return f"{message}: they were changed after the last step"
