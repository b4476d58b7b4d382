"""A whole step of OSW-FT (K=2) and of GRPO (G=8) beside TRL's trainers: python -m bench.peers"""

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import transformers

import train_oswft
from bench.measure import Worker, goal, markdown_table, print_section, ratio, take_turns
from bench.setup import BASE, make_setup, tiny_base, tiny_examples, training_step
from engine import init_ranks, share_cores
from rollout import Rollout
from run import Stopwatch
from verify import Verifier

QUERIES, MAX_LENGTH, MAX_TOKENS = 128, 128, 48
SAMPLES = {"oswft": 2, "grpo": 8}
WHOLE_DISTRIBUTION = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}

Measure = Callable[[], dict[str, float]]  # s of a step: "sample" (sync, verify too), "update"


class Clock(transformers.TrainerCallback):
    """Seconds of a trainer's steps by phase."""

    def __init__(self):
        self.watch = Stopwatch()

    def on_epoch_begin(self, *_, **__) -> None:
        self.watch.lap(None)

    def on_sampled(self) -> None:
        self.watch.lap("sample")

    def on_step_end(self, *_, **__) -> None:
        self.watch.lap("update")


def count_tokens(rollout: Rollout) -> list[int]:
    """A list that gets the number of tokens of every later call of `rollout.generate`."""
    generate, counts = rollout.generate, []

    def counted(*args, **options) -> list:
        completions = generate(*args, **options)
        counts.append(sum(len(completion.token_ids) for completion in completions))
        return completions

    rollout.generate = counted
    return counts


def prepare_ours(base: Path, method: str, steps: int) -> Measure:
    """Measures the step of train_oswft.py or of train_grpo.py."""
    rows = tiny_examples(base)[1]
    setup = make_setup(base / "model", MAX_LENGTH)
    counts = count_tokens(setup.rollout)

    def measure() -> dict[str, float]:
        counts.clear()
        phases = Counter()
        for start in range(0, steps * QUERIES, QUERIES):
            queries = rows[start : start + QUERIES]
            phases.update(training_step(method, setup, queries, SAMPLES[method], MAX_TOKENS))
        update = phases.pop("train")
        return per_step(steps, sum(phases.values()), update, counts)

    return measure


def per_step(steps: int, sample: float, update: float, counts: list[int]) -> dict[str, float]:
    return {"sample": sample / steps, "update": update / steps, "tokens": sum(counts) / steps}


def measure_trainer(trainer, clock: Clock, counts: list[int], steps: int) -> Measure:
    """Measures the steps of an epoch."""

    def measure() -> dict[str, float]:
        counts.clear()
        trainer.train()
        return per_step(steps, **clock.watch.read(), counts=counts)

    return measure


