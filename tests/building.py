"""Shared by tests of builds: text, a tokenizer, and a build with small blocks."""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer, wordpiece
from data_prep import sources
from data_prep.build_options import BuildOptions
from data_prep.builder.engines.local import LocalEngine
from data_prep.builder.pipeline import BuildRequest, build

WORDS = ["the", "a", "river", "mountain", "sings", "falls", "over", "quick", "slow", "light", "dark", "stone"]


def make_sentence(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(3, 12)))).capitalize() + "."


def make_documents(seed: int, count: int, paragraphs: int = 1) -> list[str]:
    """Documents of one or several paragraphs, separated by blank lines."""
    rng = np.random.default_rng(seed)
    return [
        "\n\n".join(
            " ".join(make_sentence(rng) for _ in range(rng.integers(1, 6)))
            for _ in range(rng.integers(1, paragraphs + 1))
        )
        for _ in range(count)
    ]


def make_tokenizer(more_letters: str = "") -> Tokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz" + more_letters
    pieces = [*SPECIAL_TOKENS, *WORDS, ".", *letters, *(f"##{letter}" for letter in letters)]
    return wordpiece(list(dict.fromkeys(pieces)), True, "the test's vocabulary")


def parse(spec: str, block_bytes: int = 2000, range_bytes: int = sources.RANGE_BYTES) -> sources.Source:
    """A source with small blocks, and small ranges if wanted."""
    return dataclasses.replace(sources.parse(spec), block_bytes=block_bytes, range_bytes=range_bytes)


def run(
    directory,
    specs,
    options: BuildOptions | None = None,
    engine=None,
    block_bytes: int = 2000,
    range_bytes: int = sources.RANGE_BYTES,
    **request,
) -> dict:
    """Builds a corpus from SPECs; returns the content of corpus.json."""
    options = options or BuildOptions(validation_fraction=0.1)
    sources_to_read = [parse(spec, block_bytes, range_bytes) for spec in specs]
    build_request = BuildRequest(sources_to_read, make_tokenizer(), directory, "tiny", options, **request)
    return build(build_request, engine or LocalEngine(1))


@contextlib.contextmanager
def interrupted(function: str) -> Iterator[None]:
    """As by Ctrl-C where a function of `data_prep.builder` is called."""

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"data_prep.builder.{function}", stop)
        yield


def texts(directory) -> list[str]:
    """All documents of a corpus as text, sorted."""
    decoded = []
    for split in ("train", "validation"):
        corpus = Corpus.open(directory, split)
        tokenizer = Tokenizer.load(pathlib.Path(directory) / "tokenizer.json")
        bounds = itertools.pairwise(corpus.document_offsets.tolist())
        decoded += [tokenizer.decode(corpus.read_sentences(a, b)) for a, b in bounds]
    return sorted(decoded)


def normal(text: str) -> str:
    """Text as it is decoded."""
    return " ".join(text.lower().split()).replace(" .", ".")


def files(directory) -> dict[str, bytes]:
    """Name and content of every file."""
    return {path.name: path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir())}
