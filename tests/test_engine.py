"""How the model learns: the gradient of any split equals a dense reference's (gradients.py)."""

import pytest

from conftest import launch


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_equals_a_dense_single_process_reference(ranks):
    output = launch("tests/gradients.py", ranks=ranks)
    assert output.count("equal: OSW-FT") == 15 and output.count("equal: GRPO") == 7
    assert "equal: reads of the host" in output  # no pass waits for the device
