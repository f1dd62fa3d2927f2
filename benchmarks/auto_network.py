"""Compare AutoProxSGD with tuned ProxSGD on a small network: `python -m benchmarks.auto_network`.

A 64-64-10 network on scikit-learn's digits, ℓ∞,1 on the weights, batch 32, 30 epochs; the grid covers lr and momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from proxmo import AutoProxSGD, GroupLInf, ProxOptimizer, ProxSGD
from proxmo.experiments.threads import one_thread

EPOCHS, BATCH, SEEDS = 30, 32, 3
STRENGTH = 1e-3


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training inputs and labels, then test inputs and labels."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    inputs, labels = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16, torch.tensor(bunch.target)[order]
    return inputs[:1400], labels[:1400], inputs[1400:], labels[1400:]


def train(make: Callable[[list[dict[str, Any]]], ProxOptimizer], data: tuple[Tensor, ...], seed: int) -> list[float]:
    """Return the final F, the test accuracy and the share of zero weights."""
    inputs, labels, test_inputs, test_labels = data
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    weights, biases = [net[0].weight, net[2].weight], [net[0].bias, net[2].bias]
    optimizer = make([{"params": weights, "penalty": GroupLInf(STRENGTH)}, {"params": biases}])
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        objective = nn.functional.cross_entropy(net(inputs), labels) + optimizer.penalty_value()
        accuracy = (net(test_inputs).argmax(1) == test_labels).float().mean()
    return [float(objective), float(accuracy), optimizer.sparsity()[0].zeros]


@one_thread()
def main() -> None:
    data = digits()
    methods: dict[str, Callable[[list[dict[str, Any]]], ProxOptimizer]] = {"AutoProxSGD": AutoProxSGD}
    for lr in (0.01, 0.1, 0.5, 1.0):
        for momentum in (0.0, 0.9, 0.99):
            methods[f"ProxSGD, lr {lr:g}, momentum {momentum:g}"] = lambda groups, lr=lr, momentum=momentum: ProxSGD(
                groups, lr, momentum
            )
    table = Table("method", "final F", "test accuracy", "zeros")
    with Progress() as progress:
        for name, make in progress.track(list(methods.items()), description="methods"):
            runs = torch.tensor([train(make, data, seed) for seed in range(SEEDS)])
            table.add_row(name, *(f"{value:.3f}" for value in runs.mean(0).tolist()))
    Console().print(table)


if __name__ == "__main__":
    main()
