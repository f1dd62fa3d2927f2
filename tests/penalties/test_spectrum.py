"""Scaled singular values against a float64 SVD on hard spectra."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import proxmo
from penalties.cases import noise
from proxmo.penalties import spectrum

SHARES = torch.arange(128, dtype=torch.float64) / 128
SPECTRA: dict[str, Tensor] = {
    "equal": torch.ones(128),
    "two levels": torch.where(SHARES < 0.5, 1.0, 1e-3),
    "clusters": 10 ** -(4 * SHARES).floor() * (1 + 1e-5 * noise((128,), torch.float64)),
    "at a threshold": torch.where(SHARES < 0.5, 1.0, 0.1 + 1e-5 * noise((128,), torch.float64)),
    "small ones": torch.where(SHARES < 0.3, 1.0, torch.where(SHARES < 0.6, 0.033, 1e-4)),
    "geometric": 10 ** (-2 * SHARES),
    "geometric, to rounding": 10 ** (-6 * SHARES),
    "geometric, beyond": 10 ** (-30 * SHARES),
    "one large": torch.where(SHARES == 0, 1.0, 1e-4 * (1 + SHARES)),
    "low rank": torch.where(SHARES < 0.4, 1.0, 0.0),
    "zero": torch.zeros(128),
}
SHAPES = [(128, 128), (128, 200), (200, 128)]


def with_singular_values(sigma: Tensor, shape: tuple[int, int]) -> Tensor:
    left, _ = torch.linalg.qr(noise((shape[0], len(sigma)), torch.float64, seed=1))
    right, _ = torch.linalg.qr(noise((shape[1], len(sigma)), torch.float64, seed=2))
    return ((left * sigma) @ right.mT).float()


def by_svd(x: Tensor, threshold: float) -> Tensor:
    left, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    return (left * (sigma - threshold).clamp(min=0)) @ right


def error(found: Tensor, expected: Tensor) -> float:
    return torch.linalg.matrix_norm(found.double() - expected, 2).item()


@pytest.mark.parametrize("threshold", [1e-9, 1e-5, 1e-4, 0.01, 0.1, 0.5, 1.1])
@pytest.mark.parametrize("name", SPECTRA)
def test_prox_has_float32_precision_on_hard_spectra(name: str, threshold: float) -> None:
    x = with_singular_values(SPECTRA[name], (128, 128))
    found = proxmo.Nuclear(threshold).prox(x, 1.0)
    assert error(found, by_svd(x, threshold)) < 8 * torch.finfo(torch.float32).eps
    assert threshold < 1.1 or not found.any()


@pytest.mark.parametrize("penalty", [proxmo.Nuclear, proxmo.NuclearBall])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-18, 1e-5, 1.0, 1e5, 1e18])
def test_prox_has_float32_precision_at_any_scale(
    scale: float, shape: tuple[int, int], penalty: Callable[[float], proxmo.Penalty]
) -> None:
    x = scale * noise(shape, torch.float32)
    sigma = torch.linalg.svdvals(x.double())
    threshold = float(sigma[40])
    level = threshold if penalty is proxmo.Nuclear else float((sigma - threshold).clamp(min=0).sum())
    found = penalty(level).prox(x, 1.0)
    assert error(found, by_svd(x, threshold)) < 8 * torch.finfo(torch.float32).eps * float(sigma[0])
    assert found.stride() == x.stride()


def test_rank_keeps_the_given_number_of_equal_singular_values() -> None:
    x = with_singular_values(SPECTRA["equal"], (128, 128))
    kept = torch.linalg.svdvals(proxmo.Rank(50).prox(x, 1.0).double())
    torch.testing.assert_close(kept, (torch.arange(128) < 50).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3), (9, 5), (5, 9), (1000, 10), (10, 1000), (60, 60)], ids=str)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_prox_has_float32_precision_if_few_singular_values_are_kept(kept: int, shape: tuple[int, int]) -> None:
    x = noise(shape, torch.float32)
    sigma = [*torch.linalg.svdvals(x.double()).tolist(), 0.0]
    threshold = sigma[0] if kept == 0 else 0.5 * (sigma[kept - 1] + sigma[kept])
    found = proxmo.Nuclear(threshold * (1 + 1e-12)).prox(x, 1.0)
    assert error(found, by_svd(x, threshold)) < torch.finfo(torch.float32).eps * sigma[0]
    assert int((torch.linalg.svdvals(found.double()) > 1e-6 * sigma[0]).sum()) == kept
    assert kept or not found.any()


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4), (140, 140), (1, 300_000)], ids=str)
@pytest.mark.parametrize("gain", [0.0, 0.5, 1.0])
def test_gains_scale_singular_values(shape: tuple[int, int], gain: float) -> None:
    def gains(sigma: Tensor) -> Tensor:
        return torch.where(torch.arange(len(sigma)) < len(sigma) // 2, 0.0 if gain < 1 else 1.0, gain).to(sigma.dtype)

    x = noise(shape, torch.float32)
    left, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    expected = left * (gains(sigma).flip(0) * sigma) @ right
    found = spectrum.scale_singular_values(x, 0, gains, None)
    assert error(found, expected) < 1e-6 * float(sigma[0])
    assert gain < 1 or torch.equal(found, x)
    for entry in (torch.nan, torch.inf, -torch.inf):
        x[0, 3] = entry
        assert bool(spectrum.scale_singular_values(x, 0, gains, None).isnan().all())


@pytest.mark.parametrize("shape", [(5, 9), (128, 128), (128, 500)], ids=str)
@pytest.mark.parametrize("entry", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_entry_makes_the_whole_result_nan(entry: float, shape: tuple[int, int]) -> None:
    x = noise(shape, torch.float32)
    x[2, 3] = entry
    assert proxmo.Nuclear(0.5).prox(x, 1.0).isnan().all()


@pytest.mark.parametrize("shape", [(5, 9), (128, 128), (128, 500)], ids=str)
@pytest.mark.parametrize("penalty", [proxmo.Nuclear(0.0), proxmo.NuclearBall(1e9)], ids=str)
def test_prox_without_effect_returns_an_exact_copy(penalty: proxmo.Penalty, shape: tuple[int, int]) -> None:
    x = noise(shape, torch.float32)
    found = penalty.prox(x, 1.0)
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(5, 9), (128, 128), (128, 500)], ids=str)
def test_zero_strength_changes_nothing_even_with_zero_singular_values(shape: tuple[int, int]) -> None:
    x = noise((shape[0], 2), torch.float32) @ noise((2, shape[1]), torch.float32)
    x[0] = 0
    for step in (1.0, torch.tensor(1.0)):
        assert torch.equal(proxmo.Nuclear(0.0).prox(x, step), x)
    assert proxmo.Nuclear(0.1).prox(x, 1.0).isfinite().all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # from jvp in torch
@pytest.mark.parametrize("penalty", [proxmo.Nuclear(0.5), proxmo.Rank(2), proxmo.NuclearBall(1.0)], ids=str)
def test_prox_supports_vmap_and_forward_mode_autograd(penalty: proxmo.Penalty) -> None:
    x, change = noise((3, 6, 8), torch.float32), noise((3, 6, 8), torch.float32, seed=1)
    x[:, 0] = 0

    def prox(matrix: Tensor) -> Tensor:
        return penalty.prox(matrix, 1.0)

    expected = torch.stack([prox(matrix) for matrix in x])
    torch.testing.assert_close(torch.vmap(prox)(x), expected, rtol=0, atol=1e-6)
    difference = prox(x[0].double() + 1e-6 * change[0]) - prox(x[0].double() - 1e-6 * change[0])
    _, forward = torch.func.jvp(prox, (x[0],), (change[0],))
    torch.testing.assert_close(forward.double(), difference / 2e-6, rtol=0, atol=1e-3)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(prox(forward_ad.make_dual(x[0], change[0]))).tangent
    torch.testing.assert_close(tangent, forward)
