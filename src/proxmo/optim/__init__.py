"""Optimizers: one method per file on the base that takes the step."""

from proxmo.optim.base import ProxOptimizer, Sparsity
from proxmo.optim.prox_sgd import ProxSGD

__all__ = ["ProxOptimizer", "ProxSGD", "Sparsity"]
