"""All experiments of the paper into one folder: run, or gone on with, then told in a report."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

import proxmo
from proxmo.experiments import synthetic
from proxmo.experiments.comparison import Comparison, compare
from proxmo.experiments.data import DataError, load
from proxmo.experiments.presets import Preset, PresetName, preset
from proxmo.experiments.report import Section, comparison_section, render, synthetic_section
from proxmo.experiments.store import Store, opened
from proxmo.experiments.training import Record, has_fast_bfloat16

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

    def command(self, experiment: str) -> str:
        """How to ask for one of the experiments again."""
        parts = [f"proxmo reproduce {experiment}"]
        if experiment != "synthetic":
            parts.append(f"--preset {self.preset} --data {self.data}")
        if self.root is not None and experiment != "synthetic":
            parts.append(f"--root {shlex.quote(str(self.root))}")
        if self.seeds is not None:
            parts.append(f"--seeds {self.seeds}")
        if self.device != "cpu" and experiment != "synthetic":
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
    _check_data(request, size)
    with opened(request.out) as store:
        wanted = {name: _settings(name, request, size) for name in request.experiments}
        store.begin(wanted, resume=request.resume)
        for name in request.experiments:
            if name == "synthetic":
                _run_synthetic(store, request.seeds or SYNTHETIC_SEEDS, bar)
            else:
                _run_comparison(name, store, request, size, bar)
        return _tell(store)


def _check_data(request: Request, size: Preset) -> None:
    """A clear word now rather than after minutes of other work."""
    if any(name != "synthetic" for name in request.experiments):
        images = load(request.data, request.root)
        if "proxy" in request.experiments and 2 * size.proxy_images > len(images.train):
            raise DataError(
                f"proxy training with preset {request.preset} takes {size.proxy_images} images as proxy, which must be "
                f"at most half of the training images; {request.data} has {len(images.train)}: take --data cifar10"
            )


def _settings(name: str, request: Request, size: Preset) -> dict[str, Any]:
    """All that the numbers depend on, so that a run is gone on with under the same conditions only."""
    made_with = {"proxmo": proxmo.__version__, "torch": str(torch.__version__), "machine": platform.machine()}
    if name == "synthetic":
        return {"command": request.command(name), "seeds": request.seeds or SYNTHETIC_SEEDS, **made_with}
    return {
        "command": request.command(name),
        "data": request.data,
        "seeds": request.seeds or size.seeds,
        "device": request.device.split(":")[0],
        "bfloat16": has_fast_bfloat16(request.device),
        "width": size.width,
        "grid": str(getattr(size, name)),
        **({"proxy": f"{size.proxy_images} images, batch {size.proxy_batch}"} if name == "proxy" else {}),
        **made_with,
    }


def _run_synthetic(store: Store, seeds: int, bar: Bar) -> None:
    steps = synthetic.ITERATIONS
    auto_runs = synthetic.AUTO_SEEDS * len(synthetic.SIGMAS)
    share = steps // auto_runs  # as if all of them took as long as a sweep of the grid
    total = 2 * (synthetic.sweeps(seeds) * steps + auto_runs * share)
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


def _as_section(name: str, settings: dict[str, Any], record: dict[str, Any]) -> tuple[Section, dict[str, Any]]:
    comparison = Comparison(name, [Record.from_json(run) for run in record["runs"]])
    return comparison_section(comparison, record["data"], settings), record


def _tell(store: Store) -> Outcome:
    """Write both files from all records in the folder, also of experiments that were run before."""
    sections: list[Section] = []
    numbers: dict[str, Any] = {}
    settings = {name: store.settings(name) for name in EXPERIMENTS if store.settings(name)}
    paper, shifted = (store.record(f"synthetic-{name}", synthetic.Results.from_record) for name in ("paper", "shifted"))
    if paper is not None and shifted is not None:
        sections.append(synthetic_section(paper, shifted, settings["synthetic"]))
        numbers["synthetic"] = {**paper.to_json(), "shifted": shifted.to_json()}
    for name in EXPERIMENTS[1:]:
        found = store.record(f"{name}-all", partial(_as_section, name, settings.get(name, {})))
        if found is not None:
            section, numbers[name] = found
            sections.append(section)
    numbers["claims"] = {section.name: [asdict(claim) for claim in section.claims] for section in sections}
    numbers["settings"] = settings
    return Outcome(
        sections,
        report=store.write("report.html", render(sections)),
        numbers=store.write("results.json", json.dumps(numbers, indent=1, allow_nan=False)),
    )
