"""The folder of an experiment: what was finished, what can be gone on with, and nobody else at work in it."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator
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

    def record(self, name: str) -> Any | None:
        """What was recorded of a finished run, or ``None``."""
        return _read_json(self._runs / f"{name}.json")

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
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file makes of the reader
            raise StoreError(f"the checkpoint {path} is damaged ({error}); delete it to start that run anew") from error
        return state

    def write(self, name: str, content: str) -> Path:
        """Write a file for the user into the folder."""
        with _disk_errors(self.folder), written_whole(self.folder / name) as path:
            path.write_text(content, encoding="utf-8")
        return self.folder / name

    def begin(self, experiment: str, settings: dict[str, Any], *, resume: bool) -> None:
        """Start an experiment, or with ``resume`` go on; refuses to mix settings, and to discard what is not finished.

        The names of its runs must begin with that of the experiment and a hyphen.
        """
        with _disk_errors(self.folder):
            self._runs.mkdir(exist_ok=True)
        path = self._runs / f"{experiment}-settings.json"
        before = _read_json(path)
        if resume:
            if before is not None and before != settings:
                changed = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
                was = ", ".join(f"{key} was {before.get(key)!r}, now {settings.get(key)!r}" for key in changed)
                raise StoreError(f"{experiment} in {self.folder} was begun with other settings: {was}")
        else:
            unfinished = sorted(file.stem for file in self._runs.glob(f"{experiment}-*.pt"))
            if unfinished:
                raise StoreError(
                    f"{self.folder} has an unfinished run, {unfinished[0]}: go on with --resume, or take another --out"
                )
            for file in self._runs.glob(f"{experiment}-*.json"):
                file.unlink()
        with _disk_errors(self.folder), written_whole(path) as temporary:
            temporary.write_text(json.dumps(settings), encoding="utf-8")

    def _checkpoint(self, name: str) -> Path:
        return self._runs / f"{name}.pt"


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The store in a folder, which is made if need be, found to be writable, and locked against a second run.

    >>> import tempfile
    >>> with opened(Path(tempfile.mkdtemp()) / "new") as store:
    ...     store.begin("trial", {"seeds": 1}, resume=False)
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


def _read_json(path: Path) -> Any | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); delete it to do its run anew") from error
