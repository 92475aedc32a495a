"""The suite: attention in lines of text/, and heads per dependency relation in treebank/, beside random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.attention import flow, patterns, relations, statistics
from bert_jax.analysis.attention.attention_gradients import gradients_by_kind, loss_name
from bert_jax.analysis.attention.maps import attention_maps, halve, shorten, token_kinds
from bert_jax.analysis.attention.section import blocks, scalars
from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.item_scores import MODEL, ItemScores, mean_of_seeds, tests_over_seeds
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult, Value
from bert_jax.analysis.treebank import SPLITS, Sentence, read_splits
from bert_jax.array_types import Float
from bert_jax.errors import require
from bert_jax.field_validation import Count, Rate, check
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import TextRow, choose_masked, encode_words, sample_texts


@dataclass(frozen=True)
class AttentionSettings:
    """What attention is measured on."""

    texts: Count = 100
    """Lines of text/, drawn at random, for statistics and patterns."""
    max_length: Count = 128
    """Tokens of a text or sentence, special ones included, at most the model's positions; longer ones are skipped."""
    distance_texts: Count = 30
    """How many of the texts give the distances between heads."""
    gradient_texts: Count = 40
    """How many of the texts give the gradients by attention."""
    mask_share: Rate = 0.15
    """Share of a text's tokens that are masked for these gradients; at least one token is."""
    flow_texts: Count = 16
    """How many of the texts give rollout, norms and value zeroing."""
    flow_length: Count = 32
    """Tokens of these texts, special ones included, to which they are cut; n tokens cost about n forward passes."""
    sentences: Count = 400
    """Most sentences of treebank/ on which heads are chosen, and most on which they are scored."""
    least_words: Count = 20
    """Words of a relation on either side; rarer relations are left out."""
    random_seeds: Count = 1
    """Seeds of random weights, from --seed on, each as costly as the first; their numbers are means over them."""

    def __post_init__(self) -> None:
        check(self, "attention.")
        require(self.mask_share > 0, "attention.mask_share is 0: it must be above 0")
        require(
            self.max_length > flow.LEAST_TOKENS and self.flow_length >= flow.LEAST_TOKENS,
            f"attention.max_length is {self.max_length} and attention.flow_length {self.flow_length}: "
            f"they must be at least {flow.LEAST_TOKENS + 1} and {flow.LEAST_TOKENS}",
        )


def run(inputs: SuiteInputs, settings: AttentionSettings) -> SuiteResult:
    """Both parts; a folder that is not there is left out.

    Raises:
      UserError: no line or sentence that fits, a malformed treebank, or one without words that count; a model with
        bottlenecks or without LayerNorm.
    """
    config = inputs.model.config
    require(
        config.bottleneck_size is None and config.norm == "layer",
        "attention: this suite measures norms around the residual connection and LayerNorm of plain layers, and the "
        f"model has model.bottleneck_size {config.bottleneck_size} and model.norm {config.norm}: leave the suite out",
    )
    length = min(settings.max_length, config.max_positions)
    result: SuiteResult = {"layers": config.num_layers, "heads": config.num_heads, "seed": inputs.seed}
    result["random_seeds"] = settings.random_seeds
    items: dict[str, ItemScores] = {}
    for folder, measured in (("text", _measure_text), ("treebank", _measure_treebank)):
        result[folder] = measured(inputs, settings, length, items) if (inputs.data / folder).is_dir() else None
    return result | {ITEMS: items}


