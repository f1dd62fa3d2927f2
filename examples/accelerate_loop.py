"""Accelerate: `python examples/accelerate_loop.py`; `--resume` continues from the last checkpoint.

Needs `pip install accelerate scikit-learn`. The strength scheduler is registered, so that `save_state` saves it too.
Methods that only proxmo's optimizers have, such as `sparsity`, are called on the original optimizer, since Accelerate's
wrapper does not forward them.
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
from proxmo.progress import Progress

EPOCHS = 12


def train(folder: Path, until: int = EPOCHS, resume: bool = False) -> None:
    """Train until an epoch, from scratch or from the checkpoint in ``folder``."""
    # this sampler depends only on seed and epoch, so that batches are the same after --resume
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    torch.manual_seed(0)
    digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1]))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    hidden = proxmo.param_groups(network[0], proxmo.GroupL2(0.02))  # zeroes whole neurons
    head = proxmo.param_groups(network[2], proxmo.L1(1e-3))  # zeroes single weights
    optimizer = proxmo.ProxAdamW([*hidden, *head], lr=1e-2)  # AdamW, and exact zeros
    # Accelerate steps the scheduler once per rank and step, so the horizon is that of a single rank
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    model, wrapped, loader, rates = accelerator.prepare(network, optimizer, loader, rates)
    steps = EPOCHS * len(loader)
    strengths = proxmo.StrengthScheduler(optimizer, lambda step: min(1.0, 2 * step / steps))
    accelerator.register_for_checkpointing(strengths)
    if resume:
        accelerator.load_state(str(folder / "accelerate"))

    for epoch in range(strengths.last_step // len(loader), until):
        loader.set_epoch(epoch)
        with Progress(len(loader), f"epoch {epoch + 1}", shown=accelerator.is_main_process) as progress:
            progress.show(neurons=lambda: f"{1 - optimizer.sparsity()[0].groups:.0%}")  # if sharded: on all ranks
            for images, labels in progress.over(loader):
                wrapped.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                wrapped.step()
                rates.step()
                strengths.step()  # with gradient accumulation, only `if accelerator.sync_gradients`
                progress.show(loss=loss.item)
        accelerator.save_state(str(folder / "accelerate"))
        if epoch % 3 == 2:
            accelerator.print(f"epoch {epoch + 1}: {optimizer.sparsity()[0].groups:.0%} of the hidden neurons are zero")


if __name__ == "__main__":
    train(Path.cwd(), resume="--resume" in sys.argv)
