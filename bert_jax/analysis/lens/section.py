"""The section of the page about the lens, and its numbers over checkpoints."""

from collections.abc import Mapping

from bert_jax.analysis.item_scores import test_title
from bert_jax.analysis.quantities import (
    RANDOM,
    Quantity,
    by_index,
    cells,
    interval_cells,
    scalar_of_mean,
    scalar_of_test,
    seeds_text,
)
from bert_jax.analysis.suite import UNCERTAINTY, Scalar, SuiteResult
from bert_jax.report import Note, ReportBlock, Table


def quantities(result: SuiteResult) -> dict[str, Quantity]:
    """What is measured at every hidden state, by its key in the result."""
    found, random, unigram = result["model"], result["random_weights"], result["unigram"]
    titles = {
        "accuracy": ("Masked tokens predicted", "accuracy"),
        "loss_nats": ("Loss at masked tokens", "nats"),
        "median_rank": ("Rank of the masked token", "median rank"),
        "divergence_from_last_nats": ("Distance from the last state's prediction", "KL divergence (nats)"),
    }
    return {
        key: Quantity(
            *titles[key],
            {"model": found[key]},
            {RANDOM: random[key], "token frequency": unigram.get(key)},
            log=key == "median_rank",
        )
        for key in titles
    }


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    tests = result[UNCERTAINTY]
    found = {test_title(test, about["unit"]): scalar_of_test(result, test) for test, about in tests.items()}
    for key, title in (
        ("mean_known_since", "state since which a predicted token leads (mean)"),
        ("mean_settled_since", "state since which the prediction is the final one (mean)"),
    ):
        model, random = (result[row][key] for row in ("model", "random_weights"))
        found[title] = scalar_of_mean(model, {RANDOM: random["value"]})
    return found


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    since = {"right token leads from here on": "known_share", "final prediction leads": "settled_share"}
    shares = {name: result["model"][key] for name, key in since.items()}
    random = {f"{name}, {RANDOM}": result["random_weights"][key] for name, key in since.items()}
    return (
        Note(
            "What would the MLM head predict for a masked token if the model ended at an earlier layer, and since "
            "which layer does the right token lead?"
        ),
        Note(
            f"{result['masked_tokens']:,} masked tokens in {result['texts']:,} texts ({result['mask_share']:.0%} of "
            f"the tokens, all replaced by the mask token); {result['skipped_lines']:,} lines had too many tokens "
            f"or none; {seeds_text(result)}. Bands and square brackets: 95 % over texts."
        ),
        *(quantity.curves() for quantity in quantities(result).values()),
        Quantity(
            "Masked tokens whose prediction no longer changes",
            "share of all masked tokens",
            shares,
            random,
            same_colors=True,
        ).curves(),
        _table(result),
        *_examples(result),
        Note(
            "A token is known since the first state from which it leads in this and all later states. The head was "
            "trained on the last state only: a low score of an early state does not show that it lacks the "
            "information, which a trained probe may find. Random weights show what the architecture alone gives; token "
            "frequency is the best constant prediction of the same text."
        ),
    )


def _table(result: SuiteResult) -> Table:
    found, random, unigram = result["model"], result["random_weights"], result["unigram"]

    def column(key: str, form: str = ".3f") -> list[str]:
        return interval_cells(found[key], form) + cells([unigram.get(key)], form)

    header = ("state", "accuracy", "loss (nats)", "median rank", "KL to last", "known since", RANDOM)
    columns = (
        column("accuracy"),
        column("loss_nats"),
        column("median_rank", ",.0f"),
        column("divergence_from_last_nats"),
        cells(found["known_since"], ","),
        interval_cells(random["accuracy"]),
    )
    return by_index(header, columns, ["token frequency"], words=True)


def _examples(result: SuiteResult) -> list[ReportBlock]:
    examples = result["examples"]
    columns = [
        [f"{top} ({rank:,})" for top, rank in zip(one["top_by_state"], one["rank_by_state"], strict=True)]
        for one in examples
    ]
    lines = [f"{i}: {one['text']} [{one['masked']} at token {one['position']}]" for i, one in enumerate(examples, 1)]
    header = ("state", *(f"{i}: {one['masked']}" for i, one in enumerate(examples, 1)))
    note = "Examples: the leading token at a mask, and in brackets the rank of the masked token."
    return [Note(note), *map(Note, lines), by_index(header, columns, words=True)]
