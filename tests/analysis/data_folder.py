"""Data for every suite, in the folders and forms of docs/analysis.md, with the words of the tiny corpus."""

import itertools
import json
from pathlib import Path

import numpy as np

from tests.finetune import task_files

DETERMINERS, ADJECTIVES = ("the", "a"), ("quick", "slow", "light", "dark")
NOUNS, VERBS = ("river", "mountain", "stone", "wind"), ("sings", "falls", "runs")


def write(directory: Path) -> Path:
    """All folders; `task` is sst2."""
    directory.mkdir()
    _write_treebank(directory / "treebank")
    task_files.write_tagging(directory / "entities")
    task_files.write_glue(directory / "task", "sst2")
    _write_texts(directory)
    _write_cloze(directory)
    return directory


def phrases(count: int, seed: int) -> list[list[tuple[str, str, int, str]]]:
    """Sentences as (word, part of speech, head from 1, relation): "the slow river sings over a stone"."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        subject = [(rng.choice(DETERMINERS), "DET", "det"), (rng.choice(ADJECTIVES), "ADJ", "amod")]
        subject = subject[: int(rng.integers(1, 3))]
        noun = len(subject) + 1
        words = [(word, tag, noun, relation) for word, tag, relation in subject]
        words += [(rng.choice(NOUNS), "NOUN", noun + 1, "nsubj"), (rng.choice(VERBS), "VERB", 0, "root")]
        if rng.random() < 0.7:
            words += [("over", "ADP", noun + 4, "case"), (rng.choice(DETERMINERS), "DET", noun + 4, "det")]
            words += [(rng.choice(NOUNS), "NOUN", noun + 1, "obl")]
        made.append([*words, (".", "PUNCT", noun + 1, "punct")])
    return made


def _write_treebank(directory: Path) -> None:
    directory.mkdir()
    for split, count in (("train", 60), ("dev", 24), ("test", 8)):
        blocks = [
            "".join(
                f"{i}\t{word}\t{word}\t{tag}\t_\t_\t{head}\t{relation}\t_\t_\n"
                for i, (word, tag, head, relation) in enumerate(sentence, 1)
            )
            for sentence in phrases(count, len(split))
        ]
        (directory / f"small-ud-{split}.conllu").write_text("\n".join(blocks) + "\n")


def _write_texts(directory: Path) -> None:
    texts = [" ".join(word for word, *_ in sentence) for sentence in phrases(160, 7)]
    paragraphs = [f"{first} {second}" for first, second in zip(texts[::2], texts[1::2], strict=True)]
    (directory / "text").mkdir()
    (directory / "text" / "a.txt").write_text("\n".join(paragraphs) + "\n")
    (directory / "languages").mkdir()
    for code, order in (("one", 1), ("two", -1)):
        lines = [" ".join(text.split()[::order]) for text in texts[:40]]
        (directory / "languages" / f"{code}.txt").write_text("\n".join(lines) + "\n")


def _write_cloze(directory: Path) -> None:
    pairs = [(f"the {noun} {verb} .", f"the {verb} {noun} .") for noun in NOUNS for verb in VERBS]
    lines = [{"sentence_good": good, "sentence_bad": bad, "UID": "order", "field": "syntax"} for good, bad in pairs]
    facts = [
        {"sub_label": noun, "obj_label": verb, "masked_sentences": [f"the {noun} [MASK] ."]}
        for noun, verb in zip(NOUNS, itertools.cycle(VERBS), strict=False)
    ]
    for folder, rows in (("minimal_pairs", lines), ("lama", facts)):
        (directory / folder).mkdir()
        (directory / folder / "small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "agreement").mkdir()
    masked = [f"{i % 2}\tthe {noun} sings .\tthe {noun} ***mask*** .\tsings\tstone" for i, noun in enumerate(NOUNS)]
    (directory / "agreement" / "small.tsv").write_text("\n".join(masked) + "\n")
    (directory / "ettinger").mkdir()
    header = "item\tcontext_aff\tcontext_neg\ttarget_aff\ttarget_neg"
    negations = [f"{i}\tthe {noun} is a\tthe {noun} is not a\tstone\triver" for i, noun in enumerate(NOUNS)]
    (directory / "ettinger" / "NEG-136-SIMP.tsv").write_text("\n".join([header, *negations]) + "\n")
