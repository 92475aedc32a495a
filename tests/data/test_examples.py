"""Examples of every format against a slow, simple reference implementation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bert_jax.config import DataConfig
from bert_jax.data.examples import CorpusLayout, make_examples
from bert_jax.data.hash_random import make_key
from bert_jax.data.word_starts import LONG_SENTENCE_TOKENS, WordStarts, word_start_offsets
from tests.data.memory import FORMATS, PAIRS, make_corpus, random_documents

ALPHA = 1e-4
WORD = 2**64 - 1


class HashRandom:
    """The counter-based generator with Python integers: SplitMix64 of a combined key."""

    def __init__(self, *words: int):
        self.key, self.count = 0, 0
        for word in words:
            self.key = self.hash64(self.hash_input(self.key, word))

    @classmethod
    def folded(cls, *words: int, extra: tuple[int, int]) -> "HashRandom":
        """The key of some words combined with two more, hashed once."""
        draws = cls(*words)
        draws.key = cls.hash64(cls.hash_input(cls.hash_input(draws.key, extra[0]), extra[1]))
        return draws

    @staticmethod
    def hash_input(a: int, b: int) -> int:
        return (a * 0x9E3779B97F4A7C15 + b + 1) & WORD

    @staticmethod
    def hash64(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    def next(self) -> int:
        self.count += 1
        return self.hash64(self.hash_input(self.key, self.count))

    def uniform_int(self, bound: int) -> int:
        return ((self.next() >> 32) * bound) >> 32

    def bernoulli(self, rate: float) -> bool:
        return (self.next() >> 11) < round(rate * 2**53)


def flat(lists) -> list:
    return list(itertools.chain.from_iterable(lists))


def texts_of(documents: list[list[int]]) -> list[list[list[int]]]:
    """Documents of sentences of tokens; a token is its number in the corpus."""
    texts, token = [], 0
    for document in documents:
        texts.append([])
        for length in document:
            texts[-1].append(list(range(token, token + length)))
            token += length
    return texts


def starts(texts, token: int) -> bool:
    """Whether a sentence begins with a token."""
    return any(sentence[0] == token for document in texts for sentence in document)


def fitting(tokens: list[int], most: int, length: int, word_tokens: int | None) -> int:
    """Size of a piece at the front of what is left of a sentence of `length` tokens: at most `most`."""
    if word_tokens and length > LONG_SENTENCE_TOKENS:
        return next((n for n in range(most, most // 2, -1) if tokens[n] % word_tokens == 0), most)
    return most


def reference_pairs(documents, chunk, data, seq_len, key, word_tokens, per_record=5):
    """(A, B, label, whether B is random) of all pairs of a chunk of sentences, and the tokens cut away.

    The recipe of google-research/bert create_pretraining_data.py, with sentences as lists of tokens.
    """
    room, pairs, truncated, sentence = seq_len - 3, [], 0, 0
    two = data.format == "sentence_pair"
    texts = texts_of(documents)
    for number, document in enumerate(texts):
        inside = [s for s in range(sentence, sentence + len(document)) if chunk[0] <= s < chunk[1]]
        # Tokens, and the length of the sentence if it is longer than the room, else 0.
        sizes = [len(document[s - sentence]) for s in inside]
        waiting = [(document[s - sentence], size * (size > room)) for s, size in zip(inside, sizes, strict=True)]
        draws, once = HashRandom(*key, inside[0] if inside else 0), HashRandom.folded(*key, extra=(0xD0C, number))
        sentence += len(document)
        unused = 0
        target = room
        if data.format != "sentence_pair" and once.bernoulli(data.short_example_rate):
            target = 2 + once.uniform_int(room - 1)
        piece = room // 2 if two else min(math.ceil(room / 2), max(8, min(32, math.ceil(target / 2))))
        while waiting:
            group, size, pieces, full = [], 0, 0, False
            while waiting and not full and (len(group) < 2 if two else size < target):
                tokens, is_long = waiting.pop(0)
                if is_long:
                    most = len(tokens) if two else min(len(tokens), target - size if group else max(target, piece))
                    pieces = pieces - 1 if pieces > 1 and not two else math.ceil(most / piece)
                    most = math.ceil(most / pieces)
                    if most < len(tokens):
                        most, full = fitting(tokens, most, is_long, word_tokens), pieces == 1
                        waiting.insert(0, (tokens[most:], is_long))
                    else:
                        pieces = 0
                    tokens = tokens[:most]
                group.append((tokens, is_long))
                size += len(tokens)
            cut = 1 + draws.uniform_int(len(group) - 1) if len(group) >= 2 and not two else 1
            a, b = (flat(tokens for tokens, _ in part) for part in (group[:cut], group[cut:]))
            label = 0
            random = len(group) == 1 or (data.format != "sentence_order" and draws.bernoulli(0.5))
            swapped = data.format == "sentence_order" and len(group) > 1 and draws.bernoulli(0.5)
            if random:
                label, returned = 1, group[cut:]
                while returned:
                    tokens, is_long = returned.pop()
                    if (
                        is_long
                        and waiting
                        and waiting[0][0][:1] == [tokens[-1] + 1]
                        and not starts(texts, waiting[0][0][0])
                    ):
                        waiting[0] = (tokens + waiting[0][0], is_long)
                    else:
                        waiting.insert(0, (tokens, is_long))
                if unused <= 0:
                    other = draws.uniform_int(len(texts) - 1)
                    source = texts[other + (other >= number)]
                    record = draws.uniform_int(len(source)) // per_record * per_record
                    source = source[record : record + per_record]
                    unused = sum(map(len, source))
                b, at = [], draws.uniform_int(len(source))
                least, skip = 0 if two else target - len(a), 0
                if len(source[at]) > room:
                    skip = draws.uniform_int(len(source[at]) - piece + 1)
                    back = min(skip, piece)
                    skip += fitting(source[at][skip - back :], back, len(source[at]), word_tokens) - back
                full = False
                while not b or (at < len(source) and len(b) < least and not full):
                    most, tokens = max(least, piece) if not b else least - len(b), source[at][skip:]
                    if full := len(source[at]) > room and len(tokens) > most:
                        tokens = tokens[: fitting(tokens, most, len(source[at]), word_tokens)]
                    b = b + tokens
                    at, skip = at + 1, 0
                unused -= len(b)
            before = len(a), len(b)
            while len(a) + len(b) > room:
                longer = a if len(a) > len(b) else b
                longer.pop(0 if draws.bernoulli(0.5) else -1)
            truncated += before[0] - len(a) + (not random) * (before[1] - len(b))
            pairs.append((b, a, 1, random) if swapped else (a, b, label, random))
    return pairs, truncated


def reference_single_segments(documents, chunk, data, seq_len, word_tokens):
    """Examples as lists of parts, one per document, of tokens. Separators count as tokens do."""
    budget, examples, sentence = seq_len - 2, [], 0
    open_ = []

    def size():
        return sum(map(len, open_)) + max(len(open_) - 1, 0)

    def close():
        nonlocal open_
        if open_:
            examples.append(open_)
        open_ = []

    for document in texts_of(documents):
        begun = False
        for tokens in document:
            inside, sentence = chunk[0] <= sentence < chunk[1], sentence + 1
            if not inside:
                continue
            if not begun and data.format == "doc_sentences":
                close()
            new_part = not begun
            begun = True
            left = tokens
            while left:
                separator = 1 if new_part and open_ else 0
                room = budget - size() - separator
                if len(left) <= room:
                    taken = len(left)
                elif open_ and not (data.example_end == "row" and room > 0):
                    close()
                    continue
                else:
                    taken = room if data.example_end == "row" else fitting(left, room, len(tokens), word_tokens)
                if new_part or not open_:
                    open_.append([])
                open_[-1] = open_[-1] + left[:taken]
                new_part, left = False, left[taken:]
                if left:
                    close()
    close()
    return examples


def shown(example, corpus) -> tuple[list[int], list[int]]:
    """Tokens of both segments, found by sentences and by the window's offsets, which must agree."""
    found = []
    for side in "ab":
        size = int(example[f"{side}_tokens"])
        start, stop = int(example[f"{side}_start"]), int(example[f"{side}_stop"])
        first = int(corpus.token_offsets[start]) + int(example[f"{side}_skip"])
        if size:
            assert start < stop and first + size <= corpus.token_offsets[stop]
            # The kept tokens begin in or after the first sentence; single segments begin in it.
            assert example["b_tokens"] or corpus.token_offsets[start + 1] > first
            assert example["b_tokens"] or corpus.token_offsets[stop - 1] < first + size
        found.append(list(range(first, first + size)))
    return tuple(found)


