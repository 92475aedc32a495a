"""Goldens are the published ids of google-research/bert and GPT-2; a stand-in vocabulary holds the pieces they need.

Set BERT_JAX_SHARED_DATA to the folder that holds vocab/ and udhr/ to meet the real vocabularies.
"""

import concurrent.futures
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as sentencepiece_library
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import byte_alphabet
from bert_jax.tokenizers.tokenizer import Tokenizer, byte_bpe, char_bpe, sentencepiece, wordpiece

SHARED = os.environ.get("BERT_JAX_SHARED_DATA")
needs_shared_data = pytest.mark.skipif(not SHARED, reason="BERT_JAX_SHARED_DATA is not set")

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNCASED = "hello world ! , how are you ? ¿ res ##pu ##bl ##ica superior ##em av ##di ##ja vr ##sa ##jevic in"
UNCASED += " [ ] un ##k mask [unused0] 力"
CASED = "Hello World ! , how are you ? H ##é ##ll ##ó ¿ Re ##sp ##ub ##lica superior ##em A ##v ##di ##ja V ##r"
CASED += " ##ša ##je ##vić î ##n [ ] UN ##K"

TEXTS = ["Hello World!, how are you?", "Hélló  WoŕlḊ¿", "Respublica superiorem", "Avdija Vršajević în"]
UNCASED_IDS = [
    [7592, 2088, 999, 1010, 2129, 2024, 2017, 1029],
    [7592, 2088, 1094],
    [24501, 14289, 16558, 5555, 6020, 6633],
    [20704, 4305, 3900, 27830, 3736, 26782, 1999],
    [7592, 999, 2129, 2024, 2017, 1029, 1031, 4895, 2243, 1033],
]
UNCASED_TEXTS = [*TEXTS, " \tHeLLo!how  \n Are yoU? [UNK]"]
CASED_IDS = [
    [8667, 1291, 106, 117, 1293, 1132, 1128, 136],
    [145, 2744, 2339, 7774, 100, 225],
    [11336, 20080, 10354, 9538, 7298, 5521],
    [138, 1964, 3309, 3174, 159, 1197, 23834, 5561, 10225, 260, 1179],
]
GPT2_TEXTS = [*TEXTS, "multi      space"]
GPT2_IDS = [
    [15496, 2159, 28265, 703, 389, 345, 30],
    [39, 2634, 297, 10205, 220, 22173, 129, 243, 75, 41585, 232, 126, 123],
    [4965, 11377, 64, 2208, 72, 29625],
    [7355, 67, 34655, 569, 81, 32790, 1228, 1990, 72, 38325, 6184, 106, 77],
    [41684, 220, 220, 220, 220, 220, 2272],
]
GPT2_PIECES = [
    "Hello ĠWorld !, Ġhow Ġare Ġyou ?",
    "H Ã© ll Ã³ Ġ ĠWo Å ķ l á¸ Ĭ Â ¿",
    "Res public a Ġsuper i orem",
    "Av d ija ĠV r Å¡ aj ev i Äĩ ĠÃ ® n",
    "multi Ġ Ġ Ġ Ġ Ġ Ġspace",
]
# Those of GPT-2's 50,000 merges that the texts above need, in order.
_JOINS = (
    "Ġ a;r e;e r;Ġ s;o r;e s;o u;Ġ h;i c;l l;o w;a c;Ġ y;l d;Ġy ou;Ġ W;u l;o re;Ġa re;Ġs u;p er;u b;ac e;Ġ V;ul t;Ġs p;"
    "l ic;e ll;Ġh ow;ub lic;a j;or ld;e v;ĠW orld;Ġsu per;Ġsp ace;Ã ©;i j;R es;Ġ Ã;A v;Ã ³;ell o;p ublic;H ello;m ult;"
    "ĠW o;! ,;ore m;Å ¡;ij a;Ä ĩ;á ¸;mult i"
)
GPT2_MERGES = _JOINS.split(";")


