"""The folder of an experiment: what was finished, what can be gone on with, and nobody else at work in it."""

from __future__ import annotations

import fcntl
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from proxmo.files import written_whole


class StoreError(RuntimeError):
    """A folder that cannot be worked in; the message says why, and what to do."""


class Store:
    """Finished runs and the checkpoints of unfinished ones in a folder; made by `opened`.

    A run has a name, under which it keeps a checkpoint while it goes on, and at the end its record, plain data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = folder / "runs"

    def record(self, name: str, read: Callable[[Any], Any] = lambda data: data) -> Any | None:
        """What was recorded of a finished run, made by ``read`` from plain data; or ``None``."""
        path = self._runs / f"{name}.json"
        try:
            return read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error!r}); delete it to do its run anew") from error

    def finish(self, name: str, record: Any) -> None:
        """Keep the record of a run, which needs its checkpoint no more."""
        with _disk_errors(self.folder), written_whole(self._runs / f"{name}.json") as path:
            path.write_text(json.dumps(record), encoding="utf-8")
            self._checkpoint(name).unlink(missing_ok=True)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Keep a checkpoint in the place of the one before."""
        with _disk_errors(self.folder), written_whole(self._checkpoint(name)) as path:
            torch.save(state, path)

    def load(self, name: str) -> dict[str, Any] | None:
        """The last checkpoint of a run, or ``None``."""
        path = self._checkpoint(name)
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:  # torch itself does not look at the check sums
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"{damaged} does not have its check sum")
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file makes of the reader
            raise self.damaged(name, str(error)) from error
        return state

    def damaged(self, name: str, why: str) -> StoreError:
        """The error to raise where a checkpoint cannot be gone on from."""
        return StoreError(f"the checkpoint {self._checkpoint(name)} is damaged ({why}); delete it to do its run anew")

    def write(self, name: str, content: str) -> Path:
        """Write a file for the user into the folder."""
        with _disk_errors(self.folder), written_whole(self.folder / name) as path:
            path.write_text(content, encoding="utf-8")
        return self.folder / name

    def begin(self, settings: dict[str, dict[str, Any]], *, resume: bool) -> None:
        """Start experiments, or with ``resume`` go on; refuses to mix settings and to discard anything.

        Args:
            settings: of each experiment; the names of its runs must begin with its own and a hyphen.
            resume: whether to go on with what is there.
        """
        with _disk_errors(self.folder):
            self._runs.mkdir(exist_ok=True)
        for experiment, wanted in settings.items():  # all are looked at before anything is changed
            self._check(experiment, wanted, resume=resume)
        if resume and not any(map(self._files, settings)):
            raise StoreError(f"there is nothing to resume in {self.folder}; without --resume it starts")
        for experiment, wanted in settings.items():
            with _disk_errors(self.folder):
                for file in self._runs.glob(f".{experiment}-*"):  # half-written, by a run that was killed
                    file.unlink()
                for file in self._runs.glob(f"{experiment}-*.pt"):
                    if file.with_suffix(".json").exists():  # finished, and killed before it could tidy up
                        file.unlink()
            self.finish(f"{experiment}-settings", wanted)

    def settings(self, experiment: str) -> dict[str, Any]:
        """What an experiment in the folder was begun with."""
        found: dict[str, Any] = self.record(f"{experiment}-settings") or {}
        return found

    def _check(self, experiment: str, wanted: dict[str, Any], *, resume: bool) -> None:
        there = self._files(experiment)
        if not there:
            return
        if not resume:
            raise StoreError(
                f"{self.folder} has results of {experiment} already: go on with --resume, or take another --out"
            )
        before = self.record(f"{experiment}-settings")
        if before is None:
            raise StoreError(f"{self.folder} has runs of {experiment} without their settings; take another --out")
        keys = {*before, *wanted} - {"command"}  # the same may be asked for in other words
        changed = sorted(key for key in keys if before.get(key) != wanted.get(key))
        if changed:
            was = ", ".join(f"{key} was {before.get(key)!r}, now {wanted.get(key)!r}" for key in changed)
            raise StoreError(f"{experiment} in {self.folder} was begun with other settings: {was}")

    def _files(self, experiment: str) -> list[Path]:
        return [file for ending in ("json", "pt") for file in self._runs.glob(f"{experiment}-*.{ending}")]

    def _checkpoint(self, name: str) -> Path:
        return self._runs / f"{name}.pt"


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The store in a folder, which is made if need be, found to be writable, and locked against a second run.

    >>> import tempfile
    >>> with opened(Path(tempfile.mkdtemp()) / "new") as store:
    ...     store.begin({"trial": {"seeds": 1}}, resume=False)
    ...     store.finish("trial-first", [1, 2])
    ...     store.record("trial-first"), store.record("trial-second")
    ([1, 2], None)
    """
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another run is at work in {folder}; wait for it, or take another --out") from error
        except OSError as error:
            raise StoreError(f"{folder} cannot be locked ({error.strerror}); take another --out") from error
        yield Store(folder)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """A full disk or a folder without permission, said in one line; what was there before stays."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from error
    except RuntimeError as error:  # torch.save reports a full disk like this
        raise StoreError(f"cannot write to {folder}: {error}") from error
