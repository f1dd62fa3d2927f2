"""The compaction benchmark compares networks of equal size, and writes its results."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import autosize
from torch import nn

from experiments.few_images import few_images


def small_problem(epochs: int = 12) -> autosize.Problem:
    return autosize.Problem(
        "small",
        few_images(train=640, test=200),
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10)
        ),
        batch=32,
        epochs=epochs,
        strengths={"ℓ2,1": (0.02,), "ℓ∞,1": (0.1,)},
    )


@pytest.fixture(autouse=True)
def few_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosize, "RATES", (0.3, 0.1))


@pytest.mark.slow
def test_pruned_networks_have_the_widths_of_prox_networks() -> None:
    results = autosize.compare(small_problem(), "ℓ2,1", 2, lambda: None)
    by_method = {method: [r for r in results if r.method == method] for method in autosize.METHODS}
    assert [r.parameters for r in by_method["momentum"]] == [r.parameters for r in by_method["subgradient"]]
    assert all(r.accuracy == r.dense_accuracy for r in by_method["momentum"] + by_method["vanilla"])
    assert all(r.parameters[1] < r.parameters[0] for r in by_method["momentum"])


def test_subgradient_training_makes_no_zero_units() -> None:
    run = autosize.train(small_problem(), "ℓ2,1", "subgradient", 0.02, 0.3, seed=0)
    assert run.optimizer.sparsity()[0].groups == 0.0
    autosize.prune(run.optimizer, [3, 5])
    assert autosize.widths(run.optimizer) == [3, 5]
    kept = run.network[1].weight.detach().any(1)  # type: ignore[index]
    assert int(kept.sum()) == 3


def test_main_writes_figure_table_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autosize, "problems", lambda fashion: [small_problem(epochs=2)])
    autosize.main(["--seeds", "1", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "autosize.json").read_text(encoding="utf-8"))
    assert len(results) == 2 * 3
    table = (tmp_path / "autosize.md").read_text(encoding="utf-8")
    assert table.count("\n") == 2 + 6
    assert (tmp_path / "autosize.png").read_bytes().startswith(b"\x89PNG")
    assert "subgradient, then pruned" in capsys.readouterr().out
    assert torch.get_num_threads() == 1
