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
CONLL_U_SENTENCES = [TaggedSentence(("Ca", "n't", "go"), ("AUX", "PART", "VERB")), TaggedSentence(("go",), ("VERB",))]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        (CONLL_2003, -1, [TaggedSentence(("EU", "rejects"), ("B-ORG", "O")), TaggedSentence(("Peter",), ("B-PER",))]),
        (CONLL_2003, 1, [TaggedSentence(("EU", "rejects"), ("NNP", "VBZ")), TaggedSentence(("Peter",), ("NNP",))]),
        (WNUT, -1, [TaggedSentence(("# 1 of", "#", "Beach"), ("O", "O", "I-location"))]),
        (CONLL_U, 3, CONLL_U_SENTENCES),
        (CONLL_U, -1, CONLL_U_SENTENCES),
    ],
)
def test_read_conll(text, column, expected, tmp_path):
    path = tmp_path / "train.conll"
    path.write_bytes(text.encode())
    assert tagging.read_conll(path, column) == expected
    assert tagging.tag_names([TaggedSentence(("a", "b"), ("B-X", "O"))]) == ("O", "B-X")


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (b"a\tO\nb\tO\tO\n", -1, r"train\.conll:2 has 3 columns, the first line 2"),
        (b"a\tO\n", 2, r"train\.conll:1 has 2 columns: there is no column 2 of tags"),
        (b"word\n", -1, r"train\.conll:1 has 1 columns"),
        (b"\n\n", -1, "has no sentences"),
        (b"\xff\tO\n", -1, r"not UTF-8 \(byte 0\)"),
        (None, -1, "does not exist"),
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
