"""The section of the page about attention, and its numbers over checkpoints."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.analysis.attention.patterns import PATTERNS
from bert_jax.analysis.attention.relations import ALL
from bert_jax.analysis.quantities import LAYER, RANDOM, Quantity, by_head, compared, floats
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Curves, Heatmap, Note, ReportBlock, Series, Table
from bert_jax.report.cells import cell

ROWS = ("model", "random_weights")
MEASURES = {
    "attention": "attention weights",
    "norms": "norms",
    "residual_norms": "norms with residual and LayerNorm",
    "value_zeroing": "value zeroing",
}


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    found: dict[str, Scalar] = {}
    text, treebank = result["text"], result["treebank"]
    if text is not None:
        of_model, of_random, uniform = *(text["statistics"][name] for name in ROWS), text["uniform"]

        def mean_of(names: Sequence[str], factor: float) -> Scalar:
            values = [sum(float(np.mean(one[name])) for name in names) for one in (of_model, of_random, uniform)]
            return compared(values[0], {RANDOM: values[1], "uniform attention": values[2]}, factor)

        shares = [pattern_shares(one)["heterogeneous"] for one in (of_model, of_random)]
        flows = [text["flow"][name]["agreement_with_value_zeroing"]["attention"] for name in ROWS]
        agreement = [float(np.mean(floats(by_layer))) for by_layer in flows]
        found |= {
            "attention to [SEP], mean of heads (%)": mean_of(["sep"], 100),
            "attention to the token and its neighbours, mean of heads (%)": mean_of(["self", "previous", "next"], 100),
            "entropy of attention, mean of heads (nats)": mean_of(["entropy_nats"], 1),
            "heterogeneous maps (%)": compared(shares[0], {RANDOM: shares[1]}, 100),
            "rank agreement of attention with value zeroing, mean of layers": compared(
                agreement[0], {RANDOM: agreement[1]}
            ),
        }
    if treebank is not None:
        (overall, gain), (random, random_gain) = (_summary(treebank[name]) for name in ("relations", "random_weights"))
        baselines = {RANDOM: random_gain, "best offset": 0.0}
        found["best head less best offset, mean of relations (points)"] = compared(gain, baselines, 100)
        baselines = {RANDOM: random["accuracy"], "best offset": overall["offset_accuracy"]}
        found["UAS, best head (%)"] = compared(overall["accuracy"], baselines, 100)
    return found


def _summary(relations: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], float]:
    """The row of all words, and the mean over relations of the best head's accuracy less that of the best offset."""
    by_relation = {row["relation"]: row for row in relations}
    overall = by_relation.pop(ALL)
    gains = [row["accuracy"] - row["offset_accuracy"] for row in by_relation.values()]
    return overall, float(np.mean(gains or [math.nan]))


def pattern_shares(statistics: Mapping[str, Any]) -> dict[str, float]:
    """The share of each pattern among the maps of all heads and texts."""
    numbers = {name: float(np.sum(statistics["pattern_texts"][name])) for name in PATTERNS}
    return {name: number / sum(numbers.values()) for name, number in numbers.items()}


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    found: list[ReportBlock] = [
        Note(
            "Where do heads attend, does a head follow a dependency relation, and which tokens contribute to which? "
            "Attention weights alone do not show what a model uses: norms and value zeroing are beside them."
        )
    ]
    for folder, shown in (("text", _text_blocks), ("treebank", _treebank_blocks)):
        part = result[folder]
        found += [Note(f"The data have no folder {folder}/.")] if part is None else shown(part)
    return (*found, Note(f"Seed {result['seed']}."))


