"""Files of facts in LAMA's form, with their negated and misprimed variants.

A line has `obj_label` and `sub_label`, and its prompt is the first of

- the template of its relation, from a file relations.jsonl with `relation` (the name of the facts' file, or their
  `predicate_id`), `template` with [X] and [Y], and maybe `template_negated`; equal pairs of subject and object count
  once;
- `masked_sentences`, with [MASK] once;
- the first `masked_sentence` of its `evidences`.

Variants are taken from `masked_negations` or `negated`, and from `masked_misprimed`. Where the data has none, a
negation has "not" after the first form of be or modal verb, and a misprime is another object of the file and a question
mark before the sentence, as in "Talk? Birds can [MASK]."
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.cloze.item_files import first_text, item_name, read_json_lines, text_of
from bert_jax.analysis.cloze.predictions import MASK
from bert_jax.errors import require
from bert_jax.finetune.tables import read_text
from bert_jax.storage.paths import StoredPath

TEMPLATES = "relations.jsonl"
AUXILIARIES = ("is", "are", "was", "were", "can", "could", "will", "would", "may", "might", "must", "should")
REASONS = ("repeated", "mask_not_once", "rejected_by_judges", "too_many_words")
MAX_WORDS = 100
"""Longer sentences without a template are left out, as in LAMA."""


class Fact(NamedTuple):
    """A prompt with one [MASK], and the word that belongs there."""

    text: str
    object: str
    negated: str | None
    misprimed: str | None
    item: str
    """Its file and line."""


class Relation(NamedTuple):
    """The facts of a file."""

    facts: list[Fact]
    skipped: dict[str, int]
    """Lines that are no facts, by reason."""


class Template(NamedTuple):
    """The sentence of a relation, with [X] for the subject and [Y] for the object."""

    text: str
    negated: str | None


def common_vocabulary(path: StoredPath | None) -> list[str] | None:
    """The words of a file with one per line; None without a file.

    Raises:
      UserError: not UTF-8, or no word.
    """
    if path is None:
        return None
    words = [line.strip() for line in read_text(path).split("\n") if line.strip()]
    require(bool(words), f"{path}: the file is empty: write one word per line")
    return words


def read_relations(files: Sequence[StoredPath], seed: int) -> dict[str, Relation]:
    """The facts of all files but that of templates, by name of the file without its ending.

    Args:
      files: ``.jsonl``.
      seed: of the misprimes that are not in the data.

    Raises:
      UserError: an empty or malformed file, or a fact without a prompt.
    """
    templates = [path for path in files if path.name == TEMPLATES]
    by_relation = _read_templates(templates[0]) if templates else {}
    facts = [path for path in files if path.name != TEMPLATES]
    require(bool(facts), f"{files[0].parent}: only templates: put the files of the facts there")
    return {path.stem: _read_facts(path, by_relation, seed) for path in facts}


def draw_facts(facts: Sequence[Fact], count: int, seed: int) -> list[Fact]:
    """At most `count` facts, in their order; all with `count` 0."""
    if count == 0 or len(facts) <= count:
        return list(facts)
    return [facts[i] for i in sorted(np.random.default_rng(seed).permutation(len(facts))[:count])]


def negate(text: str) -> str | None:
    """The text with "not" after its first form of be or modal verb; None if it has none."""
    words = text.split()
    for i, word in enumerate(words):
        if word.lower() in AUXILIARIES:
            return " ".join([*words[: i + 1], "not", *words[i + 1 :]])
    return None


def misprime(text: str, gold: str, objects: Sequence[str], rng: np.random.Generator) -> str | None:
    """The text after a wrong object with a question mark; None if there is no other object.

    Args:
      text: of the fact.
      gold: its object.
      objects: different objects of the relation.
      rng: that draws one of them.
    """
    others = [one for one in objects if one.lower() != gold.lower()]
    if not others:
        return None
    word = others[int(rng.integers(len(others)))]
    return f"{word[:1].upper()}{word[1:]}? {text}"


def _read_templates(path: StoredPath) -> dict[str, Template]:
    templates = {}
    for where, values in read_json_lines(path):
        text = text_of(values, "template", where)
        negated = text_of(values, "template_negated", where, "") or None
        for one in filter(None, (text, negated)):
            has_both = one.count("[X]") == 1 and one.count("[Y]") == 1
            require(has_both, f"{where}: '{one}': a template must have [X] and [Y] once each")
        templates[text_of(values, "relation", where)] = Template(text, negated)
    return templates


def _read_facts(path: StoredPath, templates: Mapping[str, Template], seed: int) -> Relation:
    lines, skipped, seen = [], Counter(dict.fromkeys(REASONS, 0)), set()
    for where, values in read_json_lines(path):
        gold = text_of(values, "obj_label", where)
        template = templates.get(text_of(values, "predicate_id", where, "")) or templates.get(path.stem)
        text, negated = _prompts(values, template, where)
        pair = (text, gold)
        if template is not None and pair in seen:
            skipped["repeated"] += 1
        elif text.count(MASK) != 1:
            skipped["mask_not_once"] += 1
        elif _rejected(values):
            skipped["rejected_by_judges"] += 1
        elif template is None and len(text.split()) > MAX_WORDS:
            skipped["too_many_words"] += 1
        else:
            lines.append((text, gold, negated, first_text(values, ("masked_misprimed",), where), item_name(where)))
        seen.add(pair)
    objects, rng = list(dict.fromkeys(gold for _, gold, *_ in lines)), np.random.default_rng(seed)
    facts = [
        Fact(text, gold, negated or negate(text), primed or misprime(text, gold, objects, rng), item)
        for text, gold, negated, primed, item in lines
    ]
    return Relation(facts, dict(skipped))


def _prompts(values: Mapping[str, Any], template: Template | None, where: str) -> tuple[str, str | None]:
    """The prompt, and the negated prompt of the data if it has one [MASK]."""
    if template is not None:
        subject = text_of(values, "sub_label", where)
        text, negated = (one and one.replace("[X]", subject).replace("[Y]", MASK) for one in template)
    else:
        evidences = values.get("evidences")
        first = evidences[0] if isinstance(evidences, list) and evidences else {}
        text = first_text(values, ("masked_sentences",), where)
        if text is None and isinstance(first, dict):
            text = first_text(first, ("masked_sentence",), where)
        negated = first_text(values, ("masked_negations", "negated"), where)
        message = f"{where}: no prompt: give masked_sentences, evidences, or a template in {TEMPLATES}"
        require(text is not None, message)
    return text, negated if negated is not None and negated.count(MASK) == 1 else None


def _rejected(values: Mapping[str, Any]) -> bool:
    """Whether more judges of Google-RE said no than yes."""
    judgments = values.get("judgments")
    said = Counter(
        one.get("judgment") for one in (judgments if isinstance(judgments, list) else []) if isinstance(one, dict)
    )
    return said["no"] > said["yes"]
