"""The contract of a penalty, and what all penalties share; `proxmo.penalties.kinds` has what some share."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from proxmo import checks, kernels, shards
from proxmo.eager import is_eager_cpu, is_transformed, row_chunks
from proxmo.kernels import Kernel
from proxmo.penalties.axes import Step
from proxmo.penalties.stacks import small_and_alike, stack_steps

AnyFloat = Annotated[float, checks.number]
NonNegativeFloat = Annotated[float, checks.nonnegative]
PositiveFloat = Annotated[float, partial(checks.more_than, 0)]
FloatAboveOne = Annotated[float, partial(checks.more_than, 1)]
Count = Annotated[int, checks.count]
Dim = Annotated[checks.Dim, checks.dim]
_NARROW = (torch.float16, torch.bfloat16)


@functools.cache
def _field_checks(penalty_class: type[Penalty]) -> dict[str, Callable[[str, Any], Any]]:
    try:
        hints = get_type_hints(penalty_class, include_extras=True)
    except NameError:  # a user's annotation that exists for type checkers only
        return {}
    annotated = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: found[0] for name, data in annotated.items() if (found := [c for c in data if callable(c)])}


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype to compute in: at least float32."""
    return x.float() if x.dtype in _NARROW else x


def rounding_slack(x: Tensor) -> float:
    """Return the relative violation of a constraint that rounding explains.

    That is one rounding to the dtype of ``x``, and a few in sums in the dtype of the computation.
    """
    return torch.finfo(x.dtype).eps + 16 * torch.finfo(widen(x).dtype).eps


