"""The command `bert-data tokenizer`: trains a vocabulary, or converts an existing one."""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro
from etils import epath

from bert_jax.command.flags import DirectoryArg
from bert_jax.errors import UserError
from bert_jax.field_validation import Count, Share, check
from bert_jax.storage.files import make_directory_if_local
from bert_jax.storage.paths import check_reachable, check_writable
from bert_jax.tokenizers.tokenizer import Tokenizer, model_file
from data_prep.cli.arguments import (
    Encodings,
    Sources,
    Switch,
    Workers,
    damage_explained,
    lost_bytes_clause,
    parse_sources,
)
from data_prep.for_each_input import Totals, report_skipped
from data_prep.sources import Source
from data_prep.vocabularies.added_words import add_words
from data_prep.vocabularies.merges import SCORES
from data_prep.vocabularies.train import KINDS, VocabularySettings, train

_KINDS_WITH_FLAG = {
    "score": ("wordpiece",),
    "max_characters": ("wordpiece", "bpe"),
    "keep_accents": ("wordpiece", "bpe"),
}
"""Flags that apply to some kinds only."""
_Text = tyro.conf.create_mutex_group(required=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Training:
    """Flags of training, which do not go with --from:"""

    # None: not given, so that a flag that has no effect can be detected.
    kind: Literal[KINDS] | None = None
    """Kind of tokenizer (default wordpiece)."""
    vocab_size: Count | None = None
    """Number of pieces (default 30522, that of bert-base-uncased)."""
    score: Literal[tuple(SCORES)] | None = None
    """wordpiece: merge the most frequent pair (count, the default), or the one with the highest count relative to the
    counts of its parts (likelihood)."""
    max_characters: Count | None = None
    """wordpiece, bpe: number of different characters to keep, the most frequent, besides ASCII (default: as many as
    make up 99.995% of the text, in at most half of the vocabulary)."""
    keep_accents: Switch = False
    """wordpiece, bpe: lower-case without stripping accents, which deletes marks of many scripts."""
    sampling_exponent: Share | None = None
    """Several languages, a --source for each: shares are sizes to this power (default 1, by size; multilingual BERT
    used 0.7)."""
    sample_mb: Count | None = None
    """Train on about this many MB of documents, chosen by a hash (default: all; sentencepiece, which keeps its text in
    memory: 50)."""

    def __post_init__(self) -> None:
        check(self, "--")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train a tokenizer on texts (--source), or convert an existing one (--from)."""

    source: Annotated[Sources, _Text] = ()
    existing: Annotated[str | None, tyro.conf.arg(name="from", metavar="PATH"), _Text] = None
    """Instead of --source: a tokenizer.json, vocab.txt, merges.txt (with vocab.json beside it), SentencePiece .model,
    or a directory that holds one. Default: train one."""
    out: Annotated[DirectoryArg, tyro.conf.arg(metavar="FILE")]
    """tokenizer.json to write; must not exist. SentencePiece: FILE.model is written beside it, for other libraries."""
    lowercase: Switch = False
    """Lower-case text; wordpiece and bpe, which do so by default, also strip accents."""
    no_lowercase: Switch = False
    """Keep the case."""
    skip_damaged: Switch = False
    """With --source: leave out files that cannot be read, are damaged or binary, and name them. Default: an error."""
    encoding: Encodings = ()
    """With --source: encoding of files of text, e.g. windows-1252, or auto (identified for each file). One for all, or
    one for each --source (default utf-8)."""
    add_special_tokens: Switch = False
    """With --from: append the special tokens that the vocabulary lacks, as new last ids."""
    add_words: Annotated[DirectoryArg | None, tyro.conf.arg(metavar="FILE")] = None
    """With --from: append the words of a UTF-8 file, one on each line, as new last ids of a WordPiece vocabulary.
    Default: none."""
    workers: Workers = dataclasses.field(default_factory=os.cpu_count)
    """Number of processes; the result does not depend on it. Default: one per core."""
    training: Annotated[_Training, tyro.conf.arg(name="")] = dataclasses.field(default_factory=_Training)

    def run(self) -> None:
        """Write the tokenizer."""
        started = time.perf_counter()
        out = epath.Path(self.out)
        check_reachable(out)
        model = model_file(out)
        if out == model:
            raise UserError(
                f"--out {out}: is the tokenizer.json; the .model is written beside it, so choose another name"
            )
        for file in (out, model) if (self.training.kind or "").startswith("sentencepiece") else (out,):
            if file.exists():
                raise UserError(f"{file}: exists already; choose another --out or remove it first")
        check_writable(out)
        read: list[Totals] = []
        tokenizer = self._train(read) if self.existing is None else self._convert()
        content = tokenizer.sentencepiece_model
        if content is not None and model.exists() and model.read_bytes() != content:
            raise UserError(f"{model}: exists already and is another model; choose another --out or remove it first")
        make_directory_if_local(out.parent)
        tokenizer.save(out)
        seconds = time.perf_counter() - started
        if tokenizer.note:
            print(f"note: {tokenizer.note}", file=sys.stderr)
        case = "uncased" if tokenizer.lowercase else "cased"
        without = lost_bytes_clause(sum(total.lost_bytes for total in read), sum(total.text_bytes for total in read))
        about = f"{tokenizer.kind}, {tokenizer.vocab_size} pieces, {case}"
        print(f"{os.fspath(out)}: {about}, in {seconds:.0f} s{without}")

    def _case(self, default: bool | None) -> bool | None:
        return default if not self.lowercase and not self.no_lowercase else self.lowercase

    def _convert(self) -> Tokenizer:
        for name, value in vars(self.training).items():
            if value is not None and value is not False:
                raise UserError(f"--{name.replace('_', '-')} applies to --source only; --from keeps the vocabulary")
        for name in ("skip_damaged", "encoding"):
            if getattr(self, name):
                raise UserError(f"--{name.replace('_', '-')} applies to --source only")
        tokenizer = Tokenizer.load(self.existing, self._case(None), self.add_special_tokens)
        if self.add_words is None:
            return tokenizer
        try:
            words = self.add_words.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--add-words {self.add_words}: cannot be read as UTF-8 text: {error}") from error
        return add_words(tokenizer, words, str(self.add_words))

    def _train(self, read: list[Totals]) -> Tokenizer:
        """Trains; adds to `read` what was read of each source."""

        def report(sources: Sequence[Source], totals: Sequence[Totals]) -> None:
            report_skipped(sources, totals)
            read.extend(totals)

        if self.add_words is not None:
            raise UserError("--add-words applies to --from only; a trained vocabulary has the words of its texts")
        if self.add_special_tokens:
            raise UserError("--add-special-tokens applies to --from only; trained vocabularies have all special tokens")
        flags = {name: value for name, value in vars(self.training).items() if value is not None and value is not False}
        kind = flags.setdefault("kind", "wordpiece")
        for name, kinds in _KINDS_WITH_FLAG.items():
            if name in flags and kind not in kinds:
                raise UserError(f"--{name.replace('_', '-')} applies to --kind {' or '.join(kinds)}, not to {kind}")
        if "sampling_exponent" in flags and len(self.source) < 2:
            raise UserError("--sampling-exponent weights sources: give each language a --source of its own")
        if "sample_mb" in flags:
            flags["sample_bytes"] = flags.pop("sample_mb") * 10**6
        lowercase = self._case(kind in ("wordpiece", "bpe"))
        if flags.pop("keep_accents", False):
            if not lowercase:
                raise UserError("--keep-accents has no effect with --no-lowercase, which keeps them; remove it")
            flags["strip_accents"] = False
        recipe = VocabularySettings(**{"vocab_size": 30522} | flags, lowercase=lowercase)
        parsed = parse_sources(self.source, self.workers, encoding=self.encoding)
        parsed = [dataclasses.replace(one, skip_damaged=self.skip_damaged) for one in parsed]
        with damage_explained():
            return train(recipe, parsed, self.workers, report)