@pytest.fixture
def uncased():
    return wordpiece(SPECIALS + UNCASED.split(), None, "stand-in")


@pytest.fixture
def cased():
    return wordpiece(SPECIALS + CASED.split(), None, "stand-in")


def pieces(tokenizer, text):
    return " ".join(tokenizer.id_to_token(i) for i in tokenizer.encode(text))


def corpus_ids(tokenizer, texts):
    ids, lengths = tokenizer.encode_corpus(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def corpus_pieces(tokenizer, text):
    return " ".join(tokenizer.id_to_token(i) for i in corpus_ids(tokenizer, [text])[0])


def test_special_tokens_are_matched_in_texts_and_are_plain_text_in_a_corpus(uncased):
    assert corpus_pieces(uncased, "how [MASK] you") == "how [ mask ] you"
    assert pieces(uncased, "how [MASK] you [SEP]") == "how [MASK] you [SEP]"
    assert uncased.encode_batch(["how [MASK] you"]) == [uncased.encode("how [MASK] you")]
    assert uncased.mask_id not in corpus_ids(uncased, ["[MASK]"])[0], "the one must not change the other"


def test_special_ids_lookups_and_continuations(uncased):
    ids = uncased.pad_id, uncased.unk_id, uncased.cls_id, uncased.sep_id, uncased.mask_id
    assert ids == uncased.special_ids == (0, 1, 2, 3, 4)
    continues = uncased.continues_word
    assert continues.dtype == np.bool_ and continues.shape == (uncased.vocab_size,)
    assert continues[uncased.token_to_id("##em")] and not continues[uncased.token_to_id("superior")]
    assert continues.sum() == UNCASED.count("##")
    assert uncased.decode(uncased.encode("Respublica superiorem")) == "respublica superiorem"
    assert "[MASK]" in uncased.decode(np.array([uncased.mask_id]))
    assert uncased.token_to_id("nowhere") is None
    for outside in (uncased.vocab_size, -1):
        with pytest.raises(IndexError):
            uncased.id_to_token(outside)


def test_a_vocabulary_file_is_the_same_tokenizer(uncased, cased, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *UNCASED.split()]))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == uncased.fingerprint
    assert loaded.encode("Hello superiorem!") == uncased.encode("Hello superiorem!")
    assert Tokenizer.load(tmp_path / "vocab.txt", lowercase=False).fingerprint != uncased.fingerprint
    assert cased.fingerprint != uncased.fingerprint


