"""How the model learns: any split has the dense gradient, and a state goes on in any shape."""

import json

import checks
import dense
from conftest import edit_json, on_ranks, slow
from data import InputError
from engine import Engine, EngineArgs, load_engine
from models import load_config, load_model, load_tokenizer

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config


@slow
def test_the_gradient_equals_a_dense_single_process_reference():
    on_ranks(2, checks.compare_gradients, *checks.CASES, launcher="deepspeed")


def test_on_one_rank_too_the_gradient_equals_the_reference(one_rank):
    checks.compare_gradients(*checks.QUICK)


def test_a_loss_or_gradient_that_is_not_finite_moves_nothing(one_rank):
    checks.take_no_step_without_a_finite_gradient(
        Engine(dense.make_model(), EngineArgs(precision="fp32"))
    )


@slow
def test_a_state_goes_on_with_other_ranks_and_stages_and_no_bad_gradient(model_copy, tmp_path):
    steps = on_ranks(2, checks.save_states, tmp_path)
    on_ranks(3, checks.go_on, tmp_path, steps)  # with three, shards are padded


def test_a_state_that_is_not_whole_is_refused(tiny_engine, tmp_path):
    tiny_engine.save_state(tmp_path)
    path = min((tmp_path / "state").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(InputError, match=str(path)):
            tiny_engine.load_state(tmp_path)
        path.unlink(missing_ok=True)  # the second time it is not there


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("generation_config.json", {"temperature": 0.6}, "do_sample"),  # it could not be saved
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ("config.json", {"is_causal": False}, "is not causal"),
        ("adapter_config.json", {}, "adapter"),  # without peft transformers ignores it
    ],
)
def test_a_model_that_cannot_be_trained_or_saved_is_refused(file, fields, said, model_copy):
    edit_json(model_copy / file, **fields)
    with pytest.raises(InputError, match=said):
        load_engine(str(model_copy), EngineArgs(max_length=128))


def test_a_folder_with_too_few_or_too_many_weights_is_refused(model_copy):
    path = model_copy / "model.safetensors"
    weights = load_file(path)
    embedding, layer = weights["model.embed_tokens.weight"], "model.layers.1.mlp.up_proj"
    without = {name: weight for name, weight in weights.items() if name != f"{layer}.weight"}
    more = {**weights, f"{layer}.bias": torch.zeros(1)}  # or the scales of a file in FP8
    for named, wrong in {"missing": without, f"unexpected: {layer}.bias": more}.items():
        save_file(wrong, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match=named):
            load_model(str(model_copy), 128)
    save_file({**weights, "lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
    load_model(str(model_copy), 128)


def test_a_model_with_longrope_is_read_as_far_as_its_short_factors_go(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    Phi3Config(**sizes, **lengths, rope_parameters=rope).save_pretrained(tmp_path)
    load_config(str(tmp_path), 128)
    with pytest.raises(InputError, match="reads 128 tokens, not 129"):
        load_config(str(tmp_path), 129)


def test_fp32_starts_from_the_file_s_own_digits(model_copy, one_rank):
    path = model_copy / "model.safetensors"
    weights = {name: weight.float() * 1.001 for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    edit_json(model_copy / "config.json", dtype="bfloat16")
    args = EngineArgs(max_length=128, precision="fp32")
    for name, weight in load_engine(str(model_copy), args).named_parameters():
        assert torch.equal(weight, weights[name]), name


def test_a_saved_model_has_its_stops_and_version_4_s_rope(tiny, tiny_engine, tmp_path, monkeypatch):
    model = tiny_engine.model
    monkeypatch.setitem(model.config.rope_parameters, "rope_theta", 1e6)
    for own, stops in ((None, [2, 0]), (5, [2, 0, 5]), ([0, 7], [2, 0, 7])):
        monkeypatch.setattr(model.generation_config, "eos_token_id", own)
        tiny_engine.save_model(load_tokenizer(str(tiny / "model")), tmp_path)
        saved = load_model(str(tmp_path), 128)
        assert saved.generation_config.eos_token_id == stops
        assert load_tokenizer(str(tmp_path)).get_vocab()["<|im_end|>"] == 2
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e6  # version 4's
    assert saved.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
