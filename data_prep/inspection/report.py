"""The report on corpora, as sections, from the values of `statistics`."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence

from bert_jax.data.corpus_description import NOT_STATED
from bert_jax.data.epoch_counts import LOW_COVERAGE
from bert_jax.data.manifest import SPLITS
from bert_jax.report import Bars, Bin, Command, Excerpt, Histogram, Note, Section, Table
from bert_jax.report.cells import cell, make_table
from data_prep.inspection.corpus_statistics import ROW_LENGTHS, split_counts
from data_prep.inspection.filter_report import filter_sections
from data_prep.inspection.group_report import group_sections, language_sections

_PIECE_COLUMNS = 4
_PRESET = "bert_base"
"""In a proposed command."""


def sections(corpora: Sequence[Mapping], mixture: Mapping | None, exponent: float) -> list[Section]:
    """All sections: first the mixture, if there are several corpora; `exponent` is for languages within a corpus."""
    every = [_mixture(mixture)] if mixture else []
    for corpus in corpora:
        every += _corpus(corpus, exponent)
    return every


def summary_sections(manifest: Mapping) -> list[Section]:
    """The report at the end of a build, from corpus.json alone."""
    splits = {split: split_counts(manifest["splits"][split]) for split in SPLITS}
    counts = Section(manifest["name"], (counts_table(splits),), level=1)
    return [counts, *language_sections(splits), *removal_sections(manifest), *filter_sections(manifest)[:1]]


def few_documents_warning(splits: Mapping[str, Mapping]) -> str | None:
    """A warning if a split has too few documents for pairs of segments of different ones; otherwise None."""
    few = [split for split in SPLITS if splits[split]["documents"] < 2]
    if not few:
        return None
    counts = f"{few[0]} has 1 document" if len(few) == 1 else f"{' and '.join(few)} have 1 document each"
    return (
        f"{counts}: sentence pairs need 2 in each split; build with more documents (a file is one of `text-files:`,"
        " blank lines divide those of `text:`), or train with --data.format doc_sentences --objective.pair none"
    )


def short_documents_warning(train: Mapping, measured_rows: Sequence[Mapping], specs: Sequence[str]) -> str | None:
    """A warning if documents are shorter, on average, than a row of 128; otherwise None.

    Args:
      train: `measure_lengths` of the train split.
      measured_rows: `measure_rows` of it.
      specs: sources of the corpus.
    """
    lengths, row = train["document_tokens"], ROW_LENGTHS[0]
    if lengths["mean"] >= row or not measured_rows:
        return None
    number = sum(one["count"] for one in lengths["bins"])
    advice = ""
    if any(spec.startswith(("text:", "lines:")) for spec in specs):
        advice = (
            "and parts of one text can be in both splits; if blank lines divide paragraphs, not documents, use"
            " text-files:GLOB (a file is a document); else "
        )
    random = f"{measured_rows[0]['random_pairs']:.0%}"
    pairs = "" if random == "50%" else f"{random} of next-sentence pairs are random instead of 50%, "
    return (
        f"the {number:,} documents of train have {lengths['mean']:.0f} tokens on average (median"
        f" {lengths['quantiles']['0.5']:,}), less than a row of {row}: {pairs}{advice}train with"
        " --objective.pair none --data.format full_sentences"
    )


def coverage_line(measured_rows: Sequence[Mapping]) -> str:
    """The shares of the tokens that an epoch of BERT's pairs trains on, one for each length of rows."""
    shares = " and ".join(f"{one['coverage']:.1%} in rows of {one['seq_len']}" for one in measured_rows)
    return f"an epoch of sentence pairs (segment_pair) covers {shares} of the tokens of train"


def coverage_warning(measured_rows: Sequence[Mapping]) -> str | None:
    """A warning for the longest rows of which an epoch of BERT's pairs covers less than LOW_COVERAGE of the tokens."""
    low = [one for one in measured_rows if one["coverage"] < LOW_COVERAGE]
    if not low:
        return None
    longest = low[-1]["seq_len"]
    return (
        f"sentence pairs in rows of {longest} cover {low[-1]['coverage']:.1%} of the tokens: many sentences fill more"
        f" than half of a row; train with --phases.0.seq-len above {longest}, or with --data.format full_sentences"
        " --objective.pair none, which covers all"
    )


