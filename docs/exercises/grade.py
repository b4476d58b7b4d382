"""Grade the exercises of this folder: what is passed, what is still missing, and why.

make exercises              # all of them
make exercises ONLY=3       # one, the same as: python docs/exercises/grade.py 3
"""

import importlib.util
import itertools
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demo.tiny import make_config, make_tokenizer
from train_grpo import grpo_advantages
from train_oswft import oswft_loss, oswft_weights

FOLDER = Path(__file__).resolve().parent
SOLUTIONS = FOLDER / "solutions"


KINDS = {  # of a right answer: what may be given, and what to ask for
    str: (str, "one letter in quotes"),
    bool: (bool, "True or False"),
    int: ((int, float), "one number"),
    float: ((int, float), "one number"),
    list: ((list, tuple), "a list of numbers"),
}


def answer(exercise: ModuleType, name: str, right: object):
    """What stands in the place of `...`, if it is of the right answer's kind."""
    value = getattr(exercise, name)
    if value is ...:
        raise NotImplementedError(f"fill in {name}")
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    kind, asked = KINDS[type(right)]
    assert isinstance(value, kind), f"{name} is {value!r}: write {asked}"
    return value


def check_choice(exercise: ModuleType, name: str, right: str | bool, why_not: dict) -> None:
    """One of several choices; `why_not` says of each other one why it is wrong."""
    value = answer(exercise, name, right)
    assert value == right, f"{name}: " + why_not.get(value, f"{value!r} is none of the choices")


def check_number(exercise: ModuleType, name: str, right: float, hint: str, error=0.006) -> None:
    value = answer(exercise, name, right)
    assert abs(value - right) < error, f"{name} is not {value}: {hint}"


def call(function: Callable, *given, shape: tuple[int, ...] = (), hint: str = "") -> torch.Tensor:
    """What the student's function gives, as a tensor of this shape."""
    value = function(*given)
    assert value is not None, f"`{function.__name__}` gave None: is there a `return`?"
    asked = f"`{function.__name__}` must return {f'the shape {shape}' if shape else 'one number'}"
    try:
        with torch.no_grad():
            value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{asked}, not {value!r:.60}. {hint}") from None
    assert value.shape == shape, f"{asked}, yours has the shape {tuple(value.shape)}. {hint}"
    return value


def short(numbers: torch.Tensor, decimals: int = 4) -> list:
    return numbers.detach().double().round(decimals=decimals).tolist()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-4)


# ------------------------------------------------------------------------------------------------
# For each file a function of its name, which returns what there is to see


def ex1_weights(exercise: ModuleType) -> str:
    rewards = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]])
    hint = "A row holds the four answers to one question, and three questions need three weights"
    ours = call(exercise.oswft_weights, rewards.float(), shape=(3,), hint=hint)
    right = oswft_weights(rewards)
    assert not same(ours, 1 - right), (
        "that is p̂, the share of right answers: what is mastered would count most"
    )
    assert not same(ours, right / right.sum()), (
        "your weights sum to 1 over the batch: dividing by Σw makes a batch that is nearly "
        "mastered count as much as a new one (exercise 2)"
    )
    assert not same(ours, (right > 0).float()), (
        "that is `hard`: a question solved once of four times counts like one that never is"
    )
    assert same(ours, right), (
        f"the weights of {rewards.tolist()} are {right.tolist()}, not {short(ours)}"
    )
    for dtype in (torch.long, torch.bool):
        assert exercise.oswft_weights(rewards.to(dtype)).is_floating_point(), "weights are floats"
    rewards = rewards.float().requires_grad_()
    assert not exercise.oswft_weights(rewards).requires_grad, (
        "a gradient flows through your weights: then the loss can fall by changing the weights, "
        "which is another method. `detach` makes constants"
    )
    return "With K = 2 the weights are 0, 0.5 or 1. (In the paper: Algorithm 1, line 7.)"


def ex2_divisor(exercise: ModuleType) -> str:
    torch.manual_seed(0)
    theta = torch.randn(4, 6, 9, requires_grad=True)
    mask = torch.arange(6) >= torch.tensor([[1], [2], [4], [5]])  # 5, 4, 2, 1 tokens
    weights, lengths = torch.tensor([0.0, 0.5, 1.0, 0.25]), mask.sum(dim=1)

    def gradient(loss: Callable, weights: torch.Tensor) -> torch.Tensor:
        value = call(loss, theta.log_softmax(dim=2)[:, :, 0], mask.float(), weights)
        return torch.autograd.grad(value, theta)[0]

    def expected(normalizer: torch.Tensor) -> Callable:
        return lambda logprobs, mask, weights: oswft_loss(logprobs, mask, weights, normalizer)

    by_tokens, by_sum = lengths.sum(), (weights * lengths).sum()
    ours = gradient(exercise.loss_by_tokens, weights)
    assert not same(ours, gradient(expected(by_sum), weights)), (
        "loss_by_tokens divides by Σw: dividing by the sum of the weights cancels how large "
        "they are. Count the tokens, whatever their weights"
    )
    assert not same(ours, gradient(expected(lengths[1:].sum()), weights)), (
        "loss_by_tokens leaves out the tokens of weight 0: then a batch of which half is mastered "
        "would count like a whole new one. They count in the divisor, too"
    )
    assert not same(ours, gradient(expected(len(weights)), weights)), (
        "loss_by_tokens divides by the number of solutions; the docstring asks for tokens"
    )
    right = gradient(expected(by_tokens), weights)
    assert not same(ours, -right), (
        "loss_by_tokens: the sign is wrong: log p is negative, a loss is not"
    )
    assert same(ours, right), (
        "loss_by_tokens: its gradient is not that of the formula. Does each row add up its own "
        "tokens alone (mask, dim 1), and has it its own weight?"
    )
    ours = gradient(exercise.loss_by_weights, weights)
    assert not same(ours, right), (
        "loss_by_weights: that is loss_by_tokens again: divide by the sum of weight * mask"
    )
    assert same(ours, gradient(expected(by_sum), weights)), (
        "loss_by_weights: a weight belongs to each *token*: a solution with five of them adds "
        "five times its weight to the divisor"
    )
    assert same(gradient(exercise.loss_by_weights, weights / 10), ours), (
        "loss_by_weights: the divisor must fall with the weights: is there a clamp?"
    )

    for name, factor in (("tokens", 0.1), ("weights", 1.0)):
        hint = f"compute loss_by_{name} with some weights, then with a tenth of them"
        check_number(exercise, f"FACTOR_BY_{name.upper()}", factor, hint)
    why_not = {
        "A": "within the batch a solution of weight 1 still has twice the gradient of weight 1/2: "
        "the divisor is one number for all",
        "C": "not within a batch: the divisor is one number for all its solutions",
    }
    check_choice(exercise, "VANISHES", "B", why_not)
    hint = "with one solution, w / (w * tokens) does not depend on w at all"
    check_choice(exercise, "VANISHES_ONE_BY_ONE", "C", dict.fromkeys("AB", hint))
    return "A tenth of the weights: a tenth of the gradient, or all of it."


def ex3_hard(exercise: ModuleType) -> str:
    total = call(exercise.expectation, lambda outcome: 1.0, 0.9, 3)
    assert abs(total - 1) < 1e-6, (
        f"the probabilities of all outcomes must add up to 1; yours to {total:.3f}. An outcome "
        "with r right answers of k has p^r (1 - p)^(k - r)"
    )
    hints = {
        (0.9, 0.9): "is p the probability of a *right* answer?",
        (0.9, 0.5): "are all outcomes equally probable?",
    }
    for p, k in ((0.5, 2), (0.9, 1), (0.9, 4)):
        for weighting, right in ((exercise.oswft, 1 - p), (exercise.hard, 1 - p**k)):
            ours = call(exercise.expectation, weighting, p, k).item()
            hint = "each of the 2^K outcomes has its own probability"
            assert abs(ours - right) < 1e-6, (
                f"expectation({weighting.__name__}, {p}, {k}) is {right:.4g}, yours is {ours:.4g}: "
                + hints.get((p, round(ours, 4)), hint)
            )
    for name, right in (("OSWFT_K1", 0.1), ("OSWFT_K4", 0.1), ("HARD_K4", 1 - 0.9**4)):
        hint = f"ask expectation({name[:-3].lower()}, 0.9, {name[-1]})"
        check_number(exercise, f"MEAN_{name}", right, hint)
    for name in ("ZERO_OSWFT_K4", "ZERO_HARD_K4"):
        hint = "all four answers must be right; the two weightings agree on when that is"
        check_number(exercise, name, 0.9**4, hint)
    hint = "one answer right, the others wrong: `hard` says 1, OSW-FT less"
    check_number(exercise, "SAME_AT_K", 1, hint)
    hint = "the mean is 1 - p for every K: compare MEAN_OSWFT_K1 and MEAN_OSWFT_K4"
    check_choice(exercise, "MORE_ANSWERS_CHANGE", "B", dict.fromkeys("AC", hint))
    hint = "it is 1 - 0.9^K: what becomes of 0.9^K?"
    check_number(exercise, "HARD_GOES_TO", 1, hint)
    return "OSW-FT's mean is 0.10 for every K; hard's goes 0.10 0.19 0.34 0.57 for K = 1 2 4 8."


def ex4_stale(exercise: ModuleType) -> str:
    hint = "Append one error at each of the 12 steps"
    fresh, stale = (call(exercise.train, s, shape=(12,), hint=hint).detach() for s in (1, 4))
    shown = short(stale, 2)
    assert abs(fresh[0]) < 1e-6, (
        f"the first error with S = 1 must be 0, and is {fresh[0]:.2f}. Is `weights` 1 - p, and do "
        "you renew before you measure?"
    )
    assert fresh.abs().max() < 1e-6, (
        "with S = 1 weights are renewed before every step, so all errors are 0. Yours: "
        f"{short(fresh, 2)}"
    )
    assert stale.abs().max() > 1e-6, (
        "with S = 4 you renew the weights at every step: then nothing is stale"
    )
    assert stale[::4].abs().max() < 1e-6, (
        "with S = 4 the weights of steps 0, 4, 8 are fresh: their errors must be 0, so renew "
        f"before you measure. Yours: {shown}"
    )
    right = torch.tensor(load(SOLUTIONS / "ex4_stale.py").train(4))
    assert same(stale, right), (
        f"with S = 4 the errors are {short(right, 2)}, not {shown}. Only this step's 32 questions: "
        "[part]. And keep the sign: it says whether weights are too large or too small"
    )
    right = [step % 4 for step in range(8)]
    ages = list(answer(exercise, "AGES", right))
    assert len(ages) == 8, f"AGES is a list of 8 numbers, yours has {len(ages)}"
    assert ages == right, (
        f"AGES is not {ages}: a weight is 0 updates old in the step before which it was set"
    )
    why_not = {
        "B": "the model has learnt since, so p is larger now, and 1 - p is smaller",
        "C": f"look at the errors: {shown}",
    }
    check_choice(exercise, "STALE_WEIGHTS_ARE", "A", why_not)
    hint = "every question is still answered K times, once in a pass over the data"
    check_number(exercise, "ANSWERS", 1, hint)
    check_number(exercise, "SYNCS", 1 / 4, "one sync for four updates: S saves syncs, not answers")
    return f"Errors with S = 4: {shown}."


def ex5_pad(exercise: ModuleType) -> str:
    tokens = torch.tensor([[7, 5, 6, 2, 2, 2], [7, 8, 2, 5, 2, 2]])
    prompt_lengths, lengths = torch.tensor([1, 3]), torch.tensor([4, 6])
    right = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    ours = call(exercise.mask_by_position, tokens, prompt_lengths, lengths, shape=(2, 6)).bool()
    assert ours[0, 3] and ours[1, 5], (
        "your mask leaves out the end of turn: the model would never learn to stop. Positions go "
        "up to lengths - 1, and do not ask for ids"
    )
    assert ours[1, 4], "a token inside a solution may have the pad's id: ask for positions alone"
    assert not ours[0, 4:].any(), "your mask learns padding: positions go up to lengths - 1"
    assert same(ours, right), (
        f"for prompt_lengths {prompt_lengths.tolist()} and lengths {lengths.tolist()} the mask is "
        f"{right.int().tolist()}, not {ours.int().tolist()}"
    )
    hint = "END and PAD are the same id, and `tokens != PAD` leaves it out"
    check_number(exercise, "ENDS_LEARNT", 0, hint)
    by_pad_id = train_with(lambda tokens, lengths, _: exercise.mask_by_pad_id(tokens, lengths))[1]
    solution, by_position = train_with(exercise.mask_by_position)
    assert by_position == solution, f"trained with your mask the model writes {by_position}"
    why_not = {
        "A": f"nothing has taught it to stop. It writes {by_pad_id}",
        "C": f"it has learnt the solution, all but its end. It writes {by_pad_id}",
    }
    check_choice(exercise, "IT_WRITES", "B", why_not)
    return f"By pad id it answers {by_pad_id}, by position {by_position}"


def train_with(make_mask: Callable) -> tuple[str, str]:
    """A tiny model learns four solutions by heart; the first of them, and what it then writes."""
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = {"1+2\n": "1+2=3", "3-1+4\n": "3-1=2;2+4=6", "2*3\n": "2*3=6", "9-2\n": "9-2=7"}
    prompts = [tokenizer(prompt).input_ids for prompt in texts]
    solutions = [[*tokenizer(text).input_ids, end] for text in texts.values()]
    rows = [prompt + solution for prompt, solution in zip(prompts, solutions, strict=True)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [end] * (longest - len(row)) for row in rows])  # (4, T)
    prompt_lengths, lengths = (torch.tensor([len(ids) for ids in each]) for each in (prompts, rows))
    learnt = make_mask(tokens, prompt_lengths, lengths)[:, 1:].bool()  # t is predicted from t - 1

    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(make_config(tokenizer, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(input_ids=tokens[:, :-1]).logits[learnt]
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learnt]).backward()
        optimizer.step()
        optimizer.zero_grad()
    written = []
    while len(written) < 12 and end not in written:
        logits = model(input_ids=torch.tensor([prompts[0] + written])).logits[0, -1]
        written.append(logits.argmax().item())
    return tokenizer.decode(solutions[0]), tokenizer.decode(written)


def ex6_sync(exercise: ModuleType) -> str:
    sampled, scored = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.full((2, 2), -2.5)
    ours = call(exercise.gap_mean, sampled, scored).item()
    assert ours != 0, "differences of both signs cancel: take their sizes before the mean"
    assert abs(ours - 1) < 1e-6, f"the differences are 1.5, 0.5, 0.5, 1.5, their mean 1, not {ours}"
    for forgotten, seed in ((5, 0), (None, 1), (0, 3), (1, 2)):
        gaps = exercise.run(forgotten, seed=seed)
        shown = short(torch.tensor(gaps))
        found = exercise.find_forgotten(gaps)
        if forgotten is None:
            assert found is None, (
                f"all syncs were done, and you say step {found}. The largest of {shown} is "
                "rounding: how far above the usual gap must one be?"
            )
        hint = "" if forgotten else ". A rule that compares with the step before cannot see step 0"
        assert found == forgotten, f"in {shown} it is step {forgotten}; you say {found}{hint}"
    why_not = {
        "A": "it is one update behind at the forgotten step alone: there the gap is ten times as "
        "large",
        "C": "both score the same answers, however these were drawn",
    }
    check_choice(exercise, "WHY_NOT_ZERO", "B", why_not)
    hint = "the sampler's own weights are random: look at run(forgotten=0)"
    check_choice(exercise, "STOPPED_IF_FORGOTTEN_AT_0", True, {False: hint})
    hint = "its first gap is small, and nobody but you looks at the others"
    check_choice(exercise, "STOPPED_IF_FORGOTTEN_AT_5", False, {True: hint})
    return f"Without the sync of step 1: {shown}."


