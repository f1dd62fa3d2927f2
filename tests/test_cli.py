"""The command as a user runs it: a real process where that matters, the real experiment on few seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

import proxmo
from proxmo import theory
from proxmo.cli import app
from proxmo.experiments import synthetic
from proxmo.experiments.figures import draw_synthetic
from proxmo.files import written_whole


@pytest.fixture(scope="module")
def results() -> synthetic.Results:
    return synthetic.run(seeds=40, iterations=1000)


def test_every_cell_is_there(results: synthetic.Results) -> None:
    assert len(results.cells) == len(results.curves) == 3 * (25 + 15)
    assert {cell.sigma for cell in results.cells} == {5.0, 25.0, 125.0}
    assert all(curve.mean.shape == curve.one_run.shape == (1000,) for curve in results.curves)


def test_cells_are_where_theory_puts_them(results: synthetic.Results) -> None:
    """Cells that have forgotten their start by the last tenth have the closed-form mean, up to Monte Carlo error."""
    settled = [c for c in results.cells if c.gamma >= 0.01]
    assert len(settled) == 3 * (10 + 15)
    for cell in settled:
        assert cell.closed_form == theory.quadratic_floor(
            1.0, 1e4, cell.sigma**2 / cell.batch, M=cell.M, gamma=cell.gamma
        )
        assert cell.stationary == pytest.approx(cell.closed_form, rel=0.25)


def test_momentum_wins_and_vanilla_stalls(results: synthetic.Results) -> None:
    for sigma in synthetic.SIGMAS:
        momentum, vanilla = (results.cells[results.best(m, sigma)] for m in ("momentum", "vanilla"))
        assert momentum.stationary < vanilla.stationary / 10
        assert vanilla.stationary > sigma**2 / 4
        assert vanilla.median_samples is None
    quiet = results.cells[results.find("momentum", 5.0, M=10.0, gamma=0.01)]
    assert quiet.hit_share > 0.5
    assert quiet.median_samples is not None


def test_hits_are_counted_from_the_curves(results: synthetic.Results) -> None:
    """With one seed the curve is the run, so the first crossing can be read off it."""
    single = synthetic.run(seeds=1, iterations=1000)
    crossed = 0
    for cell, curve in zip(single.cells, single.curves, strict=True):
        np.testing.assert_array_equal(curve.one_run, curve.mean)
        below = np.flatnonzero(curve.one_run <= synthetic.TOLERANCE)
        assert cell.hit_share == float(below.size > 0)
        assert cell.median_samples == ((below[0] + 1) * cell.batch if below.size else None)
        crossed += below.size > 0
    assert 0 < crossed < len(single.cells)


def test_runs_repeat_exactly() -> None:
    assert synthetic.run(seeds=2, iterations=20).to_json() == synthetic.run(seeds=2, iterations=20).to_json()


def test_figure(results: synthetic.Results) -> None:
    figure = draw_synthetic(results)
    assert [axes.get_title().split(" (")[0] for axes in figure.axes] == ["σ = 5", "σ = 25", "σ = 125"]
    for axes in figure.axes:
        labelled = [line.get_label() for line in axes.lines if not str(line.get_label()).startswith("_")]
        assert labelled == ["vanilla, batch 1", "vanilla, batch 16", "vanilla, batch 64", "momentum, batch 1"]
        assert all(np.isfinite(line.get_ydata()).all() for line in axes.lines)


def test_reproduce_as_a_process(tmp_path: Path) -> None:
    command = [
        Path(sys.executable).parent / "proxmo",
        "reproduce",
        "--seeds",
        "2",
        "--out",
        str(tmp_path / "new" / "folder"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"},
    )
    assert "momentum" in done.stdout
    assert "…" not in done.stdout  # nothing cut off on an ordinary terminal
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == ["results.json", "synthetic.png"]
    cells = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())["synthetic"]["cells"]
    assert set(cells[0]) == {
        "method", "sigma", "M", "gamma", "batch", "hit_share", "median_samples", "stationary", "closed_form",
    }  # fmt: skip
    assert imread(tmp_path / "new" / "folder" / "synthetic.png").std() > 0.05


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.output == f"proxmo {proxmo.__version__}\n"


def test_unwritable_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "cannot write to" in done.output
    assert (tmp_path / "file").read_text() == "mine"


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "numbers.txt"
    target.write_text("old")

    def fail() -> None:
        with written_whole(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with written_whole(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o644
