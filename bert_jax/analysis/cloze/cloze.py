"""The suite: minimal pairs, agreement, the diagnostics of Ettinger and facts, those whose folder is there."""

from dataclasses import dataclass
from typing import Any

from bert_jax.analysis.cloze import ettinger, lama, minimal_pairs, verb_agreement
from bert_jax.analysis.cloze.section import blocks, scalars
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.errors import require
from bert_jax.field_validation import CountOrZero, check
from bert_jax.storage.paths import StoredPath

FOLDERS = ("minimal_pairs", "agreement", "ettinger", "lama")


@dataclass(frozen=True)
class ClozeSettings:
    """How much of the data is read."""

    pairs: CountOrZero = 600
    """Minimal pairs, the same number of each UID, drawn at random; 0: all. BLiMP has 67 UIDs with 1,000 pairs."""
    facts_per_relation: CountOrZero = 50
    """Facts of each file of lama/, drawn at random; 0: all."""

    def __post_init__(self) -> None:
        check(self, "cloze.")


def run(inputs: SuiteInputs, settings: ClozeSettings) -> SuiteResult:
    """The results of the tests whose folder is there, by folder.

    Raises:
      UserError: no MLM head, a causal model, none of the folders, or malformed data.
    """
    model = inputs.model
    require(model.heads.mlm, "cloze: the model has no MLM head: give one that was pretrained with one")
    require(model.config.direction == "bidirectional", "cloze: a causal model does not predict masked tokens")
    present = [folder for folder in FOLDERS if (inputs.data / folder).is_dir()]
    require(bool(present), f"cloze: {inputs.data} has none of the folders {', '.join(FOLDERS)} (docs/analysis.md)")
    models = {"model": model, "random_weights": inputs.with_random_weights()}
    results: dict[str, Any] = {}
    items: dict[str, ItemScores] = {}
    for folder in present:
        files = inputs.files(folder, ".tsv" if folder in ("agreement", "ettinger") else ".jsonl")
        if folder == "minimal_pairs":
            results[folder], items[folder] = minimal_pairs.run(
                files, models, settings.pairs, inputs.seed, inputs.progress
            )
        elif folder == "agreement":
            results[folder], items[folder] = verb_agreement.run(files, models, inputs.progress)
        elif folder == "ettinger":
            results[folder], by_dataset = ettinger.run(files, models)
            items |= by_dataset
        else:
            arguments = (settings.facts_per_relation, inputs.seed, inputs.progress)
            results[folder], items[folder] = lama.run(files, _vocabulary(inputs.data / folder), models, *arguments)
    return {"seed": inputs.seed, **results, ITEMS: items}


def _vocabulary(folder: StoredPath) -> StoredPath | None:
    """The file of the common vocabulary, the only ``.txt`` of lama/; None if there is none."""
    found = sorted((path for path in folder.iterdir() if path.name.endswith(".txt")), key=str)
    names = ", ".join(path.name for path in found)
    require(len(found) <= 1, f"{folder}: {names}: keep one vocabulary, with one word per line")
    return found[0] if found else None


SUITE = Suite("cloze", ClozeSettings, FOLDERS, run, blocks, scalars, needs_mlm_head=True, any_folder=True)
