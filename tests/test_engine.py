"""How the model learns: tiled log-probabilities, and the gradient of any split (gradients.py)."""

import pytest
import torch

import engine
from conftest import launch


@pytest.mark.parametrize(("tokens", "temperature"), [(1, 1.0), (4, 1.0), (5, 0.6), (13, 1.7)])
def test_tiled_logprobs_equal_the_dense_ones_in_value_and_gradient(
    tokens, temperature, monkeypatch
):
    monkeypatch.setitem(engine.LOGIT_TILE, "cpu", 7 * tokens)  # 29 = 4 * 7 + 1
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(29, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(29, (tokens,))
    upstream = torch.randn(tokens)
    logits = hidden @ weight.T / temperature
    dense = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ours = engine.TiledLogprobs.apply(hidden, weight, targets, temperature)
    torch.testing.assert_close(ours.double(), dense, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((dense * upstream).sum(), [hidden, weight])
    for gradient, reference in zip(
        torch.autograd.grad((ours * upstream).sum(), [hidden, weight]), expected, strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_no_tensor_of_tokens_times_vocabulary_ever_exists(monkeypatch):
    monkeypatch.setitem(engine.LOGIT_TILE, "cpu", 50 * 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden = torch.randn(500, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with Watch():
        logprobs = engine.TiledLogprobs.apply(hidden, weight, torch.randint(1000, (500,)), 1.0)
        logprobs.sum().backward()
    assert largest == 50 * 1000


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_equals_a_dense_single_process_reference(ranks):
    output = launch("tests/gradients.py", ranks=ranks)
    assert output.count("equal: OSW-FT") == 15 and output.count("equal: GRPO") == 7
    assert "equal: reads of the host" in output  # no pass waits for the device
