"""proxmo in training frameworks: lr and strength reach the prox, checkpoints are complete, and the examples run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import proxmo

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 6
ACCUMULATED = 2  # batches per step, to detect a scheduler or a prox that runs per batch
LIGHTNING_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # deprecated by torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),  # when resuming
    pytest.mark.filterwarnings("ignore:The `srun` command is available:UserWarning"),  # on a machine with Slurm
]


class Idle(nn.Module):
    """A model with zero gradients, so that a step is the prox alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, dtype=torch.float64)
        self.second = nn.Linear(2, 4, dtype=torch.float64)
        for p in self.parameters():
            nn.init.constant_(p, 10.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": 0 * sum(p.sum() for p in self.parameters()) * x.sum()}


class Training(NamedTuple):
    """What a framework is given; it must step the schedulers after each optimizer step."""

    model: Idle
    optimizer: proxmo.ProxSGD
    rates: ExponentialLR
    strengths: proxmo.StrengthScheduler
    folder: Path

    @property
    def data(self) -> list[dict[str, Tensor]]:
        return [{"x": torch.zeros(1)}] * (STEPS * ACCUMULATED)


def train_with_lightning(training: Training) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return self.model(**batch)

        def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
            schedulers = (training.rates, training.strengths)
            return [training.optimizer], [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]

        def lr_scheduler_step(self, scheduler: Any, metric: None) -> None:
            scheduler.step()

    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(training.data))


def train_with_accelerate(training: Training) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, loader, rates = accelerator.prepare(
        training.model, training.optimizer, DataLoader(training.data), training.rates
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            rates.step()
            if accelerator.sync_gradients:
                training.strengths.step()
            optimizer.zero_grad()


def train_with_trainer(training: Training) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Strengths(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            training.strengths.step()

    arguments = TrainingArguments(
        str(training.folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATED,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    optimizers = (training.optimizer, training.rates)
    Trainer(
        training.model, arguments, train_dataset=training.data, optimizers=optimizers, callbacks=[Strengths()]
    ).train()


@pytest.mark.parametrize(
    "framework",
    [pytest.param(train_with_lightning, marks=LIGHTNING_WARNINGS), train_with_accelerate, train_with_trainer],
)
def test_each_parameter_group_uses_its_own_lr_and_strength(
    framework: Callable[[Training], None], tmp_path: Path
) -> None:
    model = Idle()
    groups = proxmo.param_groups(model, proxmo.L1(2.0), per_layer={"second": 0.5})
    groups[-1]["lr"] = 0.1
    optimizer = proxmo.ProxSGD(groups, lr=0.5, momentum=0.8)
    penalties = [group["penalty"] for group in optimizer.param_groups]
    assert penalties == [proxmo.L1(2.0), None, proxmo.L1(0.5)]
    given = [dict(group) for group in optimizer.param_groups]
    training = Training(
        model,
        optimizer,
        ExponentialLR(optimizer, 0.9),
        proxmo.StrengthScheduler(optimizer, lambda step: min(1.0, (step + 1) / 4)),
        tmp_path,
    )
    framework(training)

    scale = sum(0.9**k * min(1.0, (k + 1) / 4) for k in range(STEPS))
    torch.testing.assert_close(model.first.weight, torch.full_like(model.first.weight, 10 - 0.5 * 2.0 * scale))
    torch.testing.assert_close(model.second.weight, torch.full_like(model.second.weight, 10 - 0.1 * 0.5 * scale))
    assert bool((model.first.bias == 10).all() & (model.second.bias == 10).all())
    for group, before, penalty, lr in zip(optimizer.param_groups, given, penalties, (0.5, 0.5, 0.1), strict=True):
        assert group["penalty"] is penalty
        assert group["lr"] == pytest.approx(lr * 0.9**STEPS)
        assert group.keys() - before.keys() <= {"initial_lr"}
        assert all(group[key] == value for key, value in before.items() if key not in ("lr", "params"))
        assert all(p is q for p, q in zip(group["params"], before["params"], strict=True))


class Example(NamedTuple):
    """An example, where to interrupt it, and how to read its checkpoint."""

    name: str
    until: int
    """Epoch or step to interrupt at, during warm-up, so that strength and lr still change."""
    hidden: str
    """The weight with one penalized neuron per row."""
    read: Callable[[Path], dict[str, Any]]
    """Returns the last checkpoint as `weights`, `optimizer` and `schedulers`."""


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def read_plain(folder: Path) -> dict[str, Any]:
    saved = load(folder / "plain.pt")
    schedulers = [saved["rates"], saved["strengths"]]
    return {"weights": saved["model"], "optimizer": saved["optimizer"], "schedulers": schedulers}


def read_lightning(folder: Path) -> dict[str, Any]:
    saved = load(folder / "lightning.ckpt")
    (optimizer,) = saved["optimizer_states"]
    return {"weights": saved["state_dict"], "optimizer": optimizer, "schedulers": saved["lr_schedulers"]}


def read_accelerate(folder: Path) -> dict[str, Any]:
    folder /= "accelerate"
    schedulers = [load(folder / "scheduler.bin"), load(folder / "custom_checkpoint_0.pkl")]
    weights = load_file(folder / "model.safetensors")
    return {"weights": weights, "optimizer": load(folder / "optimizer.bin"), "schedulers": schedulers}


def read_trainer(folder: Path) -> dict[str, Any]:
    last = max((folder / "trainer").iterdir(), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    weights = load_file(last / "model.safetensors")
    return {"weights": weights, "optimizer": load(last / "optimizer.pt"), "schedulers": [load(last / "scheduler.pt")]}


CASES = [
    Example("plain", 5, "0.weight", read_plain),
    pytest.param(Example("lightning_module", 5, "network.0.weight", read_lightning), marks=LIGHTNING_WARNINGS),
    Example("accelerate_loop", 5, "0.weight", read_accelerate),
    Example("transformers_trainer", 147, "bert.encoder.layer.0.intermediate.dense.weight", read_trainer),
]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of nested containers; tensors as bytes, so that ``==`` works."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree.numpy().tobytes() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("example", CASES, ids=lambda example: example.name)
def test_resumed_example_equals_uninterrupted_one(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    script = EXAMPLES / f"{example.name}.py"
    assert f"`python examples/{script.name}`" in script.read_text(encoding="utf-8")
    monkeypatch.chdir(whole)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")  # not in a process of its own, which takes seconds to start
    final = example.read(whole)
    shares = [int(share) for share in re.findall(r"(\d+)% of the hidden neurons are zero", capsys.readouterr().out)]
    zero = (final["weights"][example.hidden] == 0).all(1).float().mean()
    assert len(shares) == 4
    assert 50 < shares[-1] == round(100 * float(zero)) < 100

    train = import_module(f"examples.{example.name}").train
    train(resumed, until=example.until)
    interrupted = example.read(resumed)
    assert (interrupted["weights"][example.hidden] == 0).all(1).any()
    groups = zip(interrupted["optimizer"]["param_groups"], final["optimizer"]["param_groups"], strict=True)
    pairs = [(now["penalty"], last["penalty"]) for now, last in groups if now["penalty"]]
    strengths = [(now[name]["strength"], last[name]["strength"]) for now, last in pairs for name in now]
    assert strengths
    assert all(0 < now < last for now, last in strengths)
    train(resumed, resume=True)
    assert dict(leaves(example.read(resumed))) == dict(leaves(final))
