"""Whether tokens, tokenizer and positions go with the model and with the run that is there already. Needs no jax."""

from collections.abc import Iterator

from bert_jax.config import ModelConfig
from bert_jax.data.corpus import SPLITS, Corpus
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.finding import Finding
from bert_jax.storage import reach
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.run_directory.workdir import TOKENIZER

SAMPLED_RECORDS = 64
"""Of each split, evenly spaced: some 500,000 tokens at most."""


def ids(context: CheckContext) -> Iterator[Finding]:
    """Ids as they stand in records, not as the tokenizer promises them."""
    for corpus in context.corpora:
        for split in SPLITS:
            yield _ids(corpus if split == corpus.split else Corpus.open(corpus.directory, split), context.config.model)


def _ids(corpus: Corpus, model: ModelConfig) -> Finding:
    count = len(corpus.record_offsets) - 1
    wanted = min(count, SAMPLED_RECORDS)
    chosen = [count * (2 * i + 1) // (2 * wanted) for i in range(wanted)]
    highest = [int(record.tokens.max(initial=0)) for record in corpus.records(chosen)]
    top, limit = max(highest, default=0), min(model.vocab_size, corpus.vocab_size)
    where, bound = f"{corpus.name}, split {corpus.split}", "the corpus's tokenizer ends"
    if model.vocab_size < corpus.vocab_size:
        bound = "the model's embeddings end"
    values = {"corpus": corpus.name, "split": corpus.split, "records": wanted, "highest": top, "limit": limit}
    if top >= limit:
        remedy = f"set --model.vocab-size {top + 1}" if top < corpus.vocab_size else "rebuild the corpus"
        text = f"{where}: record {chosen[highest.index(top)]} has token id {top}, and {bound} at {limit - 1}"
        return Finding("error", "ids", f"{text}: {remedy}", values)
    text = f"{where}: ids in {wanted} of {count:,} records go up to {top}; {bound} at {limit - 1}"
    return Finding("ok", "ids", text, values)


def tokenizer(context: CheckContext) -> Iterator[Finding]:
    """That of the run which the work directory holds; `vocabulary` compares those of corpora with each other."""
    own = context.corpora[0].tokenizer_fingerprint
    values = {"corpora": own, "run": None}
    if context.workdir is not None:
        reach(context.workdir)
    if context.workdir is None or not (context.workdir / TOKENIZER).exists():
        why = "no --workdir is given" if context.workdir is None else f"{context.workdir} holds no run yet"
        yield Finding("ok", "tokenizer", f"the corpora's is {own[:12]}; {why}, so there is no other", values)
        return
    file = context.workdir / TOKENIZER
    there = Tokenizer.load(file).fingerprint
    values |= {"run": there}
    if there != own:
        text = f"the run's ({file}) is {there[:12]}, the corpora's {own[:12]}: ids would mean other words"
        remedy = f"choose another --workdir, or build the corpora with --tokenizer {file}"
        yield Finding("error", "tokenizer", f"{text}: {remedy}", values)
        return
    yield Finding("ok", "tokenizer", f"{own[:12]}, that of the run in {context.workdir}", values)


def positions(context: CheckContext) -> Iterator[Finding]:
    """Longest rows against the position table; a longer row is refused with the config itself."""
    model, longest = context.config.model, max(phase.seq_len for phase in context.config.phases)
    values = {"longest": longest, "max_positions": model.max_positions, "kind": model.positions}
    text = f"rows of up to {longest} tokens, {model.positions} positions 0 to {model.max_positions - 1} (no offset)"
    if model.positions == "learned" and longest < model.max_positions:
        unused = f"those from {longest} on are never trained"
        remedy = f"set --model.max-positions {longest}, or add a phase with longer rows"
        yield Finding("warning", "positions", f"{text}; {unused}: {remedy}", values)
        return
    yield Finding("ok", "positions", text, values)


CHECKS = {"ids": ids, "tokenizer": tokenizer, "positions": positions}
"""By the name that an error of theirs gets."""
