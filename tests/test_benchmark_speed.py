"""The speed benchmarks run, check what they time, and write their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import curves, kernels, peers, steps, sweep, timing, training
from torch import Tensor


def numbers(folder: Path, name: str) -> Any:
    assert (folder / f"{name}.png").stat().st_size > 10_000
    return json.loads((folder / f"{name}.json").read_text())


def test_steps_reports_ratios_to_fused_sgd(tmp_path: Path) -> None:
    steps.steps(tmp_path, 3, {"small": lambda: [(20, 30), (20,)], "smaller": lambda: [(2, 3)]})
    found = numbers(tmp_path, "steps")
    assert set(found) == {f"{model}, threads: {count}" for model in ("small", "smaller") for count in (1, 2)}
    ratios = found["small, threads: 1"]["ratios"]
    assert ratios["SGD, fused"] == 1
    assert {"none, fused", "ℓ1, default", "ℓ∞,1, fused", "ℓ1, tensor lr", "ℓ1, nonfinite skip"} < set(ratios)
    assert "| small | SGD, fused | 1.00 | 1.00 |" in (tmp_path / "steps.md").read_text()


@pytest.mark.slow
def test_adam_steps_reports_ratios_to_fused_adamw(tmp_path: Path) -> None:
    steps.adam_steps(tmp_path, 3, {"small": lambda: [(20, 30), (20,)], "smaller": lambda: [(2, 3)]})
    ratios = numbers(tmp_path, "adam_steps")["small, threads: 2"]["ratios"]
    assert ratios["AdamW, fused"] == 1
    assert {"none, fused", "ℓ1, default", "ℓ∞,1, fused", "ℓ2,1 by block, default"} < set(ratios)


def test_optimizer_options_override_defaults() -> None:
    grads = steps.gradients([(2, 3)])
    lrs = [steps.optimizer(grads, torch.optim.SGD, **options).defaults["lr"] for options in ({}, {"lr": 0.5})]
    assert lrs == [0.01, 0.5]


def test_models_have_the_stated_sizes() -> None:
    sizes = {name: sum(torch.Size(shape).numel() for shape in shapes()) for name, shapes in steps.MODELS.items()}
    assert list(sizes.values()) == [11_173_962, 124_439_808, 100_000, 51_200]


def test_wrong_and_missing_peers_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Tensor, threshold: float) -> Tensor:
        return x + 1

    def failing(x: Tensor, threshold: float) -> Tensor:
        raise OSError("not today")

    broken = {"json": lambda module: wrong, "csv": lambda module: failing, "not_installed": lambda module: wrong}
    monkeypatch.setattr(peers, "PEERS", dict.fromkeys(kernels.KERNELS, broken))
    small = {name: replace(kernel, matrices=[(20, 30)]) for name, kernel in kernels.KERNELS.items()}
    kernels.kernels(tmp_path, 3, small)
    output = " ".join(capsys.readouterr().out.split())
    assert "ℓ∞,1: skipped not_installed: ModuleNotFoundError" in output
    assert "ℓ1 ball: skipped csv on (20, 30), threshold 0.1: OSError: not today" in output
    assert "simplex: skipped json on (20, 30), threshold 0.1: relative error" in output
    found = numbers(tmp_path, "kernels")
    assert len(found) == 2 * len(small)
    for title, kinds in found.items():
        textbook = small[title.split(", 20")[0]].textbook_name
        assert kinds.keys() == {"small", "medium", "large"}
        assert all(set(seconds) == {"copy", "proxmo, fused", "proxmo, eager", textbook} for seconds in kinds.values())


def test_training_reports_speed_and_optimizer_share(tmp_path: Path) -> None:
    training.training(tmp_path, 3, width=8, batch=4)
    for found in numbers(tmp_path, "training").values():
        assert found["SGD, fused"]["images per second / SGD"] == 1
        assert all(0 < values["optimizer share"] < 1 for values in found.values())


def test_batched_grid_is_faster_than_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SAMPLE", 5)
    sweep.sweep(tmp_path, 3, iterations=20)
    found = numbers(tmp_path, "sweep")
    assert found["runs"] == 44 * 3 * 50
    assert all(gain > 1 for gain in found["gains"].values())


def test_curves_times_each_size(tmp_path: Path) -> None:
    curves.curves(tmp_path, 3, largest=2000)
    found = numbers(tmp_path, "curves")
    assert set(found["columns of 64 rows"]) == {"1", "4", "16"}
    assert set(found["tensors of 100"]["16"]) == {"SGD, fused", "SGD, foreach", "ℓ1, default", "ℓ1, fused"}
    assert "1" in found["threads"]


def test_command_runs_chosen_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[Path, int]] = []
    monkeypatch.setitem(command.SUITES, "steps", lambda folder, repeats: called.append((folder, repeats)))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps", "--out", str(tmp_path), "--repeats", "5"])
    command.main()
    assert called == [(tmp_path, 5)]
    assert (
        json.loads((tmp_path / "made_with.json").read_text())["torch"].split("+")[0]
        == str(torch.__version__).split("+")[0]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step"], "SUITE must be one of steps, adam_steps, kernels, training, sweep, curves, got step"),
        (["--repeats", "2"], "--repeats must be at least 3, got 2"),
    ],
)
def test_command_refuses_wrong_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["benchmarks", "benchmarks.methods", "benchmarks.communication"])
def test_missing_packages_are_named_without_a_traceback(module: str) -> None:
    # -S leaves only the standard library
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-S", "-m", module], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr == (
        "benchmarks need matplotlib, rich, sklearn, threadpoolctl: run pip install 'proxmo[reproduce,fast]'\n"
    )


def test_command_needs_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps"])
    with pytest.raises(SystemExit, match=r"benchmarks need numba: run pip install 'proxmo\[reproduce,fast\]'"):
        command.main()


def test_candidates_take_turns_in_random_order() -> None:
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        time.sleep(timing.TURN)

    seconds = timing.by_turns({name: partial(call, name) for name in "ab"}, repeats=8)
    rounds = ["".join(pair) for pair in zip(order[::2], order[1::2], strict=True)]
    assert len(rounds) == 9
    assert set(rounds) == {"ab", "ba"}
    assert all(value > timing.TURN for value in seconds.values())


def test_very_slow_candidates_are_called_once() -> None:
    calls: list[None] = []
    timing.by_turns({"slow": lambda: calls.append(None)}, repeats=5, max_seconds=0.0)
    assert len(calls) == 1


def test_fast_candidates_are_called_many_times_per_turn() -> None:
    order: list[str] = []
    timing.by_turns({"short": lambda: order.append("short"), "other": lambda: order.append("other")}, repeats=3)
    assert sorted(order[:4]) == ["other", "other", "short", "short"]  # a warm-up and a first turn
    assert len(set(order[4:24])) == 1


def test_threads_restores_the_thread_count() -> None:
    before = torch.get_num_threads()
    with timing.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
