"""Records of runs: runs that have one are not run again, so that a benchmark can be stopped and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from proxmo.files import written_whole


class Run(Protocol):
    """One point of a grid; its text names it."""

    def path(self, out: Path) -> Path:
        """Return where its record is."""
        ...


RunT = TypeVar("RunT", bound=Run)
RecordT = TypeVar("RecordT")


def read(path: Path, record: type[RecordT]) -> RecordT | None:
    """Return the record in a file, a dataclass, if there is one."""
    return record(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def perform_missing(runs: Sequence[RunT], out: Path, perform: Callable[[RunT], Any]) -> None:
    """Perform the runs that have no record yet, write these, and say after each how long the others may take."""
    missing = [run for run in runs if not run.path(out).exists()]
    start = time.perf_counter()
    for done, run in enumerate(missing, 1):
        record = perform(run)
        path = run.path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        minutes = (time.perf_counter() - start) / done * (len(missing) - done) / 60
        print(f"[{done}/{len(missing)}] {run}: {record.summary()}; about {minutes:.0f} min left", flush=True)
