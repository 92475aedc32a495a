"""Geometry: measures of vectors whose geometry is known, against plain twins, and the suite on a small model."""

import json

import numpy as np
import pytest
from etils import epath

from bert_jax import report
from bert_jax.analysis.geometry import SUITE, languages, vector_measures, words
from bert_jax.analysis.geometry.geometry import GeometrySettings
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.errors import UserError
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_texts, sample_texts
from tests.building import make_sentence
from tests.interventions.models import LAYERS, small_model

SETTINGS = GeometrySettings(texts=30, words=5, contexts=4, sentences=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = epath.Path(tmp_path_factory.mktemp("data"))
    rng = np.random.default_rng(0)
    for folder, names in (("text", ["lines"]), ("languages", ["aaa", "bbb", "few"])):
        (directory / folder).mkdir()
        for name in names:
            lines = [make_sentence(rng) for _ in range(40)]
            lines = {"bbb": [line.replace("e", "x") for line in lines], "few": lines[:3]}.get(name, lines)
            (directory / folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return directory


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_mean_cosine_is_that_of_all_pairs():
    vectors = np.random.default_rng(0).normal(0.3, 1, (2, 6, 4))
    expected = [np.mean([cosine(one[i], one[j]) for i in range(6) for j in range(6) if i != j]) for one in vectors]
    np.testing.assert_allclose(vector_measures.mean_cosine(vectors), expected)


def test_context_free_vectors_have_self_similarity_and_explained_variance_1():
    vector = np.random.default_rng(0).normal(size=8).astype(np.float32)
    vectors = np.tile(vector, (3, 5, 1))
    np.testing.assert_allclose(vector_measures.mean_cosine(vectors), 1, atol=1e-6)
    np.testing.assert_allclose(vector_measures.explainable_variance(vectors), 1, atol=1e-6)
    np.testing.assert_allclose(vector_measures.intra_sentence_similarity(vectors), 1, atol=1e-6)


def test_anisotropy_of_a_shifted_gaussian():
    """Of vectors mean + noise of unit variance, the cosine of two tends to |mean|^2 / (|mean|^2 + H) for large H."""
    width, shift = 4096, 0.8
    vectors = np.random.default_rng(0).normal(shift, 1, (200, width))
    np.testing.assert_allclose(vector_measures.mean_cosine(vectors), shift**2 / (shift**2 + 1), atol=0.005)
    np.testing.assert_allclose(vector_measures.mean_cosine(vectors - shift), 0, atol=0.005)


def test_explainable_variance_is_that_of_singular_values():
    vectors = np.random.default_rng(0).normal(0.5, 1, (2, 5, 7))
    singular = np.linalg.svd(vectors, compute_uv=False)
    np.testing.assert_allclose(
        vector_measures.explainable_variance(vectors), singular[:, 0] ** 2 / (singular**2).sum(1)
    )
    np.testing.assert_allclose(vector_measures.explainable_variance(3 * np.eye(4)[None]), 0.25)


def test_intra_sentence_similarity():
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    expected = np.mean([cosine(one, vectors.mean(0)) for one in vectors])
    np.testing.assert_allclose(vector_measures.intra_sentence_similarity(vectors), expected)


def test_words_of_the_vocabulary():
    tokenizer = small_model().tokenizer
    (row,) = words.with_word_ids(encode_texts(["unfathomable river [SEP] stone."], tokenizer, 32), tokenizer)
    pieces = [tokenizer.decode(row.input_ids[row.word_ids == word]) for word in range(row.word_ids.max() + 1)]
    assert pieces == ["unfathomable", "river", "stone", "."]
    assert row.word_ids[0] == row.word_ids[-1] == -1


def test_chosen_words_occur_in_different_texts_and_have_their_vectors(data):
    model = small_model()
    sample = sample_texts([data / "text" / "lines.txt"], model.tokenizer, 64, 30, seed=0)
    rows = words.with_word_ids(sample.rows, model.tokenizer)
    chosen = words.choose_words(rows, model.tokenizer, 5, 4, np.random.default_rng(0))
    assert len(chosen.words) == 5 <= chosen.candidates and all(len(where) == 4 for where in chosen.occurrences)
    for word, where in zip(chosen.words, chosen.occurrences, strict=True):
        assert len({row for row, _ in where}) == 4
        for row, index in where:
            assert model.tokenizer.decode(rows[row].input_ids[rows[row].word_ids == index]) == word
    vectors = words.word_vectors(model, rows, chosen)
    row, index = chosen.occurrences[2][1]
    (batch,) = batches([rows[row]], model.tokenizer.pad_id, 32)
    hidden = capture(model, batch, ["hidden_states"])["hidden_states"][:, 0, : len(rows[row].input_ids)]
    np.testing.assert_allclose(vectors.words[:, 2, 1], hidden[:, rows[row].word_ids == index].mean(1), atol=1e-5)
    row, index = chosen.random[3]
    assert row == 3 and vectors.random.shape == (LAYERS + 1, len(rows), 32)


def test_adjusted_measures_are_differences(data):
    rng = np.random.default_rng(0)
    vectors = words.ContextVectors(rng.normal(size=(2, 3, 4, 16)), rng.normal(1, 1, (2, 9, 16)), rng.random((2, 9)))
    measured = words.measure(vectors)
    found = {name: one["value"] for name, one in measured.summary.items()}
    expected = np.mean([vector_measures.mean_cosine(one) for one in vectors.words[1]])
    np.testing.assert_allclose(found["self_similarity"][1], expected)
    np.testing.assert_allclose(
        found["self_similarity_adjusted"][1], expected - vector_measures.mean_cosine(vectors.random[1])
    )
    groups = [vector_measures.explainable_variance(vectors.random[1, i : i + 4]) for i in (0, 4)]
    np.testing.assert_allclose(found["explainable_variance_of_random_words"][1], np.mean(groups))
    np.testing.assert_allclose(measured.self_similarity.mean(1), found["self_similarity"])
    for one in measured.summary.values():
        assert (one["low"] < one["high"]).all()


def test_cosines_of_bootstrap_samples():
    """Texts drawn one by one, without the pairs of a text and itself."""
    rng = np.random.default_rng(1)
    vectors, drawn = rng.normal(0.4, 1, (2, 7, 5)), np.array([[2.0, 0, 1, 3, 0, 1, 0], [1.0] * 7])
    found = words.resampled_cosines(vectors, drawn)
    for counts, cosines in zip(drawn.astype(int), found, strict=True):
        chosen = np.repeat(np.arange(7), counts)
        for state, value in zip(vectors, cosines, strict=True):
            pairs = [cosine(state[i], state[j]) for i in chosen for j in chosen if i != j]
            assert value == pytest.approx(np.mean(pairs))


def test_languages_that_differ_by_their_mean():
    """Their centroids identify them; after centring nothing does, however few sentences give the mean."""
    rng = np.random.default_rng(0)
    count, sentences = 10, 80
    labels, splits = np.repeat(np.arange(count), sentences), np.tile(np.arange(4), count * sentences // 4)
    means = 0.8 * rng.normal(size=(count, 64))
    vectors = (means[labels] + rng.normal(size=(len(labels), 64)))[None]
    found = languages.identify(vectors, labels, splits, count)
    assert found.plain[0].mean() > 0.97
    chance, error = 1 / count, np.sqrt(0.1 * 0.9 / (len(labels) / 4))
    assert abs(found.centred[0].mean() - chance) < 3.5 * error


def test_centroid_cosines():
    labels = np.repeat(np.arange(3), 2)
    vectors = np.array([[9.0, 1, 0], [9, 1, 0], [9, 1, 0.001], [9, 1, 0.001], [9, -2, 0], [9, -2, 0]])
    found = languages.centroid_cosines(vectors, labels, 3)
    np.testing.assert_allclose(found, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]], atol=1e-3)


def test_suite(data):
    inputs = SuiteInputs(small_model(), data, seed=0, progress=False)
    result, items = finish(SUITE.run(inputs, SETTINGS), "geometry")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    found = result["languages"]
    assert found["codes"] == ["aaa", "bbb"] and found["skipped_languages"] == {"few": 3}
    assert (found["sentences"], found["test_sentences"], found["majority_accuracy"]) == (32, 8, 0.5)
    assert found["model"]["accuracy"]["value"][0] > 0.5
    scalars = SUITE.scalars(result)
    anisotropy = scalars["anisotropy, last state (cosine)"]
    assert anisotropy.value == result["words"]["model"]["anisotropy"]["value"][-1]
    assert anisotropy.baselines == {"random weights": result["words"]["random_weights"]["anisotropy"]["value"][-1]}
    assert scalars["language identified, last state (%)"].baselines["largest language"] == 50
    kinds = [type(block) for block in SUITE.blocks(result)]
    assert kinds.count(report.Heatmap) == 1 and kinds.count(report.Curves) == 5
    assert all(scalar.interval[0] <= scalar.value <= scalar.interval[1] for scalar in scalars.values())
    assert items["language identified, last state"].items[0].startswith("aaa, line ")
    assert finish(SUITE.run(inputs, SETTINGS), "geometry")[0] == result


def test_without_languages(data, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "lines.txt").write_text((data / "text" / "lines.txt").read_text())
    result, _ = finish(SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, False), SETTINGS), "geometry")
    assert result["languages"] is None and len(SUITE.scalars(result)) == 4
    assert any("no folder languages/" in block.text for block in SUITE.blocks(result) if isinstance(block, report.Note))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"text/a.txt": "the river"}, "no word occurs in 4 of 1 texts"),
        ({"text/a.txt": "the river\n" * 9 + "x"}, "no word occurs in 4 of 1 texts"),
        (
            {"text/a.txt": "the a\nthe b\nthe c\nthe d", "languages/a.txt": "the"},
            "0 of 1 languages have 8 different sentences that fit",
        ),
        ({"text/a.txt": b"\xff"}, "is not UTF-8"),
    ],
)
def test_too_little_text(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, False), SETTINGS)