def _measure_text(
    inputs: SuiteInputs, settings: AttentionSettings, length: int, items: dict[str, ItemScores]
) -> dict[str, Any]:
    model, tokenizer, progress = inputs.model, inputs.model.tokenizer, inputs.progress
    paths = inputs.files("text", ".txt")
    sample = sample_texts(paths, tokenizer, length - 1, settings.texts, inputs.seed)
    rows = [row for row in sample.rows if _is_long(row)]
    require(bool(rows), "attention: all lines of text/ that fit have a single token: give longer texts")
    pairs = halve(rows, tokenizer, model.config.type_vocab_size)
    short = shorten(rows[: settings.flow_texts], settings.flow_length)

    def statistics_of(one: LoadedModel) -> MapValues:
        return measure_maps(one, pairs, settings.distance_texts, progress=progress)

    def flow_of(one: LoadedModel) -> flow.Flow:
        return flow.measure_flow(one, short, progress=progress)

    uniform = _uniform_statistics(pairs, model)
    maps, random_maps = _of_both(inputs, settings, "statistics", statistics_of)
    flows, random_flows = _of_both(inputs, settings, "flow", flow_of)
    names = [f"text {number}" for number, row in zip(sample.numbers, sample.rows, strict=True) if _is_long(row)]

    def tests_of(random: tuple[MapValues, flow.Flow]) -> dict[str, ItemScores]:
        columns = {MODEL: maps.of_texts, "random_weights": random[0].of_texts, "uniform_attention": uniform}
        return _text_items(names, columns) | _flow_items(names, {MODEL: flows, "random_weights": random[1]})

    items |= tests_over_seeds(tests_of, list(zip(random_maps, random_flows, strict=True)))
    return {
        "texts": len(rows),
        "tokens": sum(len(row.input_ids) for row in pairs),
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "texts_of_one_token": len(sample.rows) - len(rows),
        "uniform": {name: float(values.mean()) for name, values in uniform.items()},
        "statistics": {"model": maps.summary, "random_weights": mean_of_seeds(random_maps).summary},
        "gradients": _gradients(pairs[: settings.gradient_texts], settings, inputs),
        "flow_texts": len(short),
        "flow": {"model": flows.summary, "random_weights": mean_of_seeds(random_flows).summary},
    }


def _is_long(row: TextRow) -> bool:
    return len(row.input_ids) >= flow.LEAST_TOKENS


TESTS = {
    "sep": ("attention to [SEP], mean of heads", "%"),
    "near": ("attention to the token and its neighbours, mean of heads", "%"),
    "entropy_nats": ("entropy of attention, mean of heads", "nats"),
    "heterogeneous": ("heterogeneous maps", "%"),
}
"""Tests and their units by the name of the statistic."""


def _text_items(names: Sequence[str], columns: dict[str, dict[str, np.ndarray]]) -> dict[str, ItemScores]:
    """The tests of `TESTS` from the values of each text, by column and statistic."""
    return {
        title: ItemScores(
            tuple(names),
            None,
            {column: values[name] for column, values in columns.items() if name in values},
            unit=unit,
            same_tokenizer=True,
        )
        for name, (title, unit) in TESTS.items()
    }


def _flow_items(names: Sequence[str], flows: dict[str, flow.Flow]) -> dict[str, ItemScores]:
    """The test of attention against value zeroing, by column, in the texts in which all columns have it."""
    agreements = {name: one.agreement["attention"].mean(1) for name, one in flows.items()}
    known = np.flatnonzero(np.isfinite(list(agreements.values())).all(0))
    if not len(known):
        return {}
    scores = {name: values[known] for name, values in agreements.items()}
    of_texts = ItemScores(tuple(names[i] for i in known), None, scores, unit="", same_tokenizer=True)
    return {"rank agreement of attention with value zeroing, mean of layers": of_texts}


def _of_both(
    inputs: SuiteInputs, settings: AttentionSettings, what: str, measure: Callable[[LoadedModel], Value]
) -> tuple[Value, list[Value]]:
    """What `measure` returns for the model, and for random weights of each seed."""
    random = inputs.of_random_weights(f"attention, {what}", measure, settings.random_seeds)
    return measure(inputs.model), random


class MapValues(NamedTuple):
    """Statistics of attention maps."""

    of_texts: dict[str, Float[np.ndarray, " texts"]]
    """By name, the mean over all heads in each text."""
    summary: dict[str, Any]
    """Means over texts, patterns and distances with their intervals, as plain values."""


