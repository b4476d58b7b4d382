"""Sampling without vLLM: transformers' `generate`, from a copy of the model.

patches/generate.diff has the two lines that put it into train_oswft.py.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from models import Tokenizer, stop_token_ids
from rollout import Completion, Rollout, RolloutArgs

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM


class GenerateRollout(Rollout):
    """Samples with transformers' `generate`, 16 prompts at a time, from a copy of the model."""

    sleeps, model_runner = False, "generate"

    def __init__(self, model: str, tokenizer: Tokenizer, args: RolloutArgs):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        copy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype)
        self.copy = copy.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self.stop_token_ids = stop_token_ids(tokenizer)

    def load_parameters(self, named_parameters: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.copy.state_dict()
        for name, weight in named_parameters:
            own[name].copy_(weight)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        max_tokens: int,
        seeds: Sequence[int],
        temperature: float,
        **_,
    ) -> list[Completion]:
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0}  # `record` divides
        options |= {"num_return_sequences": num_samples, "max_new_tokens": max_tokens}
        share, completions = range(dist.get_rank(), len(prompts), dist.get_world_size()), []
        for part in (share[start : start + 16] for start in range(0, len(share), 16)):
            steps = []  # log pi of every next token (N, V), and once one is drawn: of that (N, 1)

            def record(ids, logits, steps=steps):
                steps[-1:] = [last.gather(1, ids[:, -1:]) for last in steps[-1:]]
                steps.append((logits / temperature).log_softmax(dim=1))
                return steps[-1]

            rows = {"input_ids": [prompts[index].tolist() for index in part]}
            rows = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
            options |= {"eos_token_id": self.stop_token_ids, "logits_processor": [record]}
            torch.manual_seed(seeds[part[0]])
            answers = self.copy.generate(**rows.to(self.copy.device), **options)
            record(answers, steps[-1])  # of the last one
            logprobs = torch.cat(steps[:-1], dim=1).tolist()  # (N, T)
            for row, ids in enumerate(answers[:, rows.input_ids.shape[1] :].tolist()):
                ends = [n for n, token in enumerate(ids, 1) if token in self.stop_token_ids]
                ids, reason = (ids[: ends[0]], "stop") if ends else (ids, "length")
                flat = SimpleNamespace(logprobs=logprobs[row][: len(ids)])
                sample = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=flat)
                completions.append(self._completion(part[row // num_samples], sample))
        return completions
