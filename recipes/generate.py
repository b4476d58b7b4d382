"""Sampling without vLLM: transformers' `generate`, from a copy of the model.

patches/generate.diff has the two lines that put it into train_oswft.py.
"""

from collections.abc import Iterator
from types import SimpleNamespace

from models import Tokenizer, stop_token_ids
from rollout import Rollout, RolloutArgs

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM


class Recorder:
    """A logits processor that divides by the temperature, and keeps log pi of each drawn token."""

    def __init__(self, temperature: float):
        self.temperature, self.logprobs, self.next = temperature, [], None

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """From the ids so far (N, t) and the next token's logits (N, V) to its log pi (N, V)."""
        self.record_last(ids)
        self.next = (logits / self.temperature).log_softmax(dim=1)
        return self.next

    def record_last(self, ids: torch.Tensor) -> None:
        """Keep log pi of the last of ids (N, t), which was drawn from `next`."""
        if self.next is not None:
            self.logprobs.append(self.next.gather(1, ids[:, -1:]))  # (N, 1)


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

    def generate(self, prompts, num_samples, max_tokens, seeds, temperature, **_):
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0}  # `Recorder` divides
        options |= {"num_return_sequences": num_samples, "max_new_tokens": max_tokens}
        share, completions = range(dist.get_rank(), len(prompts), dist.get_world_size()), []
        for part in (share[start : start + 16] for start in range(0, len(share), 16)):
            recorder = Recorder(temperature)
            rows = {"input_ids": [prompts[index].tolist() for index in part]}
            rows = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt")
            options |= {"eos_token_id": self.stop_token_ids, "logits_processor": [recorder]}
            torch.manual_seed(seeds[part[0]])
            answers = self.copy.generate(**rows.to(self.copy.device), **options)
            recorder.record_last(answers)
            logprobs = torch.cat(recorder.logprobs, dim=1).tolist()  # (N, T)
            for row, ids in enumerate(answers[:, rows.input_ids.shape[1] :].tolist()):
                ends = [n for n, token in enumerate(ids, 1) if token in self.stop_token_ids]
                ids, reason = (ids[: ends[0]], "stop") if ends else (ids, "length")
                flat = SimpleNamespace(logprobs=logprobs[row][: len(ids)])
                sample = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=flat)
                completions.append(self._completion(part[row // num_samples], sample))
        return completions
