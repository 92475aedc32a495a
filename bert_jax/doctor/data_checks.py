"""What a config makes of corpora: rows, coverage, fill, labels, epochs. Needs no jax."""

from collections.abc import Iterator

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus, read_manifest, token_dtype
from bert_jax.data.epoch_plan import CHUNK_TOKENS, WINDOW_CHUNKS, EpochPlan
from bert_jax.data.held_out import HeldOutRows
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.mixture import CYCLE_ROWS
from bert_jax.data.mixture_spec import common_tokenizer
from bert_jax.data.row_reader import SpecialIds
from bert_jax.doctor.check_context import Asked
from bert_jax.doctor.epochs import PLANNED_TOKENS, PLANNED_WINDOWS, Epoch, Stay, measure, rows_by_phase, stay
from bert_jax.doctor.finding import Line

MANY_EPOCHS = 40
"""Devlin et al. 2019, appendix A.2: 1,000,000 updates are about 40 epochs of their 3.3 billion words."""
MUCH_TRUNCATED = 0.25
"""BERT's own recipe cuts about a sixth of the tokens of English books in rows of 128: a random cut of full chunks."""
MOSTLY_NEGATIVE = 0.6
LOW_FILL = 0.9
TOKENS = CHUNK_TOKENS * WINDOW_CHUNKS
"""Of a window."""


def mixture(asked: Asked) -> Iterator[Line]:
    """Sizes and shares, as the stream uses them."""
    shares = {
        one.name: count / CYCLE_ROWS for one, count in zip(asked.corpora, asked.turns.counts.tolist(), strict=True)
    }
    sizes = [f"{one.name} ({one.num_tokens:,} tokens) {shares[one.name]:.1%} of the rows" for one in asked.corpora]
    tokens = {one.name: one.num_tokens for one in asked.corpora}
    yield Line("ok", "mixture", "; ".join(sizes), {"shares": shares, "tokens": tokens})


def files(asked: Asked) -> Iterator[Line]:
    """Every file there, of its size, with its records; no checksums, which `pretrain` and `bert-data verify` do."""
    check_corpus_files(asked.corpora, "counts")
    text = "all files have the sizes and records of corpus.json; contents are for `bert-data verify`"
    yield Line("ok", "files", text, {"checked": "counts"})


def vocabulary(asked: Asked) -> Iterator[Line]:
    """One tokenizer for all, and an embedding for each of its ids."""
    tokenizer = common_tokenizer(asked.corpora, asked.config.model.vocab_size)
    size, rows = tokenizer.vocab_size, asked.config.model.vocab_size
    text = f"{size:,} token ids; the model has {rows:,} embeddings"
    yield Line("ok", "vocabulary", text, {"tokenizer": size, "model": rows})


def recipe(asked: Asked) -> Iterator[Line]:
    """The format, in words."""
    data, pair = asked.config.data, asked.config.objective.pair
    slots = [data.slots(phase.seq_len) for phase in asked.config.phases]
    packing = f"up to {' and '.join(map(str, slots))} examples in a row" if max(slots) > 1 else "no packing"

    def made(copies: int | None) -> str:
        return "new every epoch" if copies is None else f"the same every {copies} epochs"

    text = (
        f"{data.format}, pair objective {pair}; {packing}; examples {made(data.example_copies)}, "
        f"masks {made(data.mask_copies)}"
    )
    names = ("format", "examples_per_row", "example_copies", "mask_copies")
    yield Line("ok", "format", text, {name: getattr(data, name) for name in names} | {"pair": pair})


def streams(asked: Asked) -> Iterator[Line]:
    """An epoch of every corpus in every phase."""
    rows = rows_by_phase(asked.config, asked.turns)
    for i, corpus in enumerate(asked.corpora):
        share, first, before, sure = asked.turns.counts[i] / CYCLE_ROWS, 0, 0.0, True
        for number, phase in enumerate(asked.config.phases):
            plan = EpochPlan(corpus, asked.config.data, phase.seq_len, asked.config.seed)
            measured = measure(plan, budget=PLANNED_TOKENS if asked.windows is None else TOKENS * asked.windows)
            most = PLANNED_WINDOWS if asked.windows is None else asked.windows
            stays = stay(plan, measured, first, int(rows[number, i]), most)
            where = f"{corpus.name}, phase {number}"
            if measured.windows < measured.all_windows:
                where += f", from {measured.windows} of {measured.all_windows} windows"
            about = {"corpus": corpus.name, "phase": number, "seq_len": phase.seq_len}
            found = [
                _rows(measured, phase.seq_len, share * phase.batch_size),
                _coverage(measured),
                _fill(measured, phase.seq_len, asked.config.data),
                _pairs(measured),
                _epochs(stays, before, sure, number, phase.steps),
            ]
            for line in found:
                yield line._replace(text=f"{where}: {line.text}", values=about | line.values)
            first, before, sure = stays.following, before + stays.epochs, sure and stays.exact


def _rows(measured: Epoch, seq_len: int, batch_share: float) -> Line:
    rows, examples = (round(count * measured.scale) for count in (measured.rows, measured.examples))
    updates = rows / batch_share
    text = f"the first epoch is {rows:,} rows of {seq_len} tokens with {examples:,} examples, {updates:,.1f} updates"
    values = {"windows": measured.windows, "all_windows": measured.all_windows}
    values |= {"rows_per_epoch": rows, "examples_per_epoch": examples, "updates_per_epoch": updates}
    if updates < 1:
        remedy = "every update sees rows twice; take more text, a smaller batch or more weight"
        return Line("warning", "rows", f"{text}, less than one: {remedy}", values)
    return Line("ok", "rows", text, values)


