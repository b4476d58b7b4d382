"""Grade the exercises of this folder: what is passed, what is still missing, and why.

make exercises              # all of them
make exercises ONLY=3       # one, the same as: python docs/exercises/grade.py 3
"""

import itertools
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demo.tiny import COMMITTED, make_tokenizer
from train_grpo import grpo_advantages
from train_oswft import oswft_loss, oswft_weights

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, Qwen3ForCausalLM

FOLDER = Path(__file__).resolve().parent


def shown(value) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().double().round(decimals=4).tolist()
    return getattr(value, "__name__", repr(value))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-4, equal_nan=True)


def check(function: Callable, *given, right, mistakes: Sequence[tuple] = ()) -> None:
    """Compare what the student's function returns with the right value.

    Each mistake is a wrong value, and the hint that its student is shown.
    """
    name, value = function.__name__, function(*given)
    assert value is not None, f"`{name}` gave None: is there a `return`?"
    value, right = torch.as_tensor(value), torch.as_tensor(right)
    shape = f"the shape {tuple(right.shape)}" if right.shape else "one number"
    assert value.shape == right.shape, (
        f"`{name}` must return {shape}, yours has the shape {tuple(value.shape)}"
    )
    for wrong, hint in mistakes:
        assert not same(value, torch.as_tensor(wrong)), f"`{name}` {hint}"
    call = f"{name}({', '.join(map(shown, given))})"
    assert same(value, right), f"{call} is {shown(right)}, yours is {shown(value)}"


RIGHT = {  # answers, and the hint for who gives another one
    "FACTOR_BY_TOKENS": (0.1, "compute the loss with some weights, then with a tenth of them"),
    "FACTOR_BY_WEIGHTS": (1.0, "compute the loss with some weights, then with a tenth of them"),
    "VANISHES": ("B", "the divisor is one number for all solutions of the batch"),
    "VANISHES_ONE_BY_ONE": ("C", "w / (w * tokens) does not depend on w at all"),
    "MEAN_OSWFT_K1": (0.1, "ask expectation(oswft, 0.9, 1)"),
    "MEAN_OSWFT_K4": (0.1, "ask expectation(oswft, 0.9, 4)"),
    "MEAN_HARD_K4": (0.3439, "ask expectation(hard, 0.9, 4)"),
    "ZERO_OSWFT_K4": (0.6561, "it is 0 where all four answers are right"),
    "ZERO_HARD_K4": (0.6561, "it is 0 where all four answers are right"),
    "SAME_AT_K": (1.0, "one answer right, the others wrong: `hard` says 1, OSW-FT less"),
    "MORE_ANSWERS_CHANGE": ("B", "compare MEAN_OSWFT_K1 and MEAN_OSWFT_K4"),
    "HARD_GOES_TO": (1.0, "it is 1 - 0.9^K: what becomes of 0.9^K?"),
    "AGES": ([0, 1, 2, 3, 0, 1, 2, 3], "in the step that renews them weights are 0 updates old"),
    "STALE_WEIGHTS_ARE": ("A", "the model has learnt since. What has become of p, and of 1 - p?"),
    "ANSWERS": (1.0, "each question is still answered K times, once in a pass"),
    "SYNCS": (0.25, "one sync for four updates: S saves syncs, not answers"),
    "ENDS_LEARNT": (0.0, "END and PAD are the same id, and `tokens != PAD` leaves it out"),
    "IT_WRITES": ("B", "it has learnt the solution. Has anything taught it to stop?"),
    "WHY_NOT_ZERO": ("B", "both models score the same answers, with the same weights"),
    "STOPPED_IF_FORGOTTEN_AT_0": (True, "look at run(forgotten=0)"),
    "STOPPED_IF_FORGOTTEN_AT_5": (False, "its first gap is small, and only that one is looked at"),
    "PLUG_IN_IS_RIGHT": ("A", "at p = 0.5 the mean of (1 - p̂)^2 is 1/4 * 1 + 1/2 * 1/4"),
    "WEIGHTS_AT_K2": ([0, 0.5], "two answers agree or differ. What do you give for each?"),
    "GRPO_G8": (0.9227, "ask no_signal(0.01, 8)"),
    "OSWFT_K2": (0.0001, "the weight is 0 only if both answers are right"),
    "WEIGHT": (1.0, "it is 1 - p̂, and no answer is right"),
    "ADVANTAGE": (0.0, "no answer is better than the mean of its group"),
}
ASKED = {str: "a letter in quotes", bool: "True or False", float: "a number", list: "a list"}


