"""Stores, training runs and the pool: interrupted at any time, they resume to the same result and lose nothing."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.few_images import few_images, loader
from proxmo.experiments import pool
from proxmo.experiments.images import Images
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.proxy import ProxyTrainer
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import Store, StoreError, open_store
from proxmo.experiments.training import Record, Setting, Trainer, run_name, train

SETTING = Setting(lr=0.1, momentum=0.9, batch=32, epochs=3, width=8, seed=0)
LONGER = [replace(SETTING, epochs=4, seed=seed) for seed in range(2)]
small_proxy = partial(ProxyTrainer, proxy_images=32, proxy_batch=16)


def start_store(folder: Path) -> Store:
    with open_store(folder) as store:
        store.begin({"trial": {"seeds": 1}}, resume=(folder / "runs").exists())
    return store


class Stopped(Exception):
    """Raised to interrupt a run between two epochs."""


@pytest.mark.parametrize("make", [RegularizedTrainer, small_proxy], ids=["regularized", "proxy"])
def test_interrupted_run_resumes_to_the_same_result(make: Any, tmp_path: Path) -> None:
    images, setting = few_images(), replace(SETTING, batch=48)
    uninterrupted = train(
        lambda: make(setting, images, "cpu"), "trial", setting, start_store(tmp_path / "a"), lambda _: None
    )
    store = start_store(tmp_path / "b")

    def stop(_: int) -> None:
        raise Stopped

    for _ in range(2):  # each attempt gets one epoch further
        with pytest.raises(Stopped):
            train(lambda: make(setting, images, "cpu"), "trial", setting, store, stop)
    resumed = train(lambda: make(setting, images, "cpu"), "trial", setting, store, lambda _: None)
    assert resumed.epochs == uninterrupted.epochs  # bitwise
    assert len(resumed.epochs) == 3
    assert not list((tmp_path / "b" / "runs").glob("*.pt"))

    def never() -> Trainer:
        raise AssertionError("a finished run is not repeated")

    assert train(never, "trial", setting, store, lambda _: None) == resumed


def test_regularized_training_learns_and_measures_sparsity() -> None:
    trainer = RegularizedTrainer(replace(SETTING, momentum=0.0, epochs=8), few_images(), "cpu")
    losses = [trainer.train_epoch() for _ in range(8)]
    assert losses[-1] < losses[0]
    loss, accuracy = trainer.test()
    assert 0 < loss < 3
    assert 0.1 < accuracy <= 1
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([1e-3, 1e-3])  # after the milestones at 4 and 7 of 8 epochs
    measured = trainer.measures()
    weights = [p for p in trainer.network.parameters() if p.dim() > 1]
    assert measured["penalty"] == pytest.approx(
        sum(0.1 * float(w.detach().abs().flatten(1).amax(1).sum()) for w in weights)
    )
    with torch.no_grad():
        weights[0][:2] = 0
    channels = sum(len(w) for w in weights)
    assert trainer.measures()["zero_channels"] == pytest.approx(2 / channels)


def test_annealed_run_lowers_lr_and_one_minus_momentum_together() -> None:
    """By steps, not by epochs; the rates continue from a checkpoint."""
    setting, images = replace(SETTING, epochs=2, annealed=True), few_images()
    trainer = RegularizedTrainer(setting, images, "cpu")
    trainer.train_epoch()
    resumed = RegularizedTrainer(setting, images, "cpu")
    resumed.set_state(copy.deepcopy(trainer.state()))
    assert resumed.train_epoch() == trainer.train_epoch()
    group = resumed.optimizer.param_groups[0]
    assert 0 < group["lr"] < 0.1 * SETTING.lr  # the last of 2·3 steps
    assert (1 - group["momentum"]) / group["lr"] == pytest.approx((1 - SETTING.momentum) / SETTING.lr)


def test_proxy_training_uses_both_losses() -> None:
    trainer = small_proxy(replace(SETTING, lr=0.1), few_images(), "cpu")
    assert len(trainer.proxy_batches) == 2
    first = trainer.train_epoch()
    assert trainer.optimizer.param_groups[0]["psi_evaluations"] == 3 * 21
    assert trainer.train_epoch() < first


def test_networks_that_torch_cannot_train_are_rejected() -> None:
    with pytest.raises(ValueError, match="width must be an integer >= 8, got 4"):
        RegularizedTrainer(replace(SETTING, width=4), few_images(), "cpu")


class Diverging(RegularizedTrainer):
    """Diverges in the second epoch."""

    def train_epoch(self) -> float:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and self.setting.seed == 0:
            raise FloatingPointError
        return math.inf if self.count == 2 else 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_diverged_run_is_recorded_as_such(seed: int, tmp_path: Path) -> None:
    setting, done = replace(SETTING, seed=seed), []
    store = start_store(tmp_path)
    record = train(lambda: Diverging(setting, few_images(), "cpu"), "trial", setting, store, done.append)
    assert record.diverged
    assert len(record.epochs) == 1
    assert sum(done) == 3
    assert Record.from_json(store.record(run_name("trial", setting))) == record


def test_proxy_of_more_than_half_of_the_images_is_rejected() -> None:
    with pytest.raises(ValueError, match="proxy_images must be at most half of the 96 images, got 64"):
        ProxyTrainer(SETTING, few_images(), "cpu", proxy_images=64, proxy_batch=16)


def test_run_names_are_unique_for_each_setting() -> None:
    settings = [
        SETTING,
        *(replace(SETTING, **{name: 7}) for name in ("lr", "momentum", "batch", "epochs", "width", "seed")),
    ]
    assert len({run_name("trial", setting) for setting in settings}) == 7


@pytest.mark.parametrize("device", ["cpu", "meta-like"])
def test_jobs_leave_the_records_of_plain_runs(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in parallel processes, or one after another as on an accelerator, have the same results."""
    jobs = [Job("trial", replace(SETTING, epochs=1, seed=seed), RegularizedTrainer) for seed in range(3)]
    done: list[int] = []
    if device != "cpu":
        monkeypatch.setattr(pool, "_train", partial(_train_on_cpu, pool._train))
    store = start_store(tmp_path)
    load = loader(few_images())
    run_jobs(jobs, load, device, store, done.append)
    assert sum(done) == 3
    run_jobs(jobs, load, device, store, done.append)
    assert sum(done) == 6  # all were there
    expected = train(
        lambda: RegularizedTrainer(jobs[1].setting, few_images(), "cpu"),
        "trial",
        jobs[1].setting,
        start_store(tmp_path / "alone"),
        lambda _: None,
    )
    records = store.records("trial-batch", Record.from_json)
    assert [record.setting.seed for record in records] == [0, 1, 2]
    assert records[1].epochs == expected.epochs


