"""How the model learns: the gradient of any split equals a dense reference's (gradients.py)."""

import json
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import engine
from conftest import ROOT, launch
from data import InputError, Trajectory, collate, load_tokenizer
from engine import Engine, load_config, load_engine, load_model
from gradients import make_model
from logprobs import LogprobModel

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Phi3Config,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_equals_a_dense_single_process_reference(ranks):
    output = launch("tests/gradients.py", ranks=ranks)
    assert output.count("equal: OSW-FT") == 15 and output.count("equal: GRPO") == 7
    assert "equal: reads of the host" in output


def test_a_state_goes_on_over_other_ranks_and_stages_and_no_bad_gradient_touches_it(
    model_copy, tmp_path
):
    launch("tests/states.py", "save", tmp_path, ranks=2)
    for ranks in (1, 3):  # with three, shards are padded
        output = launch("tests/states.py", "go_on", tmp_path, ranks=ranks)
        assert output.count("went on") == 8
        assert output.count("refused") == (2 if ranks == 1 else 0)


@pytest.mark.parametrize("call", ["keep_freed_memory", "share_cores"])  # the second is the control
def test_on_a_cpu_freed_memory_is_kept_for_the_next_pass(call):
    code = f"import psutil, cpu, torch; cpu.{call}(); torch.ones(2**27)"
    code += "; print(psutil.Process().memory_info().rss)"
    held = int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert (held > 4 * 2**27) == (call == "keep_freed_memory")


