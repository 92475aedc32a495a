"""Models without heads and units: logits are those of the masked model, and a wrong removal is found."""

import jax
import numpy as np
import pytest

from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions import smaller_model
from bert_jax.interventions.capture import capture
from bert_jax.interventions.importance import most_important
from bert_jax.interventions.loss_examples import masked_texts
from bert_jax.interventions.pruning_masks import ACTIVATIONS, CONTEXT, mask_edits
from bert_jax.interventions.rows import batches, encode_texts
from bert_jax.interventions.smaller_model import mask_of
from bert_jax.model import bert
from bert_jax.model.activations import Edit
from tests.interventions.models import HEADS, four_heads

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
IMPORTANCES = np.array([[1.0, 4, 3, 2], [9, 1, 8, 2], [1, 2, 3, 4], [5, 6, 1, 1]])
KEPT = np.array([[1, 2], [0, 2], [2, 3], [0, 1]])
CONFIGS = {
    "bert": {},
    "shared": {"parameter_groups": 2, "embedding_size": 12},
    "bottleneck": {"bottleneck_size": 16, "head_size": 8, "feed_forward_networks": 2},
    "rotary, no biases": {"positions": "rotary", "biases": "none", "norm_placement": "pre", "attention_window": 4},
    "gated, adapters": {"feed_forward": "gated", "adapter_size": 4},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_the_masked_model(kind):
    model = four_heads(4, **CONFIGS[kind])
    kept = most_important(IMPORTANCES, model.config, 2)
    if kind == "shared":  # sums 10 5 11 4 and 6 8 4 5
        assert kept.tolist() == [[0, 2], [0, 2], [0, 1], [0, 1]]
    else:
        assert kept.tolist() == KEPT.tolist()
    units = most_important(np.random.default_rng(0).random((4, 40)), model.config, 15)
    both = {CONTEXT: kept, ACTIVATIONS: units}
    rows = encode_texts(["the river sings", "a dark mountain falls over the slow stone"], model.tokenizer, 32)
    (batch,) = batches(rows, model.tokenizer.pad_id, 64)
    several = model.config.feed_forward_networks > 1  # only heads are removed
    for sites in ([CONTEXT],) if several else ([CONTEXT], [ACTIVATIONS], [CONTEXT, ACTIVATIONS]):
        config, params = smaller_model.remove(model.config, model.params, {site: both[site] for site in sites})
        assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, bert.shapes(config, HEADS))
        assert (config.num_heads, config.size_per_head) == (2 if CONTEXT in sites else 4, 8)
        assert config.intermediate_size == (15 if ACTIVATIONS in sites else 40)
    edits = {
        CONTEXT: Edit(factor=np.float32(mask_of(kept, 4))[:, None, None, :, None]),
        ACTIVATIONS: Edit(factor=np.float32(mask_of(units, 40))[:, None, None, :]),
    }
    edits = {site: edits[site] for site in sites}
    names, smaller = ["mlm_logits", "pair_logits"], LoadedModel(config, HEADS, params, model.tokenizer)
    found = capture(smaller, batch, names)
    masked, whole = (capture(model, batch, names, edits=one) for one in (edits, None))
    for name in names:
        present = batch.attention_mask > 0 if name == "mlm_logits" else slice(None)
        np.testing.assert_allclose(found[name][present], masked[name][present], rtol=0, atol=1e-5)
        assert np.abs(whole[name] - masked[name]).max() > 0.1
    for site in edits if len(edits) > 1 else ():  # each of the masks matters
        one = capture(model, batch, names, edits={site: edits[site]})["mlm_logits"]
        assert np.abs(one - masked["mlm_logits"]).max() > 0.1


def test_a_wrong_removal_is_found():
    """One kept head or unit is another one than that of the mask."""
    model = four_heads(4)
    rows = encode_texts(["the river sings"], model.tokenizer, 32)
    examples = masked_texts(rows, model.tokenizer, 0.3, seed=0)
    for site, size in smaller_model.heads_and_units(model.config).items():
        kept = np.tile(np.arange(size // 2), (4, 1))
        other = kept.copy()
        other[3, -1] += 1
        config, params = smaller_model.remove(model.config, model.params, {site: other})
        smaller = LoadedModel(config, HEADS, params, model.tokenizer)
        edits = mask_edits({site: mask_of(kept, size)})
        with pytest.raises(AssertionError, match="from the masked model"):
            smaller_model._compare(model, smaller, examples, edits)
