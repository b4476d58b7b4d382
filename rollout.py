"""How the model answers: vLLM inside the training process.

Every rank runs its own engine on its own share of the prompts.
"""

import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import cpu
from data import InputError, Queries, Trajectory, blame, derive_seed
from models import ModelArgs, Tokenizer, count_parameters, load_config, stop_token_ids
from ranks import gather
from verify import Verifier

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

MAX_SEQUENCES = {"cpu": 256, "cuda": 512}  # in flight; most GPUs get no CUDA graph for more
BYTES = {"bf16": 2, "fp32": 4}  # of a number
VLLM_SHARE = 0.3  # vLLM's share of the memory; --vllm_memory and --vllm_sleep change it
FREE_BYTES = 2 * 2**30  # bytes of a GPU left free for what vLLM does not count (a guess)
NUM_GAP_QUERIES = 8  # `Engine.check_vllm` compares these; their log-probabilities slow vLLM down


@dataclass
class Completion:
    query: int  # which prompt it answers
    token_ids: list[int]  # the end of turn is the last one, if it came
    text: str  # the end of turn is left out
    finish_reason: str  # "stop", or "length" if the token limit cut it off
    logprobs: list[float]  # each token's, as it was sampled; or empty
    ungraded: bool = False  # `judge` sets it: wrong because the verifier could not grade it


Groups = Sequence[Sequence[Completion]]  # (B, K): K completions of each query


