"""The benchmark of targets removes what is asked for with every method, and resumes from its records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import targets, targets_methods
from benchmarks.targets_methods import METHODS, TOLERANCE, TRIALS, Job, Kind, methods_for
from benchmarks.targets_tasks import TASKS, ByteTransformer, Folders, Task
from torch import nn

from proxmo import GroupL2, unit_groups

DIGITS = TASKS["digits"](Folders())


def small_task() -> Task:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10)
        )

    return replace(DIGITS, make=make, steps=150)


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.TASKS, "digits", lambda folders: replace(small_task(), steps=60))
    monkeypatch.setattr(targets_methods, "TRIALS", 2)
    monkeypatch.setattr(targets, "TARGETS", {"elements": (0.75,), "units": (0.5,)})


@pytest.mark.parametrize(("kind", "removed"), [("elements", 0.8), ("units", 0.75)])
def test_methods_remove_the_share_asked_for(kind: Kind, removed: float) -> None:
    task = small_task()
    widths = METHODS["trimmed"](Job(task, kind, removed, seed=0)).widths
    assert widths is None or sum(widths) == 10
    for method in methods_for(kind):
        if method != "searched":
            outcome = METHODS[method](Job(task, kind, removed, seed=0, widths=widths))
            assert outcome.removed == pytest.approx(removed, abs=1e-3), method
            assert outcome.score > 0.5, method


def test_search_finds_a_strength_and_counts_its_runs() -> None:
    job = Job(small_task(), "elements", 0.5, seed=0)
    outcome = METHODS["searched"](job)
    assert 1 < outcome.runs < TRIALS
    assert outcome.removed == pytest.approx(0.5, abs=0.5 * TOLERANCE)
    again = METHODS["searched"](replace(job, strength=outcome.strength))
    assert again == outcome._replace(runs=1)


def test_units_of_the_transformer_are_its_neurons() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    groups = unit_groups(ByteTransformer(), tokens, GroupL2(0.1), exclude=["*attention*"])
    names = {name for group in groups if group["penalty"] is not None for name, _ in group["params"]}
    assert names == {f"blocks.{block}.inner.{part}" for block in (0, 1) for part in ("weight", "bias")}


@pytest.mark.slow
@pytest.mark.usefixtures("small_grid")
def test_main_writes_records_once_and_reports_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tasks", "digits", "--seeds", "2", "--out", str(tmp_path)]
    targets.main(arguments)
    runs = 2 * (1 + len(methods_for("elements")) + len(methods_for("units")))
    assert capsys.readouterr().out.count("min left") == runs
    assert len(list((tmp_path / "records").iterdir())) == runs
    assert len(json.loads((tmp_path / "targets.json").read_text(encoding="utf-8"))) == runs
    table = (tmp_path / "targets.md").read_text(encoding="utf-8").splitlines()
    starts = ["| digits | elements | 75% | 2 |", "| digits | units | 50% | 2 |"]
    assert all(line.startswith(start) for line, start in zip(table[2:], starts, strict=True))
    assert table[2].count(" ± ") == 1 + len(methods_for("elements"))
    assert (tmp_path / "targets.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "records" / "digits-units-0.5-trimmed-1.json").unlink()
    targets.main(arguments)
    assert "[1/1] digits, units, 50%, trimmed, seed 1: accuracy" in capsys.readouterr().out


@pytest.mark.usefixtures("small_grid")
def test_report_only_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records"):
        targets.main(["--tasks", "digits", "--report-only", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
