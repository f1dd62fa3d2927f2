"""Momentum without a prox in closed form: each step solves its subproblem by gradients of ψ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from proxmo.optim.closure import all_params, asks_for_state
from proxmo.optim.evaluation import Closure, copies_of_gradients, evaluate, traces_of_modules
from proxmo.optim.inner import Block, InnerReport, InnerSGD, Subproblem
from proxmo.optim.momentum import Initial, PolyakMomentum
from proxmo.optim.options import Group, Options
from proxmo.secants import square


class InexactProxSGD(PolyakMomentum):
    r"""`ProxSGD` for a ψ that has gradients but no closed-form prox: an inner solver replaces the prox.

    .. math::
        m_k = \mu\,m_{k-1} + (1 - \mu)\,∇f(x_k; ξ_k), \qquad
        x_{k+1} \approx \operatorname{argmin}_x\, Ω_k(x) = \langle m_k, x\rangle + ψ(x) + \tfrac{M}{2}\|x - x_k\|^2,
        \qquad M = 1/\mathrm{lr}

    The theory requires ‖∇Ω_k(x_{k+1})‖² ≤ (M²/16)·‖x_{k+1} − x_k‖² + S; after each step, ``report`` says whether this
    held. The rates are the inexact regimes of `theory.REGIMES`. `ProxyObjective` provides both closures for proxy
    training.

    ``param_groups[0]["psi_evaluations"]`` counts the gradients of ψ, which are samples too if ψ is stochastic, and
    ``param_groups[0]["fallbacks"]`` the steps that were undone because the inner solver made Ω_k larger.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: 1/M, the step size.
        momentum: μ in [0, 1), the weight of the past gradients of f.
        inner: how to solve the subproblem.
        initial: how the average starts, as for `ProxSGD`.
        options: ``maximize`` and ``foreach``, as for every `ProxOptimizer`.

    >>> import torch, proxmo
    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> optimizer = proxmo.InexactProxSGD([x], lr=0.5, momentum=0.0, inner=proxmo.InnerSGD(50, lr=0.2, S=1e-8))
    >>> def f():
    ...     loss = (x - 1).square().sum() / 2
    ...     loss.backward()
    ...     return loss.item()
    >>> def psi():
    ...     value = x.square().sum() / 2  # as if it had no prox
    ...     value.backward()
    ...     return value.item()
    >>> for _ in range(20):
    ...     loss = optimizer.step(f, psi)
    >>> round(x.item(), 4), optimizer.report.met
    (0.5, True)
    """

    report: InnerReport | None = None
    """What the inner solver did in the last step."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        *,
        inner: InnerSGD,
        initial: Initial = "gradient",
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(inner, InnerSGD):
            raise TypeError(f"inner must be a proxmo.InnerSGD, got {inner!r}")
        self.inner = inner
        own = {"lr": lr, "momentum": momentum, "initial": initial, "penalty": None}
        super().__init__(params, {**own, "psi_evaluations": 0, "fallbacks": 0}, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "report": self.report}

    @torch.no_grad()
    def step(self, closure: Closure | None = None, psi_closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Add a gradient of f to the average, solve the subproblem from the current point, and return the loss of f.

        Gradients are cleared before each call of a closure. If a closure raises, or returns numbers that are not
        finite, parameters, state and buffers of modules stay as they were.

        Args:
            closure: evaluates f on a sample at the parameters as they are, calls ``backward`` and returns the loss.
            psi_closure: the same for ψ; called once for each inner step and once at the end. If it returns ψ(x), the
                step never ends at a point where Ω_k is larger than at x_k, up to rounding of ψ. If it evaluates ψ on a
                sample, it must return ``None``, because values of different samples are not comparable. All ranks must
                return the same value, or ``None``.
        """
        if closure is None and psi_closure is None and asks_for_state(self):
            for group in self.param_groups:
                self._directions(group, [p for p in group["params"] if p.grad is not None])
            return None
        if closure is None or psi_closure is None:
            missing = [name for name, f in (("closure", closure), ("psi_closure", psi_closure)) if f is None]
            raise TypeError(f"InexactProxSGD.step needs closures for f and for ψ, got None for {' and '.join(missing)}")
        self._check_groups()
        params = all_params(self)
        with self._all_or_nothing(params):
            loss: float = evaluate("closure", closure, params)
            self._check_step()
            if not math.isfinite(square([p.grad for p in params if p.grad is not None])):
                raise FloatingPointError("the gradient of f is not finite; parameters and state are as they were")
            gradients = copies_of_gradients(params)
            try:
                self._solve(psi_closure, params)
            finally:
                for p, gradient in zip(params, gradients, strict=True):
                    p.grad = gradient
        return loss

    @torch.no_grad()
    def penalty_value(self) -> Tensor:
        """Raise: ψ is known through its closure only."""
        raise RuntimeError("InexactProxSGD does not know the value of ψ; call psi_closure for it")

    def _solve(self, psi_closure: Closure, params: list[Tensor]) -> None:
        blocks: list[Block] = []
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            for p in trained:  # without a gradient of f there may be one of ψ
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            directions = self._directions(group, trained)
            if float(group["lr"]) > 0:  # otherwise M is infinite, and the parameters stay
                M, sign = 1 / float(group["lr"]), -1 if group["maximize"] else 1
                blocks += [Block(p, sign * direction, M) for p, direction in zip(trained, directions, strict=True)]
        if not blocks:
            self.report = None
            return
        subproblem = Subproblem(psi_closure, blocks, params)
        with traces_of_modules(params) as traces:
            report = self.inner.solve(subproblem)
            if report.fell_back:
                traces.restore_buffers()
        self.report = report
        for group in self.param_groups:
            group["psi_evaluations"] += subproblem.evaluations
            group["fallbacks"] += report.fell_back

    @contextmanager
    def _all_or_nothing(self, params: list[Tensor]) -> Iterator[None]:
        """Restore parameters, state and buffers of modules after an error inside."""
        points = [p.detach().clone() for p in params]
        state = {p: {name: t.clone() for name, t in kept.items()} for p, kept in self.state.items()}
        unstarted = set(self._unstarted)
        with traces_of_modules() as traces:
            try:
                yield
            except BaseException:
                for p, point in zip(params, points, strict=True):
                    p.copy_(point)
                self.state.clear()
                self.state.update(state)
                self._unstarted = unstarted
                traces.restore_buffers()
                raise

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if (choice := group["nonfinite"]) != "propagate":
            raise ValueError(f"nonfinite is not an option of InexactProxSGD, which always raises, got {choice!r}")
        if group["penalty"] is not None:
            raise ValueError(f"penalty must be None: ψ comes from psi_closure; got {group['penalty']!r}")