def check_answers(exercise: SimpleNamespace) -> None:
    for name in [name for name in RIGHT if hasattr(exercise, name)]:
        value, (right, hint) = getattr(exercise, name), RIGHT[name]
        if value is ...:
            raise NotImplementedError(f"fill in {name}")
        value = value.upper() if isinstance(value, str) else value
        kind = (int, float) if isinstance(right, float) else type(right)
        assert isinstance(value, kind), f"{name} is {value!r}: write {ASKED[type(right)]}"
        close = isinstance(right, float) and abs(value - right) <= max(0.02 * right, 5e-5)
        assert close or value == right, f"{name} is not {value!r}: {hint}"


# ---- For each file a function of its name, which returns what there is to see --------------------


def ex1_weights(exercise: SimpleNamespace) -> str:
    rewards = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]])
    right = oswft_weights(rewards)
    mistakes = [
        (1 - right, "gives p̂, the share of right answers: what is mastered would count most"),
        ((right > 0).float(), "counts a question solved once in four times like one never solved"),
    ]
    for dtype in (torch.float, torch.long, torch.bool):
        check(exercise.oswft_weights, rewards.to(dtype), right=right, mistakes=mistakes)
    assert not exercise.oswft_weights(rewards.float().requires_grad_()).requires_grad, (
        "a gradient flows through your weights. `detach` makes constants"
    )
    return "With K = 2 the weights are 0, 0.5 or 1. (In the paper: Algorithm 1, line 7.)"


def ex2_divisor(exercise: SimpleNamespace) -> str:
    mask = torch.tensor([[0.0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1]])
    weights = torch.tensor([0.5, 1.0, 0.0])
    logprobs = torch.tensor([[-5.0, -1, -2, -1], [-4, -3, -6, -6], [-5, -4, -2, -1]])
    given = (logprobs, mask, weights)
    total, tokens, weight_of_tokens = oswft_loss(*given, 1.0), mask.sum(), (weights @ mask).sum()
    mistakes = [
        (total / mask.numel(), "divides by all positions, prompt and padding too"),
        (total / weight_of_tokens, "divides by the sum of the weights: count tokens, not weights"),
        (total / len(mask), "divides by the number of solutions, not by that of their tokens"),
    ]
    check(exercise.loss_by_tokens, *given, right=total / tokens, mistakes=mistakes)
    mistakes = [
        (total / tokens, "is `loss_by_tokens` again: divide by the sum of weight * mask"),
        (total / weights.sum(), "counts a weight once for a solution, not for each of its tokens"),
    ]
    check(exercise.loss_by_weights, *given, right=total / weight_of_tokens, mistakes=mistakes)
    return "A tenth of the weights: a tenth of the gradient, or all of it."


def ex3_hard(exercise: SimpleNamespace) -> str:
    for p, k in ((0.9, 4), (0.6, 2)):
        mistakes = [
            (1 - 0.5**k, "takes all outcomes as equally probable"),
            (1 - (1 - p) ** k, "takes p for the probability of a wrong answer"),
        ]
        check(exercise.expectation, exercise.hard, p, k, right=1 - p**k, mistakes=mistakes)
        check(exercise.expectation, exercise.oswft, p, k, right=1 - p)
    return "OSW-FT's mean is 0.10 for every K; hard's goes 0.10 0.19 0.34 0.57 for K = 1 2 4 8."


def ex4_stale(exercise: SimpleNamespace) -> str:
    old, p = torch.tensor([0.9, 0.4]), torch.tensor([0.3, 0.8])
    renewed = [(p, "gives p where weights are renewed; a weight is 1 - p")]
    renewed += [(old, "does not renew the weights before every s-th step")]
    for step, s in ((0, 4), (8, 4), (3, 1)):
        check(exercise.weights_in_use, step, s, old, p, right=1 - p, mistakes=renewed)
    stale = [(1 - p, "renews the weights at every step: then nothing is stale")]
    check(exercise.weights_in_use, 5, 4, old, p, right=old, mistakes=stale)
    errors = [round(error, 2) for error in exercise.train(4)]
    return f"Errors with S = 4: {errors}."


def ex5_pad(exercise: SimpleNamespace) -> str:
    tokens = torch.tensor([[7, 5, 6, 2, 2, 2], [7, 8, 2, 5, 2, 2]])
    prompt_lengths, lengths = torch.tensor([1, 3]), torch.tensor([4, 6])
    right = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    after_prompt = torch.arange(6) >= prompt_lengths[:, None]
    mistakes = [
        (right & (tokens != 2), "leaves out the end of turn. Ask for positions, not for ids"),
        (after_prompt, "learns padding: positions go up to lengths - 1"),
    ]
    given = (tokens, prompt_lengths, lengths)
    check(exercise.mask_by_position, *given, right=right, mistakes=mistakes)
    by_pad_id = write_after_training(lambda *given: exercise.mask_by_pad_id(*given[:2]))
    by_position = write_after_training(exercise.mask_by_position)
    return f"By pad id it answers {by_pad_id}, by position {by_position}"


def write_after_training(make_mask: Callable) -> str:
    """A tiny model learns four solutions by heart: what it then writes after the first question."""
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = {"1+2\n": "1+2=3", "3-1+4\n": "3-1=2;2+4=6", "2*3\n": "2*3=6", "9-2\n": "9-2=7"}
    prompts = [tokenizer(prompt).input_ids for prompt in texts]
    rows = [torch.tensor([*tokenizer(a + b).input_ids, end]) for a, b in texts.items()]
    tokens = pad_sequence(rows, batch_first=True, padding_value=end)  # (4, T)
    prompt_lengths, lengths = (torch.tensor([len(ids) for ids in each]) for each in (prompts, rows))
    learnt = make_mask(tokens, prompt_lengths, lengths)[:, 1:].bool()  # t is predicted from t - 1

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(AutoConfig.from_pretrained(COMMITTED, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(input_ids=tokens[:, :-1]).logits[learnt]
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learnt]).backward()
        optimizer.step()
        optimizer.zero_grad()
    written = model.generate(torch.tensor(prompts[:1]), max_new_tokens=12, eos_token_id=end)[0]
    return tokenizer.decode(written[len(prompts[0]) :])


def ex6_sync(exercise: SimpleNamespace) -> str:
    sampled, scored = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.full((2, 2), -2.5)
    mistakes = [(0.0, "cancels differences of both signs: take their sizes before the mean")]
    check(exercise.gap_mean, sampled, scored, right=1.0, mistakes=mistakes)
    for forgotten in (None, 0, 5):
        gaps = [float(gap) for gap in exercise.run(forgotten)]
        found, seen = exercise.find_forgotten(gaps), [round(gap, 4) for gap in gaps]
        assert found == forgotten, f"find_forgotten({seen}) is {forgotten}, yours is {found}"
    return f"Without the sync of step 5: {seen}."


def ex7_weighting(exercise: SimpleNamespace) -> str:
    for k in (2, 3, 4):
        rows = torch.tensor(list(itertools.product([0.0, 1.0], repeat=k)))  # all outcomes
        p_hat = rows.mean(dim=1)
        hint = "has a mean of 1/2, 2/3, 3/4 times p (1 - p), at K = 2, 3, 4"
        mistakes = [(p_hat * (1 - p_hat), hint)]
        check(exercise.undecided_weights, rows, right=rows.var(dim=1), mistakes=mistakes)
    return "Unbiased at K = 2, 3, 4."


def ex8_groups(exercise: SimpleNamespace) -> str:
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    right = grpo_advantages(rewards)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    of_batch = (rewards - rewards.mean()) / rewards.std()
    mistakes = [
        (centred / rewards.std(dim=1, keepdim=True), "divides 0 by 0 where all answers are alike"),
        (of_batch, "compares with the whole batch: take the mean and the std of each group"),
    ]
    check(exercise.grpo_advantages, rewards, right=right, mistakes=mistakes)
    for p, g in ((0.7, 3), (0.5, 4)):
        mistakes = [(p**g, "forgets that a group that is all wrong has no signal either")]
        check(exercise.no_signal, p, g, right=p**g + (1 - p) ** g, mistakes=mistakes)
    return "Hard questions teach OSW-FT through the expert, and GRPO only where it is lucky."


GRADERS = (ex1_weights, ex2_divisor, ex3_hard, ex4_stale)
GRADERS += (ex5_pad, ex6_sync, ex7_weighting, ex8_groups)


def grade(grader: Callable, path: Path) -> tuple[bool, str]:
    """Whether the exercise in this file is passed, and what to say about it."""
    try:
        exercise = SimpleNamespace(**runpy.run_path(str(path)))
        seen = grader(exercise)
        check_answers(exercise)
        return True, f"passed. {seen}"
    except NotImplementedError as error:  # a gap
        return False, f"not done yet: {error}"
    except AssertionError as error:
        return False, f"not right yet: {error}"
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = frames[-1].lineno if frames else getattr(error, "lineno", "?")  # of a SyntaxError
        in_answer = isinstance(error, NameError) and frames[-1].name == "<module>"
        if in_answer and len(error.name) == 1:
            return False, f'line {line}: a letter is written in quotes: "{error.name.upper()}"'
        return False, f"line {line}: {type(error).__name__}: {error}"


def main(*numbers: str) -> int:
    """Grade the exercises of these numbers, or all; returns the exit status."""
    chosen = [grader for n, grader in enumerate(GRADERS, 1) if not numbers or str(n) in numbers]
    passed = 0
    for grader in chosen:
        name = grader.__name__
        right, message = grade(grader, FOLDER / f"{name}.py")
        passed += right
        print(textwrap.fill(f"{name:15}{message}", 100, subsequent_indent=" " * 15))
    print(f"{passed} of {len(chosen)} passed" if chosen else "give numbers, 1 to 8")
    return 0 if chosen and passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
