"""Averages in a higher precision than the parameters: where it matters, and that checkpoints keep it."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

import proxmo
from proxmo import ProxSGD


def distance(momentum: float, momentum_dtype: torch.dtype | None, steps: int) -> float:
    """Return the distance of bfloat16 parameters to the solution of a noisy quadratic at the end of a run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(20, dtype=torch.bfloat16)
    optimizer = ProxSGD([x], lr=0.02, momentum=momentum, momentum_dtype=momentum_dtype)
    squares = []
    for _ in range(steps):
        x.grad = x + torch.randn(20, generator=generator).to(torch.bfloat16)
        optimizer.step()
        squares.append(float(x.double().square().mean()))
    return float(torch.tensor(squares[-2000:]).mean().sqrt())


def test_bfloat16_average_fails_only_where_momentum_is_very_close_to_one() -> None:
    """At 0.9998 the run with a bfloat16 average ends far off; at 0.999 the dtype makes no difference."""
    assert distance(0.9998, None, 10_000) > 5 * distance(0.9998, torch.float32, 10_000)
    assert distance(0.999, None, 5000) == pytest.approx(distance(0.999, torch.float32, 5000), rel=0.1)


def test_step_with_float32_average_equals_float32_step_up_to_rounding() -> None:
    narrow = torch.linspace(-1, 1, 9, dtype=torch.bfloat16)
    optimizer = ProxSGD([narrow], lr=0.5, momentum=0.99, momentum_dtype=torch.float32, penalty=proxmo.L1(0.01))
    point, average = narrow.float(), torch.zeros(9)
    for step in range(20):
        narrow.grad = torch.full((9,), 0.1 * (step + 1), dtype=torch.bfloat16)
        gradient = narrow.grad.float()
        average = gradient if step == 0 else 0.99 * average + 0.01 * gradient
        point = point - 0.5 * average
        point = (point.sign() * (point.abs() - 0.005).relu()).to(torch.bfloat16).float()
        optimizer.step()
        torch.testing.assert_close(narrow.float(), point, rtol=2**-7, atol=1e-6)
        point = narrow.float()
    assert optimizer.state[narrow]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("initial", ["gradient", "zero"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("penalty", [None, proxmo.L1(0.1), proxmo.GroupL2(0.1)])
def test_every_path_keeps_averages_in_momentum_dtype(
    initial: proxmo.optim.momentum.Initial, foreach: bool, penalty: proxmo.Penalty | None
) -> None:
    params = [torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(2, 2)]
    options = {"momentum_dtype": torch.float64, "initial": initial, "foreach": foreach, "penalty": penalty}
    optimizer = ProxSGD(params, lr=0.1, **options)  # type: ignore[arg-type]
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [optimizer.state[p]["momentum_buffer"].dtype for p in params] == [torch.float64] * 2
    assert [p.dtype for p in params] == [torch.bfloat16, torch.float32]


def run(optimizer: ProxSGD, x: Tensor, steps: range) -> None:
    for step in steps:
        x.grad = x * 0.3 + (step % 3 - 1) * 0.01
        optimizer.step()


def test_checkpoints_keep_the_precision_of_averages() -> None:
    """Loading in torch itself would round state to the dtype of the parameters."""
    uninterrupted = torch.ones(5, dtype=torch.bfloat16)
    run(ProxSGD([uninterrupted], lr=0.1, momentum=0.999, momentum_dtype=torch.float32), uninterrupted, range(40))
    x = torch.ones(5, dtype=torch.bfloat16)
    optimizer = ProxSGD([x], lr=0.1, momentum=0.999, momentum_dtype=torch.float32)
    run(optimizer, x, range(20))
    average = optimizer.state[x]["momentum_buffer"].clone()
    assert not torch.equal(average, average.bfloat16().float())
    file = io.BytesIO()
    torch.save([x, optimizer.state_dict()], file)
    file.seek(0)
    resumed, state = torch.load(file, weights_only=True)
    other = ProxSGD([resumed], lr=0.5)
    other.load_state_dict(state)
    assert other.param_groups[0]["momentum_dtype"] == torch.float32
    assert torch.equal(other.state[resumed]["momentum_buffer"], average)
    run(other, resumed, range(20, 40))
    assert torch.equal(resumed, uninterrupted)


def test_loading_copies_averages() -> None:
    x = torch.ones(5, dtype=torch.bfloat16)
    optimizer = ProxSGD([x], lr=1e-3, momentum_dtype=torch.float32)
    run(optimizer, x, range(2))
    twin = torch.ones(5, dtype=torch.bfloat16)
    other = ProxSGD([twin], lr=1e-3, momentum_dtype=torch.float32)
    other.load_state_dict(optimizer.state_dict())
    run(other, twin, range(2))
    assert not torch.equal(optimizer.state[x]["momentum_buffer"], other.state[twin]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"])
def test_momentum_dtype_must_be_a_float_dtype(dtype: object) -> None:
    with pytest.raises(ValueError, match="momentum_dtype must be None or a dtype of floats, got"):
        ProxSGD([torch.zeros(2)], momentum_dtype=dtype)  # type: ignore[arg-type]
