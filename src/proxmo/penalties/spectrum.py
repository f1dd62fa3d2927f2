"""The one way to scale the singular values of a matrix, or rather four, each the fastest for some matrices.

For X = U diag(σ) Vᵀ and gains g all of them compute U diag(g) Uᵀ X, or X V diag(g) Vᵀ if X is tall. So they need only
the singular vectors of the shorter side, which are the eigenvectors of the Gram matrix XXᵀ (or XᵀX) with eigenvalues
σ²; and a gain of 0 leaves nothing.

- `_scaled_small`: products in NumPy, since calls of torch would be most of the time.
- `_scaled_square`: eigenvectors in float32, mended, where finding them would be most of the time.
- `_scaled_by_what_stays`: eigenvectors in float64, and only those that stay are multiplied.
- `_scaled_anywhere`: the same without asking for numbers, on a device or in a graph that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import isfinite, sqrt

import torch
from torch import Tensor

from proxmo.checks import Dim
from proxmo.parts import is_at_hand
from proxmo.penalties.axes import as_matrix, from_matrix

Gains = Callable[[Tensor], Tensor]

# Multiplications of a Gram matrix up to which NumPy is faster, and OpenBLAS, which it mostly has, starts no threads.
_SMALL = 1 << 18
# Mending pays from this length of the shorter side on, if the longer one is at most so many times as long, and if the
# σ² are as even as if more than this share of them were equal and the others 0: else many are mixed, see below.
_WORTH_MENDING = 128
_NEARLY_SQUARE = 3
_EVEN = 0.2
# Shares of the largest σ², 2e-6 of which is the norm of C beside its diagonal. Below the one, or as close as the other
# to the square of the threshold, the second order of that would be seen.
_MIXED = 1e-3
_CLOSE = 2e-5
# Where the largest entry is in this range, sums of squares are float32 numbers, and σ² below _TINY are as good as 0.
# Quotients by _TINY are float32 numbers too.
_SMALLEST, _LARGEST = 1e-4, 1e4
_TINY = 1e-30


def singular_values(x: Tensor, dim: Dim) -> Tensor:
    """The singular values in decreasing order, in float64."""
    matrix, finite = _finite_or_zero(as_matrix(x, dim))
    return torch.where(finite, torch.linalg.svdvals(matrix.double()), torch.nan)


def scale_singular_values(x: Tensor, dim: Dim, gains: Gains, out: Tensor | None, *, soft: bool) -> Tensor:
    """U diag(gains(σ)·σ) Vᵀ for ``x`` = U diag(σ) Vᵀ; where all gains are 1 that is ``x`` to the last bit.

    Gains are in [0, 1] and grow with σ. If they are ``soft``, σ·gains(σ) is max(σ − level, 0) with some level ≥ 0. If
    not, they may also depend on the order of σ, which is increasing then.
    """
    matrix, at_hand = as_matrix(x, dim), is_at_hand(x)
    scaled = _scaled_at_hand(matrix, gains, soft) if at_hand else _scaled_anywhere(matrix, gains)
    result = from_matrix(scaled, x, dim)
    if out is None and at_hand and result.stride() != x.stride():
        out = torch.empty_like(x)  # what was multiplied has a layout of its own
    return result if out is None else out.copy_(result)


def _full_precision(device: str) -> AbstractContextManager[None]:
    """Where products keep the dtype of their factors, which `torch.autocast` takes digits from."""
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else nullcontext()


def _scaled_anywhere(matrix: Tensor, gains: Gains) -> Tensor:
    given, finite = _finite_or_zero(matrix)
    with _full_precision(matrix.device.type):
        vectors, sigma = _factors(given)
        gain = gains(sigma)
        scaled = torch.where((gain == 1).all(), given, _recombined(given, vectors, gain))
    return torch.where(finite, scaled, torch.nan)


def _finite_or_zero(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix that LAPACK accepts, and whether it is the given one."""
    finite = matrix.isfinite().all()
    return torch.where(finite, matrix, 0.0), finite


def _scaled_at_hand(matrix: Tensor, gains: Gains, soft: bool) -> Tensor:
    low, high = [extreme.item() for extreme in matrix.aminmax()]
    if not (isfinite(low) and isfinite(high)):
        return torch.full_like(matrix, torch.nan)
    if _is_small(matrix):
        return _scaled_small(matrix, gains)
    with _full_precision("cpu"):
        if soft and _is_nearly_square(matrix) and _SMALLEST < max(-low, high) < _LARGEST:
            tall = matrix.shape[0] > matrix.shape[1]
            wide = matrix.mT if tall else matrix
            gram = wide @ wide.mT
            if gram.trace() > sqrt(_EVEN * len(gram)) * torch.linalg.vector_norm(gram):
                scaled = _scaled_square(wide, gram, gains)
                return scaled.mT if tall else scaled
        return _scaled_by_what_stays(matrix, gains)


def _is_small(matrix: Tensor) -> bool:
    short = min(matrix.shape)  # of one row, which is a vector to it, NumPy's BLAS starts threads much sooner
    return matrix.dtype == torch.float32 and short > 1 and short * matrix.numel() <= _SMALL


def _is_nearly_square(matrix: Tensor) -> bool:
    short, long = sorted(matrix.shape)
    return matrix.dtype == torch.float32 and short >= _WORTH_MENDING and long <= _NEARLY_SQUARE * short


