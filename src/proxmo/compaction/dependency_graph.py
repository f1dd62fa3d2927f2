"""Find which channels of which layers form a unit, with torch-pruning's dependency graph.

A unit is a set of channels that can only be removed together: an output channel of a layer, the same channel of the
normalisation that follows and of all layers added to it, and the matching input channels of the layers that read it.
The units that start at one layer form a family, and that layer is the root of the family.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils import _pytree as pytree

from proxmo.compaction.attention import PrunedMultiheadAttention
from proxmo.compaction.errors import CompactionError
from proxmo.compaction.example_inputs import ModelInputs
from proxmo.compaction.propagation_rules import is_depthwise

Role = Literal["producer", "passthrough", "reader"]
"""Whether a layer computes the channels, transforms each independently, or takes them as input."""


@dataclass
class Member:
    """A layer, parameter or operation in a family, and the unit of each of its channels."""

    name: str
    """Empty for operations."""
    module: Any
    node: Any
    """The node of torch-pruning."""
    role: Role
    channels: list[int]
    units: list[int]

    @cached_property
    def channels_by_unit(self) -> dict[int, list[int]]:
        """Channels of each unit."""
        channels: dict[int, list[int]] = {}
        for channel, unit in zip(self.channels, self.units, strict=True):
            channels.setdefault(unit, []).append(channel)
        return channels

    def weight_rows(self) -> Tensor:
        """Return the weights of a producer, one row per output channel."""
        if isinstance(self.module, nn.Parameter):
            return self.module.detach().movedim(self.node.pruning_dim, 0).reshape(self.width, -1)
        weight: Tensor = self.module.weight
        return weight.detach().movedim(output_axis(self.module), 0).reshape(self.width, -1)

    @property
    def width(self) -> int:
        """Number of input channels of a reader, of output channels otherwise."""
        if isinstance(self.module, nn.Parameter):
            return int(self.module.shape[self.node.pruning_dim])
        axis = output_axis(self.module)
        return int(self.module.weight.shape[1 - axis if self.role == "reader" else axis])


@dataclass
class Family:
    """The units that start at one layer."""

    root: str
    size: int
    members: list[Member] = field(repr=False)
    obstacle: str | None
    """Why no unit can be removed, or ``None``."""

    def members_with(self, *roles: Role) -> list[Member]:
        return [member for member in self.members if member.role in roles]


class UnitGraph:
    """Dependency graph of a model, split into families of units.

    Args:
        model: a copy of the model, in evaluation mode; `prune` modifies it.
        inputs: arguments to call it with.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        import torch_pruning  # optional dependency

        self.model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: Counter[nn.Module] = Counter()
        self._shared = shared_parameters(model)
        self._types = torch_pruning.ops.OPTYPE
        self.graph = torch_pruning.DependencyGraph()
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            try:
                self.graph.build_dependency(
                    model, inputs, forward_fn=self._forward, output_transform=_differentiable_outputs, verbose=False
                )
            except CompactionError:
                raise
            except Exception as error:
                raise CompactionError(f"the model cannot be traced: {type(error).__name__}: {error}") from error

    def _forward(self, model: nn.Module, inputs: ModelInputs) -> Any:
        def count(module: nn.Module, *_: Any) -> None:
            self._calls[module] += 1

        hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
        try:
            outputs = inputs.call(model)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def families(self) -> list[Family]:
        """Return the families in the order of the model, except those inside pruned attention layers."""
        if any("CopySlices" in str(node.grad_fn) for node in self.graph.module2node.values()):
            # torch-pruning would not terminate
            raise CompactionError("the model cannot be traced: it writes to a slice of a tensor, as in x[:, :3] = y")
        visited = {
            part
            for module in self.model.modules()
            if isinstance(module, PrunedMultiheadAttention)
            for part in module.modules()
        }
        families: list[Family] = []
        for root in self._names:
            if (
                isinstance(root, (nn.Linear, _ConvNd, nn.Embedding))
                and root in self.graph.module2node
                and root not in visited
            ):
                families.append(self._family(root))
                visited |= {member.module for member in families[-1].members_with("producer", "passthrough")}
        return families

    def prune(self, family: Family, units: Sequence[int]) -> None:
        """Remove units from the model, in place; the graph is invalid afterwards."""
        self._pruning_group(self.model.get_submodule(family.root), sorted(units)).prune(record_history=False)

    def _pruning_group(self, root: nn.Module, units: list[int]) -> Any:
        return self.graph.get_pruning_group(root, self.graph.get_pruner_of_module(root).prune_out_channels, units)

    def _family(self, root: nn.Module) -> Family:
        node = self.graph.module2node[root]
        channels = list(range(self.graph.get_out_channels(root)))
        try:
            group = self._pruning_group(root, channels)
        except Exception as error:
            member = Member(self._names[root], root, node, "producer", channels, channels)
            reason = f"torch-pruning cannot trace it: {type(error).__name__}"
            return Family(member.name, len(channels), [member], reason)
        members = [
            self._member(item.dep.target, item.dep.handler, list(item.idxs), list(item.root_idxs))
            for item in group
            if item.dep.target.module in self._names or not _is_view_of_weight(item.dep.target)
        ]
        obstacles = [obstacle for member in members if (obstacle := self._obstacle(member)) is not None]
        size = 1 + max(members[0].units)
        return Family(members[0].name, size, members, obstacles[0] if obstacles else None)

    def _member(self, node: Any, handler: Any, channels: list[int], units: list[int]) -> Member:
        module, types = node.module, self._types
        role: Role = "passthrough"
        if node.type in (types.CONV, types.LINEAR):
            is_reader = handler == self.graph.get_pruner_of_module(module).prune_in_channels
            role = "reader" if is_reader else "producer"
        elif node.type in (types.EMBED, types.PARAMETER):
            role = "producer"
        name = self.graph._param_to_name[module] if node.type == types.PARAMETER else self._names.get(module, "")
        return Member(name, module, node, role, channels, units)

    def _obstacle(self, member: Member) -> str | None:
        module, types = member.module, self._types
        if member.node.type in (types.LN, types.GN, types.MHA, types.LSTM):
            return f"{member.name!r} ({type(module).__name__}) mixes its channels"
        if member.role != "passthrough" and max(member.channels) >= member.width:
            return f"torch-pruning finds more channels in {member.name!r} than the {member.width} it has"
        if not member.name or isinstance(module, nn.Parameter):
            return None
        if isinstance(module, _ConvNd) and module.groups > 1 and not is_depthwise(module):
            return f"{member.name!r} is a convolution with groups={module.groups}"
        if self._calls[module] > 1:
            return f"{member.name!r} is called {self._calls[module]} times"
        if any(p in self._shared for p in module.parameters(recurse=False)):
            return f"a weight of {member.name!r} is shared"
        if hasattr(module, "weight") and isinstance(module.weight, Tensor) and "weight" not in module._parameters:
            return f"the weight of {member.name!r} is computed from other parameters"
        return None


def _is_view_of_weight(node: Any) -> bool:
    """Return whether the node only reshapes a parameter inside a layer, which torch-pruning mistakes for data."""
    sources = [source for source, _ in getattr(node.grad_fn, "next_functions", ())]
    return bool(sources) and all(type(source).__name__ == "AccumulateGrad" for source in sources) and not node.inputs


def output_axis(module: Any) -> int:
    """Return the axis of the layer's weight that indexes its output channels."""
    return 1 if isinstance(module, (nn.Embedding, _ConvTransposeNd)) else 0


def _differentiable_outputs(outputs: Any) -> list[Tensor]:
    """Return the output tensors that depend on the parameters; raise if there are none."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    if not tensors:
        raise CompactionError("the model cannot be traced: no output depends on its parameters")
    return tensors


def shared_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters used by more than one layer."""
    counts = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return {p for p, count in counts.items() if count > 1}
