"""recipes/codebases.md: its code beside our loss, with stand-ins for its imports, and its table."""

import re
from types import SimpleNamespace

from conftest import ROOT
from recipes import cancels
from train_oswft import oswft_loss

import pandas as pd
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

PAGE = (ROOT / "recipes" / "codebases.md").read_text()
WEIGHTS = [0.0, 0.25, 1.0]


def code_of(package: str, **names) -> SimpleNamespace:
    """What the page's code for a package defines, with `names` for what it imports from there."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    [code] = [block for block in blocks if f"from {package}." in block]
    exec(re.sub(rf"^from {package}\..*\n", "", code, flags=re.MULTILINE), names)
    return SimpleNamespace(**names)


@pytest.fixture
def rows() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities of three rows of mixed lengths, and their masks: a prompt of two tokens."""
    torch.manual_seed(0)
    logprobs = [torch.randn(length, requires_grad=True) for length in (3, 7, 4)]
    return logprobs, [(torch.arange(len(row)) >= 2).float() for row in logprobs]


def assert_ours(loss: torch.Tensor, logprobs: list, masks: list) -> None:
    """`loss` and its gradient are those of `oswft_loss`, which divides by the 8 masked tokens."""
    padded = [pad_sequence(each, batch_first=True) for each in (logprobs, masks)]
    ours = oswft_loss(*padded, torch.tensor(WEIGHTS), normalizer=8)
    torch.testing.assert_close(loss, ours)
    torch.testing.assert_close(*(torch.autograd.grad(each, logprobs) for each in (loss, ours)))


def test_verls_loss_weighs_each_rows_own_tokens_by_its_column(rows):
    class Dataset:
        dataframe = pd.DataFrame({"weight": WEIGHTS})

        def __getitem__(self, item):
            return {"loss_mask": rows[1][item]}

    def sft_loss(config, model_output, data, dp_group):
        masked = model_output["log_probs"].values() * data["loss_mask"].values()
        return -masked.sum() / data["loss_mask"].values().sum()

    verl = code_of("verl", MultiTurnSFTDataset=Dataset, sft_loss=sft_loss)
    items = [verl.WeightedDataset()[n] for n in range(3)]
    jagged = lambda each: torch.nested.as_nested_tensor(each, layout=torch.jagged)  # noqa: E731
    data = {name: jagged([item[name] for item in items]) for name in ("loss_mask", "weight")}
    loss = verl.oswft_sft_loss(None, {"log_probs": jagged(rows[0])}, data)
    assert_ours(loss, *rows)


def test_openrlhfs_loss_weighs_rows_and_leaves_the_divisor_alone(rows):
    class SFTLoss(torch.nn.Module):
        def forward(self, per_token_logps, loss_mask, *, ranks):
            return -ranks * (per_token_logps * loss_mask).sum() / loss_mask.sum()

    padded = [pad_sequence(each, batch_first=True) for each in rows]
    weighted = code_of("openrlhf", SFTLoss=SFTLoss).WeightedSFTLoss()
    assert_ours(weighted(*padded, torch.tensor(WEIGHTS), ranks=1), *rows)


def test_the_table_is_what_the_script_prints():
    assert cancels.table(cancels.measure()) in PAGE