def test_fingerprint_ignores_what_does_not_decide_ids(uncased, tmp_path):
    description = json.loads(uncased.to_json())
    description["post_processor"] = None
    description["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    other = Tokenizer.from_json(json.dumps(description), "edited")
    assert other.fingerprint == uncased.fingerprint
    assert len(other.encode("how are you")) == 3
    vocab = description["model"]["vocab"]
    vocab["how"], vocab["are"] = vocab["are"], vocab["how"]
    assert Tokenizer.from_json(json.dumps(description), "edited").fingerprint != uncased.fingerprint


def test_case_is_decided_by_letters_that_have_two_cases():
    # ℝ counts as upper case but has no lower-case form; bert-base-uncased holds it.
    assert wordpiece([*SPECIALS, "ℝ", "a"], None, "stand-in").lowercase
    assert not wordpiece([*SPECIALS, "A", "a"], None, "stand-in").lowercase


def test_user_errors(tmp_path, uncased):
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer.load(tmp_path / "absent.json")
    with pytest.raises(UserError, match="has no tokenizer"):
        Tokenizer.load(tmp_path)
    cases = {
        "broken.json": (b"{", "not a readable tokenizer.json"),
        "empty.txt": (b"\n", "one piece per line"),
        "latin1.txt": (b"[PAD]\n\xe9\n", "byte 6"),
        "no_mask.txt": ("\n".join([*SPECIALS[:4], "a"]).encode(), r"no \[MASK\] token"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            Tokenizer.load(tmp_path / name)
    uncased.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="lowercase=True; lowercase=False contradicts it"):
        Tokenizer.load(tmp_path, lowercase=False)


UNCASED_PIECES = [
    "hello world ! , how are you ?",
    "hello world ¿",
    "res ##pu ##bl ##ica superior ##em",
    "av ##di ##ja vr ##sa ##jevic in",
    "hello ! how are you ? [ un ##k ]",
]
CASED_PIECES = [
    "Hello World ! , how are you ?",
    "H ##é ##ll ##ó [UNK] ¿",
    "Re ##sp ##ub ##lica superior ##em",
    "A ##v ##di ##ja V ##r ##ša ##je ##vić î ##n",
]


def test_pieces_of_published_ids_with_stand_ins(uncased, cased, gpt2_files):
    gpt2 = Tokenizer.load(gpt2_files, add_missing_special_tokens=True)
    for tokenizer, texts, expected in (
        (uncased, UNCASED_TEXTS, UNCASED_PIECES),
        (cased, TEXTS, CASED_PIECES),
        (gpt2, GPT2_TEXTS, GPT2_PIECES),
    ):
        assert [corpus_pieces(tokenizer, text) for text in texts] == expected
    assert uncased.lowercase and not cased.lowercase
    assert [pieces(uncased, text) for text in ("力hello", "x" * 101, "")] == ["力 hello", "[UNK]", ""]


@needs_shared_data
def test_published_ids_with_the_real_vocabularies():
    vocab = Path(SHARED) / "vocab"
    assert corpus_ids(Tokenizer.load(vocab / "bert_base_uncased_vocab.txt"), UNCASED_TEXTS) == UNCASED_IDS
    assert corpus_ids(Tokenizer.load(vocab / "bert_base_cased_vocab.txt"), TEXTS) == CASED_IDS
    gpt2 = Tokenizer.load(vocab / "gpt2_vocab.bpe", add_missing_special_tokens=True)
    assert gpt2.encode_batch(GPT2_TEXTS) == GPT2_IDS
    assert gpt2.special_ids == tuple(range(50257, 50262))


@pytest.fixture
def gpt2_files(tmp_path):
    """A merges file and its vocabulary, with the names of Hugging Face."""
    pieces = [*byte_alphabet(), *(merge.replace(" ", "") for merge in GPT2_MERGES), "<|endoftext|>"]
    merges = tmp_path / "gpt2-merges.txt"
    merges.write_text("#version: 0.2\n" + "\n".join(GPT2_MERGES) + "\n")
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    return merges


def test_a_vocabulary_without_special_tokens_is_one_error_that_names_the_way_round(gpt2_files, tmp_path):
    with pytest.raises(UserError, match=r"no <pad>, <unk>, <s>, </s>, <mask> token; .*--from .*--add-special-tokens"):
        Tokenizer.load(gpt2_files)
    tokenizer = Tokenizer.load(gpt2_files, add_missing_special_tokens=True)
    size = 256 + len(GPT2_MERGES) + 1
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id) == (size, size + 1, size + 2)
    assert (tokenizer.sep_id, tokenizer.mask_id, tokenizer.vocab_size) == (size + 3, size + 4, size + 5)
    text = "<mask> how <|endoftext|>"
    assert set(corpus_ids(tokenizer, [text])[0]).isdisjoint(tokenizer.special_ids)
    assert set(tokenizer.encode(text)).issuperset([size - 1, tokenizer.mask_id])
    assert pieces(tokenizer, "Hello <mask> space") == "Hello <mask> Ġspace"
    continues = tokenizer.continues_word
    assert not continues[[size - 1, *tokenizer.special_ids, tokenizer.token_to_id("ĠWorld")]].any()
    assert continues[[tokenizer.token_to_id("!,"), tokenizer.token_to_id("Hello")]].all()


def test_missing_special_tokens_are_named_as_the_others(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\n##b\n[MASK]\n")
    tokenizer = Tokenizer.load(tmp_path, add_missing_special_tokens=True)
    assert [tokenizer.id_to_token(i) for i in range(7)] == ["a", "##b", "[MASK]", "[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    assert tokenizer.encode("ab c") == [0, 1, tokenizer.unk_id]


def test_openai_names_and_broken_merges(gpt2_files, tmp_path):
    openai = tmp_path / "openai"
    openai.mkdir()
    gpt2_files.rename(openai / "vocab.bpe")
    with pytest.raises(UserError, match=r"need their vocabulary encoder\.json in the same directory"):
        Tokenizer.load(openai)
    vocabulary = (tmp_path / "gpt2-vocab.json").rename(openai / "encoder.json")
    assert Tokenizer.load(openai, add_missing_special_tokens=True).encode(GPT2_TEXTS[0])
    assert Tokenizer.load(openai, lowercase=True, add_missing_special_tokens=True).lowercase
    with pytest.raises(UserError, match="this vocabulary needs merges"):
        Tokenizer.load(vocabulary)
    with (openai / "vocab.bpe").open("a") as file:
        file.write("Hello ĠWorld\n")
    with pytest.raises(UserError, match=rf"vocab\.bpe:{len(GPT2_MERGES) + 2}: not two pieces"):
        Tokenizer.load(openai, add_missing_special_tokens=True)
    damages = {
        '{"a": 0, "b": 1}': "not byte-level BPE",
        "[]": "is not a JSON object, but",
        "{,}": r"is not JSON \(.*line 1",
    }
    for content, message in damages.items():
        vocabulary.write_text(content)
        with pytest.raises(UserError, match=message):
            Tokenizer.load(openai)


def library_model(model, pre_tokenizer):
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizer
    return Tokenizer.from_json(library.to_str(), "test")


ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def test_special_pieces_that_a_model_finds_in_text_become_unknown():
    """XLM-R's tokenizer.json holds <mask> as a piece of its Unigram model, with the best score of all."""
    scores = [(piece, 0.0) for piece in ROBERTA] + [("▁", -2.0), ("▁a", -1.0), ("b", -1.0)]
    tokenizer = library_model(models.Unigram(scores, unk_id=3), pre_tokenizers.Metaspace())
    assert tokenizer._model.encode_corpus(["ab<mask>"]) == [[6, 7, 4]], "the library alone would let the mask through"
    assert corpus_ids(tokenizer, ["ab<mask>", "a"]) == [[6, 7, tokenizer.unk_id], [6]]
    assert tokenizer.encode("ab<mask>") == [6, 7, tokenizer.mask_id]


def test_marks_are_read_by_kind():
    """Ġ is a letter of Maltese where pieces are not bytes."""
    vocab = {piece: i for i, piece in enumerate([*ROBERTA, "▁", "Ġ", "a", "Ġa", "▁a"])}
    tokenizer = library_model(models.BPE(vocab, [("Ġ", "a"), ("▁", "a")]), pre_tokenizers.Metaspace())
    assert tokenizer.continues_word.tolist() == [False] * 6 + [True] * 3 + [False]
    unmarked = library_model(models.BPE({p: i for i, p in enumerate([*ROBERTA, "a"])}, []), pre_tokenizers.Whitespace())
    with pytest.raises(UserError, match="does not mark which pieces begin a word"):
        unmarked.continues_word  # noqa: B018
    assert unmarked.begins_word.tolist() == [False] * 6
    prefixed = models.BPE({p: i for i, p in enumerate([*ROBERTA, "a", "@a"])}, [], continuing_subword_prefix="@")
    continues = library_model(prefixed, pre_tokenizers.Whitespace()).continues_word
    assert continues.tolist() == [False] * 6 + [True]


def test_lowercase_is_found_in_sequences():
    library = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(ROBERTA)}, []))
    assert not Tokenizer.from_json(library.to_str(), "test").lowercase
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([normalizers.Lowercase()])])
    assert Tokenizer.from_json(library.to_str(), "test").lowercase


