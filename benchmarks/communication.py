"""Count what the prox of a sharded weight sends, and compare it with a formula.

Run `torchrun --nproc-per-node 4 -m benchmarks.communication`. The weight is that of an MLP layer of GPT-2 small, 3072
by 768 in float32. Sharded training itself gathers the weight twice and scatters its gradient once per step; the last
columns compare with this traffic, and extrapolate to 4096 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import proxmo
from proxmo import Penalty, shards
from proxmo.penalties.axes import indexing_axes
from proxmo.penalties.kinds import Grouped

MANY_RANKS = 4096
LATENCY, BANDWIDTH = 5e-6, 25e9
"""Seconds per hop of a collective, and bytes per second between two ranks, of a cluster with fast links."""


class Cost(NamedTuple):
    """Number of collectives, and bytes that a rank sends in them.

    A ring all-reduce of n bytes sends 2n over many ranks; an all-gather sends the size of the whole tensor.
    """

    messages: int
    size: int


class Message(NamedTuple):
    """One collective: its name, the bytes that this rank passes to it, and the bytes that the rank sends for it."""

    name: str
    payload: int
    size: int


class Messages(TorchDispatchMode):
    """Record in ``sent`` every collective of this rank within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0].strip("_")
        communicates = function.namespace in ("c10d", "_c10d_functional")
        if communicates and name not in ("wait_tensor", "wrap_tensor_autograd"):
            payload = sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor))
            self.sent.append(Message(name, payload, payload * args[1] if "gather" in name else 2 * payload))
        return function(*args, **(kwargs or {}))

    def cost(self) -> Cost:
        """Return the total cost of the recorded collectives."""
        return Cost(len(self.sent), sum(message.size for message in self.sent))


def predicted(
    penalty: Penalty, shape: tuple[int, ...], itemsize: int, sharding: Sequence[tuple[int, int]], passes: int
) -> Cost:
    """Return the cost of the prox of ``penalty`` for an evenly sharded tensor.

    Args:
        penalty: the penalty.
        shape: shape of the whole tensor.
        itemsize: bytes per element.
        sharding: for each mesh dimension that shards an axis, the axis and the number of ranks.
        passes: Newton passes that find the thresholds; usually 4 to 10, at any size.
    """
    if penalty.separable:
        return Cost(0, 0)
    if not isinstance(penalty, Grouped):
        return _gather_cost(math.prod(shape) * itemsize, [ranks for _, ranks in sharding])
    outer = indexing_axes(torch.empty(shape, device="meta"), penalty.dim)
    within = ranks_within_groups(penalty, shape, sharding)
    groups = math.prod(shape[axis] for axis in outer)
    groups //= math.prod(ranks for axis, ranks in sharding if axis in outer)  # those with elements on this rank
    if isinstance(penalty, proxmo.TopK):
        # 8-byte counts: one per bit but the sign, one of larger elements, and of equal elements one per rank
        bits = 8 * itemsize - 1
        return Cost((bits + 2) * len(within), 16 * groups * ((bits + 1) * len(within) + sum(within)))
    # a sum sends one number per group, a maximum a second one that flags NaN; Newton's method sums pairs
    newton = 1 + 2 * passes
    messages, numbers = {
        proxmo.GroupL2: (2, 3),
        proxmo.SparseGroup: (2, 3),
        proxmo.L2Ball: (2, 3),
        proxmo.GroupLInf: (3 + passes, 3 + newton),
        proxmo.Simplex: (3 + passes, 4 + newton),
        proxmo.L1Ball: (4 + passes, 5 + newton),
    }[type(penalty)]
    return Cost(messages * len(within), 2 * numbers * len(within) * groups * itemsize)


def ranks_within_groups(penalty: Penalty, shape: tuple[int, ...], sharding: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of ranks that share a group, for each mesh dimension that splits groups."""
    if penalty.separable:
        return []
    outer = indexing_axes(torch.empty(shape, device="meta"), penalty.dim) if isinstance(penalty, Grouped) else ()
    return [ranks for axis, ranks in sharding if axis not in outer]


def _gather_cost(whole: int, ranks: Sequence[int]) -> Cost:
    """Return the cost of gathering all shards on all ranks, one mesh dimension after the other."""
    sizes = [whole // math.prod(ranks[:dimension]) for dimension in range(len(ranks))]
    return Cost(len(sizes), sum(sizes))


def compare(penalty: Penalty, x: DTensor, step: float) -> tuple[Cost, Cost, int]:
    """Return the measured and the predicted cost of the prox, and the number of Newton passes."""
    with Messages() as messages:
        penalty.prox(x, step)
    measured = messages.cost()
    sharding = [(split.axis, split.process_group.size()) for split in shards.splits(x)]
    with_passes = [predicted(penalty, tuple(x.shape), x.element_size(), sharding, passes) for passes in (0, 1)]
    per_pass = with_passes[1].messages - with_passes[0].messages
    passes = (measured.messages - with_passes[0].messages) // per_pass if per_pass else 0
    return measured, predicted(penalty, tuple(x.shape), x.element_size(), sharding, passes), passes


def seconds(cost: Cost, sizes: Sequence[int]) -> float:
    """Estimate the time of messages that are spread evenly over process groups of these sizes."""
    hops = sum(2 * math.log2(size) for size in sizes) / max(len(sizes), 1)
    return cost.messages * hops * LATENCY + cost.size / BANDWIDTH


PENALTIES: Sequence[Penalty] = (
    proxmo.L1(0.01),
    proxmo.GroupL2(0.3, dim=0),
    proxmo.GroupL2(0.3, dim=1),
    proxmo.GroupLInf(1.0, dim=1),
    proxmo.L1Ball(100.0),
    proxmo.Simplex(dim=1),
    proxmo.TopK(100_000),
    proxmo.Nuclear(1.0),
)


def main() -> None:
    """Print measured and predicted costs."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(3072, 768)
    layouts: list[tuple[str, tuple[int, ...], list[Placement]]] = [
        ("4, rows", (4,), [Shard(0)]),
        ("2 x 2, rows and columns", (2, 2), [Shard(0), Shard(1)]),
    ]
    table = Table("penalty", "mesh", "messages", "bytes", "predicted", "/ training", f"ms on {MANY_RANKS} ranks")
    training_bytes = 3 * weight.numel() * weight.element_size()
    for layout, sizes, placements in layouts:
        x = distribute_tensor(weight, init_device_mesh("cpu", sizes), placements)
        many = [(0, MANY_RANKS)] if len(sizes) == 1 else [(0, MANY_RANKS // 4), (1, 4)]
        for penalty in PENALTIES:
            measured, formula, passes = compare(penalty, x, step=1.0)
            on_many = predicted(penalty, tuple(x.shape), 4, many, passes)
            time = seconds(on_many, ranks_within_groups(penalty, tuple(x.shape), many))
            table.add_row(
                str(penalty),
                layout,
                str(measured.messages),
                f"{measured.size:,}",
                f"{formula.size:,}",
                f"{measured.size / training_bytes:.2%}",
                f"{1e3 * time:.2f}",
            )
    if distributed.get_rank() == 0:
        Console(width=150).print(table)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
