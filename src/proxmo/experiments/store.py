"""The folder of a reproduction: finished runs, checkpoints of unfinished ones, and a lock against a second process."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from proxmo.files import written_whole

FREE = {"command"}  # what may differ between settings of the same runs: different commands can ask for them


class StoreError(RuntimeError):
    """The folder cannot be used; the message says why and what to do."""


class Store:
    """The runs in a folder; created by `open_store`.

    Each run has a name. Under that name the store keeps a checkpoint while the run is unfinished, and then its record.

    Args:
        folder: the folder.
        before_writing: called before a checkpoint or a record is written; it raises if that must not be.
    """

    def __init__(self, folder: Path, before_writing: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self._before_writing = before_writing
        self._runs, self._claims = folder / "runs", folder / ".claims"

    def record(
        self, name: str, read: Callable[[Any], Any] = lambda data: data, remedy: str = "delete it to repeat the run"
    ) -> Any | None:
        """Return ``read`` of the record of a run, or ``None`` if the run is not finished.

        If it cannot be read, the error names ``remedy``.
        """
        path = self._runs / f"{name}.json"
        try:
            return read(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error!r}); {remedy}") from error

    def records(self, prefix: str, read: Callable[[Any], Any]) -> list[Any]:
        """Return ``read`` of the records of all finished runs whose names start with ``prefix``, sorted by name."""
        return [self.record(file.stem, read) for file in sorted(self._runs.glob(f"{prefix}*.json"))]

    def finished(self) -> set[str]:
        """Return the names of all finished runs.

        The folder is listed rather than searched for a name, since NFS then also shows the newest files of others.
        """
        return {file.stem for file in self._runs.glob("*.json")}

    def finish(self, name: str, record: Any) -> None:
        """Store the record of a finished run and delete its checkpoint."""
        self._before_writing()
        with disk_errors(self.folder):
            with written_whole(self._runs / f"{name}.json") as path:
                path.write_text(json.dumps(record), encoding="utf-8")
            self._checkpoint(name).unlink(missing_ok=True)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Replace the checkpoint of a run."""
        self._before_writing()
        with disk_errors(self.folder), written_whole(self._checkpoint(name)) as path:
            torch.save(state, path)

    def load(self, name: str) -> dict[str, Any] | None:
        """Return the last checkpoint of a run, or ``None``."""
        path = self._checkpoint(name)
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:  # torch does not verify the checksums
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"{damaged} has a wrong checksum")
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:  # a damaged file can raise anything
            raise self.damaged(name, str(error)) from error
        return state

    def damaged(self, name: str, why: str) -> StoreError:
        """Return the error to raise if a run cannot continue from its checkpoint."""
        return StoreError(f"the checkpoint {self._checkpoint(name)} is damaged ({why}); delete it to repeat the run")

    def write(self, name: str, content: str) -> Path:
        """Write a text file to the folder and return its path."""
        with disk_errors(self.folder), written_whole(self.folder / name) as path:
            path.write_text(content, encoding="utf-8")
        return self.folder / name

    def begin(self, settings: dict[str, dict[str, Any]], *, resume: bool) -> None:
        """Start or resume experiments; raise rather than mix settings or discard results.

        Args:
            settings: by the name of the experiment; the names of its runs must start with that name and a hyphen.
            resume: continue the runs in the folder.
        """
        with disk_errors(self.folder):
            self._runs.mkdir(exist_ok=True)
        for experiment, wanted in settings.items():  # check all before changing anything
            self._check(experiment, wanted, resume=resume)
        if resume and not any(map(self._files, settings)):
            raise StoreError(f"there is nothing to resume in {self.folder}; run without --resume to start")
        for experiment, wanted in settings.items():
            with disk_errors(self.folder):
                for file in self._runs.glob(f".{experiment}-*"):  # partial writes of a process that was killed
                    if not self.is_claimed(file.name[1:].rpartition("-")[0]):  # jobs of a cluster may go on
                        file.unlink(missing_ok=True)
                for file in self._runs.glob(f"{experiment}-*.pt"):
                    if file.with_suffix(".json").exists():  # killed between writing the record and deleting this
                        file.unlink(missing_ok=True)
            self.finish(f"{experiment}-settings", wanted)

    @contextmanager
    def claimed(self, name: str) -> Iterator[None]:
        """Wait until no other process has claimed a run, then claim it; a claim ends with its process."""
        with disk_errors(self.folder):
            self._claims.mkdir(exist_ok=True)
        with FileLock(self._claims / name):
            yield

    def is_claimed(self, name: str) -> bool:
        """Whether a process has claimed a run."""
        if not (self._claims / name).exists():
            return False
        try:
            with FileLock(self._claims / name, timeout=0):
                return False
        except Timeout:
            return True

    def settings(self, experiment: str, read: Callable[[dict[str, Any]], Any] = lambda data: data) -> Any | None:
        """Return ``read`` of the settings that an experiment was started with, or ``None``."""

        def read_object(data: Any) -> Any:
            if not isinstance(data, dict):
                raise TypeError("not an object")
            return read(data)

        remedy = "its runs cannot be used without the right settings: restore the file, or choose another folder"
        return self.record(f"{experiment}-settings", read_object, remedy)

    def fingerprint(self, experiment: str) -> str:
        """Return a short text that changes with the settings of an experiment."""
        settings = {key: value for key, value in (self.settings(experiment) or {}).items() if key not in FREE}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def has_results(self, experiment: str) -> bool:
        """Whether any run of an experiment is finished."""
        return any(file.suffix == ".json" and file.stem != f"{experiment}-settings" for file in self._files(experiment))

    def _check(self, experiment: str, wanted: dict[str, Any], *, resume: bool) -> None:
        if not self._files(experiment):
            return
        if not resume:
            raise StoreError(
                f"{self.folder} already has results of {experiment}: continue with --resume, or choose another --out"
            )
        before = self.settings(experiment)
        if before is None:
            raise StoreError(f"{self.folder} has runs of {experiment} but not their settings; choose another --out")
        keys = {*before, *wanted} - FREE
        changed = sorted(key for key in keys if before.get(key) != wanted.get(key))
        if changed:
            changes = ", ".join(f"{key} was {before.get(key)!r}, now {wanted.get(key)!r}" for key in changed)
            raise StoreError(f"{experiment} in {self.folder} was started with other settings: {changes}")

    def _files(self, experiment: str) -> list[Path]:
        return [file for suffix in ("json", "pt") for file in self._runs.glob(f"{experiment}-*.{suffix}")]

    def _checkpoint(self, name: str) -> Path:
        return self._runs / f"{name}.pt"


@contextmanager
def open_store(folder: Path) -> Iterator[Store]:
    """Yield the store of a folder: create the folder if needed, check that it is writable, and lock it.

    >>> import tempfile
    >>> with open_store(Path(tempfile.mkdtemp()) / "new") as store:
    ...     store.begin({"trial": {"seeds": 1}}, resume=False)
    ...     store.finish("trial-first", [1, 2])
    ...     store.record("trial-first"), store.record("trial-second")
    ([1, 2], None)
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreError(f"another run is using {folder}; wait for it, or choose another --out") from error
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"cannot lock {folder}: {error}; choose another --out") from error
    try:
        yield Store(folder)
    finally:
        lock.release()


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the file system, such as a full disk or missing permissions, into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from error
    except RuntimeError as error:  # how torch.save reports a full disk
        raise StoreError(f"cannot write to {folder}: {error}") from error
