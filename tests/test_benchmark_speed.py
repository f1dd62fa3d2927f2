"""The benchmark of speed runs, checks what it times, and leaves its files behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import peers, speed, timing
from torch import Tensor


def test_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MODELS", {"small": lambda: [(20, 30), (20,)]})
    speed.steps(tmp_path, 3, ["small"])
    numbers = json.loads((tmp_path / "steps.json").read_text())
    assert set(numbers) == {"small, threads: 1", "small, threads: 2"}
    ratios = numbers["small, threads: 1"]["ratios"]
    assert ratios["SGD, fused"] == 1
    assert {"none, fused", "ℓ1, default", "ℓ∞,1, fused"} < set(ratios)
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    assert "| small | 1 | SGD, fused | 1.00 |" in (tmp_path / "steps.md").read_text()


def test_a_peer_that_is_wrong_or_missing_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Tensor, threshold: float) -> Tensor:
        return x

    monkeypatch.setattr(peers, "PEERS", {"json": lambda module: wrong, "not_installed": lambda module: wrong})
    speed.kernels(tmp_path, 3, [(20, 30)])
    said = " ".join(capsys.readouterr().out.split())
    assert "without not_installed: ModuleNotFoundError" in said
    assert "without json on (20, 30): it is off by" in said
    numbers = json.loads((tmp_path / "kernels.json").read_text())
    assert len(numbers) == 6
    assert all(
        set(n["ratios"]) == {"copy", "proxmo, fused", "proxmo, plain", "sort + cumsum"} for n in numbers.values()
    )
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_candidates_take_turns() -> None:
    order: list[str] = []
    seconds = timing.by_turns({name: lambda name=name: order.append(name) for name in "ab"}, repeats=3)
    assert order == ["a", "b"] * 4
    assert all(value > 0 for value in seconds.values())
    before = torch.get_num_threads()
    with timing.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
