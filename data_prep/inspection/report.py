"""The content of the report on corpora; `text` and `html` render it."""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from bert_jax.data.corpus import SPLITS
from data_prep.inspection.lengths import Bin, LengthHistogram
from data_prep.inspection.mixture import Mixture
from data_prep.inspection.statistics import QUANTILES, CorpusStatistics, PieceUsage, Sample, SplitLengthStatistics

_PIECE_COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence or two."""

    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A shell command."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; cells after the first are numbers unless `words` is set."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Distribution of lengths, by count and by tokens."""

    title: str
    """e.g. "tokens in a sentence" """
    things: str
    """e.g. "sentences" """
    bins: tuple[Bin, ...]


@dataclasses.dataclass(frozen=True)
class Bars:
    """Named shares in [0, 1]; the axis ends at 1 if `whole` is set, otherwise at the largest share."""

    labels: tuple[str, ...]
    shares: tuple[float, ...]
    whole: bool


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its content."""

    title: str
    blocks: tuple[Note | Command | Table | Histogram | Bars | Sample, ...]
    level: int = 2
    """1: a corpus; 2: a section about it"""


def sections(statistics: Sequence[CorpusStatistics], mixed: Mixture | None) -> list[Section]:
    """All sections: first the mixture, if there are several corpora."""
    every = mixture(mixed) if mixed else []
    for one in statistics:
        every += corpus(one)
    return every


def corpus(statistics: CorpusStatistics) -> list[Section]:
    """All sections about one corpus."""
    manifest = statistics.manifest
    about = Note(
        f"{statistics.directory}: {_size(statistics.disk_bytes)} on disk,"
        f" {statistics.disk_bytes_per_token:.2f} bytes a token; {manifest['vocab_size']:,} pieces,"
        f" tokenizer {manifest['tokenizer']['fingerprint'][:12]}"
    )
    parts = [Section(manifest["name"], (about, _counts(manifest)), level=1)]
    parts += [*removed_and_skipped(manifest), _lengths(statistics), _packing(statistics), _pieces(statistics.pieces)]
    parts += [Section("How documents of train begin", statistics.samples), _sources(manifest)]
    return parts


def counts(manifest: Mapping) -> list[Section]:
    """The report at the end of a build, from corpus.json alone."""
    return [Section(manifest["name"], (_counts(manifest),), level=1), *removed_and_skipped(manifest)]


def short_documents(train: SplitLengthStatistics) -> str | None:
    """A warning if documents are shorter, on average, than a row of 128; otherwise None."""
    documents, row = train.documents, train.packing_estimates[0].seq_len
    if documents.mean >= row:
        return None
    return (
        f"the {documents.total:,} documents of train have {documents.mean:.0f} tokens on average (median"
        f" {documents.quantile(0.5):,}), less than a row of {row}: {train.random_pairs[0]:.0%} of next-sentence pairs"
        " are random instead of 50%, and parts of one text can be in both splits; if blank lines divide paragraphs, not"
        " documents, use text-files:GLOB (a file is a document); else train with --objective.pair none --data.format"
        " full_sentences"
    )


def removed_and_skipped(manifest: Mapping) -> list[Section]:
    """Removed by filters, changed by cleaning, and skipped while reading."""
    text_bytes = sum(manifest["splits"][split]["text_bytes"] for split in SPLITS)
    text_bytes += sum(removed.get("text_bytes", 0) for removed in manifest["dropped"].values())
    rows = []
    for name, removed in manifest["dropped"].items():
        what = ", ".join(f"{count:,} {unit}" for unit, count in removed.items() if unit != "text_bytes")
        size = removed.get("text_bytes")
        sizes = ("", "") if size is None else (_size(size), f"{size / text_bytes:.2%}")
        rows.append((_words(name), what, *sizes))
    blocks = [Table(("removed by filters", "how many", "text", "of all text"), tuple(rows))] if rows else []
    cleaned = tuple((_words(name), f"{count:,}") for name, count in manifest["cleaned"].items())
    if cleaned:
        blocks.append(Table(("changed by cleaning", "how many"), cleaned))
    if not blocks:
        blocks.append(Note("Nothing was filtered or cleaned."))
    skipped = manifest["skipped"]
    if not skipped:
        return [Section("Removed and skipped", (*blocks, Note("Nothing was skipped while reading.")))]
    reasons = tuple((_words(reason), f"{about['count']:,}") for reason, about in skipped.items())
    places = tuple((_words(reason), place) for reason, about in skipped.items() for place in about["first"])
    blocks.append(Table(("skipped because it could not be read", "how many"), reasons))
    blocks.append(Table(("skipped", "first places"), places, words=True))
    return [Section("Removed and skipped", tuple(blocks))]


def mixture(mixed: Mixture) -> list[Section]:
    """Weights for training on several corpora."""
    rows = [
        (part.directory, f"{part.tokens:,}", f"{part.share:.2%}", f"{part.weight:.4g}", f"{part.repeats:.2f}")
        for part in mixed.parts
    ]
    blocks = [
        Note(f"Weights are the shares of tokens to the power {mixed.exponent:g}, normalised to sum to 1."),
        Table(("corpus", "tokens of train", "share", "weight", "epochs of it in one of all"), tuple(rows)),
    ]
    if mixed.one_tokenizer:
        weights = (shlex.quote(f"{part.directory}={part.weight:.4g}") for part in mixed.parts)
        blocks.append(Command(" ".join(["bert-jax pretrain", *(f"--corpus {weight}" for weight in weights)])))
    else:
        blocks.append(Note("These corpora have different tokenizers: no model can be trained on them together."))
    return [Section("Training on these corpora together", tuple(blocks), level=1)]


def _counts(manifest: Mapping) -> Table:
    splits = [manifest["splits"][split] for split in SPLITS]
    rows = [(key, *(f"{split[key]:,}" for split in splits)) for key in ("documents", "sentences", "tokens")]
    rows.append(("text", *(_size(split["text_bytes"]) for split in splits)))
    rows.append(("bytes of text per token", *(f"{split['text_bytes'] / split['tokens']:.2f}" for split in splits)))
    rows.append(("unknown tokens", *(f"{split['unknown_tokens']:,}" for split in splits)))
    rows.append(("unknown rate", *(f"{split['unknown_tokens'] / split['tokens']:.4%}" for split in splits)))
    rows.append(("records", *(f"{split['records']:,}" for split in splits)))
    rows.append(("shards", *(f"{len(split['shards']):,}" for split in splits)))
    return Table(("", *SPLITS), tuple(rows))


def _lengths(statistics: CorpusStatistics) -> Section:
    rows = []
    for split, measured in statistics.splits.items():
        rows.append(_quantiles(f"tokens in a sentence, {split}", measured.sentences))
        rows.append(_quantiles(f"tokens in a document, {split}", measured.documents))
    header = ("", *(f"{share:.0%}" for share in QUANTILES), "mean")
    train = statistics.splits["train"]
    warning = short_documents(train)
    return Section(
        "Lengths",
        (
            *([Note(f"Note: {warning}.")] if warning else []),
            Note("Quantiles: this share of sentences or documents has at most this number of tokens."),
            Table(header, tuple(rows)),
            Histogram("tokens in a sentence, train", "sentences", tuple(train.sentences.bins())),
            Histogram("tokens in a document, train", "documents", tuple(train.documents.bins())),
        ),
    )


def _quantiles(label: str, lengths: LengthHistogram) -> tuple[str, ...]:
    return (label, *(f"{lengths.quantile(share):,}" for share in QUANTILES), f"{lengths.mean:,.1f}")


def _packing(statistics: CorpusStatistics) -> Section:
    estimates = statistics.splits["train"].packing_estimates
    rows = [
        (
            f"{estimate.seq_len}",
            f"{estimate.examples:,}",
            f"{estimate.unpacked_efficiency:.2%}",
            f"{estimate.rows:,}",
            f"{estimate.packing_efficiency:.2%}",
            f"{random:.1%}",
        )
        for estimate, random in zip(estimates, statistics.splits["train"].random_pairs, strict=True)
    ]
    labels = [f"{estimate.seq_len}, {way}" for estimate in estimates for way in ("one example", "packed")]
    shares = [share for estimate in estimates for share in (estimate.unpacked_efficiency, estimate.packing_efficiency)]
    return Section(
        "Expected packing efficiency",
        (
            Note(
                "Share of the tokens of rows that are not padding, in an epoch of train. An example is as many"
                " consecutive whole sentences of one document as fit into a row (RoBERTa's doc-sentences; longer ones"
                " are split), with one [CLS] and one [SEP]. Packed rows contain several examples, longest first, best"
                " fit, over the whole epoch (Krell et al. 2021). `bert-jax doctor` counts the rows of a run, with its"
                " format and settings. Random pairs: the expected share of BERT's sentence pairs (segment_pair) whose"
                " second segment comes from another document; about 50% for long documents, more for short ones."
            ),
            Table(("seq_len", "examples", "one per row", "packed rows", "packed", "random pairs"), tuple(rows)),
            Bars(tuple(labels), tuple(shares), whole=True),
        ),
    )


def _pieces(pieces: PieceUsage) -> Section:
    cells = [(_visible(piece), f"{count / pieces.tokens:.2%}") for piece, count in pieces.frequent]
    height = -(-len(cells) // _PIECE_COLUMNS)
    cells += [("", "")] * (height * _PIECE_COLUMNS - len(cells))
    rows = tuple(sum((cells[row + column * height] for column in range(_PIECE_COLUMNS)), ()) for row in range(height))
    levels = (("never", pieces.never), *((f"{label} times", number) for label, number in pieces.decades))
    return Section(
        "Pieces of train",
        (
            Note(
                f"{pieces.never:,} of {pieces.total:,} pieces ({pieces.never / pieces.total:.1%}) never occur; special"
                " tokens are not counted. Pieces by number of occurrences:"
            ),
            Bars(
                tuple(f"{label}: {number:,}" for label, number in levels),
                tuple(number / pieces.total for _, number in levels),
                whole=False,
            ),
            Note("The most frequent pieces and their share of tokens:"),
            Table(("piece", "share") * _PIECE_COLUMNS, rows),
        ),
    )


def _sources(manifest: Mapping) -> Section:
    rows = [
        (
            source["spec"],
            f"{source['documents']:,}",
            _size(source["text_bytes"]),
            f"{len(source['files']):,}",
        )
        for source in manifest["sources"]
    ]
    return Section(
        "Where it came from",
        (
            Table(("source", "documents", "text", "files"), tuple(rows)),
            Table(("setting of the build", "value"), tuple(_settings(manifest["settings"], "")), words=True),
        ),
    )


def _settings(settings: Mapping, inside: str) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{inside}{_words(name)}: ")
        else:
            plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield inside + _words(name), {"null": "none", "true": "yes", "false": "no"}.get(plain, plain)


def _size(count: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,} B"


def _words(key: str) -> str:
    return key.replace("_", " ")


def _visible(piece: str) -> str:
    return piece if piece.isprintable() else ascii(piece)[1:-1]
