"""AdamW with a prox in Adam's own metric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from proxmo import checks, shards
from proxmo.kernels.moves import in_cache
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.checkpoints import restore_precision
from proxmo.optim.fused import check_fused, take_fused_adam_steps
from proxmo.optim.moments import METRICS, Metric, Moments, new_second_moment, reduced_to_blocks, update_second_moments
from proxmo.optim.options import Group, Options, check_betas
from proxmo.optim.proximal_step import Certificate, apply_penalty, as_scalar, is_zero, use_foreach
from proxmo.penalties.base import Penalty, widen
from proxmo.secants import square

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHUNK = 1 << 17  # elements per thread and row chunk: smaller ones pay more for calls than they save in cache
# Options of torch's AdamW that change nothing here.
_IGNORED = ("amsgrad", "capturable", "differentiable", "decoupled_weight_decay")


class ProxAdamW(ProxOptimizer):
    r"""AdamW for f(x) + ψ(x), with the prox in Adam's own metric, so that fixed points are stationary points.

    .. math::
        m_k = β_1 m_{k-1} + (1 - β_1)\,g_k, \qquad v_k = β_2 v_{k-1} + (1 - β_2)\,g_k^2, \qquad
        η_k = \frac{\mathrm{lr}}{\sqrt{v_k / (1 - β_2^k)} + ε} \\
        x_{k+1} = \operatorname{argmin}_u\; ψ(u) + \sum_i \frac{(u_i - y_i)^2}{2\,η_{k,i}}, \qquad
        y = (1 - \mathrm{lr}\cdot\mathrm{weight\_decay})\,x_k - η_k \frac{m_k}{1 - β_1^k}

    Without a penalty this is ``torch.optim.AdamW``: it has the same state and loads its checkpoints.

    Use your AdamW lr. The strength is on the scale of the gradients, as for `ProxSGD`; `Trimmed` with `KeepScheduler`
    needs no strength. A weight is zero where its averaged gradient is below the strength, as with `ProxSGD`, whatever
    the size of its gradients. A soft threshold of lr·strength after an Adam step is different: it gives each weight its
    own strength, in proportion to the size of its gradients, and zeros do not stay.

    The first step sets weights whose gradients have always been zero to zero, because only the penalty acts on them.
    Exclude embeddings of rare tokens from the penalty.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the step size, a number or a tensor of one element.
        betas: β₁ and β₂ in [0, 1), the weights of the past in both averages.
        eps: ε ≥ 0, added to the root of the second moment.
        weight_decay: as in AdamW, weights are multiplied by 1 − lr·weight_decay.
        penalty: ψ, or ``None`` for ψ = 0.
        metric: ``"element"`` keeps Adam's second moment for every weight and solves the prox in that metric;
            ``"block"`` keeps one for each block of the penalty (a group or a unit), the mean over the block, which
            halves the state and keeps the prox in closed form. Penalties on singular values have one for each tensor
            in both cases.
        fused: compute moments, step and prox in one pass over memory, in compiled loops (``pip install
            'proxmo[fast]'``). Applies to float32 and float64 on a CPU, ``metric="element"``, and penalties that are
            elementwise or have groups along the first axis; all else takes the eager path.
        options: ``maximize``, ``foreach`` and ``nonfinite``, as for every `ProxOptimizer`.

    Moments are kept in float32 for half-precision parameters; torch keeps them in half precision.

    >>> import torch, proxmo
    >>> x = torch.tensor([3.0, 0.2], requires_grad=True)
    >>> optimizer = proxmo.ProxAdamW([x], lr=0.05, weight_decay=0.0, penalty=proxmo.L1(1.0))
    >>> for _ in range(500):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 0.2])).square().sum().div(2).backward()
    ...     optimizer.step()
    >>> x.detach()
    tensor([2.0000, 0.0000])
    """

    state_keys = frozenset({"step", "exp_avg", "exp_avg_sq"})
    broadcast_keys = frozenset({"exp_avg_sq"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        penalty: Penalty | None = None,
        *,
        metric: Metric = "element",
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "penalty": penalty}
        super().__init__(params, {**own, "metric": metric, "fused": fused}, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if group.get("amsgrad"):
                raise ValueError("cannot load a checkpoint of AdamW with amsgrad=True")
            if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
                raise ValueError(
                    "cannot load a checkpoint of Adam with weight_decay, which is coupled to the gradients there"
                )
            for option in _IGNORED:
                group.pop(option, None)
        for kept in state["state"].values():
            if kept and not isinstance(kept.get("step"), Tensor):  # as older versions of torch counted
                kept["step"] = torch.tensor(float(kept.get("step", 0)))
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, also one of ``torch.optim.AdamW``.

        Moments stay in float32 where torch would cast them to half-precision parameters. Second moments of elements
        become means over blocks, if this optimizer keeps one for each block.
        """
        super().load_state_dict(state_dict)
        restore_precision(self, state_dict, "exp_avg", "exp_avg_sq")
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p):
                    self.state[p]["exp_avg_sq"] = reduced_to_blocks(group, p, self.state[p]["exp_avg_sq"])

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        check_fused(group)
        check_betas(group["betas"])
        checks.nonnegative("eps", group["eps"])
        checks.nonnegative("weight_decay", group["weight_decay"])
        if group["metric"] not in METRICS:
            raise ValueError(f"metric must be one of {METRICS}, got {group['metric']!r}")
        self._check_metric(group)

    def _check_metric(self, group: Group) -> None:
        """Raise if the prox of the penalty cannot be taken in the metric of the second moments."""
        penalty = group["penalty"]
        if penalty is None or penalty.elementwise_step:
            return
        if group["units"] is not None:
            raise ValueError(
                f"penalty of a parameter group with units must have elementwise_step = True, got {penalty}"
            )
        for p in group["params"]:
            if p in self.state and self.state[p] and self.state[p]["exp_avg_sq"].numel() > 1:
                raise ValueError(
                    f"penalty must take a step for every element, as the second moments of this run have it, got "
                    f"{penalty}; give it to a new optimizer, which keeps one second moment for each tensor"
                )

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        moments = self._moments(group, params)
        certificates = self._certificates_to_keep(group)
        if group["fused"] and certificates is None and moments.params and not torch.compiler.is_compiling():
            moments = take_fused_adam_steps(group, moments)
        for some in self._batches(group, moments) if certificates is None else [moments]:
            if some.params:
                _take_step(group, some, certificates)

    @torch.no_grad()
    def prox_steps(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """Return lr/(√(v/(1 − β₂ᵏ)) + ε) for each parameter, or lr for a parameter that has had no gradient yet."""
        found = []
        for p in params:
            state = self.state.get(p)
            if not state or float(state["step"]) == 0:
                found.append(torch.full_like(widen(p), float(group["lr"])))
                continue
            moments = Moments([p], [p], [state["exp_avg"]], [state["exp_avg_sq"]], [float(state["step"])])
            found.append(shards.like(_step_sizes(group, moments, float(group["lr"]))[0], state["exp_avg_sq"]))
        return found

    def _moments(self, group: Group, params: list[Tensor]) -> Moments:
        """Return the state of the parameters, which counts their gradients from here on."""
        gradients = [shards.placed_like(p.grad, p) for p in params if p.grad is not None]
        states = [self._state(group, p) for p in params]
        # Distributed checkpoints ask for the state by a step with lr = 0 and zero gradients, which must not count.
        idle = not torch.compiler.is_compiling() and is_zero(group["lr"]) and square(gradients) == 0
        if idle and all(float(state["step"]) == 0 for state in states):
            return Moments([], [], [], [], [])
        torch._foreach_add_([state["step"] for state in states], 1)
        averages, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        counts = [s["step"] if torch.compiler.is_compiling() else float(s["step"]) for s in states]
        return Moments(params, gradients, averages, squares, counts)

    def _state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(widen(p.detach()))
            state["exp_avg_sq"] = new_second_moment(group, p)
        return state

    def _batches(self, group: Group, moments: Moments) -> Iterable[Moments]:
        """Cut the work into batches that stay in cache from the moments to the prox."""
        penalty: Penalty | None = group["penalty"]
        together = group["units"] is not None or (penalty is not None and penalty.joint)
        if together or group["foreach"] or torch.compiler.is_compiling():
            return [moments]
        if not use_foreach(group["foreach"], moments.params):
            return (Moments(*([value] for value in row)) for row in zip(*moments, strict=True))
        elements = CHUNK * torch.get_num_threads()
        return in_cache(moments, lambda p: penalty is None or penalty.acts_on_rows(p), elements)


def _take_step(group: Group, moments: Moments, certificates: dict[Tensor, Certificate] | None) -> None:
    """Update the moments, move the parameters, and apply the prox in the metric of the second moments."""
    lr, (beta1, beta2), maximize = as_scalar(group["lr"]), group["betas"], group["maximize"]
    points = [widen(p) for p in moments.params]
    gradients = [widen(shards.local(gradient)) for gradient in moments.gradients]
    if maximize:
        gradients = list(torch._foreach_neg(gradients))
    averages = list(map(shards.local, moments.averages))
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    update_second_moments(group, moments.params, gradients, moments.squares, 1 - beta2)
    steps = _step_sizes(group, moments, lr)
    local = list(map(shards.local, points))
    if group["weight_decay"]:
        torch._foreach_mul_(local, _on_device(1 - lr * group["weight_decay"], local))
    _add_products(local, averages, steps, [-1 / (1 - beta1**count) for count in moments.counts])
    shards.mark_written(points)
    directions = []
    if certificates is not None:
        scales = [(-1 if maximize else 1) / (1 - beta1**count) for count in moments.counts]
        directions = [average * scale for average, scale in zip(moments.averages, scales, strict=True)]
    metric = [s if s.numel() == 1 else shards.like(s, v) for s, v in zip(steps, moments.squares, strict=True)]
    apply_penalty(group, moments.params, points, metric, directions, certificates)


def _step_sizes(group: Group, moments: Moments, lr: float | Tensor) -> list[Tensor]:
    """Return lr/(√(v/(1 − β₂ᵏ)) + ε), of the local shards."""
    corrections = [(1 - group["betas"][1] ** count) ** 0.5 for count in moments.counts]
    sizes = list(torch._foreach_sqrt(list(map(shards.local, moments.squares))))
    torch._foreach_add_(sizes, [group["eps"] * correction for correction in corrections])
    torch._foreach_reciprocal_(sizes)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(sizes, corrections)
        torch._foreach_mul_(sizes, _on_device(lr, sizes))
    else:
        torch._foreach_mul_(sizes, [lr * correction for correction in corrections])
    return sizes


def _add_products(points: list[Tensor], a: list[Tensor], b: list[Tensor], scales: list[Any]) -> None:
    """Set points ← points + scale·a·b, where b may broadcast; scales are tensors in a compiled step."""
    if torch.compiler.is_compiling():
        torch._foreach_addcmul_(points, torch._foreach_mul(a, scales), b)
    else:
        torch._foreach_addcmul_(points, a, b, scales)


def _on_device(scalar: float | Tensor, tensors: list[Tensor]) -> float | Tensor:
    return scalar.to(tensors[0].device) if isinstance(scalar, Tensor) else scalar
