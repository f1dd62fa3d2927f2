"""The step that all methods share: x ← prox_{lr·ψ}(x − lr·direction).

A method is a subclass that says what the direction is; parameter groups, penalties, checkpoints, schedulers and
precision are handled here, once. Everything is an ordinary `torch.optim.Optimizer`, so whatever works with those works
with these.
"""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.optim.plain import as_plain, from_plain
from proxmo.optim.units import as_units, joined, seen_by_penalty, write_back
from proxmo.penalties.base import Grouped, Penalty, widened

Group: TypeAlias = dict[str, Any]
Nonfinite = Literal["propagate", "raise", "skip"]
NONFINITE = get_args(Nonfinite)


class Sparsity(NamedTuple):
    """How much of a parameter group is exactly zero."""

    zeros: float
    """The share of elements that are zero."""
    groups: float | None
    """The share of the penalty's groups that are entirely zero; ``None`` if the penalty has no groups."""


class Certificate(NamedTuple):
    """What a step to x⁺ = prox(x − lr·direction) proves about the point that it reached."""

    subgradient: Tensor
    """(x − x⁺)/lr − direction, a subgradient of ψ at x⁺: with ∇f(x⁺) it makes a gradient of F, kinks or not."""
    direction: Tensor
    """The estimate of ∇f(x) that the step used."""
    version: int
    """Which writing to the parameter left it at x⁺."""


