"""Which model families are trained right.

    python tests/families.py            # all of them; docs/models.md sums it up
    python tests/families.py gemma2 phi # some

Every family is a tiny random model whose biases and buffers are random too. It is loaded, trained
for one step, saved, loaded again, and asked for answers, in fp32, by the code that trains.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import conftest  # finds the modules of the top level, too
from data import InputError, Trajectory
from demo.tiny import make_tokenizer
from engine import EngineArgs, init_training, load_engine
from logprobs import LogprobModel, own_logprobs
from models import load_model
from rollout import Rollout, RolloutArgs, import_vllm

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
SIZES |= {"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HEADS = {"head_dim": 32}
WINDOW = {"head_dim": 32, "sliding_window": 16}
CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1}
MIXTURE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
MIXTURE |= {"topk_group": 1, "first_k_dense_replace": 1}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}

FAMILIES = {  # name: (model_type, what differs from SIZES)
    "Qwen3": ("qwen3", HEADS),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3-MoE": ("qwen3_moe", MIXTURE | HEADS),
    "Llama 2, 3": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mixtral": ("mixtral", MIXTURE | {"sliding_window": None}),
    "Gemma 1": ("gemma", HEADS),
    "Gemma 2": ("gemma2", WINDOW | CAPS | {"query_pre_attn_scalar": 32}),
    "Gemma 3, text": ("gemma3_text", WINDOW),
    "Gemma 3, text and pictures": ("gemma3", {"text_config": SIZES | WINDOW}),
    "Gemma 4, text": ("gemma4_text", WINDOW | PER_LAYER | {"global_head_dim": 32}),
    "Phi 1, 2": ("phi", {}),
    "Phi-3, Phi-4": ("phi3", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", WINDOW),
    "Granite": ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.2}),
    "GraniteMoE": ("granitemoe", MIXTURE | {"logits_scaling": 8.0}),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("cohere2", {"logit_scale": 0.25, "sliding_window": 256}),
    "GLM4-MoE": ("glm4_moe", MIXTURE | HEADS),
    "GPT-OSS": ("gpt_oss", MIXTURE | WINDOW),
    "Seed-OSS": ("seed_oss", HEADS | {"residual_dropout": 0.1, "attention_dropout": 0.1}),
    "Falcon-H1": ("falcon_h1", MAMBA | {"lm_head_multiplier": 4.0, "mamba_n_groups": 1}),
    "Qwen3-Next": ("qwen3_next", MIXTURE | HEADS | {"shared_expert_intermediate_size": 64}),
    "NanoChat": ("nanochat", {"final_logit_softcapping": 2.0}),
    "GPT-2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "GPT-NeoX, Pythia": ("gpt_neox", {}),
    "OPT": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "Llama 4, text": ("llama4_text", MIXTURE | HEADS | {"attention_chunk_size": 16}),
}


def make_model(model_type: str, changes: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config)
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.normal_(0, 0.5)
            elif name in buffers and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model


def gaps(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    """|trained - own| log-probability of a token, mean and largest. Takes the head away."""
    own = own_logprobs(model, tokens)
    assert own.std() > 0.05, "the model says the same everywhere: this shows nothing"
    with torch.no_grad():
        every = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        ours = LogprobModel(model)(tokens[:, :-1], tokens[:, 1:], every)[0]
    gap = (ours - own).abs()
    return float(gap.mean()), float(gap.max())


def measure(model_type: str, changes: dict, folder: Path) -> list[str]:
    """Four cells of the table: gaps in nats a token, mean (largest), or why there is none."""
    tokens = torch.randint(64, (1, 101), generator=torch.Generator().manual_seed(1))
    make_model(model_type, changes).save_pretrained(folder)
    cells = []
    try:
        model = load_model(str(folder), max_length=200)
        cells.append(show(*gaps(model, tokens)))
        model = load_model(str(folder), max_length=200).to(torch.bfloat16)
        cells.append(show(*gaps(model, tokens)))

        engine = load_engine(str(folder), EngineArgs(max_length=200, precision="fp32"))
        query = Trajectory("id", tokens[0, :50].tolist(), tokens[0, 50:].tolist())
        for batch in engine.micro_batches([query]):
            engine.backward(-engine.logprobs(batch).sum() / 51, batch.is_last)
        engine.step(learning_rate=1e-2)
        engine.save_model(make_tokenizer(), folder / "final")
        saved = own_logprobs(load_model(str(folder / "final"), 200), tokens)[49:]
        gap = (engine.eval_logprobs([query])[0, 49:] - saved).abs()
        cells.append(show(gap.mean(), gap.max()))
        lengths = {"max_length": 200, "max_completion_length": 60}
        options = RolloutArgs(**lengths, precision="fp32", vllm_memory=0.05)
        rollout = Rollout(str(folder), make_tokenizer(), options)
        for _ in range(2):  # the second time vLLM has packed weights
            rollout.load_parameters(engine.named_parameters())
        gap = engine.check_vllm([query] * 4, rollout.sample([query] * 4, 0), 1.0, strict=True)
        cells.append(show(gap["vllm_gap_mean"], gap["vllm_gap_max"]))
    except Exception as error:  # vLLM's own are of many types
        if len(cells) < 3 and not isinstance(error, ValueError):  # the head's is one
            raise
        refused = isinstance(error, InputError) or len(cells) < 3
        reason = " ".join(str(error).replace(str(folder), "").strip(": ").split())
        cells.append(f"refused: {reason}" if refused else f"vLLM fails: {reason}")
    return [cell if len(cell) <= 120 else cell[:119] + "…" for cell in cells]


def show(mean: float, largest: float) -> str:
    return f"{mean:.0e} ({largest:.0e})"


def in_a_process(name: str, results) -> None:
    """vLLM cannot be started twice in one process, so each family has a fork of this one."""
    transformers.logging.set_verbosity_error()
    init_training()
    with tempfile.TemporaryDirectory() as folder:
        results.put(measure(*FAMILIES[name], Path(folder)))


def measure_all(names: list[str]) -> dict[str, list[str]]:
    """The four cells of each family, which are printed as a row, too."""
    import_vllm()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as engine.py does
    for package in ("vllm.entrypoints.llm", "deepspeed"):  # once, and not in each fork
        importlib.import_module(package)
    context = multiprocessing.get_context("fork")
    found = {}
    for name in names:
        results = context.SimpleQueue()
        process = context.Process(target=in_a_process, args=(name, results))
        process.start()
        process.join()
        cells = results.get() if process.exitcode == 0 else ["crashed"]
        found[name] = [*cells, *["–"] * (4 - len(cells))]
        print(f"| {name} |", " | ".join(found[name]), "|", flush=True)
    return found


if __name__ == "__main__":
    chosen = [name for name in FAMILIES if not sys.argv[1:] or FAMILIES[name][0] in sys.argv[1:]]
    conftest.pytest_configure()  # hides a GPU
    measure_all(chosen)
