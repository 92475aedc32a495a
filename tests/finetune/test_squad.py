"""SQuAD files, windows over contexts, and answers from logits."""

import json

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.finetune import squad
from bert_jax.finetune.squad import Window

CONTEXT = "The sailors rode the breeze clear of the rocks."
WORDS = CONTEXT.replace(".", " .").split()
STARTS = (0, 4, 12, 17, 21, 28, 34, 37, 41, 46)
OFFSETS = np.array([(start, start + len(word)) for word, start in zip(WORDS, STARTS, strict=True)])


def squad_file(path, questions):
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": questions}]}]}))
    return path


def question(**changes):
    return {"id": "q", "question": "Who?", "answers": [{"text": "sailors", "answer_start": 4}]} | changes


def test_read_squad(tmp_path):
    path = squad_file(tmp_path / "dev.json", [question(), question(id="r", is_impossible=True, answers=[])])
    first, second = squad.read_squad(path)
    assert first == squad.Question("q", "Who?", CONTEXT, ("sailors",), (4,))
    assert second.answers == ()


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
            r"answers\.0\.answer_start is -10: it must be",
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
    assert squad.windows(7, 2, 10, 9, 3) == [Window(7, 2, 0, 4), Window(7, 2, 3, 7), Window(7, 2, 6, 10)]
    assert squad.windows(0, 2, 4, 9, 3) == [Window(0, 2, 0, 4)]
    assert squad.windows(0, 2, 6, 9, 100) == [Window(0, 2, 0, 4), Window(0, 2, 4, 6)]  # no token is left out
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
    assert ranked[0] == squad.Answer(answer, 10.0)
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
    answers = {0: ([squad.Answer("x", 4.0)], 1.0), 1: ([squad.Answer("y", 1.0)], 4.0)}
    assert squad.predictions(questions, answers.__getitem__, 0.0) == {"a": "x", "b": ""}
    assert squad.predictions(questions, answers.__getitem__, None) == {"a": "x", "b": "y"}
