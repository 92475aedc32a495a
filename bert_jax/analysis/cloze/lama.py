"""Facts in the form of LAMA (Petroni et al. 2019): the object of a fact at a mask, among the words of a vocabulary.

Negated and misprimed variants follow Kassner and Schuetze (2020, arXiv:1911.03343). A file is a relation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.cloze.cloze_scores import mean, ranks_and_ties, share_with_interval
from bert_jax.analysis.cloze.lama_files import Fact, common_vocabulary, draw_facts, read_relations
from bert_jax.analysis.cloze.predictions import (
    MASK,
    encode_masked,
    lone_mask_log_probabilities,
    mask_log_probabilities,
    token_of_word,
)
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.analysis.rank_correlation import rank_correlation
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import TextRow
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

CHUNK = 256
"""Facts whose predictions are in memory at once."""


class Query(NamedTuple):
    """A fact that can be scored."""

    fact: Fact
    row: TextRow
    gold: int
    """Index of the object among the candidates."""


def candidate_tokens(words: Sequence[str] | None, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that compete at the mask, ascending, int64: the words that are one token; without words, all tokens.

    Args:
      words: of the common vocabulary, or None.
      tokenizer: of the model.
    """
    if words is None:
        return np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    return np.unique([token for word in words if (token := token_of_word(word, tokenizer)) is not None]).astype(
        np.int64
    )


def select(facts: Sequence[Fact], candidates: np.ndarray, model: LoadedModel) -> tuple[list[Query], dict[str, int]]:
    """The facts that can be scored, and how many were skipped by reason."""
    skipped, queries = Counter(not_one_token=0, not_in_vocabulary=0, too_long=0), []
    for fact, row in zip(facts, encode_masked([fact.text for fact in facts], model), strict=True):
        token = token_of_word(fact.object, model.tokenizer)
        index = int(np.searchsorted(candidates, token)) if token is not None else 0
        if row is None:
            skipped["too_long"] += 1
        elif token is None:
            skipped["not_one_token"] += 1
        elif fact.text.startswith(MASK) and token_of_word(fact.object, model.tokenizer, begins_text=True) != token:
            skipped["other_token_at_the_beginning"] += 1  # of a byte-level vocabulary; candidates follow a space
        elif index == len(candidates) or candidates[index] != token:
            skipped["not_in_vocabulary"] += 1
        else:
            queries.append(Query(fact, row, index))
    return queries, dict(skipped)


class Answers(NamedTuple):
    """What a model answers to prompts."""

    ranks: np.ndarray
    """float64 [n], of the object among the candidates, from 1; ties have their mean rank."""
    ties: np.ndarray
    """int64 [n], other candidates with the object's score."""
    top: np.ndarray
    """int64 [n], index of the first of the most probable candidates."""


def read_answers(scores: np.ndarray, gold: np.ndarray) -> Answers:
    """The answers in scores of candidates [n, V]; gold int64 [n]."""
    return Answers(*ranks_and_ties(scores, gold), scores.argmax(1))


def precisions(answers: Answers) -> dict[str, Any]:
    """P@1, P@10 and mean reciprocal rank with intervals, the number of facts, at least one, and of those with ties."""
    ranks = answers.ranks
    at_1, at_10 = (share_with_interval(f"precision_at_{k}", int((ranks <= k).sum()), len(ranks)) for k in (1, 10))
    reciprocal = bootstrap_mean(1 / ranks)
    return (
        at_1
        | at_10
        | {
            "mean_reciprocal_rank": float(reciprocal.value),
            "mean_reciprocal_rank_interval": [float(reciprocal.low), float(reciprocal.high)],
            "facts": len(ranks),
            "ties": int((answers.ties > 0).sum()),
        }
    )


