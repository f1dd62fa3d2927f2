"""Inputs of other sizes, to follow a model where its path depends on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from proxmo.compaction.example_inputs import ModelInputs, output_tensors
from proxmo.compaction.labels import tensors_in

_MOST = 3
"""The largest number of other inputs that a model is followed on."""


def other_sizes(model: nn.Module, inputs: ModelInputs) -> list[ModelInputs]:
    """Return inputs with another batch size and with another length, as far as the model takes them.

    For each axis of the largest input, the axes of all inputs of that size are changed together: to a larger size, or a
    smaller one if the model does not take that.
    """
    tensors = tensors_in([inputs.args, inputs.kwargs])
    if not tensors:
        return []
    shape = max(tensors, key=lambda tensor: (tensor.dim(), tensor.numel())).shape
    found: list[ModelInputs] = []
    for axis, old in enumerate(shape):
        for new in (_larger(old), max(old - 1, 1)):
            if new == old or old in shape[:axis]:
                continue
            candidates = (_resized(inputs, axis, old, new), _resized(inputs, None, old, new))
            probe = next((candidate for candidate in candidates if _runs(model, candidate)), None)
            if probe is not None:
                found.append(probe)
                break
        if len(found) == _MOST:
            break
    return found


def _larger(size: int) -> int:
    """
    >>> _larger(2), _larger(8), _larger(224)
    (9, 17, 225)
    """
    return max(9, 2 * size + 1) if size <= 16 else size + 1


def _resized(inputs: ModelInputs, axis: int | None, old: int, new: int) -> ModelInputs:
    """Return inputs whose axes of a size have another: the given one where that has it, else all that have it."""

    def resize(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        at_axis = axis is not None and x.dim() > axis and x.shape[axis] == old
        for k in [axis] if at_axis else [k for k, size in enumerate(x.shape) if size == old]:
            x = x.index_select(k, torch.arange(new, device=x.device) % old)
        return x

    return ModelInputs(*pytree.tree_map(resize, (inputs.args, inputs.kwargs)))


def _runs(model: nn.Module, inputs: ModelInputs) -> bool:
    try:
        with torch.no_grad():
            return bool(output_tensors(inputs.call(model)))
    except Exception:
        return False
