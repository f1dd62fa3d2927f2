"""The benchmark of balanced units counts what is left, and prints a table."""

import pytest
from benchmarks import balance


def test_table_counts_the_heads_and_neurons_that_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    balance.main(["--strengths", "50", "--epochs", "1"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[2:]] == [["50", str(balanced), "0 + 0", "0 + 0"] for balanced in (False, True)]
    assert len(rows[0]) == len(rows[2]) == 6
    assert balance.run(0.0, True, epochs=0).startswith("| 0 | True | 4 + 4 | 256 + 256 | 101,706 | ")
