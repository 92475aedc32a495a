"""Results of `scripts/benchmarks/bench.py` as a JSON document and as a table."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import harness
import train_step

FORMAT = 1
"""Version of the JSON document; incremented when a field changes its meaning or is removed."""
DEFAULTS = {"pair": "nsp", "accumulation": 1, "scan_unroll": 1, "remat": "none"}
"""Settings that a line names only if they differ from these."""
COLUMNS = ("program", "batch", "settings", "ms/step", "min", "max", "tokens/s", "MFU", "GiB")


def summarise(ceiling: Any, rows: Sequence[Any], devices: int) -> dict[str, Any]:
    """Build the JSON document: ceilings, one entry per case, ratios to the peer.

    Units: seconds, bytes, FLOP/s; `tokens_per_s` and `mfu` belong to the median step. `ratios` are medians
    over rounds of the peer's time / bert_jax's time, which cancels changes of the machine's speed.
    """
    ceilings = {name: harness.spread(rates) | {"samples": len(rates)} for name, rates in ceiling.samples.items()}
    for name, size in ceiling.sizes.items():
        ceilings[name]["size"] = size
    results = []
    for row in rows:
        result = asdict(row) | {"program": row.case.program, "model_flops": None}
        if row.samples:
            result["step_seconds"] = harness.spread(row.samples)
            typical = result["step_seconds"]["median"]
            result["tokens_per_s"] = row.case.batch * row.case.seq_len / typical
            result["model_flops"] = train_step.step_flops(row.case)
            result["mfu"] = result["model_flops"] / typical / (ceilings[row.case.dtype]["median"] * devices)
        results.append(result)
    measured = [row for row in rows if row.samples]
    ratios = [
        {"ours": asdict(own.case), "peer": peer.case.program, **harness.ratio(peer.samples, own.samples)}
        for own, peer in itertools.product(measured, measured)
        if own.case.variant is None and peer.case.variant and own.case.shapes == peer.case.shapes
    ]
    return {
        "format": FORMAT,
        "environment": {"devices": devices},
        "ceilings": ceilings,
        "results": results,
        "ratios": ratios,
    }


def render(report: dict[str, Any]) -> list[str]:
    """The report as text for a terminal of 120 columns."""
    about, ceilings = report["environment"], report["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    products = [
        f"{name} {c['median'] / 1e12:.3g} TFLOP/s ({c['size']}^3, {c['min'] / 1e12:.3g} to {c['max'] / 1e12:.3g})"
        for name, c in ceilings.items()
        if name != "copy"
    ]
    copy = f"copy {ceilings['copy']['median'] / 1e9:.3g} GB/s"
    lines = ["", f"{about['devices']} x {harness.header(report)} of {about['cores']}; {versions}"]
    lines.append(f"ceilings of one device: {', '.join([*products, copy])}")
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
            lines.append(f"  {harness.show(ratio)}  {ratio['peer']}: {settings}")
    if missing := [result for result in report["results"] if result["status"] == "not measured"]:
        lines += ["", f"{len(missing)} of {len(report['results'])} cases were not measured: give a longer --budget"]
    return lines


def _settings(case: dict[str, Any]) -> str:
    """Settings that distinguish a case within its group, without defaults."""
    hidden, attention = case["hidden_dropout"], case["attention_dropout"]
    words = [case["dtype"], f"dropout {hidden:g}" + ("" if hidden == attention else f"/{attention:g}")]
    if case["variant"] is None:
        words += [case["attention"], case["optimizer"]]
        words += [f"{name} {case[name]}" for name, default in DEFAULTS.items() if case[name] != default]
    return " ".join(words)


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    table, tails = [COLUMNS], [""]
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
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells, tail in zip(table, tails, strict=True):
        left = [cells[0].ljust(widths[0]), cells[1].rjust(widths[1]), cells[2].ljust(widths[2])]
        right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)] if cells[3] else []
        lines.append(f"  {'  '.join(left + right)}  {tail}".rstrip())
    return lines
