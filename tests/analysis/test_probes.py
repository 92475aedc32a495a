"""Linear probes, control tasks, description length and scalar mixes on planted labels; and the suite."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from scipy import stats

from bert_jax import report
from bert_jax.analysis import analyse
from bert_jax.analysis.probes import SUITE, by_state, label_tasks, linear, mix, probe_items, vectors
from bert_jax.analysis.probes.probes import ProbesSettings
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.analysis.treebank import Sentence, read_splits
from bert_jax.errors import UserError
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.interventions.rows import encode_words
from tests.analysis import data_folder
from tests.interventions.models import LAYERS, small_model, small_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
SETTINGS = ProbesSettings(
    train_sentences=30,
    dev_sentences=12,
    epochs=2,
    mix_epochs=2,
    tree_epochs=2,
    erasure_sentences=20,
    erased_sentences=6,
    erasure_draws=2,
)
WORDS = ["river", "mountain", "stone", "wind", "light", "dark"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return epath.Path(data_folder.write(tmp_path_factory.mktemp("probes") / "data"))


@pytest.fixture(scope="module")
def result(data):
    return SUITE.run(SuiteInputs(small_model(), data, seed=0, progress=False), SETTINGS)


def sample_of(sentences):
    rows = encode_words([one.words for one in sentences], small_tokenizer(), 64)
    return vectors.Sample(list(sentences), rows, 0, len(sentences))


def tagged(count, seed, tags=("N", "N", "N", "V", "A")):
    rng = np.random.default_rng(seed)
    return [TaggedSentence(tuple(rng.choice(WORDS, 5)), tuple(rng.choice(tags, 5))) for _ in range(count)]


def planted(labels, classes, rng, width=24):
    """Vectors in which the label is a direction, and nothing else is."""
    directions = 4 * np.random.default_rng(9).normal(size=(classes, width))
    return (directions[labels] + rng.normal(size=(len(labels), width))).astype(np.float32)


def test_control_labels_depend_on_the_word_type_only():
    train, dev = tagged(80, 0), tagged(20, 1)
    task = label_tasks.entity_task(sample_of(train), sample_of(dev))
    control = label_tasks.control_task(task, seed=0)
    by_type = dict(zip(control.train.types, control.train.labels.tolist(), strict=True))
    for split in (control.train, control.dev):
        assert [by_type[word] for word in split.types] == split.labels.tolist()
    reordered = label_tasks.control_task(label_tasks.entity_task(sample_of(train[::-1]), sample_of(dev)), seed=0)
    assert dict(zip(reordered.train.types, reordered.train.labels.tolist(), strict=True)) == by_type
    others = [label_tasks.control_task(task, seed=seed).train.labels for seed in range(1, 6)]
    assert any((labels != control.train.labels).any() for labels in others)


def test_control_labels_have_the_distribution_of_the_labels():
    types = [f"w{i}" for i in range(4000)]
    labels = np.random.default_rng(0).choice(3, 4000, p=[0.6, 0.3, 0.1]).astype(np.int32)
    examples = label_tasks.ProbeExamples(np.arange(4000)[:, None], labels, types)
    control = label_tasks.control_task(label_tasks.LabelTask("t", ("a", "b", "c"), examples, examples), seed=3)
    shares, expected = (np.bincount(one, minlength=3) / 4000 for one in (control.train.labels, labels))
    np.testing.assert_allclose(shares, expected, atol=0.03)
    assert abs(np.corrcoef(control.train.labels, labels)[0, 1]) < 0.05


def test_arcs_are_of_the_word_and_its_head_and_labels_may_be_unseen():
    train = [Sentence(("the", "river", "sings"), ("DET", "NOUN", "VERB"), (2, 3, 0), ("det", "nsubj", "root"))] * 2
    dev = [Sentence(("wind", "sings"), ("NOUN", "VERB"), (2, 0), ("obl", "root"))]
    task = label_tasks.relation_task(sample_of(train), sample_of(dev))
    assert task.names == ("det", "nsubj", "root")
    np.testing.assert_array_equal(task.train.words, [[0, 1], [1, 2], [2, 2], [3, 4], [4, 5], [5, 5]])
    np.testing.assert_array_equal(task.dev.labels, [label_tasks.UNSEEN, 2])
    about = label_tasks.describe(task)
    assert about["dev_examples_with_unseen_label"] == 1 and about["dev_share_with_seen_type"] == 0.5
    assert about["labels_that_occur_once"] == 0


def test_baselines():
    train = [TaggedSentence(("river", "river", "river", "wind"), ("N", "N", "V", "V"))] * 2
    dev = [TaggedSentence(("river", "wind", "stone", "wind"), ("N", "V", "N", "N"))]
    found = label_tasks.describe(label_tasks.entity_task(sample_of(train), sample_of(dev)))
    assert (found["majority"], found["word_type"]) == (0.75, 0.75)


def test_planted_labels_are_found_and_their_control_task_is_not():
    rng = np.random.default_rng(0)
    splits = [sample_of(tagged(count, seed)) for count, seed in ((160, 0), (60, 1))]
    task = label_tasks.entity_task(*splits)
    control = label_tasks.control_task(task, seed=0)
    train, dev = (jnp.asarray(planted(one.labels, 3, rng)) for one in (task.train, task.dev))
    probe = linear.probe_state(train, dev, task, control, epochs=20, penalty=1.0, seed=0)
    score = label_tasks.score(task, probe.predictions, task.dev.labels)
    most = max(np.bincount(control.dev.labels)) / len(control.dev.labels)
    assert score > 0.99
    assert label_tasks.score(control, probe.control_predictions, control.dev.labels) < most + 0.05
    bits = probe.code_bits
    assert linear.uniform_code_bits(len(task.train.labels), 3) > 3 * bits
    noise = [jnp.asarray(rng.normal(size=x.shape), np.float32) for x in (train, dev)]
    assert linear.probe_state(*noise, task, control, epochs=20, penalty=1.0, seed=0).code_bits > 3 * bits


def test_online_code_is_that_of_a_plain_twin():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 700).astype(np.int32)
    x, words = jnp.asarray(planted(labels, 3, rng, width=8) * 0.2), jnp.arange(700)[:, None]
    settings = {"classes": 3, "epochs": 2, "penalty": 1.0, "key": jax.random.key(0)}
    ends = linear.prefix_ends(700)
    assert ends[0] == 1 and ends[-1] == 700 and (np.diff(ends) > 0).all()
    blocks, _ = linear.fit_prefixes(x, words, jnp.asarray(labels), jnp.asarray(ends), **settings)
    expected = ends[0] * np.log2(3)
    for end, following in itertools.pairwise(ends.tolist()):
        _, probe = linear.fit_prefixes(x, words, jnp.asarray(labels), jnp.array([end]), **settings)
        logits = np.asarray(x, np.float64) @ np.asarray(probe.weights, np.float64) + np.asarray(probe.bias)
        for i in range(end, following):
            expected -= np.log2(np.exp(logits[i, labels[i]]) / np.exp(logits[i]).sum())
    np.testing.assert_allclose(linear.online_code_bits(np.asarray(blocks), int(ends[0]), 3), expected, rtol=1e-5)


def test_the_first_block_has_the_uniform_code():
    assert linear.online_code_bits(np.log([2.0, 4.0]), first=5, classes=8) == pytest.approx(5 * 3 + 1 + 2)
    assert linear.uniform_code_bits(5, 8) == 15


def test_a_probe_of_a_prefix_sees_the_prefix_only():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 64).astype(np.int32)
    x, words = jnp.asarray(planted(labels, 3, rng, width=8)), jnp.arange(64)[:, None]
    settings = {"classes": 3, "epochs": 2, "penalty": 1.0, "key": jax.random.key(0)}
    changed = np.where(np.arange(64) < 32, labels, 0).astype(np.int32)
    probes = [linear.fit_prefixes(x, words, jnp.asarray(y), jnp.array([32]), **settings)[1] for y in (labels, changed)]
    np.testing.assert_array_equal(probes[0].weights, probes[1].weights)


def test_mixes_find_the_state_that_has_the_labels():
    rng = np.random.default_rng(0)
    task = label_tasks.entity_task(sample_of(tagged(160, 0)), sample_of(tagged(60, 1)))
    noise = [[rng.normal(size=(n, 24)).astype(np.float32) for _ in range(4)] for n in (800, 300)]
    for states, examples in zip(noise, (task.train, task.dev), strict=True):
        states[2] = 5 * planted(examples.labels, 3, rng) + 7
    mixes = mix.probe_mixes(*([jnp.asarray(x) for x in states] for states in noise), task, epochs=20, seed=0)
    scores = [label_tasks.score(task, one, task.dev.labels) for one in mixes.predictions]
    assert scores[1] < 0.7 and min(scores[2:]) > 0.99
    assert np.argmax(mixes.weights) == 2 and mixes.weights[2] > 0.8
    np.testing.assert_allclose(sum(mixes.weights), 1, rtol=1e-5)
    assert abs(mix.centre_of_gravity(mixes.weights) - 2) < 0.3
    assert abs(mix.expected_layer(scores) - 2) < 0.2


def test_scores_of_sentences_sum_to_the_score():
    """Accuracy and F1, the latter against scikit-learn's."""
    f1_score = pytest.importorskip("sklearn.metrics").f1_score
    dev, rng = tagged(20, 1, ("O", "O", "O", "B-a", "I-a", "B-b")), np.random.default_rng(3)
    task = label_tasks.entity_task(sample_of(tagged(80, 0, ("O", "B-a", "I-a", "B-b"))), sample_of(dev))
    labels, predictions = task.dev.labels, rng.permutation(task.dev.labels)
    names = [name for name in task.names if name != "O"]
    of_f1 = label_tasks.score_sentences(task, predictions, labels, sample_of(dev).starts)
    f1 = f1_score(labels, predictions, labels=[task.names.index(name) for name in names], average="micro")
    right = label_tasks.score_sentences(task._replace(outside=None), predictions, labels, sample_of(dev).starts)
    for sentences, expected in ((of_f1, f1), (right, (predictions == labels).mean())):
        assert sentences.shape == (2, 20)
        assert sentences[0].sum() / sentences[1].sum() == pytest.approx(expected)
    np.testing.assert_array_equal(right[0], (predictions == labels).reshape(20, 5).sum(1))


