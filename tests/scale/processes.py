"""Real processes that talk over the loopback, for tests of distributed training."""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

TIMEOUT = timedelta(seconds=120)
# Processes are forked from a server that has imported these and done nothing else: many start in the time of one.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "proxmo"]
)


def run(function: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each of the ranks of a group of processes, which it can ask torch about."""
    folder.mkdir(parents=True, exist_ok=True)
    work = (function, ranks, folder, args)
    multiprocessing.start_processes(_work, work, nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]


def run_once(
    function: Callable[..., Any], ranks: int, factory: pytest.TempPathFactory, name: str, *args: Any
) -> list[Any]:
    """`run`, once for all workers of pytest: the first does it, in both of their time, and the others wait for it."""
    folder = shared_folder(factory) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run(function, ranks, folder, *args)
            (folder / "done").touch()
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all workers of this run of pytest have."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _work(rank: int, function: Callable[..., Any], ranks: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        torch.save(function(*args), folder / f"result-{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        distributed.destroy_process_group()
