"""Token tagging as the data of a task: named entities, parts of speech, any tag per word."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.array_types import Float
from bert_jax.errors import require
from bert_jax.finetune.encoding import encode_sentences
from bert_jax.finetune.metrics import are_span_tags, span_counts, span_f1
from bert_jax.finetune.options import FileOptions
from bert_jax.finetune.split_files import find_splits, read_files
from bert_jax.finetune.tables import Columns, check_unicode
from bert_jax.finetune.tagging import TaggedSentence, read_conll, tag_names
from bert_jax.finetune.task_data import Metrics, Split, write_json_lines
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

ROWS = (".parquet", ".jsonl")
"""Endings of files with a sentence in each row: a list of words and a list of tags."""
ENDINGS = (*ROWS, ".conll", ".conllu", ".conllup", ".txt", ".tsv", ".bio", ".iob2")
NO_TOKEN_TAG = "O"
"""Prediction for words without a token, among them those after the last token of a truncated sentence."""


class TaggingData:
    """A `TaskData` whose examples are sentences with a tag per word.

    The score is the F1 of spans if all training tags are those of spans (`metrics.are_span_tags`), else the accuracy of
    words.
    """

    kind = "tagging"

    def __init__(self, sentences: dict[str, list[TaggedSentence]], tokenizer: Tokenizer, max_length: int):
        """Encode all splits.

        Args:
          sentences: of train and of held-out splits.
          tokenizer: of the model.
          max_length: tokens of a sentence, special ones included.

        Raises:
          UserError: the training split has fewer than two tags.
        """
        self._sentences = sentences
        self.labels = tag_names(sentences["train"])
        require(len(self.labels) >= 2, f"all words of the training split have the tag '{self.labels[0]}'")
        self.has_spans = are_span_tags(self.labels)
        self.main_metrics = ("f1",) if self.has_spans else ("accuracy",)
        encoded = {
            name: encode_sentences(of_split, self.labels, tokenizer, max_length) for name, of_split in sentences.items()
        }
        self.train = encoded.pop("train")[0]
        # Test files without published tags have a placeholder for all.
        self.splits = {
            name: Split(examples, name == "dev", name == "dev" or len(tag_names(sentences[name])) > 1)
            for name, (examples, _) in encoded.items()
        }
        self._first_tokens = {name: first for name, (_, first) in encoded.items()}
        self._baselines = {name: self._best_constant(name) for name, split in self.splits.items() if split.is_scored}

    def metrics(self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None) -> Metrics:
        """Accuracy over words and, for spans, precision, recall and F1. Logits are of tokens, [T, C]."""
        return self._scores(split, list(self._predicted_tags(split, logits)))

    def class_f1(self, split: str, logits: np.ndarray) -> Metrics:
        """None: classes are of words."""
        return {}

    def baseline(self, split: str) -> Metrics:
        """The metrics of the best constant tag; main metrics of 1 if all words of the split have the same tag."""
        return self._baselines[split]

    def _best_constant(self, split: str) -> Metrics:
        counts = Counter(tag for sentence in self._sentences[split] for tag in sentence.tags)
        if len(counts) == 1:
            return dict.fromkeys(self.main_metrics, 1.0)
        known = [tag for tag, _ in counts.most_common() if tag in self.labels] or [self.labels[0]]
        constants = known if self.has_spans else known[:1]
        scores = [self._scores(split, [(tag,) * len(s.words) for s in self._sentences[split]]) for tag in constants]
        return max(scores, key=lambda metrics: metrics[self.main_metrics[0]])

    def item_scores(self, split: str, logits: np.ndarray) -> dict[str, Float[np.ndarray, "2 E"]]:
        """Of accuracy, with the words of each sentence as weights; of spans, also of F1."""
        expected, predictions = [one.tags for one in self._sentences[split]], self._predicted_tags(split, logits)
        pairs = list(zip(expected, predictions, strict=True))
        right = [(sum(map(str.__eq__, *pair)), len(pair[0])) for pair in pairs]
        found = {"accuracy": np.array(right, np.float64).T}
        if self.has_spans:
            spans, of_gold, of_predicted = span_counts(*zip(*pairs, strict=True)).T.astype(np.float64)
            found["f1"] = np.stack([2 * spans, of_gold + of_predicted])
        return found

    def write_predictions(self, directory: StoredPath, logits: Mapping[str, np.ndarray]) -> None:
        """Write ``SPLIT.jsonl``: words, tags and predicted tags of each sentence."""
        for split, of_tokens in logits.items():
            pairs = zip(self._sentences[split], self._predicted_tags(split, of_tokens), strict=True)
            lines = [{"words": s.words, "tags": s.tags, "predictions": predicted} for s, predicted in pairs]
            write_json_lines(directory / f"{split}.jsonl", lines)

    def _scores(self, split: str, predictions: Sequence[Sequence[str]]) -> Metrics:
        expected = [sentence.tags for sentence in self._sentences[split]]
        pairs = zip(np.concatenate(expected), np.concatenate(predictions), strict=True)
        accuracy = float(np.mean([tag == predicted for tag, predicted in pairs]))
        return (span_f1(expected, predictions) if self.has_spans else {}) | {"accuracy": accuracy}

    def _predicted_tags(self, split: str, logits: np.ndarray) -> Iterator[tuple[str, ...]]:
        first = self._first_tokens[split]
        best = logits.argmax(-1)[np.maximum(first, 0)]
        named = [self.labels[i] if token >= 0 else NO_TOKEN_TAG for i, token in zip(best, first, strict=True)]
        start = 0
        for sentence in self._sentences[split]:
            yield tuple(named[start : start + len(sentence.words)])
            start += len(sentence.words)


def read_tagging(directory: StoredPath, options: FileOptions) -> dict[str, list[TaggedSentence]]:
    """The sentences of train, dev and, if there is one, test.

    Raises:
      UserError: a missing split, a file that is neither in columns nor has rows of words and tags, or an option for
        files of the other form.
    """
    files = find_splits(directory, ENDINGS)
    in_rows = {path.suffix in ROWS for paths in files.values() for path in paths}
    require(len(in_rows) == 1, f"{directory} has files in columns and files with a row for a sentence: give one form")
    if in_rows == {True}:
        return _read_rows(files, options)
    defaults = FileOptions()
    for name in ("text_columns", "label_column"):
        flag = f"--{name.replace('_', '-')}"
        require(
            getattr(options, name) == getattr(defaults, name),
            f"{flag} is for files with a sentence in each row ({', '.join(ROWS)}): use --word-column and --tag-column",
        )
    return {
        split: [sentence for path in paths for sentence in read_conll(path, options.tag_column, options.word_column)]
        for split, paths in files.items()
    }


def _read_rows(files: Mapping[str, Sequence[StoredPath]], options: FileOptions) -> dict[str, list[TaggedSentence]]:
    """Sentences of files with a list of words and a list of tags in each row, as datasets stores conll2003."""
    words = options.text_columns or ("tokens",)
    require(len(words) == 1, f"--text-columns has {len(words)} names: tagging needs the column of the words")
    tables = read_files(files, Columns(words, None, ": give the one with the words as --text-columns"))
    where, first = tables.rows["train"][0]
    found = [name for name in first if name.endswith("tags") and name != words[0]]
    column = options.label_column
    if column == FileOptions().label_column and column not in first and len(found) == 1:
        column = found[0]
    require(
        column in first and column != words[0],
        f"{where} has the columns {', '.join(first)}: give the one with the tags as --label-column",
    )
    names = tables.class_names.get(column, ())
    return {
        split: [
            _sentence(where, row.get(words[0]), row.get(column), names, split.startswith("test")) for where, row in rows
        ]
        for split, rows in tables.rows.items()
    }


def _sentence(where: str, words: Any, tags: Any, names: Sequence[str], may_lack_tags: bool) -> TaggedSentence:
    """A row as a sentence; tags that are numbers are indices of `names`, if the file has them.

    Without tags, or with -1 only, all words of a test split get `NO_TOKEN_TAG`.
    """
    if may_lack_tags and isinstance(words, list) and (tags is None or tags == [-1] * len(words)):
        tags = [NO_TOKEN_TAG] * len(words)
    require(
        isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) > 0,
        f"{where} has no list of words and list of as many tags: remove it",
    )
    require(
        all(isinstance(word, str) and word.strip() for word in words)
        and all(isinstance(tag, str) or (type(tag) is int and tag in range(len(names) or tag + 1)) for tag in tags),
        f"{where} has a word that is no text, or a tag that is neither text nor the index of a class: remove it",
    )
    check_unicode(where, *words, *filter(lambda tag: isinstance(tag, str), tags))
    return TaggedSentence(tuple(words), tuple(names[tag] if names and type(tag) is int else str(tag) for tag in tags))