def test_seeds_of_probes_are_averaged():
    rng = np.random.default_rng(8)
    task = label_tasks.entity_task(sample_of(tagged(80, 0)), sample_of(tagged(20, 1)))
    right = rng.binomial(5, 0.6, (2, 3, 20)).astype(float)
    of_seeds = [
        by_state.LabelScores(
            *[np.stack([one, np.full((3, 20), 5.0)], axis=1)] * 2, None, np.ones((3, 2, 20)), one[:, 0], w
        )
        for one, w in zip(right, (np.array([0.0, 0, 1]), np.array([0.0, 1, 0])), strict=True)
    ]
    found = by_state.summarize_labels(of_seeds, task)
    np.testing.assert_allclose(found["score"]["value"], right.sum((0, 2)) / 200)
    np.testing.assert_allclose(found["deviation_of_seeds"]["score"], (right.sum(2) / 100).std(0, ddof=1))
    assert found["selectivity"]["value"] == pytest.approx(np.zeros(3)) == found["selectivity"]["high"]
    for values, summary in (
        ([2, 1], found["mix"]["centre_of_gravity"]),
        (right[:, :, 0] / 1000, found["code_kilobits"]),
    ):
        low, high = (np.mean(values, axis=0) + sign * stats.t.ppf(0.975, 1) * stats.sem(values) for sign in (-1, 1))
        np.testing.assert_allclose([summary["low"], summary["high"]], [low, high])
    alone = by_state.summarize_labels(of_seeds[:1], task)
    assert (found["seeds"], alone["seeds"], alone["deviation_of_seeds"]) == (2, 1, None)
    assert np.isnan(alone["code_kilobits"]["low"]).all() and np.isnan(alone["mix"]["centre_of_gravity"]["high"])


