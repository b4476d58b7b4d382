"""How the model learns: the gradient of any split equals a dense reference's (gradients.py)."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from conftest import launch
from data import InputError
from engine import load_model


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_equals_a_dense_single_process_reference(ranks):
    output = launch("tests/gradients.py", ranks=ranks)
    assert output.count("equal: OSW-FT") == 17 and output.count("equal: GRPO") == 7
    assert "equal: reads of the host" in output  # no pass waits for the device


def test_a_state_goes_on_over_other_ranks_and_stages_and_no_bad_gradient_touches_it(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    launch("tests/states.py", "save", tmp_path, ranks=2)
    for ranks in (1, 2, 3):  # with three, shards are padded
        output = launch("tests/states.py", "go_on", tmp_path, ranks=ranks)
        assert output.count("went on") == 12 and output.count("refused") == 2


def test_a_generation_config_that_could_not_be_saved_is_found_at_load(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    with pytest.raises(InputError, match=r"generation_config.json: .*do_sample") as error:
        load_model(str(tmp_path / "model"), 128)
    assert "\n" not in str(error.value)


def test_a_model_folder_without_some_of_its_weights_is_refused(tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights are missing: model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path / "model"), 128)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot load a model from there"):
        load_model(str(tmp_path / "model"), 128)
