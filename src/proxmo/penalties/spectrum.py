"""How to scale the singular values of a matrix.

For X = U diag(σ) Vᵀ and gains g compute U diag(g) Uᵀ X, or X V diag(g) Vᵀ if X is tall. This needs only the singular
vectors of the shorter side, which are the eigenvectors of the Gram matrix XXᵀ (or XᵀX) with eigenvalues σ². Values are
never read, so that it works on a device and in a graph: masks take the place of branches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from proxmo.checks import Dim
from proxmo.penalties.axes import as_matrix, from_matrix

Gains = Callable[[Tensor], Tensor]


def singular_values(x: Tensor, dim: Dim) -> Tensor:
    """Return the singular values in decreasing order, in float64."""
    matrix, finite = _finite_or_zero(as_matrix(x, dim))
    return torch.where(finite, torch.linalg.svdvals(matrix.double()), torch.nan)


def scale_singular_values(x: Tensor, dim: Dim, gains: Gains, out: Tensor | None) -> Tensor:
    """Return U diag(gains(σ)·σ) Vᵀ for ``x`` = U diag(σ) Vᵀ; if all gains are 1, exactly ``x``.

    ``gains`` maps the σ, in increasing order, to numbers in [0, 1] that do not decrease.
    """
    matrix, finite = _finite_or_zero(as_matrix(x, dim))
    with _full_precision(x.device.type):
        vectors, sigma = _factors(matrix)
        gain = gains(sigma)
        projector = (vectors * gain).to(matrix.dtype) @ vectors.to(matrix.dtype).mT
        scaled = matrix @ projector if _is_tall(matrix) else projector @ matrix
    scaled = torch.where((gain == 1).all(), matrix, scaled)
    result = from_matrix(torch.where(finite, scaled, torch.nan), x, dim)
    return result if out is None else out.copy_(result)


def _full_precision(device: str) -> AbstractContextManager[None]:
    """Return a context in which products keep the dtype of their factors: `torch.autocast` would lower it."""
    # Dynamo of torch 2.9 cannot trace the first question; devices that it compiles for have autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    cast = known and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else nullcontext()


def _finite_or_zero(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix that LAPACK accepts, and whether it is the given one."""
    finite = matrix.isfinite().all()
    return torch.where(finite, matrix, 0.0), finite


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors along the shorter side, as columns, and the singular values, in increasing order.

    float32 goes through the Gram matrix in float64: several times faster than an SVD, and right to 1e-8 of the largest
    singular value, where a float32 Gram matrix would lose half of the digits. float64 needs the SVD.
    """
    tall = _is_tall(matrix)
    if matrix.dtype == torch.float64:
        left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
        return (right.mT if tall else left).flip(-1), sigma.flip(-1)
    matrix = matrix.double()
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix if tall else matrix @ matrix.mT)
    return vectors, squares.clamp(min=0).sqrt()