def ex7_weighting(exercise: ModuleType) -> str:
    outcomes = [torch.tensor(list(itertools.product([0.0, 1.0], repeat=k))) for k in (2, 3, 4)]
    ours = [call(exercise.undecided_weights, rows, shape=(len(rows),)) for rows in outcomes]
    for p in (0.1, 0.5, 0.9):
        chances = [(p * rows + (1 - p) * (1 - rows)).prod(dim=1) for rows in outcomes]  # (2^K,)
        means = [(chance * weights).sum() for chance, weights in zip(chances, ours, strict=True)]
        factors = [f"{mean / (p * (1 - p)):.3f}" for mean in means]
        assert factors == ["1.000"] * 3, (
            f"at p = {p} the mean of your weight is {', '.join(factors)} times p (1 - p) at K = 2, "
            "3, 4. K answers scatter less around their own mean than around p"
        )
    for rows, weights in zip(outcomes, ours, strict=True):
        assert same(weights, rows.var(dim=1)), (  # no other weight is unbiased and symmetric
            f"the mean is right, but your weights of {rows.int().tolist()} are {short(weights)}: "
            "use all answers, and not their order"
        )
    why_not = {
        "B": "at p = 0.5 the mean of (1 - p̂)^2 is 1/4 * 1 + 1/2 * 1/4 = 0.375, not 0.25",
        "C": "that is what you have just repaired",
        "D": "not in C: that is what you have just repaired",
    }
    check_choice(exercise, "PLUG_IN_IS_RIGHT", "A", why_not)
    values = list(answer(exercise, "WEIGHTS_AT_K2", []))
    assert values == [0, 0.5], (
        f"WEIGHTS_AT_K2 is not {values}: two answers agree or differ. What do you give for each?"
    )
    return "Unbiased at K = 2, 3, 4."


def ex8_groups(exercise: ModuleType) -> str:
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    hint = "Each answer has its own advantage"
    ours = call(exercise.grpo_advantages, rewards, shape=(4, 3), hint=hint)
    right = grpo_advantages(rewards)
    assert not ours.isnan().any(), (
        "a group whose answers are all alike has std 0, and 0 / 0 is not a number: one such group "
        "would break the whole model"
    )
    assert ours[1:3].abs().max() < 1e-3, (
        "a group that is all right or all wrong has advantages 0: compare an answer with its own "
        "group (dim 1), not with the batch"
    )
    assert not same(ours, right * 1.5**0.5), "your std divides by G; that of a sample by G - 1"
    assert same(ours, right), (
        f"the advantages of {rewards.tolist()} are {short(right)}, not {short(ours)}"
    )
    for p, g in ((0.9, 4), (0.5, 2), (0.0, 3)):
        ours = call(exercise.no_signal, p, g).item()
        assert abs(ours - p**g) > 1e-6 or p == 0, (
            f"no_signal({p}, {g}): a group that is all wrong has no signal either"
        )
        assert abs(ours - p**g - (1 - p) ** g) < 1e-6, (
            f"no_signal({p}, {g}) is not {ours:.4g}: all g answers are right, or all are wrong"
        )
    check_number(exercise, "GRPO_G8", 0.99**8, "ask no_signal(0.01, 8)")
    hint = "the weight is 0 only if both answers are right"
    check_number(exercise, "OSWFT_K2", 0.01**2, hint, error=5e-5)
    check_number(exercise, "WEIGHT", 1, "it is 1 - p̂, and no answer is right")
    check_number(exercise, "ADVANTAGE", 0, "no answer is better than the mean of its group")
    return "Hard questions teach OSW-FT through the expert, and GRPO only where it is lucky."


# ------------------------------------------------------------------------------------------------
# What the student reads

GRADERS = (
    *(ex1_weights, ex2_divisor, ex3_hard, ex4_stale),
    *(ex5_pad, ex6_sync, ex7_weighting, ex8_groups),
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(grader: Callable[[ModuleType], str], path: Path) -> tuple[bool, str]:
    """Whether the exercise in this file is passed, and what to say about it."""
    try:
        return True, f"passed. {grader(load(path))}"
    except AssertionError as error:
        return False, f"not yet: {error}"
    except Exception as error:
        if str(error).startswith(("write ", "fill in ")):  # a gap
            return False, f"to do: {error}"
        # an error of the student's code: where?
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)  # of a SyntaxError
        where = f"line {line}" if line else "what you gave does not fit"
        return False, f"{where}: {type(error).__name__}: {error}"


def main(*only: str) -> int:
    """Grade all exercises, or one by its number; returns the exit status."""
    chosen = [grader for i, grader in enumerate(GRADERS, 1) if only in ((), (str(i),))]
    if not chosen:
        print(f"no exercise {' '.join(only)!r}: give one number, 1 to {len(GRADERS)}")
        return 1
    passed = 0
    for grader in chosen:
        name = grader.__name__
        right, message = grade(grader, FOLDER / f"{name}.py")
        passed += right
        indent = " " * 15
        print(textwrap.fill(message, 100, initial_indent=f"{name:15}", subsequent_indent=indent))
    print(f"{passed} of {len(chosen)} passed")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
