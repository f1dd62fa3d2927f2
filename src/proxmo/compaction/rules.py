"""The rule for each operator: a list for those that move, sum or choose elements, and torch's tags for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from proxmo.compaction.calls import Call, operator_name
from proxmo.compaction.channel_rules import CHANNEL_RULES, pooling
from proxmo.compaction.contraction_rules import CONTRACTION_RULES
from proxmo.compaction.index_rules import INDEX_RULES
from proxmo.compaction.labels import FIXED, Facts, without_units
from proxmo.compaction.movement_rules import MOVEMENT_RULES
from proxmo.compaction.pointwise_rules import POINTWISE_RULES, pointwise

Rule = Callable[[Call], list[Facts]]

_RULES: dict[str, Rule] = {
    **MOVEMENT_RULES,
    **POINTWISE_RULES,
    **CONTRACTION_RULES,
    **CHANNEL_RULES,
    **INDEX_RULES,
}
_RANDOM = re.compile("rand|normal|uniform|bernoulli|multinomial|dropout")


def rule_for(func: Any) -> Rule | None:
    """Return the rule for an operator, or ``None`` if there is none."""
    name = operator_name(func)
    if func.namespace not in ("aten", "prims"):  # an operator of somebody else, whatever its name
        return pointwise if torch.Tag.pointwise in func.tags else None
    if name in _RULES:
        return _RULES[name]
    if torch.Tag.pointwise in func.tags:
        return pointwise
    if re.search(r"(pool|upsample).*[123]d", name) and "backward" not in name:
        return pooling
    if re.match("(new_)?(zeros|ones|full|empty)", name):
        return created
    return None


def created(call: Call) -> list[Facts]:
    """A new tensor of one number, as large as what it is combined with needs."""
    like = call.optional_facts("self") if call.name.endswith("_like") else None
    tensor = call.results[0]
    if call.name.removeprefix("new_").startswith("empty"):
        uniform = None
    else:
        uniform = float(tensor.flatten()[0]) if tensor.numel() and not tensor.is_complex() else None
    if like is not None:
        return [Facts(like.labels, (None,) * len(like.labels), False, uniform)]
    labels = tuple(call.splits.new_atoms(size) for size in tensor.shape)
    return [Facts(labels, (None,) * len(labels), False, uniform)]


def not_understood(call: Call) -> list[Facts]:
    """Any other operation: it may mix all that it gets, and depend on all."""
    operands = call.operands()
    for facts in operands:
        for labels in facts.labels:
            call.operation.block(labels, f"{call.name} is not understood")
    random = bool(_RANDOM.search(call.name))
    varies = random or not operands or any(facts.varies for facts in operands)
    return [without_units(tensor.shape, varies=varies, label=FIXED) for tensor in call.results]
