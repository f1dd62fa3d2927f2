"""Parameter groups of a model, so that its weights are penalised layer by layer and its biases and norms are not."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from proxmo.penalties.base import Penalty

PENALISED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
# the axis of a weight that runs over output units, where it is not the first
_UNITS_LAST = (nn.Embedding, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer, a list that prints as a table.

    Args:
        groups: parameter groups with named parameters.
        notes: lines to print below the table.

    >>> import proxmo
    >>> from torch import nn
    >>> print(param_groups(nn.Linear(2, 3), proxmo.L1(0.1)))
    parameter  shape   penalty
    weight     (3, 2)  L1(strength=0.1)
    bias       (3,)    none
    """

    def __init__(self, groups: Iterable[dict[str, Any]], notes: Sequence[str] = ()) -> None:
        super().__init__(groups)
        self.notes = list(notes)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "penalty")]
        for group in self:
            penalty = "none" if group["penalty"] is None else str(group["penalty"])
            for name, p in _named(group):
                rows.append((name, "not yet known" if is_lazy(p) else str(tuple(p.shape)), penalty))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def on(self, model: nn.Module) -> ParamGroups:
        """The same groups with the parameters that ``model`` has by these names.

        For a model that has other parameters by now, as after ``fully_shard``, or for a copy of it.

        >>> import copy, proxmo
        >>> from torch import nn
        >>> model = nn.Linear(2, 3)
        >>> twin = copy.deepcopy(model)
        >>> groups = param_groups(model, proxmo.L1(0.1)).on(twin)
        >>> groups[0]["params"][0][1] is twin.weight
        True
        """
        present = dict(model.named_parameters(remove_duplicate=False))
        groups = []
        for group in self:
            named = [(name, present.get(name), p) for name, p in _named(group)]
            for name, there, p in named:
                if there is None or (not is_lazy(p) and there.shape != p.shape):
                    wanted = "a parameter" if is_lazy(p) else f"a parameter of shape {tuple(p.shape)}"
                    got = "none" if there is None else f"one of shape {tuple(there.shape)}"
                    raise ValueError(f"model must have {wanted} {name!r}, got {got}")
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [(name, there) for name, there, _ in named], **options})
        return ParamGroups(groups, self.notes)


def _named(group: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Names and parameters; an optimizer that was given the group has put the names elsewhere."""
    named: list[tuple[str, Tensor]] = group["params"]
    return zip(group["param_names"], group["params"], strict=True) if "param_names" in group else named


def param_groups(
    model: nn.Module,
    penalty: Penalty,
    *,
    on: tuple[type[nn.Module], ...] = PENALISED,
    exclude: Sequence[str] = (),
    per_layer: Mapping[str, float] | None = None,
) -> ParamGroups:
    """The parameters of a model as groups for an optimizer: weights of layers with a penalty, all others without.

    ``dim=0`` of a penalty stands for the output units of a layer, neurons or channels, and becomes the axis that has
    them: the first for linear layers and convolutions, the second for embeddings (whose rows are the tokens) and
    transposed convolutions. Every other ``dim`` is taken as it is. A weight that several layers share is in the groups
    once, penalised as in the first of them.

    Args:
        model: the model.
        penalty: ψ for each of the weights.
        on: the classes of layers whose ``weight`` is penalised.
        exclude: names of parameters, or of modules with all in them, without a penalty; ``*`` stands for anything, as
            in file names.
        per_layer: the strength for layers of these names, or in these modules, in place of that of ``penalty``; the
            first that matches.

    >>> import proxmo
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> groups = param_groups(model, proxmo.GroupLInf(0.1), exclude=["3"], per_layer={"1": 0.5})
    >>> groups
    parameter  shape    penalty
    0.weight   (50, 8)  GroupLInf(strength=0.1, dim=1)
    1.weight   (4, 8)   GroupLInf(strength=0.5, dim=0)
    1.bias     (4,)     none
    2.weight   (4,)     none
    2.bias     (4,)     none
    3.weight   (2, 4)   none
    3.bias     (2,)     none
    >>> optimizer = proxmo.ProxSGD(groups, lr=0.1)
    """
    _check_arguments(model, penalty, on, exclude, per_layer)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    layers = {name: module for name, module in modules.items() if isinstance(module, tuple(on))}
    if not layers:
        raise ValueError(
            f"on must name classes of layers that the model has, got {tuple(kind.__name__ for kind in on)}"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    _check_patterns("exclude", exclude, [*modules, *names])
    _check_patterns("per_layer", per_layer or {}, _with_holders(layers))
    penalties = _weights_with_penalty(layers, penalty, per_layer or {})
    for name, p in model.named_parameters(remove_duplicate=False):
        if _matches(name, exclude):
            penalties.pop(p, None)
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        wanted = penalties.get(p)
        group = next((group for group in groups if group["penalty"] == wanted), None)
        if group is None:
            group = {"params": [], "penalty": wanted}
            groups.append(group)
        group["params"].append((name, p))
    return ParamGroups(groups)


def _check_arguments(model: Any, penalty: Any, on: Any, exclude: Any, per_layer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be a proxmo.Penalty, got {penalty!r}")
    if not isinstance(on, (tuple, list)) or not all(isinstance(kind, type) for kind in on):
        raise TypeError(f"on must be a tuple of classes of layers, got {on!r}")
    if not isinstance(exclude, (tuple, list)) or not all(isinstance(name, str) for name in exclude):
        raise TypeError(f"exclude must be a sequence of names, got {exclude!r}")
    if per_layer is not None and not isinstance(per_layer, Mapping):
        raise TypeError(f"per_layer must be a dictionary from names to strengths, got {per_layer!r}")
    if per_layer and not hasattr(penalty, "strength"):
        raise TypeError(f"per_layer sets a strength, which {penalty} does not have")


def _weights_with_penalty(
    layers: Mapping[str, nn.Module], penalty: Penalty, strengths: Mapping[str, float]
) -> dict[Tensor, Penalty]:
    """The penalty of each weight; that of one which several layers share is made for the first, by the names of all."""
    holders: dict[Tensor, list[str]] = {}
    for name, layer in layers.items():
        for own, p in layer.named_parameters(recurse=False):
            if own == "weight":
                holders.setdefault(p, []).append(name)
    found: dict[Tensor, Penalty] = {}
    for weight, names in holders.items():
        matching = [s for pattern, s in strengths.items() if any(_matches(name, [pattern]) for name in names)]
        changes: dict[str, Any] = {"strength": matching[0]} if matching else {}
        if isinstance(layers[names[0]], _UNITS_LAST) and getattr(penalty, "dim", None) == 0:
            changes["dim"] = 1
        found[weight] = dataclasses.replace(penalty, **changes)
    return found


def _with_holders(names: Iterable[str]) -> list[str]:
    """Names of layers, or of parameters, and of all modules that they are in."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found.update(dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1)))
    return list(found)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name, or that of a module that it is in, matches."""
    return any(fnmatchcase(holder, pattern) for holder in _with_holders([name]) for pattern in patterns)


def _check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or [name for name in names if name][:10]
            raise ValueError(f"{argument} must match names of the model, such as {near}, got {pattern!r}")
