"""Save and load compacted models as safetensors files, which hold tensors and no code."""

from __future__ import annotations

import copy
import json
import os
from operator import le
from pathlib import Path

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from proxmo.compaction.attention import PrunedMultiheadAttention, replace_attention
from proxmo.compaction.attributes import set_number
from proxmo.compaction.errors import require_package
from proxmo.compaction.example_inputs import isolated_torch_state
from proxmo.compaction.layer_sizes import update_size_attributes
from proxmo.compaction.origin import Origin, tensor_shapes
from proxmo.files import written_whole

_FORMAT = "proxmo-compact-1"


def save_compact(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save a model compacted by `compact` to a safetensors file, for `load_compact`.

    The file contains all parameters and buffers by name, the sizes of attention layers whose heads were removed, and
    the numbers in other modules, such as ``num_heads``, that `compact` set. It is written atomically.

    Args:
        model: the model.
        path: path of the file.

    >>> import tempfile
    >>> from torch import nn
    >>> path = Path(tempfile.mkdtemp()) / "small.safetensors"
    >>> save_compact(nn.Linear(2, 1), path)
    >>> load_compact(nn.Linear(2, 3), path)
    Linear(in_features=2, out_features=1, bias=True)
    """
    require_package("safetensors")
    from safetensors.torch import save_file

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"model must have only tensors in its state_dict, got {type(value).__name__} for {name!r}")
    heads = {
        name: [m.num_heads, m.head_dim] for name, m in model.named_modules() if isinstance(m, PrunedMultiheadAttention)
    }
    first_names: dict[int, str] = {}  # tied tensors are written once
    for name, value in state.items():
        first_names.setdefault(id(value), name)
    tensors = {name: state[name].detach().contiguous() for name in first_names.values()}
    origin = Origin.of(model)
    metadata = {
        "format": _FORMAT,
        "heads": json.dumps(heads),
        "shapes": json.dumps(origin.shapes),
        "attributes": json.dumps(origin.attributes),
    }
    with written_whole(Path(path)) as temporary:
        save_file(tensors, temporary, metadata)


@isolated_torch_state()
def load_compact(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a model saved by `save_compact`, given a model of the original size.

    Args:
        model: a model with the same architecture as the one that was compacted. Its values do not matter, and it is
            not modified.
        path: path of the file.

    Returns:
        A new model with the saved sizes and values, in the training or evaluation mode of ``model``.

    >>> load_compact(nn.Linear(2, 3), "missing.safetensors")
    Traceback (most recent call last):
      ...
    FileNotFoundError: No such file or directory: missing.safetensors
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    tensors, heads, origin = _read_file(Path(path))
    _check_original_shapes(model, origin, path)
    loaded = copy.deepcopy(model)
    for name, (num_heads, head_dim) in heads.items():
        attention = _submodule(loaded, name, path)
        if not isinstance(attention, nn.MultiheadAttention):
            raise ValueError(f"{path} needs nn.MultiheadAttention for {name!r}, got {type(attention).__name__}")
        replace_attention(loaded, name, PrunedMultiheadAttention.like(attention, num_heads, head_dim))
    _check_names(loaded, tensors, path)
    replaced: dict[Tensor, Tensor] = {}
    for name, value in tensors.items():
        module_name, _, attribute = name.rpartition(".")
        module = _submodule(loaded, module_name, path)
        old = getattr(module, attribute)
        if isinstance(old, Tensor) and not _may_be_pruned(old, value):
            raise ValueError(
                f"{path} has shape {tuple(value.shape)} for {name!r}, incompatible with {tuple(old.shape)} in the model"
            )
        new = _replacement(value, old, module)
        setattr(module, attribute, new)
        if isinstance(old, Tensor):
            replaced[old] = new
    for module in loaded.modules():
        for attribute, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old in replaced:  # tied to a parameter in the file
                setattr(module, attribute, replaced[old])
        update_size_attributes(module)
        widths = {len(x) for x in _output_channel_tensors(module)}
        if len(widths) > 1:
            raise ValueError(f"{path} has inconsistent sizes for a {type(module).__name__}: {widths}")
    for name, numbers in origin.attributes.items():
        for attribute, number in numbers.items():
            _set_attribute(_submodule(loaded, name, path), name, attribute, number, path)
    origin.note_on(loaded)
    return loaded


def _check_original_shapes(model: nn.Module, origin: Origin, path: str | os.PathLike[str]) -> None:
    """Raise if the model does not have the size that the saved one had before it was compacted."""
    shapes = tensor_shapes(model)
    for name, shape in origin.shapes.items():
        if name in shapes and shapes[name] != shape:
            raise ValueError(
                f"{path} was saved from a model whose {name!r} had shape {shape} before it was compacted, got a model "
                f"with {shapes[name]}"
            )


def _set_attribute(module: nn.Module, name: str, attribute: str, number: float, path: str | os.PathLike[str]) -> None:
    """Set a number of a module; raise if the module has none of that name."""
    value: object = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    unset_eps = value is None and isinstance(module, nn.RMSNorm) and attribute == "eps"
    if type(value) is not type(number) and not unset_eps:
        raise ValueError(
            f"{path} sets {attribute!r} of {name!r} to {number}, which is {type(value).__name__} in the model"
        )
    set_number(module, attribute, number)


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]], Origin]:
    require_package("safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by save_compact: its format is {metadata.get('format')!r}")
    try:
        heads = {name: (int(count), int(size)) for name, (count, size) in json.loads(metadata["heads"]).items()}
        for name, (count, size) in heads.items():
            if count < 1 or size < 1 or len(tensors[f"{name}.q_proj.weight"]) != count * size:
                raise ValueError(f"{count} heads of size {size} do not fit {name!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: invalid attention heads: {error}") from error
    try:
        shapes = {name: tuple(map(int, shape)) for name, shape in json.loads(metadata.get("shapes", "{}")).items()}
        attributes = {
            name: {str(attribute): _number(number) for attribute, number in numbers.items()}
            for name, numbers in json.loads(metadata.get("attributes", "{}")).items()
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: invalid sizes: {error}") from error
    return tensors, heads, Origin(shapes, attributes)


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value  # type: ignore[return-value]


def _submodule(model: nn.Module, name: str, path: str | os.PathLike[str]) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"{path} needs a module {name!r}, which the model does not have") from error


def _check_names(model: nn.Module, tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Raise if the model and the file do not have the same tensors."""
    state = model.state_dict(keep_vars=True)
    saved = {id(state[name]) for name in tensors if name in state}
    missing = [name for name, value in state.items() if id(value) not in saved]
    unexpected = [name for name in tensors if name not in state and not _may_be_added_bias(model, name)]
    if missing or unexpected:
        raise ValueError(f"{path} does not match the model: missing tensors {missing}, unexpected tensors {unexpected}")


def _may_be_added_bias(model: nn.Module, name: str) -> bool:
    """Return whether it is the bias of a layer without one, which `compact` adds to fold in a constant."""
    module_name, _, attribute = name.rpartition(".")
    layer = dict(model.named_modules()).get(module_name)
    return attribute == "bias" and isinstance(layer, (nn.Linear, _ConvNd)) and layer.bias is None


def _may_be_pruned(old: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` may be a pruned version of ``old``."""
    same_kind = old.is_floating_point() == value.is_floating_point()
    return same_kind and old.dim() == value.dim() and all(map(le, value.shape, old.shape))


def _output_channel_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a layer whose first axis indexes its output channels."""
    if isinstance(module, (nn.Linear, _ConvNd)) and not isinstance(module, _ConvTransposeNd):
        return [x for x in (module.weight, module.bias) if x is not None]
    if isinstance(module, _NormBase):
        return [x for x in (module.weight, module.bias, module.running_mean, module.running_var) if x is not None]
    return []


def _replacement(value: Tensor, old: Tensor | None, module: nn.Module) -> Tensor:
    """Return the saved value on the device of the old one, as a parameter if that is one."""
    if old is None:
        return nn.Parameter(value.to(next(module.parameters()).device))
    moved = value.to(old.device)
    return nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved
