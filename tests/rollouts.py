"""Run by test_rollout.py through the launcher: vLLM samples from the trainer's current weights.

rollouts.py <tiny model folder> <folder to write to> <tied|untied> <fp32|bf16> <tensor parallel>

On a GPU (test_gpu.py) vLLM sleeps while the model trains; on a CPU it has no sleep.
"""

import sys

from data import InputError, Trajectory, load_tokenizer, pad_completions
from engine import Engine, finish, gather, init_distributed
from rollout import Rollout, kv_cache_bytes, vllm_gap
from train_oswft import Args, update

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

TEMPERATURE = 0.8
TOLERANCE = {"fp32": 1e-3, "bf16": 0.15}  # nats, of one token
MEMORY_SHARE = 0.1


def main(tiny: str, folder: str, tied: str, precision: str, tensor_parallel: str) -> None:
    init_distributed()
    rank = dist.get_rank()
    tokenizer = load_tokenizer(tiny)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings = tied == "tied"
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config)
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    # so large a rate that the second model has nothing to do with the first
    args = Args(model=folder, data="", learning_rate=0.05)
    engine = Engine(model, precision=precision, max_tokens_per_micro_batch=200)
    sampling = {"precision": precision, "temperature": TEMPERATURE, "vllm_sleep": True}
    sampling |= {"vllm_memory": MEMORY_SHARE, "vllm_tensor_parallel": int(tensor_parallel)}
    rollout = Rollout(folder, tokenizer, 512, **sampling)

    # Long prompts with a common beginning: several blocks that the prefix cache would keep.
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(8, 28, (300,), generator=generator).tolist()
    prompts = [shared + torch.randint(8, 28, (n,), generator=generator).tolist() for n in (3, 1, 5)]
    rows = [Trajectory("id", prompt[:50], prompt[50:99]) for prompt in prompts]

    def sample(seeds):
        mine = rollout.generate(
            prompts, 2, max_tokens=40, seeds=seeds, temperature=TEMPERATURE, logprobs=3
        )
        return sorted(gather(mine), key=lambda completion: completion.query)

    def largest_gap(completions):
        rows = [Trajectory("id", prompts[c.query], c.token_ids) for c in completions]
        vllms = pad_completions([c.logprobs for c in completions], rows).to(engine.device)
        return float((engine.eval_logprobs(rows, TEMPERATURE) - vllms).abs().max())

    rollout.load_weights(engine.named_weights())
    first = sample([1, 2, 3])
    assert [completion.query for completion in first] == [0, 0, 1, 1, 2, 2]
    assert first[0].token_ids != first[1].token_ids, "two samples of one prompt are the same"
    check_sleep(rollout)
    if rollout.sleeps:
        reserved = torch.cuda.memory_reserved()
        torch.empty(2**30, dtype=torch.uint8, device="cuda")  # an update's activations: freed, kept
    rollout.load_weights(engine.named_weights())
    if rollout.sleeps:
        assert torch.cuda.memory_reserved() < reserved + 2**29, "beside it vLLM would not fit"
    again = sample([1, 2, 3])  # with an empty prefix cache, too: a full one rounds otherwise
    same = [ours.token_ids == theirs.token_ids for ours, theirs in zip(first, again, strict=True)]
    assert all(same), f"the same seeds gave other samples: {same}"
    assert sample([4, 5, 6]) != first, "other seeds gave the same samples"
    for completions in (first, again):
        assert largest_gap(completions) < TOLERANCE[precision], largest_gap(completions)
    for completion in first:
        stopped = completion.token_ids[-1] in rollout.stop_token_ids
        assert stopped == (completion.finish_reason == "stop")
        assert stopped or len(completion.token_ids) == 40

    rollout.sleep()
    for _ in range(3):
        update(engine, rows, torch.ones(3), args)
    assert largest_gap(first) > 3, "the update was not large: this test shows nothing"
    queries = [Trajectory("id", prompt, []) for prompt in prompts]
    try:
        vllm_gap(engine, rollout, queries, [[c] for c in first], refuse=True)
        raise AssertionError("samples of another model were not refused")
    except InputError as error:
        assert "vLLM samples from another model than is trained" in str(error)
    rollout.load_weights(engine.named_weights(gather_bytes=20_000))
    second = sample([1, 2, 3])
    assert second != first
    gap = largest_gap(second)
    assert gap < TOLERANCE[precision], gap
    shown = vllm_gap(engine, rollout, queries, [[c] for c in second], refuse=True)
    assert 0 <= shown["vllm_gap_mean"] <= shown["vllm_gap_max"] < TOLERANCE[precision]
    if rank == 0:
        print("equal:", tied, precision, tensor_parallel, f"gap {gap:.2g} nats,", end=" ")
        print(engine.device.type, rollout.model_runner, flush=True)


def check_sleep(rollout: Rollout) -> None:
    """On a GPU, most of vLLM's cache comes back."""
    if not rollout.sleeps:
        return
    cache = kv_cache_bytes(rollout.model, rollout.max_length, rollout.precision)  # of one sequence
    before = torch.cuda.mem_get_info()[0]
    rollout.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed > 0.9 * cache, f"{freed / 2**20:.0f} of {cache / 2**20:.0f} MiB came back"
    print(f"asleep: {freed / 2**30:.1f} GiB came back", flush=True)


if __name__ == "__main__":
    main(*[arg for arg in sys.argv[1:] if not arg.startswith("--local_rank")])
    finish(0)