def measure_maps(
    model: LoadedModel, rows: Sequence[TextRow], distance_texts: int, *, progress: bool = False
) -> MapValues:
    """Statistics, patterns and distances of all heads; means over texts.

    Args:
      model: from `inference.load`.
      rows: of texts.
      distance_texts: how many of these give the distances.
      progress: show a progress bar on stderr.
    """
    config = model.config
    shape, count = (config.num_layers, config.num_heads), len(rows)
    heads, distance_texts = shape[0] * shape[1], min(distance_texts, count)
    values = {name: np.zeros((count, *shape)) for name in (*statistics.SHARES, *statistics.ENTROPIES)}
    is_pattern = np.zeros((len(patterns.PATTERNS), count, *shape))
    divergences = np.zeros((distance_texts, heads, heads))
    for one in attention_maps(model, rows, progress=progress):
        kinds, attention = token_kinds(rows[one.index], model.tokenizer), one.probabilities
        for name, of_text in statistics.attention_statistics(attention, kinds).items():
            values[name][one.index] = of_text
        found = patterns.classify_patterns(attention, kinds)
        is_pattern[:, one.index] = found == np.arange(len(patterns.PATTERNS))[:, None, None]
        if one.index < distance_texts:
            flat = one.padded.reshape(heads, *one.padded.shape[2:])
            divergences[one.index] = statistics.divergence_sums(flat, jnp.int32(one.length))
    values["near"] = values["self"] + values["previous"] + values["next"]
    of_texts = {name: of.mean((1, 2)) for name, of in values.items()}
    of_texts["heterogeneous"] = is_pattern[patterns.PATTERNS.index("heterogeneous")].mean((1, 2))
    summary = {
        **{name: of.mean(0) for name, of in values.items()},
        "half_width": {name: bootstrap_mean(np.moveaxis(of, 0, -1)).half_width for name, of in values.items()},
        "mean_of_heads": {name: bootstrap_mean(of)._asdict() for name, of in of_texts.items()},
        "pattern_texts": dict(zip(patterns.PATTERNS, is_pattern.sum(1).astype(int), strict=True)),
        "pattern_shares": bootstrap_mean(is_pattern.mean((2, 3)))._asdict(),
        "pattern_shares_by_layer": bootstrap_mean(np.moveaxis(is_pattern.mean(3), 1, -1))._asdict(),
        "distance_texts": distance_texts,
    }
    queries = np.array([len(row.input_ids) for row in rows[:distance_texts]])
    distances = statistics.distances_with_intervals(divergences, queries, shape[1])
    return MapValues(of_texts, summary | dict(zip(statistics.DISTANCES, distances, strict=True)))


def _uniform_statistics(rows: Sequence[TextRow], model: LoadedModel) -> dict[str, np.ndarray]:
    """The statistics of a head that attends to all tokens equally, in each text."""
    found = [
        statistics.attention_statistics(
            statistics.uniform_attention(len(row.input_ids)), token_kinds(row, model.tokenizer)
        )
        for row in rows
    ]
    of_texts = {name: np.array([one[name] for one in found], np.float64) for name in found[0]}
    return of_texts | {"near": of_texts["self"] + of_texts["previous"] + of_texts["next"]}


def _gradients(rows: list[TextRow], settings: AttentionSettings, inputs: SuiteInputs) -> dict[str, Any] | None:
    loss = loss_name(inputs.model.heads)
    masked = None
    if loss == "masked tokens":
        chosen = choose_masked(rows, inputs.model.tokenizer.special_ids, settings.mask_share, inputs.seed)
        rows = [row for row, positions in zip(rows, chosen, strict=True) if len(positions)]
        masked = [positions for positions in chosen if len(positions)]
    if loss is None or not rows:
        return None

    def gradients_of(model: LoadedModel) -> dict[str, Any]:
        found = gradients_by_kind(model, rows, masked, progress=inputs.progress)
        return {kind: bootstrap_mean(values.mean(2).T)._asdict() for kind, values in found.items()}

    of_model, randoms = _of_both(inputs, settings, "gradients", gradients_of)
    return {
        "loss": loss,
        "texts": len(rows),
        "mask_share": None if masked is None else settings.mask_share,
        "by_attention_to": {"model": of_model, "random_weights": mean_of_seeds(randoms)},
    }