def test_what_follows_from_scores_of_mixes_has_an_interval_over_sentences():
    """Against the spread over fresh samples of sentences, and plain loops."""
    rng, chances = np.random.default_rng(5), np.array([0.5, 0.7, 0.75, 0.9])

    def sample():
        right = rng.binomial(9, chances[:, None], (4, 200)).astype(float)
        return np.stack([right, np.full((4, 200), 9.0)], axis=1)

    task = label_tasks.entity_task(sample_of(tagged(20, 0)), sample_of(tagged(5, 1)))
    mixes = sample()
    one = by_state.LabelScores(*[mixes] * 2, None, mixes, np.ones(4), np.full(4, 0.25))
    found = by_state.summarize_labels([one], task)["mix"]
    for name, measure in (
        ("expected_layer", mix.expected_layer),
        ("gain_concentration_bits", mix.gain_concentration_bits),
    ):
        without = [measure(np.delete(mixes, np.s_[k::10], axis=2).sum(2)[:, 0] / (9 * 180)) for k in range(10)]
        width = stats.t.ppf(0.975, 9) * np.sqrt(9 * np.var(without))
        assert found[name]["value"] == pytest.approx(measure(mixes.sum(2)[:, 0] / 1800))
        np.testing.assert_allclose(
            [found[name][end] - found[name]["value"] for end in ("low", "high")], [-width, width]
        )
        fresh = np.std([measure(sample().sum(2)[:, 0] / 1800) for _ in range(200)])
        assert 0.6 < width / (stats.t.ppf(0.975, 9) * fresh) < 1.6


