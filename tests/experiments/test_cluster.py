"""Runs as jobs of a cluster: processes of this machine, and a real Slurm where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from experiments.cluster_jobs import JOBS, Failing, KilledOnce, has_slurm, submit
from experiments.few_images import few_images
from proxmo.experiments import cluster
from proxmo.experiments.pool import Job
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import Store, StoreError, open_store
from proxmo.experiments.training import run_name, train

TESTS = Path(__file__).parent.parent


slurm = pytest.mark.skipif(not has_slurm(), reason="no Slurm on this machine")


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs import the modules of the tests, and check more often than on a real cluster."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(cluster, "SECONDS_BETWEEN_CHECKS", 0.2)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The epochs of the jobs, trained one after another in this process."""
    folder = tmp_path_factory.mktemp("alone")
    with open_store(folder) as store:
        store.begin({"trial": {"seeds": 1}}, resume=False)
        for job in JOBS:
            make = partial(RegularizedTrainer, job.setting, few_images(), "cpu")
            train(make, "trial", job.setting, store, lambda _: None)
    return epochs(folder)


def epochs(folder: Path) -> dict[str, Any]:
    files = (folder / "runs").glob("trial-batch*.json")
    return {file.name: json.loads(file.read_text())["epochs"] for file in files}


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.usefixtures("no_slurm")
def test_failed_jobs_are_submitted_once_more_and_then_named(tmp_path: Path, expected: dict[str, Any]) -> None:
    """One job is killed in its second epoch and goes on from its checkpoint; another one always fails."""
    failing, killed = Job("trial", JOBS[0].setting, Failing), Job("trial", JOBS[1].setting, KilledOnce)
    with pytest.raises(StoreError, match=r"1 of 2 jobs failed 2 times: trial-batch32-.*seed0.* \(see (.*)\)") as error:
        submit(tmp_path, [failing, killed])
    log = Path(str(error.value).split("(see ")[1].split(")")[0])
    assert "on purpose" in log.read_text()
    name = f"{run_name('trial', killed.setting)}.json"
    assert epochs(tmp_path) == {name: expected[name]}


@pytest.mark.usefixtures("no_slurm")
def test_options_of_slurm_need_slurm() -> None:
    with pytest.raises(StoreError, match="there is no Slurm on this machine that could take partition"):
        cluster.check_place("cpu", {"partition": "main"})


@pytest.mark.usefixtures("no_slurm")
def test_accelerators_need_slurm() -> None:
    """The processes of submitit do not see this machine's accelerators."""
    with pytest.raises(StoreError, match="to train on cuda, leave it out"):
        cluster.check_place("cuda", {})


def test_options_that_jobs_need_cannot_be_changed() -> None:
    with pytest.raises(StoreError, match=r"must not set array, output$"):
        cluster.check_place("cpu", {"output": "log", "time": "5", "array": "1-3"})


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_damaged_list_of_jobs_is_named(tmp_path: Path, content: str) -> None:
    with open_store(tmp_path) as store:
        store.begin({"trial": {"seeds": 1}}, resume=False)
        jobs = tmp_path / cluster.FOLDER / f"jobs-{store.fingerprint('trial')}.json"
    jobs.parent.mkdir()
    jobs.write_text(content)
    with pytest.raises(StoreError, match=rf"{jobs.name} is damaged; delete it"):
        submit(tmp_path)


@pytest.mark.usefixtures("no_slurm")
def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / cluster.FOLDER).write_text("")
    with pytest.raises(StoreError, match=f"cannot write to {tmp_path / cluster.FOLDER}: File exists"):
        submit(tmp_path)