def _measure_treebank(
    inputs: SuiteInputs, settings: AttentionSettings, length: int, items: dict[str, ItemScores]
) -> dict[str, Any]:
    """Heads per relation; the tests are added to `items`."""
    files = inputs.files("treebank", ".conllu")
    # Sentences of train are needed only if there are no others.
    splits = read_splits([path for path in files if "train" not in path.name] or files)
    names, parts = selection_and_scoring(splits)
    drawn, rows, skipped, kept_indices = [], [], 0, []
    for sentences in parts:
        order = np.random.default_rng(inputs.seed).permutation(len(sentences))[: settings.sentences]
        encoded = encode_words([sentences[i].words for i in order], inputs.model.tokenizer, length)
        drawn.append([sentences[i] for i, row in zip(order, encoded, strict=True) if row is not None])
        rows.append([row for row in encoded if row is not None])
        kept_indices.append([int(i) for i, row in zip(order, encoded, strict=True) if row is not None])
        skipped += sum(row is None for row in encoded)
    require(
        all(rows),
        f"attention: {names[0]} or {names[1]} of treebank/ has no sentence of at most {length - 2} tokens "
        "with one or more for every word: give more",
    )
    kept, rare = relations.frequent_relations(drawn, settings.least_words)
    require(
        all(any(relations.scored_words(sentence).any() for sentence in part) for part in drawn),
        f"attention: {names[0]} or {names[1]} of treebank/ has no word with a head that is no punctuation: give more",
    )

    def best_heads_of(model: LoadedModel) -> tuple[list[relations.BestHead], np.ndarray]:
        counts = [
            relations.count_correct(
                attention_maps(model, rows[i], what="heads per relation", progress=inputs.progress),
                rows[i],
                drawn[i],
                kept,
            )
            for i in range(2)
        ]
        return relations.best_heads(*counts, kept), counts[1].total

    (best, words), found = _of_both(inputs, settings, "relations", best_heads_of)
    sentences = [f"{names[1]}, sentence {i}" for i in kept_indices[1]]
    of_random = [[one.correct for one in of_seed] for of_seed, _ in found]
    items |= tests_over_seeds(lambda correct: relations.item_scores(best, correct, words, sentences), of_random)
    return {
        "selection": names[0],
        "scoring": names[1],
        "sentences_of_selection": len(rows[0]),
        "sentences_of_scoring": len(rows[1]),
        "skipped_sentences": skipped,
        "rare_relations": rare,
        "relations": [one.about for one in best],
        "random_weights": {
            key: mean_of_seeds([[one.about[key] for one in of] for of, _ in found])
            for key in ("accuracy", "offset_accuracy")
        },
        "mean_gain": relations.mean_gain(best, words),
    }


def selection_and_scoring(
    splits: dict[str, list[Sentence]],
) -> tuple[tuple[str, str], tuple[list[Sentence], list[Sentence]]]:
    """Sentences on which heads are chosen and others on which they are scored, with their names.

    dev and test if there are both; otherwise every second sentence of dev, test or train, the first that is there.
    """
    if {"dev", "test"} <= splits.keys():
        return ("dev", "test"), (splits["dev"], splits["test"])
    name = next(name for name in ("dev", "test", *SPLITS) if name in splits)
    return (f"{name}, odd sentences", f"{name}, even sentences"), (splits[name][::2], splits[name][1::2])


SUITE = Suite("attention", AttentionSettings, ("text", "treebank"), run, blocks, scalars, any_folder=True)
