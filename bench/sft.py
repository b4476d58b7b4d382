"""The optimizer step of train_sft.py beside TRL's SFTTrainer: python -m bench.sft"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import transformers

import train_sft
from bench.measure import Worker, goal, markdown_table, print_section, ratio, take_turns, timed
from bench.setup import BASE, random_rows, tiny_base
from data import TokenizedExample
from engine import init_distributed, load_engine

LENGTHS = "prompts of 16 to 48 tokens, solutions log-normal about 80, at most 440"


def mixed_rows(batches: int) -> list[TokenizedExample]:
    """128 rows for each batch, with LENGTHS."""
    rng, count = np.random.default_rng(0), 128 * batches
    prompts = rng.integers(16, 49, count)
    solutions = np.minimum(rng.lognormal(np.log(80), 0.8, count).astype(int) + 1, 440)
    lengths = zip(prompts.tolist(), solutions.tolist(), strict=True)
    return random_rows(list(lengths), range(8, 27))


def prepare_ours(model: str, batches: int) -> Callable[[], float]:
    """Measures tokens/s of the optimizer step of train_sft.py on 128 rows."""
    init_distributed()
    args = train_sft.Args(model=model, data="", max_length=512, precision="fp32")
    rows = mixed_rows(batches)
    engine = load_engine(args)

    def step(batch: int) -> None:
        train_sft.update(engine, rows[128 * batch : 128 * batch + 128], args)

    def measure() -> float:
        seconds = sum(timed(lambda n=n: step(n)) for n in range(batches))
        return sum(map(len, rows)) / seconds

    return measure


def prepare_trl(model: str, batches: int, micro_batch: int, sampling: str) -> Callable[[], float]:
    """Measures tokens/s of TRL's SFTTrainer on the same rows, 128 to an optimizer step."""
    import datasets  # both here, as the process that measures ours does not need them
    import trl

    rows = mixed_rows(batches)
    ids = [row.prompt_ids + row.completion_ids for row in rows]
    labels = [[-100] * len(row.prompt_ids) + row.completion_ids for row in rows]
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            times.append(time.perf_counter())

        on_train_end = on_step_begin

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
            train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": labels}),
            callbacks=[Clock()],
            args=trl.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=128 // micro_batch,
                train_sampling_strategy=sampling,
                max_steps=batches,
                max_length=512,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                bf16=False,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )

    def measure() -> float:
        times.clear()
        trainer.train()
        return sum(map(len, rows)) / (times[-1] - times[0])

    return measure


def main(base: Path = BASE, repetitions: int = 5, batches: int = 6) -> list[str]:
    """Measure with the tiny model in `base`; a turn has so many batches. Returns Markdown."""
    model = str(tiny_base(base) / "model")
    cases = {
        "`train_sft.py`, one rank": Worker(prepare_ours, model, batches),
        "TRL, 128 rows at once": Worker(prepare_trl, model, batches, 128, "random"),
        "TRL, 32 rows at once": Worker(prepare_trl, model, batches, 32, "random"),
        "TRL, 32 at once, grouped by length": Worker(
            prepare_trl, model, batches, 32, "group_by_length"
        ),
    }
    measured = take_turns(cases, repetitions)
    ours, *others = measured.values()
    rows = [[n, f"{median(r):,.0f}", f"{ratio(ours, r):.2f}"] for n, r in measured.items()]
    return [
        "Tiny model (0.4M parameters), fp32, 128 rows to an optimizer step, padding not counted; "
        f"{LENGTHS}.",
        markdown_table(["", "tokens/s", "ours is faster by"], rows),
        goal("ours ÷ TRL's fastest", min(ratio(ours, rates) for rates in others), "≥ 1.3"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