LINES = [
    "the quick brown fox jumps over the lazy dog, and the dog is not amused.",
    "Foxes jumped; dogs slept. Nobody was amusing, nobody was quicker than the quickest fox!",
    "über straßen und äcker: naïve café, 1984 (x_1 + y_2) = z. ﬁne ①",
] * 3


BERT_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "pad_piece": "[PAD]", "unk_piece": "[UNK]"}
BERT_IDS |= {"bos_piece": "[CLS]", "eos_piece": "[SEP]", "control_symbols": ["[MASK]"]}


def train(lines, model_type="unigram", **options):
    """Training by the library, with BERT's special tokens by default."""
    model = io.BytesIO()
    sentencepiece_library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=model_type,
        hard_vocab_limit=False,
        minloglevel=2,
        **({"vocab_size": 90} | (options or BERT_IDS)),
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request):
    return train(LINES, request.param)


AWKWARD = [*LINES, "", "  two  spaces ", "[MASK] <mask> [CLS]", "ﬁnal ①", "e\u0301té", "力 x", "▁▁ a", "a\tb"]


def test_sentencepiece_gives_the_ids_of_its_library(model, tmp_path):
    (tmp_path / "spiece.model").write_bytes(model)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.fingerprint == sentencepiece(model, "test").fingerprint
    library = sentencepiece_library.SentencePieceProcessor(model_proto=model)
    expected = library.encode(AWKWARD)
    assert corpus_ids(tokenizer, AWKWARD) == expected
    assert tokenizer.special_ids == (0, 1, 2, 3, 4) and tokenizer.mask_id == 4
    assert {i for ids in expected for i in ids}.isdisjoint([0, 2, 3, 4])
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)] == [
        library.id_to_piece(i) for i in range(library.vocab_size())
    ]


