"""Checks of a config with its corpora: files, vocabulary, rows, coverage, packing, pairs, epochs. Needs no jax."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import DataConfig
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import HeldOutRows
from bert_jax.data.corpus import Corpus
from bert_jax.data.epoch_counts import LOW_COVERAGE, EpochStatistics
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.mixture import CYCLE_ROWS, common_tokenizer
from bert_jax.data.sampling import check_weights, group_shares
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.doctor.epochs import PhaseEpochs, estimate_epochs

MANY_EPOCHS = 40
"""Devlin et al. 2019, appendix A.2: 1,000,000 steps are about 40 epochs of their 3.3 billion words."""
MOSTLY_NEGATIVE = 0.6
LOW_FILL = 0.9
_LISTED_LANGUAGES = 8


def mixture(context: CheckContext) -> Iterator[Finding]:
    """Sizes of the corpora, their shares of the rows, and the languages of an epoch of each that has weights."""
    shares = {one.name: context.shares[one.identity] for one in context.corpora}
    sizes = [f"{one.name} ({one.num_tokens:,} tokens) {shares[one.name]:.1%} of the rows" for one in context.corpora]
    tokens = {one.name: one.num_tokens for one in context.corpora}
    values: dict[str, Any] = {"shares": shares, "tokens": tokens}
    for i, (phase, order) in enumerate(zip(context.config.phases, context.orders, strict=True)):
        if phase.corpus_weights:
            values[f"phases.{i}"] = in_phase = dict(zip(shares, (order.counts / CYCLE_ROWS).tolist(), strict=True))
            sizes.append(f"in phase {i} " + ", ".join(f"{name} {share:.1%}" for name, share in in_phase.items()))
    if context.config.data.samples_documents:
        check_weights(context.corpora, context.config.data)
        for one in context.corpora:
            languages = _tokens_by_language(one, context.config.data)
            values[f"epoch_tokens/{one.name}"] = languages
            total = sum(languages.values())
            most = sorted(languages.items(), key=lambda item: -item[1])[:_LISTED_LANGUAGES]
            shares = ", ".join(f"{language} {tokens / total:.1%}" for language, tokens in most)
            sizes.append(f"an epoch of {one.name} has {total:,.0f} tokens by its weights ({shares})")
    yield finding("mixture", "; ".join(sizes), values)


def _tokens_by_language(corpus: Corpus, data: DataConfig) -> dict[str, float]:
    """Tokens of an epoch, on average."""
    tokens: dict[str, float] = {}
    for group, share in zip(corpus.groups, group_shares(corpus.groups, data, str(corpus.directory)), strict=True):
        tokens[group["language"]] = tokens.get(group["language"], 0.0) + float(share) * group["tokens"]
    return tokens


def files(context: CheckContext) -> Iterator[Finding]:
    """Presence, size and records of every file; `pretrain` and `bert-data verify` compare checksums."""
    check_corpus_files(context.corpora, "counts")
    text = "all files have the sizes and records of corpus.json; `bert-data verify` checks their contents"
    yield finding("files", text, {"checked": "counts"})


def vocabulary(context: CheckContext) -> Iterator[Finding]:
    """All corpora have the same tokenizer, and the model has an embedding for each of its ids."""
    tokenizer = common_tokenizer(context.corpora, context.config.model.vocab_size)
    size, rows = tokenizer.vocab_size, context.config.model.vocab_size
    text = f"{size:,} token ids; the model has {rows:,} embeddings"
    yield finding("vocabulary", text, {"tokenizer": size, "model": rows})


def streams(context: CheckContext) -> Iterator[Finding]:
    """Epochs of every corpus in every phase."""
    config, orders = context.config, context.orders
    found = estimate_epochs(config, context.corpora, orders, context.planned_tokens)
    for i, corpus in enumerate(context.corpora):
        so_far = 0.0
        for number, (phase, epochs) in enumerate(zip(config.phases, found[corpus.name], strict=True)):
            counts, share = epochs.statistics, orders[number].counts[i] / CYCLE_ROWS
            if share == 0:
                continue
            where = f"{corpus.name}, phase {number}"
            if counts.windows < counts.all_windows:
                where += f", from {counts.windows} of {counts.all_windows} windows"
            common = {"corpus": corpus.name, "phase": number, "seq_len": phase.seq_len}
            findings = [
                _rows(counts, phase.seq_len, share * phase.batch_size),
                _coverage(counts, number),
                _packing(counts, phase.seq_len, config.data),
                _pairs(counts),
                _epochs(epochs, so_far, number, phase.steps),
            ]
            for one in findings:
                yield one._replace(text=f"{where}: {one.text}", values=common | one.values)
            so_far += epochs.epochs


def _rows(counts: EpochStatistics, seq_len: int, batch_share: float) -> Finding:
    rows, examples = (round(count * counts.scale_factor) for count in (counts.rows, counts.examples))
    steps = rows / batch_share
    text = f"the first epoch has {rows:,} rows of {seq_len} tokens with {examples:,} examples, {steps:,.1f} steps"
    values = {"windows": counts.windows, "all_windows": counts.all_windows}
    values |= {"rows_per_epoch": rows, "examples_per_epoch": examples, "steps_per_epoch": steps}
    if steps >= 1:
        return finding("rows", text, values)
    remedy = "every step reads rows twice; use more text, a smaller batch or a larger weight"
    return finding("rows", f"{text}, less than one", values, remedy)


def _coverage(counts: EpochStatistics, number: int) -> Finding:
    covered, truncated = counts.covered / counts.tokens, counts.truncated / counts.tokens
    text = f"an epoch covers {covered:.2%} of its tokens and truncates {truncated:.2%}"
    values = {"covered": covered, "truncated": truncated}
    remedy = (
        f"many sentences fill more than half of a row: set --phases.{number}.seq-len to longer rows, or --data.format"
        " full_sentences --objective.pair none, which truncates nothing"
    )
    return finding("coverage", text, values, remedy if covered < LOW_COVERAGE else "")


def _packing(counts: EpochStatistics, seq_len: int, data: DataConfig) -> Finding:
    packed, single = (counts.filled / (count * seq_len) for count in (counts.rows, counts.examples))
    values, most = {"packing_efficiency": packed, "unpacked_efficiency": single}, data.max_examples_per_row(seq_len)
    if most == 1:
        return finding("packing", f"rows are {packed:.1%} full; packing is off", values)
    text = f"rows are {packed:.1%} full, {single:.1%} without packing"
    remedy = f"examples are short: allow more of them per row (data.examples_per_row is {most})"
    if not data.paired and data.example_end == "sentence":
        remedy = "whole sentences leave gaps; --data.example-end row splits the last one between two examples"
    return finding("packing", text, values, remedy if packed < LOW_FILL else "")


def _pairs(counts: EpochStatistics) -> Finding:
    unlabelled = 1 - counts.labelled / counts.examples
    if not counts.labelled:
        return finding("pairs", "no example has a pair label", {"unlabelled": unlabelled})
    negatives, single = counts.negatives / counts.labelled, counts.singles / counts.labelled
    expected = 0.5 + 0.5 * single
    text = (
        f"{negatives:.2%} of the pairs have label 1 (random or swapped); 0.5 + 0.5 x {single:.2%} chunks of one "
        f"sentence = {expected:.2%} expected; {unlabelled:.2%} of the examples have no label"
    )
    values = {"negatives": negatives, "expected_negatives": expected, "single_chunks": single, "unlabelled": unlabelled}
    remedy = "longer rows or documents give more positive pairs" if expected > MOSTLY_NEGATIVE else ""
    return finding("pairs", text, values, remedy)


def _epochs(epochs: PhaseEpochs, before: float, number: int, steps: int) -> Finding:
    total = before + epochs.epochs
    text = f"its {steps:,} steps make about {epochs.epochs:,.2f} epochs"
    if number:
        text += f", {total:,.2f} with earlier phases; it starts with about epoch {epochs.first}, counted from 0"
    values = {"epochs": epochs.epochs, "epochs_so_far": total, "first_epoch": epochs.first}
    remedy = f"more than the {MANY_EPOCHS} of the original BERT; use more text, fewer steps or a lower weight"
    return finding("epochs", text, values, remedy if total > MANY_EPOCHS else "")


def held_out(context: CheckContext) -> Iterator[Finding]:
    """Rows of the validation splits that evaluation scores."""
    config = context.config
    splits = [Corpus.open(corpus.directory, "validation", corpus.cache) for corpus in context.corpora]
    validation = HeldOutRows(splits, config.data, SpecialIds(0, 0, 0))  # rows are only counted: ids do not matter
    for rows in validation.corpora:
        count = validation.count(rows, config.phases[-1].seq_len, config.evaluation.rows)
        name = rows.corpus.name
        text = f"{name}: {count:,} of the {config.evaluation.rows:,} rows of evaluation.rows are scored"
        values = {"corpus": name, "rows": count, "hosts": context.machine.hosts}
        remedy = ""
        if count < context.machine.hosts:
            text += f", fewer than the {context.machine.hosts} hosts, so some hosts score nothing"
            remedy = "build the corpus with a larger --validation-fraction, or raise --evaluation.rows"
        yield finding("held-out", text, values, remedy)


CHECKS = {"mixture": mixture, "files": files, "vocabulary": vocabulary, "stream": streams, "held-out": held_out}
"""Checks by the name of the finding that reports their error."""
