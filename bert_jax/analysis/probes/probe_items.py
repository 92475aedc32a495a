"""The tests of probes: scores of dev sentences, of the best hidden state or head of the other half of the sentences."""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.analysis.bootstrap import cross_fit
from bert_jax.analysis.item_scores import MODEL, ItemScores
from bert_jax.analysis.probes.attention_trees import TreeBaselines
from bert_jax.analysis.probes.by_state import LabelScores
from bert_jax.analysis.probes.structural import TreeScores, correlation_items
from bert_jax.array_types import Float

TITLES = {"pos": "Parts of speech", "relations": "Dependency relations", "entities": "Entities"}
UUAS = "UUAS of the structural probe, best state"
DEPTHS = "depths of the structural probe, best state, Spearman"
ATTENTION = "UUAS of trees from attention, best head"
CONTROL, RANDOM = "control_task", "random_weights"


def label_test(name: str, metric: str) -> str:
    """The name of the test of a task's best state."""
    return f"{TITLES[name]}: {metric}, best state"


def label_items(
    name: str,
    metric: str,
    sentences: Sequence[str],
    model: LabelScores,
    random: LabelScores,
    constants: Mapping[str, Float[np.ndarray, "2 m"]],
) -> dict[str, ItemScores]:
    """Tests of a task.

    Args:
      name: of the task.
      metric: of the task.
      sentences: names of the dev sentences.
      model, random: means over the seeds.
      constants: scores and weights of predictions without vectors, by column.
    """
    best, of_random = (cross_fit(one.states[:, 0], one.states[:, 1]) for one in (model, random))
    columns = {
        MODEL: (best.scores, best.weights),
        CONTROL: (best.pick(model.control[:, 0]), best.pick(model.control[:, 1])),
        RANDOM: (of_random.scores, of_random.weights),
        **{column: tuple(values) for column, values in constants.items()},
    }
    found = {label_test(name, metric): _test(sentences, columns)}
    if model.spans is not None and random.spans is not None:
        spans = {
            column: cross_fit(one[:, 0], one[:, 1])[1:]
            for column, one in ((MODEL, model.spans), (RANDOM, random.spans))
        }
        found[label_test(name, "span F1")] = _test(sentences, spans)
    return found


def _test(sentences: Sequence[str], columns: Mapping[str, Sequence[np.ndarray]]) -> ItemScores:
    scores, weights = ({column: values[i] for column, values in columns.items()} for i in (0, 1))
    return ItemScores(tuple(sentences), None, scores, weights)


def tree_items(sentences: Sequence[str], rows: Mapping[str, TreeScores]) -> dict[str, ItemScores]:
    """Tests of the structural probe.

    Args:
      sentences: names of the dev sentences.
      rows: by column, [S, m], or [m] of a baseline without states.
    """
    edges, depths, there = {}, {}, np.ones(len(sentences), bool)
    for column, one in rows.items():
        states = one._replace(**{name: np.atleast_2d(values) for name, values in one._asdict().items()})
        edges[column] = cross_fit(states.edges, states.gold_edges)[1:]
        values, counts = correlation_items(states, "depth_spearman")
        there &= counts
        depths[column] = values
    chosen = np.flatnonzero(there)
    groups = tuple(str(int(n)) for n in np.atleast_2d(next(iter(rows.values())).lengths)[0, chosen])
    found = {UUAS: _test(sentences, edges)}
    if len(chosen):
        scores = {
            column: cross_fit(values[:, chosen], np.ones(len(chosen))).scores for column, values in depths.items()
        }
        found[DEPTHS] = ItemScores(tuple(sentences[i] for i in chosen), groups, scores, unit="")
    return found


def attention_items(
    sentences: Sequence[str], edges: Mapping[str, Float[np.ndarray, "L N m"]], baselines: TreeBaselines
) -> dict[str, ItemScores]:
    """The test of trees from attention; `edges` by row, of `attention_trees.head_edges`."""
    columns = {row: cross_fit(of.reshape(-1, of.shape[-1]), baselines.gold)[1:] for row, of in edges.items()}
    columns |= {"chain": (baselines.chain, baselines.gold), "random_trees": (baselines.random, baselines.gold)}
    return {ATTENTION: _test(sentences, columns)}
