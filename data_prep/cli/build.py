"""The command `bert-data build`."""

import argparse
import os
import re
import sys
import time

from etils import epath

from bert_jax.data.corpus import INCOMPLETE, Corpus
from bert_jax.errors import UserError, install_command
from bert_jax.report import text
from bert_jax.storage import is_remote, to_path
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import sources
from data_prep.clean import NORMALIZATIONS, CleaningOptions
from data_prep.cli import arguments as flags
from data_prep.duplicates.decontamination import name_flag_in_errors
from data_prep.options import BuildOptions, NearDuplicateOptions

_DEFAULT = BuildOptions()
_NEAR = NearDuplicateOptions()
_MANY_UNKNOWN = 0.05
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command and its flags."""
    add = commands.add_parser("build", help="build a corpus; started again after an interruption, it continues")
    flags.add_sources(add)
    add.add_argument(
        "--tokenizer",
        required=True,
        metavar="FILE",
        help="tokenizer.json, vocab.txt, merges.txt, .model, or a directory that holds one",
    )
    add.add_argument("--out", required=True, metavar="DIR", help="directory to write; must be empty or not exist")
    add.add_argument("--name", help="name of the corpus (default: from --out)")
    add.add_argument(
        "--language",
        type=_language,
        default=_DEFAULT.language,
        help="ISO 639 code, for sentence splitting (default en)",
    )
    _add_cleaning(add)
    _add_filters(add)
    add.add_argument(
        "--validation-fraction",
        type=flags.fraction,
        default=_DEFAULT.validation_fraction,
        metavar="F",
        help="share of documents held out (default %(default)s)",
    )
    add.add_argument(
        "--max-shard-mb", type=flags.positive_int, default=64, metavar="MB", help="shard size (default 64)"
    )
    add.add_argument("--scratch", metavar="DIR", help=f"directory for unfinished work (default: {INCOMPLETE} in --out)")
    add.add_argument(
        "--engine",
        choices=["local", "beam"],
        default="local",
        help="processes of this machine, or an Apache Beam runner (default local)",
    )
    add.add_argument(
        "--runner", metavar="NAME", help="Beam's runner, e.g. DataflowRunner; flags after -- are passed to it"
    )
    add.set_defaults(command=run)


def _add_cleaning(add: argparse.ArgumentParser) -> None:
    group = add.add_argument_group("cleaning")
    group.add_argument(
        "--normalization",
        choices=NORMALIZATIONS,
        default=_DEFAULT.cleaning.normalization,
        help="Unicode normal form (default nfc; nfkc rewrites what authors wrote: x² becomes x2)",
    )
    group.add_argument(
        "--keep-control-characters", action="store_true", help="do not drop invisible control characters"
    )
    group.add_argument("--keep-whitespace", action="store_true", help="do not collapse runs of spaces and blank lines")


def _add_filters(add: argparse.ArgumentParser) -> None:
    group = add.add_argument_group("filters", "corpus.json counts what they remove")
    group.add_argument(
        "--min-characters", type=flags.positive_int, default=1, metavar="N", help="remove shorter documents (default 1)"
    )
    group.add_argument(
        "--drop-repeated-lines", action="store_true", help="remove lines that occurred before in the document"
    )
    group.add_argument("--keep-duplicates", action="store_true", help="keep documents that are equal to an earlier one")
    group.add_argument(
        "--drop-duplicate-paragraphs",
        type=flags.positive_int,
        metavar="N",
        help="remove paragraphs of at least N bytes that are equal to an earlier one",
    )
    group.add_argument(
        "--drop-near-duplicates",
        nargs="?",
        type=flags.fraction,
        const=_NEAR.threshold,
        metavar="J",
        help="remove documents whose Jaccard similarity with an earlier one is at least J (default %(const)s)",
    )
    group.add_argument(
        "--shingle-words",
        type=flags.positive_int,
        metavar="N",
        help=f"words per shingle, for near-duplicates (default {_NEAR.shingle_words})",
    )
    group.add_argument(
        "--permutations",
        type=flags.int_up_to(10_000),
        metavar="N",
        help=f"length of a MinHash signature, for near-duplicates (default {_NEAR.permutations})",
    )
    group.add_argument(
        "--decontaminate",
        action="append",
        default=[],
        metavar="SPEC",
        help="evaluation texts, a SPEC as for --source; documents that overlap with them are removed",
    )
    group.add_argument(
        "--decontamination-words",
        type=flags.positive_int,
        metavar="N",
        help=f"consecutive words that count as an overlap (default {_DEFAULT.decontamination_words})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Builds the corpus that the flags describe."""
    # Imported here: importing TFDS takes a second, and the other commands do not need it.
    from data_prep.build.pipeline import BuildRequest, build
    from data_prep.inspection import report, statistics

    started = time.perf_counter()
    out = epath.Path(to_path(arguments.out))
    name = arguments.name or re.sub(
        r"[^a-z0-9]+", "_", f"{(out if is_remote(out) else out.resolve()).name}".lower()
    ).strip("_")
    if not name[:1].isalpha():
        raise UserError(f"--out {out}: no corpus name can be derived from it; give one with --name")
    with name_flag_in_errors():
        evaluation = [sources.parse(spec, arguments.workers) for spec in arguments.decontaminate]
    tokenizer = Tokenizer.load(arguments.tokenizer)
    if tokenizer.note:
        print(f"note: {tokenizer.note}", file=sys.stderr)
    manifest = build(
        BuildRequest(
            sources=[sources.parse(spec, arguments.workers) for spec in arguments.source],
            tokenizer=tokenizer,
            directory=out,
            name=name,
            options=_options(arguments),
            evaluation_texts=evaluation,
            scratch=arguments.scratch,
        ),
        _engine(arguments),
    )
    print(text.render(report.counts(manifest)))
    train = manifest["splits"]["train"]
    if train["unknown_tokens"] > _MANY_UNKNOWN * train["tokens"]:
        share = train["unknown_tokens"] / train["tokens"]
        print(
            f"note: {share:.0%} of the tokens are unknown; is {arguments.tokenizer} for this language?", file=sys.stderr
        )
    if warning := report.short_documents(statistics.measure_lengths(Corpus.open(out))):
        print(f"note: {warning}", file=sys.stderr)
    print(
        f"{out}: ready in {time.perf_counter() - started:.0f} s; look at it with `bert-data inspect {os.fspath(out)}`"
    )


