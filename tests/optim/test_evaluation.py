"""Evaluating a closure again at another point leaves no trace, whatever the closure does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from proxmo.optim.evaluation import Sample, traces_of_modules


class Moving(nn.Module):
    """Replaces one buffer and changes another in place at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("changed", torch.zeros(1))
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.changed.add_(1)
        return x + self.replaced


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3), Moving()))


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_of_called_modules_are_restored(compiled: bool) -> None:
    torch.compiler.reset()
    first, second = normed(), normed()
    call = torch.compile(first, backend="eager") if compiled else first
    x = torch.randn(4, 2)
    call(x)
    before = [buffer.clone() for net in (first, second) for buffer in net.buffers()]
    with traces_of_modules() as traces:
        for _ in range(2):
            second(call(x + 1)[:, :2])
        assert second[2][1].changed == 2
        traces.restore_buffers()
    after = [buffer for net in (first, second) for buffer in net.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    second(x)
    assert second[2][1].replaced == 1


def test_module_call_is_restored_on_exit_even_after_an_exception() -> None:
    net = normed()
    call = nn.Module.__call__
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), traces_of_modules():
        net(torch.zeros(4, 7))
    assert nn.Module.__call__ is call
    with traces_of_modules() as traces:
        net(torch.zeros(4, 2))
    assert nn.Module.__call__ is call
    assert net[2][1].changed == 1  # recorded, but not yet restored
    traces.restore_buffers()
    assert net[2][1].changed == 0


class Hidden(nn.Module):
    """Has an unregistered submodule and a buffer that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = [nn.BatchNorm1d(2)]
        self.register_buffer("expanded", torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.secret[0](x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(2 * x)


@pytest.mark.parametrize("how", ["hidden", "compiled in place", "inside another"])
def test_buffers_of_hidden_and_compiled_modules_are_restored(how: str) -> None:
    torch.compiler.reset()
    hidden, normed = Hidden(), Normed()
    normed.compile(backend="eager", fullgraph=True)
    net, norm = {
        "hidden": (hidden, hidden.secret[0]),
        "compiled in place": (normed, normed.norm),
        "inside another": (nn.Sequential(nn.Identity(), normed), normed.norm),
    }[how]
    x = torch.randn(4, 2)
    net(x)
    before = [buffer.clone() for buffer in norm.buffers()]
    with traces_of_modules() as traces:
        net(x + 1)
        assert norm.num_batches_tracked == 2
        traces.restore_buffers()
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))


def test_gradients_of_other_parameters_are_unchanged() -> None:
    """For example, the gradients of parameters that belong to a second optimizer."""
    net = nn.Linear(1, 1)

    def closure() -> None:
        net(torch.ones(1, 1)).sum().backward()

    sample = Sample("closure", closure, [net.weight])
    assert net.bias.grad is not None
    assert net.bias.grad.item() == 1
    sample.gradients_at([torch.zeros(1, 1)])
    assert net.bias.grad.item() == 1


def test_gradients_of_other_parameters_that_modules_share_are_unchanged() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    tied = nn.Sequential(net, nn.Linear(1, 1, bias=False))
    tied[1].weight = net[0].weight
    sample = Sample("closure", lambda: tied(torch.ones(1, 1)).sum().backward(), [net[1].weight])
    assert net[0].weight.grad is not None
    before = net[0].weight.grad.clone()
    sample.gradients_at([torch.zeros(1, 1)])
    assert torch.equal(net[0].weight.grad, before)


def test_compiled_modules_are_not_recompiled() -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    count = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    call = torch.compile(net, backend=backend)
    x = torch.randn(4, 2)
    call(x)
    compiled = count
    for _ in range(3):
        with traces_of_modules():
            call(x)
        call(x)
    assert count == compiled


def test_second_evaluation_uses_the_same_random_numbers_and_moves_nothing() -> None:
    x, unused = Parameter(torch.tensor([2.0, 3.0])), Parameter(torch.zeros(1))

    def closure() -> float:
        loss = (torch.rand(2) * x.square()).sum()
        loss.backward()
        return loss.item()

    torch.manual_seed(0)
    expected, following = torch.rand(2), torch.rand(1)
    torch.manual_seed(0)
    sample = Sample("closure", closure, [x, unused])
    there, gradient_of_unused = sample.gradients_at([torch.tensor([10.0, 10.0]), torch.ones(1)])
    assert gradient_of_unused is None
    torch.testing.assert_close(there, 20 * expected)
    torch.testing.assert_close(x.grad, 2 * torch.tensor([2.0, 3.0]) * expected)
    assert x.tolist() == [2.0, 3.0]
    assert unused.item() == 0
    assert unused.grad is None
    assert torch.equal(torch.rand(1), following)


def test_gradients_survive_reuse_of_their_memory() -> None:
    """A DDP reducer, for example, hands out views of its buckets."""
    x = Parameter(torch.tensor([2.0]))
    bucket = torch.zeros(1)

    def closure() -> float:
        bucket.copy_(x.detach())
        x.grad = bucket
        return 0.0

    sample = Sample("closure", closure, [x])
    (there,) = sample.gradients_at([torch.tensor([5.0])])
    assert there is not None
    assert there.item() == 5
    assert x.grad is not None
    assert x.grad.item() == 2
