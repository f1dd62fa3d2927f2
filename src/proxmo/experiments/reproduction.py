"""All experiments of the paper into one folder: run, or gone on with, then told in a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from proxmo.experiments import synthetic
from proxmo.experiments.comparison import Comparison, compare
from proxmo.experiments.data import load
from proxmo.experiments.presets import Preset, PresetName, preset
from proxmo.experiments.report import Section, comparison_section, render, synthetic_section, versions
from proxmo.experiments.store import Store, opened
from proxmo.experiments.training import Record

EXPERIMENTS = ("synthetic", "regularized", "proxy")
SYNTHETIC_SEEDS = 50


Bar: TypeAlias = Callable[[str, int, int], None]
"""Is told an experiment, how many of its steps are done since the last call, and how many there are in all."""


@dataclass(frozen=True)
class Request:
    """What to reproduce, and how.

    Attributes:
        experiments: some of `EXPERIMENTS`.
        preset: the size.
        data: the data set of the training experiments.
        root: where it is, if not where it is expected.
        seeds: independent runs; ``None`` for 50 on the quadratic, and what the preset has for networks.
        device: where to train.
        out: the folder.
        resume: go on with what is in the folder.
    """

    experiments: tuple[str, ...]
    preset: PresetName
    data: str
    root: Path | None
    seeds: int | None
    device: str
    out: Path
    resume: bool

    @property
    def command(self) -> str:
        """How to ask for the same again."""
        what = "all" if self.experiments == EXPERIMENTS else self.experiments[0]
        parts = ["proxmo reproduce", what, f"--preset {self.preset} --data {self.data}"]
        if self.seeds is not None:
            parts.append(f"--seeds {self.seeds}")
        if self.device != "cpu":
            parts.append(f"--device {self.device}")
        return " ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """What was made: the sections of the report, and the files."""

    sections: list[Section]
    report: Path
    numbers: Path


def reproduce(request: Request, bar: Bar) -> Outcome:
    """Run what is asked for, and write ``report.html`` and ``results.json``, which tell of all in the folder."""
    size = preset(request.preset, request.data)
    if any(name != "synthetic" for name in request.experiments):
        load(request.data, request.root)  # a clear word now rather than after minutes of other work
    with opened(request.out) as store:
        for name in request.experiments:
            store.begin(name, _settings(name, request, size), resume=request.resume)
        for name in request.experiments:
            if name == "synthetic":
                _run_synthetic(store, request.seeds or SYNTHETIC_SEEDS, bar)
            else:
                _run_comparison(name, store, request, size, bar)
        return _tell(store, request)


def _settings(name: str, request: Request, size: Preset) -> dict[str, Any]:
    if name == "synthetic":
        return {"seeds": request.seeds or SYNTHETIC_SEEDS}
    return {
        "preset": request.preset,
        "data": request.data,
        "seeds": request.seeds or size.seeds,
        "device": request.device.split(":")[0],
    }


def _run_synthetic(store: Store, seeds: int, bar: Bar) -> None:
    steps = synthetic.ITERATIONS
    auto_runs = synthetic.AUTO_SEEDS * len(synthetic.SIGMAS)
    share = steps // auto_runs  # as if all of them took as long as the grid
    total = 2 * (steps + auto_runs * share)
    for name, problem in (("paper", synthetic.PAPER), ("shifted", synthetic.SHIFTED)):
        key = f"synthetic-{name}"
        if store.record(key) is None:
            grid = synthetic.run(seeds, steps, problem, advance=lambda: bar("synthetic", 1, total))
            auto = synthetic.run_auto(synthetic.AUTO_SEEDS, steps, problem, lambda: bar("synthetic", share, total))
            store.finish(key, grid.joined(auto).to_record())
        else:
            bar("synthetic", total // 2, total)


def _run_comparison(name: str, store: Store, request: Request, size: Preset, bar: Bar) -> None:
    def progress(done: int, total: int) -> None:
        bar(name, done, total)

    images = partial(load, request.data, request.root)
    found = compare(name, size, request.seeds or size.seeds, images, request.device, store, progress)
    store.finish(f"{name}-all", {"data": request.data, **found.to_json()})


def _tell(store: Store, request: Request) -> Outcome:
    """Write both files from all records in the folder, also of experiments that were run before."""
    sections: list[Section] = []
    numbers: dict[str, Any] = {}
    quadratics = [store.record(f"synthetic-{name}") for name in ("paper", "shifted")]
    known = [synthetic.Results.from_record(record) for record in quadratics if record is not None]
    if len(known) == 2:
        paper, shifted = known
        sections.append(synthetic_section(paper, shifted))
        numbers["synthetic"] = {**paper.to_json(), "shifted": shifted.to_json()}
    for name in EXPERIMENTS[1:]:
        record = store.record(f"{name}-all")
        if record is not None:
            comparison = Comparison(name, [Record.from_json(run) for run in record["runs"]])
            sections.append(comparison_section(comparison, record["data"]))
            numbers[name] = record
    numbers["claims"] = {section.name: [asdict(claim) for claim in section.claims] for section in sections}
    numbers["command"], numbers["versions"] = request.command, versions()
    settings = {"preset": request.preset, "data": request.data, "device": request.device}
    return Outcome(
        sections,
        report=store.write("report.html", render(sections, request.command, settings)),
        numbers=store.write("results.json", json.dumps(numbers, indent=1)),
    )
