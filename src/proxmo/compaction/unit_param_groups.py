"""Build parameter groups in which a penalty acts on whole removable units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from proxmo.compaction.example_inputs import ExampleInputs, ModelInputs, isolated_torch_state
from proxmo.compaction.unit_families import ParameterSlice, UniformUnits, find_units
from proxmo.layers import ParamGroups, check_patterns, check_selection, matches, with_fields
from proxmo.optim.units import Slice
from proxmo.penalties.base import Penalty
from proxmo.penalties.kinds import Grouped
from proxmo.penalties.trimmed import Trimmed

UnitPenalty: TypeAlias = Grouped | Trimmed


@isolated_torch_state()
def unit_groups(
    model: nn.Module,
    example_inputs: ExampleInputs,
    penalty: UnitPenalty,
    *,
    exclude: Sequence[str] = (),
    per_layer: Mapping[str, float] | None = None,
    balance: bool = True,
) -> ParamGroups:
    """Return parameter groups in which each group of the penalty is one removable unit of the model.

    A unit is a neuron of a linear layer, an output channel of a convolution, an attention head, or a hidden unit of an
    LSTM or GRU, together with its bias and its scale and shift in the normalisation that follows. If layers are added,
    as in residual networks, a unit is the same channel of all of them. If several query heads share one key-value head,
    a unit is that head with its queries. A zero unit adds nothing to the outputs, and `compact` removes it.

    Every layer is tested on a copy of the model. Layers whose units cannot be removed exactly, such as outputs or
    layers followed by a normalisation over channels, get no penalty. Print the result to see them, with the reason.

    With ``balance``, larger units get a larger strength, because otherwise small units vanish long before large ones: a
    neuron is one row of a weight matrix plus its bias, a head has dozens of rows, a channel of added layers has one row
    in each, and rows are initialised with about the same norm. The strength of ``penalty`` is then for units of one
    row. Units of k rows get √k times that (`GroupL2`, and ``group`` of `SparseGroup`) or k times (`GroupLInf`), in a
    separate parameter group. Layers that are concatenated before a normalisation share its parameters, and therefore
    have one strength, for their mean number of rows. A `Trimmed` penalty ranks the units of each parameter group: with
    ``balance``, heads among heads and neurons among neurons.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple of arguments or a dictionary of keyword arguments to call the model with.
        penalty: a group penalty with ``dim=0``, where a group is a unit, or a `Trimmed` one.
        exclude: names of parameters or modules without a penalty; a module includes all its parameters, and ``*``
            matches anything, as in file names. A unit with an excluded part gets no penalty, because it could not
            become zero: if layers are added, excluding one of them excludes all.
        per_layer: strengths that replace the one of ``penalty``, by the name of a layer or of a module that contains
            it; ``*`` as in ``exclude``. The first match counts, for any layer of a unit. Like that of ``penalty``, they
            are for units of one row.
        balance: give larger units a larger strength; ``False`` gives all units the same.

    >>> import proxmo, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> groups = unit_groups(model, torch.randn(2, 3, 3, 3), proxmo.GroupL2(0.1))
    >>> groups
    parameter  shape         penalty
    0.weight   (8, 3, 3, 3)  GroupL2(strength=0.1, dim=0)
    0.bias     (8,)          GroupL2(strength=0.1, dim=0)
    1.weight   (8,)          GroupL2(strength=0.1, dim=0)
    1.bias     (8,)          GroupL2(strength=0.1, dim=0)
    4.weight   (2, 8)        none
    4.bias     (2,)          none
    8 units of 30 weights: 0
    not penalised: 4: it is an output of the model
    >>> optimizer = proxmo.ProxSGD(groups, lr=0.1)

    Attention heads and neurons, with different strengths:

    >>> model = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16)
    >>> groups = unit_groups(model, torch.randn(3, 1, 8), proxmo.GroupL2(0.1))
    >>> for group in groups[:2]:
    ...     print(group["penalty"], [name for name, _ in group["params"]])
    GroupL2(strength=0.3464, dim=0) ['self_attn.in_proj_weight', 'self_attn.in_proj_bias']
    GroupL2(strength=0.1, dim=0) ['linear1.weight', 'linear1.bias']
    >>> print(*groups.notes[:2], sep="\\n")
    2 units of 108 weights in 12 rows: self_attn
    16 units of 9 weights: linear1
    """
    if not isinstance(penalty, (Grouped, Trimmed)) or not penalty.takes_units():
        got = repr(penalty) if isinstance(penalty, (Penalty, int, float)) else type(penalty).__name__
        raise TypeError(f"penalty must be a group penalty with dim=0, such as GroupL2(0.1), got {got}")
    check_selection(penalty, exclude, per_layer)
    modules = [name for name, _ in model.named_modules()]
    check_patterns(
        "exclude", exclude, [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    )
    check_patterns("per_layer", per_layer or {}, modules)
    families, obstacles, branches = find_units(model, ModelInputs.from_example(example_inputs))
    _check_layers_have_units(per_layer or {}, families)
    notes = [f"not penalised: {root}: {reason}" for root, reason in obstacles.items()]
    penalised = []
    for family in families:
        excluded = [name for name in family.parameters if matches(name, exclude)]
        if excluded:
            notes.append(f"not penalised: {family.root}: exclude names {excluded[0]}, which is part of its units")
        else:
            penalised.append(family)
    chosen = []
    for bundle in _bundles(penalised):
        own, rows = _penalty_of(bundle, penalty, per_layer or {}), _mean_rows(bundle) if balance else 1.0
        chosen.append((own.for_larger_groups(rows), rows, bundle))
    return ParamGroups(_param_groups(model, chosen), [*map(_describe, penalised), *notes, *branches])


def _describe(family: UniformUnits) -> str:
    rows = f" in {family.rows} rows" if family.rows > 1 else ""
    return f"{family.number} units of {family.size} weights{rows}: {family.root}"


def _layers(family: UniformUnits) -> list[str]:
    return [name.rpartition(".")[0] for name in family.parameters]


def _check_layers_have_units(patterns: Iterable[str], families: Sequence[UniformUnits]) -> None:
    layers = list(dict.fromkeys(layer for family in families for layer in _layers(family)))
    for pattern in patterns:
        if not any(matches(layer, [pattern]) for layer in layers):
            raise ValueError(f"per_layer must name layers with removable units, such as {layers[:10]}, got {pattern!r}")


def _bundles(families: Sequence[UniformUnits]) -> list[list[UniformUnits]]:
    """Put families that have a parameter in common together: a parameter can only be in one parameter group."""
    bundle_of: dict[str, list[UniformUnits]] = {}
    for family in families:
        touched = {id(bundle): bundle for name in family.parameters if (bundle := bundle_of.get(name))}
        bundle = [*(member for members in touched.values() for member in members), family]
        for member in bundle:
            bundle_of.update(dict.fromkeys(member.parameters, bundle))
    return list({id(bundle): bundle for bundle in bundle_of.values()}.values())


def _penalty_of(bundle: Sequence[UniformUnits], penalty: UnitPenalty, strengths: Mapping[str, float]) -> UnitPenalty:
    """Return the penalty with the strength that ``per_layer`` has for the units, if any."""
    found: dict[float | None, UniformUnits] = {}
    for family in bundle:
        layers = _layers(family)
        matching = [s for pattern, s in strengths.items() if any(matches(layer, [pattern]) for layer in layers)]
        found.setdefault(matching[0] if matching else None, family)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise ValueError(
            f"per_layer must give {first.root!r} and {second.root!r} the same strength, since they have parameters in "
            f"common, got {dict(strengths)}"
        )
    strength = next(iter(found))
    return penalty if strength is None else with_fields(penalty, strength=strength)


def _mean_rows(bundle: Sequence[UniformUnits]) -> float:
    return sum(family.number * family.rows for family in bundle) / sum(family.number for family in bundle)


def _param_groups(
    model: nn.Module, chosen: list[tuple[UnitPenalty, float, list[UniformUnits]]]
) -> list[dict[str, Any]]:
    """Return a parameter group for all units with one penalty and size, and one without a penalty for the rest."""
    named = dict(model.named_parameters())
    rest = dict(named)
    groups: list[dict[str, Any]] = []
    kinds = [kind[:2] for kind in chosen]
    for penalty, rows in [kind for k, kind in enumerate(kinds) if kind not in kinds[:k]]:
        families = [family for *kind, bundle in chosen if kind == [penalty, rows] for family in bundle]
        in_units = list(dict.fromkeys(name for family in families for name in family.parameters))
        positions = {name: position for position, name in enumerate(in_units)}
        units = tuple(tuple(_slice(part, positions, named) for part in family.slices) for family in families)
        groups.append({"params": [(name, rest.pop(name)) for name in in_units], "penalty": penalty, "units": units})
    if rest:
        groups.append({"params": list(rest.items()), "penalty": None})
    return groups


def _slice(part: ParameterSlice, positions: dict[str, int], named: dict[str, nn.Parameter]) -> Slice:
    in_order = tuple((index,) for index in range(named[part.parameter].shape[part.axis]))
    return Slice(positions[part.parameter], part.axis, None if part.indices == in_order else part.indices)
