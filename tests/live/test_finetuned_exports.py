"""Exports of fine-tuned runs in transformers give the predictions of the run. Needs the extra `parity`."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bert_jax.convert.conversion import convert
from bert_jax.finetune import finetune
from bert_jax.finetune.options import FinetuneOptions
from tests.finetune import task_files
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = [*BESIDE_TRANSFORMERS, pytest.mark.usefixtures("quick_compilation")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

OPTIONS = {"steps": 40, "batch_size": 16, "learning_rate": 5e-3, "dropout": 0.0}


@pytest.fixture
def export(tiny_run, tmp_path):
    """A function that fine-tunes a run and exports it; returns the export and the lines of a file of predictions."""

    def make(task, data, predictions="dev.jsonl", **options):
        finetune.finetune(tiny_run, task, data, tmp_path / "run", FinetuneOptions(**OPTIONS | options))
        assert convert(tmp_path / "run", tmp_path / "exported", "huggingface").passed
        return str(tmp_path / "exported"), (tmp_path / "run/predictions" / predictions).read_text().splitlines()

    return make


def test_classification_and_pairs(export, tmp_path, monkeypatch):
    """The labels and logits of dev, through `pipeline`."""
    monkeypatch.chdir(tmp_path)
    model, lines = export("rte", task_files.write_glue(tmp_path / "rte", "rte"))
    pipeline = transformers.pipeline("text-classification", model, device="cpu", function_to_apply="none", top_k=None)
    pairs = [row.split("\t")[1:3] for row in (tmp_path / "rte/dev.tsv").read_text().splitlines()[1:]]
    answers = pipeline([{"text": first, "text_pair": second} for first, second in pairs])
    found = set()
    for answer, line in zip(answers, map(json.loads, lines), strict=True):
        assert answer[0]["label"] == line["prediction"]
        logits = {entry["label"]: entry["score"] for entry in answer}
        expected = dict(zip(("entailment", "not_entailment"), line["logits"], strict=True))
        assert logits == pytest.approx(expected, abs=1e-4)
        found.add(answer[0]["label"])
    assert len(found) == 2
    exec(re.search(r"```python\n(.*?)```", Path(model, "README.md").read_text(), re.DOTALL)[1])  # opens `exported`


def test_regression(export, tmp_path):
    """Scores as they are, without a sigmoid."""
    data = task_files.write_glue(tmp_path / "stsb", "stsb")
    model, lines = export("stsb", data)
    pipeline = transformers.pipeline("text-classification", model, device="cpu")
    pairs = [row.split("\t")[1:3] for row in (data / "dev.tsv").read_text().splitlines()[1:]]
    scores = [answer["score"] for answer in pipeline([{"text": a, "text_pair": b} for a, b in pairs])]
    expected = [json.loads(line)["prediction"] for line in lines]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert max(scores) > 1 + min(scores)


def test_tagging(export, tmp_path):
    """The tag of each word's first token."""
    model, lines = export("tagging", task_files.write_tagging(tmp_path / "tagging"))
    pipeline = transformers.pipeline("token-classification", model, device="cpu", aggregation_strategy="none")
    found = set()
    for line in map(json.loads, lines):
        starts = np.cumsum([0, *(len(word) + 1 for word in line["words"][:-1])])
        answer = pipeline(" ".join(line["words"]), ignore_labels=[])
        by_start = {entry["start"]: entry["entity"] for entry in answer}
        assert [by_start[start] for start in starts] == line["predictions"]
        found |= set(line["predictions"])
    assert len(found) > 1


def test_several_labels(export, tmp_path):
    """The labels whose probability exceeds one half, through `pipeline`, which applies a sigmoid."""
    data = task_files.write_multilabel(tmp_path / "data")
    model, lines = export("multilabel", data, steps=80)
    pipeline = transformers.pipeline("text-classification", model, device="cpu", top_k=None)
    texts = [json.loads(line)["text"] for line in (data / "dev.jsonl").read_text().splitlines()]
    for answer, line in zip(pipeline(texts), map(json.loads, lines), strict=True):
        assert sorted(entry["label"] for entry in answer if entry["score"] > 0.5) == line["prediction"]
        expected = dict(zip(("place", "thing"), 1 / (1 + np.exp(-np.array(line["logits"]))), strict=True))
        assert {entry["label"]: entry["score"] for entry in answer} == pytest.approx(expected, abs=1e-4)


def test_multiple_choice(export, tmp_path):
    """The logits of all endings, in one call of transformers' class."""
    data = task_files.write_choices(tmp_path / "choices")
    model, lines = export("multiple_choice", data, steps=60)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reader = transformers.AutoModelForMultipleChoice.from_pretrained(model).eval()
    assert type(reader).__name__ == "BertForMultipleChoice"
    found = set()
    for row, line in zip(task_files.choice_rows("dev"), map(json.loads, lines), strict=True):
        endings = [f"{row['sent2']} {row[f'ending{j}']}" for j in range(3)]
        encoded = tokenizer([row["sent1"]] * 3, endings, return_tensors="pt", padding=True)
        with torch.no_grad():
            logits = reader(**{name: tensor[None] for name, tensor in encoded.items()}).logits[0].numpy()
        np.testing.assert_allclose(logits, line["logits"], rtol=0, atol=1e-4)
        assert str(logits.argmax()) == line["prediction"]
        found.add(line["prediction"])
    assert len(found) == 3
    assert "AutoModelForMultipleChoice" in Path(model, "README.md").read_text()


def test_question_answering(export, tmp_path):
    """transformers 5 has no pipeline for it; the best span of its start and end logits is our answer."""
    data = task_files.write_squad(tmp_path / "squad")
    model, lines = export("squad", data, "dev.json", steps=60)
    answers = json.loads("\n".join(lines))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reader = transformers.AutoModelForQuestionAnswering.from_pretrained(model).eval()
    for paragraph in json.loads((data / "dev.json").read_text())["data"][0]["paragraphs"]:
        context, question = paragraph["context"], paragraph["qas"][0]
        encoded = tokenizer(question["question"], context, return_tensors="pt", return_offsets_mapping=True)
        offsets, is_context = encoded.pop("offset_mapping")[0], np.array(encoded.sequence_ids(0)) == 1
        with torch.no_grad():
            output = reader(**encoded)
        start, end = output.start_logits[0].numpy(), output.end_logits[0].numpy()
        length = np.arange(len(start))[None] - np.arange(len(start))[:, None]
        allowed = is_context[:, None] & is_context[None] & (length >= 0) & (length < 30)
        first, last = np.unravel_index(np.where(allowed, start[:, None] + end[None], -np.inf).argmax(), allowed.shape)
        assert context[offsets[first][0] : offsets[last][1]] == answers[question["id"]]
    assert len(set(answers.values())) > 1
    assert "AutoModelForQuestionAnswering" in Path(model, "README.md").read_text()
