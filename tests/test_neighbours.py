"""recipes/neighbours.py: each method against its formula in plain floats, limits, the page."""

import inspect
import math
import re

import pytest
import torch

from conftest import ROOT
from recipes import neighbours
from recipes.neighbours import (
    asft_penalty,
    chord_mu,
    chord_phi,
    dft_weights,
    hpt_weights,
    iw_sft_weights,
    luffy_advantages,
    luffy_weights,
    osft_weights,
    profit_weights,
    rasft_token_weights,
    rasft_weights,
    rft_weights,
    sc_sdpo_weights,
)
from train_grpo import grpo_advantages
from train_oswft import oswft_loss, oswft_weights
from train_sft import sft_loss

PAGE = (ROOT / "recipes" / "neighbours.md").read_text()
PROBABILITIES = (1e-6, 0.01, 0.05, 0.2, 0.5, 0.8, 0.99, 1.0)
TOKEN_WEIGHTS = (dft_weights, profit_weights, chord_phi, luffy_weights)
REWARDS = torch.tensor([[1.0] * right + [0.0] * (4 - right) for right in range(5)])  # (5, 4)


def log(probabilities) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def random_case():
    """Logits, reference logits, tokens, mask, and the tokens' log-probabilities under both."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator).requires_grad_()
    ref_logits = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator)
    tokens = torch.randint(7, (3, 5), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]]).bool()
    both = [x.log_softmax(-1).gather(-1, tokens[..., None])[..., 0] for x in (logits, ref_logits)]
    return logits, ref_logits, tokens, mask, *both


# ------------------------------------------------------------------------------------------------
# Tokens


@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (dft_weights, lambda p: p),
        (profit_weights, lambda p: 1.0 if p >= 0.1 else 0.0),
        (chord_phi, lambda p: p * (1 - p)),
        (luffy_weights, lambda p: 0.1 * p / (p + 0.1) ** 2),
    ],
)
def test_a_tokens_weight_is_its_formula(function, formula):
    weights = function(log([PROBABILITIES, PROBABILITIES[::-1]]))
    expected = [formula(p) for p in PROBABILITIES]
    assert weights[0].tolist() == pytest.approx(expected)
    assert weights[1].tolist() == pytest.approx(expected[::-1])


def test_dft_is_the_objective_of_train_sft_and_on_sure_tokens_it_is_sft():
    _, _, _, mask, logprobs, _ = random_case()
    ones = torch.ones(3, dtype=torch.float64)
    ours = oswft_loss(dft_weights(logprobs) * logprobs, mask, ones, 7)
    torch.testing.assert_close(ours, sft_loss(logprobs, mask, 7, "dft"))
    assert dft_weights(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2


def test_profit_without_a_threshold_is_sft_and_above_1_learns_nothing():
    logprobs = log([PROBABILITIES])
    assert profit_weights(logprobs, 0.0).eq(1).all()
    assert profit_weights(logprobs, 1.1).eq(0).all()


def test_chords_phi_is_0_at_both_ends_and_largest_at_a_half():
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)[None]
    weights = chord_phi(grid.log())[0]
    assert weights[0] == weights[-1] == 0 and weights.argmax() == 50
    assert weights[50].item() == pytest.approx(0.25)


def test_luffys_weight_is_the_gradient_of_its_shaped_objective():
    logprobs = log([PROBABILITIES]).requires_grad_()
    p = logprobs.exp()
    (gradient,) = torch.autograd.grad((p / (p + 0.1)).sum(), logprobs)
    torch.testing.assert_close(luffy_weights(logprobs), gradient)


def test_luffys_weight_is_largest_at_gamma_and_without_shaping_it_is_dfts():
    grid = torch.linspace(0.01, 1, 100, dtype=torch.float64)[None]
    weights = luffy_weights(grid.log(), gamma=0.3)[0]
    assert weights.argmax() == 29 and weights[29].item() == pytest.approx(0.25)
    # gamma * f(p) goes to p as gamma grows: no shaping, up to a constant
    unshaped = 1e6 * luffy_weights(grid.log(), gamma=1e6)
    torch.testing.assert_close(unshaped, dft_weights(grid.log()), rtol=1e-5, atol=0)


def test_otr_with_no_reward_for_other_tokens_is_dft_in_expectation():
    logits, _, tokens, _, logprobs, _ = random_case()
    (dft,) = torch.autograd.grad((dft_weights(logprobs) * logprobs).sum(), logits)
    everything = logits.log_softmax(-1)
    reward = torch.nn.functional.one_hot(tokens, 7)  # of each token that could be sampled
    expected = (everything.exp().detach() * reward * everything).sum()
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], dft)


# ------------------------------------------------------------------------------------------------
# A frozen reference


def mean_log_ratio(logprobs, ref_logprobs, mask) -> list[float]:
    """log (π / π_ref) per token of each row, in plain floats."""
    rows = []
    for new, old, used in zip(logprobs.tolist(), ref_logprobs.tolist(), mask.tolist(), strict=True):
        ratios = [n - o for n, o, u in zip(new, old, used, strict=True) if u]
        rows.append(sum(ratios) / len(ratios))
    return rows


def test_iw_sft_weighs_a_solution_by_the_geometric_mean_of_its_ratio_up_to_a_cap():
    *_, mask, logprobs, ref_logprobs = random_case()
    ratios = [math.exp(x) for x in mean_log_ratio(logprobs, ref_logprobs, mask)]
    cap = sorted(ratios)[1]
    weights = iw_sft_weights(logprobs, ref_logprobs, mask, cap=cap)
    assert weights.tolist() == pytest.approx([min(ratio, cap) for ratio in ratios])
    assert iw_sft_weights(logprobs, logprobs - 3, mask).tolist() == [16.0] * 3  # e³ > 16
    assert iw_sft_weights(logprobs, logprobs, mask).tolist() == [1.0] * 3  # SFT at the start


def test_asfts_penalty_is_the_kl_from_the_reference_and_pulls_back_to_it():
    logits, ref_logits, *_ = random_case()
    penalty = asft_penalty(logits, ref_logits, kl_weight=0.3)
    for row in range(3):
        for t in range(5):
            p, q = [x[row, t].softmax(-1).tolist() for x in (logits, ref_logits)]
            kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            assert penalty[row, t].item() == pytest.approx(0.3 * kl)
    (gradient,) = torch.autograd.grad(penalty.sum(), logits)
    torch.testing.assert_close(gradient, 0.3 * (logits.softmax(-1) - ref_logits.softmax(-1)))
    torch.testing.assert_close(asft_penalty(logits, logits), torch.zeros(3, 5).double())


def test_rasft_weighs_a_token_by_its_probability_and_the_clipped_drift_of_its_row():
    *_, mask, logprobs, _ = random_case()
    ref_logprobs = logprobs.detach() + torch.tensor([[0.1], [-5.0], [5.0]])  # the drift of each row
    weights = rasft_token_weights(logprobs, ref_logprobs, mask)
    drift = [math.exp(-x) for x in mean_log_ratio(logprobs, ref_logprobs, mask)]
    assert drift[0] == pytest.approx(math.exp(0.1)) and drift[1] < 0.4 and drift[2] > 1.2
    for row, ratio in enumerate((math.exp(0.1), 0.4, 1.2)):
        expected = [ratio * math.exp(x) for x in logprobs[row].tolist()]
        assert weights[row].tolist() == pytest.approx(expected)
    torch.testing.assert_close(rasft_token_weights(logprobs, logprobs, mask), dft_weights(logprobs))


@pytest.mark.parametrize("function", [iw_sft_weights, rasft_token_weights])
def test_prompt_and_padding_have_no_say_in_a_rows_ratio(function):
    *_, mask, logprobs, ref_logprobs = random_case()
    elsewhere = torch.where(mask, ref_logprobs, -torch.inf)
    torch.testing.assert_close(
        function(logprobs, elsewhere, mask), function(logprobs, ref_logprobs, mask)
    )


# ------------------------------------------------------------------------------------------------
# Sampled answers


def test_hpt_switches_to_the_expert_at_its_gate():
    rewards = torch.tensor([[1.0] * right + [0.0] * (8 - right) for right in range(9)])
    assert hpt_weights(rewards).tolist() == [1.0] + [0.0] * 8
    assert hpt_weights(rewards, gate=2 / 8).tolist() == [1.0] * 3 + [0.0] * 6
    assert hpt_weights(rewards, gate=1.0).tolist() == [1.0] * 9  # SFT
    # the other end of hard-thresholding, which leaves a query out only when all is right
    torch.testing.assert_close(1 - hpt_weights(1 - rewards), oswft_weights(rewards, "hard"))


def test_hpts_default_gate_takes_no_query_from_grpo_that_has_a_signal_there():
    signal = grpo_advantages(REWARDS).ne(0).any(dim=1)
    assert signal.any() and not (signal & hpt_weights(REWARDS).bool()).any()


def test_sc_sdpo_weighs_a_query_by_the_standard_deviation_of_its_rewards():
    for weight, answers in zip(sc_sdpo_weights(REWARDS).tolist(), REWARDS.tolist(), strict=True):
        mean = sum(answers) / 4
        assert weight == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in answers) / 4))
    assert sc_sdpo_weights(REWARDS).argmax() == 2  # half of them right
    assert sc_sdpo_weights(REWARDS)[[0, 4]].tolist() == [0.0, 0.0]


def test_luffy_compares_own_answers_and_the_solution_with_their_common_mean():
    expert = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])  # one solution that the verifier refuses
    advantages = luffy_advantages(REWARDS, expert)
    for row, answers, solution in zip(
        advantages.tolist(), REWARDS.tolist(), expert.tolist(), strict=True
    ):
        mean = (sum(answers) + solution) / 5
        assert row == pytest.approx([r - mean for r in (*answers, solution)])


def test_the_solution_in_luffys_group_has_the_weight_of_osw_ft_up_to_a_constant():
    for k in (1, 2, 7):
        rewards = (torch.rand(50, k, generator=torch.Generator().manual_seed(k)) < 0.5).float()
        advantages = luffy_advantages(rewards, torch.ones(50))
        torch.testing.assert_close(advantages[:, -1], k / (k + 1) * oswft_weights(rewards))


def rasft_by_hand(answers: list[float]) -> tuple[float, list[float]]:
    right = sum(answers)
    if right == 0 or right == len(answers):
        return 1.0, [0.0] * len(answers)
    group = [1 + (1 - right / len(answers)) * 2, *answers]
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / len(group))
    advantages = [math.tanh(0.4 * (r - mean) / std) / (1 + right) for r in group]
    pairs = zip(advantages[1:], answers, strict=True)
    return advantages[0], [0.25 * min(max(a, 0.02), 0.15) * (r > 0) for a, r in pairs]


@pytest.mark.parametrize("k", [1, 3, 4])
def test_rasft_is_its_formula_and_learns_the_solution_alone_where_nothing_differs(k):
    rewards = torch.tensor([[1.0] * right + [0.0] * (k - right) for right in range(k + 1)])
    solutions, answers = rasft_weights(rewards)
    for row, own in enumerate(rewards.tolist()):
        solution, expected = rasft_by_hand(own)
        assert solutions[row].item() == pytest.approx(solution, abs=1e-5)
        assert answers[row].tolist() == pytest.approx(expected, abs=1e-5)


def test_rasft_unlearns_a_solution_whose_reward_is_below_that_of_right_answers():
    rewards = torch.ones(1, 3)
    assert rasft_weights(rewards, expert_min=0.5)[0].item() < 0
    assert rasft_weights(rewards, expert_min=1.5)[0].item() > 0


def test_an_rft_step_is_in_expectation_the_gradient_of_the_pass_rate():
    logits = random_case()[0][0, 0]  # a policy over 7 answers, of which two are right
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    logprobs = logits.log_softmax(-1)
    chance = logprobs.exp()
    learnt = (chance.detach() * rft_weights(rewards) * logprobs).sum()
    ours, pass_rate = [
        torch.autograd.grad(x, logits, retain_graph=True)[0]
        for x in (learnt, (chance * rewards).sum())
    ]
    torch.testing.assert_close(ours, pass_rate)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_osft_learns_nothing_on_average_unless_it_samples_colder_than_it_trains(temperature):
    logits = random_case()[0][0, 0]
    sampled = (logits / temperature).softmax(-1).detach()
    learnt = (sampled * osft_weights(torch.zeros(7)) * logits.log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(learnt, logits)
    if temperature == 1:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    else:
        assert gradient.argmax() == logits.argmax() and gradient.max() > 0.01


def test_chords_mu_warms_up_and_then_falls_along_half_a_cosine():
    steps = dict(warmup_steps=200, decay_steps=400, peak=0.5, valley=0.02)
    for step, expected in (
        (0, 0.0),
        (50, 0.125),
        (200, 0.5),
        (400, 0.26),
        (600, 0.02),
        (9999, 0.02),
    ):
        assert chord_mu(step, **steps) == pytest.approx(expected)
    assert chord_mu(300, **steps) == pytest.approx(0.02 + 0.48 * (1 + math.sqrt(0.5)) / 2)
    assert (chord_mu(0), chord_mu(200)) == (0.9, 0.05)
    values = [chord_mu(step) for step in range(201)]
    assert values == sorted(values, reverse=True)
    assert {chord_mu(step, 0, 0, 0.1, 0.1) for step in range(5)} == {0.1}  # CHORD-φ


# ------------------------------------------------------------------------------------------------
# All of them


def test_no_gradient_flows_through_any_weight():
    _, _, _, mask, logprobs, ref_logprobs = random_case()
    rewards = REWARDS.clone().requires_grad_()
    weights = [function(logprobs) for function in TOKEN_WEIGHTS]
    weights += [f(logprobs, ref_logprobs, mask) for f in (iw_sft_weights, rasft_token_weights)]
    weights += [f(rewards) for f in (hpt_weights, sc_sdpo_weights, rft_weights, osft_weights)]
    weights += [luffy_advantages(rewards, torch.ones(5)), *rasft_weights(rewards)]
    assert logprobs.requires_grad and not any(weight.requires_grad for weight in weights)


@pytest.mark.parametrize("function", TOKEN_WEIGHTS)
def test_in_the_loss_each_token_gets_its_weight_and_a_masked_one_gets_nothing(function):
    logprobs = torch.tensor([[-0.5, float("-inf"), -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    loss = oswft_loss(function(logprobs) * logprobs, mask, torch.ones(1), 2.0)
    loss.backward()
    first, _, last = function(logprobs)[0].tolist()
    assert logprobs.grad[0, [0, 2]].tolist() == pytest.approx([-first / 2, -last / 2])
    assert loss.item() == pytest.approx((0.5 * first + 2 * last) / 2)


# ------------------------------------------------------------------------------------------------
# The page


def table(header: str) -> dict[str, list[float]]:
    """The rows of the page's table that begins so, by their names."""
    text = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in f"{header} | {text}".splitlines()]
    return {name: [float(cell) for cell in cells] for name, *cells in (rows[0], *rows[2:])}


