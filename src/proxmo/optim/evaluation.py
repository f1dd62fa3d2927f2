"""Evaluating a closure, and evaluating it again elsewhere as if it had not been.

Methods that compare the gradients of one sample at two points need the second evaluation to leave no trace: parameters,
gradients, random numbers and the buffers of modules (running statistics of BatchNorm, say) are put back, whatever
happens in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

Closure: TypeAlias = Callable[[], Any]
"""Evaluates the loss on a sample at the parameters as they are, calls ``backward`` and returns the loss."""


def evaluate(name: str, closure: Closure, params: list[Tensor]) -> Any:
    """Call the closure with cleared gradients, so that it may forget to do so; returns what it returns."""
    if not callable(closure):
        raise TypeError(f"{name} must be a function that evaluates the loss and calls backward, got {closure!r}")
    for p in params:
        p.grad = None
    with torch.enable_grad():
        return closure()


class Sample:
    """A closure evaluated at the present point, that can be evaluated at other points on the same sample.

    The same sample means the same random numbers of torch too: dropout drops the same units.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> def closure():
    ...     loss = (torch.rand(()) * x).square().sum()
    ...     loss.backward()
    ...     return loss
    >>> sample = Sample("closure", closure, [x])
    >>> there, = sample.gradients_at([torch.tensor([6.0])])
    >>> torch.equal(there, 2 * x.grad), x.item()
    (True, 3.0)
    """

    def __init__(self, name: str, closure: Closure, params: list[Tensor]) -> None:
        self._name, self._closure, self._params = name, closure, params
        self._random = _random_states(params)
        self.loss = evaluate(name, closure, params)
        self.gradients = [p.grad for p in params]

    def gradients_at(self, points: list[Tensor]) -> list[Tensor | None]:
        """The gradients with the parameters at ``points``; everything else is left as it was."""
        here = [p.detach().clone() for p in self._params]
        # a copy, for a reducer such as DDP's may give the next gradients the same memory
        self.gradients = [None if g is None else g.clone() for g in self.gradients]
        after = _random_states(self._params)
        try:
            with torch.no_grad():
                for p, point in zip(self._params, points, strict=True):
                    p.copy_(point)
            _set_random_states(self._random)
            with buffers_kept():
                evaluate(self._name, self._closure, self._params)
            return [p.grad for p in self._params]
        finally:
            _set_random_states(after)
            with torch.no_grad():
                for p, x, gradient in zip(self._params, here, self.gradients, strict=True):
                    p.copy_(x)
                    p.grad = gradient


class Buffers:
    """What the buffers of some modules were."""

    def __init__(self) -> None:
        self._modules: set[nn.Module] = set()
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def keep(self, module: nn.Module) -> None:
        """Remember the buffers of a module and of all in it, unless they are known already."""
        for part in module.modules():
            if part not in self._modules:
                self._modules.add(part)
                for name, buffer in part.named_buffers(recurse=False):
                    self._kept.append((part, name, buffer, buffer.clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of them back."""
        for part, name, buffer, value in self._kept:
            buffer.copy_(value)
            if getattr(part, name) is not buffer:
                setattr(part, name, buffer)


@contextmanager
def buffers_watched() -> Iterator[Buffers]:
    """Remember the buffers of every module that is called inside, as they were before.

    A closure does not say which modules it calls. So each outermost call is caught by a hook for all modules, which is
    away again while the module runs: compiled modules would be compiled anew for it.
    """
    buffers = Buffers()
    with ExitStack() as hooks:
        hooks.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Using `torch.compile.*when there are global hooks")

        def watch() -> None:
            hook = register_module_forward_pre_hook(called)
            hooks.callback(hook.remove)
            active.append(hook)

        def called(module: nn.Module, _: Any) -> None:
            active.pop().remove()
            buffers.keep(module)
            back = module.register_forward_hook(lambda *_: returned(), always_call=True)
            hooks.callback(back.remove)
            running.append(back)

        def returned() -> None:
            running.pop().remove()
            watch()

        active: list[Any] = []
        running: list[Any] = []
        watch()
        yield buffers


@contextmanager
def buffers_kept() -> Iterator[None]:
    """Undo what modules called inside do to their buffers."""
    with buffers_watched() as buffers:
        try:
            yield
        finally:
            buffers.restore()


def _random_states(params: list[Tensor]) -> list[tuple[torch.device, Tensor]]:
    devices = {p.device for p in params if p.device.type in ("cuda", "xpu")}
    states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]
    return [(torch.device("cpu"), torch.get_rng_state()), *states]


def _set_random_states(states: list[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
