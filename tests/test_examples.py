"""The examples run and reach the results that they print."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_autosize_compacts_without_losing_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / "autosize.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    before, after, from_file = map(float, re.findall(r"([\d.]+)% (?:before|after|from)", printed))
    assert before == after == from_file > 95
    smaller = re.search(r"parameters .*?([\d.]+)x smaller", printed)
    assert smaller is not None
    assert float(smaller[1]) > 20
    assert [file.name for file in tmp_path.iterdir()] == ["small.safetensors"]


def test_shrink_keeps_a_tenth_of_the_units_and_the_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "shrink.py"), run_name="__main__")
    printed = capsys.readouterr().out
    before, after, from_file = map(float, re.findall(r"([\d.]+)% (?:before|after|from)", printed))
    assert after == from_file > before - 1
    assert re.search(r"units +512 +52 +0.10", printed)
    assert [file.name for file in tmp_path.iterdir()] == ["small.safetensors"]


def test_ddp_saves_the_sparsity_that_it_prints(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        EXAMPLES / "ddp.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    shares = [int(share) for share in re.findall(r"epoch \d+: (\d+)% of the hidden neurons", run.stdout)]
    assert len(shares) == 4
    assert shares[-1] > 20
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    zero = (saved["network"]["0.weight"] == 0).all(1).float().mean()
    assert round(100 * float(zero)) == shares[-1]
