"""Counts what is sent between processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Message(NamedTuple):
    """One collective: its name, and how many bytes this process hands to it."""

    name: str
    size: int


class Messages(TorchDispatchMode):
    """Within the block, ``sent`` gets every collective of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function.__name__.split(".")[0].strip("_")
            if name not in ("wait_tensor", "wrap_tensor_autograd"):
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
                self.sent.append(Message(name, sum(t.numel() * t.element_size() for t in tensors)))
        return function(*args, **(kwargs or {}))


def element_size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
