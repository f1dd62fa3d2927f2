"""Run experiments into a folder, and write a report of everything in that folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from proxmo.experiments.experiment import Experiment, Options
from proxmo.experiments.proxy import Proxy
from proxmo.experiments.regularized import Regularized
from proxmo.experiments.report import Section, render
from proxmo.experiments.store import Store, open_store
from proxmo.experiments.synthetic import Synthetic

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Synthetic(),
        Regularized(),
        Proxy(),
    )
}
"""Every experiment, in the order of the report."""

Bar: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of an experiment, then as `experiment.Progress` is."""


@dataclass(frozen=True)
class Outcome:
    """The sections of the report, and the files that were written."""

    sections: list[Section]
    report: Path
    numbers: Path


def reproduce(experiments: Iterable[Experiment], options: Options, out: Path, bar: Bar, *, resume: bool) -> Outcome:
    """Run experiments, then write ``report.html`` and ``results.json`` for all results in the folder.

    Args:
        experiments: what to run, in this order.
        options: what the user chose.
        out: the folder.
        bar: shows the progress.
        resume: continue what is in the folder.
    """
    experiments = list(experiments)
    for experiment in experiments:
        experiment.check(options)
    with open_store(out) as store:
        store.begin({experiment.name: experiment.settings(options) for experiment in experiments}, resume=resume)
        for experiment in experiments:
            experiment.run(options, store, partial(bar, experiment.name))
        return _write(store)


def _write(store: Store) -> Outcome:
    """Write both files from all records in the folder, including those of earlier runs."""
    sections: list[Section] = []
    numbers: dict[str, Any] = {}
    for name, experiment in EXPERIMENTS.items():
        found = experiment.results(store)
        if found is not None:
            section, numbers[name] = found
            sections.append(section)
    numbers["claims"] = {section.name: [asdict(claim) for claim in section.claims] for section in sections}
    numbers["settings"] = {name: settings for name in EXPERIMENTS if (settings := store.settings(name))}
    return Outcome(
        sections,
        report=store.write("report.html", render(sections)),
        numbers=store.write("results.json", json.dumps(numbers, indent=1, allow_nan=False)),
    )
