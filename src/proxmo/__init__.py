"""Proximal optimization for PyTorch: minimise f(x) + ψ(x), f seen through stochastic gradients, ψ through its prox.

>>> import torch, proxmo
>>> weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.1, 0.0]]))
>>> optimizer = proxmo.ProxSGD([weight], lr=0.1, momentum=0.9, penalty=proxmo.GroupLInf(2.0, dim=0))
>>> weight.sum().backward()
>>> optimizer.step()
>>> weight.data
tensor([[ 0.9000, -1.9000],
        [ 0.0000,  0.0000]])
"""

from importlib.metadata import version

from proxmo import criteria, theory
from proxmo.compaction import (
    CompactionError,
    CompactionReport,
    compact,
    load_compact,
    save_compact,
    unit_groups,
)
from proxmo.estimates import Estimates, estimate_constants
from proxmo.history import History
from proxmo.iterates import RandomIterate
from proxmo.layers import ParamGroups, param_groups
from proxmo.optim import (
    AutoProxSGD,
    Certificate,
    FamilySparsity,
    InexactProxSGD,
    InnerReport,
    InnerSGD,
    ProxAdamW,
    ProxHybridSGD,
    ProxLion,
    ProxOptimizer,
    ProxSGD,
    ProxSpiderBoost,
    ProxSTORM,
    Sparsity,
)
from proxmo.penalties import (
    L0,
    L1,
    MCP,
    NM,
    SCAD,
    Box,
    Constraint,
    ElasticNet,
    GroupL2,
    GroupLInf,
    Huber,
    L1Ball,
    L2Ball,
    LHalf,
    LInfBall,
    NonNegative,
    Nuclear,
    NuclearBall,
    Penalty,
    Rank,
    Simplex,
    SparseGroup,
    SquaredL2,
    TopK,
    Trimmed,
)
from proxmo.proxy import ProxyObjective
from proxmo.refit import FrozenZeros, freeze_zeros
from proxmo.schedules import CosineRates, RateScheduler, StrengthScheduler
from proxmo.shrinking import ShrinkReport, shrink
from proxmo.targets import KeepScheduler

__version__ = version("proxmo")

__all__ = [
    "L0",
    "L1",
    "MCP",
    "NM",
    "SCAD",
    "AutoProxSGD",
    "Box",
    "Certificate",
    "CompactionError",
    "CompactionReport",
    "Constraint",
    "CosineRates",
    "ElasticNet",
    "Estimates",
    "FamilySparsity",
    "FrozenZeros",
    "GroupL2",
    "GroupLInf",
    "History",
    "Huber",
    "InexactProxSGD",
    "InnerReport",
    "InnerSGD",
    "KeepScheduler",
    "L1Ball",
    "L2Ball",
    "LHalf",
    "LInfBall",
    "NonNegative",
    "Nuclear",
    "NuclearBall",
    "ParamGroups",
    "Penalty",
    "ProxAdamW",
    "ProxHybridSGD",
    "ProxLion",
    "ProxOptimizer",
    "ProxSGD",
    "ProxSTORM",
    "ProxSpiderBoost",
    "ProxyObjective",
    "RandomIterate",
    "Rank",
    "RateScheduler",
    "ShrinkReport",
    "Simplex",
    "SparseGroup",
    "Sparsity",
    "SquaredL2",
    "StrengthScheduler",
    "TopK",
    "Trimmed",
    "compact",
    "criteria",
    "estimate_constants",
    "freeze_zeros",
    "load_compact",
    "param_groups",
    "save_compact",
    "shrink",
    "theory",
    "unit_groups",
]
