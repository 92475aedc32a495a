"""SQuAD files, windows over contexts, and answers from logits."""

import json

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.finetune import squad
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.finetune.squad import QuestionWindow
from bert_jax.finetune.squad_data import SquadData, read_squad_splits
from bert_jax.tokenizers.tokenizer import wordpiece
from tests.tokenizers.test_tokenizer import SPECIALS

CONTEXT = "The sailors rode the breeze clear of the rocks."
WORDS = CONTEXT.replace(".", " .").split()
STARTS = (0, 4, 12, 17, 21, 28, 34, 37, 41, 46)
OFFSETS = np.array([(start, start + len(word)) for word, start in zip(WORDS, STARTS, strict=True)])


@pytest.fixture
def letters():
    """A vocabulary of single characters."""
    known = sorted(set((CONTEXT + "Who?").lower().replace(" ", "")))
    return wordpiece([*SPECIALS, *known, *(f"##{one}" for one in known)], True, "test")


def squad_file(path, questions):
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": questions}]}]}))
    return path


def question(**changes):
    return {"id": "q", "question": "Who?", "answers": [{"text": "sailors", "answer_start": 4}]} | changes


def test_read_squad(tmp_path):
    path = squad_file(tmp_path / "dev.json", [question(), question(id="r", is_impossible=True, answers=[])])
    (first, second), damaged = squad.read_squad(path)
    assert first == squad.Question("q", "Who?", CONTEXT, ("sailors",), (4,))
    assert second.answers == () and not damaged


def test_no_answer_as_an_empty_text(tmp_path, letters):
    """The split is one of SQuAD 2.0: it has a threshold, and the question counts as one without an answer."""
    empty = [{"text": "", "answer_start": 0}, {"text": " ", "answer_start": 3}]
    path = squad_file(tmp_path / "dev.json", [question(), question(id="r", answers=empty)])
    (_, second), _ = squad.read_squad(path)
    assert (second.answers, second.starts) == ((), ())
    (tmp_path / "train.json").write_bytes(path.read_bytes())
    options = FinetuneOptions(max_length=64)
    data = SquadData(read_squad_splits(tmp_path, FileOptions()), letters, options, token_types=2, separators=1)
    tokens = len(data.splits["dev"].examples.input_ids)
    assert data.metrics("dev", np.zeros((tokens, 2), np.float32)).keys() >= {"null_threshold", "unanswerable_f1"}


