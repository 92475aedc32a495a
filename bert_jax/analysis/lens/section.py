"""The section of the page about the lens, and its numbers over checkpoints."""

import math
from collections.abc import Mapping

from bert_jax.analysis.suite import Result, Scalar
from bert_jax.report import Block, Curves, Note, Series, Table

STATE = "hidden state (0: embeddings)"


def scalars(result: Result) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    found, random, unigram = (result[name] for name in ("model", "random_weights", "unigram"))

    def last(key: str, factor: float) -> Scalar:
        baselines = {"random weights": factor * random[key][-1], "token frequency": factor * unigram[key]}
        return Scalar(factor * found[key][-1], baselines)

    def mean(key: str) -> Scalar:
        value, baseline = found[key], random[key]
        return Scalar(math.nan if value is None else value, {} if baseline is None else {"random weights": baseline})

    return {
        "masked tokens predicted by the last state (%)": last("accuracy", 100),
        "loss at masked tokens, last state (nats)": last("loss_nats", 1),
        "state since which a predicted token leads (mean)": mean("mean_known_since"),
        "state since which the prediction is the final one (mean)": mean("mean_settled_since"),
    }


def blocks(result: Result) -> tuple[Block, ...]:
    """Question, figures, tables, and how to read them."""
    found, random, unigram = result["model"], result["random_weights"], result["unigram"]
    x = tuple(range(result["layers"] + 1))

    def curve(title: str, key: str, label: str, log_y: bool = False) -> Curves:
        series = [Series("model", x, tuple(found[key])), Series("random weights", x, tuple(random[key]), dashed=True)]
        if key in unigram:
            series.append(Series("token frequency", x, (unigram[key],) * len(x), dashed=True))
        return Curves(title, tuple(series), STATE, label, log_y=log_y)

    return (
        Note(
            "What would the MLM head predict for a masked token if the model ended at an earlier layer, and since "
            "which layer does the right token lead?"
        ),
        Note(
            f"{result['masked_tokens']:,} masked tokens in {result['texts']:,} texts ({result['mask_share']:.0%} of "
            f"the tokens, all replaced by the mask token); {result['skipped_lines']:,} lines had too many tokens "
            f"or none; seed {result['seed']}."
        ),
        curve("Masked tokens predicted", "accuracy", "accuracy"),
        curve("Loss at masked tokens", "loss_nats", "nats"),
        curve("Rank of the masked token", "median_rank", "median rank", log_y=True),
        curve("Distance from the last state's prediction", "divergence_from_last_nats", "KL divergence (nats)"),
        _since(result),
        _table(result),
        *_examples(result),
        Note(
            "A token is known since the first state from which it leads in this and all later states. The head was "
            "trained on the last state only: a low score of an early state does not show that it lacks the "
            "information, which a trained probe may find. Random weights show what the architecture alone gives; token "
            "frequency is the best constant prediction of the same text."
        ),
    )


def _since(result: Result) -> Curves:
    x = tuple(range(result["layers"] + 1))
    series = []
    for name, key in (("right token leads from here on", "known_since"), ("final prediction leads", "settled_since")):
        total, shares = 0, []
        for count in result["model"][key]:
            total += count
            shares.append(total / result["masked_tokens"])
        series.append(Series(name, x, tuple(shares)))
    return Curves(
        "Masked tokens whose prediction no longer changes", tuple(series), STATE, "share of all masked tokens"
    )


def _table(result: Result) -> Table:
    found, random, unigram = result["model"], result["random_weights"], result["unigram"]
    rows = [
        (
            str(state),
            f"{found['accuracy'][state]:.3f}",
            f"{found['loss_nats'][state]:.3f}",
            f"{found['median_rank'][state]:,.0f}",
            f"{found['divergence_from_last_nats'][state]:.3f}",
            f"{found['known_since'][state]:,}",
            f"{random['accuracy'][state]:.3f}",
        )
        for state in range(result["layers"] + 1)
    ]
    frequency = (f"{unigram['accuracy']:.3f}", f"{unigram['loss_nats']:.3f}", f"{unigram['median_rank']:,.0f}")
    rows.append(("token frequency", *frequency, "", "", ""))
    header = ("state", "accuracy", "loss (nats)", "median rank", "KL to last", "known since", "random weights")
    return Table(header, tuple(rows))


def _examples(result: Result) -> list[Block]:
    examples = result["examples"]
    lines = [f"{i}: {one['text']} [{one['masked']} at token {one['position']}]" for i, one in enumerate(examples, 1)]
    header = ("state", *(f"{i}: {one['masked']}" for i, one in enumerate(examples, 1)))
    rows = [
        (str(state), *(f"{one['top_by_state'][state]} ({one['rank_by_state'][state]:,})" for one in examples))
        for state in range(result["layers"] + 1)
    ]
    note = "Examples: the leading token at a mask, and in brackets the rank of the masked token."
    return [Note(note), *(Note(line) for line in lines), Table(header, tuple(rows), words=True)]
