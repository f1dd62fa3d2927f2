"""One call of an operator, as the rules see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from proxmo.compaction.labels import Facts, Operation, tensors_in
from proxmo.compaction.splits import Splits


@dataclass
class Call:
    """An operator with its arguments and results."""

    func: Any
    """The operator, as seen by ``__torch_dispatch__``."""
    arguments: dict[str, Any]
    """Its arguments by name, defaults included."""
    results: list[Tensor]
    operation: Operation
    """Where rules record what they find."""
    facts_of: Callable[[Tensor], Facts]
    splits: Splits
    module: nn.Module | None
    """The innermost module that runs."""

    @property
    def name(self) -> str:
        """The name of the operator, without namespace and the underscore of in-place variants."""
        return operator_name(self.func)

    def facts(self, argument: str) -> Facts:
        """Return the facts of a tensor argument."""
        return self.facts_of(self.arguments[argument])

    def optional_facts(self, argument: str) -> Facts | None:
        value = self.arguments.get(argument)
        return self.facts_of(value) if isinstance(value, Tensor) else None

    def operands(self) -> list[Facts]:
        """Return the facts of all tensor arguments, in order."""
        return [self.facts_of(tensor) for tensor in tensors_in(list(self.arguments.values()))]


def operator_name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name.rstrip("_")


def bind_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by the names in its schema."""
    bound = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound
