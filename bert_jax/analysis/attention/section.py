"""The section of the page about attention, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.analysis.attention.patterns import PATTERNS
from bert_jax.analysis.attention.relations import ALL, BEST_HEAD, OFFSET, test_of
from bert_jax.analysis.attention.statistics import DISTANCES
from bert_jax.analysis.item_scores import MODEL, format_p, test_title, with_interval
from bert_jax.analysis.quantities import (
    LAYER,
    RANDOM,
    Quantity,
    by_head,
    cells,
    floats,
    interval_cells,
    scalar_of_mean,
    scalar_of_test,
    seeds_text,
)
from bert_jax.analysis.suite import UNCERTAINTY, Scalar, SuiteResult
from bert_jax.report import Curves, Heatmap, Note, ReportBlock, Table
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
    treebank, tests = result["treebank"], result[UNCERTAINTY]
    found = {
        test_title(test, about["unit"]): scalar_of_test(result, test)
        for test, about in tests.items()
        if not test.startswith(BEST_HEAD)
    }
    if treebank is not None:
        if (gain := treebank["mean_gain"]) is not None:
            accuracy, of_offset = (np.array(treebank["random_weights"][key]) for key in ("accuracy", "offset_accuracy"))
            baselines = {RANDOM: float((accuracy - of_offset)[:-1].mean()), "best offset": 0.0}
            title = "best head less best offset, mean of relations (points)"
            found[title] = scalar_of_mean(gain, baselines, 100)
        found["UAS, best head (%)"] = scalar_of_test(result, test_of(ALL))
    return found


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
        none = [Note(f"The data have no folder {folder}/.")]
        found += none if part is None else shown(part, result[UNCERTAINTY])
    return (*found, Note(f"{seeds_text(result).capitalize()}."))


def _text_blocks(text: dict[str, Any], tests: Mapping[str, Any]) -> list[ReportBlock]:
    of_model = text["statistics"]["model"]
    width = {name: cell(one, ".3f") for name, one in of_model["half_width"].items()}
    return [
        Note(
            f"{text['texts']:,} texts, each as [CLS] first half [SEP] second half [SEP], {text['tokens']:,} tokens in "
            f"all; {text['skipped_lines']:,} lines had too many tokens or none, {text['texts_of_one_token']:,} a "
            "single one."
        ),
        _statistics_table(text),
        by_head("Attention to [SEP], by layer and head", of_model["sep"], "share"),
        by_head("Attention to the token and its neighbours, by layer and head", of_model["near"], "share"),
        by_head("Entropy of attention, by layer and head", of_model["entropy_nats"], "nats"),
        Note(
            "Means over queries, then over texts; in square brackets and as bands, intervals of 95 % over texts. That "
            f"of a single head is at most {width['sep']} to either side in the first map, {width['near']} in "
            f"the second and {width['entropy_nats']} nats in the third. A head that attends to all tokens equally "
            "has the row of uniform attention. Much attention to [SEP] is read as a head that does nothing there, if "
            "the gradient by that attention and the norm of what is passed on are small as well."
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
        model = np.array(text["statistics"]["model"][name])
        layer, head = np.unravel_index(model.argmax(), model.shape)
        form, factor = (".3f", 1) if name.endswith("nats") else (".1f", 100)
        largest, uniform = cells((model.max(), text["uniform"][name]), form, factor)
        means = (text["statistics"][which]["mean_of_heads"][name] for which in ROWS)
        mean, of_random = (interval_cells({key: [one] for key, one in of.items()}, form, factor)[0] for of in means)
        rows.append((label, mean, f"{largest} ({layer}-{head})", of_random, uniform))
    header = ("attention (%)", "mean of heads", "largest (layer-head)", "random weights, mean", "uniform attention")
    return Table(header, tuple(rows))


def _gradient_blocks(gradients: dict[str, Any] | None) -> list[ReportBlock]:
    if gradients is None:
        return [Note("Gradients by attention are left out: the model has no MLM head, and no labelling task head.")]
    kinds = {"sep": "[SEP]", "cls": "[CLS]", "punctuation": "punctuation", "other": "other tokens"}
    model, random = (gradients["by_attention_to"][row] for row in ROWS)
    means = {label: model[kind] for kind, label in kinds.items()}
    baselines = {f"{label}, {RANDOM}": random[kind] for kind, label in kinds.items()}
    loss = {
        "masked tokens": "masked tokens' loss",
        "prediction": "loss of the predicted label (of a regression: the predicted value)",
    }[gradients["loss"]]
    title, unit = "Gradient by attention, mean of heads", "nats per unit of attention"
    return [
        Quantity(title, unit, means, baselines, LAYER, log=True, same_colors=True).curves(),
        Note(
            f"Mean absolute derivative of the {loss}, by the attention to one key of a kind, in {gradients['texts']:,} "
            "texts. A small value says that a little more or less attention to such a key does not change the loss."
        ),
    ]


def _pattern_blocks(statistics: dict[str, Any]) -> list[ReportBlock]:
    numbers = np.array(list(statistics["model"]["pattern_texts"].values()))
    main = numbers.argmax(0)  # the most frequent of each head; of equal ones the first
    shares = (interval_cells(statistics[which]["pattern_shares"], ".1f", 100) for which in ROWS)
    rows = tuple(
        (name, *of, str(int((main == i).sum()))) for i, (name, *of) in enumerate(zip(PATTERNS, *shares, strict=True))
    )
    by_layer = statistics["model"]["pattern_shares_by_layer"]
    lines = {name: {key: values[i] for key, values in by_layer.items()} for i, name in enumerate(PATTERNS)}
    return [
        Table(("pattern of attention maps", "share of maps (%)", "random weights (%)", "heads with mostly this"), rows),
        Quantity("Patterns of attention maps", "share of maps", lines, axis=LAYER).curves(),
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
            *("none" if one is None else interval_cells({k: [v] for k, v in one.items()})[0] for one in distances),
        )
        for label, found in (("model", model), ("random weights", random))
        for distances in [[found[name] for name in DISTANCES]]
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
        lines = {MEASURES[name]: values for name, values in model[key].items()}
        baselines = {f"{MEASURES[name]}, {RANDOM}": values for name, values in random[key].items()}
        return Quantity(title, y_label, lines, baselines, LAYER, same_colors=True).curves()

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
            "measure ranks tokens as value zeroing does; 0, it is unrelated. Bands: 95 % over texts; in the map, at "
            f"most {cell(model['rollout_agreement_half_width'], '.3f')} to either side. A rollout multiplies the "
            "layers' matrices."
        ),
    ]


def _treebank_blocks(treebank: dict[str, Any], tests: Mapping[str, Any]) -> list[ReportBlock]:
    ordered = sorted(treebank["relations"], key=lambda row: (row["relation"] != ALL, -row["words"]))
    rows = []
    for row in ordered:
        test = tests[test_of(row["relation"])]
        gain, above_random = (test["model_minus"][name] for name in (OFFSET, "random_weights"))
        rows.append(
            (
                row["relation"],
                f"{row['words']:,}",
                f"{row['layer']}-{row['head']}",
                row["direction"],
                with_interval(test["columns"][MODEL]),
                f"{100 * row['offset_accuracy']:.1f} ({row['offset']:+d})",
                with_interval(gain),
                format_p(gain["p_value"]),
                with_interval(test["columns"]["random_weights"]),
                with_interval(above_random),
            )
        )
    header = ("relation", "words", "head", "direction", "accuracy (%)", "best offset (%)", "gain (points)", "p")
    header += ("random weights (%)", "above them (points)")
    return [
        Note(
            f"Heads, directions and offsets are chosen on {treebank['sentences_of_selection']:,} sentences "
            f"({treebank['selection']}) and scored on {treebank['sentences_of_scoring']:,} others "
            f"({treebank['scoring']}); {treebank['skipped_sentences']:,} sentences were too long or have words that "
            f"the tokenizer cannot align, {treebank['rare_relations']:,} relations are too rare."
        ),
        Table(header, tuple(rows), marked=frozenset(i for i, row in enumerate(ordered) if row["relation"] == ALL)),
        Note(
            "The most attended word of a dependent is the prediction of its head, or the word that attends most to "
            "the dependent. Words with a head count, punctuation does not. The best offset always predicts the word "
            "at one distance. Intervals of 95 % and p are over the sentences with the relation, and p is not adjusted "
            "for the number of relations. A gain shows that a head's attention goes along with the relation, not that "
            "the model uses the relation there."
        ),
    ]
