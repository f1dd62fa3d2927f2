"""Sharded training that survives killed ranks:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 examples/fsdp.py

`fully_shard` shards parameters, gradients and optimizer state over the ranks. A distributed checkpoint is written every
few steps. When a rank dies, torchrun restarts all ranks, and they resume from the last checkpoint, even if their number
has changed. (Without the environment variable, restarted ranks may read the addresses of dead ones and deadlock.)
The optional argument is the checkpoint folder, by default ./checkpoints. Needs `pip install scikit-learn`.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import proxmo

STEPS, EVERY, BATCH = 300, 20, 128
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
device = torch.device("cpu")
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
distributed.init_process_group()
rank, ranks = distributed.get_rank(), distributed.get_world_size()

images, labels = (torch.tensor(array).to(device) for array in load_digits(return_X_y=True))
images = images.float() / 16
torch.manual_seed(0)  # the same initial weights on every rank
network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
fully_shard(network)  # before the optimizer is made, since this replaces the parameters
optimizer = proxmo.ProxSGD(proxmo.param_groups(network, proxmo.GroupL2(0.02), exclude=["2"]), lr=1.0)
scheduler = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=1.0, momentum=0.9, horizon=STEPS))

step = 0
if saved := sorted(folder.glob("step-*[0-9]")):
    model_state, optimizer_state = get_state_dict(network, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler}
    dcp.load(state, checkpoint_id=saved[-1])
    set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = int(saved[-1].name.removeprefix("step-"))
while step < STEPS:
    batch = torch.randint(len(images), (BATCH,), generator=torch.Generator().manual_seed(step)).to(device)
    local = batch[rank::ranks]  # batches depend only on the step, so that they are the same after a restart
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images[local]), labels[local]).backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if step % EVERY == 0:
        zero = optimizer.sparsity()[0].groups  # a collective operation: every rank must call it
        model_state, optimizer_state = get_state_dict(network, optimizer)
        unfinished = folder / f"step-{step:06}.unfinished"
        state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler}
        dcp.save(state, checkpoint_id=unfinished)
        if rank == 0:  # rename only when complete, so that no partial checkpoint is ever loaded
            shutil.rmtree(final := folder / f"step-{step:06}", ignore_errors=True)
            unfinished.rename(final)
            print(f"step {step}: {zero:.0%} of the hidden neurons are zero", flush=True)
        distributed.barrier()
whole = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(whole, folder / "network.pt")  # ordinary tensors, ready for proxmo.compact in one process
distributed.barrier()  # a rank that exits early may abort: gloo's threads still hold its last gradients
distributed.destroy_process_group()
