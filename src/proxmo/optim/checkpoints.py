"""Optimizer checkpoints: penalties as plain data, and what a checkpoint must match to be loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from proxmo import shards
from proxmo.penalties.base import Penalty, widen


def to_plain_data(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Write the penalties and units in a packed state dict as plain data; a post-hook for ``Optimizer.state_dict``."""
    for group in state_dict["param_groups"]:
        if isinstance(group["penalty"], Penalty):
            group["penalty"] = as_plain(group["penalty"])
        if group["units"] is not None:
            group["units"] = [[list(part) for part in family] for family in group["units"]]


def as_plain(penalty: Penalty) -> dict[str, dict[str, Any]]:
    """Return the fields of a penalty under the name of its class.

    The class is a key, so that a distributed checkpoint of another class lacks it, and is refused before it is read.
    """
    fields = {field.name: getattr(penalty, field.name) for field in dataclasses.fields(penalty) if field.init}
    return {type(penalty).__name__: {k: as_plain(v) if isinstance(v, Penalty) else v for k, v in fields.items()}}


def from_plain(penalty: Penalty | None, saved: Any) -> Penalty | None:
    """Return a penalty of the class of ``penalty`` with the saved fields; raise if they do not fit."""
    saved = as_plain(saved) if isinstance(saved, Penalty) else saved  # as a ZeroRedundancyOptimizer saves it
    name = None if penalty is None else type(penalty).__name__
    got = next(iter(saved), None) if isinstance(saved, dict) else saved
    if got != name:
        raise ValueError(f"cannot load a parameter group made with penalty {got} into one with penalty {name}")
    if penalty is None:
        return None
    inner = {name: value for name, value in vars(penalty).items() if isinstance(value, Penalty)}
    fields = {k: from_plain(inner[k], v) if k in inner else v for k, v in saved[name].items()}
    try:
        return type(penalty)(**fields)  # a field that an older version did not have takes its default
    except TypeError as error:
        raise ValueError(f"cannot load penalty {name} from the fields {fields}: {error}") from error


def update_fields(penalty: Penalty, update: Penalty) -> None:
    """Give a penalty the fields of another of its class; the penalty inside a penalty stays the same object, too."""
    for name, value in vars(update).items():
        if isinstance(value, Penalty):
            update_fields(getattr(penalty, name), value)
        else:
            vars(penalty)[name] = value


def restore_precision(optimizer: Optimizer, state_dict: Mapping[str, Any], *keys: str) -> None:
    """Give loaded state of half-precision parameters the saved numbers in float32, where torch has cast them."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, params, strict=True):
        if optimizer.state.get(p) and widen(p).dtype != p.dtype:
            for key in keys:
                saved = state_dict["state"][number][key]
                optimizer.state[p][key] = saved.to(p.device, widen(p).dtype, copy=True)


def check_made_alike(live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise if one side has groups of units and the other not; torch would only say that their sizes differ."""
    there, here = ("unit_groups" if any(g.get("units") for g in groups) else "param_groups" for groups in (saved, live))
    if there != here and all("penalty" in group for group in saved):
        raise ValueError(
            f"cannot load a checkpoint of parameter groups as {there} makes them into those of {here}: their penalties "
            f"act on different groups of weights; make the optimizer with {there}"
        )


def check_loaded_state(
    name: str, state_keys: frozenset[str], broadcast_keys: frozenset[str], state: Mapping[Tensor, Mapping[str, Tensor]]
) -> None:
    """Raise if the loaded state of a parameter is that of another method, sharding or shape."""
    for p, kept in state.items():
        if kept and set(kept) != state_keys:
            raise ValueError(
                f"cannot load the checkpoint of another optimizer into {name}: its state has "
                f"{', '.join(sorted(kept))} in place of {', '.join(sorted(state_keys))}"
            )
        if any(t.dim() and shards.is_sharded(t) != shards.is_sharded(p) for t in kept.values() if p.dim()):
            raise ValueError(
                "cannot load the state of unsharded parameters into sharded ones, or the other way round; "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict can"
            )
        for key, t in kept.items():
            fits = _broadcasts(t, p) if key in broadcast_keys else t.shape == p.shape
            if t.dim() and not fits:
                raise ValueError(
                    f"cannot load state of shape {tuple(t.shape)} for a parameter of shape {tuple(p.shape)}"
                )


def _broadcasts(t: Tensor, p: Tensor) -> bool:
    return t.dim() == p.dim() and all(size in (1, whole) for size, whole in zip(t.shape, p.shape, strict=True))
