"""Adding an experiment: a subclass of `Experiment` and a row in the table are enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import proxmo
from proxmo.experiments.data import DataError
from proxmo.experiments.experiment import Experiment, Options, Progress
from proxmo.experiments.report import Claim, Section
from proxmo.experiments.reproduction import EXPERIMENTS, reproduce
from proxmo.experiments.store import Store, StoreError


class Coin(Experiment):
    """Counts the heads of a coin that always lands on heads."""

    name = "coin"
    title = "A coin"

    def check(self, options: Options) -> None:
        if options.seeds == 13:
            raise DataError("13 is unlucky")

    def arguments(self, options: Options) -> list[str]:
        return [f"--seeds {options.seeds}"]

    def conditions(self, options: Options) -> dict[str, Any]:
        return {"seeds": options.seeds}

    def run(self, options: Options, store: Store, progress: Progress) -> None:
        if store.record("coin-all") is None:
            store.finish("coin-all", {"heads": options.seeds})
            progress(1, 1)

    def missing(self, store: Store) -> list[str]:
        return []

    def merged(self, stores: list[Store], settings: dict[str, Any]) -> dict[str, Any]:
        return {"coin-all": {"heads": sum(store.record("coin-all")["heads"] for store in stores)}}

    def results(self, store: Store) -> tuple[Section, dict[str, Any]] | None:
        record = store.record("coin-all")
        if record is None:
            return None
        claim = Claim("heads", paper="half", measured=str(record["heads"]), agrees=False)
        return Section(self.name, self.title, "Heads.", [], [claim], [], store.settings(self.name)), record


def test_experiment_needs_a_class_and_a_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "coin", Coin())
    options = Options("quick", "digits", None, seeds=5, device="cpu")
    steps: list[tuple[str, int, int]] = []
    outcome = reproduce([Coin()], options, tmp_path, lambda *step: steps.append(step), resume=False)
    assert steps == [("coin", 1, 1)]
    assert [section.title for section in outcome.sections] == ["A coin"]
    assert "<h2>A coin</h2>" in outcome.report.read_text(encoding="utf-8")
    numbers = json.loads(outcome.numbers.read_text(encoding="utf-8"))
    assert set(numbers) == {"coin", "claims", "settings"}
    assert numbers["coin"] == {"heads": 5}
    assert numbers["claims"]["coin"][0]["measured"] == "5"
    settings = numbers["settings"]["coin"]
    assert list(settings) == ["command", "seeds", "proxmo", "torch", "machine"]
    assert (settings["command"], settings["proxmo"]) == ("proxmo reproduce coin --seeds 5", proxmo.__version__)
    reproduce([Coin()], options, tmp_path, lambda *step: steps.append(step), resume=True)
    assert len(steps) == 1
    with pytest.raises(StoreError, match="seeds was 5, now 6"):
        reproduce([Coin()], Options("quick", "digits", None, 6, "cpu"), tmp_path, lambda *_: None, resume=True)


def test_all_experiments_are_checked_before_the_first_one_starts(tmp_path: Path) -> None:
    options = Options("quick", "digits", None, seeds=13, device="cpu")
    with pytest.raises(DataError, match="13 is unlucky"):
        reproduce([EXPERIMENTS["synthetic"], Coin()], options, tmp_path / "out", lambda *_: None, resume=False)
    assert not (tmp_path / "out").exists()


def test_keys_of_the_table_are_the_names() -> None:
    assert list(EXPERIMENTS) == [experiment.name for experiment in EXPERIMENTS.values()]
    assert list(EXPERIMENTS) == ["synthetic", "regularized", "proxy"]
