"""Lightning: `python examples/lightning_module.py`; `--resume` continues from the last checkpoint.

Needs `pip install pytorch-lightning scikit-learn`; with `lightning` instead, write `import lightning.pytorch as pl`.
Lightning steps and saves both schedulers; it requires `lr_scheduler_step` because one of them is not a torch class.
"""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import proxmo

EPOCHS = 12


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def train_dataloader(self) -> DataLoader:
        digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(digits[0] / 16, dtype=torch.float32), torch.tensor(digits[1]))
        # Lightning sets the epoch of this sampler, so that the order is the same after --resume
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(data, batch_size=64, sampler=sampler)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> tuple[list, list]:
        hidden = proxmo.param_groups(self.network[0], proxmo.GroupL2(0.02))  # zeroes whole neurons
        head = [{**group, "lr": 0.2} for group in proxmo.param_groups(self.network[2], proxmo.L1(1e-3))]
        optimizer = proxmo.ProxSGD([*hidden, *head], lr=1.0, momentum=0.9)
        steps = EPOCHS * len(self.train_dataloader())
        rates = proxmo.RateScheduler(optimizer, proxmo.CosineRates(lr=1.0, momentum=0.9, horizon=steps))
        strengths = proxmo.StrengthScheduler(optimizer, lambda step: min(1.0, 2 * step / steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"} for scheduler in (rates, strengths)]

    def lr_scheduler_step(self, scheduler: proxmo.StrengthScheduler, metric: None) -> None:
        scheduler.step()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch % 3 == 2:
            zero = self.trainer.optimizers[0].sparsity()[0].groups
            print(f"epoch {self.current_epoch + 1}: {zero:.0%} of the hidden neurons are zero", flush=True)


def train(folder: Path, until: int = EPOCHS, resume: bool = False) -> None:
    """Train until an epoch, from scratch or from the checkpoint in ``folder``."""
    torch.manual_seed(0)
    checkpoint = pl.callbacks.ModelCheckpoint(folder, "lightning", enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=until, callbacks=[checkpoint], **quiet)
    trainer.fit(Digits(), ckpt_path=folder / "lightning.ckpt" if resume else None)


if __name__ == "__main__":
    train(Path.cwd(), resume="--resume" in sys.argv)
