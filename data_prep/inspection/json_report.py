"""The report as JSON values."""

from collections.abc import Sequence

from data_prep.inspection.lengths import LengthHistogram
from data_prep.inspection.mixture import Mixture
from data_prep.inspection.statistics import QUANTILES, CorpusStatistics, SplitLengthStatistics


def report(corpora: Sequence[CorpusStatistics], mixed: Mixture | None) -> dict:
    """The content of the page: {"corpora": [...], "mixture": {...} or None}."""
    return {"corpora": [_corpus(one) for one in corpora], "mixture": mixed and _mixture(mixed)}


def _corpus(statistics: CorpusStatistics) -> dict:
    manifest, pieces = statistics.manifest, statistics.pieces
    return {
        "directory": statistics.directory,
        "name": manifest["name"],
        "vocab_size": manifest["vocab_size"],
        "tokenizer_fingerprint": manifest["tokenizer"]["fingerprint"],
        "disk_bytes": statistics.disk_bytes,
        "disk_bytes_per_token": statistics.disk_bytes_per_token,
        "splits": {split: _split(manifest["splits"][split], measured) for split, measured in statistics.splits.items()},
        **{key: manifest[key] for key in ("dropped", "cleaned", "skipped", "settings")},
        "sources": [source | {"files": len(source["files"])} for source in manifest["sources"]],
        "pieces": {
            "total": pieces.total,
            "never_used": pieces.never,
            "never_used_share": pieces.never / pieces.total,
            "by_times_used": dict(pieces.decades),
            "most_frequent": [{"piece": piece, "count": count} for piece, count in pieces.frequent],
        },
        "samples": [
            {"document": one.document, "tokens": one.tokens, "sentences": list(one.sentences), "cut": one.cut}
            for one in statistics.samples
        ],
    }


def _split(counts: dict, measured: SplitLengthStatistics) -> dict:
    return {
        **{key: count for key, count in counts.items() if key != "shards"},
        "shards": len(counts["shards"]),
        "text_bytes_per_token": counts["text_bytes"] / counts["tokens"],
        "unknown_rate": counts["unknown_tokens"] / counts["tokens"],
        "sentence_tokens": _lengths(measured.sentences),
        "document_tokens": _lengths(measured.documents),
        "packing": [
            {
                "seq_len": estimate.seq_len,
                "examples": estimate.examples,
                "rows": estimate.rows,
                "packing_efficiency": estimate.packing_efficiency,
                "unpacked_efficiency": estimate.unpacked_efficiency,
                "random_pairs": random_pairs,
            }
            for estimate, random_pairs in zip(measured.packing_estimates, measured.random_pairs, strict=True)
        ],
    }


def _lengths(lengths: LengthHistogram) -> dict:
    return {
        "mean": lengths.mean,
        "quantiles": {f"{share:g}": lengths.quantile(share) for share in QUANTILES},
        "bins": [
            {"first": one.first, "last": one.last, "count": one.count, "tokens": one.tokens} for one in lengths.bins()
        ],
    }


def _mixture(mixed: Mixture) -> dict:
    return {
        "sampling_exponent": mixed.exponent,
        "one_tokenizer": mixed.one_tokenizer,
        "corpora": [
            {
                "directory": part.directory,
                "tokens": part.tokens,
                "share": part.share,
                "weight": part.weight,
                "repeats": part.repeats,
            }
            for part in mixed.parts
        ],
    }
