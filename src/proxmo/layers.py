"""Parameter groups of a model: a penalty on the weights of its layers, none on biases and norms."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from proxmo.penalties.base import Penalty
from proxmo.penalties.kinds import Grouped
from proxmo.penalties.trimmed import Trimmed

AnyPenalty = TypeVar("AnyPenalty", bound=Penalty)
PENALISED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
# The second axis of their weights runs over output units; in other layers it is the first.
_UNITS_SECOND = (nn.Embedding, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer: a list that prints as a table.

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
            for name, p in _named(group):
                shape = "not yet known" if is_lazy(p) else str(tuple(p.shape))
                rows.append((name, shape, _penalty_cell(group["penalty"], p)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def on(self, model: nn.Module) -> ParamGroups:
        """Return the same groups with the parameters of the same names in ``model``.

        Use it after ``fully_shard``, which replaces the parameters of a model, or for a copy of the model.

        >>> import copy, proxmo
        >>> from torch import nn
        >>> model = nn.Linear(2, 3)
        >>> twin = copy.deepcopy(model)
        >>> groups = param_groups(model, proxmo.L1(0.1)).on(twin)
        >>> groups[0]["params"][0][1] is twin.weight
        True
        """
        by_name = dict(model.named_parameters(remove_duplicate=False))
        groups = []
        for group in self:
            named = [(name, by_name.get(name), p) for name, p in _named(group)]
            for name, new, p in named:
                if new is None or (not is_lazy(p) and new.shape != p.shape):
                    wanted = "a parameter" if is_lazy(p) else f"a parameter of shape {tuple(p.shape)}"
                    got = "none" if new is None else f"one of shape {tuple(new.shape)}"
                    raise ValueError(f"model must have {wanted} {name!r}, got {got}")
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [(name, new) for name, new, _ in named], **options})
        return ParamGroups(groups, self.notes)


def _named(group: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Return pairs of name and parameter, also after an optimizer moved the names to ``"param_names"``."""
    named: list[tuple[str, Tensor]] = group["params"]
    return zip(group["param_names"], group["params"], strict=True) if "param_names" in group else named


def _penalty_cell(penalty: Penalty | None, p: Tensor) -> str:
    if penalty is None:
        return "none"
    is_frozen = isinstance(p, nn.Parameter) and not p.requires_grad
    return f"{penalty}, not applied while frozen" if is_frozen else str(penalty)


