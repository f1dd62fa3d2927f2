"""Penalties and constraints: functions known through their value and their prox."""

from proxmo.penalties.base import Penalty
from proxmo.penalties.budgets import NM, TopK
from proxmo.penalties.constraints import Box, L1Ball, L2Ball, LInfBall, NonNegative, Simplex
from proxmo.penalties.elementwise import L0, L1, MCP, SCAD, ElasticNet, Huber, LHalf, SquaredL2
from proxmo.penalties.groups import GroupL2, GroupLInf, SparseGroup
from proxmo.penalties.kinds import Constraint
from proxmo.penalties.matrix import Nuclear, NuclearBall, Rank
from proxmo.penalties.trimmed import Trimmed

__all__ = [
    "L0",
    "L1",
    "MCP",
    "NM",
    "SCAD",
    "Box",
    "Constraint",
    "ElasticNet",
    "GroupL2",
    "GroupLInf",
    "Huber",
    "L1Ball",
    "L2Ball",
    "LHalf",
    "LInfBall",
    "NonNegative",
    "Nuclear",
    "NuclearBall",
    "Penalty",
    "Rank",
    "Simplex",
    "SparseGroup",
    "SquaredL2",
    "TopK",
    "Trimmed",
]
