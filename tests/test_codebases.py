"""recipes/verl_loss.py and openrlhf_loss.py, inside the real functions of verl and OpenRLHF.

Both packages are installed without their dependencies (requirements-codebases.txt). Nothing of them
that computes is replaced; the forward pass is ours.
"""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import Qwen3ForCausalLM

import gradients
from conftest import ROOT
from data import Trajectory, collate
from demo.tiny import make_config, make_tokenizer
from recipes import cancels
from train_oswft import oswft_loss

PAGE = ROOT / "recipes" / "codebases.md"
SPLITS = [(8, 1), (4, 2), (2, 4), (3, 2)]  # rows of a micro-batch, micro-batches of a rank
WEIGHTS = torch.tensor([0, 0.25, 0.5, 1])


@pytest.fixture(scope="module")
def verl():
    """verl's own functions, and the recipe."""
    need("verl")
    if missing := importlib.util.find_spec("ray") is None:
        # Ray moves data between processes. Of it verl names one type when it is imported.
        sys.modules["ray"] = ModuleType("ray")
        sys.modules["ray"].ObjectRef = object
    recipe = importlib.import_module("recipes.verl_loss")
    dataset = importlib.import_module("verl.utils.dataset.dataset_utils")
    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    tensordicts = importlib.import_module("verl.utils.tensordict_utils")
    engine = None
    if importlib.util.find_spec("peft"):
        engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    if missing:
        del sys.modules["ray"]
    return SimpleNamespace(
        losses=verl_losses,
        recipe=recipe,
        collate=dataset.SFTTensorCollator("no_padding"),
        batch=tensordicts.get_tensordict,
        chunk=tensordicts.chunk_tensordict,
        balancing=balancing,
        engine=engine,
    )


@pytest.fixture(scope="module")
def openrlhf():
    """OpenRLHF's own functions, and the recipe."""
    need("openrlhf")
    [folder] = importlib.util.find_spec("openrlhf").submodule_search_locations
    for name in ("openrlhf", "openrlhf.models", "openrlhf.utils"):
        # Without their __init__, which asks for flash-attn. OpenRLHF's own test of its loss
        # (tests/test_loss_aggregation.py) loads these files in this way, too.
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder + name.removeprefix("openrlhf").replace(".", "/")]
    recipe = importlib.import_module("recipes.openrlhf_loss")
    norm = importlib.import_module("openrlhf.utils.loss_utils")._optimizer_step_loss_norm
    return SimpleNamespace(losses=openrlhf_losses, recipe=recipe, norm=norm)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: make .venv/installed-requirements-codebases.txt")


