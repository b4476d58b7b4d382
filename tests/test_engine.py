"""How the model learns: any split has the dense gradient, and a state goes on in any shape."""

import copy
import json
import os
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path

import logprobs
import train_grpo
import train_oswft
import train_sft
from arguments import keywords
from conftest import ROOT, needs_compiler, on_ranks, slow
from data import InputError, Trajectory, load_tokenizer
from dense import (
    ROWS,
    VOCABULARY,
    assert_same,
    dense_grpo_loss,
    dense_logprobs,
    dense_oswft_loss,
    make_model,
    make_rows,
)
from engine import STATE_KEYS, Engine, init_training, load_config, load_engine, load_model
from rollout import pad_completions

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from families import FAMILIES
from families import make_model as make_family
from safetensors.torch import load_file, save_file
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers import Phi3Config

# ---- The gradient --------------------------------------------------------------------------------

SETTINGS = {  # of every case, unless it says otherwise
    **{"model": "", "data": "", "learning_rate": 1e-2, "max_grad_norm": 0.05},
    **{"precision": "fp32", "max_tokens_per_micro_batch": 60},
}


class Twins:
    """An engine, and the same model without one, which takes the same steps."""

    def __init__(self, patch: pytest.MonkeyPatch, args, tied=True, vocabulary: int = VOCABULARY):
        # so few logits at a time that a pass has several chunks; above 20 tokens none is kept
        patch.setattr(logprobs, "MAX_LOGITS", dict.fromkeys(("cpu", "cuda"), 7 * vocabulary))
        patch.setattr(logprobs, "MAX_KEPT", 20 * vocabulary)
        patch.setattr("engine.GATHER_BYTES", 4096)  # several buckets
        sizes = {"vocab_size": vocabulary, "intermediate_size": vocabulary}
        model = make_model(tie_word_embeddings=tied, **sizes)
        self.args, self.dense, self.gradients = args, copy.deepcopy(model), {}
        parameters = self.dense.parameters()
        self.adam = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0.0)
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # set for the engine before this one
        self.engine = Engine(model, **keywords(args, Engine))
        for name, buffer in self.engine.model.named_buffers():  # rotary frequencies, in bf16 too
            assert buffer.dtype == torch.float32, name
        self.step, self.engine.step = self.engine.step, self.keep_gradients_and_step

    def keep_gradients_and_step(self, learning_rate: float) -> dict[str, float]:
        for name, parameter in self.engine.model.named_parameters():
            self.gradients[name] = safe_get_full_grad(parameter).cpu().clone()
        return self.step(learning_rate)

    def compare(self, loss: torch.Tensor, stats: dict[str, float]) -> None:
        """The step of the dense twin with the one that the engine has just taken."""
        bf16 = self.args.precision == "bf16"
        share = 0.06 / self.args.temperature**2  # of bf16's rounding, which dividing logits adds to
        bounds = {"largest": share, "norm": share} if bf16 else {}
        self.adam.zero_grad()
        (loss + 0 * sum(p.sum() for p in self.dense.parameters())).backward()
        norm = torch.cat([p.grad.double().flatten() for p in self.dense.parameters()]).norm()
        assert_same(torch.tensor(stats["loss"]), loss.detach(), **bounds)
        assert_same(torch.tensor(stats["grad_norm"]), norm, **bounds)
        for name, parameter in self.dense.named_parameters():
            assert_same(self.gradients[name].float(), parameter.grad, **bounds)
            # Adam divides by a gradient's size and enlarges rounding: both take the same gradient
            parameter.grad.copy_(self.gradients[name])
        if bf16:
            return  # two roundings do not take the same path from here on

        torch.nn.utils.clip_grad_norm_(self.dense.parameters(), self.args.max_grad_norm)
        self.adam.step()
        names = dict(self.dense.named_parameters())
        for name, weight in self.engine.named_parameters():
            parameter = names.pop(name).detach()
            assert_same(weight.cpu(), parameter)
            parameter.copy_(weight)  # so that each step is compared by itself
        assert not names, f"not handed out: {names}"


