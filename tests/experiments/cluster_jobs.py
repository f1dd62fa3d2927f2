"""What the tests of clusters submit; jobs import it, so it is a module of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from experiments.few_images import few_images, loader
from proxmo.experiments.cluster import run_on_cluster
from proxmo.experiments.pool import Job
from proxmo.experiments.regularized import RegularizedTrainer
from proxmo.experiments.store import StoreError, open_store
from proxmo.experiments.training import Setting, has_fast_bfloat16

SETTING = Setting(lr=0.1, momentum=0.9, batch=32, epochs=3, width=8, seed=0)
JOBS = [Job("trial", replace(SETTING, seed=seed), RegularizedTrainer) for seed in range(2)]


def has_slurm() -> bool:
    """Whether a Slurm is running; none is started here."""
    if shutil.which("squeue") is None:
        return False
    return subprocess.run(["squeue"], capture_output=True, check=False, timeout=60).returncode == 0


class KilledOnce(RegularizedTrainer):
    """Kills its own process in the second epoch, unless it continues from a checkpoint."""

    def train_epoch(self) -> float:
        loss = super().train_epoch()
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2 and self.scheduler.last_epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class Failing(RegularizedTrainer):
    def train_epoch(self) -> float:
        raise StoreError("on purpose")


def submit(folder: Path, jobs: list[Job] = JOBS) -> list[int]:
    """Run jobs into a folder, with one core each; return the epochs of each call of ``advance``."""
    done: list[int] = []
    with open_store(folder) as store:
        store.begin({"trial": {"seeds": 1}}, resume=(folder / "runs").exists())
        images = loader(few_images())
        run_on_cluster(jobs, images, "cpu", store, done.append, resources={}, bfloat16=has_fast_bfloat16("cpu"))
    return done


if __name__ == "__main__":
    submit(Path(sys.argv[1]))
