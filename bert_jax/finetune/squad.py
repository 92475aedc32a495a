"""Extractive question answering: SQuAD files, windows over long contexts, and answers from start and end logits.

The procedure is that of google-research/bert run_squad.py: a question and a window of the context in one row, windows
that advance by a stride, a token's answers only from the window where it has most context on both sides, and for
SQuAD 2.0 an answer of no text with the score of [CLS].
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.field_validation import from_json
from bert_jax.finetune.split_files import read_files
from bert_jax.finetune.tables import Columns, check_unicode
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath

Offsets = np.ndarray
"""First and last character + 1 of each token of a text, int [T, 2]."""


class Question(NamedTuple):
    """A question about a context."""

    question_id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Accepted answers; none: the question has no answer, or the split has no labels."""
    starts: tuple[int, ...]
    """First character of each answer in the context."""


class QuestionWindow(NamedTuple):
    """A part of a context in one row: [CLS] question [SEP] context tokens [SEP]."""

    question: int
    """Index of the question."""
    question_tokens: int
    first: int
    """First token of the context in this window."""
    last: int
    """Last token of the context in this window + 1."""
    separators: int = 1
    """[SEP] between question and context."""

    @property
    def context_position(self) -> int:
        """Position of the first context token in the row."""
        return 1 + self.question_tokens + self.separators


_COLUMNS = ("id", "question", "context")


class AnswerCandidate(NamedTuple):
    """A candidate answer of a question."""

    text: str
    score: float
    """Start logit plus end logit."""


class _AnswerEntry(TypedDict):
    text: str
    answer_start: int


class _OptionalInEntry(TypedDict, total=False):
    answers: list[_AnswerEntry]
    is_impossible: bool


class _Entry(_OptionalInEntry):
    id: str | int
    question: str


class _Paragraph(TypedDict):
    context: str
    qas: list[_Entry]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _SquadFile(TypedDict):
    data: list[_Article]


class _Row(TypedDict):
    """A row of SQuAD as Hugging Face stores it."""

    context: str
    question: str
    id: str | int


class _Answers(TypedDict):
    """The answers of a row: a struct of lists."""

    text: list[str]
    answer_start: list[int]


def read_squad(path: StoredPath, *, skip_damaged: bool = False) -> tuple[list[Question], list[str]]:
    """The questions of a file in the form of SQuAD 1.1 or 2.0, or of a Parquet file with a question in each row.

    A question has no answer if the file says so, has an empty list of answers, or answers without text only.

    Args:
      path: the file.
      skip_damaged: leave out questions with an answer that is not in its context where the file says, and those that
        are not Unicode.

    Returns:
      the questions, and
      for each question that is left out what is wrong with it.

    Raises:
      UserError: no file, or not of that form; two questions with one id; no question; without `skip_damaged` a
        question that it would leave out.
    """
    questions: list[Question] = []
    damaged: list[str] = []
    for where, entry, context in _rows(path) if path.suffix == ".parquet" else _entries(path):
        try:
            questions.append(_question(where, entry, context))
        except UserError as error:
            if not skip_damaged:
                raise
            damaged.append(str(error))
    require(bool(questions), f"{path} has no questions" + (" that are not damaged" if damaged else ""))
    ids = {question.question_id for question in questions}
    require(len(ids) == len(questions), f"{path}: {len(questions) - len(ids)} question(s) have the id of another one")
    return questions, damaged


def _entries(path: StoredPath) -> Iterator[tuple[object, _Entry, str]]:
    """Of each question of a file of SQuAD: where it is, for messages, the question and its context."""
    for article in read_json_as(path, _SquadFile, "write it in the form of SQuAD 1.1 or 2.0")["data"]:
        for paragraph in article["paragraphs"]:
            yield from ((path, entry, paragraph["context"]) for entry in paragraph["qas"])


def _rows(path: StoredPath) -> Iterator[tuple[object, _Entry, str]]:
    """The same of a Parquet file."""
    advice = "write it as datasets stores squad"
    for where, values in read_files({"train": [path]}, Columns(_COLUMNS, None)).rows["train"]:
        row = from_json(_Row, dict(values), where, advice)
        found = values.get("answers") or {"text": [], "answer_start": []}
        answers = from_json(_Answers, found, f"{where}: answers", advice)
        texts, starts = answers["text"], answers["answer_start"]
        require(len(texts) == len(starts), f"{where} has {len(texts)} answers and {len(starts)} starts: {advice}")
        entry: _Entry = {
            "id": row["id"],
            "question": row["question"],
            "answers": [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)],
            "is_impossible": values.get("is_impossible") is True,
        }
        yield where, entry, row["context"]


def _question(where: object, entry: _Entry, context: str) -> Question:
    answers = [] if entry.get("is_impossible", False) else entry.get("answers", [])
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        require(
            start >= 0 and context[start : start + len(text)] == text,
            f"{where}: the answer {text[:80]!r} of question {entry['id']} is not at character {start}: correct the "
            "file (a question without an answer has an empty list of answers), or leave such questions out with "
            "--skip-damaged",
        )
    check_unicode(f"{where}: question {entry['id']}", str(entry["id"]), entry["question"], context)
    given = [answer for answer in answers if answer["text"].strip()]
    texts = tuple(answer["text"] for answer in given)
    starts = tuple(answer["answer_start"] for answer in given)
    return Question(str(entry["id"]), entry["question"], context, texts, starts)


