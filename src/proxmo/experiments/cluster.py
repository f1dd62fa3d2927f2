"""Training runs as jobs of a cluster: submitit hands them to Slurm, or to processes of this machine without one.

Jobs write to the store, a folder that all machines share, as local runs do. The process that submits them only waits
for their records, so it can be killed at any time: jobs go on, and a new process adopts those still in the queue. A job
that finds other settings in the folder ends instead of writing to it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proxmo.experiments.experiment import Resources
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, available_cores
from proxmo.experiments.store import Store, StoreError, disk_errors
from proxmo.experiments.training import Trainer, has_fast_bfloat16, run_name, train

ATTEMPTS = 2
SECONDS_BETWEEN_CHECKS = 10.0  # more often would load a scheduler that many people use
PATIENCE = 600.0  # seconds without an answer from the queue while jobs are in it
SECONDS_TO_ANSWER = 60.0
MINUTES = 24 * 60  # the time limit of a job if none is given
HARMLESS_SIGNAL = "CONT@1"  # in place of the one with which submitit ends a job 90 seconds before its time is over
FOLDER = "cluster"
# Options that submitit sets itself, or that would hide the jobs from this process or the folder from the jobs.
OURS = {
    *("array", "chdir", "cluster", "clusters", "error", "open_mode", "output", "parsable", "signal", "test_only"),
    *("wait", "wrap"),
}


@dataclass(frozen=True)
class Task:
    """What a job does: one training run, on the machine that Slurm chooses."""

    job: Job
    load: Callable[[], Images]
    device: str
    bfloat16: bool
    """Whether all machines must compute in bfloat16, or none: a report must not mix the two."""
    folder: Path
    fingerprint: str
    """Of the settings when it was submitted: a job may start long after the folder got others."""

    def __call__(self) -> None:
        self._check_settings()
        if self.device == "cpu":
            torch.set_num_threads(1)  # as in the local pool, so that the results are the same
        if has_fast_bfloat16(self.device) != self.bfloat16:
            wanted = "with" if self.bfloat16 else "without"
            raise StoreError(f"these runs need machines {wanted} bfloat16 in hardware, {platform.node()} differs")

        def make() -> Trainer:
            return self.job.trainer(self.job.setting, self.load(), self.device)

        store = Store(self.folder, before_writing=self._check_settings)
        train(make, self.job.experiment, self.job.setting, store, lambda _: None)

    def _check_settings(self) -> None:
        if Store(self.folder).fingerprint(self.job.experiment) != self.fingerprint:
            raise StoreError(f"{self.folder} has other settings now than when this job was submitted")


class Queue(ABC):
    """Where jobs wait and run."""

    room: float
    """How many jobs may be in the queue at once."""
    cancel: str | None
    """The command that ends jobs, if they go on without this process."""

    def __init__(self, folder: Path) -> None:
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        self.folder = folder

    @abstractmethod
    def submit(self, tasks: Sequence[Task]) -> list[str]:
        """Submit tasks, as one array where there are arrays, and return the ids of their jobs."""

    @abstractmethod
    def alive(self) -> set[str] | None:
        """Return the ids of all jobs that wait or run; ``None`` if that is not known now."""

    def join(self) -> None:  # noqa: B027  Slurm's jobs need nobody to wait for them
        """Wait for processes that have written their records but not ended yet."""

    def log(self, job: str) -> Path:
        """Return the file with the output of a job."""
        return self.folder / f"{job}_0_log.out"


class Slurm(Queue):
    """Slurm's queue. It is asked through squeue, which needs no accounting database."""

    room = float("inf")
    cancel = "scancel"

    def __init__(self, folder: Path, resources: Resources) -> None:
        from submitit import SlurmExecutor

        super().__init__(folder)
        self._executor = SlurmExecutor(folder)
        defaults = {"job_name": "proxmo", "time": str(MINUTES), "cpus_per_task": "1", "signal": HARMLESS_SIGNAL}
        flags = {name: True for name, value in resources.items() if value == "true"}
        options = {**defaults, **resources, **flags}
        self._executor.update_parameters(additional_parameters=options, stderr_to_stdout=True)
        if (answer := self._ask()).returncode != 0:
            raise StoreError(f"Slurm does not answer: {answer.stderr.strip()}")

    def submit(self, tasks: Sequence[Task]) -> list[str]:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            return [job.job_id for job in self._executor.map_array(Task.__call__, tasks)]
        except (FailedJobError, FailedSubmissionError) as error:
            raise StoreError(f"Slurm refused the jobs: {error}") from error

    def alive(self) -> set[str] | None:
        answer = self._ask()
        return set(answer.stdout.split()) if answer.returncode == 0 else None

    @staticmethod
    def _ask() -> subprocess.CompletedProcess[str]:
        command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}  # filters
        try:
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_TO_ANSWER
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"no answer within {SECONDS_TO_ANSWER:g} seconds")


class Processes(Queue):
    """Processes of this machine, one per core."""

    cancel = None  # they have the terminal of this process, so Ctrl-C ends them

    def __init__(self, folder: Path) -> None:
        from submitit import LocalExecutor

        super().__init__(folder)
        self.room = available_cores()
        self._executor = LocalExecutor(folder)
        self._executor.update_parameters(timeout_min=60 * MINUTES, stderr_to_stdout=True)
        self._jobs: dict[str, Any] = {}

    def submit(self, tasks: Sequence[Task]) -> list[str]:
        jobs = [self._executor.submit(task) for task in tasks]
        self._jobs |= {job.job_id: job for job in jobs}
        return [job.job_id for job in jobs]

    def alive(self) -> set[str]:
        return {name for name, job in self._jobs.items() if not job.done()}

    def join(self) -> None:
        while self.alive():
            time.sleep(0.05)


