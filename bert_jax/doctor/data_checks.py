"""Checks of a config with its corpora: files, token ids, rows, coverage, packing, pair labels, epochs. Needs no jax."""

from collections.abc import Iterator

from bert_jax.config import DataConfig, ModelConfig
from bert_jax.data.batch import SpecialIds
from bert_jax.data.batches import HeldOutRows
from bert_jax.data.corpus import SPLITS, Corpus, read_manifest, token_dtype
from bert_jax.data.epoch_plan import CHUNK_TOKENS, WINDOW_CHUNKS, EpochPlan
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.mixture import CYCLE_ROWS, common_tokenizer
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.doctor.epochs import (
    MAX_COUNTED_TOKENS,
    MAX_EXACT_WINDOWS,
    EpochStatistics,
    PhaseEpochs,
    count_phase_epochs,
    measure_epoch,
    rows_by_phase,
)
from bert_jax.storage import check_reachable
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.run_directory.workdir import TOKENIZER

MANY_EPOCHS = 40
"""Devlin et al. 2019, appendix A.2: 1,000,000 steps are about 40 epochs of their 3.3 billion words."""
MUCH_TRUNCATED = 0.25
"""Original BERT truncates about a sixth of the tokens of English books in rows of 128 (random cut of full chunks)."""
MOSTLY_NEGATIVE = 0.6
LOW_FILL = 0.9
SAMPLED_RECORDS = 64
"""Evenly spaced records of each split: at most about 500,000 tokens."""
WINDOW_TOKENS = CHUNK_TOKENS * WINDOW_CHUNKS
"""Tokens of a window."""


def mixture(context: CheckContext) -> Iterator[Finding]:
    """Sizes of the corpora and their shares of the rows."""
    counts = context.mixture_order.counts.tolist()
    shares = {one.name: count / CYCLE_ROWS for one, count in zip(context.corpora, counts, strict=True)}
    sizes = [f"{one.name} ({one.num_tokens:,} tokens) {shares[one.name]:.1%} of the rows" for one in context.corpora]
    tokens = {one.name: one.num_tokens for one in context.corpora}
    yield finding("mixture", "; ".join(sizes), {"shares": shares, "tokens": tokens})


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


def recipe(context: CheckContext) -> Iterator[Finding]:
    """Describes the data format."""
    data, pair = context.config.data, context.config.objective.pair
    slots = [data.max_examples_per_row(phase.seq_len) for phase in context.config.phases]
    packing = f"up to {' and '.join(map(str, slots))} examples in a row" if max(slots) > 1 else "no packing"

    def period(copies: int | None) -> str:
        return "new in every epoch" if copies is None else f"repeated every {copies} epochs"

    text = (
        f"{data.format}, pair objective {pair}; {packing}; examples {period(data.example_copies)}, "
        f"masks {period(data.mask_copies)}"
    )
    names = ("format", "examples_per_row", "example_copies", "mask_copies")
    yield finding("format", text, {name: getattr(data, name) for name in names} | {"pair": pair})


def streams(context: CheckContext) -> Iterator[Finding]:
    """Epochs of every corpus in every phase."""
    rows = rows_by_phase(context.config, context.mixture_order)
    for i, corpus in enumerate(context.corpora):
        share, first, before, start_exact = context.mixture_order.counts[i] / CYCLE_ROWS, 0, 0.0, True
        for number, phase in enumerate(context.config.phases):
            plan = EpochPlan(corpus, context.config.data, phase.seq_len, context.config.seed)
            budget = MAX_COUNTED_TOKENS if context.windows is None else WINDOW_TOKENS * context.windows
            counts = measure_epoch(plan, budget=budget)
            max_windows = MAX_EXACT_WINDOWS if context.windows is None else context.windows
            phase_epochs = count_phase_epochs(plan, counts, first, int(rows[number, i]), max_windows)
            where = f"{corpus.name}, phase {number}"
            if counts.windows < counts.all_windows:
                where += f", from {counts.windows} of {counts.all_windows} windows"
            common = {"corpus": corpus.name, "phase": number, "seq_len": phase.seq_len}
            findings = [
                _rows(counts, phase.seq_len, share * phase.batch_size),
                _coverage(counts),
                _packing(counts, phase.seq_len, context.config.data),
                _pairs(counts),
                _epochs(phase_epochs, before, start_exact, number, phase.steps),
            ]
            for one in findings:
                yield one._replace(text=f"{where}: {one.text}", values=common | one.values)
            first, before = phase_epochs.following, before + phase_epochs.epochs
            start_exact = start_exact and phase_epochs.exact


