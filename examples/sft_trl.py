"""Supervised fine-tuning with TRL's SFTTrainer, on the log-probabilities that a server of this project would report.

    python examples/sft_trl.py                          # makes a tiny checkpoint and trains it for a few steps on the CPU
    python examples/sft_trl.py --model PATH --out OUT   # any Qwen3 checkpoint in Hugging Face format

`Qwen3ForRL` is an ordinary nn.Module. SFTTrainer wants two things more, and both are here: attributes of a Hugging Face model
(`Hosted`), and a loss that comes from the model instead of from TRL's own head (`AlignedSFTTrainer.compute_loss`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Trainer
from trl import SFTConfig, SFTTrainer

from weights_tools.make_tiny import make_tiny
from zoo.common.files import check_fresh
from zoo.common.training import ForRL, ModelOutput
from zoo.qwen3 import Qwen3ForRL

SENTENCES = [
    "The trainer and the sampler read the same weights.",
    "One row is one token; a chunk of rows, a page of keys and values.",
    "Guess the word: five letters, green for the right place.",
    "A step of the optimizer, a new version.",
]


class Hosted(nn.Module):
    """A ForRL with the attributes that transformers' Trainer reads and writes. It makes no number."""

    def __init__(self, rl: ForRL, folder: str | Path) -> None:
        super().__init__()
        self.rl = rl
        self.config = AutoConfig.from_pretrained(folder)
        self.generation_config = GenerationConfig.from_model_config(self.config)
        if hasattr(self.config, "router_aux_loss_coef"):
            self.config.router_aux_loss_coef = 0.0  # the zoo's models have no auxiliary loss
        self.accepts_loss_kwargs = True  # the loss divides by num_items_in_batch, so the Trainer must not
        self.loss_type = "ForCausalLM"  # label r + 1 belongs to row r, so a document's first label is no item

    def forward(self, input_ids: Tensor, **inputs: Any) -> ModelOutput:
        return self.rl(input_ids, **inputs)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **_: Any) -> None:
        self.rl.gradient_checkpointing_enable()

    def add_model_tags(self, tags: Any) -> None:
        """Hub tags; the checkpoint is saved by the zoo, which writes none."""


class AlignedSFTTrainer(SFTTrainer):
    """SFTTrainer whose loss is the mean of minus `score`, padded or padding-free."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if "cu_seq_lens_q" in inputs:  # padding_free or packing: documents one after another in one line
            bounds = inputs["cu_seq_lens_q"]
            inputs = {"input_ids": inputs["input_ids"][0], "labels": inputs["labels"][0], "cu_seqlens": bounds}
        else:
            inputs = {name: inputs[name] for name in ("input_ids", "labels", "attention_mask")}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def trainer_of(model: ForRL, folder: str | Path, texts: list[str], work: str | Path, **settings: Any) -> AlignedSFTTrainer:
    """A trainer of `model`, which was loaded from `folder`. TRL keeps its own files in `work`; `settings` are SFTConfig's."""
    usual = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",  # the checkpoint is saved by model.save_pretrained, under its published names
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
    }
    return AlignedSFTTrainer(
        model=Hosted(model, folder),
        args=SFTConfig(str(work), **{**usual, **settings}),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a Qwen3 checkpoint; a tiny one is made if absent")
    parser.add_argument("--out", help="a folder, absent or empty, for the trained checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args()
    if chosen.out is not None:
        try:
            check_fresh(chosen.out)  # before the training that would be lost
        except ValueError as error:
            parser.exit(2, f"error: --out: {error}\n")
    with tempfile.TemporaryDirectory() as work:
        folder = chosen.model or make_tiny("qwen3", Path(work) / "tiny")
        out = Path(work) / "trained" if chosen.out is None else Path(chosen.out)
        model = Qwen3ForRL.from_pretrained(folder, master_dtype=torch.float32)
        trainer = trainer_of(model, folder, SENTENCES, Path(work) / "trl", max_steps=chosen.steps, disable_tqdm=True)
        trainer.train()
        model.save_pretrained(out)
        again = Qwen3ForRL.from_pretrained(out)
        ids = trainer.processing_class(SENTENCES[0], return_tensors="pt")["input_ids"][0].to(trainer.args.device)
        bounds = torch.tensor([0, len(ids)])
        with torch.no_grad():
            same = torch.equal(again.score(ids, bounds), model.score(ids, bounds))
        print(f"saved, loaded again, scored: {'the same bytes' if same else 'OTHER BYTES'}")


if __name__ == "__main__":
    main()
