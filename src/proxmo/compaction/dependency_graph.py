"""Which channels of which layers make a unit: torch-pruning's dependency graph, in our words.

A unit is what can only be removed as a whole: an output channel of a layer, the same channel of the normalisation
behind it and of all layers that are added to it, and the input channels of the layers that read it. Units that begin at
the same layer are a family.
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


@dataclass
class Member:
    """A layer, or an operation without a name, and which of its channels belong to which unit."""

    name: str
    module: Any
    node: Any
    role: Role
    channels: list[int]
    units: list[int]

    @cached_property
    def channels_by_unit(self) -> dict[int, list[int]]:
        """The channels of each unit."""
        found: dict[int, list[int]] = {}
        for channel, unit in zip(self.channels, self.units, strict=True):
            found.setdefault(unit, []).append(channel)
        return found

    def weight_rows(self) -> Tensor:
        """The weights of a layer that emits, a row for each output channel."""
        if isinstance(self.module, nn.Parameter):
            return self.module.detach().movedim(self.node.pruning_dim, 0).reshape(self.width, -1)
        weight: Tensor = self.module.weight
        return weight.detach().movedim(output_axis(self.module), 0).reshape(self.width, -1)

    @property
    def width(self) -> int:
        """How many channels the layer has on this side."""
        if isinstance(self.module, nn.Parameter):
            return int(self.module.shape[self.node.pruning_dim])
        axis = output_axis(self.module)
        return int(self.module.weight.shape[1 - axis if self.role == "reader" else axis])


@dataclass
class Family:
    """The units that begin at one layer."""

    root: str
    size: int
    members: list[Member] = field(repr=False)
    obstacle: str | None
    """Why its units cannot be removed, if so."""

    def members_with(self, *roles: Role) -> list[Member]:
        return [member for member in self.members if member.role in roles]


class UnitGraph:
    """The families of a model, which must be a copy in evaluation mode that may be cut.

    Args:
        model: the model.
        inputs: what to call it with.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        import torch_pruning  # of the extra `compact`, which only those who trace need

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
        """In the order of the model, those that cannot be removed with the reason; without the insides of attention."""
        if any("CopySlices" in str(node.grad_fn) for node in self.graph.module2node.values()):
            # torch-pruning would look for the channels without end
            raise CompactionError("the model cannot be traced: it writes to a part of a tensor, as in x[:, :3] = y")
        inside = {
            part
            for module in self.model.modules()
            if isinstance(module, PrunedMultiheadAttention)
            for part in module.modules()
        }
        families: list[Family] = []
        known = set(inside)
        for root in self._names:
            if (
                isinstance(root, (nn.Linear, _ConvNd, nn.Embedding))
                and root in self.graph.module2node
                and root not in known
            ):
                families.append(self._family(root))
                known |= {member.module for member in families[-1].members_with("producer", "passthrough")}
        return families

    def prune(self, family: Family, units: Sequence[int]) -> None:
        """Remove units from the model; it needs to be traced again afterwards."""
        self._pruning_group(self.model.get_submodule(family.root), sorted(units)).prune(record_history=False)

    def _pruning_group(self, root: nn.Module, units: list[int]) -> Any:
        return self.graph.get_pruning_group(root, self.graph.get_pruner_of_module(root).prune_out_channels, units)

    def _family(self, root: nn.Module) -> Family:
        node = self.graph.module2node[root]
        every = list(range(self.graph.get_out_channels(root)))
        try:
            group = self._pruning_group(root, every)
        except Exception as error:
            alone = Member(self._names[root], root, node, "producer", every, every)
            return Family(alone.name, len(every), [alone], f"torch-pruning cannot follow it: {type(error).__name__}")
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
            reads = handler == self.graph.get_pruner_of_module(module).prune_in_channels
            role = "reader" if reads else "producer"
        elif node.type in (types.EMBED, types.PARAMETER):
            role = "producer"
        name = self.graph._param_to_name[module] if node.type == types.PARAMETER else self._names.get(module, "")
        return Member(name, module, node, role, channels, units)

    def _obstacle(self, member: Member) -> str | None:
        module, types = member.module, self._types
        if member.node.type in (types.LN, types.GN, types.MHA, types.LSTM):
            return f"{member.name!r} ({type(module).__name__}) mixes its channels"
        if member.role != "passthrough" and max(member.channels) >= member.width:
            return f"{member.name!r} has {member.width} channels where more arrive"
        if not member.name or isinstance(module, nn.Parameter):
            return None
        if isinstance(module, _ConvNd) and module.groups > 1 and not is_depthwise(module):
            return f"{member.name!r} is a convolution in {module.groups} groups"
        if self._calls[module] > 1:
            return f"{member.name!r} is used {self._calls[module]} times"
        if any(p in self._shared for p in module.parameters(recurse=False)):
            return f"a weight of {member.name!r} is shared"
        if hasattr(module, "weight") and isinstance(module.weight, Tensor) and "weight" not in module._parameters:
            return f"the weight of {member.name!r} is computed from other parameters"
        return None


def _is_view_of_weight(node: Any) -> bool:
    """Whether it is only a step inside a layer, which autograd shows and torch-pruning takes for data."""
    sources = [source for source, _ in getattr(node.grad_fn, "next_functions", ())]
    return bool(sources) and all(type(source).__name__ == "AccumulateGrad" for source in sources) and not node.inputs


def output_axis(module: Any) -> int:
    """The axis of the weight of a layer that runs over its output channels."""
    return 1 if isinstance(module, (nn.Embedding, _ConvTransposeNd)) else 0


def _differentiable_outputs(outputs: Any) -> list[Tensor]:
    """The tensors among the outputs that depend on the parameters."""
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    if not found:
        raise CompactionError("the model cannot be traced: no output depends on its parameters")
    return found


def shared_parameters(model: nn.Module) -> set[Tensor]:
    """The parameters that several layers have."""
    counts = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return {p for p, count in counts.items() if count > 1}
