"""Training on one device and on eight, with and without accumulation, gives the same losses (guarantee 1); and the
collectives of the compiled programs (guarantee 2). All tests share one training run per mesh.
"""

import numpy as np
import pytest

from bert_jax.planning.hlo import array_bytes_by_kind, parse_collectives
from tests.multi_device.exchanges import gradients_sent, table_gathers

pytestmark = pytest.mark.slow

MESHES = ["data8", "data8/8", "fsdp8", "fsdp8/8", "cube/8"]
# Of the worker's model.
VOCAB, WIDTH, ACCUMULATION = 512, 128, 8


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
        assert len(counts) == len(set(counts)) == 8, (name, counts)
    assert max(outcome["masked_counts"]["one"]) > 1.5 * min(outcome["masked_counts"]["one"])


def test_parameters_really_are_sharded(cases):
    assert cases["one"]["word_shard"] == [512, 128]
    assert cases["data8"]["word_shard"] == [512, 128]
    assert cases["fsdp8"]["word_shard"] == [512, 16]
    assert cases["cube/8"]["word_shard"] == [256, 64]
    assert cases["cube/8"]["up_shard"] == [2, 64, 128]
    # Norms and biases stay whole; they are a few per cent of this small model.
    total = cases["one"]["bytes_total"]
    assert cases["fsdp8"]["bytes_per_device"] < 1.25 * total / 8
    assert cases["cube/8"]["bytes_per_device"] < 1.25 * total / 4


def test_programs_differ(cases):
    """Otherwise their agreement would mean nothing."""
    assert not parse_collectives(cases["one"]["hlo"])
    for name in ("data8", "fsdp8", "cube/8"):
        assert sum(array_bytes_by_kind(parse_collectives(cases[name]["hlo"])).values()) > 1_000_000
    assert "known_trip_count" in cases["data8/8"]["hlo"]


@pytest.mark.parametrize("name", MESHES)
def test_training_agrees_with_one_device(cases, name):
    reference, other = np.array(cases["one"]["losses"]), np.array(cases[name]["losses"])
    assert abs(other[0] - reference[0]) <= 1e-6 * abs(reference[0])
    assert cases[name]["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other, reference, rtol=1e-4)


def test_trust_ratios_span_devices(cases):
    """LAMB's norms are those of logical tensors, which are split over devices."""
    reference, other = cases["one, lamb"], cases["cube/8, lamb"]
    assert other["word_shard"] == [256, 64] and other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=1e-4)
    assert "trust_ratio/layer_01" in reference["norms"] and reference["norms"].keys() == other["norms"].keys()
    for name, value in reference["norms"].items():
        np.testing.assert_allclose(other["norms"][name], value, rtol=1e-4, err_msg=name)
    assert abs(reference["losses"][-1] - cases["one"]["losses"][-1]) > 1e-2, "the optimizers should differ"


def test_matrices_of_muon_span_devices(cases):
    """Each logical matrix is orthogonalised as a whole, although its rows and columns are split over devices."""
    reference, other = cases["one, muon"], cases["cube/8, muon"]
    assert other["up_shard"] == [2, 64, 128] and other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=1e-4)
    for name, value in reference["norms"].items():
        np.testing.assert_allclose(other["norms"][name], value, rtol=1e-4, err_msg=name)
    assert abs(reference["losses"][-1] - cases["one"]["losses"][-1]) > 3e-3, "the optimizers should differ"


def test_scales_of_int8_span_devices(cases):
    """Kernels and inputs of products are split along the axes that share a scale."""
    reference, other = cases["one, int8"], cases["cube/8, int8"]
    assert other["up_shard"] == [2, 64, 128] and other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=2e-4)
    assert "s8[" in other["hlo"] and "s8[" not in cases["cube/8"]["hlo"]


def test_samples_of_a_generator_are_the_same_on_all_meshes(cases):
    """The first step replaces exactly the same number of tokens; its one head is not split over tensor."""
    reference, other = cases["one, rtd"], cases["cube/8, rtd"]
    assert other["gradient_distance"] <= 1e-5 and 0 < reference["replaced"][0] < 0.2
    assert other["replaced"][0] == reference["replaced"][0]
    np.testing.assert_allclose(other["losses"][0], reference["losses"][0], rtol=1e-6)
    np.testing.assert_allclose(other["losses"], reference["losses"], rtol=1e-3)


def test_a_partial_batch_is_split_over_devices(outcome):
    """Each of 8 devices has its 3 of 24 rows, in order, followed by padding: no text, no example, no label."""
    shards = outcome["ramp"]["shards"]
    for device in range(8):
        own = list(range(3 * device, 3 * device + 3))
        assert shards["row"][device][:3] == own
        assert shards["example_id"][device] == [[100 + row] for row in own] + [[-1]] * 5
        lengths = [sum(row) for row in shards["segment_ids"][device]]
        assert all(lengths[:3]) and not any(lengths[3:])
        labels = [label for (label,) in shards["pair_labels"][device]]
        assert set(labels[:3]) <= {0, 1} and labels[3:] == [-1] * 5


