"""Accelerate: `python examples/accelerate_loop.py`, with `--resume` to go on from its last checkpoint.

Needs `pip install accelerate scikit-learn`. The strengths are registered, so that `save_state` saves them too. What
only proxmo's optimizers have, such as `sparsity`, is asked of ours: Accelerate's wrapper does not pass it on.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import proxmo

EPOCHS = 12


def train(folder: Path, until: int = EPOCHS, resume: bool = False) -> None:
    """Train up to an epoch, from the start or from the checkpoint in the folder."""
    # this sampler goes by seed and epoch, so that the batches are the same after --resume
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    torch.manual_seed(0)
    digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1]))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    hidden = proxmo.param_groups(network[0], proxmo.GroupL2(0.02))  # whole neurons vanish
    head = [{**group, "lr": 0.2} for group in proxmo.param_groups(network[2], proxmo.L1(1e-3))]  # single weights do
    ours = proxmo.ProxSGD([*hidden, *head], lr=1.0, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(ours, EPOCHS * len(loader))
    model, optimizer, loader, rates = accelerator.prepare(network, ours, loader, rates)
    steps = EPOCHS * len(loader)
    strengths = proxmo.StrengthScheduler(ours, lambda step: min(1.0, 2 * step / steps))
    accelerator.register_for_checkpointing(strengths)
    if resume:
        accelerator.load_state(str(folder / "accelerate"))

    for epoch in range(strengths.last_step // len(loader), until):
        loader.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            rates.step()
            strengths.step()  # only `if accelerator.sync_gradients` when gradients are accumulated
        accelerator.save_state(str(folder / "accelerate"))
        if epoch % 3 == 2:
            accelerator.print(f"epoch {epoch + 1}: {ours.sparsity()[0].groups:.0%} of the hidden neurons are zero")


if __name__ == "__main__":
    train(Path.cwd(), resume="--resume" in sys.argv)
