"""Data-parallel training: `torchrun --nproc-per-node 2 examples/ddp.py`. proxmo needs no extra setup.

DistributedDataParallel averages the gradients over the ranks, so every rank takes the same step, prox included, and the
weights stay equal. Only rank 0 prints and saves. Needs `pip install scikit-learn`.
"""

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import proxmo
from proxmo.progress import Progress

EPOCHS = 40

distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = distributed.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)  # the same initial weights on every rank

digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1]))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)

network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
model = DistributedDataParallel(network)
optimizer = proxmo.ProxSGD(proxmo.param_groups(network, proxmo.GroupL2(0.02), exclude=["2"]), lr=1.0)
scheduler = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=1.0, momentum=0.9, horizon=EPOCHS * len(loader)))
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    with Progress(len(loader), f"epoch {epoch + 1}", shown=rank == 0) as progress:  # on a terminal only
        progress.show(neurons=lambda: f"{1 - optimizer.sparsity()[0].groups:.0%}")
        for images, labels in progress.over(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.show(loss=loss.item)
    if rank == 0 and epoch % 10 == 9:
        print(f"epoch {epoch + 1}: {optimizer.sparsity()[0].groups:.0%} of the hidden neurons are zero", flush=True)
if rank == 0:
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
distributed.barrier()  # a rank that exits early may abort: gloo's threads still hold its last gradients
distributed.destroy_process_group()