def _train_on_cpu(original: Any, job: Job, images: Images, _: str, store: Store, advance: Any) -> None:
    original(job, images, "cpu", store, advance)


class Killed(RegularizedTrainer):
    """Kills its own process in the first epoch, as the system does when memory runs out."""

    def train_epoch(self) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


class Failing(RegularizedTrainer):
    def train_epoch(self) -> float:
        raise StoreError("on purpose")


def test_failures_in_a_worker_are_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a worker process was killed, perhaps out of memory; continue with --resume"):
        run_jobs([Job("trial", SETTING, Killed)], loader(few_images()), "cpu", start_store(tmp_path), lambda _: None)
    with pytest.raises(StoreError, match="on purpose"):
        run_jobs([Job("trial", SETTING, Failing)], loader(few_images()), "cpu", start_store(tmp_path), lambda _: None)


PROGRAM = """
import os, sys
from pathlib import Path
from proxmo.experiments.pool import Job, run_jobs
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import open_store
from proxmo.experiments.training import Setting
sys.path.insert(0, {tests!r})
from experiments.few_images import few_images

if __name__ == "__main__":
    os.sched_getaffinity = lambda _: {{0}}  # one worker for both jobs: each takes seconds to start
    with open_store(Path(sys.argv[1])) as store:
        store.begin({{"trial": {{"seeds": 1}}}}, resume=(store.folder / "runs").exists())
        jobs = [Job("trial", setting, RegularizedTrainer) for setting in {settings}]
        run_jobs(jobs, few_images, "cpu", store, lambda _: print("epoch", flush=True))
"""


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_killed_at_random_times_resume_to_the_same_records(kills: int, tmp_path: Path) -> None:
    """SIGKILL the main process at any point of its workers; after resuming, the records equal uninterrupted ones."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent.parent), settings=LONGER))

    def start(folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(program), str(tmp_path / folder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    generator = random.Random(0)
    for _ in range(kills):
        running = start("killed")
        assert running.stdout is not None
        running.stdout.readline()  # an epoch is done, so there is a checkpoint
        time.sleep(generator.uniform(0, 0.5))
        workers = _children(running.pid)
        assert workers
        running.kill()
        running.communicate()
        deadline = time.monotonic() + 20
        while any(map(_is_alive, workers)):  # workers exit when the main process dies
            assert time.monotonic() < deadline
            time.sleep(0.05)
    last = start("killed")
    last.communicate()
    assert last.returncode == 0
    alone = start_store(tmp_path / "uninterrupted")
    for setting in LONGER:
        train(partial(RegularizedTrainer, setting, few_images(), "cpu"), "trial", setting, alone, lambda _: None)

    def epochs(folder: str) -> dict[str, Any]:
        files = (tmp_path / folder / "runs").glob("trial-batch*.json")
        return {file.name: json.loads(file.read_text())["epochs"] for file in files}

    assert [len(run) for run in epochs("uninterrupted").values()] == [4, 4]
    assert epochs("killed") == epochs("uninterrupted")
    assert all(name.endswith(".json") for name in os.listdir(tmp_path / "killed" / "runs"))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The store.


def test_second_run_in_a_folder_is_rejected(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(StoreError, match="another run is using"), open_store(tmp_path):
        pass
    with open_store(tmp_path):  # unlocked again
        pass


def test_begin_neither_mixes_settings_nor_discards_results(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(StoreError, match="there is nothing to resume in"):
            store.begin({"one": {"seeds": 3}}, resume=True)
        store.begin({"one": {"seeds": 3, "data": "digits"}}, resume=False)
        store.finish("one-a", 1)
        store.save("one-b", {"epoch": torch.ones(1)})
        with pytest.raises(StoreError, match=r"one in .* was started with other settings: seeds was 3, now 4"):
            store.begin({"two": {}, "one": {"seeds": 4, "data": "digits"}}, resume=True)
        store.begin({"one": {"seeds": 3, "data": "digits", "command": "in other words"}}, resume=True)
        with pytest.raises(StoreError, match="already has results of one: continue with --resume, or choose"):
            store.begin({"two": {"seeds": 4}, "one": {"seeds": 3, "data": "digits"}}, resume=False)
        assert store.settings("two") is None  # nothing was started
        store.begin({"two": {"seeds": 4}}, resume=False)  # another experiment in the same folder
        assert store.record("one-a") == 1
        assert store.load("one-b") is not None
        (tmp_path / "runs" / "one-settings.json").unlink()
        with pytest.raises(StoreError, match="has runs of one but not their settings"):
            store.begin({"one": {"seeds": 5}}, resume=True)


def test_leftovers_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    """Leftovers are partial files and the checkpoints of finished runs."""
    store = start_store(tmp_path)
    store.finish("trial-a", 1)
    store.save("trial-a", {"epoch": 1})
    store.save("trial-b", {"epoch": 1})
    (tmp_path / "runs" / ".trial-b-x1y2.pt").write_bytes(b"half")
    start_store(tmp_path)
    assert sorted(os.listdir(tmp_path / "runs")) == ["trial-a.json", "trial-b.pt", "trial-settings.json"]


class _Mismatched(Store):
    """Returns the same unrelated checkpoint for every run."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.folder)

    def load(self, name: str) -> dict[str, Any] | None:
        return super().load("trial-a")

    def damaged(self, name: str, why: str) -> StoreError:
        return super().damaged("trial-a", why)


