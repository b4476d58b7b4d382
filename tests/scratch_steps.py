"""Run by test_from_scratch.py: a step of demo/from_scratch.py beside one of each real script.

The answers are those that from_scratch sampled; batch, verdicts and settings are its own.
"""

import argparse
import sys
from pathlib import Path

import train_grpo
import train_oswft
import train_sft
from demo import from_scratch
from engine import Engine, finish, init_distributed

import torch
from transformers import AutoModelForCausalLM


def take_step(method: str, base: Path) -> tuple[torch.nn.Module, list]:
    """from_scratch's own step; returns the model, and what its loss was computed from."""
    calls, models = [], []
    compute_loss = from_scratch.compute_loss

    def compute_and_keep(method, model, *batch):
        calls.append(batch)
        models.append(model)
        return compute_loss(method, model, *batch)

    from_scratch.compute_loss = compute_and_keep
    from_scratch.evaluate = lambda *_: {"gain": 0.0, "retention": 0.0}
    args = {"method": method, "steps": 1, "seed": 0, "model": base / "model"}
    heldout = [base / "heldout" / "hard.jsonl"]
    args |= {"data": base / "train.jsonl", "gain": heldout, "retention": heldout}
    from_scratch.main(argparse.Namespace(**args))
    from_scratch.compute_loss = compute_loss
    [model], [batch] = models, calls
    return model, batch


def take_real_step(method: str, base: Path, queries: list, answers: list, rewards) -> Engine:
    """That of the real script, from the same answers."""
    script = {"sft": train_sft, "oswft": train_oswft, "grpo": train_grpo}[method]
    settings = {"model": str(base / "model"), "data": "", "precision": "fp32"}
    args = script.Args(**settings, learning_rate=from_scratch.LEARNING_RATE)
    engine = Engine(AutoModelForCausalLM.from_pretrained(base / "model"), precision="fp32")
    if method == "sft":
        train_sft.update(engine, [as_trajectory(row) for row in queries], args.learning_rate)
    elif method == "oswft":
        weights = train_oswft.oswft_weights(rewards)
        assert {0.0, 0.5, 1.0} == set(weights.tolist())
        train_oswft.update(engine, [as_trajectory(row) for row in queries], weights, args)
    else:
        advantages = train_grpo.grpo_advantages(rewards)
        assert (advantages == 0).all(dim=1).any() and (advantages != 0).any()
        train_grpo.update(engine, [as_trajectory(row) for row in answers], advantages, None, args)
    return engine


def as_trajectory(row: from_scratch.Row) -> train_grpo.Trajectory:
    return train_grpo.Trajectory(row.question, row.prompt_ids, row.completion_ids)


if __name__ == "__main__":
    base = Path(sys.argv.pop())
    init_distributed()
    from_scratch.BATCH_SIZE = 32
    start = AutoModelForCausalLM.from_pretrained(base / "model").state_dict()
    for method in from_scratch.NUM_ROLLOUTS:
        model, batch = take_step(method, base)
        engine = take_real_step(method, base, *batch)
        ours, steps, off = model.state_dict(), [], []
        for name, weight in engine.named_weights():
            steps.append((weight - start[name]).flatten())
            off.append((weight - ours[name]).flatten())
        # Adam divides by a gradient's size: where that is rounding alone, it may step elsewhere.
        share = (torch.cat(off).norm() / torch.cat(steps).norm()).item()
        assert share < 0.01, (method, share)
        print("equal:", method, share, flush=True)
    finish(0)
