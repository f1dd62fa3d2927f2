"""The benchmark of transformers trains with every method, resumes from its records, and times what it cuts."""

from pathlib import Path

import pytest
import torch
from benchmarks import transformers
from benchmarks.targets_tasks import ByteTransformer


@pytest.mark.slow
def test_losses_are_those_of_compacted_networks_and_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers, "METHODS", {"one-shot": transformers.one_shot})
    monkeypatch.setattr(transformers, "KEEP", (0.5,))
    monkeypatch.setattr(transformers, "LRS", (1e-2,))
    arguments = ["quality", "--seeds", "1", "--steps", "10", "--out", str(tmp_path)]
    transformers.main(arguments)
    (run,) = transformers.grid(1, tmp_path)
    record = transformers.read(run.path(tmp_path), transformers.Record)
    assert record is not None
    assert record.small_loss == pytest.approx(record.loss, abs=1e-5)
    assert record.widths["blocks.1.attention"] == [4, 2]
    assert record.widths["blocks.0.inner"] == [256, 128]
    assert "AdamW, one-shot pruning" in (tmp_path / "quality.md").read_text()
    assert (tmp_path / "quality.png").stat().st_size > 0
    capsys.readouterr()
    transformers.main(arguments)
    assert "min left" not in capsys.readouterr().out  # nothing was trained again
    with pytest.raises(SystemExit, match="no records in"):
        transformers.main(["quality", "--report-only", "--out", str(tmp_path / "other")])


def test_speed_is_measured_for_each_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> torch.nn.Module:
        return ByteTransformer(16, 4, 32)

    size = (1, transformers.CONTEXT)
    setting = transformers.Setting("tiny", make, 256, (size,), size)
    monkeypatch.setattr(transformers, "SETTINGS", (setting,))
    monkeypatch.setattr(transformers, "SHARES", (1.0, 0.5))
    transformers.main(["speed", "--repeats", "3", "--threads", "1", "--out", str(tmp_path)])
    table = (tmp_path / "speed.md").read_text().splitlines()
    assert [line.split(" | ")[3] for line in table[2:]] == ["100%", "50%"]
    small, _ = transformers.compacted(make().eval(), setting.tokens(size), 0.5)
    assert small.get_submodule("blocks.0.attention").num_heads == 2
    assert small.get_submodule("blocks.1.inner").out_features == 16
