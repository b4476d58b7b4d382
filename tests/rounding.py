"""How the tests compare numbers in fp32: another processor, or another split, rounds otherwise."""

import torch


def assert_same(
    ours: torch.Tensor, reference: torch.Tensor, largest: float = 5e-5, norm: float = 2e-5
) -> None:
    """Equal but for rounding, measured by the whole tensor: a small number may be a sum of large.

    Args:
        largest: how far a number may be off, as a share of the tensor's largest number.
        norm: how far all of them, as a share of the tensor's norm.
    """
    assert ours.shape == reference.shape
    off, reference = ours.double() - reference.double(), reference.double()
    shares = [off.abs().max() / reference.abs().max(), off.norm() / reference.norm()]
    assert (off == 0).all() or (shares[0] <= largest and shares[1] <= norm), shares
