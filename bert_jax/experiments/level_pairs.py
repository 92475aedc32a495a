"""The pairs of levels that a study compares, and the cells that each level's scores are means of."""

from collections.abc import Iterator
from typing import NamedTuple

from bert_jax.experiments.budget import Cell
from bert_jax.experiments.study import Study


class LevelPair(NamedTuple):
    """A level and the baseline of its factor."""

    factor: str
    level: str
    baseline: str
    level_cells: list[Cell]
    """In the order of the other factors' levels."""
    baseline_cells: list[Cell]

    @property
    def paired(self) -> bool:
        """Whether runs with the same index have the same seed (`Cell.seeds`)."""
        return [cell.seeds for cell in self.level_cells] == [cell.seeds for cell in self.baseline_cells]

    @property
    def share_pretraining(self) -> bool:
        """Whether both sides are fine-tuned from the same pretraining runs."""
        return [cell.pretrained for cell in self.level_cells] == [cell.pretrained for cell in self.baseline_cells]


def level_pairs(study: Study, cells: list[Cell]) -> Iterator[LevelPair]:
    """Every level against the baseline of its factor."""
    for factor, levels in study.factors.items():
        baseline = study.baseline_levels[factor]
        sides = {level: _cells_with(study, cells, factor, level) for level in levels}
        for level in levels:
            if level != baseline:
                yield LevelPair(factor, level, baseline, sides[level], sides[baseline])


def _cells_with(study: Study, cells: list[Cell], factor: str, level: str) -> list[Cell]:
    found = [cell for cell in cells if cell.levels[factor] == level]
    if study.design == "grid":
        return found
    return [cell for cell in found if cell.levels | {factor: ""} == study.baseline_levels | {factor: ""}]