def compare_oswft(patch: pytest.MonkeyPatch, tied: bool = True, **settings) -> None:
    args = train_oswft.Args(**SETTINGS | settings)
    twins = Twins(patch, args, tied)
    lazily = twins.engine.micro_batches  # here they are all made first, which changes nothing
    patch.setattr(twins.engine, "micro_batches", lambda *rows, **keep: [*lazily(*rows, **keep)])
    generator = torch.Generator().manual_seed(1)
    some = torch.tensor([0, 0.5, 1, 0, 1, 0.25, 0, 0.75, 1, 0, 1])
    one = (torch.arange(ROWS) == 3).float()  # fewer rows than ranks
    for weights in (some, one, torch.zeros(ROWS)):
        rows = make_rows(generator)
        tokens = sum(len(row.response_ids) for row in rows)
        normalizer = tokens if args.normalizer == "token" else ROWS
        loss = dense_oswft_loss(twins.dense, rows, weights, normalizer)
        stats = train_oswft.update(twins.engine, rows, weights, args)
        assert stats["skipped_sequences"] == int((weights == 0).sum()), stats
        learnt = [row for row, weight in zip(rows, weights.tolist(), strict=True) if weight]
        assert stats["train_tokens"] == sum(map(len, learnt)), stats
        twins.compare(loss, stats)
        if args.precision == "bf16":
            return


def compare_grpo(
    patch: pytest.MonkeyPatch, steps_per_batch=2, tied=True, vocabulary=VOCABULARY, **settings
) -> None:
    """Two batches; where a batch has several updates, the ratio leaves its bounds in the later."""
    size = 4 // steps_per_batch  # queries, of three answers each
    batch = {"temperature": 0.7, "rollout_batch_size": 4, "train_batch_size": size}
    args = train_grpo.Args(**SETTINGS | batch | settings)
    twins = Twins(patch, args, tied, vocabulary)
    close = 0.2 if args.precision == "bf16" else 2e-3  # nats
    generator, clipped = torch.Generator().manual_seed(2), torch.zeros(2)
    for rewards in ([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 0]], [[0, 0, 0]] * 3 + [[0, 1, 0]]):
        advantages = train_grpo.grpo_advantages(torch.tensor(rewards))  # (4, 3)
        keep = advantages.flatten() != 0
        rows = make_rows(generator, len(keep))
        with torch.no_grad():
            old = [dense_logprobs(twins.dense, row, args.temperature) for row in rows]
        scores = twins.engine.eval_logprobs(rows, args.temperature, keep)
        expected = pad_completions([each.tolist() for each in old], rows) * keep[:, None]
        torch.testing.assert_close(scores.cpu(), expected, rtol=0, atol=close)
        for start in range(0, 4, size):
            part, piece = slice(start, start + size), slice(3 * start, 3 * (start + size))
            flat = advantages[part].flatten().tolist()
            loss, low, high = dense_grpo_loss(twins.dense, rows[piece], flat, old[piece], args)
            old_part = scores.view(4, 3, -1)[part] if steps_per_batch > 1 else None
            stats = train_grpo.update(twins.engine, rows[piece], advantages[part], old_part, args)
            live = [row for row, advantage in zip(rows[piece], flat, strict=True) if advantage]
            assert stats["skipped_sequences"] == 3 * size - len(live), stats
            twins.compare(loss, stats)
            if args.precision == "bf16":
                return
            tokens = sum(len(row.response_ids) for row in live)
            assert stats["clipped_low_share"] * tokens == pytest.approx(low), (stats, low)
            assert stats["clipped_high_share"] * tokens == pytest.approx(high), (stats, high)
            assert (stats["approx_kl"] > 1e-6) == (start > 0 and bool(live)), stats
            clipped += torch.tensor([low, high])
    assert steps_per_batch == 1 or clipped.min() > 0, "no token was ever clipped"


# a row, some rows, and all rows in a micro-batch
SPLITS = [partial(compare_oswft, max_tokens_per_micro_batch=n) for n in (1, 60, 10_000)]
SPLITS += [partial(compare_grpo, max_tokens_per_micro_batch=n) for n in (1, 60, 10_000)]
SETTINGS_OF_A_RUN = [
    partial(compare_oswft, tied=False),
    *[partial(compare_oswft, zero_stage=stage, normalizer="sequence") for stage in (1, 2)],
    *[partial(compare_oswft, zero_stage=stage, precision="bf16") for stage in (1, 2, 3)],
    partial(compare_oswft, gradient_checkpointing=True),
    partial(compare_oswft, tied=False, cpu_offload=True),
    partial(compare_grpo, steps_per_batch=1),
    partial(compare_grpo, steps_per_batch=4, tied=False, zero_stage=2, clip_low=0.9, clip_high=1.1),
    # so large matrices that ZeRO-3 shards them anew after every pass, also after scoring
    partial(compare_grpo, zero_stage=3, vocabulary=4000, gradient_checkpointing=True),
    partial(compare_grpo, precision="bf16"),
]


