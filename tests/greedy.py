"""Run by test_real_model.py: a folder's likeliest answers, by two engines alike.

greedy.py <model folder> <tokens of an answer> <prompt> ...

Prints the texts as JSON, special tokens included.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
import vllm
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, most, *prompts = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in prompts]
options = {"max_new_tokens": int(most), "do_sample": False}
answers = [
    model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts
]
options = {"max_model_len": 512, "kv_cache_memory_bytes": 2**28, "enforce_eager": True}
llm = vllm.LLM(folder, dtype="float32", **options)
params = llm.get_default_sampling_params()
params.temperature, params.max_tokens = 0, int(most)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
assert [list(output.outputs[0].token_ids) for output in outputs] == answers
print("greedy", json.dumps([tokenizer.decode(ids) for ids in answers]))
