"""Training on one device and on eight gives the same losses (guarantee 1); and the collectives of the compiled programs
(guarantee 2). All tests share one training run per mesh; steps have four micro-batches but for "one" and
"cube, lamb, int8".
"""

import numpy as np
import pytest

from bert_jax.planning.hlo import array_bytes_by_kind, parse_collectives
from tests.multi_device.exchanges import gradients_sent, table_gathers

pytestmark = pytest.mark.slow

MESHES = ["data8", "fsdp8", "cube"]
# Of the worker's model.
VOCAB, WIDTH = 512, 128


@pytest.fixture(scope="module")
def exchanges(outcome):
    """Collectives by case; "naive ..." are control programs with known mistakes."""
    programs = {name: case["hlo"] for name, case in outcome["cases"].items()}
    programs |= {f"naive {name}": text for name, text in outcome["controls"].items()}
    return {name: parse_collectives(text) for name, text in programs.items()}


@pytest.fixture
def parameters(cases):
    return cases["one"]["bytes_total"] / 3 / 4  # parameters and two moments, in float32


def test_the_comparison_is_not_trivial(outcome):
    """The loss falls by half a nat, and all micro-batches mask different numbers of tokens."""
    losses = outcome["cases"]["one"]["losses"]
    assert losses[0] - losses[-1] > 0.5
    for name, counts in outcome["masked_counts"].items():
        assert len(counts) == len(set(counts)) == 4, (name, counts)
    assert max(outcome["masked_counts"]["one"]) > 1.5 * min(outcome["masked_counts"]["one"])


def test_parameters_really_are_sharded(cases):
    assert cases["one"]["word_shard"] == [512, 128]
    assert cases["data8"]["word_shard"] == [512, 128]
    assert cases["fsdp8"]["word_shard"] == [512, 16]
    for name in ("cube", "cube, lamb, int8", "cube, muon, rtd"):
        assert cases[name]["word_shard"] == [256, 64] and cases[name]["up_shard"] == [2, 64, 128]
    # Norms and biases stay whole; they are a few per cent of this small model.
    total = cases["one"]["bytes_total"]
    assert cases["fsdp8"]["bytes_per_device"] < 1.25 * total / 8
    assert cases["cube"]["bytes_per_device"] < 1.25 * total / 4


def test_programs_differ(cases, exchanges):
    """Otherwise their agreement would mean nothing."""
    assert not exchanges["one"]
    for name in MESHES:
        assert sum(array_bytes_by_kind(exchanges[name]).values()) > 1_000_000
    assert "known_trip_count" in cases["data8"]["hlo"]


@pytest.mark.parametrize("name", MESHES)
def test_training_agrees_with_one_device(cases, name):
    reference, other = np.array(cases["one"]["losses"]), np.array(cases[name]["losses"])
    assert abs(other[0] - reference[0]) <= 1e-6 * abs(reference[0])
    assert cases[name]["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other, reference, rtol=1e-4)


def test_trust_ratios_and_scales_of_int8_span_devices(cases):
    """LAMB's norms are those of logical tensors, which are split over devices; kernels and inputs of products are split
    along the axes that share a scale.
    """
    reference, other = cases["one, lamb, int8"], cases["cube, lamb, int8"]
    assert other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=1e-4)
    assert "trust_ratio/layer_01" in reference["norms"] and reference["norms"].keys() == other["norms"].keys()
    for name, value in reference["norms"].items():
        np.testing.assert_allclose(other["norms"][name], value, rtol=1e-4, err_msg=name)
    assert abs(reference["losses"][2] - cases["one"]["losses"][2]) > 1e-2, "the optimizers should differ"
    assert "s8[" in other["hlo"] and "s8[" not in cases["cube"]["hlo"]


def test_matrices_of_muon_and_samples_of_a_generator_are_the_same_on_all_meshes(cases):
    """Each logical matrix is orthogonalised as a whole, although its rows and columns are split over devices. The first
    step replaces exactly the same number of tokens; the generator's one head is not split over tensor.
    """
    reference, other = cases["one, muon, rtd"], cases["cube, muon, rtd"]
    assert other["gradient_distance"] <= 1e-5 and 0 < reference["replaced"][0] < 0.2
    assert other["replaced"][0] == reference["replaced"][0]
    np.testing.assert_allclose(other["losses"][0], reference["losses"][0], rtol=1e-6)
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=1e-4)
    for name, value in reference["norms"].items():
        np.testing.assert_allclose(other["norms"][name], value, rtol=1e-4, err_msg=name)


