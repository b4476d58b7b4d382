"""What stands in for vLLM where a test runs a script's `main` in its own process (`run_here`)."""

import contextlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import verify
from demo.tiny import make_tokenizer
from verify import Grade, Verifier

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENIZER = make_tokenizer()
DIGITS = TOKENIZER.convert_tokens_to_ids(list("0123456789"))
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def digits(prompt: Sequence[int], params: dict, k: int) -> list[int]:
    """Up to eight digits, by the request's seed and the sample's number; some have no end."""
    rng = random.Random(f"{params['seed']} {k}")
    return rng.choices(DIGITS, k=rng.randint(1, 8)) + [END] * (rng.random() < 0.8)


class StandIn:
    """vLLM as rollout.py uses it: `answer` says what is sampled, the weights how likely it was."""

    SamplingParams = dict
    engine_core, vllm_config = None, SimpleNamespace(use_v2_model_runner=False)

    def __init__(self, answer: Callable[[Sequence[int], dict, int], list[int]] = digits):
        self.answer, self.off = answer, 0.0  # nats by which all log-probabilities are wrong
        self.options, self.requests, self.waiting = {}, [], []
        self.calls = []  # to load and to drop what was cached
        self.llm_engine = self

    def LLM(self, **options) -> "StandIn":
        self.options, config = options, AutoConfig.from_pretrained(options["model"])
        if options["load_format"] == "dummy":
            self.model = AutoModelForCausalLM.from_config(config).float().eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(options["model"]).float().eval()
        return self

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        self.calls.append(name)
        state = dict(kwargs["weights_iterator"])
        absent = self.model.load_state_dict(state, strict=False).missing_keys
        assert absent == ["lm_head.weight"], absent  # It is tied.

    def apply_model(self, function: Callable) -> None:
        self.calls.append(function.__name__)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def enqueue(self, inputs: list[dict], params: list[dict], use_tqdm: bool) -> list[str]:
        prompts = [each["prompt_token_ids"] for each in inputs]
        self.waiting = [*enumerate(zip(prompts, params, strict=True), start=len(self.requests))]
        self.requests += [request for _, request in self.waiting]
        return [f"{number}-3f9a" for number, _ in self.waiting]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[SimpleNamespace]:
        """The last request of those that wait has ended."""
        number, (prompt, params) = self.waiting.pop()
        samples = [self.sample(prompt, params, k) for k in range(params["n"])]
        return [SimpleNamespace(request_id=str(number), outputs=samples)]

    def sample(self, prompt: list[int], params: dict, k: int) -> SimpleNamespace:
        ids = self.answer(prompt, params, k)[: params["max_tokens"]]
        stopped = ids[-1] in params["stop_token_ids"]
        found = SimpleNamespace(token_ids=ids, finish_reason="stop" if stopped else "length")
        found.logprobs = None
        if params["logprobs"] is not None:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / params["temperature"]).log_softmax(-1)
            logprobs = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0] + self.off
            found.logprobs = SimpleNamespace(logprobs=logprobs.tolist())
        return found


class Scripted(StandIn):
    """It gives each question its texts, one after the other; one with "…" has no end of turn."""

    def __init__(self, texts: dict[str, Sequence[str]]):
        super().__init__(self.next)
        self.texts = texts

    def next(self, prompt: list[int], params: dict, k: int) -> list[int]:
        if params["logprobs"] is not None:
            return DIGITS  # They are compared with the trainer's, and never graded.
        alike = [p for ids, p in self.requests if ids == prompt and p["logprobs"] is None]
        number = [p is params for p in alike].index(True)
        text = self.texts[TOKENIZER.decode(prompt).split("\n")[1]][number]
        return TOKENIZER(text.removesuffix("…")).input_ids + [END] * (not text.endswith("…"))


class GradeHere(contextlib.AbstractContextManager):
    """A verifier without processes, which take a second to start."""

    reward = None

    def __exit__(self, *_) -> None:
        pass

    def grade(self, completions: Sequence[str], references: Sequence[str]) -> list[Grade]:
        pairs = zip(completions, references, strict=True)
        return [verify.grade(completion, reference) for completion, reference in pairs]

    def score(self, *pairs: Sequence[str]) -> list[bool]:
        return [grade.correct for grade in self.grade(*pairs)]


def grade_here(num_workers: int, reward: str | None = None) -> Verifier | GradeHere:
    return Verifier(num_workers, reward=reward) if reward else GradeHere()
