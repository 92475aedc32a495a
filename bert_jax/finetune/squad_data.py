"""Extractive question answering as the data of a task: windows as examples, answers from logits, thresholds."""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Float
from bert_jax.distributed.agreement import is_first
from bert_jax.errors import require
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.metrics import answer_f1, exact_match, squad_scores
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.finetune.split_files import find_splits
from bert_jax.finetune.squad import (
    AnswerCandidate,
    Question,
    QuestionWindow,
    answer_positions,
    best_answers,
    best_threshold,
    predictions,
    read_squad,
    windows,
)
from bert_jax.finetune.task_data import Metrics, Split
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

MAX_QUESTION_TOKENS = 64
"""As in google-research/bert run_squad.py."""
NBEST = 20
MAX_ODDS = 1e6
"""Of no answer, where no text can be one."""


class _Windowed(NamedTuple):
    """The questions of a split, and their windows."""

    questions: list[Question]
    windows: list[list[QuestionWindow]]
    """Of each question."""
    offsets: list[np.ndarray]
    """Characters of the context's tokens, of each question."""
    examples: EncodedExamples
    """One example per window."""


class SquadData:
    """A `TaskData` whose examples are windows of a question's context.

    Without `--null-threshold`, the threshold of SQuAD 2.0 is tuned on the split that is scored, as its official script
    does; predictions of a test split then have the threshold of dev.
    """

    kind = "span"
    labels = ("start", "end")
    main_metrics = ("f1",)

    def __init__(
        self,
        splits: dict[str, list[Question]],
        tokenizer: Tokenizer,
        options: FinetuneOptions,
        token_types: int,
        separators: int,
    ):
        """Encode all splits.

        Args:
          splits: questions of train and of held-out splits.
          tokenizer: of the model.
          options: tokens of a window, question and special tokens included; the stride and the threshold.
          token_types: of the model.
          separators: [SEP] between question and context; RoBERTa has 2.
        """
        assert options.max_length is not None
        windowed = {
            name: _encode(questions, tokenizer, options.max_length, options.stride, token_types, separators)
            for name, questions in splits.items()
        }
        self.train = windowed.pop("train").examples
        self._windowed, self._fixed_threshold = windowed, options.null_threshold
        self.splits = {
            name: Split(one.examples, name == "dev", any(question.answers for question in one.questions))
            for name, one in windowed.items()
        }

    def metrics(self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None) -> Metrics:
        """Exact match and F1 in percent; with unanswerable questions also of each kind, and the threshold."""
        questions = self._windowed[split].questions
        texts, threshold = self._texts(split, logits, dev_logits)
        metrics = squad_scores([question.answers for question in questions], texts)
        if threshold is not None:
            metrics["null_threshold"] = float(np.clip(threshold, -MAX_ODDS, MAX_ODDS))
            for kind, has_answer in (("answerable", True), ("unanswerable", False)):
                chosen = [i for i, question in enumerate(questions) if bool(question.answers) == has_answer]
                if not chosen:
                    continue
                of_kind = squad_scores([questions[i].answers for i in chosen], [texts[i] for i in chosen])
                metrics |= {f"{kind}_{name}": value for name, value in of_kind.items()}
        return metrics

    def class_f1(self, split: str, logits: np.ndarray) -> Metrics:
        """None: questions have no classes."""
        return {}

    def baseline(self, split: str) -> Metrics:
        """The F1 of giving no answer to any question."""
        questions = self._windowed[split].questions
        return {"f1": squad_scores([question.answers for question in questions], [""] * len(questions))["f1"]}

    def item_scores(self, split: str, logits: np.ndarray) -> dict[str, Float[np.ndarray, "2 E"]]:
        """Of exact match and F1 in percent; an example is a question."""
        pairs = zip(self._windowed[split].questions, self._texts(split, logits)[0], strict=True)
        scores = [squad_scores([question.answers], [text]) for question, text in pairs]
        return {name: np.array([(one[name], 1.0) for one in scores]).T for name in ("exact_match", "f1")}

    def _texts(
        self, split: str, logits: np.ndarray, dev_logits: np.ndarray | None = None
    ) -> tuple[list[str], float | None]:
        """The answer to each question, and the threshold; arguments as of `metrics`."""
        questions, answers = self._windowed[split].questions, self._answers(split, logits)
        tuned_on = (questions, answers)
        if dev_logits is not None:
            tuned_on = self._windowed["dev"].questions, self._answers("dev", dev_logits)
        threshold = self._threshold(*tuned_on)
        predicted = predictions(questions, answers.__getitem__, threshold)
        return [predicted[question.question_id] for question in questions], threshold

    def write_predictions(self, directory: StoredPath, logits: Mapping[str, np.ndarray]) -> None:
        """Write ``SPLIT.json`` in the form of SQuAD's script, ``SPLIT_nbest.json``, and ``SPLIT_null_odds.json``."""
        answers = {split: self._answers(split, of_tokens) for split, of_tokens in logits.items()}
        threshold = self._threshold(self._windowed["dev"].questions, answers["dev"])
        for split, of_split in answers.items():
            self._write_split(directory, split, of_split, threshold)

    def _write_split(
        self,
        directory: StoredPath,
        split: str,
        answers: list[tuple[list[AnswerCandidate], float]],
        threshold: float | None,
    ) -> None:
        questions = self._windowed[split].questions
        ids = [question.question_id for question in questions]
        files = {
            f"{split}.json": predictions(questions, answers.__getitem__, threshold),
            f"{split}_nbest.json": {
                name: [answer._asdict() for answer in ranked] for name, (ranked, _) in zip(ids, answers, strict=True)
            },
            f"{split}_null_odds.json": {
                name: no_answer - ranked[0].score if ranked else MAX_ODDS
                for name, (ranked, no_answer) in zip(ids, answers, strict=True)
            },
        }
        for name, content in files.items():
            write_atomic(directory / name, (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())

    def _answers(self, split: str, logits: np.ndarray) -> list[tuple[list[AnswerCandidate], float]]:
        """The best answers of each question, and the score of no answer. Logits are of tokens, [T, 2]."""
        one = self._windowed[split]
        found, window = [], 0
        for i, question in enumerate(one.questions):
            starts = one.examples.starts[window : window + len(one.windows[i]) + 1]
            rows = [logits[a:b] for a, b in itertools.pairwise(starts)]
            sides = ([row[:, side] for row in rows] for side in range(2))
            found.append(best_answers(one.windows[i], *sides, question.context, one.offsets[i], size=NBEST))
            window += len(one.windows[i])
        return found

    def _threshold(
        self, questions: Sequence[Question], answers: list[tuple[list[AnswerCandidate], float]]
    ) -> float | None:
        """The threshold of no answer; None if all questions have one, as in SQuAD 1.1."""
        if self._fixed_threshold is not None:
            return self._fixed_threshold
        if all(question.answers for question in questions):
            return None
        differences = [no_answer - ranked[0].score if ranked else np.inf for ranked, no_answer in answers]
        best = [ranked[0].text if ranked else "" for ranked, _ in answers]
        accepted = [question.answers or ("",) for question in questions]
        answered = [max(answer_f1(text, guess) for text in texts) for texts, guess in zip(accepted, best, strict=True)]
        unanswered = [max(exact_match(text, "") for text in texts) for texts in accepted]
        return best_threshold(differences, answered, unanswered)[0]


def read_squad_splits(directory: StoredPath, file_options: FileOptions) -> dict[str, list[Question]]:
    """The questions of train, dev and, if there is one, test.

    Args:
      directory: of the files.
      file_options: with `skip_damaged`, what is left out is counted in a warning.

    Raises:
      UserError: a missing split, a file that is not in SQuAD's form, or a training split without answers.
    """
    splits: dict[str, list[Question]] = {}
    for split, paths in find_splits(directory, (".json", ".parquet")).items():
        splits[split] = []
        for path in paths:
            questions, damaged = read_squad(path, skip_damaged=file_options.skip_damaged)
            if damaged and is_first():
                total = len(questions) + len(damaged)
                print(
                    f"warning: {path}: {len(damaged):,} of {total:,} questions are damaged and left out, the first: "
                    f"{damaged[0].removeprefix(f'{path}: ').partition(': correct')[0]}",
                    file=sys.stderr,
                )
            splits[split] += questions
        repeated = len(splits[split]) - len({question.question_id for question in splits[split]})
        require(repeated == 0, f"{directory}: {repeated} question(s) of {split} have the id of another one")
    for split in ("train", "dev"):
        has_answers = any(question.answers for question in splits[split])
        require(has_answers, f"{directory}: no question of {split} has an answer")
    return splits


def _encode(
    questions: list[Question], tokenizer: Tokenizer, max_length: int, stride: int, token_types: int, separators: int
) -> _Windowed:
    contexts = {context: tokenizer.encode_with_offsets(context) for context in {q.context for q in questions}}
    all_windows, offsets, rows, types, labels = [], [], [], [], []
    for i, question in enumerate(questions):
        question_ids = tokenizer.encode(question.question)[:MAX_QUESTION_TOKENS]
        ids, of_context = contexts[question.context]
        cut = windows(i, len(question_ids), len(ids), max_length, stride, separators)
        for window in cut:
            head = [tokenizer.cls_id, *question_ids, *[tokenizer.sep_id] * separators]
            row = [*head, *ids[window.first : window.last], tokenizer.sep_id]
            rows.append(row)
            types.append([0] * len(head) + [int(token_types >= 2)] * (len(row) - len(head)))
            has_answer = bool(question.answers)
            answer = (question.answers[0], question.starts[0]) if has_answer else ("", 0)
            labels.append(answer_positions(window, of_context, *answer) if has_answer else (0, 0))
        all_windows.append(cut)
        offsets.append(of_context)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    input_ids, token_type_ids = (np.concatenate(arrays).astype(np.int32) for arrays in (rows, types))
    examples = EncodedExamples(input_ids, token_type_ids, starts, np.array(labels, np.int32), 0)
    return _Windowed(questions, all_windows, offsets, examples)
