"""Which channels of which layers make a unit: torch-pruning's dependency graph, in our words.

A unit is what can only be removed as a whole: an output channel of a layer, the same channel of the normalisation
behind it and of all layers that are added to it, and the input channels of the layers that read it. Units that begin at
the same layer are a family.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils import _pytree as pytree

from proxmo.compaction.attention import FewerHeads

ExampleInputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
Role = Literal["emits", "passes", "reads"]


class CompactionError(RuntimeError):
    """A model that cannot be made smaller, with the reason; the model itself is as it was.

    >>> issubclass(CompactionError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example: ExampleInputs) -> Inputs:
        if isinstance(example, Mapping):
            return cls((), dict(example))
        return cls((example,) if isinstance(example, Tensor) else tuple(example), {})

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def shuffled(self) -> Inputs:
        """The same numbers in other places: as valid as the example, and another point of the function."""
        generator = torch.Generator().manual_seed(0)

        def shuffle(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                return x
            order = torch.randperm(x.numel(), generator=generator).to(x.device)
            return x.flatten()[order].reshape(x.shape)

        return Inputs(*pytree.tree_map(shuffle, (self.args, self.kwargs)))


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
    def by_unit(self) -> dict[int, list[int]]:
        """The channels of each unit."""
        found: dict[int, list[int]] = {}
        for channel, unit in zip(self.channels, self.units, strict=True):
            found.setdefault(unit, []).append(channel)
        return found


@dataclass
class Family:
    """The units that begin at one layer."""

    root: str
    size: int
    members: list[Member] = field(repr=False)
    obstacle: str | None
    """Why its units cannot be removed, if so."""

    def having(self, *roles: Role) -> list[Member]:
        return [member for member in self.members if member.role in roles]


class Traced:
    """The families of a model, which must be a copy in evaluation mode that may be cut.

    Args:
        model: the model.
        inputs: what to call it with.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        import torch_pruning  # of the extra `compact`, which only those who trace need

        self.model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: Counter[nn.Module] = Counter()
        self._outputs: set[Any] = set()
        self._shared = _shared_parameters(model)
        self._types = torch_pruning.ops.OPTYPE
        self.graph = torch_pruning.DependencyGraph()
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            try:
                self.graph.build_dependency(
                    model, inputs, forward_fn=self._forward, output_transform=_differentiable, verbose=False
                )
            except CompactionError:
                raise
            except Exception as error:
                raise CompactionError(f"the model cannot be traced: {type(error).__name__}: {error}") from error

    def _forward(self, model: nn.Module, inputs: Inputs) -> Any:
        def count(module: nn.Module, *_: Any) -> None:
            self._calls[module] += 1

        hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
        try:
            outputs = inputs.call(model)
        finally:
            for hook in hooks:
                hook.remove()
        self._outputs = {tensor.grad_fn for tensor in _differentiable(outputs)}
        return outputs

    def families(self) -> list[Family]:
        """In the order of the model, those that cannot be removed with the reason; without the insides of attention."""
        roots = (nn.Linear, _ConvNd, nn.Embedding)
        attention = {
            part for module in self.model.modules() if isinstance(module, FewerHeads) for part in module.modules()
        }
        groups = self.graph.get_all_groups(root_module_types=roots)
        families = [self._family(group) for group in groups if group[0].dep.target.module not in attention]
        order = {name: position for position, name in enumerate(self._names.values())}
        return sorted(families, key=lambda family: order[family.root])

    def cut(self, family: Family, units: Sequence[int]) -> None:
        """Remove units from the model; it needs to be traced again afterwards."""
        root = self.model.get_submodule(family.root)
        pruner = self.graph.get_pruner_of_module(root)
        self.graph.get_pruning_group(root, pruner.prune_out_channels, sorted(units)).prune(record_history=False)

    def _family(self, group: Any) -> Family:
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
        role: Role = "passes"
        if node.type in (types.CONV, types.LINEAR):
            reads = handler == self.graph.get_pruner_of_module(module).prune_in_channels
            role = "reads" if reads else "emits"
        elif node.type in (types.EMBED, types.PARAMETER):
            role = "emits"
        name = self.graph._param_to_name[module] if node.type == types.PARAMETER else self._names.get(module, "")
        return Member(name, module, node, role, channels, units)

    def _obstacle(self, member: Member) -> str | None:
        module, types = member.module, self._types
        if member.role != "reads" and (member.node.grad_fn in self._outputs or member.node.type == types.OUTPUT):
            return "it is an output of the model"
        if member.node.type in (types.LN, types.GN, types.MHA, types.LSTM):
            return f"{member.name!r} ({type(module).__name__}) mixes its channels"
        if not member.name or isinstance(module, nn.Parameter):
            return None
        if isinstance(module, _ConvNd) and module.groups > 1 and not _is_depthwise(module):
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


def _is_depthwise(module: _ConvNd) -> bool:
    return module.groups == module.out_channels == module.in_channels


def output_axis(module: Any) -> int:
    """The axis of the weight of a layer that runs over its output channels."""
    return 1 if isinstance(module, (nn.Embedding, _ConvTransposeNd)) else 0


def _differentiable(outputs: Any) -> list[Tensor]:
    """The tensors among the outputs that depend on the parameters."""
    found = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
    if not found:
        raise CompactionError("the model cannot be traced: no output depends on its parameters")
    return found


def _shared_parameters(model: nn.Module) -> set[Tensor]:
    counts = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return {p for p, count in counts.items() if count > 1}
