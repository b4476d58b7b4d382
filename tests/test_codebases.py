"""recipes/codebases.md: its code inside the real functions of verl and OpenRLHF, and its table.

Both packages are installed without their dependencies (see the Makefile). Nothing of them that
computes is replaced; the forward pass is ours, in double precision.
"""

import re
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

from conftest import ROOT
from demo.tiny import make_tokenizer
from dense import dense_logprobs, dense_oswft_loss, make_model, make_rows
from recipes import cancels

import pandas as pd
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

PAGE = (ROOT / "recipes" / "codebases.md").read_text()


def code_of(package: str) -> SimpleNamespace:
    """What the page's code for this package defines."""
    blocks, names = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE), {}
    exec(next(block for block in blocks if f"from {package}." in block), names)
    return SimpleNamespace(**names)


@pytest.fixture(scope="module")
def verl():
    if not find_spec("verl") or not find_spec("peft"):
        pytest.skip("needs verl and peft, which make test installs")
    with pytest.MonkeyPatch.context() as patch:
        # Ray moves data between processes. Of it verl names one type when it is imported.
        patch.setitem(sys.modules, "ray", ModuleType("ray"))
        sys.modules["ray"].ObjectRef = object
        verl = code_of("verl")
        verl.engine = import_module("verl.workers.engine.fsdp.transformer_impl")
    verl.batch = import_module("verl.utils.tensordict_utils").get_tensordict
    verl.collate = import_module("verl.utils.dataset.dataset_utils").SFTTensorCollator("no_padding")
    verl.gradient = partial(verl_gradient, verl)
    return verl


@pytest.fixture(scope="module")
def openrlhf():
    if not (spec := find_spec("openrlhf")):
        pytest.skip("needs openrlhf, which make test installs")
    [folder] = spec.submodule_search_locations
    for name in ("openrlhf", "openrlhf.models", "openrlhf.utils"):
        # Without their __init__, which asks for flash-attn, as in OpenRLHF's own test of its loss.
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder + name.removeprefix("openrlhf").replace(".", "/")]
    openrlhf = code_of("openrlhf")
    openrlhf.norm = import_module("openrlhf.utils.loss_utils")._optimizer_step_loss_norm
    openrlhf.gradient = partial(openrlhf_gradient, openrlhf)
    return openrlhf


@pytest.fixture(params=["verl", "openrlhf"])
def gradient(request):
    return request.getfixturevalue(request.param).gradient


@pytest.fixture(scope="module")
def model():
    return make_model().double()


def make_case(model, count: int):
    """Rows of mixed lengths, a weight for each, 0 among them, and their dense gradient."""
    generator = torch.Generator().manual_seed(count)
    rows, weights = make_rows(generator, count), torch.rand(count, generator=generator)
    weights[1] = 0
    tokens = sum(len(row.completion_ids) for row in rows)
    dense_oswft_loss(model, rows, weights, tokens).backward()
    return rows, weights, read_gradient(model)


def read_gradient(model) -> torch.Tensor:
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


# A step's gradient: the sum over micro-batches of `size` rows, then the mean over simulated ranks,
# as FSDP and DDP take it. Without weights the loss is the package's own