def has_slurm() -> bool:
    """Whether this machine can submit jobs to Slurm."""
    return all(shutil.which(program) is not None for program in ("sbatch", "squeue", "srun"))


def check_place(device: str, resources: Resources) -> None:
    """Raise `StoreError` if jobs with these resources cannot train on the device."""
    if taken := sorted(OURS & set(resources)):
        raise StoreError(f"--cluster-options must not set {', '.join(taken)}")
    if has_slurm():
        return
    if resources:
        raise StoreError(f"there is no Slurm on this machine that could take {', '.join(resources)}")
    if device != "cpu":
        raise StoreError(f"without Slurm, --cluster trains on the cpu only; to train on {device}, leave it out")


def open_queue(store: Store, resources: Resources) -> Queue:
    """Return Slurm's queue, or processes of this machine if it has no Slurm."""
    folder = store.folder / FOLDER
    return Slurm(folder, resources) if has_slurm() else Processes(folder)


def run_on_cluster(
    jobs: list[Job],
    load: Callable[[], Images],
    device: str,
    store: Store,
    advance: Callable[[int], None],
    *,
    resources: Resources,
    bfloat16: bool,
) -> None:
    """Submit all jobs that are not finished, and wait until all have records.

    A job that ends without a record is submitted once more, from its last checkpoint; if that fails as well, the others
    go on, and then an error names it.

    Args:
        jobs, load, device, store, advance: as for `run_jobs`; ``load`` and the device are used where a job runs.
        resources: options of the Slurm jobs.
        bfloat16: see `Task`.
    """
    fingerprint = store.fingerprint(jobs[0].experiment)
    tasks = {
        run_name(job.experiment, job.setting): Task(job, load, device, bfloat16, store.folder, fingerprint)
        for job in jobs
    }
    runs = _Runs(tasks, store, advance)
    runs.collect()
    if runs.waiting:  # otherwise no queue is needed
        runs.wait(open_queue(store, resources))


class _Runs:
    """Runs that wait for their records, and the jobs that make them."""

    def __init__(self, tasks: dict[str, Task], store: Store, advance: Callable[[int], None]) -> None:
        self.waiting = dict(tasks)
        self._store, self._advance, self._count = store, advance, len(tasks)
        self._path = store.folder / FOLDER / f"jobs-{next(iter(tasks.values())).fingerprint}.json"
        self._attempts, self._failed = Counter[str](), list[str]()

    def collect(self) -> None:
        """Stop waiting for runs that have records."""
        finished = self._store.finished()
        for name in [name for name in self.waiting if name in finished]:
            self._advance(self.waiting.pop(name).job.setting.epochs)

    def wait(self, queue: Queue) -> None:
        """Submit what is not in the queue, and wait until all runs have records, or have failed."""
        submitted = _read(self._path)
        answered = time.monotonic()
        try:
            while self.waiting:
                alive = queue.alive()  # before records are looked for, since a job can end in between
                self.collect()
                if alive is not None:
                    answered = time.monotonic()
                    self._submit_lost(queue, submitted, alive)
                elif time.monotonic() - answered > PATIENCE:
                    raise StoreError(
                        f"Slurm has not answered for {PATIENCE / 60:g} minutes; its jobs go on: continue with --resume"
                    )
                if self.waiting:
                    time.sleep(SECONDS_BETWEEN_CHECKS)
        except KeyboardInterrupt:
            arrays = dict.fromkeys(submitted[name].partition("_")[0] for name in self.waiting if name in submitted)
            if queue.cancel is None or not arrays:
                raise
            end = f"{queue.cancel} {' '.join(arrays)}"
            raise StoreError(f"interrupted, but its jobs go on: continue with --resume, or end them: {end}") from None
        queue.join()
        if self._failed:
            logs = "; ".join(f"{name} (see {queue.log(submitted[name])})" for name in self._failed)
            raise StoreError(
                f"{len(self._failed)} of {self._count} jobs failed {ATTEMPTS} times: {logs}; continue with --resume"
            )

    def _submit_lost(self, queue: Queue, submitted: dict[str, str], alive: set[str]) -> None:
        """Submit runs that no job is working on; give up those that have failed too often."""
        lost = [name for name in self.waiting if submitted.get(name) not in alive and not self._store.is_claimed(name)]
        given_up = [name for name in lost if self._attempts[name] == ATTEMPTS]
        self._failed += given_up
        for name in given_up:
            del self.waiting[name]
        again = [name for name in lost if name in self.waiting][: int(min(queue.room - len(alive), len(lost)))]
        if again:
            try:
                jobs = queue.submit([self.waiting[name] for name in again])
            except StoreError as error:
                if alive.isdisjoint(submitted.values()):
                    raise
                raise StoreError(f"{error}; the other jobs go on: continue with --resume") from error
            submitted.update(zip(again, jobs, strict=True))
            self._attempts.update(again)
            self._store.write(f"{FOLDER}/{self._path.name}", json.dumps(submitted))


def _read(path: Path) -> dict[str, str]:
    """Return the id of the last job of each run, as an earlier process wrote them down."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: str(job) for name, job in found.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged; delete it when no jobs of this folder are left in the queue") from error
