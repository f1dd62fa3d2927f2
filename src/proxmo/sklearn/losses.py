"""Losses of samples: functions of the outputs of a model, of shape (samples, outputs), and of targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (n, k) and targets to losses of shape (n,), or (n, k) to be summed over outputs."""


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """(y − f)²/2, as in scikit-learn's `Lasso`."""
    return (outputs - targets).square() / 2


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """(y − f)²/2 where |y − f| ≤ 1, else |y − f| − 1/2."""
    return functional.huber_loss(outputs, targets, reduction="none")


def log_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log p(y): of a sigmoid for two classes, with targets 0 and 1; of a softmax for more, with class indices."""
    if outputs.shape[1] == 1:
        return functional.softplus(outputs) - outputs * targets
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """max(0, 1 − y·f)² with y = ±1, summed over classes, each against the rest."""
    if outputs.shape[1] > 1:
        targets = functional.one_hot(targets, outputs.shape[1])
    return functional.relu(1 - (2 * targets - 1) * outputs).square()


CLASSIFICATION: dict[str, Loss] = {"log_loss": log_loss, "squared_hinge": squared_hinge}
REGRESSION: dict[str, Loss] = {"squared_error": squared_error, "huber": huber}


def find_loss(loss: Any, named: dict[str, Loss]) -> Loss:
    """Return a loss by its name, or a function itself."""
    if callable(loss) and not isinstance(loss, type):
        return loss  # type: ignore[no-any-return]
    if not isinstance(loss, str) or loss not in named:
        raise ValueError(f"loss must be one of {sorted(named)} or a function of outputs and targets, got {loss!r}")
    return named[loss]


def losses_of_samples(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample in the dtype of the outputs; raise if a function of the user returns no such."""
    losses = loss(outputs, targets)
    if not isinstance(losses, Tensor) or losses.dim() not in (1, 2) or len(losses) != len(outputs):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"loss must return one number per sample, of shape ({len(outputs)},), got {shape}")
    if torch.is_grad_enabled() and outputs.requires_grad and not losses.requires_grad:
        raise ValueError(
            f"loss must return a differentiable function of the outputs, got {losses.dtype} numbers without a gradient"
        )
    return (losses.sum(1) if losses.dim() == 2 else losses).to(outputs.dtype)


def mean_and_slopes(loss: Loss, outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """Return the weighted mean of the losses and its gradient in the outputs; ``weights`` sum to 1."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        mean = losses_of_samples(loss, leaf, targets) @ weights
    (slopes,) = torch.autograd.grad(mean, leaf)
    return float(mean.detach()), slopes
