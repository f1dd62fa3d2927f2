"""Penalties on singular values, of wide and tall matrices that keep few or most of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import proxmo
from penalties.cases import noise


def by_svd(x: Tensor, threshold: float) -> Tensor:
    left, sigma, right = torch.linalg.svd(x.double(), full_matrices=False)
    return (left * (sigma - threshold).clamp(min=0)) @ right


@pytest.mark.parametrize("kept", [0, 1, 6, 12])
@pytest.mark.parametrize("shape", [(12, 50), (50, 12), (12, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_only_singular_values_above_the_threshold_are_kept(
    dtype: torch.dtype, shape: tuple[int, int], kept: int
) -> None:
    x = noise(shape, dtype)
    sigma = torch.linalg.svdvals(x.double()).tolist()
    threshold = 0.5 * (([2 * sigma[0], *sigma])[kept] + ([*sigma, 0.0])[kept])
    found = proxmo.Nuclear(threshold).prox(x, 1.0)
    rounding = 16 * torch.finfo(dtype).eps * sigma[0]  # of the prox, and in float64 also of the reference
    torch.testing.assert_close(found.double(), by_svd(x, threshold), rtol=0, atol=rounding)
    assert int((torch.linalg.svdvals(found.double()) > rounding).sum()) == kept
    assert found.is_contiguous()


@pytest.mark.parametrize(("strength", "scale"), [(0.0, 1.0), (1.0, 1.0), (1.0, torch.nan)])
@pytest.mark.parametrize("dim", [0, 1, (0, 1)], ids=str)
def test_result_has_the_strides_of_the_input(dim: int | tuple[int, int], strength: float, scale: float) -> None:
    for x in (
        noise((5, 9), torch.float32),
        noise((9, 5), torch.float32),
        noise((9, 5), torch.float32).t(),
        noise((8, 3, 2, 2), torch.float32).contiguous(memory_format=torch.channels_last),
    ):
        assert proxmo.Nuclear(strength, dim).prox(scale * x, 1.0).stride() == x.stride()


def test_subnormal_singular_values_keep_their_precision() -> None:
    x = torch.full((1, 1), 1e-309, dtype=torch.float64)
    assert proxmo.Nuclear(5e-309).prox(x, 1.0) == 0
    assert float(proxmo.Nuclear(1e-310).prox(x, 1.0)) == pytest.approx(9e-310, rel=1e-12, abs=0)
    assert torch.equal(proxmo.NuclearBall(5e-309).prox(x, 1.0), x)
    assert float(proxmo.NuclearBall(5e-310).prox(x, 1.0)) == pytest.approx(5e-310, rel=1e-12, abs=0)


def test_autocast_does_not_change_the_result() -> None:
    x = noise((5, 9), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = proxmo.Nuclear(0.5).prox(x, 1.0)
    assert torch.equal(found, proxmo.Nuclear(0.5).prox(x, 1.0))


@pytest.mark.parametrize("penalty", [proxmo.Nuclear(0.5), proxmo.Rank(2), proxmo.NuclearBall(1.0)], ids=str)
def test_meta_tensors_give_the_shape_of_the_result(penalty: proxmo.Penalty) -> None:
    assert penalty.prox(torch.empty(5, 9, device="meta"), 1.0).shape == (5, 9)
