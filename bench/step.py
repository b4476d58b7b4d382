"""Whole steps of SFT, OSW-FT (K = 2) and GRPO (G = 4) beside TRL's: python -m bench.step

On a real model and real word problems: runs/real/sft/final and data/svamp-train.jsonl of
docs/demo.md. In bf16 TRL's models are bf16 throughout; ours also keep fp32 weights. GRPO by TRL
samples with `generate`: with TRL's vLLM its steps took 30 % longer (fp32, AVX2, two turns).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.measure import compare, print_section, timed
from bench.parts import DATA, MAX_LENGTH, MAX_TOKENS, MODEL, QUERIES, load_rows
from cpu import bf16_is_slow, share_cores
from data import InputError, Query
from models import load_tokenizer
from ranks import init_ranks
from recipes.oswft_mixin import GenerateWeights
from recipes.trainer_run import RolloutWeights, to_columns
from recipes.trl_sft import WeightedSFTTrainer
from rollout import Rollout, RolloutArgs
from verify import Verifier

import torch
import transformers
import trl
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

# Of all of TRL's trainers. The learning rate is so small that the model hardly moves.
SETTINGS = {"num_train_epochs": 1, "learning_rate": 1e-12, "remove_unused_columns": False}
SETTINGS |= {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
SETTINGS |= {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
SETTINGS |= {"output_dir": tempfile.gettempdir()}  # nothing is saved
AT_ONCE = 8  # rows to a micro-batch
PRECISION = "fp32" if bf16_is_slow() else "bf16"
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}[PRECISION]
load = partial(AutoModelForCausalLM.from_pretrained, dtype=DTYPE)
COLD = 2  # a process's first steps, which are slower and do not count


def warm_steps(script: str, steps: int = 1, **flags) -> list[dict[str, float]]:
    """The seconds by phase of a training script's steps after `COLD` others."""
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"output_dir": f"{folder}/run", "max_steps": COLD + steps}
        flags |= {"precision": PRECISION, "learning_rate": 1e-12}  # the model hardly moves
        command = [sys.executable, script]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True)
        rows = Path(folder, "run", "metrics.jsonl").read_text().splitlines()[COLD:]
    return [{k: v for k, v in json.loads(row).items() if k.endswith("_s")} for row in rows]


def step_seconds(script: str, seed: int, **flags) -> float:
    flags |= {"max_length": MAX_LENGTH, "max_completion_length": MAX_TOKENS, "seed": seed}
    return sum(warm_steps(script, **flags)[0].values())


