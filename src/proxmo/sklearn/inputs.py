"""Inputs as the methods see them: every column centred and scaled, while the objective keeps the units of the data.

With A = (X − mean)/scale, a model X·w + b is A·v + c for w = v/scale and b = c − mean·w. The methods work on v, where
all columns are alike; penalties are asked about w (`proxmo.sklearn.units`). A sparse matrix stays as it is: mean and
scale enter its products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor
from torch.nn import functional

Array = NDArray[Any]
ROUNDING = 1e-13  # a column that varies by less than this share of its mean is constant
SMALLEST = 1e-3  # of the smallest scale: columns of a stream that vary by less are left out so far


class Columns(NamedTuple):
    """Means and scales of the columns of X, in float64."""

    mean: Array
    scale: Array
    """Standard deviations, or root mean squares if nothing is centred; 1 for columns that never change."""
    varies: Array
    """Which columns differ from their mean at all."""

    @classmethod
    def of(cls, X: Any, weights: Array, *, center: bool) -> Columns:
        """Measure the columns of X; ``weights`` of the rows sum to 1."""
        mean = np.asarray(weights @ X, dtype=np.float64) if center else np.zeros(X.shape[1])
        if sparse.issparse(X):
            row_weights = np.repeat(weights, np.diff(X.indptr))
            count = X.shape[1]
            stored = np.bincount(X.indices, row_weights, minlength=count)
            full = np.bincount(X.indices, minlength=count) == X.shape[0]
            absent = np.where(full, 0.0, 1 - stored)  # rounding must not be multiplied by the square of a large mean
            squares = row_weights * np.square(X.data - mean[X.indices])
            variance = np.bincount(X.indices, squares, minlength=count) + absent * mean**2
        else:
            variance = weights @ np.square(X - mean)
        scale = np.sqrt(np.maximum(variance, 0.0))
        varies = scale > ROUNDING * np.abs(mean)
        return cls(mean, np.where(varies, scale, 1.0), varies)

    def extended_by(self, part: Columns) -> Columns:
        """Return the same, with scales for columns that were constant until this part of a stream."""
        deviation = np.hypot(np.where(part.varies, part.scale, 0.0), part.mean - self.mean)
        # A column that hardly moves yet may move more later, and its weight would be huge by then.
        least = SMALLEST * self.scale[self.varies].min(initial=np.inf) if self.varies.any() else 0.0
        new = ~self.varies & (deviation > np.maximum(ROUNDING * np.abs(self.mean), least))
        return self._replace(scale=np.where(new, deviation, self.scale), varies=self.varies | new)

    def with_one_scale(self) -> Columns:
        """Return the same with one scale for all columns, for penalties that need one step for all weights."""
        scales = self.scale[self.varies]
        return self._replace(scale=np.full_like(self.scale, np.sqrt(np.square(scales).mean()) if scales.size else 1.0))


class Inputs(ABC):
    """The matrix A = (X − mean)/scale, with rows as samples; columns that never change are zero."""

    @staticmethod
    def of(X: Any, columns: Columns) -> Inputs:
        """Return A for a dense array, of which a copy is made, or for a matrix in CSR format."""
        gain = np.where(columns.varies, 1 / columns.scale, 0.0)
        if sparse.issparse(X):
            return SparseInputs(X, *(torch.from_numpy(a.astype(X.dtype)) for a in (gain, columns.mean * gain)))
        return DenseInputs(torch.from_numpy(((X - columns.mean) * gain).astype(X.dtype)))

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: Array) -> Inputs:
        """Return some of the rows."""

    @abstractmethod
    def pick(self, columns: Array) -> Inputs:
        """Return some of the columns."""

    @abstractmethod
    def times(self, weight: Tensor) -> Tensor:
        """Return A·weightᵀ, of shape (rows, outputs), differentiable in the weight of shape (outputs, columns)."""

    @abstractmethod
    def pull_back(self, slopes: Tensor) -> Tensor:
        """Return slopesᵀ·A, the gradient in the weight for slopes of shape (rows, outputs)."""


class DenseInputs(Inputs):
    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def take(self, rows: Array) -> Inputs:
        return DenseInputs(self._values[torch.from_numpy(rows)])

    def pick(self, columns: Array) -> Inputs:
        return DenseInputs(self._values[:, torch.from_numpy(columns)])

    def times(self, weight: Tensor) -> Tensor:
        return functional.linear(self._values, weight)

    def pull_back(self, slopes: Tensor) -> Tensor:
        return slopes.mT @ self._values


class SparseInputs(Inputs):
    def __init__(self, matrix: Any, gain: Tensor, shift: Tensor) -> None:
        self._matrix, self._gain, self._shift = matrix, gain, shift

    def __len__(self) -> int:
        return int(self._matrix.shape[0])

    def take(self, rows: Array) -> Inputs:
        return SparseInputs(self._matrix[rows], self._gain, self._shift)

    def pick(self, columns: Array) -> Inputs:
        picked = torch.from_numpy(columns)
        return SparseInputs(self._matrix[:, columns], self._gain[picked], self._shift[picked])

    def times(self, weight: Tensor) -> Tensor:
        if weight.requires_grad and torch.is_grad_enabled():
            product: Tensor = _SparseProduct.apply(weight, self)  # type: ignore[no-untyped-call]
            return product
        products = self._matrix @ (weight.detach() * self._gain).mT.contiguous().numpy()
        return torch.from_numpy(products) - weight.detach() @ self._shift

    def pull_back(self, slopes: Tensor) -> Tensor:
        products = self._matrix.T @ slopes.contiguous().numpy()
        return torch.from_numpy(products).mT * self._gain - torch.outer(slopes.sum(0), self._shift)


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: SparseInputs) -> Tensor:
        ctx.inputs = inputs
        return inputs.times(weight.detach())

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return ctx.inputs.pull_back(slopes[0]), None