def test_a_mix_has_its_own_states_only():
    weights = np.asarray(mix.mix_weights(jnp.zeros((3, 3))))
    np.testing.assert_allclose(weights, [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)


def test_expected_layer_and_concentration_are_those_of_published_scores():
    """Dependencies of BERT-large (Tenney et al. 2019): 5.69 and 1.15; and a twin in plain Python."""
    scores = [85.6382, 88.1905, 89.0475, 89.7530, 91.5321, 91.8202, 91.7361, 92.0803, 92.2286, 92.4294, 93.1269]
    scores += [94.0032, 94.6229, 94.9609, 95.3445, 95.2970, 95.5448, 95.4705, 95.4612, 95.6357, 95.5997, 95.6314]
    scores += [95.5466, 95.4966, 95.5181]
    assert round(mix.expected_layer(scores), 3) == 5.692 and round(mix.gain_concentration_bits(scores), 3) == 1.150
    gains = [max(b - a, 0.0) for a, b in itertools.pairwise(scores)]
    twin = sum(g / sum(gains) * np.log2(g / sum(gains) * len(gains)) for g in gains if g)
    np.testing.assert_allclose(mix.gain_concentration_bits(scores), twin, rtol=1e-9)


def test_scores_without_gain_have_no_expected_layer():
    assert np.isnan(mix.expected_layer([0.5, 0.4, 0.5])) and np.isnan(mix.gain_concentration_bits([0.5, 0.4]))
    assert mix.divergence_from_uniform_bits([1, 1, 1, 1]) == 0 and mix.divergence_from_uniform_bits([0, 3]) == 1


def test_word_vectors_are_means_of_tokens(data):
    model, sentences = small_model(), read_splits([data / "treebank" / "small-ud-dev.conllu"])["dev"]
    rng = np.random.default_rng(0)
    sample = vectors.draw_sentences(sentences, lambda one: one.words, model.tokenizer, 64, 5, rng, "dev")
    assert len(sample.rows) == 5 and sample.skipped == 0 and sample.available == len(sentences)
    found = vectors.word_vectors(model, sample, sample.first(2), description="x")
    assert len(found.train) == LAYERS + 1 and found.train[0].shape == (sample.lengths.sum(), 32)
    np.testing.assert_allclose(found.dev[3], found.train[3][: sample.lengths[:2].sum()], atol=1e-6)
    assert [len(one.words) for one in sample.sentences] == sample.lengths.tolist()


def test_sentences_that_do_not_fit_are_counted(data):
    words = [("river",), ("wind",) * 40, ("\u4e00", "wind"), ("stone", "\u200b"), ("dark", "light")]
    sentences = [TaggedSentence(one, ("O",) * len(one)) for one in words]
    rng = np.random.default_rng(0)
    sample = vectors.draw_sentences(sentences, lambda one: one.words, small_tokenizer(), 16, 9, rng, "train")
    assert sample.skipped == 5 - len(sample.rows) >= 1
    assert ("wind",) * 40 not in [one.words for one in sample.sentences]
    with pytest.raises(UserError, match=r"^train: 0 of 1 sentences have at most 14 tokens"):
        vectors.draw_sentences(sentences[1:2], lambda one: one.words, small_tokenizer(), 16, 9, rng, "train")


@pytest.mark.slow
def test_suite(result):
    plain, items = finish(result, "probes")
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain["tasks"]) == ["pos", "relations", "entities"]
    for task in plain["tasks"].values():
        for row in ("model", "random_weights"):
            assert all(len(task[row][key]["low"]) == LAYERS + 1 for key in ("score", "selectivity"))
            assert len(task[row]["mix"]["score"]["value"]) == len(task[row]["code_kilobits"]["value"]) == LAYERS + 1
    assert len(plain["tasks"]["entities"]["model"]["span_f1"]["value"]) == LAYERS + 1
    scalars = SUITE.scalars(plain)
    of_pos = items["Parts of speech: accuracy, best state"]
    scalar = scalars["Parts of speech: accuracy, best state (%)"]
    value = of_pos.scores["model"].sum() / of_pos.weights["model"].sum()
    assert scalar.value == pytest.approx(100 * value, rel=1e-4) and 0.6 < value <= max(
        plain["tasks"]["pos"]["model"]["score"]["high"]
    )
    assert scalar.baselines["most frequent label"] == pytest.approx(100 * plain["tasks"]["pos"]["majority"], rel=1e-4)
    assert {"control task", "random weights", "word's most frequent label"} < set(scalar.baselines)
    assert len(of_pos.items) == 12 and of_pos.items[0].startswith("dev, sentence ")
    assert np.isfinite(scalars["UUAS of the structural probe, best state (%)"].value) and len(scalars) == 12
    assert all(len(one.baselines) >= 1 for one in scalars.values())
    assert {name for name, one in scalars.items() if one.interval is None} == {
        f"{title}: centre of gravity (state)" for title in probe_items.TITLES.values()
    }
    assert "(one seed, no interval, random weights " in analyse.scalar_text(
        scalars["Entities: centre of gravity (state)"]
    )
    kinds = [type(block) for block in SUITE.blocks(plain)]
    assert kinds.count(report.Curves) == 12 and kinds.count(report.Heatmap) == 1


