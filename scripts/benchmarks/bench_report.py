"""Results of `scripts/benchmarks/bench.py` as a JSON document and as a table."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

FORMAT = 1
"""Version of the JSON document; incremented when a field changes its meaning or is removed."""


def summarise(
    about: dict[str, Any], ceiling: Any, rows: Sequence[Any], step_flops: Callable[[Any], float], devices: int
) -> dict[str, Any]:
    """Build the JSON document: environment, ceilings, one entry per case, ratios to the peer.

    Units: seconds, bytes, FLOP/s; `tokens_per_s` and `mfu` belong to the median step. `ratios` are medians
    over rounds of the peer's time / bert_jax's time, which cancels changes of the machine's speed.
    """
    ceilings = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values), "samples": len(values)}
        for name, values in ceiling.samples.items()
    }
    for name, size in ceiling.sizes.items():
        ceilings[name]["size"] = size
    results = []
    for row in rows:
        result = asdict(row) | {"program": row.case.program, "model_flops": None}
        if row.samples:
            typical = statistics.median(row.samples)
            result["step_seconds"] = {"median": typical, "min": min(row.samples), "max": max(row.samples)}
            result["tokens_per_s"] = row.case.batch * row.case.seq_len / typical
            result["model_flops"] = step_flops(row.case)
            result["mfu"] = result["model_flops"] / typical / (ceilings[row.case.dtype]["median"] * devices)
        results.append(result)
    return {
        "format": FORMAT,
        "environment": about,
        "ceilings": ceilings,
        "results": results,
        "ratios": _ratios([row for row in rows if row.samples]),
    }


def _ratios(rows: Sequence[Any]) -> list[dict[str, Any]]:
    ratios = []
    for own in rows:
        for peer in rows:
            if own.case.variant is None and peer.case.variant and own.case.shapes == peer.case.shapes:
                pairs = zip(own.samples, peer.samples, strict=False)
                by_round = [peer_seconds / own_seconds for own_seconds, peer_seconds in pairs]
                ratios.append(
                    {
                        "ours": asdict(own.case),
                        "peer": peer.case.program,
                        "peer_compiled": peer.case.compiled,
                        "median": statistics.median(by_round),
                        "min": min(by_round),
                        "max": max(by_round),
                    }
                )
    return ratios


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal of 120 columns."""
    about, ceilings = report["environment"], report["ceilings"]
    count = f"{about['devices']} x " if about["devices"] > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "",
        f"{count}{about['device']} ({about['platform']}), {about['threads']} of {about['cores']} cores; {versions}",
        "ceilings of one device: "
        + ", ".join(
            f"{name} {c['median'] / 1e12:.3g} TFLOP/s ({c['size']}^3, {c['min'] / 1e12:.3g} to {c['max'] / 1e12:.3g})"
            for name, c in ceilings.items()
            if name != "copy"
        )
        + f", copy {ceilings['copy']['median'] / 1e9:.3g} GB/s",
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in report["results"]:
        groups.setdefault((result["case"]["preset"], result["case"]["seq_len"]), []).append(result)
    for (preset, seq_len), results in groups.items():
        lines += ["", f"{preset}, sequence length {seq_len}", *_table(results)]
    if report["ratios"]:
        lines += ["", "tokens/s of bert_jax over the peer's, median over rounds (lowest to highest round)"]
        for ratio in report["ratios"]:
            case = ratio["ours"]
            settings = f"{case['preset']} {case['seq_len']} batch {case['batch']} {_settings(case)}"
            spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            lines.append(f"  {spread}  {ratio['peer']}{' compiled' * ratio['peer_compiled']}: {settings}")
    if missing := [result for result in report["results"] if result["status"] == "not measured"]:
        lines += ["", f"{len(missing)} of {len(report['results'])} cases were not measured: give a longer --budget"]
    return "\n".join(lines)


def _settings(case: dict[str, Any]) -> str:
    """Settings that distinguish a case within its group, without defaults."""
    hidden, attention = case["hidden_dropout"], case["attention_dropout"]
    words = [case["dtype"], f"dropout {hidden:g}" + ("" if hidden == attention else f"/{attention:g}")]
    if case["variant"] is None:
        words += [case["attention"], case["optimizer"]]
        words += [f"pair {case['pair']}"] if case["pair"] != "nsp" else []
        words += [f"accumulation {case['accumulation']}"] if case["accumulation"] > 1 else []
        words += [f"unroll {case['scan_unroll']}"] if case["scan_unroll"] > 1 else []
        words += [f"remat {case['remat']}"] if case["remat"] != "none" else []
    elif case["compiled"]:
        words.append("torch.compile")
    return " ".join(words)


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    header = ("program", "batch", "settings", "ms/step", "min", "max", "tokens/s", "MFU", "GiB")
    table = [header]
    tails = [""]
    for result in results:
        case = result["case"]
        head = (result["program"], str(case["batch"]), _settings(case))
        if not result["samples"]:
            table.append((*head, *("",) * 6))
            tails.append(f"{result['status']}{': ' * bool(result['detail'])}{result['detail']}")
            continue
        times = [f"{1e3 * result['step_seconds'][name]:.4g}" for name in ("median", "min", "max")]
        memory = "" if result["memory_bytes"] is None else f"{result['memory_bytes'] / 2**30:.2f}"
        table.append((*head, *times, f"{result['tokens_per_s']:,.0f}", f"{100 * result['mfu']:.1f}%", memory))
        tails.append(result["detail"])
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    left = {0, 2}
    lines = []
    for cells, tail in zip(table, tails, strict=True):
        shown = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        text = "  ".join(shown if cells[3] else shown[:3])
        lines.append(f"  {text}  {tail}".rstrip())
    return lines
