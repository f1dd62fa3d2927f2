"""The benchmarks of speed run, check what they time, and leave their files behind."""

from __future__ import annotations

import json
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


def test_steps(tmp_path: Path) -> None:
    steps.steps(tmp_path, 3, {"small": lambda: [(20, 30), (20,)], "smaller": lambda: [(2, 3)]})
    found = numbers(tmp_path, "steps")
    assert set(found) == {f"{model}, threads: {count}" for model in ("small", "smaller") for count in (1, 2)}
    ratios = found["small, threads: 1"]["ratios"]
    assert ratios["SGD, fused"] == 1
    assert {"none, fused", "ℓ1, default", "ℓ∞,1, fused"} < set(ratios)
    assert "| small | SGD, fused | 1.00 | 1.00 |" in (tmp_path / "steps.md").read_text()


def test_models_are_of_the_size_that_they_say() -> None:
    sizes = {name: sum(torch.Size(shape).numel() for shape in shapes()) for name, shapes in steps.MODELS.items()}
    assert list(sizes.values()) == [11_173_962, 124_439_808, 100_000]


def test_a_peer_that_is_wrong_or_missing_is_not_timed(
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
    said = " ".join(capsys.readouterr().out.split())
    assert "ℓ∞,1 without not_installed: ModuleNotFoundError" in said
    assert "ℓ1 ball without csv on (20, 30), threshold 0.1: OSError: not today" in said
    assert "simplex without json on (20, 30), threshold 0.1: it is off by" in said
    found = numbers(tmp_path, "kernels")
    assert len(found) == 2 * len(small)
    for title, kinds in found.items():
        textbook = small[title.split(", 20")[0]].textbook_name
        assert kinds.keys() == {"small", "middling", "large"}
        assert all(set(seconds) == {"copy", "proxmo, fused", "proxmo, plain", textbook} for seconds in kinds.values())


def test_training(tmp_path: Path) -> None:
    training.training(tmp_path, 3, width=8, batch=4)
    for found in numbers(tmp_path, "training").values():
        assert found["SGD, fused"]["to SGD"] == 1
        assert all(0 < values["share of the optimizer"] < 1 for values in found.values())


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SAMPLE", 5)
    sweep.sweep(tmp_path, 3, iterations=20)
    found = numbers(tmp_path, "sweep")
    assert found["runs"] == 44 * 3 * 50
    assert all(gain > 1 for gain in found["gains"].values())


def test_curves(tmp_path: Path) -> None:
    curves.curves(tmp_path, 3, largest=2000)
    found = numbers(tmp_path, "curves")
    assert set(found["columns of 64 rows"]) == {"1", "4", "16"}
    assert set(found["tensors of 100"]["16"]) == {"SGD, fused", "SGD, foreach", "ℓ1, default", "ℓ1, fused"}
    assert "1" in found["threads"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[tuple[Path, int]] = []
    monkeypatch.setitem(command.SUITES, "steps", lambda folder, repeats: called.append((folder, repeats)))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "steps", "--out", str(tmp_path), "--repeats", "5"])
    command.main()
    assert called == [(tmp_path, 5)]
    assert json.loads((tmp_path / "made_with.json").read_text())["torch"] == torch.__version__
    for wrong, message in (
        (["step"], "there is no suite step; there are steps, kernels"),
        (["--repeats", "2"], "least 3"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *wrong])
        with pytest.raises(SystemExit):
            command.main()
        assert message in capsys.readouterr().err


def test_candidates_take_turns() -> None:
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        time.sleep(timing.TURN)

    seconds = timing.by_turns({name: partial(call, name) for name in "ab"}, repeats=8)
    rounds = ["".join(pair) for pair in zip(order[::2], order[1::2], strict=True)]
    assert len(rounds) == 9
    assert set(rounds) == {"ab", "ba"}  # each once in every round, not always after the same one
    assert all(value > timing.TURN for value in seconds.values())
    timing.by_turns({"slow": lambda: order.append("slow")}, repeats=5, most=0.0)
    assert order.count("slow") == 1
    timing.by_turns({"short": lambda: order.append("short"), "other": lambda: order.append("other")}, repeats=3)
    first = order.index("short")
    assert sorted(order[first : first + 4]) == ["other", "other", "short", "short"]
    assert len(set(order[first + 4 : first + 24])) == 1  # as many as take a millisecond
    before = torch.get_num_threads()
    with timing.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