@dataclass
class Penalty(ABC):
    """A function ψ known through its value and its prox: the base class of all penalties and constraints.

    To write a penalty, define a small dataclass of plain fields with the properties of ψ (``convex``, ``separable`` and
    ``elementwise_step``) and two hooks, ``_value(x)`` and ``_prox(x, step, out)``. To project onto a set, see
    `Constraint`; to support ``fused=True``, override `kernel`.

    - The hooks receive float32 or float64 tensors with at least one element, and a step > 0. The base class handles
      checks, half precision, ``out=``, zero steps and empty tensors.
    - ``_prox`` may write to ``out`` (which may be ``x``) and return it, or return a new tensor.
    - If the penalty is a sum over elements or groups, with numbers as fields, the hooks may receive a row chunk of a
      large tensor, or several small tensors stacked along a new first axis.
    - Of a sharded tensor (``DTensor``), the hooks receive the local shard if ψ is separable, otherwise the gathered
      tensor.
    - Fields annotated with the types of `proxmo.penalties.base` (``NonNegativeFloat``, ``PositiveFloat``, ``AnyFloat``,
      ``Count``, ``Dim``) are checked whenever they are set.

    >>> from dataclasses import dataclass
    >>> import torch, proxmo
    >>> from proxmo.penalties.base import NonNegativeFloat
    >>> @dataclass
    ... class Anchor(proxmo.Penalty):  # ψ(x) = s/2·Σ(x − c)²
    ...     strength: NonNegativeFloat
    ...     center: float
    ...     convex = separable = elementwise_step = True
    ...     def _value(self, x):
    ...         return self.strength / 2 * (x - self.center).square().sum()
    ...     def _prox(self, x, step, out):
    ...         t = step * self.strength
    ...         return (x + t * self.center) / (1 + t)
    >>> Anchor(1.0, center=1.0).prox(torch.tensor([0.0, 3.0]), step=1.0)
    tensor([0.5000, 2.0000])
    """

    convex: ClassVar[bool]
    """Whether ψ is convex; then its prox is single-valued and firmly non-expansive."""
    separable: ClassVar[bool]
    """Whether ψ is a sum over elements; then its prox acts on each element alone."""
    elementwise_step: ClassVar[bool] = False
    """Whether ``_prox`` takes a step tensor with a step for every element; if not, such a step is refused."""

    @property
    def joint(self) -> bool:
        """Whether ψ ranks all tensors of a parameter group together, so that they must be passed in one list."""
        return False

    def __init_subclass__(cls) -> None:
        # A live penalty ends up in a checkpoint where a wrapper packs the parameter groups itself
        # (ZeroRedundancyOptimizer). It has plain fields only, so loading it with weights_only=True is safe.
        torch.serialization.add_safe_globals([cls])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            fields = [field.name for field in dataclasses.fields(self)]
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, it has {fields}; a penalty class needs @dataclass"
            )
        check = _field_checks(type(self)).get(name)
        super().__setattr__(name, value if check is None else check(f"{type(self).__name__}: {name}", value))

    def value(self, x: Tensor) -> Tensor:
        """Return ψ(x) as a 0-d tensor, differentiable where ψ is; an empty tensor has value 0.

        The value of a ``DTensor`` is that of the whole tensor, the same on every rank.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).value(torch.tensor([1.0, -3.0]))
        tensor(8.)
        """
        return self._evaluate(x, self._value)

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return ψ of all tensors of a parameter group: the sum of their values, unless ψ ranks them together.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).total([torch.tensor([1.0, -3.0]), torch.tensor([0.5])])
        tensor(9.)
        """
        values = [self.value(x) for x in tensors]
        return sum((value.to(values[0].device) for value in values[1:]), values[0]) if values else torch.zeros(())

    def _evaluate(self, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
        """Return hook(x), a 0-d tensor that is 0 for an empty ``x``; for a separable ψ sum it over all shards."""
        self.check(checks.floating("x", x))
        work = widen(x)
        if x.requires_grad and torch.is_grad_enabled():
            work = shards.full(work)  # gathering is differentiable
        seen = self._seen(work)
        value = hook(seen) if seen.numel() else shards.local(seen).new_zeros(())
        over = [split.process_group for split in shards.splits(work)] if self.separable else []
        return shards.sum_over_ranks(value, over)

    def _seen(self, x: Tensor) -> Tensor:
        """Return what the hooks see of a tensor that may be sharded."""
        return shards.local(x) if self.separable else shards.full(x)

    def prox(self, x: Tensor, step: Step, *, out: Tensor | None = None, fused: bool = False) -> Tensor:
        """Return the minimiser of ψ(u) + Σ (u_i − x_i)² / (2·step_i) over u, a global one where ψ is not convex.

        With one step for all elements this is the usual prox; with a step for every element it is the prox in the
        metric diag(1/step), which adaptive methods need. The result has the dtype of ``x`` and is computed in float32
        or wider. Autograd does not track it.

        Args:
            x: the point, a dense tensor of floats. A ``DTensor`` gives a ``DTensor`` with the same placements.
            step: > 0: a number, a 0-d tensor, or a tensor that broadcasts to ``x``. A step of 0 returns ``x`` itself,
                for constraints too. Penalties on singular values accept only one number.
            out: a tensor like ``x`` to write the result to; it may be ``x``.
            fused: use a compiled loop if there is one for this penalty and tensor, as `ProxSGD` does.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).prox(torch.tensor([1.5, -3.0]), step=0.5)
        tensor([ 0.5000, -2.0000])
        >>> proxmo.L1(2.0).prox(torch.tensor([1.5, -3.0]), step=torch.tensor([0.5, 1.0]))
        tensor([ 0.5000, -1.0000])
        """
        checks.floating("x", x)
        checks.same_as("out", out, x)
        step = checks.step("step", step, x)
        self.check(x)
        self._check_step(step)
        self._check_zero_steps(step)
        with torch.no_grad():
            one_number = not isinstance(step, Tensor) or step.dim() == 0
            runs = fused and one_number and step != 0 and is_eager_cpu(x) and kernels.takes(x) and kernels.available()
            if runs and (kernel := self.current_kernel(float(step))) is not None:
                result = x if out is x else torch.empty_like(x)
                kernels.prox(x, kernel, result)
            else:
                result = x if out is x else x.clone()
                self.prox_([result], step)
            return result if out is None or out is result else out.copy_(result)

    def prox_(self, tensors: list[Tensor], step: Step | list[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Replace each tensor by its prox, without checks. Optimizers call this in every step.

        Args:
            tensors: the points, distinct tensors.
            step: as for `prox`, one for all tensors, or a list with a tensor for each.
            others: the tensors of the parameter group that the step does not change; they take part in a joint ranking.

        >>> import torch, proxmo
        >>> x = torch.tensor([1.5, -3.0])
        >>> proxmo.L1(2.0).prox_([x], step=0.5)
        >>> x
        tensor([ 0.5000, -2.0000])
        """
        if not isinstance(step, (Tensor, list)):
            if step == 0:
                return
            if len(tensors) == 1:  # fast path: each large tensor, in every step
                self._prox_tensor_(tensors[0], step)
                return
        several = isinstance(step, list)
        steps: list[Any] = step if isinstance(step, list) else [step] * len(tensors)
        for one in steps if several else steps[:1]:
            self._check_step(one)
        alone = set(range(len(tensors)))
        for indices in small_and_alike(tensors) if self.elementwise_step or not several else ():
            alike = [tensors[k] for k in indices]
            if (stacked := self._stacked(alike[0])) is not None:
                stack = torch.stack(alike)
                stacked._prox_tensor_(stack, stack_steps([steps[k] for k in indices], alike) if several else steps[0])
                torch._foreach_copy_(alike, stack.unbind())
                alone.difference_update(indices)
        for k in sorted(alone):
            self._prox_tensor_(tensors[k], steps[k])

    def _prox_tensor_(self, x: Tensor, step: Step) -> None:
        """Replace one tensor, or one stack of tensors, by its prox."""
        if x.numel() == 0:
            return
        if shards.is_sharded(x):
            self._prox_sharded_(x, step)
            return
        work = widen(x)
        step = self._step_for(step, work.dtype)
        chunks = row_chunks(work)
        if chunks == 1 or not self.acts_on_rows(work):
            self._call_hook(work, work, step)
        else:
            per_element = isinstance(step, Tensor) and step.dim() > 0
            steps = step.expand(work.shape).chunk(chunks) if per_element else [step] * chunks  # type: ignore[union-attr]
            for rows, step_of_rows in zip(work.chunk(chunks), steps, strict=False):
                self._call_hook(rows, rows, step_of_rows)
        if work is not x:
            x.copy_(work)

    def _prox_sharded_(self, x: Tensor, step: Step) -> None:
        local = shards.local(x)
        if isinstance(step, Tensor) and step.numel() > 1:
            step = shards.local_step(step, x)
        if self.separable:
            self._prox_tensor_(local, step)
        else:
            seen = self._seen(widen(x))  # sharded or gathered; a rank without elements takes part in collectives, too
            work = local if seen is x else shards.local(seen)
            self._call_hook(seen, work, self._step_for(step, work.dtype))
            if work is not local:
                local.copy_(work if shards.is_sharded(seen) else shards.shard_of(work, x))
        shards.mark_written([x])

    def _step_for(self, step: Step, dtype: torch.dtype) -> Step:
        """Return a step as the hooks take it: a number, 0-d in float64, or for every element in ``dtype`` or wider."""
        if not isinstance(step, Tensor):
            return step
        if step.numel() == 1:
            step = step.reshape(())
            return step if step.device.type == "mps" else step.double()  # step·strength may leave the range of float32
        if not self.separable:
            return step.to(torch.promote_types(step.dtype, dtype))
        if step.dtype == torch.float64 and dtype == torch.float32:  # a step beyond float32 must not become 0 or inf
            limits = torch.finfo(dtype)
            step = torch.where(step == 0, 0.0, step.clamp(limits.smallest_normal, limits.max))
        return step.to(dtype)

    def _call_hook(self, x: Tensor, local: Tensor, step: Step) -> None:
        """Write the prox of ``x`` to ``local``, its local shard or itself."""
        if not isinstance(step, Tensor):
            result = self._prox(x, step, None if is_transformed(local) else local)  # vmap has no rules for out=
        elif _is_positive(step):
            result = self._prox(x, step, local if step.dtype == local.dtype else None)
        else:
            result = torch.where(step == 0, local, self._prox(x, step, None))
        if result is not local:
            local.copy_(result)

    def _check_step(self, step: Step) -> None:
        """Raise if ``_prox`` does not take this step tensor."""
        if isinstance(step, Tensor) and step.numel() != 1 and not self.elementwise_step:
            raise ValueError(
                f"step must be one number for the prox of {self}, got a tensor of shape {tuple(step.shape)}; a penalty "
                "class whose _prox takes a step for every element says so with elementwise_step = True"
            )

    def _check_zero_steps(self, step: Step) -> None:
        """Raise if some elements have a step of zero and others not, unless the prox acts on each element alone."""
        if isinstance(step, Tensor) and not (self.separable or torch.compiler.is_compiling() or is_transformed(step)):
            zero = shards.local(step) == 0
            if bool(zero.any()) and not bool(zero.all()):
                raise ValueError(f"step must be > 0 for all elements or 0 for all in the prox of {self}, got a mixture")

    @torch.no_grad()
    def nearest_subgradient(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the point of ∂ψ(x) that is nearest to ``v``, in float64: −∇f(x) gives the shortest subgradient of F.

        Most convex penalties define it; the others raise an error. A kink counts only if ``x`` is exactly at it, such
        as at zeros or ties, except that the boundary of a constraint allows for rounding.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).nearest_subgradient(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.5, 5.0]))
        tensor([2.0000, 1.5000, 2.0000], dtype=torch.float64)
        """
        self.check(checks.floating("x", x))
        if checks.floating("v", v).shape != x.shape:
            raise ValueError(f"v must have the shape of x, {tuple(x.shape)}, got {tuple(v.shape)}")
        if not self._has_subgradient(x):
            raise ValueError(f"x must be in the set of {self}, or ψ has no subgradient there")
        if x.numel() == 0:
            return v.double()
        nearest = self._nearest_subgradient(x.double(), v.double(), rounding_slack(x))
        return torch.where(x.isnan(), math.nan, nearest)

    def block_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a step with one number per block, which broadcasts to ``x``.

        Blocks are the finest parts of ``x`` on which one step keeps the prox as simple as with one step for all: the
        elements of a separable penalty, the groups of a group penalty, otherwise the whole tensor. A method that
        chooses its own metric may keep it constant on blocks, ``x.square().sum_to_size(penalty.block_shape(x))``.

        >>> import torch, proxmo
        >>> x = torch.zeros(3, 2)
        >>> [p.block_shape(x) for p in (proxmo.L1(0.1), proxmo.GroupL2(0.1, dim=0), proxmo.Nuclear(0.1))]
        [(3, 2), (3, 1), (1, 1)]
        """
        return tuple(x.shape) if self.separable else (1,) * x.dim()

    def kernel(self, step: float) -> Kernel | None:
        """Return the compiled prox that ``fused=True`` uses, or ``None`` if there is none.

        To support ``fused=True`` in your own penalty, return a `proxmo.kernels.Kernel`. This is called only if numba is
        installed. It is not inherited, because a subclass may change the prox.
        """
        return None

    def current_kernel(self, step: float) -> Kernel | None:
        """Return `kernel`, unless it is inherited: a subclass may have changed the prox."""
        return self.kernel(step) if "kernel" in vars(type(self)) else None

    def metric_kernel(self) -> Kernel | None:
        """Return the compiled prox with a step for every element that ``ProxAdamW(fused=True)`` uses, or ``None``.

        Per element its function is (x, step, c) ↦ prox; per row (row, steps, c) writes the prox in place, and may
        overwrite the steps. As with `kernel`, it is not inherited.
        """
        return None

    def current_metric_kernel(self) -> Kernel | None:
        """Return `metric_kernel`, unless it is inherited."""
        return self.metric_kernel() if "metric_kernel" in vars(type(self)) else None

    def _stacked(self, x: Tensor) -> Penalty | None:
        """Return this penalty for a stack of tensors like ``x`` along a new first axis; ``None`` if there is none."""
        return self if self.separable and self._has_number_fields() else None

    def acts_on_rows(self, x: Tensor) -> bool:
        """Whether the prox of ``x`` can be computed separately for each row along the first axis."""
        return self.separable and self._has_number_fields()

    def _has_number_fields(self) -> bool:
        """Whether all rows and all tensors are treated alike; a field may hold, say, a weight for every element."""
        return all(name == "dim" or isinstance(value, (int, float)) for name, value in vars(self).items())

    def check(self, x: Tensor) -> None:  # noqa: B027  most penalties fit every tensor
        """Raise a ``ValueError`` if this penalty does not fit the shape of ``x``."""

    def check_blocks(self, count: int) -> None:  # noqa: B027
        """Raise a ``ValueError`` if this penalty does not fit a parameter group with ``count`` blocks in total."""

    def takes_units(self) -> bool:
        """Whether groups may be units that span several tensors: group penalties with ``dim=0``."""
        return False

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        """Return how many groups of ``x`` are entirely zero and how many there are; ``None`` without groups."""
        return None

    def _has_subgradient(self, x: Tensor) -> bool:
        return True

    def _nearest_subgradient(self, x: Tensor, v: Tensor, slack: float) -> Tensor:
        """Return the projection of ``v`` onto ∂ψ(x); ``slack`` is the relative violation that rounding explains."""
        raise NotImplementedError(f"the subdifferential of {self} is not known; use a certified subgradient")

    def _value(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _value")

    @abstractmethod
    def _prox(self, x: Tensor, step: Step, out: Tensor | None) -> Tensor:
        """Return the prox: in ``out``, which may be ``x``, or in a new tensor."""


def _is_positive(step: Tensor) -> bool:
    """Whether a step for every element has no zeros, as far as can be told: one on a device is not read."""
    return step.dim() > 0 and is_eager_cpu(step) and step.numel() > 0 and bool(step.amin() > 0)