@pytest.mark.parametrize(
    ("squeue", "why"),
    [
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact"),
        ("sleep 60", "no answer within 0.5 s"),
    ],
)
def test_dead_controller_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, why: str
) -> None:
    for name in ("sbatch", "squeue", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{squeue}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(cluster, "SECONDS_TO_ANSWER", 0.5)
    with pytest.raises(StoreError, match=f"Slurm does not answer: {why}"):
        cluster.open_queue(Store(tmp_path), {})


def test_silent_queue_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(cluster.Processes):
        def alive(self) -> None:  # type: ignore[override]
            return None

    monkeypatch.setattr(cluster, "open_queue", lambda store, *_: Silent(store.folder / cluster.FOLDER))
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    with pytest.raises(StoreError, match=r"Slurm has not answered for .* minutes; its jobs go on"):
        submit(tmp_path)


@pytest.mark.parametrize(("wanted", "found", "word"), [(True, False, "with"), (False, True, "without")])
def test_machines_that_compute_otherwise_are_refused(
    wanted: bool, found: bool, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "has_fast_bfloat16", lambda device: found)
    task = cluster.Task(JOBS[0], few_images, "cpu", wanted, tmp_path, Store(tmp_path).fingerprint("trial"))
    with pytest.raises(StoreError, match=f"these runs need machines {word} bfloat16 in hardware"):
        task()


class _ChangesSettings(RegularizedTrainer):
    """While the first epoch runs, somebody starts anew in the same folder, with other settings."""

    folder: ClassVar[Path]
    epochs: ClassVar[int] = 0

    def train_epoch(self) -> float:
        type(self).epochs += 1
        loss = super().train_epoch()
        shutil.rmtree(self.folder / "runs")
        with open_store(self.folder) as store:
            store.begin({"trial": {"seeds": 2}}, resume=False)
        return loss


def test_jobs_do_not_write_results_of_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ChangesSettings, "folder", tmp_path, raising=False)
    with open_store(tmp_path) as store:
        store.begin({"trial": {"seeds": 1}}, resume=False)
        before = store.fingerprint("trial")
    task = cluster.Task(Job("trial", JOBS[0].setting, _ChangesSettings), few_images, "cpu", False, tmp_path, before)
    for _ in range(2):  # while it runs, and when it starts
        with pytest.raises(StoreError, match="has other settings now than when this job was submitted"):
            task()
    assert _ChangesSettings.epochs == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["trial-settings.json"]


@pytest.mark.parametrize("write", ["finish", "save"])
def test_stores_ask_before_they_write(write: str, tmp_path: Path) -> None:
    def refuse() -> None:
        raise StoreError("not now")

    with open_store(tmp_path) as store:
        store.begin({"trial": {}}, resume=False)
    with pytest.raises(StoreError, match="not now"):
        getattr(Store(tmp_path, before_writing=refuse), write)("trial-a", {})
    assert not list((tmp_path / "runs").glob("trial-a*"))


class _LosesAJob(cluster.Processes):
    """Takes two jobs and keeps the first alive; the other ends without a record, and no more are taken."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.room, self.left = 9, set[str]()

    def submit(self, tasks: Sequence[cluster.Task]) -> list[str]:
        if self.left:
            raise StoreError("no more jobs")
        self.left = {"1"}
        return ["1", "2"]

    def alive(self) -> set[str]:
        return self.left


def test_refusal_says_that_other_jobs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "open_queue", lambda store, _: _LosesAJob(store.folder / cluster.FOLDER))
    with pytest.raises(StoreError, match="no more jobs; the other jobs go on: continue with --resume"):
        submit(tmp_path)


def test_claims_keep_processes_apart(tmp_path: Path) -> None:
    """A run that another process is training is neither trained twice, nor are its partial files deleted."""
    with open_store(tmp_path) as store:
        store.begin({"trial": {"seeds": 1}}, resume=False)
        store.save("trial-a", {})
        with store.claimed("trial-a"):
            assert store.is_claimed("trial-a")
            for name in (".trial-a-x1y2.pt", ".trial-b-x1y2.pt"):
                (tmp_path / "runs" / name).write_bytes(b"half")
            store.begin({"trial": {"seeds": 1}}, resume=True)
            assert (tmp_path / "runs" / ".trial-a-x1y2.pt").exists()
            assert not (tmp_path / "runs" / ".trial-b-x1y2.pt").exists()
        assert not store.is_claimed("trial-a")
        assert not store.is_claimed("trial-never")


def processes_of_jobs(folder: Path) -> list[int]:
    """Return the processes that Slurm runs for jobs of a folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "submitit.core._submit" in words and str(folder / cluster.FOLDER) in words and "srun" not in words[0]:
            found.append(int(process.name))
    return found