def param_groups(
    model: nn.Module,
    penalty: Penalty,
    *,
    on: tuple[type[nn.Module], ...] = PENALISED,
    exclude: Sequence[str] = (),
    per_layer: Mapping[str, float] | None = None,
) -> ParamGroups:
    """Return parameter groups for an optimizer: the weights of layers with a penalty, all other parameters without.

    ``dim=0`` of a penalty means the output units of a layer (neurons or channels). It becomes the axis of the weight
    that indexes them: the first for linear layers and convolutions, the second for embeddings (whose rows are tokens)
    and transposed convolutions. Any other ``dim`` is used as it is. A weight shared by several layers appears once,
    penalised as in the first of them. A frozen weight is in the group of its penalty, which applies once it is trained.

    The result prints as a table. Notes below it name layers without a penalty because their weight is computed from
    other parameters (``weight_norm`` and other parametrizations), and the last layer if a group penalty acts on its
    output units, which may be the outputs of the model.

    Args:
        model: the model.
        penalty: ψ for each of the weights.
        on: the classes of layers whose ``weight`` is penalised.
        exclude: names of parameters or modules without a penalty; a module includes all its parameters, and ``*``
            matches anything, as in file names.
        per_layer: strengths that replace the one of ``penalty``, by the name of a layer or of a module that contains
            it; ``*`` as in ``exclude``. The first match counts.

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
    >>> print(*param_groups(model, proxmo.GroupLInf(0.1)).notes)
    penalised: 3: its units may be outputs of the model, such as classes; exclude=["3"] leaves it alone
    """
    _check_arguments(model, penalty, on, exclude, per_layer)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    layers = {name: module for name, module in modules.items() if isinstance(module, tuple(on))}
    if not layers:
        raise ValueError(
            f"on must name classes of layers that the model has, got {tuple(kind.__name__ for kind in on)}"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    check_patterns("exclude", exclude, [*modules, *names])
    check_patterns("per_layer", per_layer or {}, with_parents(layers))
    notes = _notes_on_computed_weights(layers, exclude)
    penalties = _penalty_of_each_weight(layers, penalty, per_layer or {})
    for name, p in model.named_parameters(remove_duplicate=False):
        if matches(name, exclude):
            penalties.pop(p, None)
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        wanted = penalties.get(p)
        group = next((group for group in groups if group["penalty"] == wanted), None)
        if group is None:
            group = {"params": [], "penalty": wanted}
            groups.append(group)
        group["params"].append((name, p))
    notes += _notes_on_outputs(layers, penalty, penalties)
    return ParamGroups(groups, notes)


def _check_arguments(model: Any, penalty: Any, on: Any, exclude: Any, per_layer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be a proxmo.Penalty, got {penalty!r}")
    if not isinstance(on, (tuple, list)) or not all(isinstance(kind, type) for kind in on):
        raise TypeError(f"on must be a tuple of classes of layers, got {on!r}")
    check_selection(penalty, exclude, per_layer)


def check_selection(penalty: Penalty, exclude: Any, per_layer: Any) -> None:
    """Raise if ``exclude`` and ``per_layer`` are not of the types that `param_groups` and `unit_groups` take."""
    if not isinstance(exclude, (tuple, list)) or not all(isinstance(name, str) for name in exclude):
        raise TypeError(f"exclude must be a sequence of names, got {exclude!r}")
    if per_layer is not None and not isinstance(per_layer, Mapping):
        raise TypeError(f"per_layer must be a dictionary from names to strengths, got {per_layer!r}")
    if per_layer and not hasattr(_untrimmed(penalty), "strength"):
        raise TypeError(f"per_layer sets a strength, which {penalty} does not have")


def _own_weight(layer: nn.Module) -> nn.Parameter | None:
    return dict(layer.named_parameters(recurse=False)).get("weight")


def _penalty_of_each_weight(
    layers: Mapping[str, nn.Module], penalty: Penalty, strengths: Mapping[str, float]
) -> dict[Tensor, Penalty]:
    """Return the penalty of each weight; for a shared one, ``dim`` fits its first layer and any layer's name counts."""
    names_of: dict[Tensor, list[str]] = {}
    for name, layer in layers.items():
        if (own := _own_weight(layer)) is not None:
            names_of.setdefault(own, []).append(name)
    found: dict[Tensor, Penalty] = {}
    for weight, names in names_of.items():
        matching = [s for pattern, s in strengths.items() if any(matches(name, [pattern]) for name in names)]
        changes: dict[str, Any] = {"strength": matching[0]} if matching else {}
        if getattr(_untrimmed(penalty), "dim", None) == 0:
            changes["dim"] = _unit_axis(layers[names[0]])
        found[weight] = with_fields(penalty, **changes)
    return found


def with_fields(penalty: AnyPenalty, **changes: Any) -> AnyPenalty:
    """Return a copy of a penalty with other fields, or of a trimmed one with other fields of what it trims."""
    if isinstance(penalty, Trimmed):
        return dataclasses.replace(penalty, penalty=dataclasses.replace(penalty.penalty, **changes))
    return dataclasses.replace(penalty, **changes)


def _untrimmed(penalty: Penalty | None) -> Penalty | None:
    return penalty.penalty if isinstance(penalty, Trimmed) else penalty


def _unit_axis(layer: nn.Module) -> int:
    """Return the axis of the weight that runs over the output units."""
    return 1 if isinstance(layer, _UNITS_SECOND) else 0


def _notes_on_computed_weights(layers: Mapping[str, nn.Module], exclude: Sequence[str]) -> list[str]:
    """Name the layers whose weight is computed from other parameters; raise if no other layers are left to penalise."""
    wanted = {name: layer for name, layer in layers.items() if not matches(name, exclude)}
    computed = [name for name, layer in wanted.items() if _has_computed_weight(layer)]
    if computed and len(computed) == len(wanted):
        raise ValueError(
            "model must have layers whose weight is a parameter, got only weights computed from other parameters; "
            "remove their parametrizations first"
        )
    return [
        f"not penalised: {name}: its weight is computed from other parameters; remove its parametrization first"
        for name in computed
    ]


def _has_computed_weight(layer: nn.Module) -> bool:
    # A parametrization makes the weight a property of the class, not read here: spectral norm iterates when it is read.
    # Pruning, and the norms before parametrizations, make it a plain tensor.
    is_property = isinstance(getattr(type(layer), "weight", None), property)
    return is_property or isinstance(vars(layer).get("weight"), Tensor)


def _notes_on_outputs(
    layers: Mapping[str, nn.Module], penalty: Penalty, penalties: Mapping[Tensor, Penalty]
) -> list[str]:
    """Name the last layer if it has a group penalty on its output units."""
    if not penalty.takes_units() or penalty.separable:
        return []
    name, layer = list(layers.items())[-1]
    weight = _own_weight(layer)
    of_weight = None if weight is None else _untrimmed(penalties.get(weight))
    # The groups of a weight shared with an embedding are not the output units of this layer.
    by_units = isinstance(of_weight, Grouped) and of_weight.dim == _unit_axis(layer)
    if not by_units or not name:  # without a name, the caller chose this one layer
        return []
    return [
        f'penalised: {name}: its units may be outputs of the model, such as classes; exclude=["{name}"] leaves it alone'
    ]


def with_parents(names: Iterable[str]) -> list[str]:
    """Return the names of layers or parameters and of all modules that contain them."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        found.update(dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1)))
    return list(found)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name or that of a module that contains it."""
    return any(fnmatchcase(parent, pattern) for parent in with_parents([name]) for pattern in patterns)


def check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise if a pattern matches none of the names."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or [name for name in names if name][:10]
            raise ValueError(f"{argument} must match names of the model, such as {near}, got {pattern!r}")