def plain_loop(model: Path, rows: list[Query]) -> Callable:
    """Seconds of a step of SFT as one would write it, on padded rows of similar length."""
    learner, ordered = load(model), sorted(rows, key=len)
    adam = torch.optim.AdamW(learner.parameters(), lr=1e-12, weight_decay=0.0, fused=True)

    def step() -> None:
        for start in range(0, len(ordered), AT_ONCE):
            columns = to_columns(ordered[start : start + AT_ONCE])
            ids, labels = (
                pad_sequence([*map(torch.tensor, columns[name])], True, fill)
                for name, fill in (("input_ids", 0), ("labels", -100))
            )
            loss = learner(input_ids=ids, labels=labels, use_cache=False).loss
            (loss * len(ids) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return partial(timed, step)


# ---- TRL's trainers ------------------------------------------------------------------------------


def batch(rows: int, at_once: int = AT_ONCE) -> dict[str, int]:
    """A step of so many rows."""
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": rows // at_once}


def make_trainer(trainer_class: type, model: Path, columns: dict, config, **more):
    """One of TRL's trainers, and the clock that sees its steps."""
    more |= {"train_dataset": Dataset.from_dict(columns), "callbacks": [clock := Clock()]}
    more |= {"processing_class": load_tokenizer(str(model))}
    return trainer_class(load(model), args=config, **more), clock


def one_step(trainer, clock: "Clock", seed: int) -> float:
    """Seconds of an epoch of one step."""
    trainer.args.seed = seed
    transformers.set_seed(seed)
    trainer.train()
    return clock.seconds[0]


class Clock(transformers.TrainerCallback):
    """Seconds of each step of the last epoch, without the preparations."""

    def on_epoch_begin(self, *_, **__) -> None:
        self.seconds, self.began = [], time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now


def by_vllm(model: Path) -> Callable:
    """Weights from two answers of vLLM in this process, as rollout.py sets it up."""
    init_ranks("gloo")
    options = RolloutArgs(max_length=MAX_LENGTH, vllm_memory=0.2, precision=PRECISION)
    rollout = Rollout(str(model), load_tokenizer(str(model)), options)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of this process, not of the runs it starts
        del os.environ[name]
    return RolloutWeights(rollout, Verifier(num_workers=2), 2, MAX_TOKENS)


def by_generate(model: Path) -> Callable:
    """Weights from two answers of transformers' `generate`, which ends with the longest."""
    tokenizer, verifier = load_tokenizer(str(model)), Verifier(num_workers=2)
    return GenerateWeights(tokenizer, verifier, 2, MAX_TOKENS, chunk_size=QUERIES)


def make_grpo_trainer(model: Path, rows: list[Query], answers: int, **options):
    """`options` are of TRL's config; a batch is what one step trains on."""
    tokenizer, verifier = load_tokenizer(str(model)), Verifier(num_workers=2)

    def reward(completions: list, answer: list, **_) -> list[float]:
        return [float(verdict) for verdict in verifier.score(completions, answer)]

    columns = {"prompt": [tokenizer.decode(row.prompt_ids) for row in rows]}
    columns["answer"] = [row.example.answer for row in rows]
    options |= {"num_generations": answers, "top_k": 0}
    config = trl.GRPOConfig(**options, **SETTINGS)
    return make_trainer(trl.GRPOTrainer, model, columns, config, reward_funcs=reward)


# ---- The page ------------------------------------------------------------------------------------


def main(model: Path = MODEL, data: Path = DATA, repetitions: int = 5) -> Iterator[str]:
    """Measure; yields Markdown, table by table."""
    if torch.cuda.is_available():  # ours would use it; the plain loop and `generate` would not
        raise InputError("this comparison is for machines without a GPU: take bench.gpu")
    share_cores()
    ours, part = partial(step_seconds, model=model, data=data), load_rows(model, data)[:QUERIES]
    sampled = partial(ours, rollout_batch_size=QUERIES)

    def trl_sft(trainer: type = trl.SFTTrainer, **more) -> Callable:
        config = trl.SFTConfig(max_length=None, **batch(QUERIES), **SETTINGS)
        config.train_sampling_strategy = "group_by_length"
        return partial(one_step, *make_trainer(trainer, model, to_columns(part), config, **more))

    yield "## step"
    yield (
        f"SmolLM2-135M-Instruct after an epoch of SFT, real word problems, {PRECISION}, "
        f"{QUERIES} queries a step, answers of at most {MAX_TOKENS} tokens; TRL + vLLM is set up "
        "as rollout.py."
    )
    sft = {
        "`train_sft.py`": partial(ours, "train_sft.py", train_batch_size=QUERIES),
        "TRL's SFTTrainer": trl_sft(),
        "a plain loop": plain_loop(model, part),
    }
    yield compare("SFT, s", sft, repetitions, {"a plain loop": 0.97})
    del sft  # its models
    oswft = {
        "`train_oswft.py`": partial(sampled, "train_oswft.py"),
        "TRL + vLLM": trl_sft(WeightedSFTTrainer, weigh=by_vllm(model)),
        "TRL + `generate`": trl_sft(WeightedSFTTrainer, weigh=by_generate(model)),
    }
    yield compare("OSW-FT, s", oswft, repetitions, {"TRL + vLLM": 1.3, "TRL + `generate`": 4})
    del oswft
    options = {"max_completion_length": MAX_TOKENS, **batch(4 * QUERIES)}
    grpo = {
        "`train_grpo.py`": partial(sampled, "train_grpo.py", num_rollouts=4),
        "TRL + `generate`": partial(one_step, *make_grpo_trainer(model, part, 4, **options)),
    }
    yield compare("GRPO, s", grpo, max(1, repetitions // 2), {"TRL + `generate`": 4})


if __name__ == "__main__":
    print_section(main, __doc__)