def examples_of(corpus, data, seq_len, chunks, key=(7, 1), salt=5):
    lengths, records = corpus.sentence_lengths, corpus.record_offsets
    words = WordStarts(corpus.word_starts, records, word_start_offsets(lengths, records))
    layout = CorpusLayout(
        lengths, corpus.document_offsets, records, words, np.zeros(0, np.uint16), np.zeros(0, np.uint64)
    )
    return make_examples(layout, np.array(chunks, np.int64), data, seq_len, make_key(*key), np.uint64(salt))


def check_offsets(examples, corpus, chunks):
    """a_offset and b_offset count tokens of the chunks, concatenated."""
    window = np.concatenate([np.arange(*corpus.token_offsets[list(chunk)]) for chunk in chunks])
    for example in examples:
        for side, tokens in zip("ab", shown(example, corpus), strict=True):
            offset = int(example[f"{side}_offset"])
            if tokens and offset >= 0:
                assert window[offset : offset + len(tokens)].tolist() == tokens


def check_against_reference(documents, data, seq_len, chunks, key, word_tokens=None):
    """Makes the examples of chunks, compares all of them, and returns them with the documents that each shows."""
    corpus = make_corpus(documents, word_tokens=word_tokens)
    examples, truncated_tokens, forced_random = examples_of(corpus, data, seq_len, chunks, key)
    if data.format in PAIRS:
        references = [reference_pairs(documents, chunk, data, seq_len, key, word_tokens) for chunk in chunks]
        expected = [(a, b, label, random, 3) for pairs, _ in references for a, b, label, random in pairs]
        truncated = sum(tokens for _, tokens in references)
    else:
        parts = flat(reference_single_segments(documents, chunk, data, seq_len, word_tokens) for chunk in chunks)
        expected, truncated = [(flat(one), [], -1, True, len(one) + 1) for one in parts], 0
    assert len(examples) == len(expected) and truncated_tokens == truncated
    seen = []
    for example, (a, b, label, random, separators) in zip(examples, expected, strict=True):
        assert shown(example, corpus) == (a, b) and example["pair_label"] == label
        assert example["length"] == len(a) + len(b) + separators <= seq_len
        assert (example["b_offset"] < 0) == random and example["a_offset"] >= 0
        seen += a if random else a + b
    check_offsets(examples, corpus, chunks)
    assert len(seen) == len(set(seen)) == corpus.num_tokens - truncated
    ids = examples["example_id"]
    assert len(np.unique(ids)) == len(ids) and ids.min() >= 0
    if data.format == "sentence_order":
        assert forced_random == sum(random for *_, random, _ in expected)
    return examples, truncated, expected


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("seq_len", "short", "end"), [(32, 0.1, "row"), (64, 0.5, "sentence"), (8, 1.0, "row")])
def test_examples_equal_the_reference(form, seq_len, short, end):
    """Two chunks in reverse order, split inside a document."""
    documents = random_documents(seq_len, 60)
    sentences, cut = sum(map(len, documents)), sum(map(len, documents[:20])) + 1
    data = DataConfig(format=form, short_example_rate=short, example_end=end)
    examples, truncated, expected = check_against_reference(
        documents, data, seq_len, [(cut, sentences), (0, cut)], (7, 1)
    )
    assert len(examples) > 60
    assert {*examples["pair_label"].tolist()} == ({0, 1} if form in PAIRS else {-1})
    assert form not in ("segment_pair", "sentence_order") or truncated
    assert form in PAIRS or any(separators > 2 for *_, separators in expected) == (form == "full_sentences")


