"""The suite: geometry of words on text/ and of languages on languages/, beside random weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.analysis.geometry.languages import (
    SPLITS,
    Identified,
    centroid_cosines,
    identify,
    sample_languages,
    sentence_vectors,
)
from bert_jax.analysis.geometry.section import IDENTIFIED, IDENTIFIED_CENTRED, SELF_SIMILARITY, blocks, scalars
from bert_jax.analysis.geometry.words import Measures, choose_words, measure, with_word_ids, word_vectors
from bert_jax.analysis.item_scores import MODEL, ItemScores, mean_of_seeds, tests_over_seeds
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.field_validation import Count, check
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import sample_texts


@dataclass(frozen=True)
class GeometrySettings:
    """What the geometry is measured on."""

    texts: Count = 1000
    """Lines of text/, drawn at random."""
    max_length: Count = 128
    """Tokens of a line, special ones included, at most the model's positions; longer lines are skipped."""
    words: Count = 200
    """Words whose occurrences are compared, drawn from those with enough."""
    contexts: Count = 10
    """Occurrences of a word, in different lines; Ethayarajh (2019) takes all of words with 5 or more."""
    sentences: Count = 90
    """Most lines of each file of languages/."""
    random_seeds: Count = 1
    """Seeds of random weights, from --seed on, each as costly as the first; their numbers are means over them."""

    def __post_init__(self) -> None:
        check(self, "geometry.")


def run(inputs: SuiteInputs, settings: GeometrySettings) -> SuiteResult:
    """Measures of every hidden state of the model and of random weights; a folder that is not there is left out.

    Raises:
      UserError: no line or no word that can be used, or fewer than two languages with enough sentences.
    """
    length = min(settings.max_length, inputs.model.config.max_positions)
    result: SuiteResult = {"layers": inputs.model.config.num_layers, "seed": inputs.seed}
    result["random_seeds"] = settings.random_seeds
    items: dict[str, ItemScores] = {}
    for name, folder, measured in (("words", "text", _words), ("languages", "languages", _languages)):
        result[name] = measured(inputs, settings, length, items) if (inputs.data / folder).is_dir() else None
    return result | {ITEMS: items}


def _words(
    inputs: SuiteInputs, settings: GeometrySettings, length: int, items: dict[str, ItemScores]
) -> dict[str, Any]:
    tokenizer = inputs.model.tokenizer
    sample = sample_texts(inputs.files("text", ".txt"), tokenizer, length, settings.texts, inputs.seed)
    rows = [row for row in with_word_ids(sample.rows, tokenizer) if row.word_ids.max() > 0]
    chosen = choose_words(rows, tokenizer, settings.words, settings.contexts, np.random.default_rng(inputs.seed))

    def measure_in(model: LoadedModel) -> Measures:
        return measure(word_vectors(model, rows, chosen, progress=inputs.progress))

    of_model = measure_in(inputs.model)
    randoms = inputs.of_random_weights("geometry, words", measure_in, settings.random_seeds)

    def tests_of(random: Measures) -> dict[str, ItemScores]:
        scores = {MODEL: of_model.self_similarity[-1], "random_weights": random.self_similarity[-1]}
        return {SELF_SIMILARITY: ItemScores(tuple(chosen.words), None, scores, unit="cosine", same_tokenizer=True)}

    items |= tests_over_seeds(tests_of, randoms)
    return {
        "texts": len(rows),
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "texts_with_one_word_or_none": len(sample.rows) - len(rows),
        "words": len(chosen.words),
        "words_with_enough_contexts": chosen.candidates,
        "contexts": settings.contexts,
        "examples": chosen.words[:20],
        "model": of_model.summary,
        "random_weights": mean_of_seeds(randoms).summary,
    }


def _languages(
    inputs: SuiteInputs, settings: GeometrySettings, length: int, items: dict[str, ItemScores]
) -> dict[str, Any]:
    paths = inputs.files("languages", ".txt")
    sample = sample_languages(paths, inputs.model.tokenizer, length, settings.sentences, inputs.seed)
    count, labels = len(sample.codes), (sample.languages, sample.splits)
    vectors = sentence_vectors(inputs.model, sample.rows, progress=inputs.progress)
    cosines = centroid_cosines(vectors[-1], sample.languages, count)

    def identify_in(model: LoadedModel) -> Identified:
        return identify(sentence_vectors(model, sample.rows, progress=inputs.progress), *labels, count)

    randoms = inputs.of_random_weights("geometry, languages", identify_in, settings.random_seeds)
    of_model = identify(vectors, *labels, count)
    test = np.flatnonzero(sample.splits == len(SPLITS) - 1)
    tested = np.bincount(sample.languages[test], minlength=count)
    largest = (sample.languages[test] == tested.argmax()).astype(float)

    def tests_of(random: Identified) -> dict[str, ItemScores]:
        names = tuple(sample.names[i] for i in test)
        return {
            title: ItemScores(names, None, {MODEL: one[-1], "random_weights": other[-1], "largest_language": largest})
            for title, one, other in zip((IDENTIFIED, IDENTIFIED_CENTRED), of_model, random, strict=True)
        }

    items |= tests_over_seeds(tests_of, randoms)
    return {
        "codes": sample.codes,
        "sentences": len(sample.rows),
        "test_sentences": int(tested.sum()),
        "skipped_lines": sample.skipped_lines,
        "skipped_languages": sample.skipped_languages,
        "unknown_share": sample.unknown_share,
        "majority_accuracy": float(tested.max() / tested.sum()),
        "centroid_cosines_last": np.round(cosines, 4).tolist(),
        "model": of_model.summary,
        "random_weights": mean_of_seeds(randoms).summary,
    }


SUITE = Suite("geometry", GeometrySettings, ("text", "languages"), run, blocks, scalars, any_folder=True)