def import_vllm():
    """Set what must be set first, then import vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # This process has the parameters.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    logging.getLogger("vllm").setLevel(level)  # vLLM warns before it reads the variable.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # It may need nvcc.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # Attention would round fp32 to tf32.
    if not torch.cuda.is_available():
        cpu.prepare_vllm()
    import vllm

    if torch.cuda.is_available():  # Its cache holds code for one GPU, under the rank's name.
        gpu = torch.cuda.current_device()
        os.environ["VLLM_CACHE_ROOT"] = f"{vllm.envs.VLLM_CACHE_ROOT}/cuda{gpu}"
    return vllm


@dataclass(kw_only=True)
class RolloutArgs(ModelArgs):
    """How the model answers, and who checks the answers."""

    num_rollouts: int = 2  # answers sampled per query
    temperature: float = 1.0  # sampling temperature; evaluation has its own
    rollout_batch_size: int = 128  # queries that all ranks answer before the next update
    vllm_sleep: bool = False  # vLLM gives its GPU memory back while the model trains
    # share of a GPU's memory for vLLM (CPU: of what is free); default: 0.3; asleep: what is left
    vllm_memory: float | None = None
    verifier_workers: int = 2  # processes per rank that check answers
    reward: str | None = None  # file.py:function of your own, in place of the verifier

    @property
    def batch_size(self) -> int:
        """Queries that are drawn together."""
        return self.rollout_batch_size

    def check(self) -> None:
        if self.max_completion_length >= self.max_length:
            lengths = f"{self.max_completion_length}, --max_length {self.max_length}"
            raise InputError(f"--max_completion_length is {lengths}: no room for a prompt")
        super().check()


class Rollout:
    """A vLLM engine that samples from the parameters it was last given."""

    def __init__(
        self,
        model: str,  # hub id or folder; its parameters are read with `load_from_disk` alone
        tokenizer: Tokenizer,
        args: RolloutArgs,
        load_from_disk: bool = False,  # start with the model's own parameters, to evaluate it
    ):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        if dist.get_rank() == 0:
            print(f"vLLM loads {model}, which takes about a minute", file=sys.stderr)
        self.vllm = import_vllm()
        self.stop_token_ids = stop_token_ids(tokenizer)
        self.sleeps = args.vllm_sleep and torch.cuda.is_available()
        own_prompts = math.ceil(args.rollout_batch_size / dist.get_world_size())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        num_sequences = min(MAX_SEQUENCES[device], own_prompts * args.num_rollouts)
        cache = (num_sequences + 1) * kv_cache_bytes(model, args.max_length, args.precision)
        llm_class = self.vllm.LLM  # This imports most of vLLM.
        gc.freeze()  # garbage collection would scan all imports five times while vLLM starts
        if torch.cuda.is_available():
            options = gpu_options(args.vllm_memory, self.sleeps, cache)
        else:
            weights = count_parameters(model, args.max_length) * BYTES[args.precision]
            share = args.vllm_memory or VLLM_SHARE
            options = cpu.vllm_options(share, weights, cache, args.max_length)
            dist.barrier()  # All ranks have asked what is available, and none has taken of it.
        with blame("vLLM (see --vllm_memory)", (ValueError,)):  # Memory may be short.
            self.llm = llm_class(
                model=model,
                skip_tokenizer_init=True,  # Token ids go in, and token ids come out.
                dtype="bfloat16" if args.precision == "bf16" else "float32",
                max_model_len=args.max_length,
                max_num_seqs=num_sequences,
                distributed_executor_backend="external_launcher",
                load_format="auto" if load_from_disk else "dummy",
                enable_sleep_mode=self.sleeps,
                generation_config="vllm",  # Of the model's own, only the stop ids count.
                logprobs_mode="processed_logprobs",  # those of the sampling distribution
                seed=0,  # Each request has its own.
                use_tqdm_on_load=False,
                **options,
            )
        # Once freed, vLLM would destroy every process group, the trainer's too.
        if finalizer := getattr(self.llm.llm_engine.engine_core, "_finalizer", None):
            finalizer.detach()
        v2 = self.llm.llm_engine.vllm_config.use_v2_model_runner
        self.model_runner = "V2" if v2 else "V1"  # They draw different numbers from one seed.
        self.sleep()

    def load_parameters(self, named_parameters: Iterator[tuple[str, Tensor]]) -> None:
        """Load the trainer's weights, and drop what was cached under the old ones.

        After sleep the order matters: wake the weights, load them, wake the KV cache.
        """
        if self.sleeps:
            torch.cuda.empty_cache()  # Return what the update freed: 24 GiB on an H200.
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_parameters})
        if not torch.cuda.is_available():
            self.llm.apply_model(cpu.repack)
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: it would answer from old weights")

    def sleep(self) -> None:
        """Free the memory of weights and KV cache until the next `load_parameters`."""
        if self.sleeps:
            self.llm.sleep(level=2)

    def sample(self, queries: Queries, number: int, stop: Callable | None = None) -> Groups:
        """Answer each query of batch `number` K times: (B, K), on every rank. A collective.

        Once `stop()` is true, answers are missing.
        """
        own = self.generate(
            [query.prompt_ids for query in queries],
            num_samples=self.args.num_rollouts,
            max_tokens=self.args.max_completion_length,
            seeds=[derive_seed(self.args.seed, number, n, q.id) for n, q in enumerate(queries)],
            with_logprobs=NUM_GAP_QUERIES,
            stop=stop,
            temperature=self.args.temperature,
        )
        self.sleep()  # The update and a checkpoint need the memory.
        groups = [[] for _ in queries]
        for completion in gather(own):
            groups[completion.query].append(completion)
        return groups

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        max_tokens: int,
        seeds: Sequence[int],
        with_logprobs: int = 0,
        stop: Callable[[], bool] | None = None,
        on_end: Callable[[list[Completion]], None] | None = None,
        **sampling: float,
    ) -> list[Completion]:
        """Sample `num_samples` completions of each prompt; returns them in the prompts' order.

        All ranks give all prompts; each engine answers its share. The same weights and seeds give
        the same completions, up to rounding.

        Args:
            max_tokens: of a completion; prompt and completion together fit into `max_length`.
            seeds: one per prompt.
            with_logprobs: how many prompts' completions carry log-probabilities. These take time.
            stop: asked after each step of vLLM whether to leave the rest.
            on_end: gets the completions that a step of vLLM has ended.
            sampling: temperature, top_p, top_k.
        """
        share = range(dist.get_rank(), len(prompts), dist.get_world_size())
        with blame("vLLM"):  # It refuses a temperature above 2.
            params = [
                self.vllm.SamplingParams(
                    **sampling,
                    n=num_samples,
                    max_tokens=min(max_tokens, self.args.max_length - len(prompts[index])),
                    stop_token_ids=self.stop_token_ids,
                    seed=seeds[index],
                    logprobs=0 if index < with_logprobs else None,  # 0: the sampled token's alone
                    flat_logprobs=True,  # It gives numbers, not an object for each.
                    detokenize=False,
                )
                for index in share
            ]
        inputs = [{"prompt_token_ids": list(map(int, prompts[index]))} for index in share]
        # An id is "7-3f9a01bc" here, and "7" in the outputs.
        ids = [name.split("-")[0] for name in self.llm.enqueue(inputs, params, use_tqdm=False)]
        places = dict(zip(ids, share, strict=True))
        every = 0.5 if sys.stderr.isatty() else 10  # seconds between redraws
        # With leave=None the bar stays in the end, except below a training's.
        shown = {"unit": "answer", "leave": None, "mininterval": every, "delay": every}
        bar = tqdm(total=len(share) * num_samples, disable=dist.get_rank() > 0, **shown)
        completions = []
        while self.llm.llm_engine.has_unfinished_requests():
            outputs = self.llm.llm_engine.step()
            if stop and stop():
                break
            ended = [self._completion(places[o.request_id], s) for o in outputs for s in o.outputs]
            if on_end and ended:
                on_end(ended)
            completions += ended
            bar.update(len(ended))
        bar.close()
        return sorted(completions, key=lambda completion: completion.query)

    def _completion(self, query: int, sample) -> Completion:
        """A `Completion` from vLLM's output."""
        token_ids = list(sample.token_ids)
        text_ids = token_ids[:-1] if sample.finish_reason == "stop" else token_ids
        text = self.tokenizer.decode(text_ids, skip_special_tokens=False)
        logprobs = list(sample.logprobs.logprobs) if sample.logprobs else []
        return Completion(query, token_ids, text, sample.finish_reason, logprobs)


