"""The root-finder: its two ways agree with each other and with a float64 sort, whatever the input."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from penalties import references
from proxmo.penalties import thresholds

ROWS = {
    "normal": lambda g: torch.randn(64, 300, generator=g),
    "equal": lambda g: torch.ones(64, 300),
    "one large": lambda g: torch.cat([torch.full((64, 1), 1e6), torch.rand(64, 299, generator=g)], dim=1),
    "geometric": lambda g: torch.logspace(-30, 0, 300).expand(64, 300).clone(),
    "heavy tails": lambda g: torch.randn(64, 300, generator=g).pow(-3),
    "close together": lambda g: 1e6 + torch.rand(64, 300, generator=g),
    "many ties": lambda g: torch.randint(0, 3, (64, 300), generator=g).float(),
}


def below_top(y: Tensor) -> Tensor:
    return y - y.amax(1, keepdim=True)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("radius", [0.0, 1e-12, 1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_newton_sort_and_reference_agree(kind: str, radius: float, dtype: torch.dtype) -> None:
    y = below_top(ROWS[kind](torch.Generator().manual_seed(1)).to(dtype))
    newton = thresholds._level_by_newton(y, radius, (1,), y.shape[1])
    sort = thresholds._newton_step(y, radius, (1,), thresholds._level_by_sorting(y, radius, (1,)), torch.empty_like(y))[
        0
    ]
    rounding = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(newton, sort, rtol=rounding, atol=0)
    exact = np.stack([references.simplex(row, radius) for row in y[:3].double().numpy()])
    found = thresholds.project_simplex(y[:3], radius, (1,)).double()
    torch.testing.assert_close(found, torch.from_numpy(exact), rtol=0, atol=rounding * radius)
    torch.testing.assert_close(found.sum(1), torch.full((3,), radius, dtype=torch.float64), rtol=rounding, atol=0)


@given(
    y=hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(-1e6, 1e6, width=32)),
    radius=st.floats(1e-6, 1e6),
)
def test_levels_solve_their_equation(y: np.ndarray, radius: float) -> None:
    shifted = below_top(torch.from_numpy(y))
    for level in (
        thresholds._level_by_newton(shifted, radius, (1,), y.shape[1]),
        thresholds._level_by_sorting(shifted, radius, (1,)),
    ):
        total = (shifted - level).clamp(min=0).sum(1)
        torch.testing.assert_close(total, torch.full_like(total, radius), rtol=1e-9, atol=0)


def test_both_ways_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("_level_by_newton", "_level_by_sorting"):
        plain = getattr(thresholds, name)
        monkeypatch.setattr(
            thresholds, name, lambda *args, plain=plain, name=name: (used.append(name), plain(*args))[1]
        )
    thresholds.cap(torch.rand(1000, 10), 1.0, (1,))
    thresholds.cap(torch.rand(10, 100), 1.0, (1,))
    thresholds.cap(torch.rand(100, 1000), 1.0, (1,))
    assert used == ["_level_by_sorting", "_level_by_sorting", "_level_by_newton"]
