"""Training runs to look at: one HTML file with curves, weights, and every answer to every query.

    python -m paper.view runs/oswft                                       # to runs/view.html
    python -m paper.view runs/sft runs/oswft runs/grpo --output all.html  # beside each other

The file needs no network, and nothing that a model wrote is ever run in it. Questions and solutions
come from the training file that the run names, the tokens' texts from its tokenizer, if they are
still there. A run that is still going on is shown as far as it is.
"""

import base64
import gzip
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.figure import Figure

from data import (
    Example,
    InputError,
    atomic_write,
    hash_examples,
    load_examples,
    load_tokenizer,
    read_rows,
    tokenize_examples,
)
from paper.plot import FIGURES, STYLE, draw_figures, read_runs
from run import checkpoints, read_args
from verify import extract

FIELDS = ("id", "query", "pass_rate", "text", "token_ids", "finish_reason")  # of an answer
QUESTION_CHARS = 300  # of a question in the table
BARS = 60  # of a histogram over time, at most


@dataclass
class ViewedRun:
    label: str
    folder: Path
    args: dict
    examples: dict[str, Example] = field(default_factory=dict)  # by id
    decode: Callable[[tuple[int, ...]], str] | None = None  # token ids to text
    missing: str = ""  # what cannot be shown, and why


def open_run(label: str, folder: Path) -> ViewedRun:
    """A run with its tokenizer and its examples, if they are there. Raises InputError."""
    record = read_args(folder)
    if "args" not in record:
        raise InputError(f"{folder}: has no args.json of a training run")
    run, args = ViewedRun(label, folder, record["args"]), record["args"]
    if not any(folder.glob("rollouts/*.jsonl")):
        return run
    saved = [folder / "final", *reversed(checkpoints(folder).values())]
    model = next((path for path in saved if path.is_dir()), args["model"])
    try:
        tokenizer = load_tokenizer(str(model))
        run.decode = cache(tokenizer.decode)
        lengths = (args["max_length"], args["max_completion_length"])
        kept, _ = tokenize_examples(load_examples(args["data"]), tokenizer, *lengths)
        if hash_examples(kept) != record.get("data_hash"):
            raise InputError(f"{args['data']} or the prompt is not what it was in the run")
        run.examples = {row.id: row.example for row in kept}
    except (ValueError, OSError) as error:
        run.missing = f"no questions and no solutions: {str(error).splitlines()[0]}"
    return run


def batches(folder: Path) -> Iterator[tuple[int, list[list[dict]]]]:
    """Yield (first step, the answers to each query) of every batch of a run. Raises InputError."""
    steps = {int(path.stem.removeprefix("step_")): path for path in folder.glob("rollouts/*.jsonl")}
    for step, path in sorted(steps.items()):
        rows = []
        for where, row in read_rows(str(path)):
            verdict = "reward" if "reward" in row else "correct"
            if missing := {*FIELDS, verdict} - row.keys():
                raise InputError(f"{where}: no {', '.join(sorted(missing))}")
            rows.append({**row, "reward": float(row[verdict])})
        yield step, [list(answers) for _, answers in groupby(rows, lambda row: row["query"])]


# ------------------------------------------------------------------------------------------------
# One query


def summarize(run: ViewedRun, step: int, answers: list[dict]) -> dict:
    """A query's row of the table; None is what the run has nothing of."""
    first, example = answers[0], run.examples.get(answers[0]["id"])
    advantages = [abs(answer["advantage"]) for answer in answers if "advantage" in answer]
    return {
        "run": run.label,
        "step": step,
        "newest": None,  # of the newest answers to this query: how many are right
        "id": first["id"],
        "source": example and example.source,
        "question": example and example.question[:QUESTION_CHARS],
        "p̂": round(first["pass_rate"], 4),
        "w": round(first["weight"], 4) if "weight" in first else None,
        "mean |A|": round(float(np.mean(advantages)), 4) if advantages else None,
        "tokens": round(float(np.mean([len(answer["token_ids"]) for answer in answers]))),
        "cut off": sum(answer["finish_reason"] == "length" for answer in answers),
    }


