"""Faults in distributed training: a rank is killed, or has non-finite gradients."""

from __future__ import annotations

import math
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import proxmo
from penalties.cases import noise
from scale import processes

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp.py"


@contextmanager
def launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the example with torchrun; terminate it if it takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, "--max-restarts", "3", str(EXAMPLE), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    ) as launcher:
        guard = threading.Timer(300, launcher.terminate)
        guard.start()
        try:
            yield launcher
        finally:
            guard.cancel()
            launcher.terminate()


def workers(launcher: int) -> list[int]:
    """Return the ids of the processes that a launcher has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == launcher:
            found.append(int(status.parent.name))
    return sorted(found)


def run_example(rank: int, port: int, folder: Path) -> None:
    """Run the example on one of two ranks, without torchrun, which takes seconds to start."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {**ENVIRONMENT, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    sys.argv = [str(EXAMPLE), str(folder)]
    runpy.run_path(str(EXAMPLE))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes to kill in /proc")
@pytest.mark.parametrize("kills", [{3}, pytest.param({3, 9}, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_run_with_killed_ranks_equals_undisturbed_run(kills: set[int], tmp_path: Path) -> None:
    """Kill a rank after each of these checkpoints."""
    draw, killed = random.Random(0), 0
    with launched(tmp_path / "killed") as run:
        assert run.stdout is not None
        for checkpoint, _ in enumerate(run.stdout, 1):  # each checkpoint prints a line
            if checkpoint in kills:
                time.sleep(draw.uniform(0, 0.5))  # at a random moment
                os.kill(draw.choice(workers(run.pid)), signal.SIGKILL)
                killed += 1
        _, errors = run.communicate()
        assert run.returncode == 0, errors
        assert errors.count("exitcode: -9") == killed == len(kills)  # torchrun saw it
    arguments = (get_free_port(), tmp_path / "undisturbed")
    multiprocessing.start_processes(run_example, arguments, nprocs=2, start_method="forkserver")
    found, expected = (torch.load(tmp_path / name / "network.pt") for name in ("killed", "undisturbed"))
    assert found.keys() == expected.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (found["0.weight"] == 0).all(1).float().mean() > 0.8


def step_with_nonfinite_gradients_on_one_rank() -> dict[str, Any]:
    """Step while one rank has a NaN in its local shard of a gradient, or an inf in an ordinary gradient."""
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for nonfinite in ("skip", "raise"):
        x = nn.Parameter(distribute_tensor(noise((4, 3)), mesh, [Shard(0)]))
        ordinary = nn.Parameter(torch.zeros(2))
        groups = [{"params": [ordinary]}, {"params": [x], "penalty": proxmo.L1(0.1)}]
        optimizer = proxmo.ProxSGD(groups, lr=0.1, momentum=0.5, nonfinite=nonfinite)  # type: ignore[arg-type]
        for step in range(5):
            x.grad = distribute_tensor(noise((4, 3), seed=step), mesh, [Shard(0)])
            ordinary.grad = torch.ones(2)
            if step == 2 and distributed.get_rank() == 1:
                x.grad.to_local()[0, 1] = math.nan
            if step == 4 and distributed.get_rank() == 0:
                ordinary.grad[1] = math.inf
            try:
                optimizer.step()
            except FloatingPointError:
                found.setdefault(f"{nonfinite} raised", []).append(step)
        assert isinstance(x, DTensor)
        found[nonfinite] = x.full_tensor().detach()
    return found


def test_all_ranks_skip_or_raise_if_one_has_nonfinite_gradients(tmp_path: Path) -> None:
    x = noise((4, 3))
    optimizer = proxmo.ProxSGD([x], lr=0.1, momentum=0.5, penalty=proxmo.L1(0.1))
    for step in (0, 1, 3):
        x.grad = noise((4, 3), seed=step)
        optimizer.step()
    for found in processes.run(step_with_nonfinite_gradients_on_one_rank, 2, tmp_path):
        torch.testing.assert_close(found["skip"], x)
        torch.testing.assert_close(found["raise"], x)
        assert found["raise raised"] == [2, 4]


def train_with_nan_inputs_on_one_rank() -> list[Tensor]:
    """Train with DDP, whose gradient average spreads the NaN of one rank to all ranks."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    model = DistributedDataParallel(network)
    optimizer = proxmo.ProxSGD(network.parameters(), lr=0.1, penalty=proxmo.L1(0.01), nonfinite="skip")
    for step in range(5):
        inputs = noise((4, 3), torch.float32, seed=step)
        if step == 2 and distributed.get_rank() == 1:
            inputs[0, 0] = math.nan
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in network.parameters()]


def test_all_ranks_skip_a_batch_with_nan_inputs_on_one_rank(tmp_path: Path) -> None:
    first, second = processes.run(train_with_nan_inputs_on_one_rank, 2, tmp_path)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))
    torch.manual_seed(0)
    assert not torch.equal(first[0], nn.Linear(3, 2).weight)
