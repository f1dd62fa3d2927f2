"""The average of past gradients that Polyak momentum takes as its direction."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.kernels.moves import Moves
from proxmo.memory import empty_like
from proxmo.optim.base import Group, ProxOptimizer, is_zero, use_foreach
from proxmo.secants import square

Initial = Literal["gradient", "zero"]
INITIAL = get_args(Initial)


class PolyakMomentum(ProxOptimizer):
    """Methods with the direction m_k = momentum·m_{k−1} + (1 − momentum)·g_k, kept in ``momentum_buffer``.

    The options ``momentum``, ``initial`` and ``momentum_dtype`` of a parameter group belong to it; `ProxSGD` explains
    them.
    """

    state_keys = frozenset({"momentum_buffer", "started"})

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, {"momentum_dtype": None, **defaults})
        self._unstarted: set[Tensor] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for kept in state["state"].values():
            if "momentum_buffer" in kept:
                kept.setdefault("started", torch.ones(()))  # in a checkpoint of torch's SGD
        super().__setstate__(state)
        self._unstarted = {p for p, kept in self.state.items() if kept and not bool(kept["started"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; averages keep their dtype, where torch would turn them into that of the parameters."""
        super().load_state_dict(state_dict)
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        live = [(p, group["momentum_dtype"]) for group in self.param_groups for p in group["params"]]
        for number, (p, dtype) in zip(saved_ids, live, strict=True):
            if dtype is not None and p in self.state:
                average = state_dict["state"][number]["momentum_buffer"]
                self.state[p]["momentum_buffer"] = average.to(p.device, dtype, copy=True)

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group["momentum_dtype"] not in (None, *checks.FLOATING):
            raise ValueError(f"momentum_dtype must be None or a dtype of floats, got {group['momentum_dtype']!r}")
        if not 0 <= checks.number("momentum", group["momentum"], takes="a number in [0, 1)") < 1:
            raise ValueError(f"momentum must be a number in [0, 1), got {group['momentum']!r}")
        if group["initial"] not in INITIAL:
            raise ValueError(f"initial must be one of {INITIAL}, got {group['initial']!r}")

    def _directions(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        return self._averaged(group, self._moves(group, params))

    def _moves(self, group: Group, params: list[Tensor]) -> Moves:
        """For each parameter its direction, with the gradient that is still to be averaged into it."""
        momentum, initial = group["momentum"], group["initial"]
        divided = shards.any_divided(params)
        directions: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for p in params:
            gradient = p.grad
            assert gradient is not None
            if self._unstarted and p in self._unstarted and not is_zero(group["lr"]):
                self._unstarted.remove(p)
                del self.state[p]  # all of it: with momentum = 0 nothing comes in its place
            state = self.state[p] if momentum != 0 or p in self.state else {}
            gradient = shards.laid_out_like(gradient, p) if divided else gradient
            if "momentum_buffer" in state:
                directions.append(state["momentum_buffer"])
                gradients.append(gradient)
                continue
            if momentum != 0:
                average = empty_like(gradient, group["momentum_dtype"])
                state["momentum_buffer"] = average.copy_(gradient) if initial == "gradient" else average.zero_()
                state["started"] = torch.ones(())
                # Distributed checkpoints ask for the state by a step with lr = 0 and zero gradients, which must not
                # count as the start of the average; a first step of a warm-up, with lr = 0 only, does.
                if not torch.compiler.is_compiling() and is_zero(group["lr"]) and square([gradient]) == 0:
                    state["started"].zero_()
                    self._unstarted.add(p)
            directions.append(state.get("momentum_buffer", gradient))
            gradients.append(None)
        return Moves(params, directions, gradients)

    def _averaged(self, group: Group, moves: Moves) -> list[Tensor]:
        """The directions, with the gradients averaged into them."""
        pairs = [(d, g) for d, g in zip(moves.directions, moves.gradients, strict=True) if g is not None]
        averages = [average for average, _ in pairs]
        gradients = [g if g.dtype == average.dtype else g.to(average.dtype) for average, g in pairs]
        if shards.any_divided(averages):
            averages, gradients = list(map(shards.local, averages)), list(map(shards.local, gradients))
        if use_foreach(group["foreach"], averages):
            if averages:
                torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        else:
            for average, gradient in zip(averages, gradients, strict=True):
                average.lerp_(gradient, 1 - group["momentum"])
        return moves.directions
