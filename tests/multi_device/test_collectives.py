"""What the step sends between 8 fake CPU devices, read from its programs; and that the reading finds mistakes."""

import pytest

from bert_jax.planning.hlo import collectives
from tests.multi_device.exchanges import gradients_sent, table_gathers

# Of the worker's model.
VOCAB, WIDTH, ACCUMULATION = 512, 128, 8


@pytest.fixture
def found(cases, outcome):
    """Exchanges by case; "naive ..." are the programs in which mistakes must be found."""
    programs = {name: case["hlo"] for name, case in cases.items()}
    programs |= {f"naive {name}": text for name, text in outcome["controls"].items()}
    return {name: collectives(text) for name, text in programs.items()}


@pytest.fixture
def parameters(cases):
    return cases["one"]["bytes_total"] / 3 / 4  # beside two moments, in float32


@pytest.mark.parametrize("name", ["data8", "fsdp8"])
def test_gradient_bytes_do_not_grow_with_accumulation(found, name):
    assert gradients_sent(found[f"{name}/{ACCUMULATION}"]) <= 1.01 * gradients_sent(found[name])
    # The control sends as much for every micro-batch.
    once, often = (gradients_sent(found[f"naive data8/{parts}"]) for parts in (1, ACCUMULATION))
    assert often > 0.9 * ACCUMULATION * once


@pytest.mark.parametrize("name", ["data8", f"data8/{ACCUMULATION}", "fsdp8", f"fsdp8/{ACCUMULATION}"])
def test_gradients_cross_devices_once(found, parameters, name):
    """All-reduced 4 bytes per parameter, which pass twice, or scattered."""
    assert 0.5 * 8 * parameters < gradients_sent(found[name]) <= 1.05 * 8 * parameters
    for control in (f"naive data8/{ACCUMULATION}", "naive fsdp8/1"):
        assert gradients_sent(found[control]) > 1.05 * 8 * parameters


@pytest.mark.parametrize("name", ["data8", f"data8/{ACCUMULATION}", "cube", f"cube/{ACCUMULATION}"])
def test_the_embedding_table_is_not_gathered(found, name):
    """On a cube, a device's half of the vocabulary is, over fsdp."""
    assert not table_gathers(found[name], VOCAB, WIDTH)
    assert table_gathers(found["naive fsdp8/1"], VOCAB, WIDTH), "the control has nothing to find"


@pytest.mark.parametrize("name", ["fsdp8", f"fsdp8/{ACCUMULATION}"])
def test_a_split_table_is_gathered_once_per_update(found, name):
    assert [one.turns for one in table_gathers(found[name], VOCAB, WIDTH)] == [1]