def test_errors_name_damaged_files(tmp_path: Path) -> None:
    store = start_store(tmp_path)
    store.save("trial-a", {"epoch": 1})
    path = tmp_path / "runs" / "trial-a.pt"
    with pytest.raises(StoreError, match=r"the checkpoint .*trial-a.pt is damaged \(it does not match"):
        train(lambda: RegularizedTrainer(SETTING, few_images(), "cpu"), "trial", SETTING, _Mismatched(store), print)
    tensor = torch.arange(100.0).numpy().tobytes()
    store.save("trial-a", {"x": torch.arange(100.0)})
    whole = path.read_bytes()
    assert tensor in whole
    for content in (whole[:50], whole.replace(tensor, b"\xff" + tensor[1:])):  # truncated, and with one byte changed
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"the checkpoint .*trial-a.pt is damaged .*; delete it to repeat the run"):
            store.load("trial-a")
    (tmp_path / "runs" / "trial-b.json").write_text('{"epochs": ')
    with pytest.raises(StoreError, match=r"trial-b.json is damaged .*; delete it"):
        store.record("trial-b")
    (tmp_path / "runs" / "trial-b.json").write_text("{}")
    with pytest.raises(StoreError, match=r"trial-b.json is damaged \(KeyError\('epochs'\)\); delete it"):
        store.record("trial-b", Record.from_json)
    (tmp_path / "runs" / "trial-c.json").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*trial-c.json: Is a directory"):
        store.record("trial-c")
    (tmp_path / "runs" / ".trial-d").mkdir()
    with pytest.raises(StoreError, match="cannot write to"):
        store.begin({"trial": {"seeds": 1}}, resume=True)


