"""Optimizers: one method per file on the base that takes the step."""

from proxmo.optim.auto import AutoProxSGD
from proxmo.optim.base import ProxOptimizer
from proxmo.optim.hybrid import ProxHybridSGD
from proxmo.optim.inexact import InexactProxSGD
from proxmo.optim.inner import InnerReport, InnerSGD
from proxmo.optim.prox_adamw import ProxAdamW
from proxmo.optim.prox_lion import ProxLion
from proxmo.optim.prox_sgd import ProxSGD
from proxmo.optim.proximal_step import Certificate
from proxmo.optim.sparsity import FamilySparsity, Sparsity
from proxmo.optim.spiderboost import ProxSpiderBoost
from proxmo.optim.storm import ProxSTORM

__all__ = [
    "AutoProxSGD",
    "Certificate",
    "FamilySparsity",
    "InexactProxSGD",
    "InnerReport",
    "InnerSGD",
    "ProxAdamW",
    "ProxHybridSGD",
    "ProxLion",
    "ProxOptimizer",
    "ProxSGD",
    "ProxSTORM",
    "ProxSpiderBoost",
    "Sparsity",
]
