"""TRL's GRPOTrainer at zero mismatch: our engine draws, `score` stands behind TRL's log-probabilities.

    python examples/grpo_trl.py                    # makes a tiny checkpoint and trains it for a few steps on the CPU
    python examples/grpo_trl.py --model PATH       # any checkpoint in Hugging Face format that the zoo loads

TRL asks for log-probabilities in one place, `_get_per_token_logps_and_entropies`, which is overridden here, and takes completions from a
`rollout_func`. The reward is a toy: a token earns 1 if its id is even.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from trl import GRPOConfig, GRPOTrainer

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.rollouts import SamplingParams, pack
from zoo.common.serving import ForServing
from zoo.common.threads import suited
from zoo.common.training import ForRL

PROMPTS = ["The trainer and", "Guess the word:", "One row is", "0 1 2 3"]


class Hosted(nn.Module):
    """A ForRL with the attributes of a Hugging Face model that GRPOTrainer reads. It makes no number."""

    def __init__(self, rl: ForRL, folder: str | Path) -> None:
        super().__init__()
        self.rl = rl
        self.config = AutoConfig.from_pretrained(folder)
        self.generation_config = GenerationConfig.from_model_config(self.config)
        self.warnings_issued: dict[str, bool] = {}

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        return self.rl(input_ids, **inputs)

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.rl.gradient_checkpointing

    def activation_checkpointing_enable(self, **settings: Any) -> None:
        self.rl.activation_checkpointing_enable(**settings)

    def gradient_checkpointing_enable(self, *given: Any, **settings: Any) -> None:
        self.rl.gradient_checkpointing_enable(*given, **settings)

    def gradient_checkpointing_disable(self) -> None:
        self.rl.gradient_checkpointing_disable()

    def add_model_tags(self, tags: Any) -> None:
        """Hub tags; the checkpoint is saved by the zoo, which writes none."""


class AlignedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose log-probabilities are those of `score`, under the temperature that the tokens were drawn with."""

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *unused: Any,
        **also_unused: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Of the last `logits_to_keep` tokens of each line, which are its completion; prompts are padded on the left."""
        targets = input_ids.roll(-1, 1).masked_fill(attention_mask.roll(-1, 1) == 0, -100)
        targets[:, -1] = -100
        out = model(input_ids, attention_mask=attention_mask, shift_labels=targets, temperature=self.temperature)
        of_completion = slice(-logits_to_keep - 1, -1)  # a token is drawn from the row before it
        return out.log_probs[:, of_completion], out.entropy[:, of_completion], None


class Rollouts:
    """TRL's `rollout_func`: hands the engine the trainer's weights of now, then draws.

    differing  of each call the bytes in which the engine's log-probabilities differ from those that the trainer has before its step
    """

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.engine = engine
        self.params = params
        self.differing: list[int] = []

    def __call__(self, prompts: list[str], trainer: AlignedGRPOTrainer) -> dict[str, Any]:
        rl = trainer.model.rl
        self.engine.update_weights(rl.published_tensors())
        records = self.engine.generate(prompts, self.params)  # a prompt stands here once for each of its completions
        batch = pack(records, rl.device)
        with torch.no_grad():
            scored = rl.score(batch.ids_R, batch.cu_seqlens, sampling=batch.sampling)
        self.differing.append(batch.differing_bytes(scored))
        return {
            "prompt_ids": [list(record.prompt_ids) for record in records],
            "completion_ids": [list(record.output_ids) for record in records],
            "logprobs": [list(record.filtered_log_probs) for record in records],
        }


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even ids among the drawn tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(folder: str | Path, work: str | Path, **settings: Any) -> tuple[AlignedGRPOTrainer, Rollouts]:
    """A trainer of the checkpoint in `folder`, and who draws for it. TRL keeps its own files in `work`; `settings` are GRPOConfig's."""
    usual = {
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",  # the checkpoint is saved by model.rl.save_pretrained, under its published names
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,  # the program names its own dtypes
        "gradient_checkpointing": False,
    }
    config = GRPOConfig(str(work), **{**usual, **settings})
    rl = zoo.load(folder, role="rl", master_dtype=torch.float32)
    server = zoo.load(folder, role="serving")
    assert isinstance(rl, ForRL) and isinstance(server, ForServing)
    filters = {name: value for name, value in (("top_p", config.top_p), ("top_k", config.top_k), ("min_p", config.min_p)) if value}
    if filters not in ({}, {"top_p": 1.0}):
        raise ValueError(f"{filters} filter draws, and TRL scores tokens without filters: leave top_p at 1, top_k at 0 and min_p out")
    params = SamplingParams(temperature=config.temperature, max_new_tokens=config.max_completion_length)
    rollouts = Rollouts(Engine(server, seed=config.seed), params)
    trainer = AlignedGRPOTrainer(
        model=Hosted(rl, folder),
        reward_funcs=even_tokens,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        rollout_func=rollouts,
    )
    return trainer, rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; a tiny Qwen3 is made if absent")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = given.model or make_tiny("qwen3", Path(work) / "tiny")
        trainer, rollouts = trainer_of(folder, Path(work) / "trl", max_steps=given.steps, disable_tqdm=True)
        with suited(trainer.model.rl):
            trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        for step, (reward, differing) in enumerate(zip(rewards, rollouts.differing, strict=True), 1):
            print(f"step {step:3d}  reward {float(reward):.3f}  differing bytes {differing}")


if __name__ == "__main__":
    main()