def test_sentencepiece_special_tokens_and_words(model):
    tokenizer = sentencepiece(model, "test")
    the = tokenizer.encode("the dog")
    ids = tokenizer.encode("the [MASK] dog[SEP]the")
    first = tokenizer.encode("the")
    assert ids == [*first, tokenizer.mask_id, *the[len(first) :], tokenizer.sep_id, *first]
    assert tokenizer.decode(ids) == "the [MASK] dog [SEP] the"
    assert tokenizer.decode(tokenizer.encode("the quick fox")) == "the quick fox"
    continues = tokenizer.continues_word
    spelled = [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]
    assert continues.tolist() == [False] * 5 + [not piece.startswith("▁") for piece in spelled[5:]]
    assert 0 < continues.sum() < len(spelled) - 5
    assert not tokenizer.lowercase


def test_sentencepiece_vocabularies_of_others():
    bare = train(LINES, vocab_size=90, normalization_rule_name="nmt_nfkc_cf")
    with pytest.raises(UserError, match="no <pad>, <mask> token"):
        sentencepiece(bare, "bare.model")
    plain = train(LINES, pad_id=3, user_defined_symbols=["<mask>"])
    library = sentencepiece_library.SentencePieceProcessor(model_proto=plain)
    assert library.piece_to_id("<mask>") in library.encode("a <mask> b"), "this model takes the mask from the text"
    tokenizer = sentencepiece(plain, "plain.model")
    (ids,) = corpus_ids(tokenizer, ["a <mask> b"])
    assert tokenizer.mask_id not in ids and tokenizer.unk_id in ids
    assert tokenizer.mask_id in tokenizer.encode("a <mask> b")
    assert not tokenizer.continues_word[list(tokenizer.special_ids)].any()
    suffixed = train(LINES, pad_id=3, control_symbols=["<mask>"], treat_whitespace_as_suffix=True)
    with pytest.raises(UserError, match="marks words at their end"):
        sentencepiece(suffixed, "suffixed.model")


