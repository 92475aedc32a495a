"""How many tokens of each source, language and score a run has read."""

from collections.abc import Mapping

from bert_jax.data.sampling import group_shares
from bert_jax.report import Note, ReportBlock
from bert_jax.report.cells import make_table
from bert_jax.run_report.metric_blocks import TRAINING
from bert_jax.run_report.run_files import RunFiles

_LISTED = 40
_ABOUT = (
    "Tokens that the run has read, on average: those of the run, divided by the shares of the corpora in the rows, and "
    "within a corpus by the tokens and weights of its documents. Random segments of sentence pairs have more of short "
    "documents (docs/multilingual.md). Epochs: tokens read per token."
)


def group_blocks(run: RunFiles) -> tuple[ReportBlock, ...]:
    """A table by source, language and score, the most read first; empty if the documents are all alike."""
    seen, descriptions = run.last(TRAINING).get("tokens_seen"), run.file.get("corpus_descriptions", {})
    rows = []
    for identity, share in _row_shares(run, descriptions).items():
        groups, name = descriptions[identity].get("groups", []), descriptions[identity]["name"]
        if not groups:
            continue
        sampled = group_shares(groups, run.config.data, name) * [group["tokens"] for group in groups]
        for group, tokens in zip(groups, (seen or 0) * share * sampled / sampled.sum(), strict=True):
            rows.append({"corpus": name, "read": tokens, "epochs": tokens / group["tokens"], **group})
    if not seen or len(rows) < 2:
        return ()
    rows.sort(key=lambda row: (-row["read"], row["corpus"], row["source"], row["language"]))
    columns = {
        "corpus": "{corpus}",
        "source": "{source}",
        "language": "{language}",
        "score": lambda row: "" if row["score"] is None else f"{row['score']:g}",
        "tokens": "{tokens:,}",
        "read": "{read:,.0f}",
        "share": lambda row: f"{row['read'] / seen:.2%}",
        "epochs": "{epochs:.2f}",
    }
    if all(row["score"] is None for row in rows):
        del columns["score"]
    if len({row["corpus"] for row in rows}) == 1:
        del columns["corpus"]
    more = f" The {_LISTED} of {len(rows):,} groups that were read most." if len(rows) > _LISTED else ""
    return Note(_ABOUT + more), make_table(rows[:_LISTED], columns)


def _row_shares(run: RunFiles, descriptions: Mapping) -> dict[str, float]:
    """The share of each described corpus in the tokens of the completed steps, by identity; phases may differ."""
    shares, tokens = dict.fromkeys(run.file["corpora"], 0.0), 0.0
    left = run.last_step
    for phase in run.config.phases:
        steps = min(left, phase.steps)
        left -= steps
        size = steps * phase.batch_size * phase.seq_len
        weights = dict(phase.corpus_weights)
        total = sum(weights.values()) or 1.0
        tokens += size
        for identity, share in run.file["corpora"].items():
            if weights and identity in descriptions:
                share = weights.get(descriptions[identity]["name"], 0.0) / total
            shares[identity] += size * share
    return {identity: size / (tokens or 1.0) for identity, size in shares.items() if identity in descriptions}