def _scaled_by_what_stays(matrix: Tensor, gains: Gains) -> Tensor:
    vectors, sigma = _factors(matrix)
    gain = gains(sigma)
    listed = gain.tolist()
    if listed[0] == 1:
        return matrix.clone()
    dropped = listed.count(0.0)
    return _recombined(matrix, vectors[:, dropped:], gain[dropped:])


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The singular vectors along the shorter side, as columns, and the singular values, in increasing order.

    float32 goes through the Gram matrix in float64: several times faster than an SVD, and right to 1e-8 of the largest
    singular value, where a float32 Gram matrix would lose half of the digits. float64 needs the SVD.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    if matrix.dtype == torch.float64:
        left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
        return (right.mT if tall else left).flip(-1), sigma.flip(-1)
    matrix = matrix.double()
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix if tall else matrix @ matrix.mT)
    return vectors, squares.clamp(min=0).sqrt()


def _recombined(matrix: Tensor, vectors: Tensor, gain: Tensor) -> Tensor:
    """U diag(gain) Uᵀ X, or X V diag(gain) Vᵀ."""
    scaled, transposed = (vectors * gain).to(matrix.dtype), vectors.to(matrix.dtype).mT
    most = 2 * len(gain) > len(vectors)  # then the long side is multiplied once: that is less than twice by few
    if matrix.shape[0] > matrix.shape[1]:
        return matrix @ (scaled @ transposed) if most else matrix @ scaled @ transposed
    return scaled @ transposed @ matrix if most else scaled @ (transposed @ matrix)


def _scaled_small(matrix: Tensor, gains: Gains) -> Tensor:
    """In float64, rounded once at the end."""
    entries = matrix.double().numpy()
    tall = len(entries) > len(entries.T)
    gram = entries.T @ entries if tall else entries @ entries.T
    squares, columns = torch.linalg.eigh(torch.from_numpy(gram))  # that of NumPy starts threads
    gain, vectors = gains(squares.clamp_(min=0).sqrt_()).numpy(), columns.numpy()
    if gain[0] == 1:
        return matrix.clone()
    scaling = (vectors * gain) @ vectors.T
    return torch.from_numpy(entries @ scaling if tall else scaling @ entries).float()


def _scaled_square(matrix: Tensor, gram: Tensor, gains: Gains) -> Tensor:
    """U diag(g) Uᵀ X through eigenvectors in float32, which take half the time, mended to have all digits of float32.

    They are those of ``gram`` = XXᵀ, which is written over. As rows of a matrix W they are not quite orthogonal, nor
    are the rows of B = WX, as they would be if W were Uᵀ. Both defects can be measured: F = WWᵀ − I, and C = BBᵀ beside
    its diagonal. To first order in them the result is WᵀMB, with σ_i² = C_ii/(1 + F_ii) and

        M_ij = Δ_ij·(C_ij − σ_j²·F_ij) − g_i·F_ij, and g_i more if i = j;  Δ_ij = (g_i − g_j)/(σ_i² − σ_j²), Δ_ii = 0.

    Close singular values need not be told apart: for a soft threshold |Δ_ij| ≤ 1/max(σ_i², σ_j²). Only small ones do,
    of which C is no longer a small share, and those close to the threshold, where g has a kink: there first order is
    not enough. ``gram``, C and M share their memory.
    """
    basis = torch.linalg.eigh(gram, UPLO="U").eigenvectors.mT  # takes 0.94 of the time that "L" takes
    rows = basis @ matrix
    products = torch.mm(rows, rows.mT, out=gram)
    _separate_small(basis, rows, products)
    _separate_marginal(basis, rows, products, gains)
    defect = basis @ basis.mT
    defect.diagonal().sub_(1)
    squares = (products.diagonal().double() / (1 + defect.diagonal().double())).clamp_(min=_TINY)
    gain = gains(squares.sqrt())
    least, most = [extreme.item() for extreme in gain.aminmax()]
    if least == 1:
        return matrix.clone()
    if most == 0:
        return torch.zeros_like(matrix)
    gap = (squares[:, None] - squares).add_(1e-300)  # which is all between equal ones; others are far above it
    quotient = (gain[:, None] - gain).div_(gap).float()
    gain = gain.float()
    mended = products.addcmul_(defect, squares.float(), value=-1).mul_(quotient)
    mended.addcmul_(defect, gain[:, None], value=-1).diagonal().add_(gain)
    return torch.mm(basis.mT, mended @ rows)


def _separate_small(basis: Tensor, rows: Tensor, products: Tensor) -> None:
    """Make the shortest rows orthogonal: to the others, which they are far from, then to each other."""
    squares = products.diagonal()
    short = int((squares < _MIXED * squares.max()).sum())  # which come first, since eigenvalues increase
    if short:
        shares = (products[:short, short:] / squares[short:]).neg_()
        rows[:short].addmm_(shares, rows[short:])
        basis[:short].addmm_(shares, basis[short:])
        _separate(basis, rows, products, 0, short)


def _separate_marginal(basis: Tensor, rows: Tensor, products: Tensor, gains: Gains) -> None:
    """Make the rows with σ near the level up to which gains are 0 orthogonal to each other."""
    squares = products.diagonal()
    sigma = squares.double().sqrt_()
    level = (sigma * (1 - gains(sigma)))[-1]  # from the largest σ; if even its gain is 0, nothing stays
    marginal = ((squares - level.square()).abs() <= _CLOSE * squares.max()).nonzero()
    if len(marginal) > 1:
        _separate(basis, rows, products, int(marginal[0]), int(marginal[-1]) + 1)


def _separate(basis: Tensor, rows: Tensor, products: Tensor, start: int, stop: int) -> None:
    """Turn some rows to the eigenvectors of their own Gram matrix, in float64; ``basis`` and ``products`` go along."""
    some = rows[start:stop].double()
    turn = torch.linalg.eigh(some @ some.mT).eigenvectors.mT.float()
    rows[start:stop] = turn @ rows[start:stop]
    basis[start:stop] = turn @ basis[start:stop]
    block = rows[start:stop] @ rows.mT
    products[start:stop] = block
    products[:, start:stop] = block.mT
