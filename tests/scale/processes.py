"""Run functions on several ranks: real processes that communicate over the loopback interface."""

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
# Fork ranks from a server that has already imported what ranks would import, one after another, on their first calls:
# they start seconds earlier. FSDP, DDP and DTensor import torch._dynamo.
multiprocessing.set_forkserver_preload(
    [
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint"),
        *("torch._dynamo", "proxmo", "pytest", "scipy.optimize", "rich.table"),
    ]
)


def run(function: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Run ``function(*args)`` on each rank of a new process group, and return the results by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    work = (function, ranks, folder, args)
    multiprocessing.start_processes(_work, work, nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]


def run_once(
    function: Callable[..., Any], ranks: int, factory: pytest.TempPathFactory, name: str, *args: Any
) -> list[Any]:
    """`run`, but once for all pytest workers: the first one runs it, the others wait for the results."""
    folder = shared_folder(factory) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run(function, ranks, folder, *args)
            (folder / "done").touch()
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder shared by all workers of this pytest run."""
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
