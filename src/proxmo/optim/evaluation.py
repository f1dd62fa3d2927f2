"""Evaluate a closure, and evaluate it again at another point without side effects.

Methods that compare the gradients of one sample at two points need the second evaluation to leave no trace: parameters,
gradients, random numbers and module buffers (such as the running statistics of BatchNorm) are restored, even if it
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Closure: TypeAlias = Callable[[], Any]
"""Evaluates the loss on a sample at the present parameters, calls ``backward`` and returns the loss."""


def evaluate(name: str, closure: Closure, params: list[Tensor]) -> Any:
    """Clear the gradients, call the closure and return its result."""
    if not callable(closure):
        raise TypeError(f"{name} must be a function that evaluates the loss and calls backward, got {closure!r}")
    for p in params:
        p.grad = None
    with torch.enable_grad():
        return closure()


class Sample:
    """A closure evaluated at the present point, which can be evaluated at other points on the same sample.

    The same sample includes the random numbers of torch: dropout drops the same units.
    """

    def __init__(self, name: str, closure: Closure, params: list[Tensor]) -> None:
        self._name, self._closure, self._params = name, closure, params
        self._random = _random_states(params)
        self.loss: float = evaluate(name, closure, params)

    @torch.no_grad()
    def gradients_at(self, points: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients with the parameters at ``points``; leave everything else as it was."""
        here, gradients = [p.detach().clone() for p in self._params], copies_of_gradients(self._params)
        after = _random_states(self._params)
        with traces_of_modules(self._params) as traces:
            try:
                for p, point in zip(self._params, points, strict=True):
                    p.copy_(point)
                _set_random_states(self._random)
                evaluate(self._name, self._closure, self._params)
                return [p.grad for p in self._params]
            finally:
                for p, x, gradient in zip(self._params, here, gradients, strict=True):
                    p.copy_(x)
                    p.grad = gradient
                _set_random_states(after)
                traces.restore_buffers()


def copies_of_gradients(params: list[Tensor]) -> list[Tensor | None]:
    """Return copies of the gradients: DDP may write the next ones to the same memory."""
    return [None if p.grad is None else p.grad.clone() for p in params]


class Traces:
    """The buffers of called modules, and the gradients of their parameters that are not ours, as they were before."""

    def __init__(self, ours: list[Tensor] | None) -> None:
        self._ours = None if ours is None else set(ours)
        self._modules: set[nn.Module] = set()
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self.gradients: dict[Tensor, Tensor | None] = {}

    def keep(self, module: nn.Module) -> None:
        """Remember a module and its submodules, unless they are known already."""
        if module in self._modules:  # fast path: submodules are called too
            return
        for part in set(module.modules()) - self._modules:
            self._modules.add(part)
            for name, buffer in part.named_buffers(recurse=False):
                self._buffers.append((part, name, buffer, buffer.clone()))
            for p in part.parameters(recurse=False):
                if self._ours is not None and p not in self._ours:
                    self.gradients.setdefault(p, p.grad)  # modules may share it
                    p.grad = None

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore all buffers."""
        for part, name, buffer, value in self._buffers:
            if not _is_expanded(buffer):  # an expanded one cannot be written to, so it has not changed
                buffer.copy_(value)
            if getattr(part, name) is not buffer:
                setattr(part, name, buffer)


@contextmanager
def traces_of_modules(ours: list[Tensor] | None = None) -> Iterator[Traces]:
    """Watch every module that is called inside.

    Given ``ours``, restore the gradients of all other parameters of these modules at the end, so that evaluations
    inside do not add to what another optimizer is going to use.

    A closure does not say which modules it calls, so ``nn.Module.__call__`` is patched meanwhile. torch's global hooks
    would recompile compiled modules; these also run unpatched.
    """
    traces = Traces(ours)
    call = nn.Module.__call__

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traces.keep(module)
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if not compiled:
            return call(module, *args, **kwargs)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            return call(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = watched  # type: ignore[method-assign]

    nn.Module.__call__ = watched  # type: ignore[method-assign]
    try:
        yield traces
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        for p, gradient in traces.gradients.items():
            p.grad = gradient


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


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
