"""Group-relative policy optimisation (GRPO) with the trainer and the embedded engine, at zero train-inference mismatch.

    python examples/grpo.py                                     # a tiny random model on the CPU, under a minute
    python examples/grpo.py --model PATH --device cuda          # any checkpoint that the zoo loads

The task is a toy: a token earns 1 if its id is even. Every step samples a group of completions a prompt, scores them with the trainer,
counts the bytes in which trainer and sampler differ (0), takes one step of AdamW, and hands the weights to the engine.

DeepSeekMath (section 4.1) describes the objective: a completion's advantage is its reward less the mean of its group, over the group's
standard deviation. The first step after sampling has a ratio of exactly 1, which is why nothing is clipped here: with one update a
batch the trainer is the sampler.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.rollouts import Completion, SamplingParams
from zoo.common.serving import ForServing
from zoo.common.training import ForRL

Reward = Callable[[Completion], float]


def even_tokens(record: Completion) -> float:
    """The share of even ids among the drawn tokens."""
    return sum(token % 2 == 0 for token in record.output_ids) / len(record.output_ids)


def packed(records: Sequence[Completion], device: torch.device) -> tuple[Tensor, Tensor, list[slice]]:
    """Ids [R], cu_seqlens [N + 1], and the rows whose targets each record drew."""
    lengths = [len(r.prompt_ids) + len(r.output_ids) for r in records]
    ends = list(accumulate(lengths))
    ids = torch.tensor([token for r in records for token in (*r.prompt_ids, *r.output_ids)], device=device)
    drawn = [slice(end - len(r.output_ids) - 1, end - 1) for end, r in zip(ends, records, strict=True)]
    return ids, torch.tensor([0, *ends], dtype=torch.int32, device=device), drawn


def advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Of each completion within its group; zero where a group's rewards are all alike."""
    by_group = torch.tensor(rewards).view(-1, group)
    centred = by_group - by_group.mean(1, keepdim=True)
    return (centred / (by_group.std(1, keepdim=True) + 1e-6)).flatten()


def differing_bytes(trainer: Tensor, sampler: Sequence[float]) -> int:
    reported = torch.tensor(sampler, dtype=torch.float32)
    return int((trainer.detach().cpu().view(torch.uint8) != reported.view(torch.uint8)).sum())


def train(
    trainer: ForRL,
    server: ForServing,
    prompts: Sequence[Sequence[int]],
    reward: Reward,
    *,
    steps: int,
    group: int = 8,
    rate: float = 1e-3,
    params: SamplingParams | None = None,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Yields a step's mean reward, differing bytes and loss."""
    params = params or SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    engine = Engine(server, seed=seed)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=rate, weight_decay=0.0)
    device = next(trainer.parameters()).device
    for step in range(1, steps + 1):
        records = engine.generate(prompts, params, n=group)
        fingerprint = trainer.fingerprint()
        stale = [record.request_id for record in records if not record.on_policy(fingerprint)]
        assert not stale, f"drawn by other weights than the trainer's: {stale}"
        rewards = [reward(record) for record in records]
        ids, cu_seqlens, drawn = packed(records, device)
        scored = trainer.score(ids, cu_seqlens, sampling=[record.sampling for record in records])
        differing = sum(differing_bytes(scored[rows], record.filtered_log_probs) for rows, record in zip(drawn, records, strict=True))
        gained = advantages(rewards, group).to(device)
        loss = -torch.stack([scored[rows].mean() * gained[i] for i, rows in enumerate(drawn)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.update_weights(trainer.published_tensors(), version=f"step {step}")
        yield {"step": step, "reward": sum(rewards) / len(rewards), "differing_bytes": differing, "loss": float(loss.detach())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or hub id; without one, a tiny random checkpoint")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's learning rate; 1e-6 is usual for a real model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make_tiny("qwen3", Path(folder) / "tiny"))
        trainer = zoo.load(model, role="rl", device=given.device, master_dtype=torch.float32)
        server = zoo.load(model, role="serving", device=given.device)
        assert isinstance(trainer, ForRL) and isinstance(server, ForServing)
        prompts = [[1, 40, 50, 60], [1, 7, 8, 9], [1, 300, 200, 100], [1, 11, 13, 17]]
        for row in train(trainer, server, prompts, even_tokens, steps=given.steps, group=given.group, rate=given.rate, seed=given.seed):
            told = f"reward {row['reward']:.3f}  differing bytes {row['differing_bytes']:.0f}  loss {row['loss']:+.4f}"
            print(f"step {row['step']:3.0f}  {told}")


if __name__ == "__main__":
    main()