def verl_gradient(verl, model, rows, weights, size: int | None, ranks: int) -> torch.Tensor:
    """All of verl's step but the forward pass. `size`: None for micro-batches by tokens."""

    def forward_step(micro_batch, loss_function, forward_only):
        """log p of the next token, rows end to end: after a row's last comes a stranger."""
        ids = micro_batch["input_ids"]
        after = torch.roll(ids.values(), shifts=-1, dims=0)
        logits = torch.cat([model(input_ids=row[None]).logits[0] for row in ids.unbind()])
        logprobs = logits.log_softmax(-1).gather(-1, after[:, None])[:, 0]
        logprobs = torch.nested.nested_tensor_from_jagged(logprobs, ids.offsets())
        return loss_function(None, {"log_probs": logprobs}, micro_batch)

    engine = SimpleNamespace(
        forward_step=forward_step,
        ulysses_sequence_parallel_size=1,
        get_data_parallel_group=lambda: None,
        get_data_parallel_size=lambda: ranks,
        _gradient_sync_context=lambda **_: nullcontext(),
    )
    features = []
    for i, row in enumerate(rows):
        ids = torch.tensor(row.prompt_ids + row.completion_ids)
        mask = (torch.arange(len(ids)) >= len(row.prompt_ids)).long()
        features.append({"input_ids": ids, "loss_mask": mask})
        if weights is not None:
            features[i]["weight"] = weights[i : i + 1]
    tokens = sum(len(row.completion_ids) for row in rows)
    settings = {"pad_mode": "no_padding", "use_dynamic_bsz": size is None}
    settings |= {"micro_batch_size_per_gpu": size, "max_token_len_per_gpu": 80}
    loss = verl.sft_loss if weights is None else verl.oswft_sft_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda value, **_: value.fill_(tokens))
        patch.setattr(verl.engine, "get_device_id", lambda: "cpu")  # verl knows no CPU
        for rank in range(ranks):
            batch = verl.batch(verl.collate(features[rank::ranks]), settings)
            verl.engine.FSDPEngine.forward_backward_batch(engine, batch, loss)
    return read_gradient(model) / ranks


def openrlhf_gradient(openrlhf, model, rows, weights, size: int, ranks: int) -> torch.Tensor:
    passes = [slice(start, start + size) for start in range(0, len(rows), size)]
    pad = partial(pad_sequence, batch_first=True)
    masks = [pad([torch.ones(len(row.completion_ids)) for row in rows[part]]) for part in passes]
    accumulation = len(passes) // ranks
    info = openrlhf.norm(masks, None, ranks, accumulation)  # of all ranks, as its all_reduce adds
    for part, mask in zip(passes, masks, strict=True):
        logprobs = pad([dense_logprobs(model, row) for row in rows[part]])
        if weights is None:
            loss = openrlhf.SFTLoss()(logprobs, mask, **info)
        else:
            loss = openrlhf.WeightedSFTLoss()(logprobs, mask, weights[part], **info)
        (loss / accumulation).backward()  # DeepSpeed's scaling
    return read_gradient(model) / ranks


def test_weight_1_is_the_packages_own_loss(gradient, model):
    rows, *_ = make_case(model, 12)
    ours, own = (gradient(model, rows, weights, 3, 2) for weights in (torch.ones(12), None))
    torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size, accumulation", [(8, 1), (4, 2), (2, 4), (3, 2)])
def test_the_gradient_is_the_dense_one_for_every_split(gradient, model, size, accumulation, ranks):
    rows, weights, dense = make_case(model, size * accumulation * ranks)
    torch.testing.assert_close(gradient(model, rows, weights, size, ranks), dense)


def test_verls_micro_batches_by_tokens_keep_each_weight_with_its_row(verl, model):
    rows, weights, dense = make_case(model, 8)
    torch.testing.assert_close(verl.gradient(model, rows, weights, None, 1), dense)


def test_verls_dataset_takes_the_weight_from_its_column(verl, tmp_path):
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    path = str(tmp_path / "train.parquet")
    pd.DataFrame({"messages": [messages] * 3, "weight": [0.0, 0.5, 1.0]}).to_parquet(path)
    dataset = verl.WeightedDataset(path, make_tokenizer(), {"pad_mode": "no_padding"})
    batch = verl.collate([dataset[n] for n in (2, 0, 1)])
    assert batch["weight"].values().tolist() == [1.0, 0.0, 0.5] and batch["loss_mask"].sum() > 0


def test_the_table_is_what_the_script_prints_and_one_row_alone_finds_each_mistake():
    measured = cancels.measure()
    assert cancels.table(measured) in PAGE
    right, *mistakes = [off for *_, [off] in measured.values()]
    assert right == 0 and len(mistakes) == 8 and min(mistakes) > 0.15
    _, [cosine], [adam, clipped], *_ = measured["w in the mask: / Σw"]
    assert cosine == pytest.approx(1) and clipped < 1e-3 and adam > 0.1  # the drift alone
