"""Prox operators of other libraries, wrapped as (matrix, threshold) ↦ matrix; used only if installed.

Libraries that take one vector at a time are called row by row, as their users have to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

MatrixProx = Callable[[Tensor, float], Tensor]
Maker = Callable[[Any], MatrixProx]


def _of_arrays(call: Callable[[Any, float], Any]) -> MatrixProx:
    """Wrap a function of NumPy or JAX arrays."""
    return lambda x, threshold: torch.from_numpy(np.array(call(x.numpy(), threshold)))


def _by_rows(make: Callable[[int, float], Callable[[Any], Any]]) -> MatrixProx:
    """Wrap a function of vectors: ``make(columns, threshold)`` returns the function to apply to each row."""

    def call(matrix: Any, threshold: float) -> Any:
        prox = make(matrix.shape[1], threshold)
        return np.stack([prox(row) for row in matrix])

    return _of_arrays(call)


def _vmapped(prox: Any) -> MatrixProx:
    import jax

    return _of_arrays(jax.jit(jax.vmap(prox, in_axes=(0, None))))


def _in_place(prox: Callable[[Tensor, float], object]) -> MatrixProx:
    def call(x: Tensor, threshold: float) -> Tensor:
        y = x.clone()
        prox(y, threshold)
        return y

    return call


def _flat(prox: Callable[[tuple[int, ...]], Callable[[Any, float], Any]]) -> MatrixProx:
    """Wrap a function of flattened matrices: ``prox(shape)`` returns the function to call."""
    return _of_arrays(lambda x, threshold: np.asarray(prox(x.shape)(x.ravel(), threshold)).reshape(x.shape))


def _load(name: str) -> Any:
    return importlib.import_module(name)


def _row_indices(shape: tuple[int, ...]) -> list[list[int]]:
    return np.arange(shape[0] * shape[1]).reshape(shape).tolist()


PEERS: dict[str, dict[str, Maker]] = {
    "ℓ∞,1": {
        "proximal_gradient": lambda m: _in_place(
            lambda x, t: _load("proximal_gradient.proximalGradient").linf1(x, reg=t, lr=1.0)
        ),
        "proxop": lambda m: _of_arrays(lambda x, t: m.Linf1().prox(x, t)),
        "jaxopt": lambda m: _vmapped(lambda row, t: row - m.projection.projection_l1_ball(row, t)),
        "pyproximal": lambda m: _by_rows(
            lambda n, t: lambda row: row - m.L1Ball(n, t, maxiter=200, xtol=1e-12).prox(row, 1.0)
        ),
    },
    "ℓ1 ball": {
        "proxop": lambda m: _of_arrays(lambda x, t: m.L1Ball(t, axis=1).prox(x)),
        "jaxopt": lambda m: _vmapped(m.projection.projection_l1_ball),
        "pyproximal": lambda m: _by_rows(
            lambda n, t: lambda row: m.L1Ball(n, t, maxiter=200, xtol=1e-12).prox(row, 1.0)
        ),
        "copt": lambda m: _by_rows(lambda n, t: lambda row: _load("copt.constraint").L1Ball(t).prox(row, 1.0)),
        "proxtorch": lambda m: _by_rows(
            lambda n, t: lambda row: _load("proxtorch.constraints").L1Ball(t).prox(torch.from_numpy(row)).numpy()
        ),
    },
    "simplex": {
        "proxop": lambda m: _of_arrays(lambda x, t: m.Simplex(t, axis=1).prox(x)),
        "jaxopt": lambda m: _vmapped(m.projection.projection_simplex),
        "pyproximal": lambda m: _by_rows(lambda n, t: lambda row: m.Simplex(n, t).prox(row, 1.0)),
        "copt": lambda m: _by_rows(
            lambda n, t: lambda row: _load("copt.constraint").SimplexConstraint(t).prox(row, 1.0)
        ),
    },
    "ℓ2,1": {
        "proximal_gradient": lambda m: _in_place(
            lambda x, t: _load("proximal_gradient.proximalGradient").l21(x, reg=t, lr=1.0)
        ),
        "proxop": lambda m: _of_arrays(lambda x, t: m.L21rows().prox(x, t)),
        "jaxopt": lambda m: _vmapped(m.prox.prox_group_lasso),
        "pyproximal": lambda m: _of_arrays(
            lambda x, t: m.L21(ndim=x.shape[1]).prox(x.T.ravel(), t).reshape(x.shape[::-1]).T
        ),
        "copt": lambda m: _flat(lambda shape: _load("copt.penalty").GroupL1(1.0, _row_indices(shape)).prox),
        "proxtorch": lambda m: (
            lambda x, t: (
                _load("proxtorch.operators").GroupLasso(1.0, [x.shape[1]] * len(x)).prox(x.ravel(), t).reshape(x.shape)
            )
        ),
        "torchao": lambda m: _in_place(
            lambda x, t: _load("torchao.prototype.pat").ProxGroupLassoVectorized(t, 1).apply_(x, 1 / x.shape[1] ** 0.5)
        ),
        "skglm": lambda m: _by_rows(lambda n, t: lambda row: _load("skglm.utils.prox_funcs").BST(row.astype(float), t)),
    },
    "ℓ1": {
        "proxop": lambda m: _of_arrays(lambda x, t: m.AbsValue().prox(x, t)),
        "jaxopt": lambda m: _vmapped(m.prox.prox_lasso),
        "pyproximal": lambda m: _flat(lambda shape: m.L1().prox),
        "copt": lambda m: _flat(lambda shape: _load("copt.penalty").L1Norm(1.0).prox),
        "proxtorch": lambda m: lambda x, t: _load("proxtorch.operators").L1(1.0).prox(x, t),
        "torchao": lambda m: _in_place(lambda x, t: _load("torchao.prototype.pat").ProxLasso(t).apply_(x, 1.0)),
        "skglm": lambda m: _flat(lambda shape: _load("skglm.utils.prox_funcs").ST_vec),
    },
    "nuclear": {
        "proxop": lambda m: _of_arrays(lambda x, t: m.NuclearNorm().prox(x, t)),
        "pyproximal": lambda m: _flat(lambda shape: m.Nuclear(shape).prox),
        "copt": lambda m: _flat(lambda shape: _load("copt.penalty").TraceNorm(1.0, shape).prox),
        "proxtorch": lambda m: lambda x, t: _load("proxtorch.operators").TraceNorm(1.0).prox(x, t),
    },
}


def installed(kernel: str) -> Iterator[tuple[str, MatrixProx | str]]:
    """Yield each peer that has this kernel, with its prox or the reason why it cannot be used."""
    for name, make in PEERS[kernel].items():
        try:
            yield name, make(importlib.import_module(name))
        except Exception as error:  # peers fail in many ways
            yield name, f"{type(error).__name__}: {error}"