def compare_gradients(*comparisons: partial) -> None:
    """On every rank. On a GPU the reference stays on the CPU."""
    if not dist.is_initialized():
        init_training()
    if torch.cuda.is_available():
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # vLLM is not imported here
    with pytest.MonkeyPatch.context() as patch:
        for compare in comparisons:
            print(compare, flush=True)  # the last one, if it fails
            compare(patch)


@slow
def test_the_gradient_equals_a_dense_single_process_reference():
    on_ranks(2, compare_gradients, *SPLITS, *SETTINGS_OF_A_RUN, launcher="deepspeed")


def test_on_one_rank_too_the_gradient_of_each_split_equals_the_reference(one_rank):
    compare_gradients(*SPLITS)


# ---- Compiled layers -----------------------------------------------------------------------------


@slow
@needs_compiler
def test_on_one_rank_compiled_layers_have_the_gradient_of_the_reference(one_rank, monkeypatch):
    compare_oswft(monkeypatch, compile=True)


def compile_on_two_ranks(patch: pytest.MonkeyPatch) -> None:
    """Traced as for inductor, whose kernels would take a minute more: hooks fire as with them."""
    aot = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    patch.setattr(torch.nn.Module, "compile", aot)
    for stage in (1, 2):
        compare_oswft(patch, compile=True, zero_stage=stage)
    args = train_oswft.Args(**SETTINGS, compile=True)
    engine = Twins(patch, args).engine
    if dist.get_rank() == 1:  # in eager mode its hooks fire in another order
        torch._dynamo.config.recompile_limit = 1
        for batch in engine.micro_batches([Trajectory("of a new shape", [1], [2])] * 2):
            with pytest.raises(FailOnRecompileLimitHit):
                engine.backward(engine.logprobs(batch).sum(), batch.is_last)
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
    else:
        patch.delenv("TORCHDYNAMO_DISABLE")
    with pytest.raises(InputError, match="TORCHDYNAMO_DISABLE"):
        Engine(make_model(), **keywords(args, Engine))


@slow
def test_on_two_ranks_too_and_a_rank_that_cannot_compile_raises():
    on_ranks(2, compare_gradients, compile_on_two_ranks)


def test_a_model_that_transformers_does_not_call_compilable_is_refused(one_rank):
    model = make_family(*FAMILIES["Qwen3-Next"])
    with pytest.raises(InputError, match="Qwen3NextForCausalLM is not compiled"):
        Engine(model, precision="fp32", compile=True)


# ---- The state -----------------------------------------------------------------------------------

LEARNING_RATE = 1e-3
Weights = dict[str, torch.Tensor]


def open_engine(folder: Path, precision: str, zero_stage: int, cpu_offload=False) -> Engine:
    settings = {"precision": precision, "zero_stage": zero_stage, "cpu_offload": cpu_offload}
    return load_engine(str(folder), 64, **settings)


def save(engine: Engine, folder: Path) -> None:
    engine.save_state(folder)
    engine.save_model(load_tokenizer(engine.model.name_or_path), folder)


def take_step(engine: Engine, number: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(number)
    ids = lambda: torch.randint(40, (9,), generator=generator).tolist()  # noqa: E731
    rows = [Trajectory("id", ids(), ids()) for _ in range(5)]
    args = train_sft.Args(model="", data="", learning_rate=LEARNING_RATE)
    return train_sft.update(engine, rows, torch.ones(len(rows)), args)


def weights_of(engine: Engine) -> Weights:
    """The fp32 ones."""
    names = dict(engine.model.named_parameters())
    return {name: engine._get_state(names[name], "master").cpu().clone() for name in names}


def assert_close(ours: Weights, theirs: Weights, tolerance: float = 0.0) -> None:
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance)


def save_states(folder: Path) -> dict[str, tuple[Weights, Weights]]:
    """In each precision two steps, a state, and a third step; returns the weights after both."""
    init_training()
    steps = {}
    for precision in ("fp32", "bf16"):
        engine = open_engine(folder / "model", precision, zero_stage=3)
        for number in range(2):
            take_step(engine, number)
        save(engine, folder / precision)
        at_two = weights_of(engine)
        take_step(engine, 2)
        steps[precision] = at_two, weights_of(engine)
    return steps


