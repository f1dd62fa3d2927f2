"""The options of a parameter group: which there are, what they take, and whether the penalty fits the parameters."""

from __future__ import annotations

import difflib
import functools
import inspect
from math import prod
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from proxmo import checks, shards
from proxmo.optim.units import units_in
from proxmo.penalties.base import Penalty

Group: TypeAlias = dict[str, Any]
Nonfinite = Literal["propagate", "raise", "skip"]
NONFINITE = get_args(Nonfinite)
# Fields of penalties that are easily taken for options.
_FIELDS_OF_PENALTIES = ("strength", "dim", "radius")


class Options(TypedDict, total=False):
    """The options that all methods share, besides ``lr`` and ``penalty``."""

    maximize: bool
    foreach: bool | None
    nonfinite: Nonfinite


def check_keys(group: Group, defaults: Group) -> None:
    """Raise if a group has an option of another optimizer, or a misspelt one, which would be ignored silently.

    Other keys are allowed, as in torch: schedulers keep their own numbers there.
    """
    for key in group.keys() - defaults.keys() - {"params", "param_names"}:
        value = group[key]
        if key == "weight_decay" and value:
            raise ValueError(
                f"weight_decay is not an option of a parameter group, got {value!r}; take the penalty "
                f"SquaredL2({value!r}), which is weight decay, or ElasticNet, which adds it to an ℓ1 penalty"
            )
        if key == "dampening":
            if value != group.get("momentum"):
                raise ValueError(
                    f"dampening must equal momentum = {group.get('momentum')!r}, since momentum is an average of "
                    f"gradients here, got {value!r}; leave it out"
                )
            continue
        if key in _FIELDS_OF_PENALTIES:
            raise ValueError(
                f"{key!r} is not an option of a parameter group but a field of its penalty, as in L1(strength=0.1)"
            )
        meant = difflib.get_close_matches(key, defaults, n=1, cutoff=0.85)
        if meant or any(isinstance(v, Penalty) for v in (value if isinstance(value, (list, tuple)) else [value])):
            raise ValueError(
                f"{key!r} is not an option of a parameter group; did you mean {(meant or ['penalty'])[0]!r}?"
            )
        neutral = value is None or (isinstance(value, (bool, int, float)) and value == 0)
        if key in _options_of_torch() and not neutral:
            raise ValueError(
                f"{key!r} is an option of another optimizer, got {value!r}; the options here are {', '.join(defaults)}"
            )


@functools.cache
def _options_of_torch() -> frozenset[str]:
    """Return the names of all options of torch's own optimizers."""
    found = [c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)]
    return frozenset(name for c in found for name in inspect.signature(c).parameters) - {"params", "defaults"}


def check_shared_options(group: Group) -> None:
    """Raise if an option that all methods have is out of range."""
    if not isinstance(group["lr"], Tensor):
        checks.nonnegative("lr", group["lr"])
    elif group["lr"].numel() != 1:  # its value is not read: that would synchronise with its device
        raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(group['lr'].shape)}")
    if not isinstance(group["maximize"], bool):
        raise TypeError(f"maximize must be True or False, got {group['maximize']!r}")
    if group["foreach"] not in (None, True, False):
        raise TypeError(f"foreach must be True, False or None, got {group['foreach']!r}")
    if group["nonfinite"] not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {NONFINITE}, got {group['nonfinite']!r}")
    if group["penalty"] is not None and not isinstance(group["penalty"], Penalty):
        raise TypeError(f"penalty must be a proxmo.Penalty or None, got {group['penalty']!r}")
    check_fit(group, group["penalty"])


def check_betas(betas: Any) -> None:
    """Raise if the weights of two averages are not what they must be."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        if not 0 <= checks.number("betas", beta, takes="two numbers in [0, 1)") < 1:
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")


def check_fit(group: Group, penalty: Penalty | None) -> None:
    """Raise if the penalty does not fit the parameters of the group."""
    if penalty is None:
        return
    if group["units"] is not None:
        if not penalty.takes_units():
            raise ValueError(
                f"penalty of a parameter group with units must be a group penalty with dim=0, got {penalty}"
            )
    elif penalty.separable and type(penalty).check is Penalty.check:
        return
    for index, p in enumerate(group["params"]):
        try:
            if group["units"] is None and not is_lazy(p):
                penalty.check(p)
            if not penalty.separable and is_flattened(p):
                raise ValueError(
                    "FullyShardedDataParallel has flattened it, so that its axes are lost; shard the model with "
                    "torch.distributed.fsdp.fully_shard instead"
                )
        except ValueError as error:
            raise ValueError(f"{penalty} does not fit parameter {_name(group, index)!r}: {error}") from error
    if (penalty.joint or group["units"] is not None) and not any(map(is_lazy, group["params"])):
        counts = _count_blocks(group, penalty)
        for count in [sum(counts)] if penalty.joint else counts:
            penalty.check_blocks(count)


def _count_blocks(group: Group, penalty: Penalty) -> list[int]:
    """Return the number of blocks of each tensor, or of units of each family."""
    if group["units"] is not None:
        return [units_in(family, group["params"]) for family in group["units"]]
    return [prod(penalty.block_shape(p)) for p in group["params"]]


def check_parameters(group: Group) -> None:
    """Raise if a parameter is no longer that of the model, so that steps would move nothing."""
    for index, p in enumerate(group["params"]):
        if shards.was_replaced(p):
            raise ValueError(
                f"params must be those of the model, got {_name(group, index)!r}, which fully_shard has replaced; make "
                "the optimizer after fully_shard, from param_groups(...).on(model) if the groups were made before"
            )


def _name(group: Group, index: int) -> str | int:
    name: str | int = group["param_names"][index] if "param_names" in group else index
    return name


def is_flattened(p: Tensor) -> bool:
    """Whether a parameter is a flat one of FSDP1, or its flattened local shard."""
    return bool(getattr(p, "_fsdp_flattened", False))


def is_frozen(p: Tensor) -> bool:
    """Whether a parameter is not trained."""
    return isinstance(p, Parameter) and not p.requires_grad
