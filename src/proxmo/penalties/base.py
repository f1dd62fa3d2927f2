"""The contract of a penalty, and what all penalties share."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated, Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from proxmo import checks, shards
from proxmo.kernels import loops
from proxmo.memory import empty_like
from proxmo.parts import is_ordinary, number_of_parts
from proxmo.penalties.axes import Groups, indexing_axes

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
    """``x`` in a dtype fit to compute in: float32 at least."""
    return x.float() if x.dtype in _NARROW else x


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All of them so."""
    return [x.float() if x.dtype in _NARROW else x for x in tensors]


def _written_as_read(out: Tensor, x: Tensor) -> bool:
    """Whether elements can be written to ``out`` in the order in which those of ``x`` are read: nothing is lost."""
    shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return out.stride() == x.stride() and not out.is_neg() and (not shared or out.data_ptr() == x.data_ptr())


@dataclass
class Penalty(ABC):
    """A function ψ known through its value and its prox: the base class of all penalties and constraints.

    A penalty is a small dataclass of plain fields with two hooks, ``_value(x)`` and ``_prox(x, step, out)``, and two
    claims about ψ, ``convex`` and ``separable``. The hooks see float32 or float64 tensors with at least one element and
    a step > 0; checks, half precision, ``out=``, a step of zero and empty tensors are handled for them. ``_prox``
    writes to ``out`` if it is given (it may be ``x``), or returns a new tensor, which is then copied. Of a tensor that
    is divided among processes (``DTensor``) they see the own part if ψ is separable; all of it otherwise, which has to
    be gathered. Of a large tensor ``_prox`` sees some rows at a time if ψ is separable and its fields are numbers.
    Fields of the types in `proxmo.penalties.base` (``NonNegativeFloat``, ``PositiveFloat``, ``AnyFloat``, ``Count``,
    ``Dim``) are checked whenever they are set. For a set to project onto, see `Constraint`.

    >>> from dataclasses import dataclass
    >>> import torch, proxmo
    >>> from proxmo.penalties.base import NonNegativeFloat
    >>> @dataclass
    ... class Anchor(proxmo.Penalty):  # ψ(x) = s/2·Σ(x − c)²
    ...     strength: NonNegativeFloat
    ...     center: float
    ...     convex = separable = True
    ...     def _value(self, x):
    ...         return self.strength / 2 * (x - self.center).square().sum()
    ...     def _prox(self, x, step, out):
    ...         t = step * self.strength
    ...         return torch.div(x + t * self.center, 1 + t, out=out)
    >>> Anchor(1.0, center=1.0).prox(torch.tensor([0.0, 3.0]), step=1.0)
    tensor([0.5000, 2.0000])
    """

    convex: ClassVar[bool]
    """Whether ψ is convex; then its prox is single-valued and firmly non-expansive."""
    separable: ClassVar[bool]
    """Whether ψ is a sum over elements; then its prox acts on each element alone."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            fields = [field.name for field in dataclasses.fields(self)]
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, it has {fields}; a penalty is a @dataclass of such"
            )
        check = _field_checks(type(self)).get(name)
        super().__setattr__(name, value if check is None else check(f"{type(self).__name__}: {name}", value))

    def value(self, x: Tensor) -> Tensor:
        """ψ(x) as a 0-d tensor, differentiable where ψ is; an empty tensor has value 0.

        Of a ``DTensor`` it is the value of the whole, the same on every process.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).value(torch.tensor([1.0, -3.0]))
        tensor(8.)
        """
        return self._evaluate(x, self._value)

    def _evaluate(self, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
        """hook(x), a 0-d tensor that is 0 for an empty ``x``; what it gives for parts of a separable ψ adds up."""
        self.check(checks.floating("x", x))
        work = widen(x)
        if x.requires_grad and torch.is_grad_enabled():
            work = shards.full(work)  # gathering is differentiable
        seen = self._seen(work)
        value = hook(seen) if seen.numel() else shards.local(seen).new_zeros(())
        return shards.add_up(value, [split.processes for split in shards.splits(work)]) if self.separable else value

    def _seen(self, x: Tensor) -> Tensor:
        """What the hooks see of a tensor that may be divided among processes."""
        return shards.local(x) if self.separable else shards.full(x)

    def prox(self, x: Tensor, step: float | Tensor, *, out: Tensor | None = None, fused: bool = False) -> Tensor:
        """The minimiser of ψ(u) + ‖u − x‖² / (2·step) over u, a global one where ψ is not convex.

        Computed in float32 at least and returned in the dtype of ``x``, outside autograd. ``step = 0`` gives ``x``
        itself, for constraints too. ``out`` may be ``x``. A ``DTensor`` gives one that is divided in the same way.
        ``fused`` takes a compiled loop, if there is one for this penalty and tensor, as for `ProxSGD`.

        >>> import torch, proxmo
        >>> proxmo.L1(2.0).prox(torch.tensor([1.5, -3.0]), step=0.5)
        tensor([ 0.5000, -2.0000])
        """
        checks.floating("x", x)
        checks.same_as("out", out, x)
        step = checks.step("step", step)
        if fused and is_ordinary(x) and (kernels := loops()) and kernels.takes(self, x):
            size = step.item() if isinstance(step, Tensor) else step
            if size > 0:
                return self._prox_by_loop(kernels, x, size, out)
        with torch.no_grad():
            return self.apply(x, step, out)

    def _prox_by_loop(self, kernels: ModuleType, x: Tensor, step: float, out: Tensor | None) -> Tensor:
        self.check(x)
        if out is not None and not _written_as_read(out, x):
            with torch.no_grad():
                return out.copy_(self._prox_by_loop(kernels, x, step, None))
        result = empty_like(x) if out is None else out
        kernels.prox(x, step, self, result)
        return result

    def apply(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        """`prox` for callers that have checked their step: it does not read a tensor step, which may be on a device."""
        self.check(x)
        if x.numel() == 0 or (not isinstance(step, Tensor) and step == 0):
            return x.clone() if out is None else out.copy_(x)
        if isinstance(step, Tensor) and step.device.type != "mps":
            step = step.double()  # step·strength may leave the range of float32
        if shards.is_divided(x):
            return self._apply_to_parts(x, step, out)
        work = widen(x)
        if isinstance(step, Tensor):
            result = torch.where(step == 0, work, self._prox_by_parts(work, step, None))
        else:
            result = self._prox_by_parts(work, step, out if work is x else None)
        if out is None:
            return result if result is not x and result.dtype == x.dtype else result.to(x.dtype, copy=True)
        return out if result is out else out.copy_(result)

    def apply_to_all(self, tensors: Sequence[Tensor], step: float | Tensor) -> None:
        """`apply` in place, soon for many ordinary tensors that are fit to compute in and were checked."""
        if not isinstance(step, Tensor) and step == 0:
            return
        if isinstance(step, Tensor) or shards.any_divided(tensors):
            for x in tensors:
                self.apply(x, step, out=x)
            return
        for x in tensors:
            if x.numel() and (result := self._prox_by_parts(x, step, x)) is not x:
                x.copy_(result)

    def apply_in_one_piece(self, x: Tensor, step: float) -> None:
        """`apply_to_all` for one tensor, which has elements, without parts; the step is above 0."""
        if (result := self._prox(x, step, x)) is not x:
            x.copy_(result)

    def _apply_to_parts(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        work, target = widen(x), None if out is None else shards.local(out)
        part = shards.local(work)
        if isinstance(step, Tensor):
            result = torch.where(step == 0, part, self._prox_of_part(work, step, None))
        else:
            result = self._prox_of_part(work, step, target if work is x else None)
        if out is None or target is None:
            # what comes back of a tensor that all processes have whole may be it itself
            return shards.from_local(result.to(x.dtype, copy=result.data_ptr() == part.data_ptr()), x)
        if result is not target:
            target.copy_(result)
        shards.note_written([out])
        return out

    def _prox_of_part(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        """What this process holds of the prox."""
        seen = self._seen(x)
        if seen is x or self.separable:
            return self._prox_by_parts(seen, step, out) if seen.numel() else seen
        return shards.part_of(self._prox_by_parts(seen, step, None), x)

    def _prox_by_parts(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        """`_prox`, of a large tensor part by part where that can be."""
        parts = number_of_parts(x)
        if parts == 1 or not self.acts_on_rows(x):
            return self._prox(x, step, out)
        whole = x if out is x else empty_like(x)  # another ``out`` may share memory with other parts
        for part, target in zip(x.chunk(parts), whole.chunk(parts), strict=True):
            if (result := self._prox(part, step, target)) is not target:
                target.copy_(result)
        return whole

    def acts_on_rows(self, x: Tensor) -> bool:
        """Whether the prox of ``x`` is made of those of its rows, along the first axis."""
        return self.separable and self._is_uniform()

    def _is_uniform(self) -> bool:
        """Whether all rows are treated alike: not if a field has, say, weights of all elements."""
        return all(name == "dim" or isinstance(value, (int, float)) for name, value in vars(self).items())

    def check(self, x: Tensor) -> None:  # noqa: B027  most penalties fit every tensor
        """Raise a ``ValueError`` if this penalty does not fit the shape of ``x``."""

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        """How many groups of ``x`` are entirely zero, and how many there are; ``None`` for a penalty without groups."""
        return None

    def _value(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _value")

    @abstractmethod
    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        """Write the result to ``out`` if given (it may be ``x``), else to a new tensor; return it."""


class WithDim(Penalty):
    """A penalty whose field ``dim`` names axes, which a tensor must have."""

    dim: Dim

    def check(self, x: Tensor) -> None:
        indexing_axes(x, self.dim)


class Grouped(WithDim):
    """A penalty whose ``dim`` names the axes that index its groups; with ``None`` the whole tensor is one.

    Its hooks read ``x`` through `Groups`, which reduce also over what other processes hold of it: nothing is gathered.
    """

    sum_over_groups: ClassVar[bool] = False
    """Whether ψ is a sum over groups; then its prox acts on each group alone."""

    def zero_groups(self, x: Tensor) -> tuple[int, int] | None:
        if self.dim is None:
            return None
        groups = Groups(x, self.dim)
        count = math.prod([x.shape[axis] for axis in indexing_axes(x, self.dim)])
        return int(groups.total(groups.sum(groups.elements != 0) == 0)), count

    def acts_on_rows(self, x: Tensor) -> bool:
        alone = self.separable or (self.sum_over_groups and 0 in indexing_axes(x, self.dim))
        return alone and self._is_uniform()

    def _seen(self, x: Tensor) -> Tensor:
        return shards.local(x) if self.separable else x


class Constraint(Penalty):
    """The indicator of a set: value 0 inside and +inf outside, so that the prox is the projection, whatever the step.

    A point counts as inside when it violates the constraint by rounding only, so that a projected point is (unless its
    entries are so small that their dtype has no full precision for them).
    Subclasses write ``_inside(x, slack)``, with ``slack`` the relative violation that rounding explains, and
    ``_project(x, out)``.

    >>> import proxmo
    >>> isinstance(proxmo.Simplex(), proxmo.Constraint)
    True
    """

    def value(self, x: Tensor) -> Tensor:
        def indicator(seen: Tensor) -> Tensor:
            # one rounding to the dtype of x, and a few in sums in the dtype of the computation
            slack = torch.finfo(x.dtype).eps + 16 * torch.finfo(seen.dtype).eps
            return torch.where(self._inside(seen, slack), 0.0, math.inf).to(seen.dtype)

        return self._evaluate(x, indicator)

    def _prox(self, x: Tensor, step: float | Tensor, out: Tensor | None) -> Tensor:
        return self._project(x, out)

    @abstractmethod
    def _inside(self, x: Tensor, slack: float) -> Tensor:
        """A 0-d bool tensor; false when ``x`` has a NaN."""

    @abstractmethod
    def _project(self, x: Tensor, out: Tensor | None) -> Tensor: ...