def go_on(folder: Path, steps: dict[str, tuple[Weights, Weights]]) -> None:
    """With each ZeRO stage, and with offload, from the saved states to the same third step."""
    init_training()
    for precision, (at_two, at_three) in steps.items():
        for stage in (1, 2, 3):
            take_third_step(folder / precision, at_two, at_three, precision, stage)
    for stage in (1, 3):  # the weights are rounded, too
        take_third_step(folder / precision, at_two, at_three, precision, stage, cpu_offload=True)


def take_third_step(folder: Path, at_two: Weights, at_three: Weights, *settings, **more) -> None:
    engine = open_engine(folder, *settings, **more)
    engine.load_state(folder)
    assert engine.num_steps == 2, engine.num_steps
    saved = {path.stem: load_file(path) for path in (folder / "state").iterdir()}
    names = dict(engine.model.named_parameters())
    assert saved.keys() == names.keys()
    for name, tensors in saved.items():
        assert tensors.keys() == set(STATE_KEYS)
        for key, tensor in tensors.items():  # every number of the state, to the last bit
            ours = engine._get_state(names[name], key).cpu()
            assert torch.equal(ours, tensor), (settings, more, name, key)
    assert_close(weights_of(engine), at_two)
    for name, weight in engine.named_parameters():  # what the model computes with: rounded from it
        assert torch.equal(weight.cpu(), at_two[name].to(weight.dtype)), (settings, more, name)
    take_step(engine, 2)
    share = 0.02 if engine.model.dtype == torch.float32 else 0.6
    assert_close(weights_of(engine), at_three, share * LEARNING_RATE)
    take_no_step_without_a_finite_gradient(engine)


def take_no_step_without_a_finite_gradient(engine: Engine) -> None:
    adam = [value for state in engine.adam.state.values() for value in state.values()]
    before, adam_before = weights_of(engine), copy.deepcopy(adam)
    for batch in engine.micro_batches([Trajectory("bad", [1, 2], [3])]):
        loss = engine.logprobs(batch).sum()
        engine.backward((0 * loss).sqrt(), batch.is_last)  # its value is 0, its gradient NaN
    with pytest.raises(FloatingPointError, match=r"step 4: the gradient is (inf|nan)"):
        engine.step(LEARNING_RATE)
    assert_close(weights_of(engine), before)
    assert all(map(torch.equal, adam, adam_before)), "a moment of Adam has changed"


@slow
def test_a_state_goes_on_over_other_ranks_and_stages_and_no_bad_gradient_touches_it(
    model_copy, tmp_path
):
    steps = on_ranks(2, save_states, tmp_path)
    on_ranks(3, go_on, tmp_path, steps)  # with three, shards are padded