SAY = "import os; print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)"
ENTRIES = ("train_sft.py", "train_oswft.py", "train_grpo.py", "evaluate.py", "demo.from_scratch")
ENTRIES += ("demo", "bench.step", "recipes.trl_sft", "docs/exercises/grade.py", "make")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("asked", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_wait_passively_unless_the_user_says_otherwise(entry, asked, policy, tmp_path):
    """What is set when torch is loaded, as its threads read it then."""
    (tmp_path / "torch.py").write_text(SAY)
    command = [sys.executable, *["-m"] * (not entry.endswith(".py")), entry]
    if entry == "make":
        rule = "show: ; @echo $$OMP_WAIT_POLICY"
        command = ["make", "--no-print-directory", "--eval", rule, "show"]
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": asked} if asked else {}
    env["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    output = subprocess.check_output(command, cwd=ROOT, env=env, text=True)
    assert output.split() == [policy]


def test_a_generation_config_that_could_not_be_saved_is_found_at_load(model_copy):
    (model_copy / "generation_config.json").write_text('{"temperature": 0.6}')
    with pytest.raises(InputError, match="do_sample"):
        load_engine(str(model_copy), 128)


def test_a_quantized_model_is_refused(model_copy):
    config = json.loads((model_copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (model_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is quantized"):
        load_model(str(model_copy), 128)


def test_a_folder_that_lacks_weights_or_has_a_head_where_the_config_ties_it_is_refused(model_copy):
    path = model_copy / "model.safetensors"
    weights = load_file(path)
    embedding, layer = weights["model.embed_tokens.weight"], "model.layers.1.mlp.up_proj"
    without = {name: weight for name, weight in weights.items() if name != f"{layer}.weight"}
    own_head = {**weights, "lm_head.weight": 2 * embedding}
    for wrong, named in ((without, layer), (own_head, "ties head and embedding")):
        save_file(wrong, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match=named):
            load_model(str(model_copy), 128)
    save_file({**weights, "lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
    load_model(str(model_copy), 128)


def test_a_leftover_adapter_and_a_file_that_is_cut_off_are_refused(model_copy):
    model = AutoModelForCausalLM.from_pretrained(model_copy)
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapter.save_pretrained(model_copy)
    with pytest.raises(InputError, match="adapter"):
        load_model(str(model_copy), 128)
    (model_copy / "adapter_config.json").unlink()
    whole = (model_copy / "model.safetensors").read_bytes()
    (model_copy / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(InputError, match=str(model_copy)):
        load_model(str(model_copy), 128)


def test_two_sets_of_weights_in_a_folder_are_refused(model_copy):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (model_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="of other files: delete the old"):
        load_model(str(model_copy), 128)
    index["weight_map"] = {"lm_head.weight": "model.safetensors"}  # as some tools write
    (model_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(str(model_copy), 128)


def test_a_model_with_longrope_is_read_as_far_as_its_short_factors_go(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    Phi3Config(**sizes, **lengths, rope_parameters=rope).save_pretrained(tmp_path)
    load_config(str(tmp_path), 128)
    with pytest.raises(InputError, match="reads 128 tokens, not 129"):
        load_config(str(tmp_path), 129)


def test_fp32_starts_from_the_file_s_own_digits(model_copy, monkeypatch):
    monkeypatch.setattr(engine, "Engine", lambda model, **options: model)
    path = model_copy / "model.safetensors"
    weights = {name: weight.float() * 1.001 for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for name, weight in load_engine(str(model_copy), 128, precision="fp32").named_parameters():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("model_type", ["opt", "xglm", "falcon"])
def test_checkpointed_layers_have_no_dropout(model_type, tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64}  # xglm's
    sizes |= {"word_embed_proj_dim": 32, "hidden_dropout": 0.5, "dropout": 0.5}
    config = AutoConfig.for_model(model_type, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), 128)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    LogprobModel.checked(model)  # its checkpointed layers are in training mode


class OnGpu(torch.Tensor):
    """As there, a copy of it on the host is another tensor."""

    def cpu(self):
        return torch.ones(3)


def test_a_parameter_s_state_is_freed_before_the_next_one_is_made(tmp_path, one_rank):
    parameters = {f"layer{n}": torch.nn.Parameter(torch.ones(3)) for n in range(3)}
    alive = weakref.WeakSet()

    def get_state(parameter, key):
        assert not alive, "on a GPU two of them may not fit"
        alive.add(tensor := parameter.detach().clone().as_subclass(OnGpu))
        return tensor

    made = object.__new__(Engine)
    made.num_steps, made._buckets = 1, lambda _: iter([parameters])
    made._get_state, made._open_state = get_state, lambda _: None
    made.save_state(tmp_path)
    assert len(load_file(tmp_path / "state" / "00000.safetensors")) == 9


def test_a_saved_model_keeps_the_base_s_stops_and_tells_transformers_4_its_rope(
    tiny, tmp_path, one_rank
):
    model = load_model(str(tiny / "model"), 128)
    model.config.rope_parameters["rope_theta"] = 1e6
    made = object.__new__(Engine)
    made.engine = SimpleNamespace(module=SimpleNamespace(model=model))
    made._gather = lambda _: iter([dict(model.named_parameters())])
    for own, stops in ((None, [2, 0]), (5, [2, 0, 5]), ([0, 7], [2, 0, 7])):
        model.generation_config.eos_token_id = own
        made.save_model(load_tokenizer(str(tiny / "model")), tmp_path)
        saved = load_model(str(tmp_path), 128)
        assert saved.generation_config.eos_token_id == stops
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e6  # version 4's
    assert saved.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def kernel(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Flash attention's arguments, (B, T, H, D), half precision alone; it knows no padding."""
    assert {x.dtype for x in (q, k, v)} == {torch.bfloat16} and not dropout_p
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("lengths", [[9, 40, 23], [9]])  # a row alone takes another way
def test_transformers_flash_attention_needs_no_mask_for_rows_padded_on_the_right(
    lengths, monkeypatch
):
    """With a stand-in for the kernel: its varlen function, for packed rows, is never called."""
    packed = lambda q, k, v, cu_seqlens_q, dropout_p, softmax_scale, causal: 1 / 0  # noqa: E731
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_lazy_imports", lambda *a, **k: (kernel, packed, None, None, None))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    AttentionInterface.register("flash_on_a_cpu", flash_attention_forward)
    AttentionMaskInterface.register("flash_on_a_cpu", flash_attention_mask)
    model = LogprobModel(make_model().to(torch.bfloat16))
    rows = [Trajectory("", [n, 2], list(range(3, n))) for n in lengths]
    batch = collate(rows, range(len(rows)))
    targets = batch.targets.flatten()[batch.positions]
    gradients = []
    for attention in ("sdpa", "flash_on_a_cpu"):
        model.model.set_attn_implementation(attention)
        logprobs = model(batch.input_ids, targets, batch.positions)
        gradients.append(torch.autograd.grad(logprobs.sum(), list(model.parameters())))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)
