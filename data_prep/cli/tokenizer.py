"""The command `bert-data tokenizer`: trains a vocabulary, or converts an existing one."""

import argparse
import os
import sys
import time

from etils import epath

from bert_jax import storage
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import sources
from data_prep.cli import arguments as flags
from data_prep.sources import KINDS_HELP
from data_prep.vocabularies.merges import SCORES
from data_prep.vocabularies.train import KINDS, SENTENCEPIECE_SAMPLE_BYTES, Recipe, train
from data_prep.vocabularies.wordpiece_bpe import MAX_CHARACTERS

_DEFAULT_SIZE = 30522
"""Of bert-base-uncased."""

_KINDS_WITH_FLAG = {"score": ("wordpiece",), "max_characters": ("wordpiece", "bpe")}
"""Flags that apply to some kinds only."""
_TRAINING = ("kind", "vocab_size", "score", "max_characters", "sampling_exponent", "sample_mb")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command and its flags."""
    add = commands.add_parser("tokenizer", help="train a tokenizer, or convert an existing one")
    text = add.add_mutually_exclusive_group(required=True)
    text.add_argument("--source", action="append", metavar="SPEC", help=KINDS_HELP)
    text.add_argument(
        "--from",
        dest="existing",
        metavar="PATH",
        help="instead of training: a tokenizer.json, vocab.txt, merges.txt (with vocab.json beside it), SentencePiece"
        " .model, or a directory that holds one",
    )
    add.add_argument("--out", required=True, metavar="FILE", help="tokenizer.json to write; must not exist")
    add.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        help="lower-case text; wordpiece and bpe, which do so by default, also strip accents",
    )
    add.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="with --from: append the special tokens that the vocabulary lacks, as new last ids",
    )
    _add_training(add)
    flags.add_workers(add)
    add.set_defaults(command=run)


def _add_training(add: argparse.ArgumentParser) -> None:
    # No defaults here, so that a flag that has no effect with --from can be detected.
    group = add.add_argument_group("training")
    group.add_argument("--kind", choices=KINDS, help="kind of tokenizer (default wordpiece)")
    group.add_argument("--vocab-size", type=flags.positive_int, metavar="N", help=f"pieces (default {_DEFAULT_SIZE})")
    group.add_argument(
        "--score",
        choices=list(SCORES),
        help="wordpiece: merge the most frequent pair (count, the default), or the one with the highest count relative"
        " to the counts of its parts (likelihood)",
    )
    group.add_argument(
        "--max-characters",
        type=flags.positive_int,
        metavar="N",
        help=f"wordpiece, bpe: number of different characters to keep, the most frequent (default {MAX_CHARACTERS})",
    )
    group.add_argument(
        "--sampling-exponent",
        type=flags.exponent,
        metavar="X",
        help="several languages, a --source for each: shares are sizes to this power (default 1, by size; multilingual"
        " BERT used 0.7)",
    )
    group.add_argument(
        "--sample-mb",
        type=flags.positive_int,
        metavar="N",
        help="train on about N MB of documents, chosen by a hash (default: all; sentencepiece, which keeps its"
        f" text in memory: {SENTENCEPIECE_SAMPLE_BYTES // 10**6})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Trains or converts the tokenizer that the flags describe."""
    started = time.perf_counter()
    out = epath.Path(storage.to_path(arguments.out))
    storage.check_reachable(out)
    if out.exists():
        raise UserError(f"{out}: exists already; choose another --out or remove it first")
    if arguments.existing is not None:
        tokenizer = _convert(arguments)
    else:
        if arguments.add_special_tokens:
            raise UserError("--add-special-tokens applies to --from only; trained vocabularies have all special tokens")
        read = [sources.parse(spec, arguments.workers) for spec in arguments.source]
        tokenizer = train(_recipe(arguments), read, arguments.workers)
    storage.make_local_directory(out.parent)
    tokenizer.save(out)
    seconds = time.perf_counter() - started
    if tokenizer.note:
        print(f"note: {tokenizer.note}", file=sys.stderr)
    case = "uncased" if tokenizer.lowercase else "cased"
    print(f"{os.fspath(out)}: {tokenizer.kind}, {tokenizer.vocab_size} pieces, {case}, in {seconds:.0f} s")


def _convert(arguments: argparse.Namespace) -> Tokenizer:
    for name in _TRAINING:
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} applies to --source only; --from keeps the vocabulary")
    return Tokenizer.load(arguments.existing, arguments.lowercase, arguments.add_special_tokens)


def _recipe(arguments: argparse.Namespace) -> Recipe:
    kind = arguments.kind or "wordpiece"
    for name, kinds in _KINDS_WITH_FLAG.items():
        if getattr(arguments, name) is not None and kind not in kinds:
            raise UserError(f"--{name.replace('_', '-')} applies to --kind {' or '.join(kinds)}, not to {kind}")
    lowercase = kind in ("wordpiece", "bpe") if arguments.lowercase is None else arguments.lowercase
    return Recipe(
        kind=kind,
        vocab_size=arguments.vocab_size or _DEFAULT_SIZE,
        lowercase=lowercase,
        score=arguments.score or "count",
        max_characters=arguments.max_characters or MAX_CHARACTERS,
        sampling_exponent=1.0 if arguments.sampling_exponent is None else arguments.sampling_exponent,
        sample_bytes=arguments.sample_mb and arguments.sample_mb * 10**6,
    )