def explain(run: ViewedRun, answers: list[dict]) -> list[dict]:
    """What a click on a query shows, in blocks: why it counts, its example, its answers."""
    example = run.examples.get(answers[0]["id"])
    shown = [{"title": "Why it counts as it does", "text": reason(run, answers)}]
    if example:
        solution = f"The expert's solution · reference: {example.answer}"
        shown.append({"title": "Question", "text": example.question})
        shown.append({"title": solution, "text": example.solution})
    for number, answer in enumerate(answers, start=1):
        reward = answer["reward"]
        facts = [f"Answer {number}", {1: "right", 0: "wrong"}.get(reward, f"reward {reward:.4g}")]
        if example and not run.args.get("reward"):
            extracted = extract(answer["text"], example.answer)
            facts.append(f"extracted: {extracted}" if extracted else "no box: the end was read")
        if "advantage" in answer:
            facts.append(f"advantage {answer['advantage']:+.2f}")
        cut_off = ", cut off" if answer["finish_reason"] == "length" else ""
        facts.append(f"{len(answer['token_ids'])} tokens{cut_off}")
        block = {"title": " · ".join(facts), "kind": "right" if reward == 1 else "wrong"}
        if answer.get("logprobs") and run.decode:
            block["tokens"] = split_tokens(answer["token_ids"], answer["logprobs"], run.decode)
        else:
            block["text"] = answer["text"]
        shown.append(block)
    return shown


def reason(run: ViewedRun, answers: list[dict]) -> str:
    """Why a query counts as much as it does, in a sentence."""
    right = sum(answer["reward"] for answer in answers)
    said = f"{right:.4g} of {len(answers)} answers right: p̂ = {answers[0]['pass_rate']:.4g}"
    if "weight" in answers[0]:
        weighting, weight = run.args.get("weighting"), answers[0]["weight"]
        how = "w = 1 − p̂" if weighting == "oswft" else f"--weighting {weighting} gave w"
        return f"{said}, so the solution is learnt with weight {weight:.4g} ({how})"
    if any(answer.get("advantage") for answer in answers):
        return f"{said}. Each answer counts by its advantage: how much better than the group it is"
    return f"{said}. No answer is better than another, so nothing is learnt from them"


def split_tokens(
    ids: Sequence[int], logprobs: Sequence[float], decode: Callable[[tuple[int, ...]], str]
) -> list[tuple[str, float]]:
    """(text, log-probability) of each token; those that share a character stand together."""
    found, before, held, total = [], (), (), 0.0
    for token, logprob in zip(ids, logprobs, strict=True):
        held, total = (*held, token), total + logprob
        # after the token before it, as some tokenizers drop a leading space
        text = decode(before + held).removeprefix(decode(before))
        if not text.endswith("\ufffd") or len(held) == 4:  # a character has four bytes at most
            found.append((text or f"[{token}]", round(total, 2)))
            before, held, total = (token,), (), 0.0
    return [*found, ("\ufffd", round(total, 2))] if held else found


# ------------------------------------------------------------------------------------------------
# The page