def _rows(counts: EpochStatistics, seq_len: int, batch_share: float) -> Finding:
    rows, examples = (round(count * counts.scale) for count in (counts.rows, counts.examples))
    steps = rows / batch_share
    text = f"the first epoch has {rows:,} rows of {seq_len} tokens with {examples:,} examples, {steps:,.1f} steps"
    values = {"windows": counts.windows, "all_windows": counts.all_windows}
    values |= {"rows_per_epoch": rows, "examples_per_epoch": examples, "steps_per_epoch": steps}
    if steps >= 1:
        return finding("rows", text, values)
    remedy = "every step reads rows twice; use more text, a smaller batch or a larger weight"
    return finding("rows", f"{text}, less than one", values, remedy)


def _coverage(counts: EpochStatistics) -> Finding:
    covered, truncated = counts.covered / counts.tokens, counts.truncated / counts.tokens
    text = f"an epoch covers {covered:.2%} of the corpus's tokens and truncates {truncated:.2%}"
    values = {"covered": covered, "truncated": truncated}
    if counts.covered + counts.truncated != counts.tokens:
        missing = counts.tokens - counts.covered - counts.truncated
        text += f", so {missing} tokens are not accounted for"
        return finding("coverage", text, values, "this is a bug, please report it", "error")
    remedy = "sentences are long for these rows; longer rows truncate less"
    return finding("coverage", text, values, remedy if truncated > MUCH_TRUNCATED else "")


def _packing(counts: EpochStatistics, seq_len: int, data: DataConfig) -> Finding:
    packed, single = (counts.filled / (count * seq_len) for count in (counts.rows, counts.examples))
    values = {"packing_efficiency": packed, "unpacked_efficiency": single}
    if data.max_examples_per_row(seq_len) == 1:
        return finding("packing", f"rows are {packed:.1%} full; packing is off", values)
    text = f"rows are {packed:.1%} full, {single:.1%} without packing"
    most = data.max_examples_per_row(seq_len)
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


def _epochs(phase_epochs: PhaseEpochs, before: float, start_exact: bool, number: int, steps: int) -> Finding:
    total, roughly = before + phase_epochs.epochs, "" if phase_epochs.exact else "about "
    text = f"its {steps:,} steps make {roughly}{phase_epochs.epochs:,.2f} epochs"
    if number:
        start = f"it starts with {'' if start_exact else 'about '}epoch {phase_epochs.first}, counted from 0"
        text += f", {total:,.2f} with earlier phases; {start}"
    values = {"epochs": phase_epochs.epochs, "epochs_so_far": total, "first_epoch": phase_epochs.first}
    values |= {"epochs_exact": phase_epochs.exact, "first_epoch_exact": start_exact}
    remedy = f"more than the {MANY_EPOCHS} of the original BERT; use more text, fewer steps or a lower weight"
    return finding("epochs", text, values, remedy if total > MANY_EPOCHS else "")


def held_out(context: CheckContext) -> Iterator[Finding]:
    """Rows of the validation splits that evaluation scores."""
    config = context.config
    splits = [Corpus.open(corpus.directory, "validation") for corpus in context.corpora]
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


def hosts(context: CheckContext) -> Iterator[Finding]:
    """Shards and documents per host."""
    needed = context.machine.hosts
    for corpus in context.corpora:
        shards = len(read_manifest(corpus.directory)["splits"][corpus.split]["shards"])
        values = {"corpus": corpus.name, "shards": shards, "documents": corpus.num_documents, "hosts": needed}
        text = f"{corpus.name}: {shards:,} shard(s) with {corpus.num_documents:,} documents for {needed} host(s)"
        remedy = ""
        if shards < needed:
            size = corpus.num_tokens * token_dtype(corpus.vocab_size).itemsize / needed
            smaller = f"build the corpus with --max-shard-mb {max(1, int(size) >> 20)}"
            remedy = f"several hosts read and verify the same shard; {smaller}, or accept it"
        elif corpus.num_documents < needed:
            remedy = "hosts repeat the same text; use more text"
        yield finding("hosts", text, values, remedy)


