"""Checks of token ids, tokenizer and positions against the model and an existing run. Needs no jax."""

from collections.abc import Iterator

from bert_jax.config import ModelConfig
from bert_jax.data.corpus import SPLITS, Corpus
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.finding import Finding
from bert_jax.storage import check_reachable
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.run_directory.workdir import TOKENIZER

SAMPLED_RECORDS = 64
"""Evenly spaced records of each split: at most about 500,000 tokens."""


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
        return Finding("error", "ids", f"{text}: {remedy}", values)
    text = f"{where}: ids in {sampled} of {count:,} records go up to {top}; {bound} at {limit - 1}"
    return Finding("ok", "ids", text, values)


def tokenizer(context: CheckContext) -> Iterator[Finding]:
    """Tokenizer of the corpora against that of the run in the work directory; `vocabulary` compares the corpora."""
    fingerprint = context.corpora[0].tokenizer_fingerprint
    values = {"corpora": fingerprint, "run": None}
    if context.workdir is not None:
        check_reachable(context.workdir)
    if context.workdir is None or not (context.workdir / TOKENIZER).exists():
        reason = "no --workdir is given" if context.workdir is None else f"{context.workdir} holds no run yet"
        yield Finding("ok", "tokenizer", f"the corpora's is {fingerprint[:12]}; not compared: {reason}", values)
        return
    file = context.workdir / TOKENIZER
    run_fingerprint = Tokenizer.load(file).fingerprint
    values |= {"run": run_fingerprint}
    if run_fingerprint != fingerprint:
        text = f"the run's ({file}) is {run_fingerprint[:12]}, the corpora's {fingerprint[:12]}: token ids differ"
        remedy = f"choose another --workdir, or build the corpora with --tokenizer {file}"
        yield Finding("error", "tokenizer", f"{text}: {remedy}", values)
        return
    yield Finding("ok", "tokenizer", f"{fingerprint[:12]}, the same as in the run in {context.workdir}", values)


def positions(context: CheckContext) -> Iterator[Finding]:
    """Longest rows against the position table; validation of the config refuses longer rows."""
    model, longest = context.config.model, max(phase.seq_len for phase in context.config.phases)
    values = {"longest": longest, "max_positions": model.max_positions, "kind": model.positions}
    text = f"rows of up to {longest} tokens, {model.positions} positions 0 to {model.max_positions - 1} (no offset)"
    if model.positions == "learned" and longest < model.max_positions:
        unused = f"positions from {longest} on are never trained"
        remedy = f"set --model.max-positions {longest}, or add a phase with longer rows"
        yield Finding("warning", "positions", f"{text}; {unused}: {remedy}", values)
        return
    yield Finding("ok", "positions", text, values)


CHECKS = {"ids": ids, "tokenizer": tokenizer, "positions": positions}
"""Checks by the name of the finding that reports their error."""
