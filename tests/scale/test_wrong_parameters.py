"""Parameters that a wrapper has flattened or replaced are refused; checkpoints of wrappers can be loaded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

import proxmo
from scale import processes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def message_of(call: Any) -> str:
    """Return the error message of a call, or an empty string."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def flattened() -> dict[str, Any]:
    """What optimizers say of parameters of FSDP1."""
    found: dict[str, Any] = {}
    for original in (False, True):
        wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=original)
        params = list(wrapped.parameters())
        for penalty in (proxmo.GroupL2(0.1, dim=None), proxmo.TopK(3), proxmo.Nuclear(0.1)):
            found[f"{penalty} {original}"] = message_of(lambda p=penalty, x=params: proxmo.ProxSGD(x, penalty=p))
        optimizer = proxmo.ProxSGD(params, lr=0.1, penalty=proxmo.L1(0.5))
        wrapped(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        found[f"sparsity {original}"] = message_of(optimizer.sparsity)
        found[f"value {original}"] = message_of(optimizer.penalty_value)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            found[f"weights {original}"] = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
    return found


@pytest.mark.filterwarnings("ignore")
def test_flattened_parameters_take_elementwise_penalties_only(tmp_path: Path) -> None:
    net = network()
    optimizer = proxmo.ProxSGD(net.parameters(), lr=0.1, penalty=proxmo.L1(0.5))
    net(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for found in processes.run(flattened, 2, tmp_path):
        weights = [found.pop(f"weights {original}") for original in (False, True)]
        assert all("fully_shard" in message for message in found.values()), found
        for weight in weights:
            torch.testing.assert_close(weight[: len(expected)], expected)


def replaced() -> dict[str, str]:
    """What optimizers say of parameters that `fully_shard` has replaced."""
    early, late = network(), network()
    optimizer = proxmo.ProxSGD(proxmo.param_groups(early, proxmo.L1(0.1)), lr=0.1)
    groups = proxmo.param_groups(late, proxmo.L1(0.1))
    for net in (early, late):
        fully_shard(net)
        net(torch.ones(3, 6)).sum().backward()
    moved = proxmo.ProxSGD(groups.on(late), lr=0.1)
    moved.step()
    return {
        "made before": message_of(optimizer.step),
        "groups made before": message_of(lambda: proxmo.ProxSGD(groups, lr=0.1)),
    }


@pytest.mark.skipif("_fsdp_orig_uid" not in inspect.getsource(_fsdp_param), reason="this torch leaves no trace of it")
def test_parameters_that_fully_shard_replaced_are_refused(tmp_path: Path) -> None:
    for found in processes.run(replaced, 2, tmp_path):
        for message in found.values():
            assert "which fully_shard has replaced; make the optimizer after" in message


def consolidated(folder: Path) -> list[torch.Tensor]:
    """Save and load the state of a ZeroRedundancyOptimizer, and train on."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its module warns that torch.jit is deprecated

    weights = []
    for resumed in (False, True):
        net = network()
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=proxmo.ProxSGD, lr=0.1, penalty=proxmo.L1(0.2)
        )
        for step in range(4):
            optimizer.zero_grad()
            net(torch.ones(3, 6) * step).square().sum().backward()
            optimizer.step()
            if step == 1 and resumed:
                optimizer.consolidate_state_dict(to=0)
                if torch.distributed.get_rank() == 0:
                    torch.save(optimizer.state_dict(), folder / "zero.pt")
                torch.distributed.barrier()
                optimizer = ZeroRedundancyOptimizer(
                    net.parameters(), optimizer_class=proxmo.ProxSGD, lr=0.5, penalty=proxmo.L1(0.9)
                )
                optimizer.load_state_dict(torch.load(folder / "zero.pt", weights_only=True))
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return weights


@pytest.mark.filterwarnings("ignore")
def test_consolidated_state_loads_with_weights_only(tmp_path: Path) -> None:
    for straight, resumed in processes.run(consolidated, 2, tmp_path, tmp_path):
        torch.testing.assert_close(resumed, straight)