@pytest.mark.slow
def test_entities_alone_and_again(data, result, tmp_path):
    (tmp_path / "entities").symlink_to(data / "entities")
    again, _ = finish(SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, progress=False), SETTINGS), "")
    assert again["treebank"] is None
    assert again["tasks"] == {"entities": finish(result, "")[0]["tasks"]["entities"]}
    notes = [block.text for block in SUITE.blocks(again) if isinstance(block, report.Note)]
    assert any("no folder treebank/" in text for text in notes)
    assert "UUAS of the structural probe, best state (%)" not in SUITE.scalars(again)


TREE = "1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_\n2\triver\triver\tNOUN\t_\t_\t0\troot\t_\t_\n\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"treebank/train.conllu": TREE * 3}, "probes need a train split and a dev or test split"),
        ({"treebank/train.conllu": TREE.replace("DET", "NOUN") * 3, "treebank/dev.conllu": TREE * 3}, "label 'NOUN'"),
        (
            {"treebank/train.conllu": TREE * 3, "treebank/dev.conllu": TREE},
            "dev: 1 of 1 sentences have at most 62 tokens and one or more for every word",
        ),
        ({"entities/train.conll": "", "entities/dev.conll": ""}, "dev.conll has no sentences"),
        (
            {"entities/train.conll": "the O\n\nriver O\n\n", "entities/dev.conll": "a O\n\na O\n"},
            "label 'O' for entities",
        ),
        ({"entities/words.conll": "the O\n"}, "must contain one of train, dev and test"),
    ],
)
def test_bad_data(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, progress=False), SETTINGS)
