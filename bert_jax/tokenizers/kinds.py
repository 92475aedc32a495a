"""Names of special tokens, text preprocessing, and tokenizers of the `tokenizers` library made from their pieces."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from bert_jax.errors import UserError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTE_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""RoBERTa's, in the order of ids, except that RoBERTa's <mask> is the last id."""
ROLE_NAMES = {
    "pad": (PAD, "<pad>"),
    "unk": (UNK, "<unk>"),
    "cls": (CLS, "<s>"),
    "sep": (SEP, "</s>"),
    "mask": (MASK, "<mask>"),
}
"""Token of each role: in BERT, and in RoBERTa and SentencePiece."""
CONTROL_TOKENS = frozenset(name for names in ROLE_NAMES.values() for name in names)
"""Tokens that are plain text in a corpus, so that a document cannot contain control tokens."""

CONTINUATION = "##"
WORD_START = "▁"
BYTE_SPACE = "Ġ"
"""The character for a space in GPT-2's byte alphabet."""

# Longer words become unknown. The limit of transformers, so that exported models get the same ids there;
# google-research/bert has 200.
MAX_CHARS_PER_WORD = 100

_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token

Merges = Sequence[tuple[str, str]]


def missing_special_tokens(vocab: Mapping[str, int], is_wordpiece: bool) -> list[str]:
    """Tokens to add for roles that a vocabulary lacks: BERT's if it is WordPiece or has one of them, else RoBERTa's."""
    style = 0 if is_wordpiece or any(names[0] in vocab for names in ROLE_NAMES.values()) else 1
    return [names[style] for names in ROLE_NAMES.values() if not any(name in vocab for name in names)]


def find_role_ids(vocab: Mapping[str, int], is_wordpiece: bool, origin: str) -> dict[str, int]:
    """The ids of the five roles; `origin` names the vocabulary in messages.

    Raises:
      UserError: a role's token is missing.
    """
    if missing := missing_special_tokens(vocab, is_wordpiece):
        raise UserError(
            f"{origin}: the vocabulary has no {', '.join(missing)} token; `bert-data tokenizer --from {origin}"
            " --add-special-tokens --out tokenizer.json` appends what is missing"
        )
    return {role: vocab[next(name for name in names if name in vocab)] for role, names in ROLE_NAMES.items()}


def to_added_tokens(names: Iterable[str], is_wordpiece: bool) -> list[AddedToken]:
    """Special tokens for the library.

    If pieces include the space before their word, the mask token does too, as in RoBERTa.
    """
    strips = () if is_wordpiece else ROLE_NAMES["mask"]
    return [AddedToken(name, lstrip=name in strips, special=True, normalized=False) for name in names]


def bert_normalizer(
    lowercase: bool, strip_accents: bool | None = None, split_chinese: bool = True
) -> normalizers.Normalizer:
    """BERT's normalization: removes control characters, separates CJK characters, folds case and accents.

    Args:
      lowercase: lower-case.
      strip_accents: None: the value of `lowercase`.
      split_chinese: put spaces around CJK characters, so that each is a word.
    """
    strip_accents = lowercase if strip_accents is None else strip_accents
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )


class AlbertPreprocessing(NamedTuple):
    """ALBERT's text preprocessing before SentencePiece, which the .model file does not describe.

    Replaces quotes `` and '' by ", removes compatibility forms and accents, and lower-cases, as `AlbertTokenizer` of
    transformers 5 does. google-research/albert tokenization.py has the same steps, but also splits a piece of digits
    and a comma again, which transformers' compiled tokenizer never did, and keeps marks of combining class 0.
    """

    lowercase: bool = True
    """do_lower_case in transformers."""
    keep_accents: bool = False

    def __call__(self, text: str) -> str:
        """Preprocess a text."""
        return _albert_normalizer(self).normalize_str(text)


@functools.lru_cache(maxsize=4)
def _albert_normalizer(preprocessing: AlbertPreprocessing) -> normalizers.Normalizer:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not preprocessing.keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if preprocessing.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)


