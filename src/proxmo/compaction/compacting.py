"""The way from a model with zero units to a smaller one."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from proxmo import shards
from proxmo.compaction.errors import CompactionError, require_package
from proxmo.compaction.example_inputs import ExampleInputs, ModelInputs, isolated_torch_state
from proxmo.compaction.pruning import Pruner, are_close
from proxmo.compaction.report import CompactionReport, count_multiply_adds, layer_widths


@isolated_torch_state()
def compact(model: nn.Module, example_inputs: ExampleInputs) -> tuple[nn.Module, CompactionReport]:
    """A smaller model with the same outputs: all neurons, channels and attention heads that are zero are removed.

    A unit goes if all layers that read it multiply it by zero, or see a constant whatever the input of the model, and
    if no operation on the way mixes its channels with others; a constant, from a bias or a shift of the normalisation,
    goes into the bias of the layers that read it. Zero units for which that cannot be shown stay, and the report names
    them. The model itself is left as it was; the new one is an ordinary dense module, in the same mode of training or
    evaluation. A layer keeps one unit if all are zero. Needs ``pip install 'proxmo[compact]'``.

    Args:
        model: the model, on any device.
        example_inputs: a tensor, a tuple of arguments or a dictionary of named ones, to call the model with.

    Returns:
        The new model, and what was done.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[1:3].zero_()
    >>> small, report = compact(model, torch.randn(8, 3))
    >>> small
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    >>> report.parameters
    (26, 14)
    """
    inputs = ModelInputs.from_example(example_inputs)
    original = working_copy(model)
    pruner = Pruner(original, inputs)
    small = pruner.run()
    if not are_close(inputs.output_tensors(small), pruner.expected[0]):
        raise CompactionError(f"the outputs of the smaller model differ by {pruner.output_difference():.1e}")
    before, after = layer_widths(original), layer_widths(small)
    report = CompactionReport(
        (_count_parameters(original), _count_parameters(small)),
        (count_multiply_adds(original, inputs), count_multiply_adds(small, inputs)),
        {name: (before[name], after[name]) for name in before},
        pruner.output_difference(),
        pruner.kept_notes(),
    )
    _restore_modes(small, model)
    return small, report


def working_copy(model: nn.Module) -> nn.Module:
    """A copy to trace and cut: in evaluation mode, every parameter with gradients, which tracing needs."""
    require_package("torch-pruning")
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError(f"model must be an nn.Module that is neither scripted nor compiled, got {type(model).__name__}")
    if any(map(is_lazy, model.parameters())):
        raise ValueError("model must know all its shapes, got one with lazy layers: call it once before")
    try:
        return copy.deepcopy(model).eval().requires_grad_(True)
    except Exception as error:
        hint = "; take the undivided model" if shards.any_divided(model.parameters()) else ""
        raise CompactionError(f"the model cannot be copied: {error}{hint}") from error


def _restore_modes(small: nn.Module, model: nn.Module) -> None:
    """Give modules and parameters the modes that they have in the model; new ones get those of what they are in."""
    modes = {name: module.training for name, module in model.named_modules()}
    wanted = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in small.named_modules():
        holder = next(holder for holder in _ancestors(name) if holder in modes)
        module.training = modes[holder]
        for own, p in module.named_parameters(recurse=False):
            full = f"{name}.{own}".lstrip(".")
            of_layer = [flag for other, flag in wanted.items() if other.startswith(f"{holder}.".lstrip("."))]
            p.requires_grad_(wanted[full] if full in wanted else any(of_layer))
            p.grad = None


def _ancestors(name: str) -> list[str]:
    """The name of a module, then those of what it is in, to the model itself.

    >>> _ancestors("body.0")
    ['body.0', 'body', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
