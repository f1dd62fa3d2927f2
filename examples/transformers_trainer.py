"""Hugging Face Trainer: `python examples/transformers_trainer.py`; `--resume` continues from the last checkpoint.

Needs `pip install transformers accelerate scikit-learn`. The model is a small BERT with random weights; nothing is
downloaded. Trainer takes the optimizer and the lr scheduler; a callback steps the strength scheduler.
"""

import sys
from pathlib import Path

import torch
import transformers
from sklearn.datasets import load_digits

import proxmo

STEPS = 300


class Strengths(transformers.TrainerCallback):
    """Steps the strength scheduler after the optimizer; resumes at the step of the checkpoint, if any."""

    def __init__(self, optimizer: proxmo.ProxAdamW) -> None:
        self.optimizer = optimizer
        self.scheduler = proxmo.StrengthScheduler(optimizer, lambda step: min(1.0, 2 * step / STEPS))

    def on_train_begin(self, args: object, state: transformers.TrainerState, control: object, **_: object) -> None:
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), "last_step": state.global_step})

    def on_step_end(self, args: object, state: transformers.TrainerState, control: object, **_: object) -> None:
        self.scheduler.step()
        if state.global_step % 75 == 0:
            zero = self.optimizer.sparsity()[-1].groups
            print(f"step {state.global_step}: {zero:.0%} of the hidden neurons are zero", flush=True)


def train(folder: Path, until: int = STEPS, resume: bool = False) -> None:
    """Train until a step, from scratch or from the last checkpoint in ``folder``."""
    transformers.utils.logging.disable_progress_bar()
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).reshape(-1, 2, 32)  # two tokens per image
    data = [{"inputs_embeds": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)]
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=1, num_labels=10, initializer_range=0.1, **sizes)
    model = transformers.BertForSequenceClassification(config)
    others = ["*.embeddings", "*.attention", "*.output", "*.pooler", "classifier"]  # penalise only hidden neurons
    groups = proxmo.param_groups(model, proxmo.GroupL2(0.015), exclude=others)
    optimizer = proxmo.ProxAdamW(groups, lr=3e-3)  # AdamW, and exact zeros
    rates = transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    options = {"per_device_train_batch_size": 64, "max_steps": until, "save_steps": 75, "logging_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": torch.cuda.is_available()}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder / "trainer"), **options, **quiet),
        train_dataset=data,
        optimizers=(optimizer, rates),
        callbacks=[Strengths(optimizer)],
    )
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    train(Path.cwd(), resume="--resume" in sys.argv)
