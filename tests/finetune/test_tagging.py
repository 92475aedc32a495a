"""CoNLL files to sentences, and tags of words to labels of tokens."""

import pytest

from bert_jax.errors import UserError
from bert_jax.finetune import tagging
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.finetune.tagging_data import TaggingData
from bert_jax.tokenizers import tokenizer

CONLL_2003 = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n\nPeter NNP B-NP B-PER\n"
WNUT = "# 1 of\tO\n#\tO\nBeach\tI-location\r\n\n"
CONLL_U = """# sent_id = 1
# text = Can't go
1-2\tCan't\t_\t_\t_\t_\t_\t_\t_\t_
1\tCa\tcan\tAUX\tMD\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
2.1\tgo\tgo\tVERB\t_\t_\t_\t_\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

# text = a b c d e f g
1\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
"""
PLUS = """# global.columns = MISC ID FORM UPOS PARSEME:MWE
# text = go Home
_\t1\tgo\tVERB\tO
_\t2-3\tHome\t_\t_
_\t2\tHome\tADV\tB
"""
INDEXED = "#\thttp://example.org [2009-10-17]\n1-2\tCan't\t_\tO\n1\tCa\tO\tO\n2\tn't\tB-PER\tO\n\n1\tLi\tB-PER\tO\n"


def tagged(words, tags):
    return TaggedSentence(tuple(words.split()), tuple(tags.split()))


CONLL_U_SENTENCES = [TaggedSentence(("Ca", "n't", "go"), ("AUX", "PART", "VERB")), TaggedSentence(("go",), ("VERB",))]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        (CONLL_2003, -1, [TaggedSentence(("EU", "rejects"), ("B-ORG", "O")), TaggedSentence(("Peter",), ("B-PER",))]),
        (CONLL_2003, 1, [TaggedSentence(("EU", "rejects"), ("NNP", "VBZ")), TaggedSentence(("Peter",), ("NNP",))]),
        (WNUT, -1, [TaggedSentence(("# 1 of", "#", "Beach"), ("O", "O", "I-location"))]),
        (CONLL_U, 3, CONLL_U_SENTENCES),
        (CONLL_U, -1, CONLL_U_SENTENCES),
        # "#" begins a word, of a file with spaces or tabs, and a comment only where the columns differ.
        ("#love O\n# O\n\n#x B-A\n", -1, [tagged("#love # ", "O O"), tagged("#x", "B-A")]),
        ("#love\tO\n#\tO\n", -1, [tagged("#love #", "O O")]),
        ("# id 1 a\n#love O\nx O\n", -1, [tagged("#love x", "O O")]),
        # Other spaces belong to words.
        ("1\u00a0000 O\na\u2009b  B-A \n", -1, [TaggedSentence(("1\u00a0000", "a\u2009b"), ("O", "B-A"))]),
        ("1 000\tO\n\u00a0\tO\n", -1, [TaggedSentence(("1 000", "\u00a0"), ("O", "O"))]),
        (PLUS, -1, [tagged("go Home", "O B")]),
        (PLUS, 3, [tagged("go Home", "VERB ADV")]),
        (INDEXED, 2, [tagged("Ca n't", "O B-PER"), tagged("Li", "B-PER")]),
    ],
)
def test_read_conll(text, column, expected, tmp_path):
    path = tmp_path / "train.conll"
    path.write_bytes(text.encode())
    assert tagging.read_conll(path, column, 1 if text is INDEXED else None) == expected
    assert tagging.tag_names([TaggedSentence(("a", "b"), ("B-X", "O"))]) == ("O", "B-X")


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (b"a\tO\nb\tO\tO\n", -1, r"train\.conll:2 has 3 columns, the first line 2"),
        (b"a\tO\n", 2, r"train\.conll has 2 columns: there is no column 2 of tags"),
        (b"word\n", -1, r"train\.conll has 1 columns"),
        (b"\n\n", -1, "has no sentences"),
        (b"\xff\tO\n", -1, r"not UTF-8 \(byte 0\)"),
        (b"1\tBob\tO\n2\tran\tO\n\n1-2\tdu\t_\n1\tde\tO\n2\tle\tO\n", -1, "--word-column"),
        (b"1\ta\tO\n2\tb\tO\n\n3\tc\tO\n4\td\tO\n", -1, "--word-column"),
        (None, -1, "does not exist"),
        (b"1\ta\tO\n2\tb\tO\n\n1\tc\tO\n", -1, "words in column 0 are the numbers 1, 2, 3 .* with --word-column"),
        (b"0 a O\n1 b O\n", -1, "words in column 0 are the numbers 1, 2, 3"),
        (b"a\tO\n", 0, "has 2 columns: there is no column 0 of tags beside the words"),
    ],
)
def test_bad_files(content, column, message, tmp_path):
    path = tmp_path / "train.conll"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        tagging.read_conll(path, column)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dev", "expected"),
    [
        ([("B-PER", "O", "B-ORG"), ("B-PER", "B-PER")], {"precision": 0.6, "recall": 0.75, "f1": 2 / 3}),
        ([("NOUN", "VERB", "NOUN"), ("NEW",)], {"accuracy": 0.5}),
        ([("NOUN",), ("NOUN", "NOUN")], {"accuracy": 1.0}),
    ],
)
def test_the_best_constant_tag(dev, expected):
    """Three of five predicted entities are right, of four that there are."""
    train = [TaggedSentence(("a", "b", "a"), ("B-PER", "O", "B-ORG") if "f1" in expected else ("NOUN", "VERB", "X"))]
    sentences = {"train": train, "dev": [TaggedSentence(("a",) * len(tags), tags) for tags in dev]}
    letters = tokenizer.wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"], True, "test")
    found = TaggingData(sentences, letters, 16).baseline("dev")
    assert {name: found[name] for name in expected} == pytest.approx(expected)
