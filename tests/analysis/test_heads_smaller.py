"""The suite on heads writes a smaller checkpoint."""

import jax
import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax.analysis.heads import SUITE
from bert_jax.analysis.heads.heads import HeadsSettings
from bert_jax.analysis.result_files import _plain
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.errors import UserError
from bert_jax.interventions import smaller_model
from bert_jax.interventions.importance import most_important
from bert_jax.interventions.pruning_masks import CONTEXT
from tests.analysis import data_folder
from tests.interventions.models import four_layers, write_native

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.fixture
def source(tmp_path):
    return write_native(four_layers(), tmp_path)


def test_the_suite_writes_a_checkpoint_that_loads(source, tmp_path):
    data = epath.Path(data_folder.write(tmp_path / "data"))
    model = bert_jax.load(source)
    settings = HeadsSettings(examples=3, random_orders=1, step=1.0, prune_to=str(tmp_path / "out"), keep=0.5)
    inputs = SuiteInputs(model, data, 0, False, source)
    result = SUITE.run(inputs, settings)
    found = result["smaller"]
    loaded = bert_jax.load(tmp_path / "out")
    assert (loaded.config.num_heads, loaded.config.head_size) == (2, 8)
    assert found["parameters"]["whole"] - found["parameters"]["smaller"] == 4 * 2 * 8 * (3 * 33 + 32)
    assert found["parameters"]["smaller"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert found["largest_logit_difference"] < 1e-5 < 0.1 < found["largest_logit_change_by_mask"]
    kept = most_important(result["importance"], model.config, 2)
    np.testing.assert_array_equal(found["kept"], kept)
    expected = smaller_model.remove(model.config, model.params, {CONTEXT: kept})[1]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, loaded.params), expected)
    assert loaded.fill_mask("the [MASK] sings", top=1) and loaded.encode(["a stone"]).shape == (1, 32)
    assert "heads of every layer were removed" in (tmp_path / "out" / "README.md").read_text()
    blocks, without = (SUITE.blocks(_plain(one, "heads")) for one in (result, result | {"smaller": None}))
    assert len(blocks) == len(without) + 2
    with pytest.raises(UserError, match="exists already"):
        SUITE.run(inputs, settings)


def test_a_model_in_memory_has_no_source(source, tmp_path):
    inputs = SuiteInputs(bert_jax.load(source), epath.Path(tmp_path), 0, False)
    (tmp_path / "text").mkdir()
    with pytest.raises(UserError, match="was not read from a directory"):
        SUITE.run(inputs, HeadsSettings(prune_to=str(tmp_path / "x")))
