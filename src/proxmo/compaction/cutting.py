"""Cut units out of the tensors of a model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from proxmo.compaction.analysis import Analysis, Family, Fold
from proxmo.compaction.attention import remove_heads, replace_attention
from proxmo.compaction.labels import Labels, Mask, Values
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


def removed_atoms(analysis: Analysis, removals: list[Removal]) -> Mask:
    """Return for each atom of an analysis, of any model with tensors of the same names, whether it is removed."""
    removed = np.zeros(len(analysis.root), dtype=bool)
    for name, axes in RemovedIndices.of(removals).by_axis.items():
        for axis, indices in axes.items():
            removed[analysis.root[analysis.atoms.starts[name, axis] + np.array(sorted(indices))]] = True
    return removed[analysis.root]


@torch.no_grad()
def silenced(model: nn.Module, removals: list[Removal], folds: list[Fold]) -> nn.Module:
    """Return a model in which constants of the units are in biases, and the weights that make and read them are zero.

    It computes the same as before; what only these units read is not read any more. Other tensors are shared.
    """
    touched = {*RemovedIndices.of(removals).by_axis, *(f"{fold.layer}.bias".lstrip(".") for fold in folds)}
    parameters = [(name, p) for name, p in model.named_parameters() if name in touched]
    model = copy_with(model, {id(p): nn.Parameter(p.clone(), p.requires_grad) for _, p in parameters})
    atoms = np.concatenate([removal.atoms for removal in removals])
    for fold in folds:
        chosen = np.isin(fold.atoms, atoms)
        if chosen.any():
            _fold_into_bias(model.get_submodule(fold.layer), fold.indices[chosen], fold.values[chosen])
    named = dict(model.named_parameters())
    for name, axes in RemovedIndices.of(removals).by_axis.items():
        if name in named and named[name].dim() > 1:
            for axis, indices in axes.items():
                index = torch.tensor(sorted(indices), device=named[name].device)
                named[name].index_fill_(axis, index, 0.0)
    return model


def _fold_into_bias(layer: nn.Module, indices: Labels, values: Values) -> None:
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
    """Return a model whose tensors lack the units; it shares the others, and numbers in its modules are as before."""
    removed = RemovedIndices.of(removals).by_axis
    heads: dict[str, list[int]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            prefix = f"{name}." if name else ""
            columns = removed.get(f"{prefix}out_proj.weight", {}).get(1, set())
            if columns:
                heads[name] = sorted({column // layer.head_dim for column in columns})
                removed = {key: axes for key, axes in removed.items() if not key.startswith(prefix)}
    new: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for axis, indices in removed.get(name, {}).items():
            kept = torch.tensor([k for k in range(tensor.shape[axis]) if k not in indices], device=tensor.device)
            new[id(tensor)] = new.get(id(tensor), tensor).index_select(axis, kept)
        if id(tensor) in new and isinstance(tensor, nn.Parameter):
            new[id(tensor)] = nn.Parameter(new[id(tensor)], tensor.requires_grad)
    small = copy_with(model, new)
    changed = {id(tensor) for tensor in new.values()}
    for module in small.modules():
        if any(id(t) in changed for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            update_size_attributes(module)
    for name, indices_of_heads in heads.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        replace_attention(small, name, remove_heads(attention, indices_of_heads))
    return small


def copy_with(model: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """Return a copy of a model that shares its tensors, except for new ones in place of some, by ``id``."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): new.get(id(tensor), tensor) for tensor in tensors})
