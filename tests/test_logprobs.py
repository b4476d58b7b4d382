"""Log-probabilities, a chunk of the vocabulary at a time; the file can be copied out alone."""

import re
import sys

import families
import logprobs as logprobs_module
from conftest import ROOT
from dense import assert_same, make_model
from logprobs import LogprobHead, LogprobModel

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig


@pytest.mark.parametrize(
    ("tokens", "temperature", "scale", "cap"),
    [(1, 1.0, 1.0, None), (4, 0.6, 1.0, None), (5, 0.6, 0.3, None), (13, 1.7, 2.0, 1.5)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_equal_the_dense_ones_in_value_and_gradient(
    tokens, temperature, scale, cap, with_bias, monkeypatch
):
    four_tokens = 4 * 29  # several chunks, the last one smaller
    monkeypatch.setitem(logprobs_module.MAX_LOGITS, "cpu", four_tokens)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(8, 29, bias=with_bias, dtype=torch.float64)
    targets = torch.randint(29, (tokens,))
    logits = scale * head(hidden)
    logits = cap * (logits / cap).tanh() if cap else logits
    dense = (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ours = LogprobHead(head, scale, cap)(hidden, targets, temperature)
    assert_same(ours, dense)
    upstream, inputs = torch.randn(tokens), [hidden, *head.parameters()]
    expected = torch.autograd.grad((dense * upstream).sum(), inputs)
    gradients = torch.autograd.grad((ours * upstream).sum(), inputs)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_same(gradient, reference)


def test_in_bf16_the_sum_over_many_chunks_loses_no_more_than_one_rounding(monkeypatch):
    monkeypatch.setitem(logprobs_module.MAX_LOGITS, "cpu", 16 * 2)  # two ids in a chunk
    torch.manual_seed(0)
    hidden, head = torch.randn(16, 64).bfloat16().requires_grad_(), torch.nn.Linear(64, 2048)
    targets, upstream, head = torch.randint(2048, (16,)), torch.randn(16), head.bfloat16()
    logits = F.linear(hidden.float(), head.weight.float(), head.bias.float())
    dense = -F.cross_entropy(logits, targets, reduction="none")
    ours, inputs = LogprobHead(head)(hidden, targets), [hidden, *head.parameters()]
    assert_same(ours, dense, largest=2e-3, norm=1e-3)
    expected = torch.autograd.grad(dense, inputs, upstream)
    for gradient, reference in zip(
        torch.autograd.grad(ours, inputs, upstream), expected, strict=True
    ):
        assert_same(gradient, reference, largest=1e-2, norm=1e-2)


def test_logits_exist_in_chunks_alone(monkeypatch):
    monkeypatch.setitem(logprobs_module.MAX_LOGITS, "cpu", 50 * 1000)
    sizes, saved = [], {}  # of all that is made; of what is kept for the backward pass

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in [result] if isinstance(x, torch.Tensor))
            return result

    def save(tensor):
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    hidden, head = torch.randn(500, 4, requires_grad=True), torch.nn.Linear(4, 1000)
    targets = torch.randint(1000, (500,))
    with Watch(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logprobs = LogprobHead(head)(hidden, targets)
        assert sum(saved.values()) < 50 * 1000
        logprobs.sum().backward()
    assert max(sizes) == 50 * 1000


def small(config_class, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_attention_heads": 2, "hidden_size": 16}
    config = config_class(num_hidden_layers=1, **sizes, **fields)
    return AutoModelForCausalLM.from_config(config)


def test_a_head_that_does_something_unknown_and_a_model_that_sees_later_tokens_are_refused():
    model = make_model(tie_word_embeddings=False)
    model.register_forward_hook(lambda _, __, out: setattr(out, "logits", 1.1 * out.logits))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is not supported"):
        LogprobModel.checked(model)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is not causal"):
        LogprobModel.checked(make_model(is_causal=False))


@pytest.mark.parametrize("name", ["Granite", "Cohere", "Gemma 2", "Falcon-H1"])
def test_a_scale_or_a_cap_has_another_name_in_each_family_and_is_read(name):
    model = families.make_model(*families.FAMILIES[name])
    capped, before = name == "Gemma 2", model.config._attn_implementation
    LogprobModel.checked(model)
    assert model.config._attn_implementation == ("eager" if capped else before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_also_where_activations_are_computed_again(checkpointing):
    model = small(GPT2Config, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = LogprobModel(model)
    ids = torch.arange(12).view(2, 6)
    inputs = (ids[:, :-1], ids[:, 1:], torch.ones(2, 5, dtype=torch.bool))
    weight = model.transformer.h[0].mlp.c_fc.weight
    gradients = [torch.autograd.grad(ours(*inputs).sum(), weight)[0] for _ in range(2)]
    assert_same(*gradients)
    assert any(module.training for module in ours.model.modules()) == checkpointing


def test_dropout_in_a_layer_that_is_computed_again_is_refused():
    model = small(OPTConfig, word_embed_proj_dim=16, ffn_dim=32, dropout=0.1, init_std=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="OPTForCausalLM"):
        LogprobModel.checked(model)


def test_the_file_can_be_copied_out_alone_and_its_first_line_gives_what_a_loss_reads():
    text = (ROOT / "logprobs.py").read_text()
    imported = re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)
    assert {*imported} - sys.stdlib_module_names == {"torch"}
    model = make_model().eval()
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    dense = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (line,) = re.findall("^    (.*)", logprobs_module.__doc__, re.MULTILINE)
    found = {"model": LogprobModel(model), "input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    exec(line, found := found | {"mask": mask})
    torch.testing.assert_close(found["logprobs"], dense.where(mask, 0))