def _text_blocks(text: dict[str, Any]) -> list[ReportBlock]:
    of_model = text["statistics"]["model"]
    near = np.sum([of_model[name] for name in ("self", "previous", "next")], axis=0)
    return [
        Note(
            f"{text['texts']:,} texts, each as [CLS] first half [SEP] second half [SEP], {text['tokens']:,} tokens in "
            f"all; {text['skipped_lines']:,} lines had too many tokens or none, {text['texts_of_one_token']:,} a "
            "single one."
        ),
        _statistics_table(text),
        by_head("Attention to [SEP], by layer and head", of_model["sep"], "share"),
        by_head("Attention to the token and its neighbours, by layer and head", near, "share"),
        by_head("Entropy of attention, by layer and head", of_model["entropy_nats"], "nats"),
        Note(
            "Means over queries, then over texts. A head that attends to all tokens equally has the row of uniform "
            "attention. Much attention to [SEP] is read as a head that does nothing there, if the gradient by that "
            "attention and the norm of what is passed on are small as well."
        ),
        *_gradient_blocks(text["gradients"]),
        *_pattern_blocks(text["statistics"]),
        *_distance_blocks(text["statistics"]),
        *_flow_blocks(text),
    ]


def _statistics_table(text: dict[str, Any]) -> Table:
    names = {
        "self": "to the token itself",
        "previous": "to the previous token",
        "next": "to the next token",
        "cls": "to [CLS]",
        "sep": "to [SEP]",
        "sep_to_sep": "from [SEP] to [SEP]",
        "other_to_sep": "from other tokens to [SEP]",
        "punctuation": "to punctuation",
        "entropy_nats": "entropy (nats)",
        "cls_entropy_nats": "entropy of [CLS] (nats)",
    }
    rows = []
    for name, label in names.items():
        model, random = (np.array(text["statistics"][which][name]) for which in ("model", "random_weights"))
        layer, head = np.unravel_index(model.argmax(), model.shape)
        values = (model.mean(), model.max(), random.mean(), text["uniform"][name])
        shown = [f"{value:.3f}" if name.endswith("nats") else f"{value:.1%}" for value in values]
        rows.append((label, shown[0], f"{shown[1]} ({layer}-{head})", *shown[2:]))
    header = ("attention", "mean of heads", "largest (layer-head)", "random weights, mean", "uniform attention")
    return Table(header, tuple(rows))


def _gradient_blocks(gradients: dict[str, Any] | None) -> list[ReportBlock]:
    if gradients is None:
        return [Note("Gradients by attention are left out: the model has no MLM head, and no labelling task head.")]
    by_kind = gradients["by_attention_to"]
    kinds = {"sep": "[SEP]", "cls": "[CLS]", "punctuation": "punctuation", "other": "other tokens"}
    means = {label: [np.mean(floats(row)) for row in by_kind[kind]] for kind, label in kinds.items()}
    loss = {
        "masked tokens": "masked tokens' loss",
        "prediction": "loss of the predicted label (of a regression: the predicted value)",
    }[gradients["loss"]]
    title, unit = "Gradient by attention, mean of heads", "nats per unit of attention"
    return [
        Quantity(title, unit, means, axis=LAYER, log=True).curves(),
        Note(
            f"Mean absolute derivative of the {loss}, by the attention to one key of a kind, in {gradients['texts']:,} "
            "texts. A small value says that a little more or less attention to such a key does not change the loss."
        ),
    ]


def _pattern_blocks(statistics: dict[str, Any]) -> list[ReportBlock]:
    model, random = (pattern_shares(statistics[which]) for which in ("model", "random_weights"))
    numbers = {name: np.array(statistics["model"]["pattern_texts"][name]) for name in PATTERNS}
    main = np.argmax(list(numbers.values()), axis=0)  # the most frequent of each head; of equal ones the first
    rows = tuple(
        (name, f"{model[name]:.1%}", f"{random[name]:.1%}", str(int((main == i).sum())))
        for i, name in enumerate(PATTERNS)
    )
    per_layer = {name: number.mean(1) for name, number in numbers.items()}
    shares = {name: number / sum(per_layer.values()) for name, number in per_layer.items()}
    return [
        Table(("pattern of attention maps", "share of maps", "random weights", "heads with mostly this"), rows),
        Quantity("Patterns of attention maps", "share of maps", shares, axis=LAYER).curves(),
        Note(
            "A map is one head's attention in one text. Patterns after Kovaleva et al. (2019), by a rule: vertical, "
            "attention to [CLS] and [SEP]; diagonal, to the token and its neighbours; block, within the half of the "
            "text; heterogeneous, all others."
        ),
    ]


