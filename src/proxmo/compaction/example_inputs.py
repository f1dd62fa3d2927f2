"""Example inputs, and the torch settings under which models run on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ExampleInputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class ModelInputs:
    """Positional and keyword arguments for a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def from_example(cls, example: ExampleInputs) -> ModelInputs:
        if isinstance(example, Tensor):
            return cls((example,), {})
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, (tuple, list)):
            return cls(tuple(example), {})
        raise TypeError(
            "example_inputs must be a tensor, a tuple of arguments or a dictionary of keyword arguments, got "
            f"{type(example).__name__}"
        )

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    @torch.no_grad()
    def output_tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the tensors in the output of the model, without gradients."""
        return output_tensors(self.call(model))

    def with_noise(self) -> ModelInputs:
        """Return inputs with noise of the size of each float tensor added, and integers shuffled: another test point.

        So an example of zeros, of equal tokens or of one sample does not hide that a smaller model differs.
        """
        generator = torch.Generator().manual_seed(0)

        def change(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.is_complex() or not x.numel():
                return x
            if not x.is_floating_point():
                return x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].reshape(x.shape)
            finite = x[x.isfinite()]
            size = float(finite.std()) if finite.numel() > 1 else 0.0
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
            return x + (size or 1.0) * noise

        return ModelInputs(*pytree.tree_map(change, (self.args, self.kwargs)))


def output_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors in an output: alone, in tuples, lists, dictionaries and dataclasses.

    Other objects are not searched. So the keys and values in a cache of Hugging Face do not count as outputs; see
    `tensors_in_objects`.
    """
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [tensor for item in outputs.values() for tensor in output_tensors(item)]
    if isinstance(outputs, (tuple, list)):
        return [tensor for item in outputs for tensor in output_tensors(item)]
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return [tensor for item in fields(outputs) for tensor in output_tensors(getattr(outputs, item.name))]
    return []


def tensors_in_objects(outputs: Any) -> dict[str, list[Tensor]]:
    """Return the tensors in other objects of an output, by the class of the outermost object."""
    found: dict[str, list[Tensor]] = {}
    seen: set[int] = set()

    def search(item: Any, owner: str | None) -> None:
        if isinstance(item, Tensor):
            if owner is not None:
                found.setdefault(owner, []).append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                inner = list(item.values())
            elif isinstance(item, (tuple, list)):
                inner = list(item)
            elif isinstance(item, (nn.Module, type)) or not hasattr(item, "__dict__"):
                inner = []
            else:
                inner = list(vars(item).values())
                owner = owner if is_dataclass(item) else owner or type(item).__name__
            for part in inner:
                search(part, owner)

    search(outputs, None)
    return found


@contextmanager
def isolated_torch_state() -> Iterator[None]:
    """Restore the RNG state on exit, and disable fused kernels, which hide the operations of some layers."""
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    mkldnn_enabled = torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)
        torch._C._set_mkldnn_enabled(mkldnn_enabled)
