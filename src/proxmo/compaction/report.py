"""The report of a compaction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

from proxmo.compaction.attention import PrunedMultiheadAttention
from proxmo.compaction.example_inputs import ModelInputs


@dataclass(frozen=True)
class CompactionReport:
    """Sizes before and after `compact`, and the difference in outputs. Prints as a table.

    >>> report = CompactionReport((40, 10), (800, 200), {"hidden": (8, 2)}, 0.0, [])
    >>> print(report)
                   before  after
    parameters         40     10  4.0x smaller
    multiply-adds     800    200  4.0x fewer
    hidden              8      2
    largest difference in outputs: 0.0e+00
    """

    parameters: tuple[int, int]
    """Number of parameters before and after."""
    multiply_adds: tuple[int, int]
    """Multiply-adds of one call on the example inputs, before and after."""
    widths: dict[str, tuple[int, int]]
    """Output channels, neurons or heads of each layer, before and after."""
    difference: float
    """Largest absolute difference in outputs on the example inputs."""
    kept: list[str]
    """Why not more was removed: zero units that had to stay, with the reason, or that there were none; layers that were
    not called; branches that were not traced."""
    attributes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Numbers in modules, such as ``num_heads``, that were updated for the smaller model, before and after."""

    def __str__(self) -> str:
        rows = [("", "before", "after", "")]
        for label, (before, after), word in (
            ("parameters", self.parameters, "smaller"),
            ("multiply-adds", self.multiply_adds, "fewer"),
        ):
            rows.append((label, f"{before:,}", f"{after:,}", f"{before / max(after, 1):.1f}x {word}"))
        rows += [(name, str(before), str(after), "") for name, (before, after) in self.widths.items()]
        first, second, third = (max(len(row[column]) for row in rows) for column in range(3))
        lines = [f"{a:{first}}  {b:>{second}}  {c:>{third}}  {d}".rstrip() for a, b, c, d in rows]
        lines += [f"set {name}: {before} → {after}" for name, (before, after) in self.attributes.items()]
        return "\n".join([*lines, f"largest difference in outputs: {self.difference:.1e}", *self.kept])


def count_multiply_adds(model: nn.Module, inputs: ModelInputs) -> int:
    """Count the multiply-adds of one call in matrix products, convolutions and attention."""
    # without gradients, attention runs as one fused operator that is not counted
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        inputs.call(model)
    return int(counter.get_total_flops()) // 2


def layer_widths(model: nn.Module) -> dict[str, int]:
    """Return the number of output channels, neurons or heads of each layer that has them."""
    widths = {name: _width(module) for name, module in model.named_modules()}
    return {name: width for name, width in widths.items() if width is not None}


def _width(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if isinstance(module, (nn.MultiheadAttention, PrunedMultiheadAttention)):
        return module.num_heads
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return module.hidden_size
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor) and isinstance(bias, Tensor) and weight.dim() == 2 and bias.dim() == 1:
        return len(bias)  # a linear layer of another library, such as Conv1D of transformers
    return None
