"""Vocabulary trimming: a model whose word embeddings and tokenizer have only the tokens that texts use.

Hidden states of texts whose pieces are kept are those of the whole model, and MLM logits those of the kept tokens.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from bert_jax.array_types import Int
from bert_jax.command.progress import progress_bar
from bert_jax.convert.conversion import check_destination, convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError, require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_texts
from bert_jax.storage import listing
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.tokenizers.trimming import TrimmedTokenizer, trim
from bert_jax.training.param_paths import map_with_paths, name_leaves

LINES_PER_CHUNK = 10_000
COMPARED_TEXTS, COMPARED_TOKENS = 64, 128
"""How many texts both models run on, and their largest number of tokens."""
VOCABULARY_AXIS = ("encoder/embeddings/word", "mlm/bias", "mlm/extra_columns")
"""Parameters with a row per token."""
TOLERANCE = 1e-6
"""Of MLM logits, relative to the largest one: a product with fewer columns may be computed in other blocks."""


class TextCounts(NamedTuple):
    """What the tokenizers make of the texts."""

    texts: int
    tokens: int
    unknown: int
    """Tokens that are the unknown token."""
    tokens_after: int
    unknown_after: int
    changed_texts: int
    """Texts that the smaller tokenizer splits into other pieces."""


class TrimResult(NamedTuple):
    """The smaller model beside the whole one."""

    rows: tuple[int, int]
    """Of the word embeddings, before and after."""
    parameters: tuple[int, int]
    counts: TextCounts
    compared_texts: int
    """Texts on which both models were run; 0 if none fits and has the same pieces."""
    differences: dict[str, float]
    """Largest difference of `hidden_states` and, with an MLM head, of `mlm_logits` of the kept tokens."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return self._asdict() | {"counts": self.counts._asdict()}

    def summary_lines(self) -> list[str]:
        """Sizes, and what was compared."""
        counts, (rows, rows_after), (size, size_after) = self.counts, self.rows, self.parameters
        other = f"{counts.changed_texts:,} have other pieces" if counts.changed_texts else "all have the same pieces"
        compared = ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in self.differences.items())
        return [
            f"vocabulary: {rows_after:,} of {rows:,} tokens ({rows_after / rows:.1%})",
            f"parameters: {size_after:,} of {size:,} ({size_after / size:.1%}), {4e-6 * size_after:.1f} MB in float32",
            f"texts: {counts.texts:,}, of which {other}; {counts.tokens:,} tokens before, {counts.tokens_after:,} "
            f"after; unknown {counts.unknown:,} before, {counts.unknown_after:,} after",
            f"largest difference to the whole model on {self.compared_texts} texts: {compared}"
            if self.differences
            else "no text fits and has the same pieces, so the models were not compared",
        ]


def trim_vocabulary(
    source: StoredPath, texts: Sequence[str], out: StoredPath, min_count: int = 1, *, progress: bool = False
) -> TrimResult:
    """Write a model with the tokens that texts use and those that its tokenizer needs.

    Args:
      source: any model that `bert-jax convert` reads, with a tokenizer that `tokenizers.trimming.trim` takes.
      texts: paths of UTF-8 files, which may have wildcards; every line is a text.
      out: the directory to create, in the native format.
      min_count: how often a token must occur in the texts to be kept.
      progress: whether a progress bar is shown.

    Raises:
      UserError: no such files, texts without a token, a tokenizer of another kind, or `out` exists or cannot be
        written.
    """
    require(min_count >= 1, f"--min-count is {min_count}: it must be at least 1")
    check_destination(out, "--out ")
    paths = find_files(texts)
    with input_formats.open_model(source) as opened:
        tokenizer = opened.loaded_tokenizer
        require(tokenizer is not None, f"{source} has no tokenizer: put its tokenizer.json in its directory")
        rows = opened.model.config.vocab_size
        require(
            tokenizer.vocab_size <= rows,
            f"{source}: its tokenizer has {tokenizer.vocab_size:,} tokens, its embeddings {rows:,} rows",
        )
        trimmed = trim(tokenizer, _used(tokenizer, paths, min_count, progress), str(source))
        require(
            len(trimmed.kept) < rows,
            f"{source}: the texts use or its tokenizer needs all {rows:,} tokens: nothing can be removed",
        )
        counts, sample = compare_pieces(tokenizer, trimmed, paths, progress)
        assert min_count > 1 or not counts.changed_texts, "the smaller tokenizer splits texts into other pieces"
        smaller = _smaller(opened, trimmed)
        differences, compared = _compare(opened.model, smaller.model, tokenizer, trimmed, sample)
        result = TrimResult(
            (rows, len(trimmed.kept)), (_size(opened.model), _size(smaller.model)), counts, compared, differences
        )
        with tempfile.TemporaryDirectory(prefix="bert_jax-") as scratch:
            file = epath.Path(scratch) / "tokenizer.json"
            trimmed.tokenizer.save(file)
            convert(dataclasses.replace(smaller, tokenizer_path=file), out, "bert-jax")
    return result


def find_files(texts: Sequence[str]) -> list[StoredPath]:
    """The files of paths and patterns, without repeats.

    Raises:
      UserError: one has no file.
    """
    found: list[StoredPath] = []
    for text in texts:
        path = to_path(text)
        require(not path.is_dir(), f"--text {text} is a directory: give its files, as in '{text}/*.txt'")
        try:
            here = [to_path(name) for name in listing.find_files(text)]
        except ValueError as error:
            raise UserError(f"--text {text} is not a glob: {str(error).lower()}") from error
        require(bool(here), f"--text {text} has no file: give text files, wildcards in quotes")
        found += here
    return list(dict.fromkeys(found))


