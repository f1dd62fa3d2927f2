"""What a compacted model was before, noted on it for `save_compact`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

_NOTE = "_proxmo_origin"


@dataclass
class Origin:
    """What `compact` changed in a model besides the values of its tensors."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes that its parameters and buffers had, by name; empty if unknown."""
    attributes: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each module the numbers that were set, such as ``num_heads``."""

    @classmethod
    def of(cls, model: nn.Module) -> Origin:
        """Return what was noted on a model, or nothing."""
        noted = model.__dict__.get(_NOTE)
        return noted if isinstance(noted, Origin) else cls()

    def note_on(self, model: nn.Module) -> None:
        model.__dict__[_NOTE] = self


def note_origin(small: nn.Module, model: nn.Module, changes: dict[tuple[str, str], tuple[float, float]]) -> None:
    """Note on a compacted model what it was: the model, or what that was if it had been compacted before."""
    before = Origin.of(model)
    attributes = {name: dict(numbers) for name, numbers in before.attributes.items()}
    for (name, path), (_, new) in changes.items():
        attributes.setdefault(name, {})[path] = new
    Origin(before.shapes or tensor_shapes(model), attributes).note_on(small)


def tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the state of a model."""
    state = model.state_dict(keep_vars=True)
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