class ProxOptimizer(Optimizer):
    """The base class of all methods: ``step`` moves each parameter to prox_{lr·ψ}(x − lr·direction).

    Subclasses write ``_directions``; those with options of their own extend ``_check_options``.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        defaults: default options of a parameter group; ``lr``, ``penalty``, ``maximize`` and ``foreach`` among them. A
            group may also have ``units``, from `unit_groups`: groups of the penalty that span several parameters.
            ``nonfinite`` says what to do with gradients that have NaN or inf; by default nothing, as in torch.

    >>> import torch, proxmo
    >>> isinstance(proxmo.ProxSGD([torch.zeros(2)]), proxmo.ProxOptimizer)
    True
    """

    state_keys: ClassVar[frozenset[str]]
    """What the state of a parameter holds, if it has one."""
    certify: bool = False
    """Whether ``step`` keeps its `Certificate` for each parameter, two more copies of them. Not part of the state."""

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, {"units": None, "nonfinite": "propagate", **defaults})
        self._certificates: dict[Tensor, Certificate] = {}

    def certificate_or_none(self, param: Tensor) -> Certificate | None:
        """`certificate`, or ``None`` where there is none that holds."""
        certificate = self._certificates.get(param)
        return certificate if certificate is not None and certificate.version == param._version else None

    def certificate(self, param: Tensor) -> Certificate:
        """What the last step made sure of for this parameter; set ``certify = True`` before it.

        >>> import torch, proxmo
        >>> x = torch.tensor([2.0, 0.1], requires_grad=True)
        >>> optimizer = proxmo.ProxSGD([x], lr=0.5, penalty=proxmo.L1(1.0))
        >>> optimizer.certify = True
        >>> x.grad = torch.zeros(2)
        >>> optimizer.step()
        >>> optimizer.certificate(x).subgradient
        tensor([1.0000, 0.2000])
        """
        if param not in self._certificates:
            raise RuntimeError("no step has left a certificate for this parameter; set certify = True before the step")
        certificate = self._certificates[param]
        if certificate.version != param._version:
            raise RuntimeError(
                "the parameter was written to after its last step, whose certificate no longer holds; gradient_mapping "
                "needs none"
            )
        return certificate

    @abstractmethod
    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """The direction for each of ``params``, which all have a gradient; not to be changed by the caller."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; parameters without a gradient are left alone.

        Args:
            closure: reevaluates the model, calls ``backward`` and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._check_step()
        if self._admits_gradients():
            self._take_step()
        return loss

    def _admits_gradients(self, *others: Mapping[Tensor, Tensor | None]) -> bool:
        """Whether to take a step with these gradients, those of the parameters and others; may raise instead."""
        if all(group["nonfinite"] == "propagate" for group in self.param_groups):
            return True
        verdict, seen = 0, []
        for group in self.param_groups:
            if group["nonfinite"] != "propagate":
                of_params = [(p, g) for p in group["params"] for g in (p.grad, *(other.get(p) for other in others))]
                gradients = [shards.laid_out_like(g, p) for p, g in of_params if g is not None]
                seen += gradients
                if not _all_finite(gradients):
                    verdict = max(verdict, 1 if group["nonfinite"] == "skip" else 2)
        verdict = shards.highest(verdict, seen)  # one for all processes, some of which may have seen nothing bad
        if verdict == 2:
            raise FloatingPointError("a gradient is not finite; parameters and state are as they were")
        return verdict == 0

    def _take_step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                proves = self.certify and not is_zero(group["lr"])
                self._step_group(group, params, self._certificates if proves else None)

    def _step_group(self, group: Group, params: list[Tensor], certificates: dict[Tensor, Certificate] | None) -> None:
        proximal_step(params, self._directions(group, params), group, certificates)

    @torch.no_grad()
    def penalty_value(self) -> Tensor:
        """ψ at the current point, the sum over all parameters, as a 0-d tensor; +inf outside a constraint.

        Where parameters are divided among processes all of them must call it; they get the same number.

        >>> import torch, proxmo
        >>> proxmo.ProxSGD([torch.tensor([1.0, -2.0])], penalty=proxmo.L1(0.5)).penalty_value()
        tensor(1.5000)
        """
        penalised = [group for group in self.param_groups if group["penalty"] is not None]
        seen = [(group["penalty"], x) for group in penalised for x in seen_by_penalty(group["units"], group["params"])]
        values = [penalty.value(x) for penalty, x in seen]
        return sum((value.to(values[0].device) for value in values[1:]), values[0]) if values else torch.zeros(())

    @torch.no_grad()
    def sparsity(self) -> list[Sparsity]:
        """For each parameter group the share of exact zeros, and of groups of its penalty that are entirely zero.

        Where parameters are divided among processes all of them must call it; they get the same numbers.

        >>> import torch, proxmo
        >>> weight = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> proxmo.ProxSGD([weight], penalty=proxmo.GroupL2(0.1)).sparsity()
        [Sparsity(zeros=0.75, groups=0.5)]
        """
        return [_sparsity(group) for group in self.param_groups]

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as for every torch optimizer; refused if its options or penalty do not fit."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_keys(group)
            checks.step("lr", group["lr"])
            group["units"] = as_units(group["units"], group["params"])
            self._check_options(group)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data: a penalty is written as its class name and fields.

        As with ``lr``, what was saved wins: ``load_state_dict`` sets the fields of the penalties that the optimizer has
        (the objects stay the same), and refuses a checkpoint of another penalty class before changing anything.
        """
        state = super().state_dict()
        for group in state["param_groups"]:
            if isinstance(group["penalty"], Penalty):
                group["penalty"] = as_plain(group["penalty"])
            if group["units"] is not None:
                group["units"] = [[list(part) for part in family] for family in group["units"]]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._certificates = {}
        # Called by unpickling, with live penalties, and at the end of `load_state_dict`, with plain ones that update
        # those of the present groups. The plain ones are all checked before anything is changed.
        for p, kept in state["state"].items():
            if kept and set(kept) != self.state_keys:
                raise ValueError(
                    f"cannot load the checkpoint of another optimizer into {type(self).__name__}: its state has "
                    f"{', '.join(sorted(kept))} in place of {', '.join(sorted(self.state_keys))}"
                )
            if any(t.dim() and shards.is_divided(t) != shards.is_divided(p) for t in kept.values() if p.dim()):
                raise ValueError(
                    "cannot load the state of undivided parameters into divided ones, or the other way round; "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict can"
                )
            if any(t.dim() and t.shape != p.shape for t in kept.values()):
                shapes = sorted({tuple(t.shape) for t in kept.values() if t.dim()})
                raise ValueError(f"cannot load state of shape {shapes[0]} for a parameter of shape {tuple(p.shape)}")
        updates: dict[int, tuple[Penalty, Penalty]] = {}
        for live, loaded in zip(self.__dict__.get("param_groups", []), state["param_groups"], strict=False):
            penalty = live["penalty"]
            if (units := as_units(loaded.get("units"), live["params"])) != live["units"]:
                raise ValueError("cannot load a parameter group whose units differ from those of the present one")
            loaded["units"] = units
            update = from_plain(penalty, loaded.get("penalty"))
            _check_fit(live, update)
            if update is not None and updates.setdefault(id(penalty), (penalty, update))[1] != update:
                raise ValueError(f"{penalty} is shared by parameter groups whose loaded penalties differ")
            loaded["penalty"] = penalty
            for option, value in live.items():  # a checkpoint of an older version, or of torch's SGD, may lack some
                loaded.setdefault(option, value)
            self._check_options(loaded)
        super().__setstate__(state)
        for penalty, update in updates.values():
            vars(penalty).update(vars(update))

    def _check_step(self) -> None:
        """Raise before anything is changed if an option or a gradient is not fit for a step."""
        self._check_groups()
        for group in self.param_groups:
            gradients = [gradient for p in group["params"] if (gradient := p.grad) is not None]
            is_complex = any(dtype.is_complex for dtype in set(map(attrgetter("dtype"), gradients)))
            if is_complex or not set(map(attrgetter("layout"), gradients)) <= {torch.strided}:
                kind = "complex" if is_complex else "sparse"
                raise RuntimeError(f"{type(self).__name__} does not support {kind} gradients")
            if group["units"] is not None and 0 < len(gradients) < len(group["params"]):
                raise RuntimeError(
                    "a group with units takes part in a step as a whole: gradients must be on all, or none"
                )

    def _check_groups(self) -> None:
        for group in self.param_groups:
            self._check_options(group)

    def _check_keys(self, group: Group) -> None:
        """Other keys are allowed in a group, but a misspelt option would be ignored in silence."""
        for key in group.keys() - self.defaults.keys() - {"params", "param_names"}:
            meant = difflib.get_close_matches(key, self.defaults, n=1, cutoff=0.85)
            if meant or isinstance(group[key], Penalty):
                raise ValueError(
                    f"{key!r} is not an option of a parameter group; did you mean {(meant or ['penalty'])[0]!r}?"
                )

    def _check_options(self, group: Group) -> None:
        if not isinstance(group["lr"], Tensor):
            checks.nonnegative("lr", group["lr"])
        elif group["lr"].numel() != 1:  # its value is not read: that would wait for its device
            raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(group['lr'].shape)}")
        if not isinstance(group["maximize"], bool):
            raise TypeError(f"maximize must be True or False, got {group['maximize']!r}")
        if group["foreach"] not in (None, True, False):
            raise TypeError(f"foreach must be True, False or None, got {group['foreach']!r}")
        if group["nonfinite"] not in NONFINITE:
            raise ValueError(f"nonfinite must be one of {NONFINITE}, got {group['nonfinite']!r}")
        if group["penalty"] is not None and not isinstance(group["penalty"], Penalty):
            raise TypeError(f"penalty must be a proxmo.Penalty or None, got {group['penalty']!r}")
        _check_fit(group, group["penalty"])


