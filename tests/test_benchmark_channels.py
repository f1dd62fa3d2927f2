"""The benchmark on vanishing channels reaches its target, and writes its results."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import channels

from experiments.few_images import few_images
from proxmo.experiments import pool
from proxmo.experiments.pool import Job
from proxmo.experiments.store import Store
from proxmo.experiments.training import Setting

SETTING = Setting(lr=0.1, momentum=0.9, batch=32, epochs=2, width=8, seed=0)


def test_target_is_met_and_no_class_vanishes() -> None:
    trainer = channels.KeepTrainer(SETTING, few_images(), "cpu")
    for _ in range(SETTING.epochs):
        trainer.train_epoch()
    convolutions, others = trainer.optimizer.param_groups
    assert trainer.measures()["zero_channels"] == pytest.approx(0.25, abs=0.01)
    for weight in convolutions["params"]:
        assert weight.flatten(1).any(1).double().mean() == 0.75
    assert trainer.network.head.weight.any(1).all()
    assert any(p is trainer.network.head.weight for p in others["params"])


def one_after_another(jobs: list[Job], load: object, device: str, store: Store, advance: Callable[[int], None]) -> None:
    for job in jobs:
        pool._train(job, few_images(), device, store, advance)


def test_main_writes_figure_table_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "SETTING", replace(SETTING, epochs=1))
    monkeypatch.setattr(channels, "run_jobs", one_after_another)  # in this process, since workers take seconds to start
    for _ in range(2):  # the second time from the finished runs
        channels.main(["--cifar10", str(tmp_path), "--out", str(tmp_path / "out")])
        monkeypatch.setattr(channels, "KeepTrainer", None)
    numbers = json.loads((tmp_path / "out" / "channels.json").read_text(encoding="utf-8"))
    labels = [f"ℓ∞,1, strength {s}" for s in (0.1, 0.3, 0.5, 0.8)]
    assert list(numbers["runs"]) == [*labels, "target: keep 75%"]
    assert (tmp_path / "out" / "channels.png").exists()
    assert "target: keep 75%" in (tmp_path / "out" / "channels.md").read_text(encoding="utf-8")
