"""Cut units out of the tensors of a model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.analysis import Family, Fold
from proxmo.compaction.attention import remove_heads, replace_attention
from proxmo.compaction.labels import Labels
from proxmo.compaction.layer_sizes import update_size_attributes


@dataclass
class Removal:
    """Units to remove."""

    family: Family
    units: Labels
    """Their positions in the family."""

    @property
    def atoms(self) -> Labels:
        return self.family.atoms[self.units]


@dataclass
class RemovedIndices:
    """What is removed of each parameter and buffer."""

    by_axis: dict[str, dict[int, set[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, removals: list[Removal]) -> RemovedIndices:
        found = cls()
        for removal in removals:
            for part in removal.family.parts:
                axes = found.by_axis.setdefault(part.name, {})
                axes.setdefault(part.axis, set()).update(part.indices[removal.units].reshape(-1).tolist())
        return found


@torch.no_grad()
def silence(model: nn.Module, removals: list[Removal], folds: list[Fold]) -> None:
    """Move constants of the units to biases, and set the weights that make and read them to zero, in place.

    The model computes the same as before; what only these units read is not read any more.
    """
    atoms = np.concatenate([removal.atoms for removal in removals])
    for fold in folds:
        chosen = np.isin(fold.atoms, atoms)
        if chosen.any():
            _fold_into_bias(model.get_submodule(fold.layer), fold.indices[chosen], fold.values[chosen])
    parameters = dict(model.named_parameters())
    for name, axes in RemovedIndices.of(removals).by_axis.items():
        if name in parameters and parameters[name].dim() > 1:
            for axis, indices in axes.items():
                index = torch.tensor(sorted(indices), device=parameters[name].device)
                parameters[name].index_fill_(axis, index, 0.0)


def _fold_into_bias(layer: nn.Module, indices: Labels, values: np.ndarray) -> None:  # type: ignore[type-arg]
    assert isinstance(layer, (nn.Linear, _ConvNd))
    weight = layer.weight[:, torch.from_numpy(indices).to(layer.weight.device)].double()
    sums = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    shift = (sums @ torch.from_numpy(values).to(sums.device)).to(layer.weight.dtype)
    if layer.bias is None:
        layer.bias = nn.Parameter(shift)
    else:
        layer.bias += shift


@torch.no_grad()
def without_units(model: nn.Module, removals: list[Removal]) -> nn.Module:
    """Return a copy of the model whose tensors lack the units; sizes in its own modules are as they were."""
    removed = RemovedIndices.of(removals).by_axis
    small = copy.deepcopy(model)
    done: set[int] = set()
    for name, layer in list(small.named_modules()):
        if isinstance(layer, nn.MultiheadAttention):
            columns = removed.get(f"{name}.out_proj.weight".lstrip("."), {}).get(1, set())
            heads = sorted({column // layer.head_dim for column in columns})
            if heads:
                pruned = remove_heads(layer, heads)
                replace_attention(small, name, pruned)
                done |= {id(tensor) for tensor in pruned.parameters()}
    replaced: dict[int, Tensor] = {}
    for name, tensor in (*small.named_parameters(), *small.named_buffers()):
        for axis, indices in removed.get(name, {}).items() if id(tensor) not in done else ():
            kept = [k for k in range(tensor.shape[axis]) if k not in indices]
            source = replaced.get(id(tensor), tensor)
            replaced[id(tensor)] = source.index_select(axis, torch.tensor(kept, device=tensor.device))
    for module in small.modules():
        changed = False
        for tensors in (module._parameters, module._buffers):
            for attribute, old in list(tensors.items()):
                if old is not None and id(old) in replaced:
                    new = replaced[id(old)]
                    if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
                        new = replaced[id(old)] = nn.Parameter(new, old.requires_grad)
                    setattr(module, attribute, new)
                    changed = True
        if changed:
            update_size_attributes(module)
    return small
