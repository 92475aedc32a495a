"""The suite: attention in lines of text/, and heads per dependency relation in treebank/, beside random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.attention import flow, patterns, relations, statistics
from bert_jax.analysis.attention.attention_gradients import gradients_by_kind, loss_name
from bert_jax.analysis.attention.maps import attention_maps, halve, shorten, token_kinds
from bert_jax.analysis.attention.section import blocks, scalars
from bert_jax.analysis.suite import Suite, SuiteInputs, SuiteResult
from bert_jax.analysis.treebank import SPLITS, Sentence, read_splits
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
    for folder, measured in (("text", _measure_text), ("treebank", _measure_treebank)):
        result[folder] = measured(inputs, settings, length) if (inputs.data / folder).is_dir() else None
    return result


def _measure_text(inputs: SuiteInputs, settings: AttentionSettings, length: int) -> dict[str, Any]:
    model, tokenizer, progress = inputs.model, inputs.model.tokenizer, inputs.progress
    paths = inputs.files("text", ".txt")
    sample = sample_texts(paths, tokenizer, length - 1, settings.texts, inputs.seed)
    rows = [row for row in sample.rows if len(row.input_ids) >= flow.LEAST_TOKENS]
    require(bool(rows), "attention: all lines of text/ that fit have a single token: give longer texts")
    pairs = halve(rows, tokenizer, model.config.type_vocab_size)
    short = shorten(rows[: settings.flow_texts], settings.flow_length)

    def statistics_of(one: LoadedModel) -> dict[str, Any]:
        return measure_maps(one, pairs, settings.distance_texts, progress=progress)

    def flow_of(one: LoadedModel) -> dict[str, Any]:
        return flow.summarize_flow(one, short, progress=progress)

    return {
        "texts": len(rows),
        "tokens": sum(len(row.input_ids) for row in pairs),
        "lines": sample.lines,
        "skipped_lines": sample.skipped,
        "texts_of_one_token": len(sample.rows) - len(rows),
        "uniform": _uniform_statistics(pairs, model),
        "statistics": _of_both(inputs, "statistics", statistics_of),
        "gradients": _gradients(model, pairs[: settings.gradient_texts], settings, inputs),
        "flow_texts": len(short),
        "flow": _of_both(inputs, "flow", flow_of),
    }


def _of_both(inputs: SuiteInputs, what: str, measure: Callable[[LoadedModel], Any]) -> dict[str, Any]:
    """What `measure` returns for the model and for random weights."""
    random = inputs.of_random_weights(f"attention, {what}", measure)
    return {"model": measure(inputs.model), "random_weights": random}


def measure_maps(
    model: LoadedModel, rows: Sequence[TextRow], distance_texts: int, *, progress: bool = False
) -> dict[str, Any]:
    """Statistics, patterns and distances of all heads; means over texts.

    Args:
      model: from `inference.load`.
      rows: of texts.
      distance_texts: how many of these give the distances.
      progress: show a progress bar on stderr.
    """
    config = model.config
    shape = config.num_layers, config.num_heads
    heads = shape[0] * shape[1]
    totals = {name: np.zeros(shape) for name in (*statistics.SHARES, *statistics.ENTROPIES)}
    pattern_texts, divergences, queries = (
        np.zeros((len(patterns.PATTERNS), *shape), np.int64),
        np.zeros((heads, heads)),
        0,
    )
    for one in attention_maps(model, rows, progress=progress):
        kinds, attention = token_kinds(rows[one.index], model.tokenizer), one.probabilities
        for name, values in statistics.attention_statistics(attention, kinds).items():
            totals[name] += values
        found = patterns.classify_patterns(attention, kinds)
        pattern_texts += found == np.arange(len(patterns.PATTERNS))[:, None, None]
        if one.index < distance_texts:
            flat = one.padded.reshape(heads, *one.padded.shape[2:])
            divergences += np.asarray(statistics.divergence_sums(flat, jnp.int32(one.length)))
            queries += one.length
    within, between = statistics.distances_by_layer(np.sqrt(divergences / queries), shape[1])
    return {
        **{name: (total / len(rows)).tolist() for name, total in totals.items()},
        "pattern_texts": {name: pattern_texts[i].tolist() for i, name in enumerate(patterns.PATTERNS)},
        "distance_texts": min(distance_texts, len(rows)),
        "head_distance_in_layer": within,
        "head_distance_between_layers": between,
    }


def _uniform_statistics(rows: Sequence[TextRow], model: LoadedModel) -> dict[str, float]:
    """The statistics of a head that attends to all tokens of a text equally."""
    found = [
        statistics.attention_statistics(
            statistics.uniform_attention(len(row.input_ids)), token_kinds(row, model.tokenizer)
        )
        for row in rows
    ]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _gradients(
    model: LoadedModel, rows: list[TextRow], settings: AttentionSettings, inputs: SuiteInputs
) -> dict[str, Any] | None:
    loss = loss_name(model.heads)
    masked = None
    if loss == "masked tokens":
        chosen = choose_masked(rows, model.tokenizer.special_ids, settings.mask_share, inputs.seed)
        rows = [row for row, positions in zip(rows, chosen, strict=True) if len(positions)]
        masked = [positions for positions in chosen if len(positions)]
    if loss is None or not rows:
        return None
    found = gradients_by_kind(model, rows, masked, progress=inputs.progress)
    return {
        "loss": loss,
        "texts": len(rows),
        "mask_share": None if masked is None else settings.mask_share,
        "by_attention_to": {kind: values.tolist() for kind, values in found.items()},
    }


def _measure_treebank(inputs: SuiteInputs, settings: AttentionSettings, length: int) -> dict[str, Any]:
    files = inputs.files("treebank", ".conllu")
    # Sentences of train are needed only if there are no others.
    splits = read_splits([path for path in files if "train" not in path.name] or files)
    names, parts = selection_and_scoring(splits)
    drawn, rows, skipped = [], [], 0
    for sentences in parts:
        order = np.random.default_rng(inputs.seed).permutation(len(sentences))[: settings.sentences]
        encoded = encode_words([sentences[i].words for i in order], inputs.model.tokenizer, length)
        drawn.append([sentences[i] for i, row in zip(order, encoded, strict=True) if row is not None])
        rows.append([row for row in encoded if row is not None])
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

    def best_heads_of(model: LoadedModel) -> list[dict[str, Any]]:
        counts = [
            relations.count_correct(
                attention_maps(model, rows[i], what="heads per relation", progress=inputs.progress),
                rows[i],
                drawn[i],
                kept,
            )
            for i in range(2)
        ]
        return relations.best_heads(*counts, kept)

    tables = _of_both(inputs, "relations", best_heads_of)
    return {
        "selection": names[0],
        "scoring": names[1],
        "sentences_of_selection": len(rows[0]),
        "sentences_of_scoring": len(rows[1]),
        "skipped_sentences": skipped,
        "rare_relations": rare,
        "relations": tables["model"],
        "random_weights": tables["random_weights"],
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
