"""What cancels the weights: the obvious mistakes beside the right loss, on one batch.

    python -m recipes.cancels    # prints the table of recipes/codebases.md

A random tiny Qwen3 that is never updated, 8 rows, 2 of them in each micro-batch. Only the weights
change: `EARLY` the model fails at most questions, `LATE` it has mastered most. So whatever differs
between the two comes from the weights alone.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from data import Trajectory, collate
from train_oswft import oswft_loss, oswft_weights

LENGTHS = [24, 6, 40, 12, 5, 32, 8, 19]  # tokens of the solutions: what is hard is long
MICRO_BATCH = 2  # rows
STEPS = 78  # of the paper's run; the first half with the early weights, the rest with the late ones
HEADER = [
    "loss",
    "gradient norm: early, late",
    "cosine",
    "Adam's path off by: as it is, clipped",
    "in the log: loss, grad_norm",
    "one row off by",
]
EARLY = oswft_weights(
    torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0], [1, 1], [0, 0], [1, 0], [0, 0]])
)
LATE = oswft_weights(torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1], [1, 1], [0, 0], [1, 1], [1, 0]]))


def losses(
    logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The right loss first, then the mistakes.

    Args:
        logprobs: (B, T) log pi of each token.
        mask: (B, T), 1 on the solutions' tokens, 0 elsewhere.
        weights: (B,)
    """
    tokens = mask.sum()
    nll = -(logprobs * mask)  # (B, T)
    weighted, weighted_mask = weights[:, None] * nll, weights[:, None] * mask
    kept = (weights > 0)[:, None] * mask
    parts = torch.arange(len(weights)).split(MICRO_BATCH)
    return {
        "**right: Σ w·nll / all completion tokens**": oswft_loss(logprobs, mask, weights, tokens),
        "w in the mask: / Σw": weighted.sum() / weighted_mask.sum(),
        "the same in each micro-batch": sum(
            weighted[p].sum() / weighted_mask[p].sum().clamp(min=1e-6) * mask[p].sum() / tokens
            for p in parts
        ),
        "rows of weight 0 left out": weighted.sum() / kept.sum(),
        "mean of the micro-batches' means": sum(weighted[p].sum() / mask[p].sum() for p in parts)
        / len(parts),
        "mean of the rows' means": (weighted.sum(dim=1) / mask.sum(dim=1)).mean(),
        "a micro-batch's loss · mean(w)": sum(
            nll[p].sum() / tokens * weights[p].mean() for p in parts
        ),
        "rows end to end, weights broadcast": (weights * nll.reshape(1, -1).sum(dim=1)).sum()
        / tokens,
        "no weights: SFT": nll.sum() / tokens,
    }


def make_batch() -> tuple[Qwen3ForCausalLM, torch.Tensor, torch.Tensor]:
    """The model, and its logprobs and mask (B, T), in float64: less rounding."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).double()
    ids = lambda n: torch.randint(64, (n,)).tolist()  # noqa: E731
    batch = collate([Trajectory(str(n), ids(8), ids(n)) for n in LENGTHS], range(len(LENGTHS)))
    logprobs = model(input_ids=batch.input_ids).logits.log_softmax(-1)
    return model, logprobs.gather(-1, batch.targets[..., None])[..., 0], batch.mask.double()


def gradients(model, logprobs, mask, weights) -> dict[str, torch.Tensor]:
    """The gradient of each loss, all parameters in one vector."""
    return {
        name: torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, model.parameters(), retain_graph=True)]
        )
        for name, loss in losses(logprobs, mask, weights.double()).items()
    }


def adam_path(early: torch.Tensor, late: torch.Tensor, clip: bool) -> torch.Tensor:
    """Where `STEPS` steps of Adam lead; `clip`: each gradient is first cut to length 1."""
    theta = torch.zeros_like(early, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=1.0)
    for step in range(STEPS):
        gradient = early if step < STEPS // 2 else late
        theta.grad = gradient / gradient.norm() if clip else gradient.clone()
        optimizer.step()
    return theta.detach()


def error(vector: torch.Tensor, right: torch.Tensor) -> float:
    """Relative."""
    return ((vector - right).norm() / right.norm()).item()


def measure() -> dict[str, list[tuple[float, ...]]]:
    """Each loss, and the numbers of each column of the table."""
    model, logprobs, mask = make_batch()
    logged = [losses(logprobs, mask, weights.double()) for weights in (EARLY, LATE)]
    early, late = (gradients(model, logprobs, mask, weights) for weights in (EARLY, LATE))
    alone = gradients(model, logprobs, mask, torch.eye(len(EARLY))[0])  # one row has a weight
    paths = {
        name: [adam_path(early[name], late[name], cut) for cut in (False, True)] for name in early
    }
    norms = {name: torch.stack([early[name].norm(), late[name].norm()]) for name in early}
    right = next(iter(early))
    return {
        name: [
            tuple((norms[name] / norms[right]).tolist()),
            (torch.cosine_similarity(late[name], late[right], dim=0).item(),),
            tuple(map(error, paths[name], paths[right])),
            ((logged[1][name] / logged[0][name]).item(), (norms[name][1] / norms[name][0]).item()),
            (error(alone[name], alone[right]),),
        ]
        for name in early
    }


def table(measured: dict[str, list[tuple[float, ...]]]) -> str:
    """The measurements as Markdown."""
    rows = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)]]
    for name, columns in measured.items():
        cells = [", ".join(f"{number:.2f}" for number in numbers) for numbers in columns]
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    print(table(measure()))


if __name__ == "__main__":
    import tyro  # only a command line needs it

    tyro.cli(main, description=__doc__)