documents_of_any_kind = st.lists(
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=8), min_size=2, max_size=8
)


@settings(max_examples=100, deadline=None)
@given(documents_of_any_kind, st.data())
def test_odd_documents(documents, data):
    """One sentence, one token, longer than a row; up to four chunks."""
    config = DataConfig(
        format=data.draw(st.sampled_from(FORMATS)),
        short_example_rate=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        example_end=data.draw(st.sampled_from(["sentence", "row"])),
    )
    sentences = sum(map(len, documents))
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, sentences), max_size=3)) - {sentences}), sentences]
    key, word_tokens = (data.draw(st.integers(0, 2**31 - 1)), 3), data.draw(st.sampled_from([None, 1, 2, 3, 7, 30]))
    seq_len, chunks = data.draw(st.integers(8, 70)), list(itertools.pairwise(bounds))
    check_against_reference(documents, config, seq_len, chunks, key, word_tokens)


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("seq_len", [32, 128])
def test_text_without_sentence_marks(form, seq_len):
    """Documents of one long sentence: nearly all of their tokens are in an example, and half of the pairs are true."""
    corpus = make_corpus([[700 + 13 * i] for i in range(300)])
    examples, truncated, singles = examples_of(corpus, DataConfig(format=form), seq_len, [(0, 300)])
    assert truncated < 0.01 * corpus.num_tokens and singles < 0.1 * len(examples)
    assert examples["pair_label"].mean() < 0.56
    shares = np.bincount(examples["a_skip"][examples["a_tokens"] > 0] * 4 // 700, minlength=4)
    assert shares[:4].min() > 0.5 * shares[:4].max()  # from all parts of the sentences


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seq_len", [64, 128])
def test_long_sentences_are_cut_between_words(form, seq_len):
    """Words of 7 tokens. Truncation cuts one, and so do 1 in 1,000 random segments that begin with the first words."""
    corpus = make_corpus([[700 + 13 * i] for i in range(100)], word_tokens=7)
    examples, truncated, _ = examples_of(corpus, DataConfig(format=form, short_example_rate=0.0), seq_len, [(0, 100)])
    assert truncated < 0.02 * corpus.num_tokens and np.median(examples["length"]) > seq_len - 16
    shown = examples[examples["length"] < seq_len] if form in PAIRS else examples
    for side in "ab" if form in PAIRS else "a":
        first = corpus.token_offsets[shown[f"{side}_start"]] + shown[f"{side}_skip"]
        for ends in (first, first + shown[f"{side}_tokens"]):
            inside = ends[~np.isin(ends, corpus.token_offsets)]
            assert len(inside) > 0.5 * len(examples) and (inside % 7 > 0).mean() < 0.005


@pytest.mark.parametrize("form", ["segment_pair", "sentence_order"])
def test_share_of_negatives(form):
    """0.5 + 0.5 P(chunk of one sentence), by a two-sided binomial test at alpha 1e-4.

    Sentences of 10 tokens into 12 tokens of room: a chunk takes two sentences, unless only one is left.
    """
    corpus = make_corpus([[10] * 5] * 4000)
    examples, _, forced_random = examples_of(corpus, DataConfig(format=form, short_example_rate=0.0), 15, [(0, 20000)])
    random = examples["b_offset"] < 0
    single = np.minimum(examples["a_start"], np.where(random, 10**9, examples["b_start"])) % 5 == 4
    assert forced_random == single.sum() > 1000 and (examples["pair_label"][single] == 1).all()
    label = examples["pair_label"][~single]
    assert stats.binomtest(int(label.sum()), len(label), 0.5).pvalue > ALPHA
    expected = 0.5 + 0.5 * single.mean()
    assert 0.55 < expected < 0.7
    bound = stats.norm.isf(ALPHA / 2) * 0.5 * np.sqrt(len(label)) / len(examples)
    assert abs(examples["pair_label"].mean() - expected) < bound


def test_random_documents_are_uniform():
    """Where random Bs come from: chi-square at alpha 1e-4 over the other documents, seen from the first, whose random
    Bs come from one record in each epoch, or two.
    """
    corpus, found = make_corpus([[3] * 60] * 12, per_record=30), []
    for epoch in range(800):
        examples = examples_of(corpus, DataConfig(short_example_rate=0.0), 16, [(0, 720)], (1, epoch))[0]
        starts = examples[(examples["b_offset"] < 0) & (examples["a_start"] < 60)]["b_start"]
        assert len(np.unique(starts // 30)) <= 2
        found.append(starts[:1])
    starts = np.concatenate(found)
    counts = np.bincount(starts // 60, minlength=12)
    assert counts[0] == 0 and counts.sum() > 500
    assert stats.chisquare(counts[1:]).pvalue > ALPHA
    assert stats.chisquare(np.bincount(starts % 60, minlength=60)).pvalue > ALPHA


def test_salt_and_place_name_an_example():
    corpus = make_corpus(random_documents(0, 50))
    chunks = [(0, len(corpus.sentence_lengths))]

    def ids(salt, data=DataConfig()):  # noqa: B008
        return examples_of(corpus, data, 32, chunks, (0,), salt)[0]["example_id"]

    assert not np.isin(ids(1), ids(2)).any()
    order = set(ids(1, DataConfig(format="sentence_order")).tolist())
    assert order & set(ids(1).tolist())  # the same first sentence, whatever becomes of it