def test_special_tokens_are_appended_to_sentencepiece(tmp_path):
    bare = train(LINES, vocab_size=90, normalization_rule_name="nmt_nfkc_cf")
    path = tmp_path / "bare.model"
    path.write_bytes(bare)
    tokenizer = Tokenizer.load(path, add_missing_special_tokens=True)
    library = sentencepiece_library.SentencePieceProcessor(model_proto=bare)
    assert (tokenizer.pad_id, tokenizer.mask_id) == (library.vocab_size(), library.vocab_size() + 1)
    assert corpus_ids(tokenizer, AWKWARD) == library.encode(AWKWARD)
    assert tokenizer.lowercase
    with pytest.raises(UserError, match="it sets lowercase=True;"):
        Tokenizer.load(path, lowercase=False, add_missing_special_tokens=True)
    (tmp_path / "second.model").write_bytes(bare)
    with pytest.raises(UserError, match=r"has 2 \.model files"):
        Tokenizer.load(tmp_path)


def test_damaged_sentencepiece_models(model, tmp_path):
    path = tmp_path / "broken.model"
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.pieces[1].type = sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL
    damages = {
        model[:-3]: "not a SentencePiece model",
        b"text": "not a SentencePiece model",
        sentencepiece_model_pb2.ModelProto().SerializeToString(): "no pieces",
        proto.SerializeToString(): "the SentencePiece library rejects this model",
    }
    for content, message in damages.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"broken.model: .*{message}"):
            Tokenizer.load(path)
    wrapped = json.loads(sentencepiece(model, "test").to_json())
    for damage in ({"model": wrapped["model"][:-1]}, {"model": "é"}):
        with pytest.raises(UserError, match="in it is damaged"):
            Tokenizer.from_json(json.dumps(wrapped | damage), "wrapped")


@needs_shared_data
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_ids_in_388_languages(model_type):
    with zipfile.ZipFile(Path(SHARED) / "udhr" / "udhr2.zip") as archive:
        texts = [archive.read(name).decode() for name in sorted(archive.namelist()) if not name.endswith("/")]
    assert len(texts) == 388
    lines = [line for text in texts for line in text.split("\n")]
    model = train(lines[::4], model_type, vocab_size=6000, pad_id=3, control_symbols=["<mask>"])
    expected = sentencepiece_library.SentencePieceProcessor(model_proto=model).encode(lines)
    ids, lengths = Tokenizer.from_json(sentencepiece(model, "udhr").to_json(), "udhr").encode_corpus(lines)
    assert lengths.tolist() == [len(encoded) for encoded in expected]
    assert ids.tolist() == [i for encoded in expected for i in encoded]


def small_bpe():
    merges = [("l", "o"), ("lo", "w"), ("▁", "low")]
    return char_bpe([*SPECIALS, "▁", *"loweré!", "lo", "low", "▁low"], merges, True, "test")


def small_byte_bpe():
    names = [*ROBERTA, *byte_alphabet(), "lo", "low", "Ġlow"]
    merges = [("l", "o"), ("lo", "w"), ("Ġ", "low")]
    return byte_bpe({n: i for i, n in enumerate(names)}, merges, False, prefix_space=True, origin="test")


def words(tokenizer, text):
    """The pieces of each word, joined."""
    ((ids, word_ids),) = tokenizer.encode_with_word_ids([text])
    assert ids == tokenizer.encode(text) and len(ids) == len(word_ids)
    grouped = dict.fromkeys(sorted(set(word_ids)), "")
    assert list(grouped) == list(range(len(grouped)))
    for i, word in zip(ids, word_ids, strict=True):
        grouped[word] += tokenizer.id_to_token(i)
    return list(grouped.values())


