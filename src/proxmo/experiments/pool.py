"""Many training runs at once: one process per core, each on one thread, which small networks use best.

A run on one thread has the same result wherever and whenever it is made, however many go on beside it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from proxmo.experiments.images import Images
from proxmo.experiments.store import Store, StoreError
from proxmo.experiments.threads import one_thread
from proxmo.experiments.training import Record, Setting, Trainer, train


@dataclass(frozen=True)
class Job:
    """A run to make: everything in it can be sent to another process."""

    experiment: str
    setting: Setting
    trainer: Callable[[Setting, Images, str], Trainer]


def run_jobs(
    jobs: list[Job], load: Callable[[], Images], device: str, store: Store, advance: Callable[[int], None]
) -> list[Record]:
    """The records of all jobs, in their order: found, gone on with, or made.

    Args:
        jobs: what to run.
        load: loads the images, in each process.
        device: ``"cpu"``, where the runs share the cores; or an accelerator, where they follow one another.
        store: where records and checkpoints are.
        advance: told how many epochs are done since the last call.
    """
    if device != "cpu":
        images = load()
        return [_train(job, images, device, store, advance) for job in jobs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = get_context("spawn")  # a fork would copy torch's threads in an unknown state
    progress = context.SimpleQueue()
    arguments = (load, store.folder, progress, os.getpid())
    others = set(active_children())
    try:
        with (
            _listening(progress, advance),
            ProcessPoolExecutor(min(cores, len(jobs)), context, _begin, arguments) as workers,
        ):
            futures = [workers.submit(_work, job) for job in jobs]
            try:
                return [future.result() for future in futures]
            except BaseException:  # the others need not go on to their ends
                workers.shutdown(wait=False, cancel_futures=True)
                for process in set(active_children()) - others:
                    process.kill()
                raise
    except BrokenProcessPool as error:
        raise StoreError("a worker process was killed, perhaps for lack of memory; --resume goes on") from error


def _train(job: Job, images: Images, device: str, store: Store, advance: Callable[[int], None]) -> Record:
    return train(lambda: job.trainer(job.setting, images, device), job.experiment, job.setting, store, advance)


@contextmanager
def _listening(progress: Any, advance: Callable[[int], None]) -> Iterator[None]:
    """Pass on what workers put into the queue, until ``None`` comes."""

    def listen() -> None:
        while (count := progress.get()) is not None:
            advance(count)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        progress.put(None)
        thread.join()


# What follows runs in a worker.

_images: Images
_store: Store
_advance: Callable[[int], None]


class _OrphanStore(Store):
    """A store that ends its process rather than write when the main process has died: another may be at work then."""

    def __init__(self, folder: Path, parent: int) -> None:
        super().__init__(folder)
        self._parent = parent

    def save(self, name: str, state: dict[str, Any]) -> None:
        self._check()
        super().save(name, state)

    def finish(self, name: str, record: Any) -> None:
        self._check()
        super().finish(name, record)

    def _check(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)


def _begin(load: Callable[[], Images], folder: Path, progress: Any, parent: int) -> None:
    global _images, _store, _advance
    torch.set_num_threads(1)
    _images, _store, _advance = load(), _OrphanStore(folder, parent), progress.put


@one_thread()
def _work(job: Job) -> Record:
    return _train(job, _images, "cpu", _store, _advance)
