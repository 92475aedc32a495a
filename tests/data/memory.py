"""A corpus in memory whose token ids encode their positions."""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.batch import SpecialIds
from bert_jax.data.corpus import Corpus
from bert_jax.data.record import Record
from bert_jax.data.word_starts import pack_word_starts

FIRST = 10
"""Token id of the corpus's first token; the n-th has id FIRST + n."""
SPECIAL_IDS = SpecialIds(pad_id=0, cls_id=1, sep_id=2)
FORMATS = ["segment_pair", "sentence_pair", "sentence_order", "full_sentences", "doc_sentences"]
PAIRS = FORMATS[:3]


class MemoryCorpus(Corpus):
    """Documents given as lists of sentence lengths; records of at most `per_record` sentences of one document."""

    def __reduce__(self):
        return make_corpus, (self.documents, self.per_record, self.name, self.word_tokens, self.languages)

    def records(self, indices):
        """The records that the shards would contain."""
        records = []
        for index in indices:
            first, last = self.record_offsets[index], self.record_offsets[index + 1]
            tokens = np.arange(self.token_offsets[first], self.token_offsets[last], dtype=np.uint32) + FIRST
            ends = (self.token_offsets[first + 1 : last + 1] - self.token_offsets[first]).astype(np.uint16)
            document = int(np.searchsorted(self.document_offsets, first, "right")) - 1
            records.append(Record(document, 0, tokens.astype(np.uint32), ends))
        return records


def make_corpus(
    documents: list[list[int]],
    per_record: int = 5,
    name: str = "memory",
    word_tokens: int | None = None,
    languages: Sequence[str] = ("en",),
) -> MemoryCorpus:
    """A corpus with these sentence lengths, and a word of `word_tokens` tokens after the other; None: words unknown.

    The languages take turns; every second document has the source "b" and its index modulo 4 as its score.
    """
    corpus = object.__new__(MemoryCorpus)
    lengths = np.array([n for document in documents for n in document], np.uint16)
    record_offsets = [0]
    for document in documents:
        for start in range(0, len(document), per_record):
            record_offsets.append(record_offsets[-1] + min(per_record, len(document) - start))
    tokens = np.arange(lengths.sum(dtype=np.int64))
    begins = tokens % word_tokens == 0 if word_tokens else np.zeros(len(tokens), np.bool_)
    corpus.__dict__.update(
        documents=documents,
        per_record=per_record,
        word_tokens=word_tokens,
        word_starts=pack_word_starts(tokens, lengths, begins),
        directory="memory",
        split="train",
        name=name,
        identity=f"{name} {per_record}",
        vocab_size=1 << 31,
        sentence_lengths=lengths,
        token_offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        document_offsets=np.cumsum([0, *map(len, documents)]).astype(np.int64),
        record_offsets=np.array(record_offsets, np.int64),
        languages=languages,
        **_groups(documents, languages),
        num_tokens=int(lengths.sum(dtype=np.int64)),
    )
    return corpus


def _groups(documents: list[list[int]], languages: Sequence[str]) -> dict:
    groups: dict[tuple, dict] = {}
    document_groups = []
    for index, document in enumerate(documents):
        label = "ab"[index % 2], languages[index % len(languages)], float(index % 4) if index % 2 else None
        group = groups.setdefault(
            label, {**dict(zip(("source", "language", "score"), label, strict=True)), "documents": 0, "tokens": 0}
        )
        group["documents"] += 1
        group["tokens"] += sum(document)
        document_groups.append([*groups].index(label))
    return {"groups": [*groups.values()], "document_groups": np.array(document_groups, np.uint16)}


def random_documents(seed: int, count: int, longest: int = 30, most: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, longest, rng.integers(1, most)).tolist() for _ in range(count)]