@pytest.mark.parametrize("damage", ["half a file", "a file less"])
def test_a_state_that_is_not_whole_is_refused(damage, tiny_engine, tmp_path):
    tiny_engine.save_state(tmp_path)
    path = min((tmp_path / "state").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    if damage == "a file less":
        path.unlink()
    with pytest.raises(InputError, match=str(path)):
        tiny_engine.load_state(tmp_path)


# ---- Processor and memory ------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("call", ["keep_freed_memory", "share_cores"])  # the second is the control
def test_on_a_cpu_freed_memory_is_kept_for_the_next_pass(call):
    code = f"import psutil, cpu, torch; cpu.{call}(); torch.ones(2**27)"
    code += "; print(psutil.Process().memory_info().rss)"
    held = int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert (held > 4 * 2**27) == (call == "keep_freed_memory")


SAY = "import os; print(os.environ.get('OMP_WAIT_POLICY'), flush=True); os._exit(0)"
ENTRIES = ("train_sft.py", "train_oswft.py", "train_grpo.py", "evaluate.py", "demo.from_scratch")
ENTRIES += ("demo", "bench.step", "recipes.trl_sft", "docs/exercises/grade.py", "make")


@slow
@pytest.mark.parametrize(
    ("entry", "asked"), [*((entry, None) for entry in ENTRIES), (ENTRIES[0], "active")]
)
def test_threads_wait_passively_unless_the_user_says_otherwise(entry, asked, tmp_path):
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
    assert output.split() == [asked or "passive"]


# ---- Models that are loaded and saved ------------------------------------------------------------


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


def test_a_folder_with_too_few_or_too_many_weights_is_refused(model_copy):
    path = model_copy / "model.safetensors"
    weights = load_file(path)
    embedding, layer = weights["model.embed_tokens.weight"], "model.layers.1.mlp.up_proj"
    without = {name: weight for name, weight in weights.items() if name != f"{layer}.weight"}
    more = {**weights, f"{layer}.bias": torch.zeros(1)}  # or the scales of a file in FP8
    own_head = {**weights, "lm_head.weight": 2 * embedding}
    wrongs = {"missing": without, f"unexpected: {layer}.bias": more, "ties head": own_head}
    for named, wrong in wrongs.items():
        save_file(wrong, path, metadata={"format": "pt"})
        with pytest.raises(InputError, match=named):
            load_model(str(model_copy), 128)
    save_file({**weights, "lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
    load_model(str(model_copy), 128)


def test_heads_for_later_tokens_which_transformers_leaves_out_are_told(tmp_path, capsys):
    make_family(*FAMILIES["Qwen3-Next"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model(str(tmp_path), 128)
    assert "note: mtp.fc.weight and others" in capsys.readouterr().err


def test_an_adapter_and_a_file_that_is_cut_off_are_refused(model_copy):
    (model_copy / "adapter_config.json").write_text("{}")  # without peft transformers ignores it
    with pytest.raises(InputError, match="adapter"):
        load_model(str(model_copy), 128)
    (model_copy / "adapter_config.json").unlink()
    whole = (model_copy / "model.safetensors").read_bytes()
    (model_copy / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(InputError, match=f"^if {model_copy} is damaged, delete it: .* resumed"):
        load_engine("its base", 128, checkpoint=model_copy)


def test_two_files_with_the_same_tensor_are_refused_if_one_of_them_would_be_read(model_copy):
    weights = load_file(model_copy / "model.safetensors")
    names = sorted(weights)

    def lay(files: dict[str, list[str]], index: dict[str, str] | None) -> None:
        for old in model_copy.glob("model*.safetensors*"):
            old.unlink()
        for file, inside in files.items():
            part = {name: weights[name] for name in inside}
            save_file(part, model_copy / f"model{file}.safetensors", metadata={"format": "pt"})
        if index:
            placed = {name: f"model{file}.safetensors" for name, file in index.items()}
            text = json.dumps({"metadata": {}, "weight_map": placed})
            (model_copy / "model.safetensors.index.json").write_text(text)

    halves = dict.fromkeys(names[:9], "-1") | dict.fromkeys(names[9:], "-2")
    shards = {"-1": names[:9], "-2": names[9:]}
    for files, index in (
        ({"": names}, dict.fromkeys(names, "")),  # as some tools write
        (shards, halves),
        ({**shards, "-old": names}, halves),  # nobody reads what the index does not name
    ):
        lay(files, index)
        load_model(str(model_copy), 128)
    for files, index in (
        ({"": names, "-old": names}, None),  # vLLM would read both
        ({"": names, **shards}, halves),  # transformers reads the first, vLLM the others
        ({**shards, "-2": [*names[8:]]}, halves),
    ):
        lay(files, index)
        with pytest.raises(InputError, match="too: delete one of the two"):
            load_model(str(model_copy), 128)


def test_a_model_with_longrope_is_read_as_far_as_its_short_factors_go(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    Phi3Config(**sizes, **lengths, rope_parameters=rope).save_pretrained(tmp_path)
    load_config(str(tmp_path), 128)
    with pytest.raises(InputError, match="reads 128 tokens, not 129"):
        load_config(str(tmp_path), 129)


def test_fp32_starts_from_the_file_s_own_digits(model_copy, one_rank):
    path = model_copy / "model.safetensors"
    weights = {name: weight.float() * 1.001 for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for name, weight in load_engine(str(model_copy), 128, precision="fp32").named_parameters():
        assert torch.equal(weight, weights[name]), name


def test_a_saved_model_keeps_the_base_s_stops_and_tells_transformers_4_its_rope(
    tiny, tiny_engine, tmp_path, monkeypatch
):
    model = tiny_engine.model
    monkeypatch.setitem(model.config.rope_parameters, "rope_theta", 1e6)
    for own, stops in ((None, [2, 0]), (5, [2, 0, 5]), ([0, 7], [2, 0, 7])):
        monkeypatch.setattr(model.generation_config, "eos_token_id", own)
        tiny_engine.save_model(load_tokenizer(str(tiny / "model")), tmp_path)
        saved = load_model(str(tmp_path), 128)
        assert saved.generation_config.eos_token_id == stops
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 1e6  # version 4's
    assert saved.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
