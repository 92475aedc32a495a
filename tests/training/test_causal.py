"""A causal model outside its encoder: targets, metrics, evaluation, and what it refuses."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import config as config_lib
from bert_jax.convert.conversion import convert
from bert_jax.convert.parity import transformers_forward
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.objectives.causal_lm import add_next_token_targets
from bert_jax.objectives.masking import Vocabulary
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import pretraining
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.run_directory import workdir
from tests.objectives.masking_batches import SEP, make_batch


@pytest.fixture(scope="module")
def causal_config(tiny_config):
    return config_lib.replace(tiny_config, model={"direction": "causal"}, objective={"pair": "none"})


@pytest.fixture(scope="module")
def causal_run(tmp_path_factory, train, causal_config):
    """A finished causal run and what its last evaluation found."""
    directory = tmp_path_factory.mktemp("causal") / "run"
    return directory, train(causal_config, directory)


def pairs_by_loops(batch: dict) -> set[tuple[int, int, int]]:
    """(row, position, label), one example at a time."""
    ids, segments = np.asarray(batch["input_ids"]), np.asarray(batch["segment_ids"])
    found = set()
    for row in range(len(ids)):
        for example in range(1, segments[row].max() + 1):
            places = np.flatnonzero(segments[row] == example).tolist()
            found |= {(row, a, int(ids[row, b])) for a, b in itertools.pairwise(places)}
    return found


def test_every_token_predicts_the_next_of_its_example():
    batch = make_batch([[(11, 20), (5, 24)], [(9, 16), (3, 32)], [(4, 1)], []], 48, slots=2)
    after = add_next_token_targets(batch)
    positions, labels, weights = (np.asarray(after[f"target_{name}"]) for name in ("positions", "labels", "weights"))
    assert positions.shape == labels.shape == weights.shape == (4, 47)
    assert (positions.dtype, labels.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
    rows, places = np.nonzero(weights)
    found = list(zip(rows.tolist(), positions[rows, places].tolist(), labels[rows, places].tolist(), strict=True))
    assert set(found) == pairs_by_loops(batch) and len(found) == 19 + 23 + 15 + 31
    assert set(weights.ravel().tolist()) == {0.0, 1.0}
    # [SEP] is predicted, twice in each example.
    assert sum(label == SEP for _, _, label in found) == 2 * 4
    for name, array in batch.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


@pytest.mark.parametrize("seed", [0, None])
def test_the_task_hides_nothing(causal_config, seed):
    task = Pretraining(causal_config, Vocabulary(64, 60, (0, 7, 30, 31, 60)))
    batch = make_batch([[(11, 20)], [(9, 16), (3, 10)]], 32)
    prepared = task.prepare(batch, seed if seed is None else jnp.uint32(seed))
    np.testing.assert_array_equal(prepared["input_ids"], batch["input_ids"])
    assert {name: float(weight) for name, weight in task.loss_weight_sums(prepared).items()} == {
        "causal_loss": 19 + 15 + 9
    }
    params = bert.init(causal_config.model, jax.random.key(0), Heads(pair=False))
    sums = task.sums(params, prepared, None)
    assert {name: float(value.weight) for name, value in sums.items()} == {"causal_loss": 43, "causal_accuracy": 43}
    # Fresh weights know nothing: log 120 per token.
    np.testing.assert_allclose(float(sums["causal_loss"].sum) / 43, np.log(120), atol=0.2)


def test_a_causal_run(causal_run):
    """Training and evaluation speak of causal, never of masked tokens."""
    _, place = causal_run
    assert place.evaluation.keys() == {
        "causal_loss",
        "causal_accuracy",
        "causal_perplexity",
        "unigram_loss",
        "unigram_accuracy",
    }
    assert place.evaluation["causal_loss"] < np.log(120) - 0.5


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_the_unigram_model_scores_the_same_targets(tiny_corpus, causal_config, direction):
    """Against a table of probabilities made the slow way from what was scored."""
    task = pretraining.open_task(
        config_lib.replace(causal_config, model={"direction": direction}), [CorpusWeight(tiny_corpus)]
    )
    predicted = []

    def score(rows):
        prepared = jax.tree.map(np.asarray, task.prepare(jax.tree.map(jnp.asarray, rows), None))
        predicted.extend(prepared["target_labels"][prepared["target_weights"] > 0].tolist())
        return prepared, {"seen": (7.0, 2.0)}

    found = task.evaluate(score, task.config.evaluation.batch_size)
    counts = {token: count + 1.0 for token, count in enumerate(Corpus.open(tiny_corpus, "train").token_counts.tolist())}
    sep = Tokenizer.load(tiny_corpus / "tokenizer.json").sep_id
    assert counts[sep] == 1.0
    share = predicted.count(sep) / len(predicted)
    assert (share > 0.03) == (direction == "causal")
    total = sum(counts.values())
    likelihood = {token: (1 - share) * count / total for token, count in counts.items()}
    likelihood[sep] += share
    best = max(likelihood, key=likelihood.get)
    np.testing.assert_allclose(found["unigram_loss"], -np.mean([np.log(likelihood[t]) for t in predicted]), rtol=1e-9)
    np.testing.assert_allclose(found["unigram_accuracy"], predicted.count(best) / len(predicted), rtol=1e-9)
    assert found["seen"] == 3.5


def test_what_a_causal_model_can_do_for_a_user(causal_run, tmp_path):
    directory, _ = causal_run
    model = bert_jax.load(directory)
    vectors = model.encode(["the river", "the river sings"])
    assert vectors.shape == (2, 64) and np.abs(vectors[0] - vectors[1]).max() > 1e-3
    refused = {
        "cannot fill masks": lambda: model.fill_mask("the [MASK]"),
        "use 'mean'": lambda: model.encode(["the"], pooling="cls"),
    }
    for message, use in refused.items():
        with pytest.raises(UserError) as caught:
            use()
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_causal_run_and_its_export_are_the_same(causal_run, tmp_path, monkeypatch):
    """To Hugging Face's form and back, bit for bit; the report looks back alone, as the model does."""
    monkeypatch.setattr(transformers_forward, "available", lambda: False)
    directory, _ = causal_run
    report = convert(directory, tmp_path / "theirs", "huggingface")
    assert report.passed and [part.name for part in report.differences][-1] == "mlm logits"
    described = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert described["is_decoder"] is True and described["architectures"] == ["BertLMHeadModel"]
    assert "fill-mask" not in (tmp_path / "theirs" / "README.md").read_text()
    convert(tmp_path / "theirs", tmp_path / "ours", "bert-jax")
    convert(tmp_path / "ours", tmp_path / "again", "huggingface")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "again")]
    assert weights[0] == weights[1]
    models = [bert_jax.load(place) for place in (directory, tmp_path / "theirs", tmp_path / "ours")]
    for model in models[1:]:
        assert model.config.direction == "causal" and model.heads == models[0].heads
        jax.tree.map(np.testing.assert_array_equal, model.params, models[0].params)
    with pytest.raises(UserError, match="is_decoder True cannot be written"):
        convert(directory, tmp_path / "google", "tensorflow1")
    assert not (tmp_path / "google").exists()


def test_the_card_tells_what_the_pair_head_means(tiny_run, tiny_export, tmp_path, monkeypatch):
    assert "follows the first (label 0)" in (tiny_export / "README.md").read_text()
    run = workdir.read_run(tiny_run)
    ordered = config_lib.replace(run["config"], objective={"pair": "sop"}, data={"format": "sentence_order"})
    monkeypatch.setattr(workdir, "read_run", lambda directory: run | {"config": ordered})
    convert(tiny_run, tmp_path / "ordered", "huggingface")
    card = (tmp_path / "ordered" / "README.md").read_text()
    assert "swapped (label 1)" in card and "follows" not in card
    # An export does not know, and says nothing.
    convert(tiny_export, tmp_path / "again", "huggingface")
    assert "label" not in (tmp_path / "again" / "README.md").read_text()