def _chunks(paths: Sequence[StoredPath], progress: bool, name: str) -> Iterator[list[str]]:
    """The lines that are not empty, without spaces around them."""

    def lines() -> Iterator[str]:
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    except UnicodeDecodeError:
                        raise UserError(f"{path}, line {number} is not UTF-8: convert the file") from None
                    bar.update(len(line))
                    if text:
                        yield text

    total = sum(epath.Path(path).stat().length for path in paths)
    with progress_bar(name, total, "B", shown=progress) as bar:
        found = lines()
        while chunk := list(itertools.islice(found, LINES_PER_CHUNK)):
            yield chunk


def _used(tokenizer: Tokenizer, paths: Sequence[StoredPath], min_count: int, progress: bool) -> Int[np.ndarray, " n"]:
    """Ids that occur often enough."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for chunk in _chunks(paths, progress, "count tokens"):
        counts += np.bincount(tokenizer.encode_flat(chunk)[0], minlength=len(counts))
    names = ", ".join(map(str, paths[:3]))
    require(bool(counts.sum()), f"--text: there is no token in {names}: give files with text")
    used = np.flatnonzero(counts >= min_count)
    require(
        bool(len(used)),
        f"--min-count {min_count}: no token occurs this often in {names}, at most {counts.max():,} times: lower it",
    )
    return used


def compare_pieces(
    tokenizer: Tokenizer, trimmed: TrimmedTokenizer, paths: Sequence[StoredPath], progress: bool = False
) -> tuple[TextCounts, list[str]]:
    """Compare the pieces of all texts.

    Args:
      tokenizer: the whole one.
      trimmed: the smaller one.
      paths: of the texts.
      progress: whether a progress bar is shown.

    Returns:
      counts, and the first `COMPARED_TEXTS` different texts with the same pieces and at most `COMPARED_TOKENS` tokens.
    """
    totals, sample = np.zeros(len(TextCounts._fields), np.int64), dict[str, None]()
    for chunk in _chunks(paths, progress, "compare pieces"):
        (ids, lengths), (new_ids, new_lengths) = (one.encode_flat(chunk) for one in (tokenizer, trimmed.tokenizer))
        again = trimmed.kept[new_ids]
        texts = zip(*(np.split(x, np.cumsum(n)[:-1]) for x, n in ((ids, lengths), (again, new_lengths))), strict=True)
        same = np.array([np.array_equal(before, after) for before, after in texts])
        unknown = tokenizer.unk_id
        totals += [len(chunk), len(ids), (ids == unknown).sum(), len(again), (again == unknown).sum(), (~same).sum()]
        fits = same & (lengths > 0) & (lengths <= COMPARED_TOKENS - 2)
        sample |= dict.fromkeys(chunk[i] for i in np.flatnonzero(fits)[: COMPARED_TEXTS - len(sample)])
    return TextCounts(*totals.tolist()), list(sample)


def _smaller(source_model: SourceModel, trimmed: TrimmedTokenizer) -> SourceModel:
    """The model with the kept rows; ids in its settings are renumbered."""
    model, kept = source_model.model, trimmed.kept
    params = map_with_paths(
        lambda path, leaf: np.asarray(leaf)[kept] if path in VOCABULARY_AXIS else np.asarray(leaf), model.params
    )
    new_ids = {int(old): new for new, old in enumerate(kept)}
    settings = {
        name: new_ids.get(value) if name.endswith("_token_id") and isinstance(value, int) else value
        for name, value in source_model.hf_config.items()
    }
    rows = model.config.vocab_size
    return dataclasses.replace(
        source_model,
        model=model._replace(config=dataclasses.replace(model.config, vocab_size=len(kept)), params=params),
        hf_model=None,
        optimizer_state=None,
        hf_config=settings,
        notes=(*source_model.notes, f"{rows - len(kept):,} of {rows:,} tokens were removed from the vocabulary."),
    )


def _compare(
    whole: NativeModel, smaller: NativeModel, tokenizer: Tokenizer, trimmed: TrimmedTokenizer, texts: Sequence[str]
) -> tuple[dict[str, float], int]:
    """Largest differences of hidden states and MLM logits, and the number of texts that were compared."""
    length = min(COMPARED_TOKENS, whole.config.max_positions)
    names = ["hidden_states", *(["mlm_logits"] if whole.heads.mlm else [])]
    models = [
        LoadedModel(one.config, one.heads, jax.tree.map(np.asarray, one.params), its_tokenizer)
        for one, its_tokenizer in ((whole, tokenizer), (smaller, trimmed.tokenizer))
    ]
    before, after = (
        [row for row in encode_texts(texts, model.tokenizer, length) if row is not None] for model in models
    )
    differences: dict[str, float] = {}
    pads = tokenizer.pad_id, trimmed.tokenizer.pad_id
    for first, second in zip(
        *(batches(rows, pad) for rows, pad in zip((before, after), pads, strict=True)), strict=True
    ):
        assert np.array_equal(first.input_ids, trimmed.kept[second.input_ids])
        found, expected = capture(models[1], second, names), capture(models[0], first, names)
        if whole.heads.mlm:
            expected["mlm_logits"] = expected["mlm_logits"][..., trimmed.kept]
        for name in names:
            here = float(np.abs(found[name] - expected[name]).max())
            assert here <= TOLERANCE * max(1.0, np.abs(expected[name]).max()), f"{name} differ by {here:.1e}"
            differences[name] = max(differences.get(name, 0.0), here)
    return differences, len(before)


def _size(model: NativeModel) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in name_leaves(model.params).values())
