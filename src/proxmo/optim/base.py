"""The optimizer that all methods share: a method is a subclass that says what the direction of a step is.

`ProxOptimizer.step` checks the options, decides about gradients with NaN or inf, and hands each parameter group to
`proximal_step`, which moves the parameters and applies the prox. All methods are ordinary `torch.optim.Optimizer`s.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.optim.checkpoints import check_loaded_state, check_made_alike, from_plain, to_plain_data, update_fields
from proxmo.optim.options import (
    Group,
    Options,
    check_fit,
    check_keys,
    check_parameters,
    check_shared_options,
)
from proxmo.optim.proximal_step import Certificate, is_zero, proximal_step
from proxmo.optim.sparsity import Sparsity, measure_sparsity, trained
from proxmo.optim.units import as_units, seen_by_penalty
from proxmo.penalties.base import Penalty

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ProxOptimizer(Optimizer):
    """The base class of all methods: ``step`` moves each parameter to prox_{lr·ψ}(x − lr·direction).

    Subclasses write ``_directions``; those with options of their own extend ``_check_options``.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
        defaults: default options of a parameter group, ``lr`` and ``penalty`` among them. A group may also have
            ``units``, from `unit_groups`: groups of the penalty that span several parameters.
        maximize: maximise f(x) − ψ(x) instead.
        foreach: use torch's foreach kernels on lists of tensors; ``None`` does so where they apply.
        nonfinite: what to do if a gradient has NaN or inf. ``"propagate"`` takes the step, as torch does; ``"raise"``
            raises a ``FloatingPointError``, ``"skip"`` does nothing; both before anything is changed.

    >>> import torch, proxmo
    >>> isinstance(proxmo.ProxSGD([torch.zeros(2)]), proxmo.ProxOptimizer)
    True
    """

    state_keys: ClassVar[frozenset[str]]
    """What the state of a parameter holds, if it has one."""
    broadcast_keys: ClassVar[frozenset[str]] = frozenset()
    """Which of it only has to broadcast to the parameter; the rest has the shape of the parameter, or is a number."""
    certify: bool = False
    """Whether ``step`` keeps its `Certificate` for each parameter, two more copies of them. Not part of the state."""

    def __init__(self, params: ParamsT, defaults: Group, **options: Unpack[Options]) -> None:
        if unknown := options.keys() - Options.__annotations__.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {sorted(unknown)[0]!r}")
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params must be parameters or parameter groups, got a {type(params).__name__}: pass "
                "model.parameters() or proxmo.param_groups(model, penalty)"
            )
        shared = {"units": None, "maximize": False, "foreach": None, "nonfinite": "propagate"}
        super().__init__(params, {**shared, **defaults, **options})
        self._certificates: dict[Tensor, Certificate] = {}

    @abstractmethod
    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Return the direction for each of ``params``, which all have a gradient; the caller must not change them."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. Parameters without a gradient do not change.

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

    def _take_step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        proximal_step(group, params, self._directions(group, params), self._certificates_to_keep(group))

    def _certificates_to_keep(self, group: Group) -> dict[Tensor, Certificate] | None:
        return self._certificates if self.certify and not is_zero(group["lr"]) else None

    def _admits_gradients(self, *others: Mapping[Tensor, Tensor | None]) -> bool:
        """Whether to take a step with the gradients of the parameters and with others; may raise instead."""
        if all(group["nonfinite"] == "propagate" for group in self.param_groups):
            return True
        verdict, seen = 0, []
        for group in self.param_groups:
            if group["nonfinite"] != "propagate":
                of_params = [(p, g) for p in group["params"] for g in (p.grad, *(other.get(p) for other in others))]
                gradients = [shards.placed_like(g, p) for p, g in of_params if g is not None]
                seen += gradients
                if not _all_finite(gradients):
                    verdict = max(verdict, 1 if group["nonfinite"] == "skip" else 2)
        verdict = shards.agree_on_max(verdict, seen)  # the same on all ranks, some of which may have seen nothing bad
        if verdict == 2:
            raise FloatingPointError("a gradient is not finite; parameters and state are as they were")
        return verdict == 0

    def certificate_or_none(self, param: Tensor) -> Certificate | None:
        """Return `certificate`, or ``None`` where there is none that holds."""
        certificate = self._certificates.get(param)
        return certificate if certificate is not None and certificate.version == param._version else None

    def certificate(self, param: Tensor) -> Certificate:
        """Return what the last step proves for this parameter; set ``certify = True`` before it.

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

    def prox_steps(self, group: Group, params: list[Tensor]) -> float | list[Tensor]:
        """Return the step that the prox would use, as far as it is known now: one for all, or a tensor for each.

        >>> import torch, proxmo
        >>> optimizer = proxmo.ProxSGD([torch.zeros(2)], lr=0.5)
        >>> optimizer.prox_steps(optimizer.param_groups[0], optimizer.param_groups[0]["params"])
        0.5
        """
        return float(group["lr"])

    @torch.no_grad()
    def penalty_value(self) -> Tensor:
        """Return ψ at the current point, summed over all trained parameters; +inf outside a constraint.

        With sharded parameters all ranks must call it; they get the same number.

        >>> import torch, proxmo
        >>> proxmo.ProxSGD([torch.tensor([1.0, -2.0])], penalty=proxmo.L1(0.5)).penalty_value()
        tensor(1.5000)
        """
        values = [
            group["penalty"].total(list(seen_by_penalty(*trained(group))))
            for group in self.param_groups
            if group["penalty"] is not None
        ]
        return sum((value.to(values[0].device) for value in values[1:]), values[0]) if values else torch.zeros(())

    @torch.no_grad()
    def sparsity(self) -> list[Sparsity]:
        """Return for each parameter group the share of exact zeros, and of groups that are entirely zero.

        For groups from `unit_groups`, ``families`` counts the units of each layer. Frozen parameters do not count. With
        sharded parameters all ranks must call it; they get the same numbers.

        >>> import torch, proxmo
        >>> weight = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
        >>> proxmo.ProxSGD([weight], penalty=proxmo.GroupL2(0.1)).sparsity()
        [Sparsity(zeros=0.75, groups=0.5)]
        >>> units = [[(0, 0, None)]]  # the rows of the weight are units, as unit_groups would find them
        >>> group = {"params": [("layer.weight", weight)], "penalty": proxmo.GroupL2(0.1), "units": units}
        >>> proxmo.ProxSGD([group]).sparsity()[0].families
        (FamilySparsity(name='layer', zero=1, units=2),)
        """
        return [measure_sparsity(group) for group in self.param_groups]

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as in every torch optimizer. Raises an error if its options or penalty do not fit."""
        if isinstance(param_group, dict) and "params" not in param_group:
            got = ", ".join(map(repr, param_group)) or "none"
            raise ValueError(f"a parameter group must have the key 'params', got {got}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_keys(group, self.defaults)
            check_parameters(group)
            checks.scalar_step("lr", group["lr"])
            group["units"] = as_units(group["units"], group["params"])
            self._check_options(group)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data: a penalty is written as its class name and fields.

        As with ``lr``, saved values override current ones: ``load_state_dict`` sets the fields of the optimizer's
        penalties (the objects stay the same). It refuses a checkpoint with another penalty class before anything
        changes. A checkpoint of torch's own optimizers, which has no penalties, does not change them.
        """
        handle = self.register_state_dict_post_hook(to_plain_data, prepend=True)  # before the hooks of others
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, or one of torch's own optimizers; see there."""
        check_made_alike(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by unpickling, with live penalties, and at the end of `load_state_dict`, with plain ones that update
        # those of the present groups. Everything is checked before anything is changed.
        check_loaded_state(type(self).__name__, self.state_keys, self.broadcast_keys, state["state"])
        updates: dict[int, tuple[Penalty, Penalty]] = {}
        for live, loaded in zip(self.__dict__.get("param_groups", []), state["param_groups"], strict=False):
            for option, value in live.items():  # a checkpoint of an older version, or of torch, may lack some
                loaded.setdefault(option, value)
            penalty = live["penalty"]
            if (units := as_units(loaded["units"], live["params"])) != live["units"]:
                raise ValueError("cannot load a parameter group whose units differ from those of the present one")
            loaded["units"] = units
            update = from_plain(penalty, loaded["penalty"])
            check_fit(live, update)
            if update is not None and updates.setdefault(id(penalty), (penalty, update))[1] != update:
                raise ValueError(f"{penalty} is shared by parameter groups whose loaded penalties differ")
            loaded["penalty"] = penalty
            check_keys(loaded, self.defaults)
            self._check_options(loaded)
        super().__setstate__(state)
        self._certificates = {}
        for penalty, update in updates.values():
            update_fields(penalty, update)

    def _check_step(self) -> None:
        """Raise before anything is changed if an option or a gradient is not fit for a step."""
        self._check_groups()
        if not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            for group in self.param_groups:
                check_parameters(group)
        for group in self.param_groups:
            gradients = [gradient for p in group["params"] if (gradient := p.grad) is not None]
            is_complex = any(dtype.is_complex for dtype in set(map(attrgetter("dtype"), gradients)))
            if is_complex or not set(map(attrgetter("layout"), gradients)) <= {torch.strided}:
                kind = "complex" if is_complex else "sparse"
                raise RuntimeError(f"{type(self).__name__} does not support {kind} gradients")

    def _check_groups(self) -> None:
        for group in self.param_groups:
            self._check_options(group)

    def _check_options(self, group: Group) -> None:
        check_shared_options(group)


def _all_finite(tensors: list[Tensor]) -> bool:
    """Whether all local elements are finite; reads one number per device if they are."""
    if torch.compiler.is_compiling():  # values cannot be read: break the graph, or with fullgraph=True raise
        torch._dynamo.graph_break(msg="nonfinite='skip' and 'raise' read the gradients; set nonfinite='propagate'")
    by_device: dict[torch.device, list[Tensor]] = {}
    for t in map(shards.local, tensors):
        if t.numel():
            by_device.setdefault(t.device, []).append(t)
    for some in by_device.values():
        # A sum is not finite if an element is not; the largest magnitude, which takes longer, then tells an overflow.
        sums = torch.stack([t.sum(dtype=torch.float32) for t in some])
        if not bool(sums.isfinite().all()):
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(some, math.inf)])
            if not bool(norms.isfinite().all()):
                return False
    return True
