"""How the model learns: the gradient of any split equals a dense reference's (gradients.py)."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen3Config,
    Qwen3ForCausalLM,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from conftest import launch
from data import InputError, Trajectory, collate
from engine import Engine, load_model
from logprobs import LogprobModel


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_equals_a_dense_single_process_reference(ranks):
    output = launch("tests/gradients.py", ranks=ranks)
    assert output.count("equal: OSW-FT") == 17 and output.count("equal: GRPO") == 7
    assert "equal: reads of the host" in output  # no pass waits for the device


def test_a_state_goes_on_over_other_ranks_and_stages_and_no_bad_gradient_touches_it(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    launch("tests/states.py", "save", tmp_path, ranks=2)
    for ranks in (1, 2, 3):  # with three, shards are padded
        output = launch("tests/states.py", "go_on", tmp_path, ranks=ranks)
        assert output.count("went on") == 12 and output.count("refused") == 2


def test_a_generation_config_that_could_not_be_saved_is_found_at_load(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    with pytest.raises(InputError, match=r"generation_config.json: .*do_sample") as error:
        load_model(str(tmp_path / "model"), 128)
    assert "\n" not in str(error.value)


def test_a_model_folder_without_some_of_its_weights_is_refused(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights are missing: model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path / "model"), 128)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot load a model from there"):
        load_model(str(tmp_path / "model"), 128)


class Plain:
    """What the engine needs of DeepSpeed for a forward pass."""

    def __init__(self, model):
        self.module = LogprobModel(model)

    def __call__(self, *args):
        return self.module(*args)

    def set_gradient_accumulation_boundary(self, last):
        pass


def make_engine(**fields) -> Engine:
    """Around a random model in bf16, without DeepSpeed."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **heads, initializer_range=0.2, **fields)
    engine = object.__new__(Engine)
    engine.engine = Plain(Qwen3ForCausalLM(config).to(torch.bfloat16))
    engine.device = torch.device("cpu")
    engine._begin_step()
    return engine


def backwards(module, *args, **kwargs):
    return sdpa_attention_forward(module, *args, **{**kwargs, "is_causal": False})


AttentionInterface.register("sees_the_future", backwards)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("flash_attention_2", {}, "Flash ?Attention"),
        ("nobody/no-kernel", {}, "kernel"),
        ("flashy", {}, "Specified .* is not supported"),
        ("sees_the_future", {}, "log-probabilities are .* nats a token off"),
        ("sees_the_future", {"use_sliding_window": True, "sliding_window": 8}, "windows or soft"),
    ],
)
def test_an_attention_that_is_absent_or_differs_is_refused(one_rank, name, fields, message):
    with pytest.raises(InputError, match=f"^--attn {name}: .*{message}") as error:
        make_engine(**fields)._use_attention(name)
    assert "\n" not in str(error.value)


ROWS = [Trajectory("", [n, 2], list(range(3, n))) for n in (9, 40, 23)]


def kernel(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Flash attention's arguments, (B, T, H, D), half precision alone; it knows no padding."""
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16} and not dropout_p
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def test_transformers_flash_attention_needs_no_mask_for_rows_padded_on_the_right(
    one_rank, monkeypatch
):
    """With a stand-in for the kernel: its varlen function, for packed rows, is never called."""
    packed = lambda q, k, v, cu_seqlens_q, dropout_p, softmax_scale, causal: 1 / 0  # noqa: E731
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", lambda *a, **k: (kernel, packed, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    AttentionInterface.register("flash_on_a_cpu", flash_attention_forward)
    AttentionMaskInterface.register("flash_on_a_cpu", flash_attention_mask)
    for rows in (ROWS, ROWS[:1]):  # a row alone takes another way through transformers
        gradients = []
        for attention in ("sdpa", "flash_on_a_cpu"):
            engine = make_engine()
            if attention != "sdpa":
                engine._use_attention(attention)
            batch = collate(rows, range(len(rows)))
            engine.logprobs(batch).sum().backward()
            gradients.append({n: p.grad for n, p in engine.model.named_parameters()})
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, msg=name)