def test_skip_damaged(tmp_path, capsys):
    wrong = [{"text": "breeze", "answer_start": start} for start in (-1, 20)]
    bad = [question(id=f"bad{i}", answers=[answer]) for i, answer in enumerate(wrong)]
    for name, questions in (("train", [question()]), ("dev", [*bad, question(), question(id="s", question="\ud800")])):
        squad_file(tmp_path / f"{name}.json", questions)
    with pytest.raises(UserError, match=r"dev.json: the answer 'breeze' of question bad0 .* out with --skip-damaged"):
        read_squad_splits(tmp_path, FileOptions())
    splits = read_squad_splits(tmp_path, FileOptions(skip_damaged=True))
    assert [len(one) for one in splits.values()] == [1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "dev.json: 3 of 4 questions are damaged and left out, the first: the answer 'breeze' of question bad0 is not "
        "at character -1"
    )
    squad_file(tmp_path / "dev.json", bad)
    with pytest.raises(UserError, match="has no questions that are not damaged"):
        read_squad_splits(tmp_path, FileOptions(skip_damaged=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"data": []}', "has no questions"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', r"field 'data\.0\.paragraphs\.0\.qas' is missing"),
        ('{"data": [{"paragraphs": [{"context": null, "qas": []}]}]}', "context is None: it must be a string"),
        (
            '{"data": [{"paragraphs": [{"context": "a b", "qas": [{"id": "x", "question": "?", "answers": '
            '[{"text": "b", "answer_start": 1}]}]}]}]}',
            "the answer 'b' of question x is not at character 1",
        ),
    ],
)
def test_bad_files(content, message, tmp_path):
    path = tmp_path / "dev.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        squad.read_squad(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"answers": [{"text": "the", "answer_start": -10}]},
            "the answer 'the' of question q is not at character -10",
        ),
        ({"answers": [{"text": "sailors", "answer_start": 4.7}]}, r"answer_start is 4\.7: it must be a whole number"),
        ({"answers": [{"text": "sailors", "answer_start": float("inf")}]}, r"answer_start is inf: it must be"),
        ({"answers": None}, r"answers is None: it must be a list"),
        ({"is_impossible": "false"}, r"is_impossible is 'false': it must be true or false"),
        ({"id": None}, r"qas\.0\.id is None: it must be a string"),
        ({"id": "\ud800"}, r"dev\.json: question .* has half of a surrogate pair"),
        ({"question": "\ud800"}, r"dev\.json: question q has half of a surrogate pair"),
    ],
)
def test_bad_questions(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        squad.read_squad(squad_file(tmp_path / "dev.json", [question(**changes)]))


def test_windows():
    assert squad.windows(7, 2, 10, 9, 3) == [
        QuestionWindow(7, 2, 0, 4),
        QuestionWindow(7, 2, 3, 7),
        QuestionWindow(7, 2, 6, 10),
    ]
    assert squad.windows(0, 2, 4, 9, 3) == [QuestionWindow(0, 2, 0, 4)]
    assert squad.windows(0, 2, 6, 9, 100) == [
        QuestionWindow(0, 2, 0, 4),
        QuestionWindow(0, 2, 4, 6),
    ]  # no token is left out
    with pytest.raises(UserError, match="leaves no room"):
        squad.windows(0, 6, 10, 9, 3)


def test_every_token_has_one_window():
    windows = squad.windows(0, 2, 23, 13, 3)
    assert len(windows) > 3
    counts = np.zeros(23)
    for i, window in enumerate(windows):
        counts[window.first : window.last] += squad.has_most_context(windows, i)
    assert (counts == 1).all()


@pytest.mark.parametrize("max_length", [8, 9, 20])
@pytest.mark.parametrize("answer", ["sailors", "breeze clear", "The", "rocks"])
def test_answers_from_perfect_logits(answer, max_length):
    """The labels of the windows, as logits, give the answer's text back."""
    windows = squad.windows(0, 1, len(WORDS), max_length, 1)
    starts, ends = ([np.zeros(max_length) for _ in windows] for _ in range(2))
    for i, window in enumerate(windows):
        first, last = squad.answer_positions(window, OFFSETS, answer, CONTEXT.index(answer))
        starts[i][first] += 5.0
        ends[i][last] += 5.0
    ranked, no_answer = squad.best_answers(windows, starts, ends, CONTEXT, OFFSETS)
    assert ranked[0] == squad.AnswerCandidate(answer, 10.0)
    assert no_answer == (10.0 if all(starts[i][0] for i in range(len(windows))) else 0.0)
    assert len({candidate.text for candidate in ranked}) == len(ranked) > 1


def test_limits_of_answers():
    window = squad.windows(0, 1, len(WORDS), 20, 1)
    start, end = np.zeros(20), np.zeros(20)
    start[3], end[9] = 5.0, 5.0
    ranked, _ = squad.best_answers(window, [start], [end], CONTEXT, OFFSETS)
    assert ranked[0].text == "The sailors rode the breeze clear of"
    ranked, _ = squad.best_answers(window, [start], [end], CONTEXT, OFFSETS, max_answer_tokens=3, size=4)
    assert len(ranked) == 4 and all(len(candidate.text.split()) <= 3 for candidate in ranked)
    start[:], end[:] = np.arange(20), -np.arange(20.0)  # starts late, ends early: few pairs in order
    ranked, _ = squad.best_answers(window, [start], [end], CONTEXT, OFFSETS, size=3)
    assert not ranked


def test_threshold():
    # The third question has no answer, and its no-answer score is the highest.
    threshold, score = squad.best_threshold([-3.0, -1.0, 2.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    assert (threshold, score) == (-1.0, 1.0)
    assert squad.best_threshold([0.0, 1.0], [0.0, 0.0], [1.0, 1.0]) == (-np.inf, 1.0)
    questions = [squad.Question(name, "?", "c", (), ()) for name in "ab"]
    answers = {0: ([squad.AnswerCandidate("x", 4.0)], 1.0), 1: ([squad.AnswerCandidate("y", 1.0)], 4.0)}
    assert squad.predictions(questions, answers.__getitem__, 0.0) == {"a": "x", "b": ""}
    assert squad.predictions(questions, answers.__getitem__, None) == {"a": "x", "b": "y"}