def _all_finite(tensors: list[Tensor]) -> bool:
    """Of what this process holds: by the largest magnitude of each, which NaN and inf decide."""
    filled = [part for t in tensors if (part := shards.local(t)).numel()]
    return not filled or all(bool(n.isfinite()) for n in torch._foreach_norm(filled, math.inf))


def is_zero(lr: float | Tensor) -> bool:
    """Whether lr is known to be zero; one on a device is not read, since that would wait for the device."""
    if isinstance(lr, Tensor):
        return lr.device.type == "cpu" and not torch.compiler.is_compiling() and bool(lr == 0)
    return lr == 0


def use_foreach(choice: bool | None, tensors: list[Tensor]) -> bool:
    """Whether to hand whole lists to torch's foreach kernels: by default for ordinary tensors, not for subclasses."""
    return {type(t) for t in tensors} <= {Tensor, Parameter} if choice is None else choice


def proximal_step(
    params: list[Tensor], directions: list[Tensor], group: Group, certificates: dict[Tensor, Certificate] | None = None
) -> None:
    """params ← prox_{lr·ψ}(params − lr·directions)."""
    lr, penalty = group["lr"], group["penalty"]
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    sign = 1 if group["maximize"] else -1
    if penalty is None:
        _add_scaled(params, directions, lr, sign, group["foreach"])
        if certificates is not None:
            for p, direction in zip(params, directions, strict=True):
                certificates[p] = Certificate(torch.zeros_like(p), direction.clone(), p._version)
        return
    # half precision rounds once, after the prox: two small moves may each be lost where their sum is not
    points = widened(params)
    _add_scaled(points, widened(directions), lr, sign, group["foreach"])
    subgradients = None if certificates is None else _subgradients(group, points, lr)
    apply_prox(group, points, lr)
    for param, point in zip(params, points, strict=True):
        if point is not param:
            param.copy_(point)
    if certificates is not None and subgradients is not None:
        for param, subgradient, direction in zip(params, subgradients, directions, strict=True):
            certificates[param] = Certificate(subgradient, direction.clone(), param._version)


