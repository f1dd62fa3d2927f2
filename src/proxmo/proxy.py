"""Proxy training: a small data set preconditions training on a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn


class ProxyObjective:
    """Split a training loss ℓ into f = ℓ − ℓ̂ and ψ = ℓ̂, where the proxy ℓ̂ is the loss on a small part of the data.

    `InexactProxSGD` evaluates ℓ once per step and takes its inner steps on the cheap ℓ̂. The closer ℓ̂ is to ℓ, the less
    f has to correct (statistical preconditioning). All gradients are of mini-batches from the loaders, which restart
    when exhausted. ``loss_value`` is ℓ on the last mini-batch.

    Args:
        model: the model; batches are moved to its device.
        loss: ``loss(model(inputs), targets)`` is the loss to minimise.
        loader: yields pairs (inputs, targets) for ℓ: a ``DataLoader``, a list, or any iterable that can be iterated
            more than once.
        proxy_loader: the same for ℓ̂.

    >>> import torch, proxmo
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> inputs = torch.randn(512, 10)
    >>> targets = inputs.sum(1, keepdim=True)
    >>> loader = list(zip(inputs.split(64), targets.split(64)))
    >>> model = nn.Linear(10, 1)
    >>> objective = ProxyObjective(model, nn.functional.mse_loss, loader, loader[:2])
    >>> optimizer = proxmo.InexactProxSGD(model.parameters(), lr=0.5, inner=proxmo.InnerSGD(steps=20, lr=0.05))
    >>> for _ in range(40):
    ...     _ = optimizer.step(objective.loss_closure, objective.psi_closure)
    >>> objective.loss_value < 0.01
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        loader: Iterable[tuple[Any, Any]],
        proxy_loader: Iterable[tuple[Any, Any]],
    ) -> None:
        self._model, self._loss = model, loss
        self._batches = _Endless("loader", loader)
        self._proxy_batches = _Endless("proxy_loader", proxy_loader)
        self.loss_value = float("nan")

    def loss_closure(self) -> float:
        """Return f = ℓ − ℓ̂ on a mini-batch of each, and set its gradient."""
        self._model.zero_grad()
        loss = self._evaluate(self._batches.next())
        loss.backward()  # type: ignore[no-untyped-call]
        proxy = self._evaluate(self._proxy_batches.next())
        (-proxy).backward()  # type: ignore[no-untyped-call]
        self.loss_value = float(loss.detach())
        return self.loss_value - float(proxy.detach())

    def psi_closure(self) -> None:
        """Set the gradient of ψ = ℓ̂ on a mini-batch; return no value, since the value on one mini-batch is not ψ."""
        self._model.zero_grad()
        self._evaluate(self._proxy_batches.next()).backward()  # type: ignore[no-untyped-call]

    def _evaluate(self, batch: tuple[Any, Any]) -> Tensor:
        device = next(self._model.parameters()).device
        inputs, targets = (part.to(device) if isinstance(part, Tensor) else part for part in batch)
        return self._loss(self._model(inputs), targets)


class _Endless:
    """The batches of a loader in turn, which restarts when exhausted."""

    def __init__(self, name: str, loader: Iterable[tuple[Any, Any]]) -> None:
        self._name, self._loader = name, loader
        self._batches: Iterator[tuple[Any, Any]] = iter(())

    def next(self) -> tuple[Any, Any]:
        for _ in range(2):
            for batch in self._batches:
                return batch
            self._batches = iter(self._loader)
        raise ValueError(f"{self._name} must yield batches each time it is iterated, got none")
