"""The section of the page about geometry, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

from bert_jax.analysis.item_scores import test_title
from bert_jax.analysis.quantities import RANDOM, Quantity, by_index, paired, scalar_of_test, seeds_text
from bert_jax.analysis.suite import UNCERTAINTY, Scalar, SuiteResult
from bert_jax.report import Heatmap, Note, ReportBlock, Table

MEASURES = {
    "self_similarity": "Self-similarity of words",
    "intra_sentence_similarity": "Similarity of words to their sentence",
    "explainable_variance": "Variance explained by one vector per word",
}
SELF_SIMILARITY = "self-similarity of words, last state"
IDENTIFIED, IDENTIFIED_CENTRED = "language identified, last state", "language identified after centring, last state"


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    found = {}
    if (words := result["words"]) is not None:
        titles = {f"{name}_adjusted": f"{title}, last state, adjusted" for name, title in MEASURES.items()}
        for key, title in {"anisotropy": "anisotropy, last state (cosine)", **titles}.items():
            found[title] = _of_words(title, key, words).at(-1)
    for test in (IDENTIFIED, IDENTIFIED_CENTRED):
        if test in result[UNCERTAINTY]:
            found[test_title(test, "%")] = scalar_of_test(result, test)
    return found


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    parts = ((result["words"], _word_blocks, "text/"), (result["languages"], _language_blocks, "languages/"))
    found: list[ReportBlock] = []
    for part, shown, folder in parts:
        found += [Note(f"The data have no folder {folder}.")] if part is None else shown(part)
    question = Note(
        "How much does a word's vector depend on its context, and do all vectors share a direction? Do sentence "
        "vectors show their language?"
    )
    return (question, *found, Note(f"{seeds_text(result).capitalize()}."))


def _word_blocks(words: dict[str, Any]) -> list[ReportBlock]:
    titles = {f"{name}_adjusted": f"{title}, less that of random words" for name, title in MEASURES.items()}
    return [
        Note(
            f"{words['words']:,} of {words['words_with_enough_contexts']:,} words that occur in {words['contexts']} or "
            f"more of {words['texts']:,} texts, {words['contexts']} occurrences each; {words['skipped_lines']:,} lines "
            "had too many tokens or none. Bands and square brackets: 95 % over words and texts."
        ),
        _of_words("Anisotropy: mean cosine of random words", "anisotropy", words).curves(),
        *(_of_words(title, key, words).curves() for key, title in titles.items()),
        _table(words),
        Note(
            "Self-similarity near 1: the vectors of a word hardly depend on context. A high mean cosine of random "
            "words says that vectors occupy a narrow cone, which alone raises every cosine; so its value is "
            "subtracted. The cosine can be dominated by a few coordinates of large variance (Timkey and van Schijndel "
            "2021), and a similarity says nothing about what a vector encodes."
        ),
    ]


def _of_words(title: str, key: str, words: dict[str, Any]) -> Quantity:
    return Quantity(title, "", {"model": words["model"][key]}, {RANDOM: words["random_weights"][key]})


def _table(words: dict[str, Any]) -> Table:
    found, random = words["model"], words["random_weights"]
    names = ("anisotropy", *MEASURES, "explainable_variance_of_random_words")
    header = ("random words", "self-similarity", "in the sentence", "variance", "variance, random words")
    return by_index(
        ("state (random weights)", *header), [paired(found[name], random[name]) for name in names], words=True
    )


def _language_blocks(found: dict[str, Any]) -> list[ReportBlock]:
    model, random, count = found["model"], found["random_weights"], len(found["codes"])
    baselines = {RANDOM: random["accuracy"], f"{RANDOM}, centred": random["accuracy_centred"]}
    baselines["most frequent"] = found["majority_accuracy"]
    lines = {"model": model["accuracy"], "model, centred": model["accuracy_centred"]}
    unknown = [f"{code} {share:.0%}" for code, share in found["unknown_share"].items() if share >= 0.1]
    codes = tuple(found["codes"])
    skipped = [f"{code} ({number})" for code, number in found["skipped_languages"].items()]
    return [
        Note(
            f"{found['test_sentences']:,} test sentences of {count} languages; a quarter of each language's "
            "sentences is tested, a quarter gives its centroid, two quarters give the means that centring subtracts. "
            f"{found['skipped_lines']:,} lines had too many tokens or none"
            + (f"; languages with too few sentences: {', '.join(skipped)}" if skipped else "")
            + (f"; tokens unknown to the vocabulary: {', '.join(unknown)}" if unknown else "")
            + ". Bands: 95 % over the test sentences; the centroids stay as they are."
        ),
        Quantity("Language identified by the nearest centroid", "accuracy", lines, baselines).curves(),
        Heatmap(
            "Cosines of language centroids, last state, around their mean",
            tuple(map(tuple, found["centroid_cosines_last"])),
            codes,
            codes,
            "language",
            "language",
            "cosine",
            center=0.0,
        ),
        Note(
            "Centring subtracts a language's mean vector. If the accuracy then falls to that of the most frequent "
            "language, the mean was all that marked the language. State 0 is a mean of embeddings: its accuracy is "
            "what the vocabulary alone gives, and a script that the vocabulary lacks is easily told by its unknown "
            "tokens."
        ),
    ]
