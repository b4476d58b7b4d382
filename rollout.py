"""How the model answers: vLLM inside the training process. The only file that imports vllm.

Every rank runs its own engine on its own share of the prompts. With `tensor_parallel` > 1, that
many neighbouring ranks share one copy of the model, and sample for the same prompts together.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedTokenizerBase

from data import InputError, TokenizedExample, Trajectory, one_line, pad_completions
from prompts import stop_token_ids
from run import RolloutArgs

CPU_SEQUENCES = 256  # that a CPU samples at a time
CHECKED_QUERIES = 8  # of a batch, whose first answers the trainer scores too
MAX_VLLM_GAP = 0.1  # nats a token, on average: rounding in bf16 gives 0.01


@dataclass(frozen=True)
class Completion:
    query: int  # which prompt it answers
    token_ids: list[int]  # with the end of turn, if it came
    text: str  # without it
    finish_reason: str  # "stop", or "length" if the token limit cut it off
    logprobs: list[float]  # of each token, under the distribution it was sampled from; or none
    unknown_tokens: int  # ids of the model's padded vocabulary, which have no text


def completion_stats(completions: Sequence[Completion]) -> dict[str, float]:
    """What the metrics say about sampled answers; lengths in tokens."""
    lengths = [len(completion.token_ids) for completion in completions]
    truncated = [completion.finish_reason == "length" for completion in completions]
    return {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": max(lengths),
        "truncated_share": sum(truncated) / len(truncated),
        "unknown_tokens": sum(completion.unknown_tokens for completion in completions),
        "rollout_tokens": sum(lengths),
    }


def trajectories(
    queries: Sequence[TokenizedExample], completions: Sequence[Completion]
) -> list[Trajectory]:
    """Sampled answers as rows for the trainer, each with its query's prompt."""
    return [
        Trajectory(queries[c.query].id, queries[c.query].prompt_ids, c.token_ids)
        for c in completions
    ]


def vllm_gap(
    engine,
    queries: Sequence[TokenizedExample],
    completions: Sequence[Completion],
    args: RolloutArgs,
    refuse: bool,
) -> dict[str, float]:
    """How far apart vLLM's and the trainer's log-probabilities of some samples are. A collective.

    Args:
        completions: B * K of them, in the order of the queries; those of the first
            CHECKED_QUERIES carry log-probabilities.
        refuse: raise InputError if the two are different models.

    Returns:
        the mean and the largest difference of a token, in nats.
    """
    checked = completions[: CHECKED_QUERIES * args.num_rollouts : args.num_rollouts]
    answers = trajectories(queries, checked)
    sampled = pad_completions([c.logprobs for c in checked], answers).to(engine.device)
    scores = engine.score(answers, args.max_tokens_per_micro_batch, args.temperature)  # (N, T)
    gaps = (scores - sampled).abs()
    mean = gaps.sum().item() / sum(len(c.token_ids) for c in checked)
    if refuse and not mean < MAX_VLLM_GAP:
        raise InputError(
            f"{args.model}: vLLM samples from another model than is trained: their "
            f"log-probabilities differ by {mean:.2g} nats a token"
        )
    return {"vllm_gap_mean": mean, "vllm_gap_max": gaps.max().item()}


