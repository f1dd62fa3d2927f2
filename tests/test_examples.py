"""The examples run, and are as short as they say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_autosize(tmp_path: Path) -> None:
    script = EXAMPLES / "autosize.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    before, after, from_file = map(float, re.findall(r"([\d.]+)% (?:before|after|from)", run.stdout))
    assert before == after == from_file > 95
    smaller = re.search(r"parameters .*?([\d.]+)x smaller", run.stdout)
    assert smaller is not None
    assert float(smaller[1]) > 20
    assert [file.name for file in tmp_path.iterdir()] == ["small.safetensors"]
