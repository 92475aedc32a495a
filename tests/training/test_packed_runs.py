"""Packed or not, an example is masked alike and has the same loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads, label_log_likelihoods
from bert_jax.model.layers import gather_positions
from bert_jax.objectives.masking import Vocabulary
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.pretraining_task import Pretraining

SEQ_LEN, ROWS = 48, 16


@pytest.fixture(scope="module")
def setting(tiny_corpus, tiny_config, special_ids):
    corpus, tokenizer = Corpus.open(tiny_corpus), Tokenizer.load(tiny_corpus)
    continues = tokenizer.continues_word.tobytes()
    vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids, continues)
    model = config_lib.replace(tiny_config, model={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    return corpus, special_ids, vocabulary, model


@functools.lru_cache
def parameters(model, pair):
    params = jax.jit(lambda key: bert.init(model, key, Heads(pair=pair)))(jax.random.key(1))
    # Larger than an initialisation, so that what a token sees shows in its loss.
    return jax.tree.map(
        lambda x: x + 0.2 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32), params
    )


def losses_of_an_epoch(corpus, special_ids, vocabulary, config):
    """Per example: its id, (places and labels of its targets), its token losses, its pair loss."""
    stream = TrainingStream([corpus], [1.0], config, special_ids)
    task = Pretraining(config, vocabulary)
    params = parameters(config.model, config.objective.pair != "none")

    @jax.jit
    def score(batch):
        batch = task.prepare(batch, jnp.uint32(task.config.seed))
        model = bert.model_from_params(config.model, Heads(pair="pair" in params), params)
        output = model.encoder(EncoderInputs(*(batch[name] for name in EncoderInputs._fields)))
        hidden = gather_positions(output.hidden, batch["target_positions"])
        tokens, _ = label_log_likelihoods(model.mlm(hidden, model.encoder.embeddings.word[...]), batch["target_labels"])
        pairs = jnp.zeros(batch["example_id"].shape)
        if model.pair is not None:
            pairs, _ = label_log_likelihoods(model.pair(output.pooled), jnp.maximum(batch["pair_labels"], 0))
        return batch, tokens, pairs

    found, cursor = {}, stream.normalize_cursor(Cursor())
    while cursor.positions[0].epoch == 0:
        batch, tokens, pairs = jax.tree.map(np.asarray, score(stream.rows_at(cursor)))
        for row, place in np.argwhere(batch["example_id"] >= 0):
            at = batch["target_positions"][row]
            mine = (batch["segment_ids"][row, at] == place + 1) & (batch["target_weights"][row] > 0)
            offsets = batch["position_ids"][row, at[mine]].tolist()
            masks = tuple(offsets), tuple(batch["target_labels"][row, mine].tolist())
            key = int(batch["mask_epoch"][row]), int(batch["example_id"][row, place])
            found[key] = masks, tokens[row, mine], pairs[row, place]
        cursor = stream.next_cursor(cursor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "pair", "unit", "direction"),
    [
        ("segment_pair", "nsp", "word", "bidirectional"),
        ("sentence_order", "sop", "span", "bidirectional"),
        ("doc_sentences", "none", "ngram", "bidirectional"),
        ("full_sentences", "none", "token", "causal"),
    ],
)
def test_packing_changes_neither_masks_nor_losses(setting, form, pair, unit, direction):
    """Losses to 1e-5 relative, in float32 without dropout."""
    corpus, special_ids, vocabulary, config = setting

    def epoch(slots):
        phase = {"steps": 10_000, "seq_len": SEQ_LEN, "batch_size": ROWS}
        changed = config_lib.replace(
            config,
            model={"direction": direction},
            data={"format": form, "examples_per_row": slots},
            objective={"pair": pair, "mask_unit": unit},
            phases=(dataclasses.replace(config.phases[0], **phase),),
        )
        return losses_of_an_epoch(corpus, special_ids, vocabulary, changed)

    packed, alone = epoch(4), epoch(1)
    shared = [key for key in packed if key in alone and key[0] == 0]
    # The last batch of the longer epoch reaches into the next one.
    assert len(shared) == len([key for key in packed if key[0] == 0]) > 20
    for key in shared:
        (masks, tokens, pairs), (expected, alone_tokens, alone_pairs) = packed[key], alone[key]
        assert masks == expected
        np.testing.assert_allclose(tokens, alone_tokens, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pairs, alone_pairs, rtol=1e-5, atol=1e-6)
    everything = np.concatenate([tokens for _, tokens, _ in packed.values()])
    assert everything.std() > 0.5  # or equal losses would say nothing
