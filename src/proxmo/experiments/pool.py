"""Parallel training runs: one process per core with one thread each, the fastest way to train small networks.

With one thread, the result of a run does not depend on what else is running.
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
from proxmo.experiments.training import Setting, Trainer, run_name, train


@dataclass(frozen=True)
class Job:
    """A run to train; picklable."""

    experiment: str
    setting: Setting
    trainer: Callable[[Setting, Images, str], Trainer]


def run_jobs(
    jobs: list[Job], load: Callable[[], Images], device: str, store: Store, advance: Callable[[int], None]
) -> None:
    """Run all jobs that are not finished.

    Args:
        jobs: what to run.
        load: loads the images; called in each process.
        device: ``"cpu"`` to run in parallel, or an accelerator to run one job after another.
        store: holds records and checkpoints.
        advance: called with the number of epochs done since the last call.
    """
    if all(store.record(run_name(job.experiment, job.setting)) is not None for job in jobs):
        advance(sum(job.setting.epochs for job in jobs))
        return
    if device != "cpu":
        images = load()
        for job in jobs:
            _train(job, images, device, store, advance)
        return
    context = get_context("spawn")  # forking is unsafe once torch has started threads
    progress: Queue[int] = context.Queue()
    existing = set(active_children())
    try:
        with (
            _listening(progress, advance),
            ProcessPoolExecutor(
                min(available_cores(), len(jobs)), context, _initialize, (load, store.folder, progress)
            ) as workers,
        ):
            futures = [workers.submit(_work, job) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # do not wait for the other runs
                workers.shutdown(wait=False, cancel_futures=True)
                for process in set(active_children()) - existing:
                    process.kill()
                raise
    except BrokenProcessPool as error:
        raise StoreError("a worker process was killed, perhaps out of memory; continue with --resume") from error


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _train(job: Job, images: Images, device: str, store: Store, advance: Callable[[int], None]) -> None:
    def make() -> Trainer:
        return job.trainer(job.setting, images, device)

    train(make, job.experiment, job.setting, store, advance)


@contextmanager
def _listening(progress: Queue[int], advance: Callable[[int], None]) -> Iterator[None]:
    """Call ``advance`` with what workers put into the queue."""
    done = threading.Event()

    def listen() -> None:
        while True:
            try:
                advance(progress.get(timeout=0.1))
            except Empty:
                if done.is_set():
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# The rest runs in a worker.

_images: Images
_store: Store
_advance: Callable[[int], None]


def _initialize(load: Callable[[], Images], folder: Path, progress: Queue[int]) -> None:
    global _images, _store, _advance
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _images, _store, _advance = load(), Store(folder), progress.put


def _exit_with_parent() -> None:
    """Exit when the main process dies: its lock is gone, so another process may write to the folder."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(job: Job) -> None:
    _train(job, _images, "cpu", _store, _advance)