def _coverage(measured: Epoch) -> Line:
    covered, truncated = measured.shown / measured.tokens, measured.truncated / measured.tokens
    text = f"an epoch covers {covered:.2%} of the corpus's tokens and truncates {truncated:.2%}"
    values = {"covered": covered, "truncated": truncated}
    if measured.shown + measured.truncated != measured.tokens:
        missing = measured.tokens - measured.shown - measured.truncated
        return Line("error", "coverage", f"{text}, so {missing} tokens are not accounted for: a bug, report it", values)
    if truncated > MUCH_TRUNCATED:
        return Line("warning", "coverage", f"{text}: sentences are long for these rows; longer ones lose less", values)
    return Line("ok", "coverage", text, values)


def _fill(measured: Epoch, seq_len: int, data: DataConfig) -> Line:
    packed, single = (measured.filled / (count * seq_len) for count in (measured.rows, measured.examples))
    values = {"fill": packed, "fill_unpacked": single}
    if data.slots(seq_len) == 1:
        return Line("ok", "fill", f"rows are {packed:.1%} full; packing is off", values)
    text = f"rows are {packed:.1%} full, {single:.1%} without packing"
    if packed < LOW_FILL:
        advice = f"examples are short, so let more share a row (data.examples_per_row is {data.slots(seq_len)})"
        if not data.paired and data.example_end == "sentence":
            advice = (
                "whole sentences leave gaps; --data.example-end row cuts the last one and goes on in the next example"
            )
        return Line("warning", "fill", f"{text}: {advice}", values)
    return Line("ok", "fill", text, values)


def _pairs(measured: Epoch) -> Line:
    bare = 1 - measured.labelled / measured.examples
    if not measured.labelled:
        return Line("ok", "pairs", "no example has a pair label", {"unlabelled": bare})
    negatives, single = measured.negatives / measured.labelled, measured.singles / measured.labelled
    expected = 0.5 + 0.5 * single
    text = (
        f"{negatives:.2%} of the pairs have label 1 (random or swapped); 0.5 + 0.5 x {single:.2%} chunks of one "
        f"sentence = {expected:.2%} expected; {bare:.2%} of the examples have no label"
    )
    values = {"negatives": negatives, "expected_negatives": expected, "single_chunks": single, "unlabelled": bare}
    if expected > MOSTLY_NEGATIVE:
        return Line("warning", "pairs", f"{text}: longer rows or documents make more true pairs", values)
    return Line("ok", "pairs", text, values)


def _epochs(stays: Stay, before: float, sure: bool, number: int, steps: int) -> Line:
    total, roughly = before + stays.epochs, "" if stays.exact else "about "
    text = f"its {steps:,} updates make {roughly}{stays.epochs:,.2f} epochs"
    if number:
        opened = f"it opens {'' if sure else 'about '}epoch {stays.first}, counted from 0"
        text += f", {total:,.2f} with earlier phases; {opened}"
    values = {"epochs": stays.epochs, "epochs_so_far": total, "first_epoch": stays.first}
    values |= {"epochs_exact": stays.exact, "first_epoch_exact": sure}
    if total > MANY_EPOCHS:
        more = f"{text}: more than the {MANY_EPOCHS} of BERT's own run; take more text, fewer updates or a lower weight"
        return Line("warning", "epochs", more, values)
    return Line("ok", "epochs", text, values)


def held_out(asked: Asked) -> Iterator[Line]:
    """Validation splits that can be scored."""
    config = asked.config
    splits = [Corpus.open(corpus.directory, "validation") for corpus in asked.corpora]
    found = HeldOutRows(splits, config.data, SpecialIds(0, 0, 0))  # only counted, so no id matters
    for rows in found.corpora:
        count = found.count(rows, config.phases[-1].seq_len, config.evaluation.rows)
        name = rows.corpus.name
        text = f"{name}: {count:,} rows are scored, of {config.evaluation.rows:,} asked for"
        values = {"corpus": name, "rows": count, "hosts": asked.machine.hosts}
        if count < asked.machine.hosts:
            remedy = "build the corpus with a larger --validation-fraction, or raise --evaluation.rows"
            idle = f"fewer than the {asked.machine.hosts} hosts, of which some would score nothing"
            yield Line("warning", "held-out", f"{text}, {idle}: {remedy}", values)
            continue
        yield Line("ok", "held-out", text, values)


def hosts(asked: Asked) -> Iterator[Line]:
    """Files and documents for every host."""
    needed = asked.machine.hosts
    for corpus in asked.corpora:
        shards = len(read_manifest(corpus.directory)["splits"][corpus.split]["shards"])
        values = {"corpus": corpus.name, "shards": shards, "documents": corpus.num_documents, "hosts": needed}
        text = f"{corpus.name}: {shards:,} shard(s) with {corpus.num_documents:,} documents for {needed} host(s)"
        if shards < needed:
            size = corpus.num_tokens * token_dtype(corpus.vocab_size).itemsize / needed
            smaller = f"build it with --max-shard-mb {max(1, int(size) >> 20)}"
            remedy = f"hosts share a file that one would read and verify alone; {smaller}, or accept it"
            yield Line("warning", "hosts", f"{text}: {remedy}", values)
        elif corpus.num_documents < needed:
            yield Line("warning", "hosts", f"{text}: their rows repeat the same text; take more text", values)
        else:
            yield Line("ok", "hosts", text, values)


CHECKS = {
    "mixture": mixture,
    "files": files,
    "vocabulary": vocabulary,
    "format": recipe,
    "stream": streams,
    "held-out": held_out,
    "hosts": hosts,
}
"""By the name that an error of theirs gets."""