def ids(context: CheckContext) -> Iterator[Finding]:
    """Token ids of records against the vocabularies of tokenizer and model."""
    for corpus in context.corpora:
        for split in SPLITS:
            yield _ids(corpus if split == corpus.split else Corpus.open(corpus.directory, split), context.config.model)


def _ids(corpus: Corpus, model: ModelConfig) -> Finding:
    count = len(corpus.record_offsets) - 1
    sampled = min(count, SAMPLED_RECORDS)
    chosen = [count * (2 * i + 1) // (2 * sampled) for i in range(sampled)]
    highest = [int(record.tokens.max(initial=0)) for record in corpus.records(chosen)]
    top, limit = max(highest, default=0), min(model.vocab_size, corpus.vocab_size)
    where, bound = f"{corpus.name}, split {corpus.split}", "the corpus's tokenizer ends"
    if model.vocab_size < corpus.vocab_size:
        bound = "the model's embeddings end"
    values = {"corpus": corpus.name, "split": corpus.split, "records": sampled, "highest": top, "limit": limit}
    if top >= limit:
        remedy = f"set --model.vocab-size {top + 1}" if top < corpus.vocab_size else "rebuild the corpus"
        text = f"{where}: record {chosen[highest.index(top)]} has token id {top}, and {bound} at {limit - 1}"
        return finding("ids", text, values, remedy, "error")
    text = f"{where}: ids in {sampled} of {count:,} records go up to {top}; {bound} at {limit - 1}"
    return finding("ids", text, values)


def tokenizer(context: CheckContext) -> Iterator[Finding]:
    """Tokenizer of the corpora against that of the run in the work directory; `vocabulary` compares the corpora."""
    fingerprint = context.corpora[0].tokenizer_fingerprint
    values = {"corpora": fingerprint, "run": None}
    if context.workdir is not None:
        check_reachable(context.workdir)
    if context.workdir is None or not (context.workdir / TOKENIZER).exists():
        reason = "no --workdir is given" if context.workdir is None else f"{context.workdir} holds no run yet"
        yield finding("tokenizer", f"the corpora's is {fingerprint[:12]}; not compared: {reason}", values)
        return
    file = context.workdir / TOKENIZER
    run_fingerprint = Tokenizer.load(file).fingerprint
    values |= {"run": run_fingerprint}
    text, remedy = f"{fingerprint[:12]}, the same as in the run in {context.workdir}", ""
    if run_fingerprint != fingerprint:
        text = f"the run's ({file}) is {run_fingerprint[:12]}, the corpora's {fingerprint[:12]}: token ids differ"
        remedy = f"choose another --workdir, or build the corpora with --tokenizer {file}"
    yield finding("tokenizer", text, values, remedy, "error")


def positions(context: CheckContext) -> Iterator[Finding]:
    """Longest rows against the position table; validation of the config refuses longer rows."""
    model, longest = context.config.model, max(phase.seq_len for phase in context.config.phases)
    values = {"longest": longest, "max_positions": model.max_positions, "kind": model.positions}
    text = f"rows of up to {longest} tokens, {model.positions} positions 0 to {model.max_positions - 1} (no offset)"
    remedy = ""
    if model.positions == "learned" and longest < model.max_positions:
        text += f"; positions from {longest} on are never trained"
        remedy = f"set --model.max-positions {longest}, or add a phase with longer rows"
    yield finding("positions", text, values, remedy)


CHECKS = {
    "mixture": mixture,
    "files": files,
    "vocabulary": vocabulary,
    "format": recipe,
    "stream": streams,
    "held-out": held_out,
    "hosts": hosts,
    "ids": ids,
    "tokenizer": tokenizer,
    "positions": positions,
}
"""Checks by the name of the finding that reports their error."""