def test_words_of_running_text(model):
    wordpiece_tokenizer = wordpiece([*SPECIALS, "low", "##er", "don", "'", "t", "!", "[", "]", "mask"], True, "test")
    assert words(wordpiece_tokenizer, "Lower don't low! x") == ["low##er", "don", "'", "t", "low", "!", "[UNK]"]
    assert words(wordpiece_tokenizer, "low[MASK]low") == ["low", "[MASK]", "low"]
    assert words(small_byte_bpe(), "low lower don't!") == ["Ġlow", "Ġlower", "Ġdon", "'t", "!"]
    assert words(small_bpe(), "low lower!") == ["▁low", "▁lower", "▁!"]
    sentencepiece_tokenizer = sentencepiece(model, "test")
    found = words(sentencepiece_tokenizer, "the river sings")
    assert len(found) == 3 and all(word.startswith("▁") for word in found)
    assert words(sentencepiece_tokenizer, "the[MASK][SEP] river")[1:3] == ["[MASK]", "[SEP]"]
    unknown = words(sentencepiece_tokenizer, "theჰriver river")
    assert len(unknown) == 2 and sentencepiece_tokenizer.id_to_token(sentencepiece_tokenizer.unk_id) in unknown[0]
    for one in (wordpiece_tokenizer, small_byte_bpe(), sentencepiece_tokenizer):
        assert one.encode_with_word_ids(["", "low"])[0] == ([], [])


def test_bpe_marks_the_words_that_bert_sees():
    tokenizer = small_bpe()
    assert pieces(tokenizer, "Low, lower! low") == "▁low ▁ [UNK] ▁low e r ▁ ! ▁low"
    assert tokenizer.decode(tokenizer.encode("low lower")) == "low lower"
    assert pieces(tokenizer, "low [MASK] low") == "▁low [MASK] ▁low"
    assert [tokenizer.id_to_token(i) for i in np.flatnonzero(~tokenizer.continues_word)] == [*SPECIALS, "▁", "▁low"]


def test_byte_bpe_reads_a_space_before_every_text():
    tokenizer = small_byte_bpe()
    assert pieces(tokenizer, "low lower é") == "Ġlow Ġlow e r Ġ Ã ©"
    assert tokenizer.decode(tokenizer.encode("low lower é")) == " low lower é"
    assert pieces(tokenizer, "low <mask> low") == "Ġlow <mask> Ġlow"
    assert [tokenizer.id_to_token(i) for i in np.flatnonzero(~tokenizer.continues_word)] == [*ROBERTA, "Ġ", "Ġlow"]


@pytest.fixture(params=["wordpiece", "bpe", "byte-bpe", "sentencepiece"])
def any_kind(request, uncased):
    if request.param == "sentencepiece":
        return sentencepiece(train(LINES), "test")
    return {"wordpiece": uncased, "bpe": small_bpe(), "byte-bpe": small_byte_bpe()}[request.param]


@pytest.mark.parametrize("sentences", [[*AWKWARD, *TEXTS, "x" * 101, "low [MASK]", ""], [], [""]])
def test_encode_flat_is_encode_batch(any_kind, sentences):
    for ids, lengths in (any_kind.encode_flat(sentences), any_kind.encode_corpus(sentences)):
        assert ids.dtype == np.uint32 and lengths.dtype == np.int64 and ids.ndim == lengths.ndim == 1
    ids, lengths = any_kind.encode_flat(sentences)
    expected = any_kind.encode_batch(sentences)
    assert lengths.tolist() == [len(encoded) for encoded in expected]
    assert ids.tolist() == [i for encoded in expected for i in encoded]
    ids, _ = any_kind.encode_corpus(sentences)
    assert set(ids.tolist()).isdisjoint(set(any_kind.special_ids) - {any_kind.unk_id})


def test_files_copies_and_threads_do_the_same(any_kind, tmp_path):
    sentences = [*AWKWARD, *TEXTS, "[MASK] <mask>"] * 20
    expected = any_kind.encode_batch(sentences)
    in_corpus = corpus_ids(any_kind, sentences)
    any_kind.save(tmp_path / "tokenizer.json")
    copy = pickle.loads(pickle.dumps(any_kind))
    for other in (copy, Tokenizer.load(tmp_path), Tokenizer.load(tmp_path / "tokenizer.json")):
        assert other.encode_batch(sentences) == expected and corpus_ids(other, sentences) == in_corpus
        assert other.fingerprint == any_kind.fingerprint and other.to_json() == any_kind.to_json()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for ids, _ in pool.map(copy.encode_flat, [sentences] * 8):
            assert ids.tolist() == [i for encoded in expected for i in encoded]
