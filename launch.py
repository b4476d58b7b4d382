"""How a script starts: its command line, its folder or a resume, the hosts, the data."""

import argparse
import contextlib
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import cpu
from data import InputError, Queries, Query, hash_examples, load_examples
from models import Tokenizer, check_model, count_examples, load_tokenizer, tokenize_examples
from ranks import fail, finish, gather, on_rank_0, outlive_readers, several_hosts
from run import RunArgs, checkpoints, claim, provenance, read_args
from verify import RewardError, Verifier

import torch.distributed as dist

# ---- The start -----------------------------------------------------------------------------------


def claim_or_resume(args: RunArgs) -> Path | None:
    """Lock the folder; the checkpoint to resume from, or None to begin anew. A collective."""
    checkpoint = on_rank_0(lambda: open_folder(args))  # Another host may see an older state.
    check_hosts(Path(args.output_dir))
    return checkpoint


def open_folder(args: RunArgs) -> Path | None:
    """Check the flags, lock the folder, find the newest checkpoint. Raises InputError."""
    args.check()
    cpu.warn_of_slow_bf16(args.precision)
    folder = Path(args.output_dir)
    claim(folder)
    if not args.resume:
        if any(path.name != ".lock" for path in folder.iterdir()):
            raise InputError(f"{folder} is not empty: choose another --output_dir, or --resume it")
        return None
    _, checkpoint = max(checkpoints(folder).items(), default=(0, None))
    if not checkpoint and (folder / "final").exists():  # A new run would overwrite it.
        raise InputError(f"{folder} is finished, and has no checkpoint: choose another folder")
    then = type(args)(**read_args(folder)["args"], output_dir=args.output_dir)
    before = then.batch_size, then.train_batch_size or then.batch_size
    now = args.batch_size, args.train_batch_size or args.batch_size
    if checkpoint and before != now:
        raise InputError(f"{checkpoint}: keep the batch sizes, which say what was read so far")
    return checkpoint


def check_hosts(folder: Path) -> None:
    """Raise InputError unless all hosts see this folder, and run the same code. A collective."""
    if not several_hosts():
        return
    for host, sees_it in gather([(socket.gethostname(), (folder / ".lock").exists())]):
        if not sees_it:
            raise InputError(f"{host} does not see {folder.absolute()}: hosts must share it")
    refuse_differences("has other code", provenance())


def refuse_differences(problem: str, value: object) -> None:
    """Raise InputError that names a host whose value is not the first rank's. A collective."""
    (first_host, first_value), *others = gather([(socket.gethostname(), value)])
    for host, other in others:
        if other != first_value:
            raise InputError(f"{host} {problem}: {other}; {first_host}: {first_value}")


def load_training_data(args: RunArgs, **fixed: str) -> tuple[Tokenizer, list[Query]]:
    """The tokenizer, and the examples that fit. Raises InputError if a run began with others."""
    read = load_examples(args.data, **fixed)  # A bad file is refused before long imports.
    tokenizer = load_tokenizer(args.model)
    lengths = args.max_length, args.max_completion_length
    examples, dropped = tokenize_examples(read, tokenizer, *lengths)
    count = count_examples(examples, dropped)
    needed = 1 if args.max_steps else args.batch_size / args.num_epochs
    if len(examples) < needed:
        raise InputError(f"{args.data}: {count} do not fill one batch of {args.batch_size}")
    if dist.get_rank() == 0:
        print(count, file=sys.stderr)
        rows = ((e.example.where, ids) for e in examples for ids in (e.prompt_ids, e.response_ids))
        check_model(tokenizer, args.model, args.max_length, rows)
        before = read_args(Path(args.output_dir)).get("data_hash")
        if before and before != hash_examples(examples):
            raise InputError(f"{args.data}, tokenized, gives other rows than before")
    if dist.get_world_size() > 1:
        refuse_differences(f"reads other rows of {args.data}", hash_examples(examples))
    return tokenizer, examples


def check_solutions(verifier: Verifier, queries: Queries, most: int = 128) -> None:
    """On rank 0, say how many experts' solutions are right by their own references."""
    rows = [query.example for query in queries if query.example.columns["solution"]]
    if dist.get_rank() > 0 or not rows:
        return
    rows = rows[:: 1 + (len(rows) - 1) // (16 if verifier.reward else most)]  # all over the file
    references = [row.columns if verifier.reward else row.answer for row in rows]
    try:
        scores = verifier.score([str(row.columns["solution"]) for row in rows], references)
    except RewardError as error:  # A function of yours may expect another text.
        print(f"note: the solutions cannot be graded: {error}", file=sys.stderr)
        return
    share = sum(scores) / len(rows)
    wrong = [row.where for row, score in zip(rows, scores, strict=True) if not score]
    first = f" (not {wrong[0]})" if wrong else ""
    advice = "" if share > 0.5 else ": do they end in a box? Is `answer` the answer alone?"
    said = f"{share:.0%} of {len(rows):,} solutions are right by their own references"
    print(f"{said}{first}{advice}", file=sys.stderr)


# ---- The command line ----------------------------------------------------------------------------


def parse_args(args_class: type, description: str | None, **options):
    """Read a dataclass, or a function's arguments, from the command line; rank 0 alone speaks."""
    import tyro

    args = [arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")]  # a launcher's
    speaks = "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"
    options |= {"description": description, "use_underscores": True, "console_outputs": speaks}
    return tyro.cli(args_class, args=args, **options)


def saved_args(args_class: type) -> dict:
    """Options of `parse_args`: with `--resume FOLDER` that run's arguments are the defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    folder = parser.parse_known_args()[0].resume
    if folder is None or not hasattr(args_class, "resume"):
        return {}
    saved = read_args(Path(folder)).get("args")
    if saved is None or not saved.keys() <= args_class.__dataclass_fields__.keys():
        raise InputError(f"{folder}: holds no run of this script")
    return {"default": args_class(**saved, output_dir=folder, resume=folder)}


def run_script(main: Callable, args_class: type, description: str | None) -> NoReturn:
    """Parse the command line, run `main(args)`, and end with the exit status that it returns."""
    gc.set_threshold(100_000, 50, 50)  # The default takes a fifth of the imports' time.
    outlive_readers()
    with command_line():
        status = main(parse_args(args_class, description, **saved_args(args_class)))
    finish(status)


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """End with one line after Ctrl-C or an error of the user's, after others with a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped", status=130)
    except (InputError, RewardError, OSError, FloatingPointError) as error:
        fail(str(error))
    except Exception:
        if not dist.is_initialized():
            raise
        fail(traceback.format_exc())
