"""The paper's theory, statement by statement: what holds, what does not (docs/theory.md)."""

import itertools
import math
import random
import re
from statistics import fmean
from types import SimpleNamespace

from conftest import ROOT
from train_oswft import control_weights, oswft_loss, oswft_weights
from train_sft import sft_loss

import pytest
import torch

each_k = pytest.mark.parametrize("k", range(1, 9))
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # success probabilities p


def enumerate_rollouts(k: int, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """All outcomes of K rollouts (2^K, K), and how probable each is (2^K,)."""
    rewards = torch.tensor(list(itertools.product([0, 1], repeat=k)))
    right = rewards.sum(dim=1).double()
    return rewards, p**right * (1 - p) ** (k - right)


def solution(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters, and log-probabilities and mask (1, 4) of one expert solution under them."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(1, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(5, (1, 4, 1), generator=generator)
    logprobs = theta.log_softmax(-1).gather(-1, tokens)[..., 0]
    return theta, logprobs, torch.tensor([[False, True, True, True]])


def updates(rewards: torch.Tensor) -> torch.Tensor:
    """The ascent direction w * g0 that the loss gives for each row of rewards (N, K) -> (N, 20)."""
    theta, logprobs, mask = solution()
    losses = [oswft_loss(logprobs, mask, w, 1) for w in oswft_weights(rewards).split(1)]
    rows = [-torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten() for loss in losses]
    return torch.stack(rows)


def g0(seed: int = 0) -> torch.Tensor:
    """The gradient of log pi(o*|q), from autograd alone."""
    theta, logprobs, mask = solution(seed)
    return torch.autograd.grad(logprobs[mask].sum(), theta)[0].flatten()


@each_k
def test_the_update_is_unbiased(k):
    sampled = updates(enumerate_rollouts(k, 0.5)[0])
    for p in SHARES:
        _, probability = enumerate_rollouts(k, p)
        mean = probability @ sampled
        torch.testing.assert_close(mean, (1 - p) * g0(), rtol=1e-6, atol=1e-7)


@each_k
def test_all_signal_is_lost_with_probability_p_to_the_k(k):
    lost = updates(enumerate_rollouts(k, 0.5)[0]).norm(dim=1) == 0
    for p in SHARES:
        _, probability = enumerate_rollouts(k, p)
        assert probability[lost].sum().item() == pytest.approx(p**k)


@each_k
def test_the_second_moment_and_the_error_are_those_of_the_remarks(k):
    sampled, square = updates(enumerate_rollouts(k, 0.5)[0]), g0().square().sum().item()
    for p in SHARES:
        _, probability = enumerate_rollouts(k, p)
        second = (probability @ sampled.square().sum(dim=1)).item()
        error = (probability @ (sampled - (1 - p) * g0()).square().sum(dim=1)).item()
        assert second == pytest.approx(((1 - p) ** 2 + p * (1 - p) / k) * square, abs=1e-6)
        assert error == pytest.approx(p * (1 - p) / k * square, abs=1e-6)


def test_one_rollout_is_hard_example_selection():
    for batch in itertools.product([0.0, 1.0], repeat=4):
        rewards = torch.tensor(batch)[:, None]
        weights = oswft_weights(rewards)
        assert weights.tolist() == control_weights(rewards, "hard").tolist()
    mixed = torch.tensor([[1.0, 0.0]])
    assert oswft_weights(mixed).tolist() != control_weights(mixed, "hard").tolist()


def test_a_gradient_through_the_weight_would_be_another_one():
    theta, logprobs, mask = solution()
    p = logprobs[mask].sum().exp()  # only the expert's own answer is right
    loss = oswft_loss(logprobs, mask, oswft_weights(p[None, None]), 1)
    (ours,) = torch.autograd.grad(-loss, theta, retain_graph=True)
    torch.testing.assert_close(ours.flatten(), (1 - p) * g0(), rtol=1e-6, atol=1e-7)
    (naive,) = torch.autograd.grad((1 - p) * logprobs[mask].sum(), theta)
    extra = -p * logprobs[mask].sum() * g0()  # -grad p * log pi, as grad p = p * g0 here
    torch.testing.assert_close(naive.flatten() - (1 - p) * g0(), extra)
    assert extra.norm() > 0.01 * g0().norm()


def test_weight_one_is_sft():
    theta, logprobs, mask = solution()
    weights = oswft_weights(torch.zeros(1, 2))
    sft = sft_loss(logprobs, mask, torch.ones(1), 3)
    (sft,) = torch.autograd.grad(sft, theta, retain_graph=True)
    (ours,) = torch.autograd.grad(oswft_loss(logprobs, mask, weights, 3), theta)
    assert weights.tolist() == [1.0]
    torch.testing.assert_close(ours, sft)


@each_k
def test_the_mean_weight_does_not_depend_on_k_but_that_of_hard_weights_does(k):
    rewards, _ = enumerate_rollouts(k, 0.5)
    for p in SHARES:
        _, probability = enumerate_rollouts(k, p)
        weights = oswft_weights(rewards)
        for each, mean in ((weights, 1 - p), (control_weights(rewards, "hard"), 1 - p**k)):
            assert (probability @ each.double()).item() == pytest.approx(mean)


def test_chance_takes_a_quarter_off_the_weight_of_an_unsolved_question_with_four_options():
    rewards, probability = enumerate_rollouts(2, 1 / 4)
    assert (probability @ oswft_weights(rewards).double()).item() == pytest.approx(0.75)


def test_a_tenth_of_wrong_references_carries_45_percent_of_the_weight_where_most_is_solved():
    rewards = torch.zeros(1000, 1000)  # the share of a row's ones is its pass rate
    rewards[100:, :866] = 1  # mean weight 0.134; no answer is the wrong reference's
    weights = oswft_weights(rewards)
    assert (weights[:100].sum() / weights.sum()).item() == pytest.approx(0.45, abs=0.005)


def squared_errors(p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """101 constants c between 0 and 1, and E[(R - c)^2] for each."""
    constants = torch.linspace(0, 1, 101, dtype=torch.float64)
    rewards, probability = enumerate_rollouts(1, p)
    return constants, probability @ (rewards - constants).square()  # (2,) @ (2, 101)


def test_p_is_the_constant_with_the_least_mean_squared_error():
    for p in SHARES:
        constants, errors = squared_errors(p)
        torch.testing.assert_close(errors, p * (1 - p) + (constants - p) ** 2)
        assert constants[errors.argmin()].item() == pytest.approx(p)


def test_that_constant_is_the_oracles_advantage_only_at_one_half():
    equal = []
    for p in torch.linspace(0, 1, 11, dtype=torch.float64).tolist():
        constants, errors = squared_errors(p)
        advantage = 1 - p  # Equation 5, with R(o*) = 1
        if (constants[errors.argmin()] - advantage).abs() < 1e-6:
            equal.append(p)
    assert equal == [0.5]


def five_answers() -> tuple[torch.Tensor, ...]:
    """Logits of a policy, rewards, probabilities; and, row by row, the gradients of log pi(o)."""
    theta = torch.tensor([0.3, -1.0, 0.8, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    probability = theta.softmax(0)
    return theta, rewards, probability, torch.eye(5, dtype=torch.float64) - probability


def test_equation_6_is_the_gradient_of_expected_correctness():
    theta, rewards, probability, scores = five_answers()
    p = probability @ rewards
    (gradient,) = torch.autograd.grad(p, theta, retain_graph=True)
    if_right = (probability * rewards / p) @ scores
    if_wrong = (probability * (1 - rewards) / (1 - p)) @ scores
    torch.testing.assert_close(p * (1 - p) * if_right + (1 - p) * (0 - p) * if_wrong, gradient)
    assert gradient.norm() > 0.1


def test_the_baseline_of_least_variance_is_not_p_but_that_of_the_scores_norms():
    _, rewards, probability, scores = five_answers()
    norms = scores.square().sum(dim=1)

    def variance(c: float) -> float:
        updates = (rewards - c)[:, None] * scores
        return (probability @ (updates - probability @ updates).square().sum(dim=1)).item()

    p, best = probability @ rewards, (probability * rewards) @ norms / (probability @ norms)
    assert p.item() == pytest.approx(0.356, abs=5e-4)
    assert best.item() == pytest.approx(0.415, abs=5e-4)
    others = [variance(c / 100) for c in range(101)]
    assert variance(best) < variance(p) and variance(best) <= min(others)


def second_moment(shares: list[float], gradients: torch.Tensor, k: int) -> float:
    """Sigma^2: queries (with their g0, (N, D)) are equally likely; rollouts are enumerated."""
    rewards, _ = enumerate_rollouts(k, 0.5)
    probabilities = torch.stack([enumerate_rollouts(k, p)[1] for p in shares])  # (N, 2^K)
    squares = probabilities @ oswft_weights(rewards).double() ** 2 * gradients.square().sum(dim=1)
    return squares.mean().item()


@each_k
def test_the_second_moment_shrinks_by_one_to_two_times_the_mean_of_p_g0_squared(k):
    """So it shrinks if, and only if, that mean is above 0."""
    for seed in range(10):
        rng = random.Random(seed)
        shares = [rng.choice([0.0, rng.random(), 1.0]) for _ in range(4)]
        gradients = torch.stack([g0(4 * seed + i) * rng.choice([0, 1]) for i in range(4)])
        # SFT's weight is 1, as where p is 0
        gap = second_moment([0.0] * 4, gradients, k) - second_moment(shares, gradients, k)
        mean = (torch.tensor(shares).double() @ gradients.square().sum(dim=1) / 4).item()
        assert mean - 1e-6 <= gap <= 2 * mean + 1e-6
        if k == 1:
            assert gap == pytest.approx(mean, abs=1e-6)  # the lower bound is reached


def two_equal_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """Updates (8, 20) and their probabilities: one of p = 0 or p = 1/2 is drawn, K = 2."""
    rewards, never = enumerate_rollouts(2, 0.0)
    _, half = enumerate_rollouts(2, 0.5)
    return updates(rewards).repeat(2, 1), torch.cat([never, half]) / 2


def test_the_variance_can_grow():
    update, probability = two_equal_queries()
    deviation = update - probability @ update
    variance = (probability @ deviation.square().sum(dim=1)).item()
    assert variance == pytest.approx(0.125 * (g0() @ g0()).item())
    sft = g0().repeat(2, 1)  # either query, weight 1
    assert (sft - sft.mean(dim=0)).norm() <= 1e-6 * sft.norm()


def test_a_constant_weight_of_the_same_mean_has_a_smaller_second_moment():
    update, probability = two_equal_queries()
    square = (g0() @ g0()).item()
    mean = probability @ update
    torch.testing.assert_close(mean, 0.75 * g0())
    assert (mean @ mean).item() == pytest.approx(0.5625 * square)  # every update w = 0.75
    oswft = (probability @ update.square().sum(dim=1)).item()
    assert oswft == pytest.approx(0.6875 * square)  # and SFT has 1 * square


def test_a_smaller_second_moment_does_not_mean_fewer_steps():
    """One query that half of the answers solve: a quarter of the moment, twice the steps."""
    steps, moment = {}, {}
    for name, p in (("sft", 0.0), ("oswft", 0.5)):
        theta, moment[name] = -2.0, (1 - p) ** 2  # of K large, times |g0|^2
        steps[name] = 0
        while theta < 0:
            theta += 0.01 * (1 - p) / (1 + math.exp(theta))  # log pi(o*) = log sigmoid(theta)
            steps[name] += 1
    assert moment["oswft"] == moment["sft"] / 4
    assert steps["oswft"] == pytest.approx(2 * steps["sft"], rel=0.01)


DIRECTIONS = [1, -1, 1j, -1j]  # four queries, equally likely; a point x + iy of the plane is theta
GAP = 0.4  # between J at the start, 1, and its maximum
BOUND = 12  # on |log pi(o*)|


def turning_success(theta: complex) -> list[float]:
    """p of each query: 1/2 -+ u/2, where u leads round the unit circle."""
    u = 0.4 * (1j + 1 - abs(theta) ** 2) * theta
    return [0.5 - u.real / 2, 0.5 + u.real / 2, 0.5 - u.imag / 2, 0.5 + u.imag / 2]


def log_probs(theta: complex) -> list[tuple[float, float]]:
    """log pi(o*) of each query, and its slope along the query's direction."""
    inner = [v.real * theta.real + v.imag * theta.imag for v in DIRECTIONS]
    return [(-8 + 4 * math.sin(z), 4 * math.cos(z)) for z in inner]


def expected_update(theta: complex, shares: list[float]) -> tuple[complex, float]:
    """The gradient of J, and the second moment of its estimate with K = 2."""
    gradient, square = 0, 0.0
    for v, p, (_, slope) in zip(DIRECTIONS, shares, log_probs(theta), strict=True):
        gradient += (1 - p) * slope * v / 4
        square += ((1 - p) ** 2 + p * (1 - p) / 2) * slope**2 / 4
    return gradient, square


def descend(steps: int, every: int = 1, sample: bool = False) -> SimpleNamespace:
    """T steps of plain SGD from 1, step size 1/sqrt(T), new weights every S steps.

    A step is the expected update; with `sample`, that of one drawn query with K = 2 rollouts.
    `left` is the average of |grad J|^2, `theorem` and `repaired` are the two right sides, and
    `smoothness` (L) and `drift` (epsilon_p) are the largest values on the way.
    """
    rng, rate, theta = random.Random(0), steps**-0.5, 1 + 0j
    left = smoothness = sigma2 = drift = 0.0
    shares = turning_success(theta)
    pairs = zip(shares, log_probs(theta), strict=True)
    first = fmean((1 - p) * value for p, (value, _) in pairs)  # J^0(theta_0)
    for step in range(steps):
        if step % every == 0:
            old, shares = shares, turning_success(theta)
            drift = max(drift, *(abs(new - p) for p, new in zip(old, shares, strict=True)))
            # J is -4 + u sin x + v sin y, where u and v are 1 - 2p
            smoothness = max(smoothness, *(abs(1 - 2 * p) for p in shares))
        update, square = expected_update(theta, shares)
        left += abs(update) ** 2 / steps
        sigma2 = max(sigma2, square)
        if sample:
            query = rng.randrange(4)
            wrong = (rng.random() >= shares[query]) + (rng.random() >= shares[query])
            update = wrong / 2 * log_probs(theta)[query][1] * DIRECTIONS[query]
        theta += rate * update
    theorem = (2 * GAP + smoothness * sigma2) * rate + BOUND * drift
    lost = (steps / every - 1) * drift * BOUND
    repaired = (-first + smoothness * sigma2 / 2 + lost) * rate
    sides = {"left": left, "theorem": theorem, "repaired": repaired}
    return SimpleNamespace(**sides, smoothness=smoothness, drift=drift)


@pytest.mark.parametrize("point", [0, 1, 0.6 - 0.8j, -0.3 + 0.9j])
def test_the_field_that_turns_is_the_expected_update_of_the_code(point):
    theta = torch.tensor(complex(point), dtype=torch.complex128, requires_grad=True)
    shares = turning_success(point)
    directions = torch.tensor(DIRECTIONS, dtype=torch.complex128)
    logprobs = -8 + 4 * torch.sin((directions.conj() * theta).real)
    expected = 0
    for logprob, p in zip(logprobs, shares, strict=True):
        for rewards, probability in zip(*enumerate_rollouts(2, p), strict=True):
            weights = oswft_weights(rewards[None])
            loss = oswft_loss(logprob[None, None], torch.ones(1, 1), weights, len(shares))
            expected -= probability * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    assert expected.item() == pytest.approx(expected_update(point, shares)[0])
    # a policy can do this: the expert's answer is right, so it is no likelier than a right one
    assert all(0 < logprob.exp() < p < 1 for logprob, p in zip(logprobs, shares, strict=True))


def test_the_expected_update_need_not_be_a_gradient():
    h, field = 1e-5, lambda theta: expected_update(theta, turning_success(theta))[0]
    across, along = field(h) - field(-h), field(1j * h) - field(-1j * h)
    assert (across.imag - along.real) / (2 * h) == pytest.approx(0.8)  # its curl at 0


def test_theorem_2_fails_where_the_update_goes_in_circles():
    descent = descend(100_000)
    assert descent.left == pytest.approx(0.1213, abs=1e-4)
    assert descent.theorem == pytest.approx(0.0112, abs=1e-4)
    assert descent.smoothness < 1  # |1 - 2p| < 1: every p on the way is a probability
    # with any weights in [0, 1] L is at most 1 and Sigma^2 at most 16: not even these would do
    assert (2 * GAP + 1 * 16) / 100_000**0.5 + BOUND * descent.drift < 0.06


def test_theorem_2_fails_with_sampled_queries_and_rollouts_as_well():
    descent = descend(100_000, sample=True)
    assert descent.left == pytest.approx(0.124, abs=0.004)
    assert descent.smoothness < 1 and descent.theorem < 0.08


@pytest.mark.parametrize("every", [50, 100])
def test_theorem_2_holds_there_if_t_is_at_most_a_quarter_of_s_squared(every):
    descent = descend(every**2 // 4, every)
    assert 0.1 < descent.left < descent.theorem


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("every", [1, 10, 50])
def test_the_repaired_bound_holds(every, sample):
    descent = descend(2_500, every, sample)
    assert 0.1 < descent.left <= descent.repaired


ALL_WRONG = torch.zeros(4, 4)  # weight 1
ONE_WRONG = torch.tensor([[1.0, 1.0, 1.0, 0.0]] * 4)  # weight 1/4, a power of two: no rounding
SOME_WRONG = torch.tensor([[1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 4])  # the same mean weight


def batch_loss(theta: torch.Tensor, rewards: torch.Tensor, normalizer: float = 12) -> torch.Tensor:
    """Four solutions of three tokens under a linear softmax with parameters theta (6, 5)."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(4, 3, 6, dtype=torch.float64, generator=generator)
    tokens = torch.randint(5, (4, 3, 1), generator=generator)
    logprobs = (features @ theta).log_softmax(-1).gather(-1, tokens)[..., 0]
    return oswft_loss(logprobs, torch.ones(4, 3), oswft_weights(rewards), normalizer)


def train(optimizer_class, rewards: torch.Tensor, normalizer: float = 12, **options):
    """The parameters (6, 5) after 50 steps from zero."""
    theta = torch.zeros(6, 5, dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_class([theta], lr=0.01, **options)
    for _ in range(50):
        optimizer.zero_grad()
        batch_loss(theta, rewards, normalizer).backward()
        optimizer.step()
    return theta.detach()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Between two ends, beside the length of the way to the first one."""
    return ((a - b).norm() / a.norm()).item()


def adam(rewards: torch.Tensor, eps: float, normalizer: float = 12) -> torch.Tensor:
    return train(torch.optim.AdamW, rewards, normalizer, eps=eps, weight_decay=0.0)


def test_adam_does_not_see_a_weight_that_all_queries_share():
    assert torch.equal(adam(ALL_WRONG, eps=0.0), adam(ONE_WRONG, eps=0.0))
    assert 0 < distance(adam(ALL_WRONG, eps=1e-8), adam(ONE_WRONG, eps=1e-8)) < 1e-6
    # SGD sees it; so does Adam if gradients are as small as its epsilon
    assert distance(train(torch.optim.SGD, ALL_WRONG), train(torch.optim.SGD, ONE_WRONG)) > 0.7
    assert distance(adam(ALL_WRONG, 1e-8, 1e8), adam(ONE_WRONG, 1e-8, 1e8)) > 0.3


def test_adam_sees_weights_that_differ_within_a_batch():
    assert distance(adam(ONE_WRONG, eps=1e-8), adam(SOME_WRONG, eps=1e-8)) > 0.5


def test_adam_sees_a_weight_that_falls_during_a_run():
    """10,000 queries in batches of 128 are 78 steps: fewer than Adam's memory of 1,000."""
    theta = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=1.0, weight_decay=0.0)
    path = [0.0]
    for step in range(78):
        weights = oswft_weights(torch.tensor([[0.0, 0.0]] if step < 39 else [[1.0, 0.0]]))
        optimizer.zero_grad()
        oswft_loss(theta, torch.ones(1, 1), weights, 1).backward()  # a constant gradient, -w
        optimizer.step()
        path.append(theta.item())
    assert path[39] - path[38] == pytest.approx(1)
    # 0.5 / sqrt(mean of w^2 over the run), where a learning rate schedule would give 0.5
    assert path[78] - path[77] == pytest.approx(0.64, abs=0.01)


def clipped(rewards: torch.Tensor, normalizer: float) -> tuple[float, torch.Tensor]:
    """The norm before clipping at 1, and the gradient after it."""
    theta = torch.zeros(6, 5, dtype=torch.float64, requires_grad=True)
    batch_loss(theta, rewards, normalizer).backward()
    norm = torch.nn.utils.clip_grad_norm_([theta], max_norm=1.0).item()
    return norm, theta.grad


def test_clipping_does_not_see_a_shared_weight_while_the_norm_is_above_its_limit():
    (full, a), (quarter, b) = clipped(ALL_WRONG, 0.1), clipped(ONE_WRONG, 0.1)
    assert full == pytest.approx(4 * quarter) and quarter > 1
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    (full, a), (_, b) = clipped(ALL_WRONG, 100), clipped(ONE_WRONG, 100)
    assert full < 1
    torch.testing.assert_close(a, 4 * b)


def test_clipping_sees_weights_that_differ_within_a_batch():
    (_, a), (norm, b) = clipped(ALL_WRONG, 0.1), clipped(SOME_WRONG, 0.1)
    assert norm > 1
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) < 0.9


def test_the_page_cites_every_test_here_and_no_other():
    cited = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "theory.md").read_text())
    here = {name for name in globals() if name.startswith("test_")}
    assert {*cited} == here - {"test_the_page_cites_every_test_here_and_no_other"}