def trl_settings(folder: str, micro_batch: int, samples: int) -> dict:
    """What both of TRL's trainers get; a step has QUERIES times `samples` rows."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": QUERIES * samples // micro_batch,
        "num_train_epochs": 1,
        "learning_rate": 1e-12,
        "lr_scheduler_type": "constant",
        "remove_unused_columns": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def prepare_trl_oswft(base: Path, steps: int, vllm: bool) -> Measure:
    """Measures recipes/trl_sft.py with vLLM, or with transformers' `generate` for all at once."""
    import datasets  # here, as the processes that measure ours do not need them
    import trl

    from recipes.trainer_run import RolloutWeights
    from recipes.trl_sft import WeightedSFTTrainer

    share_cores()
    model, (tokenizer, examples) = str(base / "model"), tiny_examples(base)
    rows, k, clock = examples[: steps * QUERIES], SAMPLES["oswft"], Clock()
    verifier = Verifier(num_workers=2)

    @torch.no_grad()
    def weigh_by_generate(model, queries, seed) -> torch.Tensor:
        torch.manual_seed(seed)
        model.eval()
        prompts = {"input_ids": [query.prompt_ids for query in queries]}
        inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        sampling = {"do_sample": True, "num_return_sequences": k, "max_new_tokens": MAX_TOKENS}
        ids = model.generate(**inputs, **sampling, **WHOLE_DISTRIBUTION)
        ids = ids[:, inputs.input_ids.shape[1] :]  # (B * K, T)
        counts.append((ids != tokenizer.pad_token_id).sum().item())
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        verdicts = verifier.score(texts, [query.answer for query in queries for _ in range(k)])
        return 1 - torch.tensor(verdicts).float().view(-1, k).mean(dim=1)

    weigh, counts = weigh_by_generate, []
    if vllm:
        init_ranks("gloo")
        args = train_oswft.Args(model=model, data="", precision="fp32")
        rollout = Rollout(args, tokenizer, MAX_LENGTH)
        weigh, counts = RolloutWeights(rollout, verifier, k, MAX_TOKENS), count_tokens(rollout)

    def timed_weigh(*args) -> torch.Tensor:
        weights = weigh(*args)
        clock.on_sampled()
        return weights

    columns = {
        "input_ids": [[*row.prompt_ids, *row.completion_ids] for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + row.completion_ids.tolist() for row in rows],
        "answer": [row.example.answer for row in rows],
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = WeightedSFTTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(model),
            trl.SFTConfig(**trl_settings(folder, 128, 1), max_length=None),
            weigh=timed_weigh,
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    return measure_trainer(trainer, clock, counts, steps)


def prepare_trl_grpo(base: Path, steps: int) -> Measure:
    """Measures TRL's GRPOTrainer, which samples by transformers' `generate`, all at once."""
    import datasets
    import trl

    share_cores()
    tokenizer, examples = tiny_examples(base)
    rows, clock, counts = examples[: steps * QUERIES], Clock(), []
    verifier = Verifier(num_workers=2)

    def reward(completions, completion_ids, answer, **_) -> list[float]:
        verdicts = verifier.score(completions, answer)
        counts.append(sum(map(len, completion_ids)))
        clock.on_sampled()
        return [float(verdict) for verdict in verdicts]

    columns = {
        "prompt": [tokenizer.decode(row.prompt_ids) for row in rows],
        "answer": [row.example.answer for row in rows],
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(base / "model"),
            reward,
            trl.GRPOConfig(
                **trl_settings(folder, 256, SAMPLES["grpo"]),
                num_generations=SAMPLES["grpo"],
                max_completion_length=MAX_TOKENS,
                loss_type="dapo",
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
            ),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    return measure_trainer(trainer, clock, counts, steps)


def main(base: Path = BASE, repetitions: int = 7, steps: int = 2) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many steps. Returns Markdown."""
    tiny_base(base)
    cases = {
        "`train_oswft.py`": Worker(prepare_ours, base, "oswft", steps),
        "TRL's SFTTrainer, our weights, `generate`": Worker(prepare_trl_oswft, base, steps, False),
        "TRL's SFTTrainer, our weights, vLLM": Worker(prepare_trl_oswft, base, steps, True),
        "`train_grpo.py`": Worker(prepare_ours, base, "grpo", steps),
        "TRL's GRPOTrainer, `generate`": Worker(prepare_trl_grpo, base, steps),
    }
    measured = take_turns(cases, repetitions)
    whole = {n: [turn["sample"] + turn["update"] for turn in m] for n, m in measured.items()}
    oswft, by_generate, by_vllm, grpo, trl_grpo = cases
    rows = []
    for name, turns in measured.items():
        ours = whole[oswft if name in (oswft, by_generate, by_vllm) else grpo]
        sample, update, tokens = (
            median(turn[key] for turn in turns) for key in ("sample", "update", "tokens")
        )
        row = [name, f"{sample:.3f}", f"{update:.3f}", f"{median(whole[name]):.3f}"]
        rows.append([*row, f"{tokens:,.0f}", f"{ratio(whole[name], ours):.2f}"])
    header = ["s a step", "sync, sample, verify", "update", "step", "tokens sampled"]
    return [
        f"The demo's model and data, {QUERIES} queries, fp32, one process with all cores; OSW-FT "
        "with K = 2, GRPO with G = 8. TRL at its fastest settings of those tried: all rows sampled "
        "at once, 128 (SFT) and 256 (GRPO) to a pass of an update. Our `Verifier` checks all. "
        "TRL's vLLM in its own process (colocate) does not run on a CPU: vLLM packs the weights "
        "there, and TRL loads new ones into what was packed.",
        markdown_table([*header, "ours is faster by"], rows),
        "\n".join(
            goal(f"{ours} is faster than {name} by", ratio(whole[name], whole[ours]), bound)
            for name, ours, bound in (
                (by_generate, oswft, "≥ 3"),
                (by_vllm, oswft, "≥ 1.5"),
                (trl_grpo, grpo, "≥ 3"),
            )
        ),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