def apply_prox(group: Group, points: list[Tensor], lr: float | Tensor) -> None:
    """points ← prox(points)."""
    penalty: Penalty = group["penalty"]
    if group["units"] is None:
        penalty.apply_to_all(points, lr)
    else:
        for family in group["units"]:
            matrix = joined(family, points)
            write_back(family, penalty.apply(matrix, lr, out=matrix), points)


def _subgradients(group: Group, points: list[Tensor], lr: float | Tensor) -> list[Tensor]:
    """(point − prox(point))/lr: in float64, since small steps leave few digits in the difference."""
    moved = [point.to(torch.float64, copy=True) for point in points]
    apply_prox(group, moved, lr)
    return [((point.double() - near) / lr).to(point.dtype) for point, near in zip(points, moved, strict=True)]


def _add_scaled(
    params: list[Tensor], directions: list[Tensor], lr: float | Tensor, sign: int, foreach: bool | None
) -> None:
    """params += sign·lr·directions, each process on its parts."""
    if shards.any_divided(params):
        shards.note_written(params)
        directions = [shards.local(shards.laid_out_like(d, p)) for d, p in zip(directions, params, strict=True)]
        params = list(map(shards.local, params))
    if isinstance(lr, Tensor):
        for param, direction in zip(params, directions, strict=True):
            param.addcmul_(direction, lr.to(param.device), value=sign)
    elif use_foreach(foreach, params):
        torch._foreach_add_(params, directions, alpha=sign * lr)
    else:
        for param, direction in zip(params, directions, strict=True):
            param.add_(direction, alpha=sign * lr)


def _check_fit(group: Group, penalty: Penalty | None) -> None:
    """Raise if a parameter of the group has not the axes that the penalty asks for."""
    if penalty is not None and group["units"] is not None and not (isinstance(penalty, Grouped) and penalty.dim == 0):
        raise ValueError(f"penalty of a parameter group with units must be a group penalty with dim=0, got {penalty}")
    if penalty is None or group["units"] is not None or type(penalty).check is Penalty.check:
        return
    for index, p in enumerate(group["params"]):
        if not is_lazy(p):
            try:
                penalty.check(p)
            except ValueError as error:
                name = group["param_names"][index] if "param_names" in group else index
                raise ValueError(f"{penalty} does not fit parameter {name!r}: {error}") from error


def _sparsity(group: Group) -> Sparsity:
    params, penalty = group["params"], group["penalty"]
    zeros = shards.count_zeros(params)
    elements = sum(p.numel() for p in params)
    seen = [] if penalty is None else seen_by_penalty(group["units"], params)
    counts = [counted for x in seen if (counted := penalty.zero_groups(x)) is not None]
    groups = sum(total for _, total in counts)
    return Sparsity(zeros / max(elements, 1), sum(zero for zero, _ in counts) / groups if groups else None)