def _distance_blocks(statistics: dict[str, Any]) -> list[ReportBlock]:
    model, random = statistics["model"], statistics["random_weights"]
    rows = tuple(
        (
            label,
            *(cell(found[name], ".3f", "none") for name in ("head_distance_in_layer", "head_distance_between_layers")),
        )
        for label, found in (("model", model), ("random weights", random))
    )
    return [
        Table(("mean distance of two heads", "of one layer", "of different layers"), rows),
        Note(
            "The distance of two heads is the root of the Jensen-Shannon divergence of their attention, mean over the "
            f"queries of {model['distance_texts']:,} texts: 0, they attend alike."
        ),
    ]


def _flow_blocks(text: dict[str, Any]) -> list[ReportBlock]:
    model, random = text["flow"]["model"], text["flow"]["random_weights"]

    def curves(title: str, key: str, y_label: str) -> Curves:
        series = []
        for color, (name, values) in enumerate(model[key].items()):
            x = tuple(range(len(values)))
            series.append(Series(MEASURES[name], x, floats(values), color=color))
            of_random = floats(random[key][name])
            series.append(Series(f"{MEASURES[name]}, {RANDOM}", x, of_random, dashed=True, color=color))
        return Curves(title, tuple(series), LAYER, y_label)

    names = tuple(model["rollouts"])
    matrix = tuple(map(floats, model["rollout_agreement"]))
    return [
        curves("Agreement with value zeroing", "agreement_with_value_zeroing", "Spearman correlation"),
        curves("Contribution of [CLS] and [SEP]", "share_on_special", "share"),
        Heatmap("Agreement of contributions through all layers", matrix, names, names, "", "", "Spearman correlation"),
        Note(
            f"{text['flow_texts']:,} texts, cut to few tokens. Value zeroing changes the model: it measures how far a "
            "layer's output moves if the value of one token is zero, with residual connection and feed-forward "
            "network. The correlation is over the other tokens of each query, mean over queries and texts: 1, a "
            "measure ranks tokens as value zeroing does; 0, it is unrelated. A rollout multiplies the layers' "
            "matrices."
        ),
    ]


def _treebank_blocks(treebank: dict[str, Any]) -> list[ReportBlock]:
    random = {row["relation"]: row for row in treebank["random_weights"]}
    ordered = sorted(treebank["relations"], key=lambda row: (row["relation"] != ALL, -row["words"]))
    rows = tuple(
        (
            row["relation"],
            f"{row['words']:,}",
            f"{row['layer']}-{row['head']}",
            row["direction"],
            f"{row['accuracy']:.1%}",
            f"{row['offset_accuracy']:.1%} ({row['offset']:+d})",
            f"{100 * (row['accuracy'] - row['offset_accuracy']):+.1f}",
            f"{random[row['relation']]['accuracy']:.1%}",
        )
        for row in ordered
    )
    header = ("relation", "words", "head", "direction", "accuracy", "best offset", "gain (points)", "random weights")
    return [
        Note(
            f"Heads, directions and offsets are chosen on {treebank['sentences_of_selection']:,} sentences "
            f"({treebank['selection']}) and scored on {treebank['sentences_of_scoring']:,} others "
            f"({treebank['scoring']}); {treebank['skipped_sentences']:,} sentences were too long or have words that "
            f"the tokenizer cannot align, {treebank['rare_relations']:,} relations are too rare."
        ),
        Table(header, rows, marked=frozenset(i for i, row in enumerate(ordered) if row["relation"] == ALL)),
        Note(
            "The most attended word of a dependent is the prediction of its head, or the word that attends most to "
            "the dependent. Words with a head count, punctuation does not. The best offset always predicts the word "
            "at one distance. A gain shows that a head's attention goes along with the relation, not that the model "
            "uses the relation there."
        ),
    ]
