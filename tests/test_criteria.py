"""Measures of stationarity against closed forms, and the monitor against exact values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import proxmo
from proxmo import criteria

DOUBLE = torch.float64


def lasso(momentum: float) -> tuple[Parameter, proxmo.ProxSGD, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(50, 6, generator=generator, dtype=DOUBLE)
    target = data[:, 0] + 0.1 * torch.randn(50, generator=generator, dtype=DOUBLE)
    x = Parameter(torch.full((6,), 0.5, dtype=DOUBLE))
    return x, proxmo.ProxSGD([x], lr=0.2, momentum=momentum, penalty=proxmo.L1(0.3)), data, target


def half_square(x: Parameter) -> Callable[[], Tensor]:
    """Return a closure for f = ‖x‖²/2."""

    def loss() -> Tensor:
        x.grad = None
        value = x.square().sum() / 2
        value.backward()
        return value

    return loss


def full_gradient(x: Tensor, data: Tensor, target: Tensor) -> Tensor:
    return data.mT @ (data @ x - target) / len(target)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "penalty",
    [proxmo.L1(0.3), proxmo.GroupLInf(0.3), proxmo.Nuclear(0.3), proxmo.L2Ball(0.5), proxmo.SquaredL2(0.3)],
    ids=str,
)
def test_certificate_is_a_subgradient(momentum: float, penalty: proxmo.Penalty) -> None:
    """ψ(u) ≥ ψ(x⁺) + <s, u − x⁺> for all u, and −s = direction + (x⁺ − x)/lr."""
    generator = torch.Generator().manual_seed(0)
    x = Parameter(torch.randn(3, 4, generator=generator, dtype=DOUBLE))
    optimizer = proxmo.ProxSGD([x], lr=0.2, momentum=momentum, penalty=penalty)
    optimizer.certify = True
    for _ in range(3):
        before = x.detach().clone()
        x.grad = torch.randn(3, 4, generator=generator, dtype=DOUBLE)
        optimizer.step()
        certificate = optimizer.certificate(x)
        expected = optimizer.state[x]["momentum_buffer"] if momentum else x.grad
        assert torch.equal(certificate.direction, expected)
        torch.testing.assert_close(
            certificate.subgradient, (before - x.detach()) / 0.2 - certificate.direction, rtol=1e-11, atol=1e-11
        )
        value = penalty.value(x.detach())
        for _ in range(20):
            u = penalty.prox(torch.randn(3, 4, generator=generator, dtype=DOUBLE), 0.1)
            assert penalty.value(u) >= value + (certificate.subgradient * (u - x.detach())).sum() - 1e-10


def test_gradient_norm_goes_to_zero_where_the_penalty_has_kinks() -> None:
    x, optimizer, data, target = lasso(0.5)
    optimizer.certify = True
    for _ in range(400):
        x.grad = full_gradient(x.detach(), data, target)
        optimizer.step()
    x.grad = full_gradient(x.detach(), data, target)
    assert (x == 0).sum() >= 4
    assert criteria.gradient_norm(optimizer) < 1e-20


def test_gradient_norm_of_a_smooth_penalty() -> None:
    x = Parameter(torch.tensor([1.0, -2.0, 0.0], dtype=DOUBLE))
    y = Parameter(torch.tensor([2.0], dtype=DOUBLE))
    unused = Parameter(torch.ones(2))
    optimizer = proxmo.ProxSGD([{"params": [x, unused], "penalty": proxmo.Huber(2.0, 1.0)}, {"params": [y]}])
    x.grad, y.grad = torch.tensor([1.0, 1.0, 1.0], dtype=DOUBLE), torch.tensor([3.0], dtype=DOUBLE)
    assert criteria.gradient_norm(optimizer) == pytest.approx((1 + 2) ** 2 + (1 - 2) ** 2 + 1 + 9)
    optimizer.certify = True
    with pytest.raises(RuntimeError, match="no step has left a certificate"):
        criteria.gradient_norm(optimizer)
    optimizer.certify = False
    optimizer.param_groups[0]["penalty"] = proxmo.Box(-5.0, 5.0)
    with pytest.raises(ValueError, match=r"Box.* has no gradient; set certify = True"):
        criteria.gradient_norm(optimizer)


def test_gradient_mapping_equals_closed_forms() -> None:
    x, gradient = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.5, 0.2, 0.5])
    assert torch.equal(criteria.gradient_mapping(x, gradient, None, 0.1), gradient)
    torch.testing.assert_close(
        criteria.gradient_mapping(x, gradient, proxmo.L1(0.3), 0.1), torch.tensor([0.8, 0.0, 0.2])
    )
    smooth = criteria.gradient_mapping(x.double(), gradient.double(), proxmo.SquaredL2(2.0), 1e-9)
    torch.testing.assert_close(smooth, (gradient + 2 * x).double(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="lr must be a finite number > 0"):
        criteria.gradient_mapping(x, gradient, None, 0.0)


def test_entropic_mapping_vanishes_where_the_euclidean_one_does() -> None:
    """A point of the simplex is stationary if the gradient is constant, and smallest, where x is positive."""
    simplex = proxmo.Simplex()
    stationary, gradient = torch.tensor([0.3, 0.7, 0.0]), torch.tensor([1.0, 1.0, 2.0])
    for mirror in (None, criteria.entropic_step):
        mapping = criteria.gradient_mapping(stationary, gradient, simplex, 0.5, mirror=mirror)
        torch.testing.assert_close(mapping, torch.zeros(3), rtol=0, atol=1e-6)
    elsewhere = torch.tensor([0.3, 0.4, 0.3])
    mapping = criteria.gradient_mapping(elsewhere, gradient, simplex, 1e-4, mirror=criteria.entropic_step)
    # to first order x·(g − <x, g>), the Riemannian gradient of the Fisher metric
    torch.testing.assert_close(mapping, elsewhere * (gradient - elsewhere @ gradient), rtol=0, atol=1e-3)
    moved = criteria.entropic_step(elsewhere, 1000 * gradient, 1.0)
    assert moved.isfinite().all()
    assert moved.sum() == pytest.approx(1.0)


def test_moreau_gradient_equals_its_closed_form() -> None:
    """For f = ½·x², ψ = s|x| the envelope has a closed form; its gradient is zero at a stationary point."""
    x = torch.tensor([3.0, 0.05, -1.0], dtype=DOUBLE)
    width = 0.25
    proximal = proxmo.ElasticNet(0.5, 1.0).prox(x, width)
    found = criteria.moreau_gradient(x, lambda u: u, proxmo.L1(0.5), smoothness=1.0, smoothing=width)
    torch.testing.assert_close(found, (x - proximal) / width, rtol=1e-8, atol=1e-8)
    flat = criteria.moreau_gradient(torch.zeros(2), lambda u: u, proxmo.L1(0.5), smoothness=1.0)
    assert torch.equal(flat, torch.zeros(2))
    with pytest.raises(ValueError, match=r"smoothing must be a number in \(0, 1/smoothness = 1\), got 1.0"):
        criteria.moreau_gradient(x, lambda u: u, None, smoothness=1.0, smoothing=1.0)
    with pytest.raises(RuntimeError, match="not solved to 1e-10 in 2 steps"):
        criteria.moreau_gradient(x, lambda u: u, None, smoothness=5.0, max_steps=2)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_monitor_records_the_quantities_of_the_theory(momentum: float) -> None:
    x, optimizer, data, target = lasso(momentum)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (data @ x - target).square().mean() / 2
        value.backward()
        return value

    monitor = criteria.Monitor(optimizer, loss, weight=0.25)
    generator = torch.Generator().manual_seed(1)
    expected: dict[str, list[float]] = {"variance": [], "movement": [], "potential": [], "objective": [], "zeros": []}
    for _ in range(8):
        noisy = full_gradient(x.detach(), data, target) + torch.randn(6, generator=generator, dtype=DOUBLE)
        x.grad = noisy.clone()
        monitor.record()
        assert torch.equal(x.grad, noisy)
        before, exact = x.detach().clone(), full_gradient(x.detach(), data, target)
        objective = float((data @ before - target).square().mean() / 2 + 0.3 * before.abs().sum())
        expected["objective"].append(objective)
        expected["zeros"].append(float((before == 0).double().mean()))
        optimizer.step()
        m = optimizer.state[x]["momentum_buffer"] if momentum else noisy
        expected["variance"].append(float((m - exact).square().sum()))
        expected["movement"].append(float((x.detach() - before).square().sum()))
        expected["potential"].append(objective + 0.25 * expected["variance"][-1])
    arrays = monitor.arrays()
    for name, values in expected.items():
        np.testing.assert_allclose(arrays[name], values, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(arrays["loss"] + arrays["penalty"], arrays["objective"])
    assert math.isnan(arrays["gradient"][0])
    assert np.isfinite(arrays["gradient"][1:]).all()


def test_monitor_without_penalty_records_the_first_gradient() -> None:
    x = Parameter(torch.tensor([3.0]))
    optimizer = proxmo.ProxSGD([x])

    monitor = criteria.Monitor(optimizer, half_square(x))
    monitor.record()
    monitor.record()  # no step since the last record
    assert monitor.arrays()["gradient"].tolist() == [9.0, 9.0]
    assert np.isnan(monitor.arrays()["variance"]).all()


def test_monitor_can_skip_points() -> None:
    """Δ and R belong to the step that leaves a recorded point, even if other points are not recorded or x stays."""
    x = Parameter(torch.tensor([3.0, 1.0], dtype=DOUBLE))
    optimizer = proxmo.ProxSGD([x], lr=0.1, momentum=0.5, initial="zero")

    loss = half_square(x)
    monitor = criteria.Monitor(optimizer, loss)
    expected = []
    for k in range(20):
        before = x.detach().clone()
        if k % 5 == 0:
            monitor.record()
        loss()
        optimizer.step()
        if k % 5 == 0:
            m = optimizer.state[x]["momentum_buffer"]
            expected.append((float((m - before).square().sum()), float((x.detach() - before).square().sum())))
    arrays = monitor.arrays()
    np.testing.assert_allclose(arrays["variance"], [v for v, _ in expected], rtol=1e-12)
    np.testing.assert_allclose(arrays["movement"], [r for _, r in expected], rtol=1e-12)
    assert arrays["movement"][0] == 0  # m₀ = 0: a step that does not move


def test_gradients_are_restored_if_the_closure_raises() -> None:
    x = Parameter(torch.tensor([3.0]))
    optimizer = proxmo.ProxSGD([x])
    x.grad = torch.tensor([7.0])

    def fails() -> Tensor:
        optimizer.zero_grad()
        raise ArithmeticError

    monitor = criteria.Monitor(optimizer, fails)
    with pytest.raises(ArithmeticError):
        monitor.record()
    assert torch.equal(x.grad, torch.tensor([7.0]))
    assert monitor.arrays()["loss"].size == 0


def test_certificate_is_refused_after_a_write_to_the_parameter() -> None:
    x = Parameter(torch.ones(3))
    optimizer = proxmo.ProxSGD([x], penalty=proxmo.L1(0.1))
    optimizer.certify = True
    x.grad = torch.ones(3)
    optimizer.step()
    optimizer.certificate(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="written to after its last step"):
        optimizer.certificate(x)


def test_monitor_records_nan_after_a_write_to_the_parameters() -> None:
    """Swapping in the random iterate invalidates the certificates until the next step."""
    x = Parameter(torch.ones(3))
    optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.L1(0.1))
    loss = half_square(x)
    monitor = criteria.Monitor(optimizer, loss)
    kept = proxmo.RandomIterate([x])
    for k in range(4):
        monitor.record()
        loss()
        optimizer.step()
        kept.update()
        if k == 1:
            with kept.swapped_in():
                pass
    assert np.isnan(monitor.arrays()["gradient"]).tolist() == [True, False, True, False]
    assert np.isfinite(monitor.arrays()["variance"]).all()


def test_step_with_lr_zero_certifies_nothing() -> None:
    x = Parameter(torch.ones(3))
    optimizer = proxmo.ProxSGD([x], lr=0.0, penalty=proxmo.L1(0.1))
    optimizer.certify = True
    x.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.certificate_or_none(x) is None


def test_measures_are_accurate_with_small_steps_and_in_half_precision() -> None:
    x = Parameter(torch.full((4,), 100.0))
    optimizer = proxmo.ProxSGD([x], lr=1e-6, momentum=0.0, penalty=proxmo.L1(1.0))
    optimizer.certify = True
    x.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(optimizer.certificate(x).subgradient, torch.ones(4))
    mapping = criteria.gradient_mapping(x.detach(), torch.full((4,), 0.5), proxmo.L1(1.0), 1e-6)
    torch.testing.assert_close(mapping, torch.full((4,), 1.5))
    half = Parameter(torch.zeros(1000, dtype=torch.float16))
    half.grad = torch.full((1000,), 1e-4, dtype=torch.float16)
    assert criteria.gradient_norm(proxmo.ProxSGD([half])) == pytest.approx(1e-5, rel=1e-2)
    single = torch.randn(5, generator=torch.Generator().manual_seed(0))
    flat = criteria.moreau_gradient(single, lambda u: u, proxmo.L1(0.5), smoothness=3.0)
    assert flat.isfinite().all()


def test_gradient_norm_refuses_maximisation() -> None:
    x = Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    with pytest.raises(ValueError, match="for minimisation"):
        criteria.gradient_norm(proxmo.ProxSGD([x], maximize=True))


def test_monitor_writes_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    x = Parameter(torch.tensor([3.0]))
    optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.L1(1.0))

    loss = half_square(x)
    with SummaryWriter(tmp_path) as writer:
        monitor = criteria.Monitor(optimizer, loss, writer=writer)
        for _ in range(3):
            monitor.record()
            loss()
            optimizer.step()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("proxmo/objective")] == pytest.approx(
        monitor.arrays()["objective"].tolist()
    )
