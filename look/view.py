"""Training runs to look at: one HTML file with curves, weights, and every answer to every query.

    python -m look.view runs/oswft                                       # to runs/oswft-view.html
    python -m look.view runs/sft runs/oswft runs/grpo --output all.html  # in one table

The file needs no network, and nothing that a model wrote is ever run in it. Questions and solutions
come from the training file that the run names, as it is now, the tokens' texts from its tokenizer.
A run that is still going on is shown as far as it is.
"""

import base64
import gzip
import io
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated

from data import Example, InputError, atomic_write, load_examples, read_rows
from launch import command_line
from look import STYLE, labels, next_to
from look.plot import DEFAULT, draw_figures
from models import load_tokenizer
from run import checkpoints, read_args
from verify import extract, reference_letter

import numpy as np
import tyro
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

COLUMNS = {  # of the table, and what they mean
    "run": "the name of its folder",
    "step": "the first optimizer step that learnt from these answers",
    "newest answers": "how many are right; empty if the query was asked again later",
    "id": "the query's, in the training file",
    "source": "where the query is from",
    "question": "its beginning",
    "p̂": "the pass rate: which share of the answers is right",
    "w": "the weight of the expert's solution: 1 − p̂, unless --weighting is another one",
    "mean |A|": "mean size of the answers' advantages; where it is 0, nothing is learnt",
    "tokens": "mean length of the answers",
    "cut off": "how many answers the token limit ended",
}


@dataclass
class ViewedRun:
    label: str
    folder: Path
    args: dict
    examples: dict[str, Example] = field(default_factory=dict)  # by id
    decode: Callable[[tuple[int, ...]], str] | None = None  # token ids to text
    missing: str = ""  # what cannot be shown, and why


def open_run(label: str, folder: Path) -> ViewedRun:
    """A run with its tokenizer and its examples, if they are there."""
    if "data" not in (args := read_args(folder).get("args", {})):
        raise InputError(f"{folder}: is no training run")
    run = ViewedRun(label, folder, args)
    saved = [folder / "final", *reversed(checkpoints(folder).values())]
    model = next((path for path in saved if path.is_dir()), run.args["model"])
    try:
        run.decode = cache(load_tokenizer(str(model)).decode)
        run.examples = {example.id: example for example in load_examples(run.args["data"])}
    except (InputError, OSError) as error:
        run.missing = f" (without questions and solutions: {error})"
    return run


def read_queries(run: ViewedRun, packed: list[str]) -> list[dict]:
    """A run's rows of the table; `packed` gets what a click on them shows, batch by batch."""
    rows, newest = [], {}
    for path in sorted(run.folder.glob("rollouts/*.jsonl")):
        answers, batch = [row for _, row in read_rows(str(path))], []
        for answer in answers:
            answer["reward"] = float(answer["reward" if "reward" in answer else "correct"])
        for _, query in groupby(answers, lambda answer: answer["query"]):
            row, blocks = show_query(run, list(query))
            step = int(path.stem.removeprefix("step_"))
            rows.append({**row, "step": step, "place": [len(packed), len(batch)]})
            if row["id"] in newest:  # this query was asked before
                newest[row["id"]]["newest answers"] = None
            newest[row["id"]] = rows[-1]
            batch.append(blocks)
        packed.append(data_url("application/gzip", gzip.compress(json.dumps(batch).encode())))
    return rows


def show_query(run: ViewedRun, answers: list[dict]) -> tuple[dict, list[dict]]:
    """A query's row of the table, None where the run has nothing; the blocks that a click shows."""
    first, example = answers[0], run.examples.get(answers[0]["id"])
    pass_rate, weight = round(first["pass_rate"], 4), first.get("weight")
    sizes = [abs(answer["advantage"]) for answer in answers if "advantage" in answer]
    points = f"{sum(answer['reward'] for answer in answers):.4g} of {len(answers)}"
    share = {0: "none", 1: "all"}.get(pass_rate, "some")
    row = {
        "run": run.label,
        "newest answers": f"{share} ({points})",
        "id": first["id"],
        "source": example and example.source,
        "question": example and example.question[:300],
        "p̂": pass_rate,
        "w": None if weight is None else round(weight, 4),
        "mean |A|": round(float(np.mean(sizes)), 4) if sizes else None,
        "tokens": round(float(np.mean([len(answer["token_ids"]) for answer in answers]))),
        "cut off": sum(answer["finish_reason"] == "length" for answer in answers),
    }
    why = f"{points} {'points' if run.args.get('reward') else 'answers right'}: p̂ = {pass_rate:.4g}"
    if weight is not None:
        why += f", so the solution's weight is {weight:.4g} (--weighting {run.args['weighting']})"
    elif any(sizes):
        why += ". Each answer counts by its advantage: how much better than the group it is"
    else:
        why += ". No answer is better than another, so nothing is learnt from them"
    blocks = [{"title": "Why it counts as it does", "text": why}]
    if example:
        solution = f"The expert's solution · reference: {example.answer}"
        blocks.append({"title": "Question", "text": example.question})
        blocks.append({"title": solution, "text": example.solution})
    for number, answer in enumerate(answers, start=1):
        kind = {1: "right", 0: "wrong"}.get(answer["reward"], f"reward {answer['reward']:.4g}")
        facts = [f"Answer {number}", kind]
        if example and not run.args.get("reward"):
            extracted = extract(answer["text"], example.answer)
            unread = "no letter" if reference_letter(example.answer) else "no box: the end was read"
            facts.append(f"extracted: {extracted}" if extracted else unread)
        if "advantage" in answer:
            facts.append(f"advantage {answer['advantage']:+.2f}")
        cut_off = ", cut off" if answer["finish_reason"] == "length" else ""
        facts.append(f"{len(answer['token_ids'])} tokens{cut_off}")
        blocks.append({"title": " · ".join(facts), "kind": kind, "text": answer["text"]})
        if answer.get("logprobs") and run.decode:
            blocks[-1]["tokens"] = split_tokens(answer["token_ids"], answer["logprobs"], run.decode)
            row["colored"] = True
    return row, blocks