@pytest.fixture(params=["verl", "openrlhf"])
def codebase(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes["vocab_size"] = gradients.VOCABULARY
    return Qwen3ForCausalLM(make_config(make_tokenizer(), **sizes, initializer_range=0.2))


def weighted_rows(count: int) -> tuple[list[Trajectory], torch.Tensor]:
    """Rows of mixed lengths, and a weight for each (count,), 0 among them."""
    generator = torch.Generator().manual_seed(count)
    rows = gradients.make_rows(generator, count)
    weights = WEIGHTS[torch.randint(4, (count,), generator=generator)]
    weights[1] = 0
    return rows, weights


def pick_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def our_gradient(model, rows, weights, normalizer: float | None = None) -> torch.Tensor:
    """Of `oswft_loss` on the whole batch at once."""
    batch = collate(rows, range(len(rows)))
    logprobs = pick_logprobs(model(input_ids=batch.input_ids).logits, batch.targets)
    return flat_gradient(
        model, [oswft_loss(logprobs, batch.mask, weights, normalizer or batch.mask.sum())]
    )


def flat_gradient(model, losses, ranks: int = 1) -> torch.Tensor:
    """Of all passes: summed on a rank, then the mean over the ranks, as FSDP and DDP take it."""
    model.zero_grad()
    for loss in losses:
        (loss / ranks).backward()
    return read_gradient(model)


def read_gradient(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def sum_of_weights(rows, weights) -> float:
    """Of their tokens."""
    return sum(w * len(row.completion_ids) for row, w in zip(rows, weights.tolist(), strict=True))


def assert_close(gradient: torch.Tensor, reference: torch.Tensor) -> None:
    assert (gradient - reference).norm() <= 1e-5 * reference.norm()


# ------------------------------------------------------------------------------------------------
# The losses of every pass of an optimizer step. `how`: "recipe" as recipes/ has it; "own" with the
# package's loss as it stands; "mask" likewise, but with the weights in the loss mask


def verl_batch(verl, rows, weights, how: str, tokens: float | None = None, ranks: int = 1):
    """What verl's dataset, collator and `forward_backward_batch` make of the rows of a rank."""
    features = []
    for row, weight in zip(rows, weights, strict=True):
        ids = torch.tensor(row.prompt_ids + row.completion_ids)
        mask = (torch.arange(len(ids)) >= len(row.prompt_ids)).float()
        mask = mask * weight if how == "mask" else mask
        features.append({"input_ids": ids, "loss_mask": mask, "weight": weight[None]})
    batch = verl.batch(verl.collate(features), {"dp_size": ranks, "pad_mode": "no_padding"})
    return batch.set_non_tensor("batch_num_tokens", tokens)


def verl_output(model, batch) -> dict[str, torch.Tensor]:
    """log p of the next token, rows end to end as in verl: a row's last is that of a stranger."""
    ids = batch["input_ids"]
    targets = torch.roll(ids.values(), shifts=-1, dims=0).split(ids.offsets().diff().tolist())
    logprobs = [
        pick_logprobs(model(input_ids=row[None]).logits[0], target)
        for row, target in zip(ids.unbind(), targets, strict=True)
    ]
    return {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(logprobs), ids.offsets())}


def verl_losses(verl, model, rows, weights, size: int, ranks: int, how: str) -> Iterator:
    shares = [(rows[rank::ranks], weights[rank::ranks]) for rank in range(ranks)]
    masks = [verl_batch(verl, *share, how)["loss_mask"] for share in shares]
    tokens = sum(mask.sum().item() for mask in masks)  # the engine's all_reduce
    own = how != "recipe"
    loss_function = verl.recipe.sft_loss if own else verl.recipe.oswft_sft_loss
    for share in shares:
        batch = verl_batch(verl, *share, how, tokens, ranks)
        for micro_batch in verl.chunk(batch, len(batch) // size):
            yield loss_function(None, verl_output(model, micro_batch), micro_batch)[0]


def openrlhf_losses(openrlhf, model, rows, weights, size: int, ranks: int, how: str) -> Iterator:
    micro_batches = [range(start, start + size) for start in range(0, len(rows), size)]
    batches = [collate(rows, micro_batch) for micro_batch in micro_batches]
    parts = [weights[list(micro_batch)] for micro_batch in micro_batches]
    masks = [batch.mask.float() for batch in batches]
    if how == "mask":
        masks = [part[:, None] * mask for part, mask in zip(parts, masks, strict=True)]
    accumulation = len(batches) // ranks
    info = openrlhf.norm(masks, None, ranks, accumulation)  # of all ranks, as its all_reduce adds
    for batch, mask, part in zip(batches, masks, parts, strict=True):
        logprobs = pick_logprobs(model(input_ids=batch.input_ids).logits, batch.targets)
        if how == "recipe":
            loss = openrlhf.recipe.WeightedSFTLoss()(logprobs, mask, part, **info)
        else:
            loss = openrlhf.recipe.SFTLoss()(logprobs, mask, **info)
        yield loss / accumulation  # DeepSpeed's scaling


# ------------------------------------------------------------------------------------------------
# What the page says


def test_weight_1_is_the_packages_own_loss(codebase, model):
    rows, _ = weighted_rows(6)
    ours = list(codebase.losses(codebase, model, rows, torch.ones(6), 3, 1, "recipe"))
    own = list(codebase.losses(codebase, model, rows, torch.ones(6), 3, 1, "own"))
    assert len(own) == 2 and all(map(torch.equal, ours, own))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size, accumulation", SPLITS)
def test_it_is_our_loss_for_every_split(codebase, model, size, accumulation, ranks):
    rows, weights = weighted_rows(size * accumulation * ranks)
    losses = codebase.losses(codebase, model, rows, weights, size, ranks, "recipe")
    assert_close(flat_gradient(model, losses, ranks), our_gradient(model, rows, weights))


@pytest.mark.parametrize("size, accumulation", SPLITS)
def test_a_weight_in_the_mask_divides_by_the_sum_of_the_weights(
    codebase, model, size, accumulation
):
    rows, weights = weighted_rows(2 * size * accumulation)
    losses = codebase.losses(codebase, model, rows, weights, size, 2, "mask")
    gradient = flat_gradient(model, losses, 2)
    assert_close(gradient, our_gradient(model, rows, weights, sum_of_weights(rows, weights)))
    right = our_gradient(model, rows, weights)
    assert gradient.norm() > 1.2 * right.norm()
    assert torch.cosine_similarity(gradient, right, dim=0) > 0.999999


def test_the_two_lines_of_the_page_in_verls_own_loss_are_the_recipe(verl, model):
    rows, weights = weighted_rows(5)
    batch = verl_batch(verl, rows, weights, "recipe", 100.0, ranks=2)
    output = verl_output(model, batch)
    [lines] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    before = "        log_prob_flatten = log_prob.values()\n"
    head, tail = inspect.getsource(verl.recipe.sft_loss).split(before)
    edited = dict(verl.recipe.sft_loss.__globals__)
    exec(head + before + textwrap.indent(lines, " " * 8) + tail, edited)
    ours, _ = verl.recipe.oswft_sft_loss(None, output, batch)
    assert torch.equal(edited["sft_loss"](None, output, batch)[0], ours)
    assert not torch.equal(verl.recipe.sft_loss(None, output, batch)[0], ours)


@pytest.mark.parametrize("how, dynamic", [("recipe", False), ("recipe", True), ("mask", True)])
def test_verls_engine_takes_its_divisor_from_the_mask_and_each_row_beside_its_weight(
    verl, model, one_rank, monkeypatch, how, dynamic
):
    """All of verl's step but the forward pass: its divisor, its micro-batches, its backward."""
    if verl.engine is None:
        pytest.skip("needs peft: make .venv/installed-requirements-recipes.txt")

    class Engine(verl.engine.FSDPEngine):
        ulysses_sequence_parallel_size = 1

        def __init__(self):
            self.sizes = []

        def get_data_parallel_group(self):
            return torch.distributed.group.WORLD

        def get_data_parallel_size(self):
            return 1

        def _gradient_sync_context(self, **_):
            return contextlib.nullcontext()

        def forward_step(self, micro_batch, loss_function, forward_only):
            self.sizes.append(len(micro_batch))
            output = verl_output(model, micro_batch)
            loss, metrics = loss_function(model_output=output, data=micro_batch)
            return loss, {"loss": loss.item(), "metrics": metrics}

    # verl knows no CPU.
    monkeypatch.setattr(verl.engine, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(verl.balancing, "get_device_name", lambda: "cpu")
    rows, weights = weighted_rows(8)
    batch = verl_batch(verl, rows, weights, how)
    batch.set_non_tensor("use_dynamic_bsz", dynamic)
    batch.set_non_tensor("max_token_len_per_gpu", sum(map(len, rows)) * 2 // 5)  # makes three
    batch.set_non_tensor("micro_batch_size_per_gpu", 2)
    loss = verl.recipe.oswft_sft_loss if how == "recipe" else verl.recipe.sft_loss
    engine = Engine()
    model.zero_grad()
    engine.forward_backward_batch(batch, partial(loss, config=None))
    gradient = read_gradient(model)
    assert len(engine.sizes) == (3 if dynamic else 4)
    divisor = None if how == "recipe" else sum_of_weights(rows, weights)
    assert_close(gradient, our_gradient(model, rows, weights, divisor))


def test_verls_dataset_takes_the_weight_from_its_column(verl, tmp_path):
    messages = [
        [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": str(n + 1)}]
        for n in range(3)
    ]
    frame = pd.DataFrame({"messages": messages, "weight": [0.0, 0.5, 1.0]})
    frame.to_parquet(tmp_path / "train.parquet")
    dataset = verl.recipe.WeightedDataset(
        str(tmp_path / "train.parquet"), make_tokenizer(), {"pad_mode": "no_padding"}
    )
    batch = verl.collate([dataset[n] for n in (2, 0, 1)])
    assert batch["weight"].values().tolist() == [1.0, 0.0, 0.5]
    assert batch["loss_mask"].sum() > 0


def test_the_page_and_the_recipes_name_the_versions_that_are_tested():
    requirements = (ROOT / "requirements-codebases.txt").read_text()
    for name in ("verl", "OpenRLHF"):
        package = name.lower()
        [version] = re.findall(rf"^{package}==([\d.]+)", requirements, re.MULTILINE)
        for path in (PAGE, ROOT / "recipes" / f"{package}_loss.py"):
            assert f"{name} {version}" in path.read_text()


# ------------------------------------------------------------------------------------------------
# What cancels it


@pytest.fixture(scope="module")
def measured():
    return cancels.measure()


def test_the_page_shows_the_table_that_the_script_prints(measured):
    assert cancels.table(measured) in PAGE.read_text()


def test_each_mistake_differs_from_the_right_loss_and_from_the_others(measured):
    right, *mistakes = cancels.table(measured).splitlines()[2:]
    numbers = [line.split("|", 2)[2] for line in (right, *mistakes)]
    assert len(mistakes) == 8 and len({*numbers}) == 9
    for name, columns in [*measured.items()][1:]:
        [off] = columns[-1]
        assert off > 0.15, name  # the check of one row alone finds it


def test_the_sum_of_the_weights_cancels_the_drift_and_nothing_else(measured):
    norms, [cosine], [adam, clipped], *_ = measured["w in the mask: / Σw"]
    assert cosine == pytest.approx(1) and clipped < 1e-3 and adam > 0.1
    lengths = torch.tensor(cancels.LENGTHS).double()
    for norm, weights in zip(norms, (cancels.EARLY, cancels.LATE), strict=True):
        assert norm == pytest.approx((lengths.sum() / (weights * lengths).sum()).item())
