"""A record of a run that costs little: loss, ψ, zeros and the groups that are left, at the steps that you choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proxmo import checks, shards
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.sparsity import count_groups, trained
from proxmo.penalties.trimmed import Trimmed

COLUMNS = ("step", "loss", "penalty", "zeros", "kept", "keep")


class History:
    """A record of a run, with one row for each call of `record`.

    `KeepScheduler` keeps one as ``scheduler.history``, and `shrink` returns it as ``report.history``. ``plot.history``
    draws it. Unlike ``criteria.Monitor`` it needs no closure and no gradients. Each row reads all weights.

    >>> import torch, proxmo
    >>> weight = torch.tensor([[0.3, 0.4], [3.0, 4.0]], requires_grad=True)
    >>> optimizer = proxmo.ProxSGD([weight], lr=0.5, penalty=proxmo.GroupL2(2.0))
    >>> history = History()
    >>> for step in range(1, 3):
    ...     loss = weight.square().sum() / 2
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     history.record(optimizer, step, loss)
    >>> history.arrays()["kept"]
    array([0.5, 0. ])
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {name: [] for name in COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __repr__(self) -> str:
        return f"History({len(self)} rows: {', '.join(COLUMNS)})"

    def record(self, optimizer: ProxOptimizer, step: int, loss: Tensor | float | None = None) -> None:
        """Add a row for the current weights; with sharded parameters all ranks must call it.

        Args:
            optimizer: the optimizer of the run.
            step: the number of steps taken.
            loss: the loss, if it is known.
        """
        if not isinstance(optimizer, ProxOptimizer):
            raise TypeError(f"optimizer must be a proxmo.ProxOptimizer, got {type(optimizer).__name__}")
        params = [p for group in optimizer.param_groups for p in trained(group)[1]]
        zero, groups = count_groups(optimizer.param_groups)
        row = {
            "step": checks.count("step", step),
            "loss": np.nan if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss),
            "penalty": float(optimizer.penalty_value()),
            "zeros": shards.count_zeros(params) / max(sum(p.numel() for p in params), 1),
            "kept": 1 - zero / groups if groups else np.nan,
            "keep": _share_to_keep(optimizer),
        }
        for name, value in row.items():
            self._columns[name].append(value)

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return one array per quantity, with one element per row; NaN where a value is unknown.

        ``step`` is the number of steps taken, ``loss`` the loss, ``penalty`` ψ, ``zeros`` the share of weights that are
        zero, ``kept`` the share of groups of the penalties that are not zero, and ``keep`` the share that a `Trimmed`
        penalty asks for.
        """
        return {name: np.array(values, dtype=np.float64) for name, values in self._columns.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the rows, as plain data."""
        return {name: list(values) for name, values in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Replace the rows by those of a state that `state_dict` returned."""
        if set(state) != set(COLUMNS):
            raise ValueError(f"state must have the columns {', '.join(COLUMNS)}, got {', '.join(state) or 'none'}")
        self._columns = {name: list(state[name]) for name in COLUMNS}


def _share_to_keep(optimizer: ProxOptimizer) -> float:
    """Return the share that the first trimmed penalty keeps; NaN if there is none, or one with a count."""
    penalties: list[Any] = [group["penalty"] for group in optimizer.param_groups]
    shares = [penalty.keep for penalty in penalties if isinstance(penalty, Trimmed)]
    return shares[0] if shares and isinstance(shares[0], float) else np.nan
