"""ProxyObjective: the closures compute ℓ − ℓ̂ and ℓ̂ batch by batch, and training with them works."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxmo

Batches = list[tuple[Tensor, Tensor]]


def problem() -> tuple[nn.Linear, Batches, Batches]:
    torch.manual_seed(0)
    inputs = torch.randn(60, 4, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.0], [3.0]], dtype=torch.float64) + 0.1 * torch.randn(60, 1)
    loader = list(zip(inputs.split(20), targets.split(20), strict=True))
    return nn.Linear(4, 1, dtype=torch.float64), loader, [(inputs[:8], targets[:8]), (inputs[8:16], targets[8:16])]


def gradient(model: nn.Linear, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return torch.autograd.grad(loss, model.weight)[0], loss.item()


def test_closures_compute_f_and_psi_batch_by_batch() -> None:
    model, loader, proxy = problem()
    objective = proxmo.ProxyObjective(model, nn.functional.mse_loss, loader, proxy)
    proxy_batch = 0
    for k in range(7):  # past the end of both loaders
        value = objective.loss_closure()
        loss_gradient, loss = gradient(model, loader[k % 3])
        proxy_gradient, proxy_loss = gradient(model, proxy[proxy_batch % 2])
        proxy_batch += 1
        torch.testing.assert_close(model.weight.grad, loss_gradient - proxy_gradient)
        assert value == pytest.approx(loss - proxy_loss)
        assert objective.loss_value == pytest.approx(loss)
        for _ in range(2):
            assert objective.psi_closure() is None  # type: ignore[func-returns-value]
            torch.testing.assert_close(model.weight.grad, gradient(model, proxy[proxy_batch % 2])[0])
            proxy_batch += 1


def test_training_reaches_the_minimiser_of_the_loss_not_of_the_proxy() -> None:
    model, loader, proxy = problem()
    inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    objective = proxmo.ProxyObjective(
        model, nn.functional.mse_loss, [(inputs, targets)], [tuple(torch.cat(p) for p in zip(*proxy, strict=True))]
    )
    optimizer = proxmo.InexactProxSGD(model.parameters(), lr=0.5, momentum=0.0, inner=proxmo.InnerSGD(20, lr=0.1))
    for _ in range(200):
        optimizer.step(objective.loss_closure, objective.psi_closure)
    wide = torch.cat([inputs, torch.ones(60, 1, dtype=torch.float64)], 1)
    of_loss = torch.linalg.lstsq(wide, targets).solution
    of_proxy = torch.linalg.lstsq(wide[:16], targets[:16]).solution
    torch.testing.assert_close(model.weight.detach().mT, of_loss[:4], rtol=0, atol=1e-6)
    assert (of_loss - of_proxy).abs().max() > 1e-3
    assert optimizer.param_groups[0]["psi_evaluations"] == 200 * 21


def test_loader_without_batches_is_named_in_the_error() -> None:
    model, loader, proxy = problem()
    with pytest.raises(ValueError, match=r"^loader must yield batches each time it is iterated, got none"):
        proxmo.ProxyObjective(model, nn.functional.mse_loss, iter([]), proxy).loss_closure()
    once = proxmo.ProxyObjective(model, nn.functional.mse_loss, loader, iter(proxy))
    once.psi_closure()
    once.psi_closure()
    with pytest.raises(ValueError, match="proxy_loader must yield batches each time"):
        once.psi_closure()


@pytest.mark.parametrize("which", ["few steps", pytest.param("many steps", marks=pytest.mark.slow)])
def test_figures_in_the_docs_on_proxy_training_are_reproduced(which: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "ProxyObjective" in block
    )
    setup = code.split("objective = ")[0]

    def loss_after(code: str) -> float:
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)
        with torch.no_grad():
            return float(nn.functional.mse_loss(names["model"](names["inputs"]), names["targets"]))

    def sgd(loader: str, epochs: int, lr: float, momentum: float = 0.0) -> float:
        return loss_after(
            setup
            + f"optimizer = torch.optim.SGD(model.parameters(), {lr}, momentum={momentum})\n"
            + f"for _ in range({epochs}):\n"
            + f"    for a, b in {loader}:\n"
            + "        optimizer.zero_grad()\n"
            + "        torch.nn.functional.mse_loss(model(a), b).backward()\n"
            + "        optimizer.step()\n"
        )

    # for each method, the best lr of a longer search and its neighbour
    claims: dict[str, dict[str, Callable[[], float]]] = {
        "few steps": {
            "torch's SGD, tuned lr | 0.30": lambda: min(sgd("loader", 10, lr) for lr in (0.2, 0.3)),
            "torch's SGD with momentum, tuned lr | 0.07": lambda: min(sgd("loader", 10, lr, 0.9) for lr in (0.05, 0.1)),
        },
        "many steps": {
            "this example with `momentum=0` | 0.27": lambda: loss_after(code.replace("momentum=0.9", "momentum=0.0")),
            "alone, which overfits it | 0.34": lambda: min(sgd("proxy_loader", 840, lr) for lr in (0.2, 0.3)),
            "number of samples ends at 0.02": lambda: sgd("loader", 65, 0.05, 0.9),
        },
    }
    for claim, measure in claims[which].items():
        assert claim in page
        assert claim.endswith(f"{measure():.2f}")
