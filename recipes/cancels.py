"""What cancels the weights: the obvious mistakes next to the right loss, on one batch.

    python -m recipes.cancels    # prints the table of recipes/codebases.md

A random tiny Qwen3 that is never updated, 8 rows, 2 of them in each micro-batch. Only the weights
change: `EARLY` the model fails at most questions, `LATE` it has mastered most. So whatever differs
between the two comes from the weights alone.
"""

from data import Trajectory, collate
from train_oswft import oswft_loss, oswft_weights

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS = [24, 6, 40, 12, 5, 32, 8, 19]  # tokens of the solutions: what is hard is long
MICRO_BATCH = 2  # rows
HEADER = """\
| loss | gradient norm: early, late | cosine | one row off by |
| --- | ---: | ---: | ---: |"""
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

    def sums(x: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (micro-batches,)"""
        return x.unflatten(0, (-1, MICRO_BATCH)).sum(dim=(1, 2))

    means = sums(weighted) / sums(weighted_mask).clamp(min=1e-6)
    mean_weights = weights.view(-1, MICRO_BATCH).mean(dim=1)
    return {
        "**right: Σ w·nll / all completion tokens**": oswft_loss(logprobs, mask, weights, tokens),
        "w in the mask: / Σw": weighted.sum() / weighted_mask.sum(),
        "the same in each micro-batch": (means * sums(mask)).sum() / tokens,
        "rows of weight 0 left out": weighted.sum() / kept.sum(),
        "mean of the micro-batches' means": (sums(weighted) / sums(mask)).mean(),
        "mean of the rows' means": (weighted.sum(dim=1) / mask.sum(dim=1)).mean(),
        "a micro-batch's loss · mean(w)": (sums(nll) * mean_weights).sum() / tokens,
        "rows end to end, weights broadcast": (weights[:, None] * nll.view(1, -1)).sum() / tokens,
        "no weights: SFT": nll.sum() / tokens,
    }


def gradients(weights: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """For each (B,) weights, by name: the loss's gradient as one vector, in float64."""
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
    logprobs = logprobs.gather(-1, batch.targets[..., None])[..., 0]  # (B, T)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    return [
        {
            name: gradient(loss)
            for name, loss in losses(logprobs, batch.mask.double(), w.double()).items()
        }
        for w in weights
    ]


def measure() -> dict[str, tuple[float, ...]]:
    """Each loss, and the numbers of its row in the table."""
    alone = torch.eye(len(EARLY))[0]  # one row has a weight
    results = gradients([EARLY, LATE, alone])
    right = [next(iter(result.values())) for result in results]  # the first loss's
    rows = {}
    for name in results[0]:
        early, late, one = (result[name] for result in results)
        rows[name] = (
            (early.norm() / right[0].norm()).item(),
            (late.norm() / right[1].norm()).item(),
            torch.cosine_similarity(late, right[1], dim=0).item(),
            ((one - right[2]).norm() / right[2].norm()).item(),
        )
    return rows


def table(measured: dict[str, tuple[float, ...]]) -> str:
    """The measurements as Markdown."""
    rows = [
        f"| {name} | {early:.2f}, {late:.2f} | {cosine:.2f} | {one:.2f} |"
        for name, (early, late, cosine, one) in measured.items()
    ]
    return "\n".join([HEADER, *rows])


def main() -> None:
    print(table(measure()))


if __name__ == "__main__":
    import tyro  # only a command line needs it

    tyro.cli(main, description=__doc__)
