"""Smaller tokenizers: the pieces of texts stay, every text stays encodable, ids in all parts of the file agree."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_jax.errors import UserError
from bert_jax.tokenizers import trimming
from bert_jax.tokenizers.kinds import BYTE_SPECIAL_TOKENS, SPECIAL_TOKENS, byte_alphabet
from bert_jax.tokenizers.tokenizer import Tokenizer, sentencepiece, wordpiece
from tests.building import make_documents
from tests.tokenizers.test_tokenizer import LINES, train

TEXTS = [*make_documents(0, 30), "Naïve café, 12 Ünderground-lines; 'tis über-quick!"]
OTHERS = [*make_documents(1, 30), "an unseen wording: zebra, mountains", "x", "12 21"]


def trained(kind: str) -> Tokenizer:
    """Some 200 pieces of both sets of texts."""
    names = list(BYTE_SPECIAL_TOKENS if kind == "byte-level BPE" else SPECIAL_TOKENS)
    options = {"special_tokens": names, "show_progress": False, "vocab_size": 420 if kind == "byte-level BPE" else 200}
    unknown = names[names.index("<unk>" if kind == "byte-level BPE" else "[UNK]")]
    if kind == "WordPiece":
        library, trainer = tokenizers.Tokenizer(models.WordPiece(unk_token=unknown)), trainers.WordPieceTrainer
        library.normalizer = normalizers.BertNormalizer()
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "Unigram":
        library, trainer = tokenizers.Tokenizer(models.Unigram()), trainers.UnigramTrainer
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        options["unk_token"] = unknown
    else:
        library, trainer = tokenizers.Tokenizer(models.BPE(unk_token=unknown)), trainers.BpeTrainer
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        if kind == "byte-level BPE":
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
            library.decoder = decoders.ByteLevel()
            options["initial_alphabet"] = byte_alphabet()
    library.train_from_iterator([*TEXTS, *OTHERS], trainer(**options))
    first, last = (names[i] for i in ((0, 2) if kind == "byte-level BPE" else (2, 3)))
    ids = [(name, library.token_to_id(name)) for name in (first, last)]
    if kind == "BPE":
        library.post_processor = processors.BertProcessing(ids[1], ids[0])
    else:
        library.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ids)
    return Tokenizer.from_json(library.to_str(), "trained")


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "byte-level BPE", "Unigram"])
def test_pieces_of_the_texts_stay(kind, tmp_path):
    whole = trained(kind)
    used = np.unique(whole.encode_flat(TEXTS)[0])
    smaller, kept = trimming.trim(whole, used, "trained")
    assert len(kept) == smaller.vocab_size < whole.vocab_size - 10 and np.all(np.diff(kept) > 0)
    assert [whole.id_to_token(int(i)) for i in kept] == [smaller.id_to_token(i) for i in range(len(kept))]
    for text in TEXTS:
        assert kept[smaller.encode(text)].tolist() == whole.encode(text)
    assert [kept[getattr(smaller, f"{role}_id")] for role in ("pad", "unk", "cls", "sep", "mask")] == [
        getattr(whole, f"{role}_id") for role in ("pad", "unk", "cls", "sep", "mask")
    ]
    # Other texts have smaller pieces, and unknown tokens only where they had them.
    changed = 0
    for text in OTHERS:
        before, after = whole.encode(text), kept[smaller.encode(text)].tolist()
        assert after.count(whole.unk_id) == before.count(whole.unk_id) and len(after) >= len(before)
        changed += before != after
    assert changed
    if kind == "byte-level BPE":
        assert smaller.decode(smaller.encode("Добро 漢字")).strip() == "Добро 漢字"
    smaller.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.fingerprint == smaller.fingerprint != whole.fingerprint and again.kind == whole.kind
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = library.encode(TEXTS[0]).ids
    assert (ids[0], ids[-1]) == (smaller.cls_id, smaller.sep_id) and ids[1:-1] == smaller.encode(TEXTS[0])


@pytest.mark.parametrize("kind", ["bert", "template", "sequence"])
def test_ids_of_special_tokens_move(kind):
    """As in BERT's vocabularies, whose unused tokens come first: in added tokens, roles and post-processor."""
    letters = [*"riverston", *(f"##{c}" for c in "riverston")]
    pieces = ["[unused0]", *SPECIAL_TOKENS, "[unused1]", "river", "stone", *letters]
    library = tokenizers.Tokenizer.from_str(wordpiece(list(dict.fromkeys(pieces)), True, "made").to_json())
    if kind != "bert":
        ids = [("[CLS]", 3), ("[SEP]", 4)]
        template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
        library.post_processor = template if kind == "template" else processors.Sequence([template])
    whole = Tokenizer.from_json(library.to_str(), "made")
    smaller, kept = trimming.trim(whole, np.array([7]), "made")
    assert kept[:6].tolist() == [1, 2, 3, 4, 5, 7] and (smaller.pad_id, smaller.cls_id, smaller.mask_id) == (0, 2, 4)
    again = tokenizers.Tokenizer.from_str(smaller.to_json())
    assert again.encode("river").ids == [2, 5, 3] and again.token_to_id("[MASK]") == 4
    assert smaller.encode("[MASK]") == [4]


def test_a_kept_piece_keeps_the_way_to_it():
    """abcd is merged from ab and cd, and that from cd's parts; the other way to cd does not matter."""
    names = [*BYTE_SPECIAL_TOKENS, *byte_alphabet(), "ab", "cd", "abcd", "bc", "Ġab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("a", "b"), ("c", "d"), ("ab", "cd"), ("b", "c"), ("Ġ", "ab")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(list(BYTE_SPECIAL_TOKENS))
    whole = Tokenizer.from_json(library.to_str(), "made")
    assert whole.encode("abcd") == [vocab["abcd"]]
    smaller, kept = trimming.trim(whole, np.array([vocab["abcd"]]), "made")
    assert {names[i] for i in kept} == set(names) - {"bc", "Ġab"}
    model = json.loads(smaller.to_json())["model"]
    assert [tuple(merge) for merge in model["merges"]] == merges[:3]


def test_the_penalty_of_unknown_characters_stays():
    """In Unigram it follows from the lowest score of all pieces, also of one that no text uses."""
    pieces = [*((name, 0.0) for name in SPECIAL_TOKENS), ("a", -1.0), ("aéb", -20.0), ("c", -20.0), ("bc", -1.0)]
    wholes = []
    for rare in ([("rare", -35.0), ("other", -3.0)], [("other", -3.0)]):
        library = tokenizers.Tokenizer(models.Unigram([*pieces, *rare], unk_id=1))
        library.add_special_tokens(list(SPECIAL_TOKENS))
        wholes.append(Tokenizer.from_json(library.to_str(), "made"))
    assert [one.encode("aébc") for one in wholes] == [[6, 7], [5, 1, 8]]
    smaller, kept = trimming.trim(wholes[0], np.array([6, 7, 8]), "made")
    assert kept.tolist() == list(range(10)) and kept[smaller.encode("aébc")].tolist() == [6, 7]


def test_other_kinds_are_refused():
    whole = sentencepiece(train(LINES), "here")
    with pytest.raises(UserError, match="here: a SentencePiece unigram tokenizer cannot be trimmed, only WordPiece, "):
        trimming.trim(whole, np.array([5]), "here")