def windows(
    question: int, question_tokens: int, context_tokens: int, max_length: int, stride: int, separators: int = 1
) -> list[QuestionWindow]:
    """Windows over the context of a question that together hold all its tokens.

    Args:
      question: index of the question.
      question_tokens: of the question, after truncation.
      context_tokens: of the context.
      max_length: tokens of a row, special ones included.
      stride: tokens by which a window advances.
      separators: [SEP] between question and context.

    Raises:
      UserError: the question leaves no room for the context.
    """
    room = max_length - question_tokens - 2 - separators
    require(
        room >= 1, f"--max-length {max_length} leaves no room for a context after {question_tokens} question tokens"
    )
    found, first = [], 0
    while True:
        last = min(first + room, context_tokens)
        found.append(QuestionWindow(question, question_tokens, first, last, separators))
        if last == context_tokens:
            return found
        first += min(room, stride)


def has_most_context(windows_of_question: Sequence[QuestionWindow], window: int) -> np.ndarray:
    """Whether each token of a window has its largest context there: bool [tokens of the window].

    The context of a token is the smaller of its distances to the window's ends, plus a hundredth of the window's
    length; of equal ones, the first window counts.
    """
    tokens = np.arange(windows_of_question[window].first, windows_of_question[window].last)

    def context(other: QuestionWindow) -> np.ndarray:
        inside = (tokens >= other.first) & (tokens < other.last)
        score = np.minimum(tokens - other.first, other.last - 1 - tokens) + 0.01 * (other.last - other.first)
        return np.where(inside, score, -np.inf)

    return np.argmax([context(other) for other in windows_of_question], axis=0) == window


def answer_positions(window: QuestionWindow, offsets: Offsets, answer: str, start: int) -> tuple[int, int]:
    """Positions of the answer's first and last token in the row; (0, 0), [CLS], if it is not inside the window.

    Args:
      window: the row.
      offsets: characters of the context's tokens.
      answer: its text.
      start: its first character in the context.
    """
    end = start + len(answer)
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    if not len(inside) or inside[0] < window.first or inside[-1] >= window.last:
        return 0, 0
    shift = window.context_position - window.first
    return int(inside[0] + shift), int(inside[-1] + shift)


def best_answers(
    windows_of_question: Sequence[QuestionWindow],
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    context: str,
    offsets: Offsets,
    *,
    size: int = 20,
    max_answer_tokens: int = 30,
) -> tuple[list[AnswerCandidate], float]:
    """The best answers of a question over all its windows, best first, and the smallest score of no answer.

    Args:
      windows_of_question: rows of the question.
      start_logits, end_logits: of each row's positions, float [S].
      context: text of the context.
      offsets: characters of its tokens.
      size: of the list; also the number of start and of end positions of each window that are combined.
      max_answer_tokens: longest answer.
    """
    candidates: dict[str, AnswerCandidate] = {}
    no_answer = np.inf
    for i, window in enumerate(windows_of_question):
        no_answer = min(no_answer, float(start_logits[i][0]) + float(end_logits[i][0]))
        positions = slice(window.context_position, window.context_position + window.last - window.first)
        start_BS, end_BS = start_logits[i][positions], end_logits[i][positions]
        for answer in _window_answers(
            start_BS, end_BS, has_most_context(windows_of_question, i), window.first, size, max_answer_tokens
        ):
            first, last, score = answer
            text = context[int(offsets[first, 0]) : int(offsets[last, 1])].strip()
            if text and (text not in candidates or candidates[text].score < score):
                candidates[text] = AnswerCandidate(text, score)
    ranked = sorted(candidates.values(), key=lambda answer: (-answer.score, answer.text))
    return ranked[:size], float(no_answer)


def _window_answers(
    starts: np.ndarray, ends: np.ndarray, has_context: np.ndarray, shift: int, size: int, max_tokens: int
) -> Iterator[tuple[int, int, float]]:
    """(first token, last token, score) of the pairs of the best starts and ends that are possible answers."""
    best_starts = np.argsort(-starts, kind="stable")[:size]
    best_ends = np.argsort(-ends, kind="stable")[:size]
    for first in best_starts:
        for last in best_ends:
            if has_context[first] and first <= last < first + max_tokens:
                yield int(first) + shift, int(last) + shift, float(starts[first]) + float(ends[last])


def best_threshold(
    differences: Sequence[float], score_answered: Sequence[float], score_unanswered: Sequence[float]
) -> tuple[float, float]:
    """The threshold on (no-answer score - best answer's score) above which no answer is given, and its total score.

    Args:
      differences: of each question.
      score_answered: exact match or F1 of each question's best answer.
      score_unanswered: of the answer "".

    Returns:
      the threshold with the highest mean score on these questions, and that mean. Report it as tuned on them.
    """
    order = np.argsort(differences, kind="stable")
    gains = np.asarray(score_answered, np.float64)[order] - np.asarray(score_unanswered, np.float64)[order]
    totals = np.sum(score_unanswered) + np.concatenate([[0.0], np.cumsum(gains)])
    best = int(np.argmax(totals))
    threshold = -np.inf if best == 0 else float(np.asarray(differences)[order[best - 1]])
    return threshold, float(totals[best]) / len(gains)


def predictions(
    questions: Sequence[Question],
    answers_of: Callable[[int], tuple[list[AnswerCandidate], float]],
    threshold: float | None,
) -> dict[str, str]:
    """Predictions in the form of SQuAD's evaluation script: the text by question id, "" for no answer.

    Args:
      questions: of the split.
      answers_of: `best_answers` of a question's index.
      threshold: of `best_threshold`; None: every question has an answer (SQuAD 1.1).
    """
    texts = {}
    for i, question in enumerate(questions):
        ranked, no_answer = answers_of(i)
        is_answered = bool(ranked) and (threshold is None or no_answer - ranked[0].score <= threshold)
        texts[question.question_id] = ranked[0].text if is_answered else ""
    return texts
