"""Compact a model: remove its zero units."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod

from proxmo import shards
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ExampleInputs, ModelInputs, isolated_torch_state
from proxmo.compaction.origin import note_origin
from proxmo.compaction.outputs import are_close
from proxmo.compaction.probes import Probes
from proxmo.compaction.pruning import Pruner
from proxmo.compaction.report import CompactionReport, count_multiply_adds, layer_widths


@isolated_torch_state()
def compact(model: nn.Module, example_inputs: ExampleInputs) -> tuple[nn.Module, CompactionReport]:
    """Return a smaller model with the same outputs: remove the neurons, channels and attention heads that are zero.

    The new model is an ordinary dense module in the same training or evaluation mode; the model that you pass is not
    modified.

    A unit is removed if every layer that reads it either multiplies it by zero or reads a constant, for any input, and
    if no operation in between mixes its channels with others. A constant, such as a bias or the shift of a
    normalisation, is folded into the bias of the layers that read it. Zero units that do not provably meet these
    conditions stay, and the report lists them. If all units of a layer are zero, one stays. Numbers that modules store,
    such as ``num_heads``, are updated where the smaller model needs it, and listed in the report.

    Args:
        model: the model, on any device.
        example_inputs: a tensor, a tuple of arguments or a dictionary of keyword arguments to call the model with.

    Returns:
        The new model, and a report of what was removed.

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
    pruner = Pruner(original, Probes.of(original, inputs))
    small = pruner.run()
    difference = pruner.output_difference(small)
    if not are_close(inputs.output_tensors(small), pruner.expected[0][1], pruner.precision):
        raise CompactionError(f"the outputs of the smaller model differ by {difference:.1e}")
    before, after = layer_widths(original), layer_widths(small)
    report = CompactionReport(
        (_count_parameters(original), _count_parameters(small)),
        (count_multiply_adds(original, inputs), count_multiply_adds(small, inputs)),
        {name: (before[name], after[name]) for name in before},
        difference,
        [*pruner.kept_notes(), *pruner.object_notes(small)],
        {".".join(filter(None, setting)): values for setting, values in pruner.attributes.items()},
    )
    note_origin(small, original, pruner.attributes)
    _restore_modes(small, model)
    return small, report


def working_copy(model: nn.Module) -> nn.Module:
    """Return a copy to trace and prune, in evaluation mode."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError(f"model must be an nn.Module that is neither scripted nor compiled, got {type(model).__name__}")
    if any(map(is_lazy, model.parameters())):
        raise ValueError("model must have no uninitialized parameters, got lazy layers: call the model once first")
    for name, module in model.named_modules():
        if any(isinstance(hook, BasePruningMethod) for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"model must have no active masks of torch.nn.utils.prune, got one on {name!r}: prune.remove makes it "
                "permanent"
            )
    try:
        return copy.deepcopy(model).eval()
    except Exception as error:
        hint = "; pass the unsharded model" if shards.any_sharded(model.parameters()) else ""
        raise CompactionError(f"the model cannot be copied: {error}{hint}") from error


def _restore_modes(small: nn.Module, model: nn.Module) -> None:
    """Copy ``training`` and ``requires_grad`` from the model; new modules inherit them from their nearest ancestor."""
    training = {name: module.training for name, module in model.named_modules()}
    requires_grad = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in small.named_modules():
        ancestor = next(ancestor for ancestor in _ancestors(name) if ancestor in training)
        module.training = training[ancestor]
        for parameter_name, p in module.named_parameters(recurse=False):
            full = f"{name}.{parameter_name}".lstrip(".")
            inherited = [flag for other, flag in requires_grad.items() if other.startswith(f"{ancestor}.".lstrip("."))]
            p.requires_grad_(requires_grad[full] if full in requires_grad else any(inherited))
            p.grad = None


def _ancestors(name: str) -> list[str]:
    """Return the name of a module, then the names of the modules that contain it, up to the model.

    >>> _ancestors("body.0")
    ['body.0', 'body', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