def run(
    files: Sequence[StoredPath],
    vocabulary: StoredPath | None,
    models: Mapping[str, LoadedModel],
    per_relation: int,
    seed: int,
    progress: bool,
) -> tuple[dict[str, Any], ItemScores]:
    """Precision by relation, and what negation and mispriming change; which facts have the object as first answer.

    Args:
      files: in LAMA's form; one named relations.jsonl has templates.
      vocabulary: a file with a word per line, the candidates; None: all tokens.
      models: ``model`` and ``random_weights``, with one tokenizer.
      per_relation: facts to draw of each file; 0: all.
      seed: of the draw, and of misprimes that are not in the data.
      progress: show progress bars.

    Raises:
      UserError: a malformed file, or no fact can be scored.
    """
    model = models["model"]
    candidates = candidate_tokens(common_vocabulary(vocabulary), model.tokenizer)
    relations = read_relations(files, seed)
    by_relation, skipped, facts, ranks = {}, Counter(), [], []
    with progress_bar("facts", len(relations), "relation", shown=progress) as bar:
        for name, relation in relations.items():
            drawn = draw_facts(relation.facts, per_relation, seed)
            queries, reasons = select(drawn, candidates, model)
            skipped.update(reasons | relation.skipped | {"not_drawn": len(relation.facts) - len(drawn)})
            if queries:
                by_relation[name], of_relation = measure(queries, candidates, models)
                facts += [(query.fact.item, name) for query in queries]
                ranks.append(of_relation)
            bar.update()
    total = sum(len(relation.facts) for relation in relations.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
    require(bool(by_relation), f"lama: none of {total} facts can be scored ({reasons}): give other facts")
    items, groups = zip(*facts, strict=True)
    of_columns = {column: np.concatenate([one[column] for one in ranks]) for column in ranks[0]}
    right = {column: (values <= 1).astype(float) for column, values in of_columns.items()}
    found = {
        "facts": sum(one["model"]["facts"] for one in by_relation.values()),
        "facts_in_files": total,
        "skipped": dict(skipped),
        "candidates": len(candidates),
        "vocabulary": "all tokens" if vocabulary is None else vocabulary.name,
        "by_relation": by_relation,
        "mean_of_relations": _means(list(by_relation.values())),
    }
    for column, values in of_columns.items():
        found["mean_of_relations"][column] |= _intervals_of_means(values, groups)
    return found, ItemScores(items, groups, right, same_tokenizer=vocabulary is None)


def measure(
    queries: Sequence[Query], candidates: np.ndarray, models: Mapping[str, LoadedModel]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The results of one relation, and for each model and a lone mask the ranks of the objects.

    Args:
      queries: from `select`, at least one.
      candidates: from `candidate_tokens`.
      models: as in `run`.
    """
    gold = np.array([query.gold for query in queries])
    lone = np.tile(lone_mask_log_probabilities(models["model"])[candidates], (len(queries), 1))
    found: dict[str, list[Answers]] = {name: [] for name in models}
    variants: dict[str, list[dict[str, np.ndarray]]] = {"negated": [], "misprimed": []}
    for start in range(0, len(queries), CHUNK):
        chunk = queries[start : start + CHUNK]
        of_chunk = gold[start : start + CHUNK]
        for name, one in models.items():
            scores = mask_log_probabilities(one, [query.row for query in chunk])[:, candidates]
            found[name].append(read_answers(scores, of_chunk))
            if name == "model":
                variants["negated"].append(_negated(models[name], chunk, candidates, scores))
                variants["misprimed"].append(_misprimed(models[name], chunk, candidates, scores))
    joined = {name: Answers(*map(np.concatenate, zip(*parts, strict=True))) for name, parts in found.items()}
    joined["lone_mask"] = read_answers(lone, gold)
    answers = {name: precisions(one) for name, one in joined.items()}
    most = max(Counter(gold.tolist()).values())
    answers |= {
        "most_frequent_object": share_with_interval("precision_at_1", most, len(gold)) | {"facts": len(gold)},
        "negated": _summary(variants["negated"]),
        "misprimed": _summary(variants["misprimed"]),
    }
    return answers, {name: one.ranks for name, one in joined.items()}


def _summary(chunks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Means over the facts that have the variant, and their number; NaN in a column is left out of its mean."""
    joined = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    means = {name: mean([float(x) for x in values if np.isfinite(x)]) for name, values in joined.items()}
    return means | {"facts": len(next(iter(joined.values())))}


def _variant(
    model: LoadedModel, queries: Sequence[Query], candidates: np.ndarray, texts: Sequence[str | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the queries whose variant exists and fits, and its scores of the candidates."""
    encoded = encode_masked([text or "" for text in texts], model)
    there = [i for i, (text, row) in enumerate(zip(texts, encoded, strict=True)) if text and row is not None]
    scores = mask_log_probabilities(model, [encoded[i] for i in there])
    return np.array(there, np.int64), scores[:, candidates]


def _negated(
    model: LoadedModel, queries: Sequence[Query], candidates: np.ndarray, scores: np.ndarray
) -> dict[str, np.ndarray]:
    """For each fact with a negation: whether the answer stays, Spearman's correlation, and whether it is the object."""
    there, negated = _variant(model, queries, candidates, [query.fact.negated for query in queries])
    gold, original = np.array([query.gold for query in queries])[there], scores[there]
    return {
        "same_answer": (negated.argmax(1) == original.argmax(1)).astype(float),
        "rank_correlation": rank_correlation(original, negated),
        "precision_at_1_original": (read_answers(original, gold).ranks <= 1).astype(float),
        "precision_at_1_of_object": (read_answers(negated, gold).ranks <= 1).astype(float),
    }


def _misprimed(
    model: LoadedModel, queries: Sequence[Query], candidates: np.ndarray, scores: np.ndarray
) -> dict[str, np.ndarray]:
    """For each fact with a misprime: precision without and with it, and whether the model answers the misprime."""
    there, primed = _variant(model, queries, candidates, [query.fact.misprimed for query in queries])
    gold, original = np.array([query.gold for query in queries])[there], scores[there]
    primes = [_prime_token(queries[i].fact.misprimed, model.tokenizer) for i in there]
    answered = candidates[primed.argmax(1)] if len(there) else np.zeros(0, np.int64)
    return {
        "precision_at_1_original": (read_answers(original, gold).ranks <= 1).astype(float),
        "precision_at_1": (read_answers(primed, gold).ranks <= 1).astype(float),
        "answers_the_misprime": np.array([a in p for a, p in zip(answered, primes, strict=True)], float),
    }


def _prime_token(text: str, tokenizer: Tokenizer) -> set[int]:
    """Tokens of the word before the first question mark, as written and with a small first letter."""
    word = text.partition("?")[0].strip()
    forms = {word, word[:1].lower() + word[1:]}
    return {token for form in forms if form and (token := token_of_word(form, tokenizer)) is not None}


def _intervals_of_means(ranks: np.ndarray, relations: Sequence[str]) -> dict[str, list[float]]:
    """Intervals of the means over relations of P@1, P@10 and reciprocal ranks, over facts within relations."""
    means = bootstrap_mean(np.stack([ranks <= 1, ranks <= 10, 1 / ranks]).astype(float), relations)
    names = ("precision_at_1", "precision_at_10", "mean_reciprocal_rank")
    ends = np.stack([means.low, means.high], axis=1).tolist()
    return {f"{name}_interval": of for name, of in zip(names, ends, strict=True)}


def _means(relations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over relations, as in the paper, of all shares, correlations and ranks."""
    counts = ("facts", "ties")
    return {
        part: {
            key: mean([one[part][key] for one in relations])
            for key in relations[0][part]
            if key not in counts and not key.endswith("_interval")
        }
        | {"relations": len(relations)}
        for part in relations[0]
    }
