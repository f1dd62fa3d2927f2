"""The average of past gradients that Polyak momentum takes as its direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.kernels import Moves
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.options import Group, Options
from proxmo.optim.proximal_step import as_scalar, is_zero, use_foreach
from proxmo.secants import square

if TYPE_CHECKING:
    from typing_extensions import Unpack

Initial = Literal["gradient", "zero"]
INITIAL = get_args(Initial)


class PolyakMomentum(ProxOptimizer):
    """Methods with the direction m_k = momentum·m_{k−1} + (1 − momentum)·g_k, kept in ``momentum_buffer``.

    The options ``momentum``, ``initial`` and ``momentum_dtype`` of a parameter group belong to it; `ProxSGD` explains
    them.
    """

    state_keys = frozenset({"momentum_buffer", "started"})

    def __init__(self, params: ParamsT, defaults: Group, **options: Unpack[Options]) -> None:
        super().__init__(params, {"momentum_dtype": None, **defaults}, **options)
        self._unstarted: set[Tensor] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            scale = _scale_of_foreign_average(group)
            for p in group["params"]:
                kept = state["state"].get(p)
                if kept and kept.get("momentum_buffer", 0) is None:  # SGD without momentum
                    kept = state["state"][p] = {}
                if kept and "started" not in kept and kept.get("momentum_buffer") is not None:  # of torch's SGD
                    kept["momentum_buffer"] = kept["momentum_buffer"] * scale
                    kept["started"] = torch.ones(())
        super().__setstate__(state)
        self._unstarted = {p for p, kept in self.state.items() if kept and not bool(kept["started"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, also one of ``torch.optim.SGD``, whose buffer is rescaled to an average of gradients.

        Averages keep their dtype, where torch would cast them to that of the parameters. From SGD, ``lr`` is taken as
        it is: with ``dampening=0`` it has to grow by 1/(1 − momentum) for steps of the same length.
        """
        super().load_state_dict(state_dict)
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        live = [(p, group["momentum_dtype"]) for group in self.param_groups for p in group["params"]]
        for number, (p, dtype) in zip(saved_ids, live, strict=True):
            if dtype is not None and self.state.get(p) and self.state[p]["momentum_buffer"].dtype != dtype:
                average = self.state[p]["momentum_buffer"]
                exact = state_dict["state"][number]["momentum_buffer"].to(average.device, dtype, copy=True)
                foreign = "started" not in state_dict["state"][number]
                self.state[p]["momentum_buffer"] = average.to(dtype) if foreign else exact

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as for every torch optimizer; a tensor momentum is read here, once."""
        momentum = param_group.get("momentum", self.defaults["momentum"])
        if isinstance(momentum, Tensor) and momentum.numel() == 1 and not 0 <= momentum.item() < 1:
            raise ValueError(f"momentum must be a number in [0, 1), got {momentum!r}")
        super().add_param_group(param_group)

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        momentum = group["momentum"]
        if group["momentum_dtype"] not in (None, *checks.FLOATING):
            raise ValueError(f"momentum_dtype must be None or a dtype of floats, got {group['momentum_dtype']!r}")
        if isinstance(momentum, Tensor):
            if momentum.numel() != 1:  # its value is not read: that would synchronise with its device
                raise ValueError(f"Tensor momentum must be 1-element, got shape {tuple(momentum.shape)}")
        elif not 0 <= checks.number("momentum", momentum, takes="a number in [0, 1)") < 1:
            raise ValueError(f"momentum must be a number in [0, 1), got {momentum!r}")
        if group["initial"] not in INITIAL:
            raise ValueError(f"initial must be one of {INITIAL}, got {group['initial']!r}")

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return self._averaged(group, self._moves(group, params))

    def _moves(self, group: Group, params: list[Tensor]) -> Moves:
        """Return for each parameter its direction, and the gradient that is still to be averaged into it."""
        momentum, sharded = group["momentum"], shards.any_sharded(params)
        directions: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for p in params:
            gradient = p.grad
            assert gradient is not None
            if self._unstarted and p in self._unstarted and not is_zero(group["lr"]):
                self._unstarted.remove(p)
                del self.state[p]  # all of it: with momentum = 0 nothing takes its place
            keeps_average = isinstance(momentum, Tensor) or momentum != 0
            state = self.state[p] if keeps_average or p in self.state else {}
            gradient = shards.placed_like(gradient, p) if sharded else gradient
            if "momentum_buffer" in state:
                directions.append(state["momentum_buffer"])
                gradients.append(gradient)
                continue
            if keeps_average:
                self._start(state, p, gradient, group)
            directions.append(state.get("momentum_buffer", gradient))
            gradients.append(None)
        return Moves(params, directions, gradients)

    def _start(self, state: dict[str, Tensor], p: Tensor, gradient: Tensor, group: Group) -> None:
        average = gradient.to(group["momentum_dtype"] or gradient.dtype, copy=True)
        state["momentum_buffer"] = average if group["initial"] == "gradient" else average.zero_()
        state["started"] = torch.ones(())
        # Distributed checkpoints ask for the state by a step with lr = 0 and zero gradients, which must not count as
        # the start of the average; the first step of a warm-up, with lr = 0 only, does.
        if not torch.compiler.is_compiling() and is_zero(group["lr"]) and square([gradient]) == 0:
            state["started"].zero_()
            self._unstarted.add(p)

    def _averaged(self, group: Group, moves: Moves) -> list[Tensor]:
        """Average the gradients into their directions, and return all directions."""
        pairs = [(d, g) for d, g in zip(moves.directions, moves.gradients, strict=True) if g is not None]
        averages = [average for average, _ in pairs]
        gradients = [g if g.dtype == average.dtype else g.to(average.dtype) for average, g in pairs]
        if shards.any_sharded(averages):
            averages, gradients = list(map(shards.local, averages)), list(map(shards.local, gradients))
        weight = 1 - as_scalar(group["momentum"])
        if isinstance(weight, Tensor) or not use_foreach(group["foreach"], averages):
            for average, gradient in zip(averages, gradients, strict=True):
                average.lerp_(gradient, weight.to(average) if isinstance(weight, Tensor) else weight)
        elif averages:
            torch._foreach_lerp_(averages, gradients, weight)
        return moves.directions


def _scale_of_foreign_average(group: Group) -> float:
    """Take ``dampening`` out of a group; return what makes a buffer b ← μ·b + (1 − dampening)·g an average."""
    momentum, dampening = float(group.get("momentum", 0.0)), float(group.pop("dampening", group.get("momentum", 0.0)))
    if dampening == 1:
        raise ValueError("cannot load a checkpoint of SGD with dampening = 1, whose buffer has no scale")
    sign = -1 if group.get("maximize") else 1  # SGD averages −g then
    return sign * (1 - momentum) / (1 - dampening)
