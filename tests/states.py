"""Run by test_engine.py through the launcher: a state saved in one shape goes on in another.

states.py save FOLDER    takes three steps in every precision, and saves after the second
states.py go_on FOLDER   loads that, over any number of ranks and with each ZeRO stage, and
                         takes the third: the same one
"""

import contextlib
import copy
import shutil
import sys
from pathlib import Path

import engine as module
import train_sft
from data import Trajectory
from engine import STATE_KEYS, Engine, finish, init_distributed, load_engine

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

LEARNING_RATE = 1e-3


def make_engine(folder: Path, precision: str, zero_stage: int, cpu_offload: bool) -> Engine:
    settings = {"precision": precision, "zero_stage": zero_stage, "cpu_offload": cpu_offload}
    return load_engine(str(folder), 64, **settings)


def take_step(engine: Engine, number: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(number)
    ids = lambda: torch.randint(40, (9,), generator=generator).tolist()  # noqa: E731
    return train_sft.update(
        engine, [Trajectory("id", ids(), ids()) for _ in range(5)], LEARNING_RATE
    )


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The fp32 ones."""
    names = dict(engine.model.named_parameters())
    return {name: engine._get_state(names[name], "master").cpu().clone() for name in names}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance=0.0) -> None:
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance)


def assert_no_step_without_a_finite_gradient(engine: Engine) -> None:
    adam = [value for state in engine.adam.state.values() for value in state.values()]
    before, adam_before = weights(engine), copy.deepcopy(adam)
    for batch in engine.micro_batches([Trajectory("bad", [1, 2], [3])]):
        loss = engine.logprobs(batch).sum()
        engine.backward((0 * loss).sqrt())  # its value is 0, its gradient NaN
    with pytest.raises(FloatingPointError, match=r"step 4: the gradient is (inf|nan)"):
        engine.step(LEARNING_RATE)
    same(weights(engine), before)
    assert all(map(torch.equal, adam, adam_before))


def save(folder: Path, precision: str, zero_stage: int) -> None:
    target = folder / precision
    engine = make_engine(folder / "model", precision, zero_stage, cpu_offload=False)
    for number in range(2):
        take_step(engine, number)
    module.STATE_BYTES = 2**17  # several files
    engine.save_state(target)
    assert len([*(target / "state").iterdir()]) > 1
    engine.save_model(AutoTokenizer.from_pretrained(folder / "model"), target)
    at_two = weights(engine)
    take_step(engine, 2)
    at_three = weights(engine)
    if dist.get_rank() == 0:
        save_file(at_two, folder / f"{precision}-2")
        save_file(at_three, folder / f"{precision}-3")


def go_on(folder: Path, precision: str, zero_stage: int, cpu_offload: bool = False) -> None:
    engine = make_engine(folder / precision, precision, zero_stage, cpu_offload)
    engine.load_state(folder / precision)
    assert engine.num_steps == 2
    saved = {}
    for path in (folder / precision / "state").glob("*"):
        saved |= load_file(path)
    for name, parameter in engine.model.named_parameters():
        for key in STATE_KEYS:  # every number of the state, to the last bit
            assert torch.equal(
                engine._get_state(parameter, key).cpu(), saved.pop(f"{name}.{key}")
            ), name
    assert not saved
    at_two, at_three = (load_file(folder / f"{precision}-{step}") for step in (2, 3))
    same(weights(engine), at_two)
    for name, weight in engine.named_weights():  # what the model computes with: rounded from it
        assert torch.equal(weight.cpu(), at_two[name].to(weight.dtype)), name
    take_step(engine, 2)
    same(weights(engine), at_three, LEARNING_RATE * (0.02 if precision == "fp32" else 0.6))
    assert_no_step_without_a_finite_gradient(engine)
    if dist.get_rank() == 0:
        print("went on", dist.get_world_size(), precision, zero_stage, cpu_offload, flush=True)


def save_before_the_first_step(folder: Path, precision: str, zero_stage: int) -> None:
    """As Ctrl-C in the first rollout does; what goes on from there takes the first step."""
    target = folder / f"begun-{precision}-{zero_stage}-{dist.get_world_size()}"
    engine = make_engine(folder / "model", precision, zero_stage, cpu_offload=False)
    engine.engine.step = None  # vLLM may hold the GPU: there is no room for a step
    engine.save_state(target)
    engine.save_model(AutoTokenizer.from_pretrained(folder / "model"), target)
    resumed = make_engine(target, precision, zero_stage, cpu_offload=False)
    resumed.load_state(target)
    assert resumed.num_steps == 0
    fresh = make_engine(folder / "model", precision, zero_stage, cpu_offload=False)
    ours, theirs = take_step(resumed, 0), take_step(fresh, 0)
    assert ours == theirs, (precision, zero_stage, ours, theirs)
    same(weights(resumed), weights(fresh))


def refuse_damaged(folder: Path) -> None:
    """A state of which a part is missing, or half a file is left."""
    for damage in ("half", "none"):
        broken = shutil.copytree(folder / "fp32", folder / damage)
        path = next((broken / "state").iterdir())
        path.write_bytes(path.read_bytes()[:-1])
        if damage == "none":
            path.unlink()
        engine = make_engine(broken, "fp32", 2, False)
        with pytest.raises(OSError, match=str(broken)):
            engine.load_state(broken)
        print("refused", damage, flush=True)


def notice_a_host_without_the_folder(folder: Path) -> None:
    """The other ranks write where rank 0 cannot see it."""
    module.STATE_BYTES = 2**17  # several files
    engine = make_engine(folder / "model", "fp32", 2, False)
    here = dist.get_rank() == 0
    if not here:
        module.save_file = lambda *_, **__: None
    with pytest.raises(OSError, match="hosts share") if here else contextlib.nullcontext():
        engine.save_state(folder / "elsewhere")


if __name__ == "__main__":
    mode, folder = sys.argv[-2], Path(sys.argv[-1])
    init_distributed()
    for precision in ("fp32", "bf16"):
        if mode == "save":
            save(folder, precision, zero_stage=3)
            continue
        for zero_stage in (1, 2, 3):
            go_on(folder, precision, zero_stage)
        if precision == "bf16":  # the weights are rounded, too
            save_before_the_first_step(folder, precision, zero_stage)
            go_on(folder, precision, 1, cpu_offload=True)
            go_on(folder, precision, zero_stage, cpu_offload=True)
    if mode == "go_on" and dist.get_world_size() == 1:
        refuse_damaged(folder)
    elif mode == "save" and dist.get_world_size() > 1:
        notice_a_host_without_the_folder(folder)
    finish(0)
