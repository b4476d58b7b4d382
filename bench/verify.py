"""Answers/s of the Verifier next to Math-Verify in a plain loop: python -m bench.verify"""

import json
import logging
from functools import partial
from pathlib import Path
from statistics import median

from math_verify import parse, verify

from bench.measure import goal, markdown_table, print_section, ratio, spread, take_turns, timed
from verify import Verifier

# example_model_solutions.jsonl of github.com/openai/grade-school-math
SOLUTIONS = Path("../shared/data/gsm8k_model_solutions.jsonl")
HOSTILE = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{1000000!}",
    r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}",
    r"\boxed{(x+y+z+w)^{500}}",
    r"\boxed{\prod_{i=1}^{10^{9}} i}",
    r"\boxed{" + r"\sqrt{" * 800 + "2" + "}" * 800 + "}",
    r"\boxed{\sin(\sin(10^{10^{10}}))}",
    r"\boxed{\sum_{n=1}^\infty \frac{\log(n)^7}{n^\pi+\sqrt{n}}}",  # only the deadline ends it
)


def main(solutions: Path = SOLUTIONS, limit: int = 2048, repetitions: int = 5) -> list[str]:
    """Measure with so many of the solutions; returns Markdown."""
    logging.disable(logging.CRITICAL)
    pairs = []
    for line in solutions.open():
        row = json.loads(line)
        answer = row["ground_truth"].rpartition("A: ")[2]
        pairs += [(row[key]["solution"], answer) for key in row if "is_correct" in row[key]]
    completions, answers = map(list, zip(*pairs[:limit], strict=True))
    mixed = list(completions)
    for n, index in enumerate(range(50, len(mixed), 100)):  # 1 %, evenly spread
        mixed[index] = HOSTILE[n % len(HOSTILE)]

    def plain() -> list[bool]:
        pairs = zip(completions, answers, strict=True)
        return [verify(parse(answer), parse(completion)) for completion, answer in pairs]

    def score(texts: list[str]) -> list[bool]:
        verdicts = verifier.score(texts, answers)
        for worker in verifier.workers:  # new ones in the place of those that had to be killed
            worker.wait_until_ready()
        return verdicts

    with Verifier(num_workers=2) as verifier:
        verdicts = score(completions)
        agree = sum(a == b for a, b in zip(verdicts, plain(), strict=True))
        calls = {
            "Math-Verify in a plain loop": partial(timed, plain),
            "`Verifier`, 2 workers": lambda: timed(lambda: score(completions)),
            "the same, 1 % hostile": lambda: timed(lambda: score(mixed)),
        }
        measured = take_turns(calls, repetitions)
    loop, clean, hostile = measured.values()
    rows = []
    for name, seconds in measured.items():
        rate = f"{len(answers) / median(seconds):,.0f}"
        rows.append([name, spread(seconds, ".2f"), rate, ratio(loop, seconds)])
    return [
        f"{len(answers):,} solutions of GSM8K by language models; {agree:,} verdicts are the same. "
        f"The hostile answers are of {len(HOSTILE)} kinds.",
        markdown_table(["", "s", "answers/s", "faster than the loop by"], rows),
        goal("answers/s", "a plain loop", ratio(loop, clean), "≥ 1.5"),
        goal("s with 1 % hostile", "without", ratio(hostile, clean), "≤ 3"),
    ]


if __name__ == "__main__":
    print_section(main, __doc__)
