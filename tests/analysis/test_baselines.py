"""Rows of random weights are measured once for all checkpoints of a run, and are what each checkpoint would measure."""

import dataclasses

import numpy as np
import pytest
from etils import epath

from bert_jax.analysis import attention, geometry, heads, lens, probes
from bert_jax.analysis.attention.attention import AttentionSettings
from bert_jax.analysis.geometry.geometry import GeometrySettings
from bert_jax.analysis.heads.heads import HeadsSettings
from bert_jax.analysis.lens.lens import LensSettings
from bert_jax.analysis.probes.probes import ProbesSettings
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.report import Note
from tests.analysis import data_folder
from tests.interventions.models import small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
SUITES = {
    "attention": (
        attention.SUITE,
        AttentionSettings(
            texts=4, distance_texts=2, gradient_texts=2, flow_texts=1, flow_length=12, sentences=6, least_words=2
        ),
    ),
    "probes": (
        probes.SUITE,
        ProbesSettings(
            train_sentences=12,
            dev_sentences=6,
            epochs=1,
            mix_epochs=1,
            tree_epochs=1,
            erasure_sentences=6,
            erased_sentences=2,
            erasure_draws=1,
        ),
    ),
    "heads": (heads.SUITE, HeadsSettings(examples=2, random_orders=1, step=0.5)),
    "geometry": (geometry.SUITE, GeometrySettings(texts=60, words=4, contexts=4, sentences=12)),
    "lens": (lens.SUITE, LensSettings(texts=8)),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return epath.Path(data_folder.write(tmp_path_factory.mktemp("baselines") / "data"))


@pytest.fixture
def random_models(monkeypatch):
    """Configs of the random models that were made."""
    made, make = [], SuiteInputs.with_random_weights

    def count(inputs):
        made.append(inputs.model.config)
        return make(inputs)

    monkeypatch.setattr(SuiteInputs, "with_random_weights", count)
    return made


def test_random_weights_are_measured_once_for_each_config_and_seed(data, monkeypatch):
    made = []
    monkeypatch.setattr(SuiteInputs, "with_random_weights", lambda inputs: made.append(inputs.seed) or inputs.model)
    first = SuiteInputs(small_model(), data, 0, False)
    assert first.of_random_weights("a", lambda model: model.config.num_layers) == [3]
    second = dataclasses.replace(first, model=small_model(seed=1))
    assert second.of_random_weights("a", lambda model: pytest.fail()) == [3]
    assert second.of_random_weights("b", lambda model: 7) == [7]
    model, config = small_model(), dataclasses.replace(small_model().config, num_layers=1)
    third = dataclasses.replace(first, model=LoadedModel(config, model.heads, model.params, model.tokenizer))
    assert third.of_random_weights("a", lambda model: model.config.num_layers) == [1]
    assert SuiteInputs(small_model(), data, 0, False).of_random_weights("a", lambda model: 8) == [8]
    assert made == [0, 0, 0, 0]  # a, b, a of another config, a of another call
    assert first.of_random_weights("a", lambda model: 9, seeds=3) == [3, 9, 9] and made[4:] == [1, 2]


WITHOUT_BASELINE = {
    "rank correlation of importance and leaving one out",
    "state since which a predicted token leads (mean)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_a_second_checkpoint_has_the_result_that_it_has_alone(name, data, random_models, tmp_path):
    suite, settings = SUITES[name]
    if name == "probes":  # the folder entities/ adds no other measurement
        (tmp_path / "treebank").symlink_to(data / "treebank")
        data = epath.Path(tmp_path)
    inputs = SuiteInputs(small_model(), data, 0, False)
    first, _ = finish(suite.run(inputs, settings), name)
    scalars = suite.scalars(first)
    assert {of for of, scalar in scalars.items() if not scalar.baselines} <= WITHOUT_BASELINE
    assert all(np.isfinite([scalar.value, *scalar.baselines.values()]).all() for scalar in scalars.values())
    made = len(random_models)
    assert made > 0
    second = dataclasses.replace(inputs, model=small_model(seed=1))
    found, _ = finish(suite.run(second, settings), name)
    assert len(random_models) == made
    alone, _ = finish(suite.run(dataclasses.replace(second, baselines={}), settings), name)
    assert found == alone != first


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SUITES.keys() - {"probes"}))
def test_numbers_of_random_weights_are_means_over_their_seeds(name, data, monkeypatch):
    """Two seeds against each of them alone; what is drawn with the seed of the suite stays as it is."""
    suite, settings = SUITES[name]
    inputs, make = SuiteInputs(small_model(), data, 0, False), SuiteInputs.with_random_weights
    both, items = finish(suite.run(inputs, dataclasses.replace(settings, random_seeds=2)), name)
    alone = []
    for seed in range(2):
        other = dataclasses.replace(inputs, seed=seed)
        with monkeypatch.context() as patch:
            patch.setattr(SuiteInputs, "with_random_weights", lambda _, other=other: make(other))
            alone.append(finish(suite.run(dataclasses.replace(inputs, baselines={}), settings), name))
    assert any("are means over 2 seeds" in block.text for block in suite.blocks(both) if isinstance(block, Note))
    if name == "heads":
        shares = [result["random_weights_top_tenth_share"]["value"] for result, _ in alone]
        expected, found = (np.mean(shares), np.std(shares, ddof=1)), both["random_weights_top_tenth_share"]
        np.testing.assert_allclose([found["value"], found["deviation_of_seeds"]], expected, rtol=1e-4)
        (scalar,) = (one for one in suite.scalars(both).values() if one.deviations)
        assert scalar.deviations["random weights"] == pytest.approx(100 * expected[1], rel=1e-4)
        return
    for test, one in items.items():
        singles = [of[test].scores["random_weights"] for _, of in alone]
        np.testing.assert_allclose(one.scores["random_weights"], np.mean(singles, axis=0))
        numbers = [result["uncertainty"][test]["columns"]["random_weights"]["value"] for result, _ in alone]
        found = both["uncertainty"][test]["columns"]
        assert found["random_weights"]["deviation_of_seeds"] == pytest.approx(np.std(numbers, ddof=1), abs=1e-4)
        assert found["model"]["deviation_of_seeds"] == pytest.approx(0, abs=1e-12)
