"""A prox takes little memory besides its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import proxmo


class Peak(TorchDispatchMode):
    """The peak memory, in bytes, of the tensors created within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._made.values()))
        return result


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(200, 600), (4000, 30), (60, 500)], ids=str)  # by Newton's method and by sorting
@pytest.mark.parametrize(
    "penalty",
    [
        proxmo.L1(0.1),
        proxmo.GroupL2(5.0),
        proxmo.GroupLInf(50.0),
        proxmo.L1Ball(50.0, dim=0),
        proxmo.Simplex(5.0, dim=0),
    ],
    ids=str,
)
def test_prox_takes_at_most_three_buffers_besides_the_result(
    penalty: proxmo.Penalty, shape: tuple[int, int], fused: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with Peak() as peak:
        result = penalty.prox(x, 1.0, fused=fused)
    assert result.shape == x.shape
    buffer = x.untyped_storage().nbytes()
    per_group = 15 * 4 * shape[0]  # up to 15 float32 scalars for each group
    assert buffer <= peak.bytes <= (1 if fused else 4) * buffer + per_group


def test_peak_counts_buffers_that_are_alive_at_the_same_time() -> None:
    with Peak() as peak:
        x = torch.ones(1000)
        y = x + 1
        y.mul_(2)
        del x
        y = y + 1
        z = [y + k for k in range(3)]
    assert len(z) == 3
    assert peak.bytes == 4 * 4000


@pytest.mark.parametrize("penalty", [proxmo.L1(0.1), proxmo.GroupL2(5.0), proxmo.GroupLInf(50.0)], ids=str)
def test_prox_of_a_large_tensor_takes_little_memory_besides_the_result(penalty: proxmo.Penalty) -> None:
    x = torch.randn(4000, 1000, generator=torch.Generator().manual_seed(0))
    with Peak() as peak:
        penalty.prox(x, 1.0)
    assert peak.bytes <= 1.5 * x.untyped_storage().nbytes()