def split_tokens(
    ids: Sequence[int], logprobs: Sequence[float], decode: Callable[[tuple[int, ...]], str]
) -> list[tuple[str, float]]:
    """(text, log-probability) of each token; several that make up a character are one."""
    shown, before, held, total = [], (), (), 0.0
    for n, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        held, total = (*held, token), total + logprob
        # after the token before it, as some tokenizers drop a leading space
        text = decode(before + held).removeprefix(decode(before))
        if not text.endswith("\ufffd") or n == len(ids):
            shown.append((text, round(total, 2)))
            before, held, total = (token,), (), 0.0
    return shown


def draw_weights(rows: Sequence[dict]) -> Figure:
    """A run's histogram over time: how many queries have which weight (GRPO: 1 - p̂)."""
    what = "1 − p̂" if rows[0]["w"] is None else "weight"
    weights = np.array([1 - row["p̂"] if row["w"] is None else row["w"] for row in rows])
    levels = np.unique(weights) if len(np.unique(weights)) <= 9 else np.linspace(0, 1, 11)
    nearest = np.abs(weights - levels[:, None]).argmin(axis=0)
    steps = np.array([row["step"] for row in rows])
    groups = [steps[nearest == n] for n in range(len(levels))]
    bins = [*np.unique(steps), steps[-1] + 1]
    with rc_context(STYLE):
        figure = Figure()
        axes = figure.subplots()
        color = colormaps["viridis"](np.linspace(1, 0, len(levels)))
        look = {"histtype": "stepfilled", "stacked": True, "color": color}
        axes.hist(groups, bins, label=[f"{level:.3g}" for level in levels], **look)
        axes.set(xlabel="optimizer step", ylabel=f"queries by {what}", title=rows[0]["run"])
        figure.legend(loc="outside right center", title=what)
    return figure


def image(name: str, figure: Figure) -> str:
    """A figure as an <img>: what is drawn in it is no part of the page."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True)
    return f'<img alt="{name}" src="{data_url("image/svg+xml", svg.getvalue())}">'


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def fill_page(**parts: str) -> str:
    """The template with DataTables and the parts, in which nothing is replaced."""
    itables = Path(find_spec("itables").origin).parent / "html"  # its import takes pandas along
    module = (itables / "dt_bundle.js").read_text(encoding="utf-8")
    parts["library"] = re.sub(r"\bexport\{.*?([\w$]+) as default.*?\};", r"return \1;", module)
    parts["library_css"] = (itables / "dt_bundle.css").read_text(encoding="utf-8")
    parts["nonce"] = secrets.token_urlsafe()  # what a model wrote cannot have it
    template = Path(__file__).with_name("view.html").read_text(encoding="utf-8")
    return re.sub(r"%%(\w+)%%", lambda match: parts[match[1]], template)


def view(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional], output: Path | None = None
) -> None:
    """Write one HTML file to look at training runs. Raises InputError.

    Args:
        runs: their folders.
        output: the file; default: <run>-view.html, or view.html next to several runs.
    """
    images = [image(*drawn) for drawn in draw_figures(runs, DEFAULT)]
    output = output or next_to(runs, "view.html")
    names, details, rows, packed = labels(runs), [], [], []
    for name, folder in zip(names, runs, strict=True):
        run = open_run(name, folder)
        summary, args = escape(run.label + run.missing), escape(json.dumps(run.args, indent=2))
        details.append(f"<details><summary>{summary}</summary><pre>{args}</pre></details>")
        if queries := read_queries(run, packed):
            images.append(image("weights", draw_weights(queries)))
            rows += queries
    columns = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    data = json.dumps({"columns": columns, "rows": rows})
    page = fill_page(
        title=escape(", ".join(names)),
        runs="\n".join(details),
        images="\n".join(images),
        headers="".join(f'<th title="{COLUMNS[name]}">{name}</th>' for name in columns),
        data=data.replace("<", r"\u003c"),  # so no tag and no comment begins in it
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
    with command_line():
        tyro.cli(view, description=__doc__, use_underscores=True)