def test_the_pages_weights_of_solutions_are_those_of_the_functions():
    rows = table("right of 4")
    assert rows.pop("right of 4") == REWARDS.sum(dim=1).tolist()
    computed = {
        "OSW-FT": oswft_weights(REWARDS),
        "LUFFY": luffy_advantages(REWARDS, torch.ones(5))[:, -1],
        "HPT": hpt_weights(REWARDS),
        "RASFT": rasft_weights(REWARDS)[0],
        "SC-SDPO": sc_sdpo_weights(REWARDS),
    }
    assert rows == {name: pytest.approx(w.tolist(), abs=0.005) for name, w in computed.items()}


def test_the_pages_weights_of_tokens_are_those_of_the_functions():
    rows = table("p")
    logprobs = log([rows.pop("p")])
    assert rows.pop("SFT, OSW-FT") == [1.0] * 5
    names = ("DFT", "ProFit", "CHORD's φ", "LUFFY's shaping")
    assert rows == {
        name: pytest.approx(function(logprobs)[0].tolist(), abs=0.005)
        for name, function in zip(names, TOKEN_WEIGHTS, strict=True)
    }


def test_the_page_names_every_function_and_each_names_its_source():
    functions = inspect.getmembers(neighbours, inspect.isfunction)
    assert len(functions) == 14
    numbers = set()
    for name, function in functions:
        assert f"`{name}`" in PAGE
        source = inspect.getdoc(function).split("Source: ")[1]
        numbers |= set(re.findall(r"arXiv (\d{4}\.\d{5})", source))
    assert numbers and numbers <= set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", PAGE))