def _options(arguments: argparse.Namespace) -> BuildOptions:
    near = None
    if arguments.drop_near_duplicates is not None:
        near = NearDuplicateOptions(
            arguments.shingle_words or _NEAR.shingle_words,
            arguments.drop_near_duplicates,
            arguments.permutations or _NEAR.permutations,
        )
    elif arguments.shingle_words or arguments.permutations:
        raise UserError("--shingle-words and --permutations apply to near-duplicates only; add --drop-near-duplicates")
    if arguments.decontamination_words and not arguments.decontaminate:
        raise UserError("--decontamination-words has no effect by itself; add --decontaminate with evaluation texts")
    return BuildOptions(
        language=arguments.language,
        cleaning=CleaningOptions(
            normalization=arguments.normalization,
            control_characters=not arguments.keep_control_characters,
            whitespace=not arguments.keep_whitespace,
        ),
        drop_repeated_lines=arguments.drop_repeated_lines,
        min_characters=arguments.min_characters,
        drop_duplicate_documents=not arguments.keep_duplicates,
        drop_duplicate_paragraphs=arguments.drop_duplicate_paragraphs,
        near_duplicates=near,
        decontamination_words=arguments.decontamination_words or _DEFAULT.decontamination_words,
        validation_fraction=arguments.validation_fraction,
        max_shard_bytes=arguments.max_shard_mb << 20,
    )


def _language(text: str) -> str:
    """An ISO 639 code."""
    if not _LANGUAGE.fullmatch(text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an ISO 639 code such as en, de or zh")
    return text.lower()


def _engine(arguments: argparse.Namespace):
    if arguments.engine == "local":
        if arguments.runner or arguments.runner_flags:
            raise UserError("--runner and flags after -- belong to Apache Beam; add --engine beam")
        from data_prep.build.engines.local import LocalEngine

        return LocalEngine(arguments.workers)
    try:
        from data_prep.build.engines.beam import BeamEngine
    except ImportError as error:
        raise UserError(f"--engine beam needs Apache Beam, which is missing: {install_command('beam')}") from error

    return BeamEngine(arguments.runner, arguments.runner_flags)
