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
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

import torch

from proxmo.experiments.images import Images
from proxmo.experiments.store import Store, StoreError
from proxmo.experiments.training import Record, Setting, Trainer, run_name, train


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
    if all(store.record(run_name(job.experiment, job.setting)) is not None for job in jobs):
        return [_train(job, None, device, store, advance) for job in jobs]
    if device != "cpu":
        images = load()
        return [_train(job, images, device, store, advance) for job in jobs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = get_context("spawn")  # a fork would copy torch's threads in an unknown state
    progress: Queue[int] = context.Queue()
    others = set(active_children())
    try:
        with (
            _listening(progress, advance),
            ProcessPoolExecutor(min(cores, len(jobs)), context, _begin, (load, store.folder, progress)) as workers,
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


def _train(job: Job, images: Images | None, device: str, store: Store, advance: Callable[[int], None]) -> Record:
    def make() -> Trainer:
        assert images is not None  # only finished runs do without
        return job.trainer(job.setting, images, device)

    return train(make, job.experiment, job.setting, store, advance)


@contextmanager
def _listening(progress: Queue[int], advance: Callable[[int], None]) -> Iterator[None]:
    """Pass on what workers put into the queue."""
    over = threading.Event()

    def listen() -> None:
        while True:
            try:
                advance(progress.get(timeout=0.1))
            except Empty:
                if over.is_set():
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# What follows runs in a worker.

_images: Images
_store: Store
_advance: Callable[[int], None]


def _begin(load: Callable[[], Images], folder: Path, progress: Queue[int]) -> None:
    global _images, _store, _advance
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _images, _store, _advance = load(), Store(folder), progress.put


def _end_with_parent() -> None:
    """A worker must not go on, and write, when the main process was killed: another may be at work then."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(job: Job) -> Record:
    return _train(job, _images, "cpu", _store, _advance)