def test_a_partial_batch_is_a_batch_of_its_size(outcome):
    """On eight devices with room for 64 rows, and on one with room for 24."""
    ramped, expected = outcome["ramp"]["ramped"], outcome["ramp"]["expected"]
    assert ramped["tokens"] == expected["tokens"] == outcome["ramp"]["tokens"]
    for name in ("loss", "mlm_loss", "pair_loss"):
        np.testing.assert_allclose(ramped[name], expected[name], rtol=1e-6, err_msg=name)
    assert ramped["pair_accuracy"] == expected["pair_accuracy"]
    assert outcome["ramp"]["gradient_distance"] <= 1e-5


@pytest.mark.parametrize("name", ["data8", "fsdp8"])
def test_gradient_bytes_do_not_grow_with_accumulation(exchanges, name):
    assert gradients_sent(exchanges[f"{name}/{ACCUMULATION}"]) <= 1.01 * gradients_sent(exchanges[name])
    # The control sends as much for every micro-batch.
    once, often = (gradients_sent(exchanges[f"naive data8/{parts}"]) for parts in (1, ACCUMULATION))
    assert often > 0.9 * ACCUMULATION * once


@pytest.mark.parametrize("name", ["data8", f"data8/{ACCUMULATION}", "fsdp8", f"fsdp8/{ACCUMULATION}"])
def test_gradients_cross_devices_once(exchanges, parameters, name):
    """All-reduced 4 bytes per parameter, which pass twice, or scattered."""
    assert 0.5 * 8 * parameters < gradients_sent(exchanges[name]) <= 1.05 * 8 * parameters
    for control in (f"naive data8/{ACCUMULATION}", "naive fsdp8/1"):
        assert gradients_sent(exchanges[control]) > 1.05 * 8 * parameters


@pytest.mark.parametrize("name", ["data8", f"data8/{ACCUMULATION}", f"cube/{ACCUMULATION}"])
def test_the_embedding_table_is_not_gathered(exchanges, name):
    """On a cube, only a device's half of the vocabulary is gathered, over fsdp."""
    assert not table_gathers(exchanges[name], VOCAB, WIDTH)
    assert table_gathers(exchanges["fsdp8"], VOCAB, WIDTH), "the control has nothing to find"


@pytest.mark.parametrize("name", ["fsdp8", f"fsdp8/{ACCUMULATION}"])
def test_a_split_table_is_gathered_once_per_step(exchanges, name):
    assert [gather.executions for gather in table_gathers(exchanges[name], VOCAB, WIDTH)] == [1]


@pytest.mark.parametrize("name", ["data8", "cube"])
def test_batch_normalisation_spans_devices(outcome, name):
    """Statistics of [CLS] are those of the whole batch, and so are the gradients through them."""
    one, other, control = (outcome["batch_normalised"][case] for case in ("one", name, "control"))
    assert other["gradient_distance"] <= 1e-5 < 1e-2 < control["gradient_distance"]
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
    for statistic in ("mean", "variance"):
        np.testing.assert_allclose(other[statistic], one[statistic], rtol=1e-4, atol=1e-6)
    assert np.abs(np.subtract(control["variance"], one["variance"])).max() > 1e-3


@pytest.mark.parametrize("name", ["data8", "cube"])
def test_distillation_agrees_with_one_device(outcome, name):
    """Every term is a mean over all devices, and the teacher is sharded like the student."""
    one, other = (outcome["distilled"][case] for case in ("one", name))
    assert one["teacher_shard"] == [4, 16, 24]
    assert other["teacher_shard"] == ([4, 8, 12] if name == "cube" else [4, 16, 24])
    assert other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
    assert one["losses"][1] != one["losses"][0]


@pytest.mark.parametrize("name", ["data8", "cube"])
def test_replaced_modules_agree_with_one_device(outcome, name):
    """Layers that are not applied in a step, with their collectives, are skipped on all devices."""
    one, other = (outcome["replaced"][case] for case in ("one", name))
    assert one["share"] == other["share"] == 0.5 and other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", ["data8", "cube"])
def test_distillation_on_a_corpus_agrees_with_one_device(outcome, name):
    """Soft targets are divided by the number of masked tokens of all devices."""
    one, other = (outcome["corpus"][case] for case in ("one", name))
    assert other["gradient_distance"] <= 1e-5
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-5)


def test_encode_splits_its_rows_over_all_devices(outcome):
    encoded = outcome["encoded"]
    assert all(len(rows) == 8 and len(set(rows)) == 1 for rows in encoded["rows"]) and encoded["rows"]
    assert encoded["difference"] < 1e-5 < 0.1 < encoded["size"]