def test_loading_a_checkpoint_does_not_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    store = start_store(tmp_path)
    torch.save({"trainer": Evil()}, tmp_path / "runs" / "trial-a.pt")
    with pytest.raises(StoreError, match="is damaged"):
        store.load("trial-a")
    assert not (tmp_path / "pwned").exists()


def test_full_disk_keeps_existing_files(tmp_path: Path) -> None:
    """A limit on the file size of a process stands for the full disk."""
    program = """
import resource, signal, sys, torch
from pathlib import Path
from proxmo.experiments.store import StoreError, open_store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open_store(Path(sys.argv[1])) as store:
    store.begin({"trial": {"seeds": 1}}, resume=False)
    store.save("trial-a", {"x": torch.ones(10)})
    store.finish("trial-b", [1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    large = {"x": torch.zeros(10000)}
    for attempt in (lambda: store.save("trial-a", large), lambda: store.finish("trial-b", 9000 * "x")):
        try:
            attempt()
        except StoreError as error:
            print(error)
    print(store.load("trial-a")["x"].sum().item(), store.record("trial-b"))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    first, second, kept = done.stdout.splitlines()
    assert first.startswith(f"cannot write to {tmp_path}: ")
    assert second == f"cannot write to {tmp_path}: File too large"
    assert kept == "10.0 [1]"


def test_checkpoint_is_kept_until_the_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start_store(tmp_path)
    store.save("trial-a", {"epoch": 1})

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        store.finish("trial-a", 1)
    assert store.load("trial-a") == {"epoch": 1}


def test_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match=r"cannot write to .*file: "), open_store(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"
