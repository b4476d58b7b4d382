"""`--logger`: every step of a run, once, in Weights & Biases, trackio or TensorBoard, too.

Each `open_...` starts the run `run_id` or goes on with it. It returns the first step that it takes,
a function that logs a step's values, and one that closes and is told whether the run failed.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from data import InputError, first_line, one_line

Opened = tuple[float, Callable[[dict, int], None], Callable[[bool], None]]


class Logger:
    """Takes the rows of metrics.jsonl: first those that are there, as it may lack some of them.

    No logger ends a run: from its first error on it gets nothing more. A resumed run brings the
    rows that it lacks.
    """

    def __init__(self, name: str, folder: Path, run_id: str, config: dict, rows: Iterable[dict]):
        self.first_step, self.write, self.finish = OPEN[name](folder, run_id, config)
        for row in rows:
            self.log(row)

    def log(self, row: dict) -> None:
        """Log a row, unless its step is there already."""
        if row["step"] >= self.first_step:
            values = {key: +value for key, value in row.items()}  # a bool becomes 0 or 1
            self._try(self.write, values, values.pop("step"))

    def close(self, failed: bool) -> None:
        """Write out what is left; `failed` is shown as the run's end."""
        self._try(self.finish, failed)

    def _try(self, call: Callable, *args) -> None:
        try:
            call(*args)
        except Exception as error:  # Ctrl-C may have ended the package's own process
            print(f"the logger failed, the run goes on: {one_line(error)}", file=sys.stderr)
            self.first_step = float("inf")


def check_logger(name: str) -> None:
    """Raise InputError if a logger's package, which has the same name, is not installed."""
    if name != "none" and find_spec(name) is None:
        raise InputError(f"--logger {name} is not installed: pip install {name}")


def open_wandb(folder: Path, run_id: str, config: dict) -> Opened:
    """Online it keeps the steps that it has. Offline, each start writes all to a new folder."""
    import wandb

    names = {"project": "osw-ft", "id": run_id, "name": folder.name, "dir": folder}
    limit = wandb.Settings(finish_timeout=20)  # seconds; what is left then is for `wandb sync`
    init = partial(wandb.init, **names, config=config, resume="allow", settings=limit)
    try:
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False):  # nobody may be there to answer
            raise wandb.Error("no login")
        run = init(mode=mode)
    except wandb.Error as error:
        print(f"wandb works offline: {first_line(error)}", file=sys.stderr)
        run = init(mode="offline")
    return run.starting_step, partial(run.log, commit=True), lambda failed: run.finish(int(failed))


def open_trackio(folder: Path, run_id: str, config: dict) -> Opened:
    """It keeps the steps that it has."""
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
    os.environ.setdefault("TRACKIO_STORAGE_MODE", "sqlite")  # on network disks, too: one writer
    import trackio

    run = trackio.init(project="osw-ft", name=run_id, config=config, resume="allow")
    return run._next_step, run.log, lambda failed: trackio.finish()


def open_tensorboard(folder: Path, run_id: str, config: dict) -> Opened:
    """Each start writes all steps anew; TensorBoard drops what it has read before."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard", purge_step=0, flush_secs=10)
    writer.add_text("config", f"run {run_id}\n```\n{json.dumps(config, indent=2)}\n```")

    def log(values: dict, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return 0, log, lambda failed: writer.close()


OPEN = {
    "none": lambda *run: (float("inf"), None, lambda failed: None),  # takes no step
    "wandb": open_wandb,
    "trackio": open_trackio,
    "tensorboard": open_tensorboard,
}
