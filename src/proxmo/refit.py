"""Refit: train on with the zeros fixed and the penalty dropped, which undoes the shrinkage of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxmo import shards
from proxmo.optim.base import ProxOptimizer


class FrozenZeros:
    """The handle that `freeze_zeros` returns: keeps the zeros fixed until ``remove`` is called.

    It stores no masks: elements that are zero before a step are zero after it. A resumed run keeps the zeros of the
    loaded parameters, whatever is loaded first.

    Args:
        optimizer: any torch optimizer.
        params: the parameters whose zeros are fixed; each rank handles its shards.

    >>> import torch
    >>> x = torch.nn.Parameter(torch.tensor([0.0, 2.0]))
    >>> x.grad = torch.ones(2)
    >>> optimizer = torch.optim.SGD([x], lr=1.0)
    >>> handle = FrozenZeros(optimizer, [x])
    >>> optimizer.step()
    >>> x.data
    tensor([0., 1.])
    >>> handle.remove()
    >>> optimizer.step()
    >>> x.data
    tensor([-1.,  0.])
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._masks: list[Tensor] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._find_zeros),
            optimizer.register_step_post_hook(self._restore_zeros),
        ]

    def remove(self) -> None:
        """Release the zeros: later steps may move them. Penalties that `freeze_zeros` dropped do not come back."""
        for hook in self._hooks:
            hook.remove()

    def _find_zeros(self, *_: Any) -> None:
        self._masks = [shards.local(p.detach()) == 0 for p in self._params]

    @torch.no_grad()
    def _restore_zeros(self, *_: Any) -> None:
        for p, mask in zip(self._params, self._masks, strict=True):
            shards.local(p).masked_fill_(mask, 0.0)
        shards.mark_written(self._params)
        self._masks = []


def freeze_zeros(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> FrozenZeros:
    """Fix the zeros and drop the penalties, so that further training moves only the other weights.

    Penalties such as ℓ1 and ℓ2,1 find the zeros but also shrink the weights that stay. Train with the penalty, call
    this, and train for a while longer to undo the shrinkage. Each step ends with x ← x⁺·[x ≠ 0], so weights that were
    exactly 0.0 stay zero, whatever the step or its momentum did. Penalties and constraints of all parameter groups
    become ``None``. Units keep their zeros, also in biases and norms.

    To resume, create model and optimizer as for the first run, call this, and then load their states, in any order. (An
    optimizer that still has its penalty refuses the checkpoint of one without.)

    Args:
        optimizer: any torch optimizer.
        params: the parameters whose zeros are fixed. By default those of groups with a penalty; for an optimizer from
            elsewhere, those with at least two axes, which leaves out biases and norms.

    Returns:
        A handle; its ``remove()`` releases the zeros.

    >>> import torch, proxmo
    >>> x = torch.nn.Parameter(torch.tensor([3.0, 0.2]))
    >>> optimizer = proxmo.ProxSGD([x], lr=0.5, penalty=proxmo.L1(1.0))
    >>> def train(steps):
    ...     for _ in range(steps):
    ...         optimizer.zero_grad()
    ...         (x - torch.tensor([3.0, 0.2])).square().sum().div(2).backward()
    ...         optimizer.step()
    ...     return x.data
    >>> train(300)
    tensor([2.0000, 0.0000])
    >>> handle = freeze_zeros(optimizer)
    >>> train(300)
    tensor([3., 0.])
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    chosen = _default_params(optimizer) if params is None else _checked(params, optimizer)
    if isinstance(optimizer, ProxOptimizer):
        for group in optimizer.param_groups:
            group["penalty"] = None
    return FrozenZeros(optimizer, chosen)


def _default_params(optimizer: Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    if isinstance(optimizer, ProxOptimizer):
        found = [p for group in groups if group["penalty"] is not None for p in group["params"]]
        kind = "in a group with a penalty"
    else:
        found = [p for group in groups for p in group["params"] if p.dim() >= 2]
        kind = "with at least two axes"
    if not found:
        raise ValueError(f"params must be given for an optimizer that has no parameter {kind}, got None")
    return found


def _checked(params: Any, optimizer: Optimizer) -> list[Tensor]:
    takes = "parameters of the optimizer"
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of {takes}, got {type(params).__name__}")
    chosen = list(params)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p in chosen:
        if id(p) not in known:
            got = f"another tensor of shape {tuple(p.shape)}" if isinstance(p, Tensor) else repr(p)
            raise ValueError(f"params must be {takes}, got {got}")
    if not chosen:
        raise ValueError(f"params must be {takes}, got none")
    return chosen