# ---- What becomes of the answers -----------------------------------------------------------------


def judge(verifier: Verifier, queries: Queries, completions: Groups) -> Tensor:
    """Check the completions (B, K), each rank its share: rewards (B, K), on every rank.

    A reward is 1 if the answer is right, or your function's number in [0, 1]. It also marks the
    completions that could not be graded. A collective.
    """
    flat = [completion for group in completions for completion in group]
    own = range(dist.get_rank(), len(flat), dist.get_world_size())
    examples = [queries[flat[n].query].example for n in own]
    references = [example.columns if verifier.reward else example.answer for example in examples]
    grades = verifier.grade([flat[n].text for n in own], references)
    rewards = torch.zeros(len(flat))
    for n, grade in gather(list(zip(own, grades, strict=True))):
        rewards[n], flat[n].ungraded = float(grade.correct), grade.ungraded
    return rewards.view(len(queries), -1)


def completion_stats(completions: Groups) -> dict[str, float]:
    """What the metrics say about completions (b, K); lengths in tokens."""
    flat = [completion for group in completions for completion in group]
    lengths = [len(c.token_ids) for c in flat]
    return {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": max(lengths),
        "truncated_share": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "ungraded_share": sum(c.ungraded for c in flat) / len(flat),
        "rollout_tokens": sum(lengths),
    }


def trajectories(queries: Queries, completions: Groups) -> list[Trajectory]:
    """Completions (b, K) as b * K rows for the trainer, each with its prompt."""
    flat = [completion for group in completions for completion in group]
    return [Trajectory(queries[c.query].id, queries[c.query].prompt_ids, c.token_ids) for c in flat]


# ---- Memory --------------------------------------------------------------------------------------


def gpu_options(memory_share: float | None, sleeps: bool, cache_bytes: int) -> dict:
    """What vLLM needs to be told on a GPU; its KV cache can use `cache_bytes` at most."""
    torch.cuda.empty_cache()  # vLLM starts only if its share is free.
    free, total = torch.cuda.mem_get_info()
    left = (free - FREE_BYTES) / total
    share = memory_share or (left if sleeps else VLLM_SHARE)
    return {
        "gpu_memory_utilization": share,
        # Without a limit a tiny model gets millions of blocks, and each is a Python object.
        "kv_cache_memory_bytes": cache_bytes if cache_bytes < share * total / 2 else None,
    }


def kv_cache_bytes(model: str, max_length: int, precision: str) -> int:
    """Bytes that a sequence of `max_length` tokens takes at most, in whole blocks of 128."""
    config = load_config(model, max_length)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    values = 2 * config.num_hidden_layers * key_value_heads * head_dim
    return (max_length // 128 + 1) * 128 * values * BYTES[precision]
