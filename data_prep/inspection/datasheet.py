"""The datasheet of a corpus: in Markdown what corpus.json says, and the card of a dataset at the Hugging Face Hub.

The idea of datasheets is that of Gebru et al. 2021 ("Datasheets for Datasets"). Fields of the header:
https://huggingface.co/docs/hub/datasets-cards. The page has no date, and no name of a machine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from etils import epath

import data_prep
from bert_jax.data.corpus import Corpus
from bert_jax.data.corpus_description import frequent_languages
from bert_jax.data.manifest import SPLITS, TOKENIZER
from bert_jax.provenance import code, describe_code
from bert_jax.report import Command, Excerpt, Note, Section, markdown
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import licenses
from data_prep.inspection import group_report, report
from data_prep.inspection.corpus_statistics import sample_documents, split_counts
from data_prep.inspection.filter_report import filter_sections

_SAMPLES_AT = (0.0, 0.5, 1.0)
_SAMPLE_TOKENS = 32
_SOURCES_NOTE = (
    "Documents, text and files are what was read, tokens what was kept. Licenses are those that the build was given"
    " (--license), and were not checked. So are languages (--language, by default en), except auto: identified for each"
    " document, and @FIELD: read from each record."
)


def format_datasheet(directory: epath.Path, tokenizer: Tokenizer, command: str, manifest: dict) -> str:
    """The text of the page.

    Args:
      directory: of the corpus, in which all other files are written.
      tokenizer: of the corpus.
      command: that builds it; "": none is shown.
      manifest: the content of corpus.json.
    """
    header = yaml.safe_dump(_header(manifest), sort_keys=False)
    corpus = Corpus.open(directory, manifest=manifest)
    samples = tuple(
        Excerpt(f"Document {sample['document']:,}", tuple(sample["sentences"]), sample["cut"])
        for sample in sample_documents(corpus, tokenizer, _SAMPLES_AT, _SAMPLE_TOKENS)
    )
    splits = {split: split_counts(manifest["splits"][split]) for split in SPLITS}
    sections = [
        Section(manifest["name"], (Note(_about(manifest, tokenizer)), report.counts_table(splits)), level=1),
        Section("Sources", (Note(_SOURCES_NOTE), report.sources_table(manifest["sources"]))),
        *group_report.language_sections(splits),
        report.removal_sections(manifest)[0],
        *filter_sections(manifest)[:1],
        Section("Validation split", (Note(_held_out(manifest["settings"])),)),
        Section("How documents of train begin", samples),
        Section("Build", (*_build(command), report.settings_table(manifest["settings"]))),
    ]
    return f"---\n{header}---\n\n{markdown.render(sections)}"


def _header(manifest: Mapping) -> dict[str, Any]:
    counts = group_report.count_languages(manifest["splits"])
    languages = frequent_languages({code: count["tokens"] for code, count in counts.items()})
    documents = sum(split["documents"] for split in manifest["splits"].values())
    return {
        "pretty_name": manifest["name"],
        **({"language": languages} if languages else {}),
        **licenses.hub_fields(source["license"] for source in manifest["sources"]),
        "size_categories": [_size_category(documents)],
        "task_categories": ["fill-mask"],
        "tags": ["bert_jax"],
        "viewer": False,  # it does not read ArrayRecord, and would take corpus.json for data
    }


def _size_category(documents: int) -> str:
    """As in "1K<n<10K"."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    reached = next((i for i in range(len(bounds)) if documents < 10 ** (3 + i)), len(bounds))
    if reached == 0:
        return "n<1K"
    return f"n>{bounds[-1]}" if reached == len(bounds) else f"{bounds[reached - 1]}<n<{bounds[reached]}"


def _about(manifest: Mapping, tokenizer: Tokenizer) -> str:
    tokens = sum(split["tokens"] for split in manifest["splits"].values())
    case = "lower case" if tokenizer.lowercase else "cased"
    return (
        f"A corpus for pretraining with bert_jax: {tokens:,} tokens of {TOKENIZER} ({tokenizer.kind},"
        f" {tokenizer.vocab_size:,} pieces, {case}, {tokenizer.fingerprint[:12]}), stored as ids."
    )


def _held_out(settings: Mapping) -> str:
    if settings["validation_sources"]:
        chosen = f"The documents of the first {settings['validation_sources']} sources."
    elif settings["validation_documents"] is not None:
        chosen = f"{settings['validation_documents']:,} documents, chosen by a hash of their text."
    else:
        chosen = f"Documents chosen by a hash of their text, an expected share of {settings['validation_fraction']:g}."
    return chosen


def _build(command: str) -> list[Note | Command]:
    by = Note(f"Built by {describe_code(code(Path(data_prep.__file__).parent))}" + (", with" if command else "."))
    return [by, Command(command)] if command else [by]