@slurm
def test_slurm_jobs_that_are_killed_go_on(tmp_path: Path, expected: dict[str, Any]) -> None:
    """kill -9 of a running job, then of the submitting process; the next one adopts the jobs."""
    command = [sys.executable, str(TESTS / "experiments" / "cluster_jobs.py"), str(tmp_path)]
    submitting = subprocess.Popen(command)
    wait_for(lambda: list((tmp_path / "runs").glob("*.pt")))
    os.kill(wait_for(lambda: processes_of_jobs(tmp_path))[0], signal.SIGKILL)
    [jobs] = (tmp_path / cluster.FOLDER).glob("jobs-*.json")
    before = json.loads(jobs.read_text())
    wait_for(lambda: json.loads(jobs.read_text()) != before)  # the killed one was submitted again
    submitting.kill()
    submitting.wait()
    assert subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.strip()
    before = json.loads(jobs.read_text())
    submit(tmp_path)
    assert json.loads(jobs.read_text()) == before  # nothing was submitted twice
    assert epochs(tmp_path) == expected


@slurm
def test_options_that_slurm_does_not_take_are_named(tmp_path: Path) -> None:
    for options in ({"colour": "red"}, {"partition": "none", "time": "5"}):
        queue = cluster.open_queue(Store(tmp_path), options)
        with pytest.raises(StoreError, match=rf"Slurm refused the jobs: .*{next(iter(options))}"):
            queue.submit([cluster.Task(JOBS[0], few_images, "cpu", False, tmp_path, "")])


@slurm
def test_options_reach_slurm_as_they_are_written(tmp_path: Path) -> None:
    options = {"comment": "007", "job_name": "a,b", "hold": "true", "time": "0:05:00"}
    queue = cluster.open_queue(Store(tmp_path), options)
    [job] = queue.submit([cluster.Task(JOBS[0], few_images, "cpu", False, tmp_path, "")])
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", job], check=True)
    assert all(text in shown for text in ("Comment=007", "JobName=a,b", "JobHeldUser", "TimeLimit=00:05:00"))


@slurm
def test_interrupting_the_command_says_how_to_end_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "SUSPENDED")  # hides the jobs from squeue
    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(StoreError, match=r"interrupted, but its jobs go on: .* end them: scancel \d+$") as error:
        submit(tmp_path)
    array = str(error.value).split()[-1]
    queue = cluster.open_queue(Store(tmp_path), {})
    jobs = {f"{array}_{i}" for i in range(len(JOBS))}
    assert (queue.alive() or set()) >= jobs
    subprocess.run(["scancel", array], check=True)
    wait_for(lambda: not (queue.alive() or set()) & jobs)


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


@slurm
def test_jobs_run_until_their_time_is_over(tmp_path: Path) -> None:
    """submitit would end a job of one minute at once, 90 seconds before its limit."""
    with open_store(tmp_path) as store:
        store.begin({"trial": {"seeds": 1}}, resume=False)
        queue = cluster.open_queue(store, {"time": "1"})
        [job] = queue.submit([cluster.Task(JOBS[0], few_images, "cpu", False, tmp_path, store.fingerprint("trial"))])
        name = run_name("trial", JOBS[0].setting)
        scripts = [path.read_text() for path in queue.folder.glob("*.sh")]
        assert scripts
        assert all("--signal=CONT@1\n" in script for script in scripts)
        wait_for(lambda: name in store.finished() or ((alive := queue.alive()) is not None and job not in alive))
        assert name in store.finished()