def _corpus(corpus: Mapping, exponent: float) -> list[Section]:
    specs = [source["spec"] for source in corpus["sources"]]
    about = Note(
        f"{corpus['directory']}: {cell(corpus['disk_bytes'], 'bytes')} on disk,"
        f" {corpus['disk_bytes_per_token']:.2f} bytes a token; {corpus['vocab_size']:,} pieces,"
        f" tokenizer {corpus['tokenizer_fingerprint'][:12]}"
    )
    return [
        Section(corpus["name"], (about, counts_table(corpus["splits"])), level=1),
        *language_sections(corpus["splits"], exponent),
        *group_sections(corpus["splits"]["train"].get("groups", [])),
        *removal_sections(corpus),
        *filter_sections(corpus),
        _lengths(corpus["splits"], short_documents_warning(corpus["splits"]["train"], corpus["rows"], specs)),
        _rows(corpus["rows"]),
        _pieces(corpus["pieces"], corpus["splits"]["train"]["tokens"]),
        Section("How documents of train begin", tuple(_excerpt(sample) for sample in corpus["samples"])),
        Section("Where it came from", (sources_table(corpus["sources"]), settings_table(corpus["settings"]))),
    ]


def _mixture(mixture: Mapping) -> Section:
    """Weights for training on several corpora."""
    corpora = mixture["corpora"]
    columns = {
        "corpus": "{directory}",
        "tokens of train": "{tokens:,}",
        "share": "{share:.2%}",
        "weight": "{weight:.4g}",
        "epochs of it in one of all": "{repeats:.2f}",
    }
    exponent = mixture["sampling_exponent"]
    weights = (shlex.quote(f"{one['directory']}={one['weight']:.4g}") for one in corpora)
    command = Command(
        " ".join(
            ["bert-jax pretrain", _PRESET, *(f"--corpus {weight}" for weight in weights), "--workdir runs/mixture"]
        )
    )
    if obstacle := mixture["obstacle"]:
        command = Note(f"These corpora {obstacle}: no model can be trained on them together.")
    return Section(
        "Training on these corpora together",
        (
            Note(f"Weights are the shares of tokens to the power {exponent:g}, normalised to sum to 1."),
            make_table(corpora, columns),
            command,
        ),
        level=1,
    )


def counts_table(splits: Mapping[str, Mapping]) -> Table:
    """Counts of each split (`corpus_statistics.split_counts`)."""
    forms = {
        "documents": "{documents:,}",
        "sentences": "{sentences:,}",
        "tokens": "{tokens:,}",
        "text": "{text_bytes:bytes}",
        "bytes of text per token": "{text_bytes_per_token:.2f}",
        "unknown tokens": "{unknown_tokens:,}",
        "text that is unknown": "{unknown_rate:.4%}",
        "records": "{records:,}",
        "shards": "{shards:,}",
    }
    table = make_table([splits[split] for split in SPLITS], forms)
    return Table(("", *SPLITS), tuple(zip(table.header, *table.rows, strict=True)))


def removal_sections(corpus: Mapping) -> list[Section]:
    """Removed by filters, changed by cleaning, and skipped while reading; then the first places that were skipped."""
    text_bytes = sum(corpus["splits"][split]["text_bytes"] for split in SPLITS)
    text_bytes += sum(removed.get("text_bytes", 0) for removed in corpus["dropped"].values())
    rows = []
    for name, removed in corpus["dropped"].items():
        what = ", ".join(f"{count:,} {unit}" for unit, count in removed.items() if unit != "text_bytes")
        size = removed.get("text_bytes")
        sizes = ("", "") if size is None else (cell(size, "bytes"), f"{size / text_bytes:.2%}")
        rows.append((_words(name), what, *sizes))
    blocks = [Table(("removed by filters", "how many", "text", "of all text"), tuple(rows))] if rows else []
    cleaned = tuple((_words(name), f"{count:,}") for name, count in corpus["cleaned"].items())
    if cleaned:
        blocks.append(Table(("changed by cleaning", "how many"), cleaned))
    if not blocks:
        blocks.append(Note("Nothing was filtered or cleaned."))
    if skipped := corpus["skipped"]:
        read = sum(source["text_bytes"] for source in corpus["sources"])
        every = read + sum(about["bytes"] for about in skipped.values())
        reasons = [{"reason": _words(reason), **about} for reason, about in skipped.items()]
        columns = {
            "skipped because it could not be read": "{reason}",
            "how many": "{count:,}",
            "text": "{bytes:bytes}",
            "of all text": lambda about: f"{about['bytes'] / max(1, every):.2%}",
        }
        blocks.append(make_table(reasons, columns))
    else:
        blocks.append(Note("Nothing was skipped while reading."))
    places = tuple((_words(reason), place) for reason, about in skipped.items() for place in about["first"])
    table = Table(("skipped", "first places"), places, words=True)
    return [Section("Removed and skipped", tuple(blocks)), *([Section("Places of it", (table,))] if places else [])]