def is_uncased_vocab(pieces: Iterable[str]) -> bool:
    """Whether no piece except the special tokens has an upper-case letter."""
    return not any(piece != piece.lower() for piece in pieces if not piece.startswith("["))


def wordpiece(
    pieces: Sequence[str],
    lowercase: bool | None,
    origin: str,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """BERT's tokenizer with the given pieces: normalization, splitting at punctuation, WordPiece.

    Words are split greedily, longest match first (Devlin et al. 2019, google-research/bert
    tokenization.py), and a word longer than 100 characters becomes [UNK].

    Args:
      pieces: the vocabulary in the order of ids.
      lowercase: lower-case and, unless `strip_accents` is set, strip accents; None: derived from the vocabulary.
      origin: names the vocabulary in error messages.
      strip_accents, split_chinese: of `bert_normalizer`.

    Raises:
      UserError: a piece occurs twice.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocab[piece] != i)
        raise UserError(f"{origin}: the piece {twice!r} occurs twice; ids must be unique")
    if lowercase is None:
        lowercase = is_uncased_vocab(vocab)
    unknown = next((name for name in ROLE_NAMES["unk"] if name in vocab), UNK)
    library = tokenizers.Tokenizer(
        models.WordPiece(
            vocab,
            unk_token=unknown,
            max_input_chars_per_word=MAX_CHARS_PER_WORD,
            continuing_subword_prefix=CONTINUATION,
        )
    )
    library.normalizer = bert_normalizer(lowercase, strip_accents, split_chinese)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=True)
    library.add_special_tokens(to_added_tokens([name for name in SPECIAL_TOKENS if name in vocab], is_wordpiece=True))
    if CLS in vocab and SEP in vocab:
        # Not used by bert_jax, but by programs that load the exported file with add_special_tokens.
        library.post_processor = processors.BertProcessing((SEP, vocab[SEP]), (CLS, vocab[CLS]))
    return library


def char_bpe(
    pieces: Sequence[str], merges: Merges, lowercase: bool, strip_accents: bool | None = None
) -> tokenizers.Tokenizer:
    """Character-level BPE (Sennrich et al. 2016) on the words of BERT's tokenizer, each with the prefix "▁".

    Args:
      pieces: in the order of ids, with BERT's special tokens, "▁", and every piece of the merges.
      merges: pairs of pieces, in the order in which they are joined.
      lowercase, strip_accents: of `bert_normalizer`.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab, list(merges), unk_token=UNK))
    library.normalizer = bert_normalizer(lowercase, strip_accents)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.Metaspace(WORD_START, prepend_scheme="always", split=False),
        ]
    )
    library.decoder = decoders.Metaspace(WORD_START, prepend_scheme="always")
    library.add_special_tokens(to_added_tokens(SPECIAL_TOKENS, is_wordpiece=False))
    library.post_processor = processors.BertProcessing((SEP, vocab[SEP]), (CLS, vocab[CLS]))
    return library


def byte_bpe(vocab: Mapping[str, int], merges: Merges, lowercase: bool, *, prefix_space: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2 (Radford et al. 2019) and RoBERTa, without unknown pieces.

    Args:
      vocab: ids of the pieces, with RoBERTa's special tokens.
      merges: pairs of pieces, in the order in which they are joined.
      lowercase: lower-case.
      prefix_space: add a space before every text, so that its first word is encoded like others; GPT-2 does not.
    """
    library = tokenizers.Tokenizer(models.BPE(dict(vocab), list(merges)))
    if lowercase:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    names = [name for name in (*BYTE_SPECIAL_TOKENS, _END_OF_TEXT) if name in vocab]
    library.add_special_tokens(to_added_tokens(names, is_wordpiece=False))
    if "<s>" in vocab and "</s>" in vocab:
        library.post_processor = processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), add_prefix_space=prefix_space
        )
    return library


def byte_alphabet() -> list[str]:
    """The 256 characters that represent bytes in byte-level BPE, in GPT-2's order of ids."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())