def test_a_partial_batch_is_a_batch_of_its_size(outcome):
    """On eight devices with room for 32 rows, and on one with room for 24. Each of 8 devices has its 3 of 24 rows, in
    order, followed by padding: no text, no example, no label.
    """
    ramp = outcome["ramp"]
    for device in range(8):
        own = list(range(3 * device, 3 * device + 3))
        row, example_id, segment_ids, pair_labels = (
            ramp["shards"][name][device] for name in ("row", "example_id", "segment_ids", "pair_labels")
        )
        assert row[:3] == own and example_id == [*([100 + row] for row in own), [-1]]
        assert [any(ids) for ids in segment_ids] == [True] * 3 + [False]
        assert all(label in ([0], [1]) for label in pair_labels[:3]) and pair_labels[3:] == [[-1]]
    ramped, expected = ramp["ramped"], ramp["expected"]
    assert ramped["tokens"] == expected["tokens"] == ramp["tokens"]
    for name in ("loss", "mlm_loss", "pair_loss"):
        np.testing.assert_allclose(ramped[name], expected[name], rtol=1e-6, err_msg=name)
    assert ramped["pair_accuracy"] == expected["pair_accuracy"]
    assert ramp["gradient_distance"] <= 1e-5


@pytest.mark.parametrize("name", ["data8", "fsdp8"])
def test_gradients_cross_devices_once(exchanges, parameters, name):
    """All-reduced 4 bytes per parameter, which pass twice, or scattered; once for all micro-batches."""
    assert 0.5 * 8 * parameters < gradients_sent(exchanges[name]) <= 1.05 * 8 * parameters
    # The first control sends as much for every micro-batch.
    assert gradients_sent(exchanges["naive data8"]) > 0.9 * 4 * 8 * parameters
    assert gradients_sent(exchanges["naive fsdp8"]) > 1.05 * 8 * parameters


def test_only_a_split_embedding_table_is_gathered_once_per_step(exchanges):
    """On a cube, only a device's half of the vocabulary is gathered, over fsdp."""
    for name in ("data8", "cube"):
        assert not table_gathers(exchanges[name], VOCAB, WIDTH)
    assert [gather.executions for gather in table_gathers(exchanges["fsdp8"], VOCAB, WIDTH)] == [1]


def test_batch_normalisation_spans_devices(outcome):
    """Statistics of [CLS] are those of the whole batch, and so are the gradients through them."""
    one, other, control = (outcome["batch_normalised"][case] for case in ("one", "cube", "control"))
    assert other["gradient_distance"] <= 1e-5 < 1e-2 < control["gradient_distance"]
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
    for statistic in ("mean", "variance"):
        np.testing.assert_allclose(other[statistic], one[statistic], rtol=1e-4, atol=1e-6)
    assert np.abs(np.subtract(control["variance"], one["variance"])).max() > 1e-3


def test_distillation_agrees_with_one_device(outcome):
    """Every term is a mean over all devices, and the teacher is sharded like the student."""
    one, other = (outcome["distilled"][case] for case in ("one", "cube"))
    assert (one["teacher_shard"], other["teacher_shard"]) == ([4, 16, 24], [4, 8, 12])
    assert other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
    assert one["losses"][1] != one["losses"][0]


def test_replaced_modules_agree_with_one_device(outcome):
    """Layers that are not applied in a step, with their collectives, are skipped on all devices."""
    one, other = (outcome["replaced"][case] for case in ("one", "cube"))
    assert one["share"] == other["share"] == 0.5 and other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)


def test_distillation_on_a_corpus_agrees_with_one_device(outcome):
    """Soft targets are divided by the number of masked tokens of all devices."""
    one, other = (outcome["corpus"][case] for case in ("one", "cube"))
    assert other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-5)


def test_encode_splits_its_rows_over_all_devices(outcome):
    encoded = outcome["encoded"]
    assert all(len(rows) == 8 and len(set(rows)) == 1 for rows in encoded["rows"]) and encoded["rows"]
    assert encoded["difference"] < 1e-5 < 0.1 < encoded["size"]