def draw_weights(rows: Sequence[dict]) -> Figure:
    """A run's histogram over time: which share of the queries has which weight (GRPO: 1 - p̂)."""
    what = "1 − p̂" if rows[0]["w"] is None else "weight"
    steps = np.array([row["step"] for row in rows])
    weights = np.array([1 - row["p̂"] if row["w"] is None else row["w"] for row in rows])
    levels = np.unique(weights) if len(np.unique(weights)) <= 9 else np.linspace(0, 1, 11)
    nearest = np.abs(weights[:, None] - levels).argmin(axis=1)
    batches = np.unique(steps)
    starts = batches[:: -(-len(batches) // BARS)]
    bar = np.searchsorted(starts, steps, side="right") - 1
    counts = np.zeros((len(starts), len(levels)))
    np.add.at(counts, (bar, nearest), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    edges = [*starts, batches[-1] + np.diff(batches, prepend=batches[-1] - 1)[-1]]
    with plt.rc_context(STYLE):
        figure = plt.figure()
        axes = figure.subplots()
        tops = shares.cumsum(axis=1).T  # (levels, bars)
        for n, (level, top) in enumerate(zip(levels, tops, strict=True)):
            color = plt.get_cmap("viridis")(1 - n / max(1, len(levels) - 1))
            look = {"color": color, "fill": True, "label": f"{level:.3g}"}
            axes.stairs(top, edges, baseline=tops[n - 1] if n else 0, **look)
        axes.set(xlabel="optimizer step", ylabel=f"share of queries by {what}", ylim=(0, 1))
        axes.set(title=rows[0]["run"])
        figure.legend(loc="outside right center", reverse=True, title=what)
        plt.close()
    return figure


def image(name: str, figure: Figure) -> str:
    """A figure as an <img>: what is drawn in it is no part of the page."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True)
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{encode(svg.getvalue())}">'


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def fill(template: str, **parts: str) -> str:
    """The template with its %%name%% replaced; nothing is looked for in the parts."""
    return re.sub(f"%%({'|'.join(parts)})%%", lambda match: parts[match[1]], template)


def empty_page() -> str:
    """The template with DataTables in it, and a policy by which nothing else can run."""
    folder = Path(find_spec("itables").origin).parent / "html"  # its import takes pandas along
    module = (folder / "dt_bundle.js").read_text(encoding="utf-8")
    export = re.search(r"\bexport\{(.*?)\};", module)
    names = dict(reversed(pair.split(" as ")) for pair in export[1].split(","))
    found = f"return [{names['default']}, {names['set_or_remove_dark_class']}];"
    code = module.replace(export[0], found)  # no module any more: it would wait for the whole file
    library = f"const [DataTable, followDarkTheme] = (() => {{{code}}})();"
    css = (folder / "dt_bundle.css").read_text(encoding="utf-8")
    template = Path(__file__).with_name("view.html").read_text(encoding="utf-8")
    page = fill(template, library=library, library_css=css)
    own = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    digests = [encode(hashlib.sha256(text.encode()).digest()) for text in own]
    return fill(page, own=" ".join(f"'sha256-{digest}'" for digest in digests))


def read_queries(run: ViewedRun, packed: list[str]) -> list[dict]:
    """A run's rows of the table; `packed` gets its batches, and a row's place is in these."""
    rows, newest = [], {}
    for step, queries in batches(run.folder):
        for place, answers in enumerate(queries):
            newest[answers[0]["id"]] = len(rows)
            rows.append({**summarize(run, step, answers), "place": [len(packed), place]})
        blocks = json.dumps([explain(run, answers) for answers in queries])
        packed.append(encode(gzip.compress(blocks.encode(), compresslevel=6)))
    for n in newest.values():
        rows[n]["newest"] = {0: "none right", 1: "all right"}.get(rows[n]["p̂"], "some right")
    return rows


def view(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional], output: Path = Path("runs/view.html")
) -> None:
    """Write one HTML file to look at training runs. Raises InputError.

    Args:
        runs: their folders.
        output: the file.
    """
    if not runs:
        raise InputError("needs the folder of a run")
    plotted = read_runs(runs)
    opened = [open_run(own.label, folder) for own, folder in zip(plotted, runs, strict=True)]
    figures = [name for name in FIGURES if name != "reward"]  # which is the pass rate, too
    images = [image(*drawn) for drawn in draw_figures(plotted, figures, window=10)]
    rows, packed = [], []
    for run in opened:
        if own := read_queries(run, packed):
            images.append(image("weights", draw_weights(own)))
            rows += own
    columns = list(rows[0]) if rows else []
    used = [name for name in columns if any(row[name] is not None for row in rows)]
    data = {
        "runs": [[run.label, run.missing, json.dumps(run.args, indent=2)] for run in opened],
        "columns": used[:-1],  # without the place
        "rows": [[row[name] for name in used] for row in rows],
    }
    page = fill(
        empty_page(),
        data=json.dumps(data).replace("<", r"\u003c"),  # so no tag and no comment begins in it
        images="\n".join(images),
        batches="\n".join(
            f'<script type="text/plain" id="batch-{n}">{batch}</script>'
            for n, batch in enumerate(packed)
        ),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as partial:
        partial.write_text(page, encoding="utf-8")
    print(output)


if __name__ == "__main__":
    try:
        tyro.cli(view, description=__doc__, use_underscores=True)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