def import_vllm():
    """Set what must be set first, then import vLLM. Raises InputError if it cannot run here."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it knows no seed of a request
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else attention in fp32 rounds to tf32
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # seconds to compile one function, for no speed
    needed = "requirements.txt" if torch.cuda.is_available() else "requirements-cpu.txt"
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise InputError(f"vLLM cannot be imported ({error}): install {needed}") from error
    if not torch.cuda.is_available() and not current_platform.is_cpu():
        raise InputError(f"no accelerator, and this vLLM is not a CPU build: install {needed}")
    return vllm


class Rollout:
    """A vLLM engine that samples from the weights it was last given.

    Args:
        model: hub id or folder; only its config is read, `load_weights` brings the weights.
        max_length: tokens of prompt plus completion.
        memory_share: of a GPU's memory (of the host's on CPU), for vLLM.
        tensor_parallel: ranks that hold one model together; their number divides the world size.
        sleep: on a GPU, give the memory back while the model trains.
        load_weights_from_disk: start with the folder's own weights (for evaluation).
    """

    model_runner: str | None = None  # of vLLM's two: "V1" or "V2"

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        precision: str = "bf16",
        memory_share: float = 0.3,
        tensor_parallel: int = 1,
        sleep: bool = False,
        load_weights_from_disk: bool = False,
    ):
        self.vllm, self.tokenizer, self.max_length = import_vllm(), tokenizer, max_length
        self.stop_token_ids = stop_token_ids(tokenizer)
        self.sleeps = sleep and torch.cuda.is_available()
        distributed = dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.group, self.member = divmod(rank, tensor_parallel)
        self.num_groups, self.tensor_parallel = world_size // tensor_parallel, tensor_parallel
        options = {}
        if not torch.cuda.is_available():
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            ranks_here = int(os.environ.get("LOCAL_SIZE", 1))
            options = {
                # vLLM touches all of it at the start: ask for no more than can be used
                "kv_cache_memory_bytes": min(
                    int(memory_share * memory / ranks_here),
                    CPU_SEQUENCES * kv_cache_bytes(model, max_length, precision),
                ),
                "max_num_seqs": CPU_SEQUENCES,
                "enforce_eager": True,
                # A CPU generator cannot take back the number drawn at a half-read prompt.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_length, 8192),
            }
        llm_class = self.vllm.LLM  # most of vLLM is imported here
        gc.collect()  # now, and vLLM's five times are over at once
        gc.freeze()
        try:
            self.llm = llm_class(
                model=model,
                skip_tokenizer_init=True,  # token ids in, token ids out
                dtype="bfloat16" if precision == "bf16" else "float32",
                max_model_len=max_length,
                gpu_memory_utilization=memory_share,
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher" if distributed else None,
                load_format="auto" if load_weights_from_disk else "dummy",
                enable_sleep_mode=self.sleeps,
                generation_config="vllm",  # no defaults from the model's folder
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                seed=0,  # of the engine; every request has its own
                use_tqdm_on_load=False,
                **options,
            )
        except Exception as error:  # vLLM raises many types
            if "memory" in one_line(error):
                raise MemoryError(f"vLLM: {one_line(error)}") from error
            raise InputError(f"{model}: vLLM cannot load it: {one_line(error)}") from error
        # Each draws its own numbers from a seed. On a GPU vLLM chooses V2, on a CPU V1.
        config = self.llm.llm_engine.vllm_config
        self.model_runner = "V2" if config.use_v2_model_runner else "V1"
        self.sleep()

    @classmethod
    def from_args(cls, args: RolloutArgs, tokenizer: PreTrainedTokenizerBase) -> "Rollout":
        """An engine for `--model` with the settings of the command line."""
        return cls(
            args.model,
            tokenizer,
            max_length=args.max_length,
            precision=args.precision,
            memory_share=args.vllm_memory,
            tensor_parallel=args.vllm_tensor_parallel,
            sleep=args.vllm_sleep,
        )

    def load_weights(self, named_weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load the trainer's weights, and drop what was cached under the old ones.

        After sleep the order matters: wake the weights, load them, wake the KV cache.
        """
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights})
        except (AttributeError, KeyError, ValueError) as error:
            raise InputError(f"vLLM cannot take the weights: {one_line(error)}") from error
        if not torch.cuda.is_available():
            self.llm.apply_model(_repack)
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: it would answer from old weights")

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU until the next `load_weights`."""
        if self.sleeps:
            self.llm.sleep(level=2)

    def generate(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        max_tokens: int,
        seeds: Sequence[int],
        temperature: float = 1.0,
        logprobs: int = 0,
        on_progress: Callable[[int, int], bool] = lambda finished, total: True,
    ) -> list[Completion] | None:
        """Sample `num_samples` completions of each prompt; they share the prompt's computation.

        All ranks pass all prompts, and each answers its share: every n-th prompt, for n engines.
        Of the ranks that sample together only the first returns the completions.

        Args:
            prompts: token ids.
            max_tokens: of a completion; prompt and completion together fit into `max_length`.
            seeds: one per prompt. The same call after `load_weights` gives the same completions;
                in other company, or with a filled prefix cache, a prompt's numbers round otherwise.
            logprobs: of so many prompts, from the first, the completions carry those of their
                tokens. They take time: a softmax over the whole vocabulary for every token.
            on_progress: called after each engine step with the prompts finished, and all in this
                rank's share. If it returns False, generation is given up, unless ranks sample
                together: one must not stop without the others.

        Returns:
            this rank's completions, those of one prompt next to each other; None if given up.
        """
        share = range(self.group, len(prompts), self.num_groups)
        completions, finished = [], 0
        stream = self.stream(
            prompts, num_samples, max_tokens, seeds, temperature, logprobs=logprobs
        )
        with contextlib.closing(stream):
            for batch in stream:
                completions += batch
                finished += len(batch) // num_samples
                if not on_progress(finished, len(share)) and self.tensor_parallel == 1:
                    return None
        if self.member > 0:
            return []
        return sorted(completions, key=lambda completion: completion.query)

    def stream(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        max_tokens: int,
        seeds: Sequence[int],
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs: int = 0,
    ) -> Iterator[list[Completion]]:
        """Like `generate`, but yields after each engine step the completions that it finished.

        To close the iterator is to give up the rest.
        """
        engine = self.llm.llm_engine
        unfinished = set(range(self.group, len(prompts), self.num_groups))
        for index in sorted(unfinished):
            params = self.vllm.SamplingParams(
                n=num_samples,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=min(max_tokens, self.max_length - len(prompts[index])),
                stop_token_ids=self.stop_token_ids,
                seed=seeds[index],
                logprobs=0 if index < logprobs else None,  # 0: of the sampled token alone
                flat_logprobs=True,  # a list of numbers, not an object for each
                detokenize=False,
                output_kind=self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, params)
        try:
            while engine.has_unfinished_requests():
                finished = []
                try:
                    outputs = engine.step()
                except AttributeError as error:  # a weight that vLLM 0.32 forgot, as Phi's bias
                    raise InputError(f"vLLM cannot sample: {one_line(error)}") from error
                for output in outputs:
                    index = int(output.request_id)
                    unfinished.remove(index)
                    samples = sorted(output.outputs, key=lambda sample: sample.index)
                    finished += [self._completion(index, sample) for sample in samples]
                yield finished
        finally:
            engine.abort_request([str(index) for index in unfinished])

    def _completion(self, query: int, sample) -> Completion:
        token_ids = list(sample.token_ids)
        text_ids = token_ids[:-1] if sample.finish_reason == "stop" else token_ids
        known = [token for token in text_ids if token < len(self.tokenizer)]
        return Completion(
            query=query,
            token_ids=token_ids,
            text=self.tokenizer.decode(known, skip_special_tokens=False),
            finish_reason=sample.finish_reason,
            logprobs=list(sample.logprobs.logprobs) if sample.logprobs else [],
            unknown_tokens=len(text_ids) - len(known),
        )


def kv_cache_bytes(model: str, max_length: int, precision: str) -> int:
    """Of one sequence of `max_length` tokens, in whole blocks of 128."""
    config = AutoConfig.from_pretrained(model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    values = 2 * config.num_hidden_layers * key_value_heads * head_dim
    return (max_length // 128 + 1) * 128 * values * (2 if precision == "bf16" else 4)


def _repack(model: torch.nn.Module) -> None:
    """Pack vLLM's matrices again: on a CPU it computes with packed copies of them.

    When weights are reloaded, vLLM 0.32 keeps the old copies of two kinds: a head that is tied to
    the embeddings, which gets no weights of its own, and a mixture's experts.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():  # others keep only the copy
            method.process_weights_after_loading(module)
