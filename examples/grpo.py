"""Group-relative policy optimisation (GRPO) at zero train-inference mismatch.

    python examples/grpo.py                                     # a tiny random model on the CPU, under a minute
    python examples/grpo.py --model PATH --device cuda          # any checkpoint that the zoo loads, with the embedded engine
    python examples/grpo.py --model PATH --server http://127.0.0.1:30000   # the same against a stock SGLang with the plugin

The server is another process: `python -m sglang.launch_server --model-path PATH --attention-backend zoo --skip-tokenizer-init`.

The task is a toy: a token earns 1 if its id is even. Every step samples a group of completions a prompt, scores them with the trainer,
counts the bytes in which trainer and sampler differ (0), takes one step of AdamW on FP32 masters, and hands the weights to the sampler.

The objective is that of DeepSeekMath (section 4.1): a completion's advantage is its reward less the mean of its group, over the group's
standard deviation; each token's is clipped by its ratio of probabilities, trainer over sampler. With one step a batch and equal bytes every
ratio is exactly 1 and nothing is clipped. K3 is Schulman's estimate of the divergence between the two: the mean of ratio - 1 - log(ratio).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.rollouts import Completion, SamplingParams, pack
from zoo.common.rollouts.curves import Listener, TensorBoard, mismatch, partial
from zoo.common.serving import ForServing
from zoo.common.threads import suited
from zoo.common.training import ForRL
from zoo.sglang_plugin import Server

Reward = Callable[[Completion], float]
CLIP = 0.2


def even_tokens(record: Completion) -> float:
    """The share of even ids among the drawn tokens."""
    return sum(token % 2 == 0 for token in record.output_ids) / len(record.output_ids)


def advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Of each completion within its group; zero where a group's rewards are all alike."""
    by_group = torch.tensor(rewards).view(-1, group)
    centred = by_group - by_group.mean(1, keepdim=True)
    return (centred / (by_group.std(1, keepdim=True) + 1e-6)).flatten()


def train(
    trainer: ForRL,
    sampler: Engine | Server,
    prompts: Sequence[Sequence[int]],
    reward: Reward,
    *,
    steps: int,
    group: int = 8,
    rate: float = 1e-3,
    params: SamplingParams | None = None,
    curves: Listener | None = None,
) -> Iterator[dict[str, float]]:
    """Yields a step's mean reward, the bytes in which trainer and sampler differ, K3, share of clipped tokens and loss.

    `curves.on_step` is given the same under the names that other trainers use, so that runs lie beside each other.
    """
    params = params or SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=rate, weight_decay=0.0, fused=True)
    for step in range(1, steps + 1):
        records = sampler.generate(prompts, params, n=group)
        mine = trainer.weights_version
        stale = [record.request_id for record in records if set(record.output_versions) != {mine}]
        assert not stale, f"drawn by other weights than the trainer's: {stale}"
        rewards = [reward(record) for record in records]
        batch = pack(records, trainer.device)
        scored = trainer.score(batch.ids_R, batch.cu_seqlens, sampling=batch.sampling)
        log_ratio = torch.where(batch.drawn_R, scored - batch.sampled_R, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        shares = advantages(rewards, group) / torch.tensor([len(record.output_ids) * len(records) for record in records])
        weight = batch.spread(shares)
        loss = -torch.minimum(ratio * weight, clipped * weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.update_weights(trainer.published_tensors(aliases=False))
        drawn = batch.drawn_R
        mean = sum(rewards) / len(rewards)
        if curves is not None:
            apart = mismatch(batch, scored, (1 - CLIP, 1 + CLIP))
            curves.on_step({"step": step, "rollout/reward": mean, "train/loss": float(loss.detach()), **apart, **partial(records)})
        yield {
            "step": step,
            "reward": mean,
            "differing_bytes": batch.differing_bytes(scored),
            "k3": float((ratio - 1 - log_ratio).detach()[drawn].mean()),
            "clip_ratio": float((ratio != clipped)[drawn].float().mean()),
            "loss": float(loss.detach()),
        }


def told(row: dict[str, float]) -> str:
    """A step as a line."""
    mismatch = f"differing bytes {row['differing_bytes']:.0f}  K3 {row['k3']:.1e}  clipped {row['clip_ratio']:.1%}"
    return f"step {row['step']:3.0f}  reward {row['reward']:.3f}  {mismatch}  loss {row['loss']:+.4f}"


def positive(text: str) -> float:
    """A finite number above 0, as an argument."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, not {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder or hub id; without one, a tiny random checkpoint")
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--server", help="address of a stock SGLang with the plugin that serves --model; without one, the embedded engine")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--rate", type=positive, default=1e-3, help="AdamW's learning rate; 1e-6 is usual for a real model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON a step")
    parser.add_argument("--curves", type=Path, help="a folder that gets curves for TensorBoard")
    given = parser.parse_args(arguments)
    if given.server and not given.model:
        parser.error("--server needs --model, the checkpoint that it was started with")
    try:
        curves = None if given.curves is None else TensorBoard(given.curves)
    except ValueError as error:
        parser.error(f"--curves: {error}")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make_tiny("qwen3", Path(folder) / "tiny"))
        trainer = zoo.load(model, role="rl", device=given.device, master_dtype=torch.float32)
        assert isinstance(trainer, ForRL)
        sampler: Any = Server(given.server, seed=given.seed) if given.server else embedded(model, given.device, given.seed)
        prompts = [[1, 40, 50, 60], [1, 7, 8, 9], [1, 300, 200, 100], [1, 11, 13, 17]]
        with suited(trainer):
            rows = train(trainer, sampler, prompts, even_tokens, steps=given.steps, group=given.group, rate=given.rate, curves=curves)
            for row in rows:
                print(told(row), flush=True)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def embedded(model: str, device: str | None, seed: int) -> Engine:
    server = zoo.load(model, role="serving", device=device)
    assert isinstance(server, ForServing)
    return Engine(server, seed=seed)


if __name__ == "__main__":
    main()