def _lengths(splits: Mapping[str, Mapping], warning: str | None) -> Section:
    things = {"sentence": "sentence_tokens", "document": "document_tokens"}
    rows, plots = [], []
    for split in SPLITS:
        for thing, key in things.items():
            lengths = splits[split][key]
            quantiles = (f"{quantile:,}" for quantile in lengths["quantiles"].values())
            rows.append((f"tokens in a {thing}, {split}", *quantiles, f"{lengths['mean']:,.1f}"))
    for thing, key in things.items():
        bins = tuple(Bin(*one.values()) for one in splits["train"][key]["bins"])
        plots.append(Histogram(f"tokens in a {thing}, train", f"{thing}s", "tokens", bins))
    header = ("", *(f"{float(share):.0%}" for share in splits["train"]["sentence_tokens"]["quantiles"]), "mean")
    return Section(
        "Lengths",
        (
            *([Note(f"Note: {warning}.")] if warning else []),
            Note("Quantiles: this share of sentences or documents has at most this number of tokens."),
            Table(header, tuple(rows)),
            *plots,
        ),
    )


def _rows(measured_rows: Sequence[Mapping]) -> Section:
    title = "Rows of sentence pairs"
    if not measured_rows:
        return Section(title, (Note("No pairs can be made of one document: random segments come from another one."),))
    bars = {}
    for one in measured_rows:
        seq_len = f"{one['seq_len']:,}"
        bars |= {f"{seq_len}, one example": one["unpacked_efficiency"], f"{seq_len}, packed": one["packing_efficiency"]}
    columns = {
        "seq_len": "{seq_len:,}",
        "coverage": "{coverage:.1%}",
        "examples": "{examples:,}",
        "one per row: full": "{unpacked_efficiency:.1%}",
        "packed rows": "{rows:,}",
        "full": "{packing_efficiency:.1%}",
        "random pairs": "{random_pairs:.1%}",
    }
    warning = coverage_warning(measured_rows)
    return Section(
        title,
        (
            *([Note(f"Note: {warning}.")] if warning else []),
            Note(
                "An epoch of train with --data.format segment_pair; `bert-jax doctor` counts the rows of a run, with"
                " its format and settings. Coverage: the share of the tokens in an example; the rest is truncated."
                " Full: the share of the tokens of rows that are not padding, with one example in a row and with"
                " several. Random pairs: the expected share of pairs whose second segment comes from another document;"
                " about 50% for long documents, more for short ones."
            ),
            make_table(measured_rows, columns),
            Bars(tuple(bars), tuple(bars.values()), whole=True),
        ),
    )


def _pieces(pieces: Mapping, tokens: int) -> Section:
    cells = [(_visible(one["piece"]), f"{one['count'] / tokens:.2%}") for one in pieces["most_frequent"]]
    height = -(-len(cells) // _PIECE_COLUMNS)
    cells += [("", "")] * (height * _PIECE_COLUMNS - len(cells))
    rows = tuple(sum((cells[row + column * height] for column in range(_PIECE_COLUMNS)), ()) for row in range(height))
    levels = {"never": pieces["never_used"]}
    levels |= {f"{label} times": number for label, number in pieces["by_times_used"].items()}
    return Section(
        "Pieces of train",
        (
            Note(
                f"{pieces['never_used']:,} of {pieces['total']:,} pieces ({pieces['never_used_share']:.1%}) never"
                " occur; special tokens are not counted. Pieces by number of occurrences:"
            ),
            Bars(
                tuple(f"{label}: {number:,}" for label, number in levels.items()),
                tuple(number / pieces["total"] for number in levels.values()),
                whole=False,
            ),
            Note("The most frequent pieces and their share of tokens:"),
            Table(("piece", "share") * _PIECE_COLUMNS, rows),
        ),
    )


def _excerpt(sample: Mapping) -> Excerpt:
    caption = f"document {sample['document']:,}, {sample['tokens']:,} tokens"
    return Excerpt(caption, tuple(sample["sentences"]), sample["cut"])


def sources_table(sources: Sequence[Mapping]) -> Table:
    """What corpus.json says of each source; builds of older versions did not count what was kept."""
    kept = any("kept" in one for one in sources)
    columns = {
        "source": "{spec}",
        "license": lambda one: one.get("license") or NOT_STATED,
        "language": lambda one: one.get("language", ""),
        "encodings": lambda one: ", ".join(f"{name} ({count:,})" for name, count in one["encodings"].items()),
        "documents": "{documents:,}",
        "text": "{text_bytes:bytes}",
        "files": "{files:,}",
        **(
            {f"tokens of {split}": lambda one, split=split: _kept_tokens(one, split) for split in SPLITS}
            if kept
            else {}
        ),
    }
    return make_table(sources, columns)


def _kept_tokens(source: Mapping, split: str) -> str:
    return cell(source["kept"][split]["tokens"] if "kept" in source else None, ",")


def settings_table(settings: Mapping) -> Table:
    """The settings of a build."""
    return Table(("setting of the build", "value"), tuple(_settings(settings, "")), words=True)


def _settings(settings: Mapping, inside: str) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{inside}{_words(name)}: ")
        else:
            plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield inside + _words(name), {"null": "none", "true": "yes", "false": "no"}.get(plain, plain)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _visible(piece: str) -> str:
    return piece if piece.isprintable() else ascii(piece)[1:-1]
