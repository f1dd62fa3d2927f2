"""Optimizers: one method per file on the base that takes the step."""

from proxmo.optim.auto import AutoProxSGD
from proxmo.optim.base import Certificate, ProxOptimizer, Sparsity
from proxmo.optim.prox_sgd import ProxSGD

__all__ = ["AutoProxSGD", "Certificate", "ProxOptimizer", "ProxSGD", "Sparsity"]
