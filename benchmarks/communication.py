"""What is sent for the prox of a weight that is divided among processes, counted and by formula.

Run `torchrun --nproc-per-node 4 -m benchmarks.communication`. The weight is that of an MLP layer of GPT-2 small, 3072
by 768 in float32. Sharded training itself gathers the weight twice and scatters its gradient once in each step; the
last columns compare with that, and put the formula to 4096 processes.
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
from proxmo.penalties.base import Grouped

MANY = 4096
LATENCY, BANDWIDTH = 5e-6, 25e9
"""Seconds per hop of a collective, and bytes per second between two processes: a cluster with fast links."""


class Cost(NamedTuple):
    """How many collectives there are, and how many bytes a process sends in them.

    Sums of n bytes over many processes take 2n in a ring, a gathering takes the size of the whole.
    """

    messages: int
    size: int


class Message(NamedTuple):
    """One collective: its name, how many bytes this process hands to it, and how many it has to send for it."""

    name: str
    handed: int
    size: int


class Messages(TorchDispatchMode):
    """Within the block, ``sent`` gets every collective of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0].strip("_")
        communicates = function.namespace in ("c10d", "_c10d_functional")
        if communicates and name not in ("wait_tensor", "wrap_tensor_autograd"):
            handed = sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor))
            self.sent.append(Message(name, handed, handed * args[1] if "gather" in name else 2 * handed))
        return function(*args, **(kwargs or {}))

    def cost(self) -> Cost:
        """All of them together."""
        return Cost(len(self.sent), sum(message.size for message in self.sent))


def predicted(
    penalty: Penalty, shape: tuple[int, ...], itemsize: int, divisions: Sequence[tuple[int, int]], passes: int
) -> Cost:
    """What the prox of ``penalty`` sends for a tensor that is divided evenly.

    Args:
        penalty: the penalty.
        shape: that of the whole tensor.
        itemsize: bytes of an element.
        divisions: for each dimension of the mesh that divides an axis, this axis and among how many processes.
        passes: how many passes of Newton's method find the thresholds; mostly 4 to 10, whatever the size.
    """
    if penalty.separable:
        return Cost(0, 0)
    if not isinstance(penalty, Grouped):
        return _gathering(math.prod(shape) * itemsize, [processes for _, processes in divisions])
    outer = indexing_axes(torch.empty(shape, device="meta"), penalty.dim)
    within = dividing(penalty, shape, divisions)
    groups = math.prod(shape[axis] for axis in outer)  # of which this process has a part, or all
    groups //= math.prod(processes for axis, processes in divisions if axis in outer)
    if isinstance(penalty, proxmo.TopK):
        # a count of 8 bytes for each bit but the sign, how many are larger, and how many equal ones each process has
        bits = 8 * itemsize - 1
        return Cost((bits + 2) * len(within), 16 * groups * ((bits + 1) * len(within) + sum(within)))
    # sums send a number per group, maxima another one that flags NaN, and Newton's method sums in pairs
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


def dividing(penalty: Penalty, shape: tuple[int, ...], divisions: Sequence[tuple[int, int]]) -> list[int]:
    """Among how many processes what the penalty must see as a whole is divided, for each dimension of the mesh."""
    if penalty.separable:
        return []
    outer = indexing_axes(torch.empty(shape, device="meta"), penalty.dim) if isinstance(penalty, Grouped) else ()
    return [processes for axis, processes in divisions if axis not in outer]


def _gathering(whole: int, processes: Sequence[int]) -> Cost:
    """All parts to all processes, one dimension of the mesh after the other."""
    sizes = [whole // math.prod(processes[:dimension]) for dimension in range(len(processes))]
    return Cost(len(sizes), sum(sizes))


def compare(penalty: Penalty, x: DTensor, step: float) -> tuple[Cost, Cost, int]:
    """What the prox sends in truth, what the formula says, and the number of passes that were taken."""
    with Messages() as messages:
        penalty.prox(x, step)
    found = messages.cost()
    divisions = [(split.axis, split.processes.size()) for split in shards.splits(x)]
    with_passes = [predicted(penalty, tuple(x.shape), x.element_size(), divisions, passes) for passes in (0, 1)]
    per_pass = with_passes[1].messages - with_passes[0].messages
    passes = (found.messages - with_passes[0].messages) // per_pass if per_pass else 0
    return found, predicted(penalty, tuple(x.shape), x.element_size(), divisions, passes), passes


def seconds(cost: Cost, sizes: Sequence[int]) -> float:
    """The time that it takes, with latency and bandwidth as above, where as many messages go to groups of each size."""
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
    """Count, compare and print."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(3072, 768)
    layouts: list[tuple[str, tuple[int, ...], list[Placement]]] = [
        ("4: rows", (4,), [Shard(0)]),
        ("2 x 2: rows, columns", (2, 2), [Shard(0), Shard(1)]),
    ]
    table = Table("penalty", "mesh", "messages", "bytes", "by formula", "of training", f"{MANY} processes, ms")
    own_traffic = 3 * weight.numel() * weight.element_size()
    for layout, sizes, placements in layouts:
        x = distribute_tensor(weight, init_device_mesh("cpu", sizes), placements)
        many = [(0, MANY)] if len(sizes) == 1 else [(0, MANY // 4), (1, 4)]
        for penalty in PENALTIES:
            found, formula, passes = compare(penalty, x, step=1.0)
            there = predicted(penalty, tuple(x.shape), 4, many, passes)
            time = seconds(there, dividing(penalty, tuple(x.shape), many))
            table.add_row(
                str(penalty),
                layout,
                str(found.messages),
                f"{found.size:,}",
                f"{formula.size:,}",
                f"{found.size / own_traffic:.2%}",
                f"{1e3 * time:.2f}",
            )
    if distributed.get_rank() == 0:
        Console(width=150).print(table)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
