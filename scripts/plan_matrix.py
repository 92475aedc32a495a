"""Every preset on every topology: what `bert-jax plan --search` finds, as one table.

    python scripts/plan_matrix.py --json matrix.jsonl

No device is needed, but libtpu (the extra `plan`) and hours: each pair compiles up to 6 programs. A pair
that cannot be is a row that says why.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]

from bert_jax.chips import GIB  # noqa: E402
from bert_jax.config import presets  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402
from bert_jax.planning import mesh_search, run_plan, topologies  # noqa: E402

TOPOLOGIES = ("v3:32x32", "v4:8x8x8", "v5e:16x16", "2xv5e:16x16", "v5p:8x8x8", "v6e:16x16", "h100:8x8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of the table whenever a pair is done. 2: a preset or topology that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(presets.preset_files()), help="default: all")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, help="default: one of each kind of chip")
    parser.add_argument("--json", type=Path, help="also write what `plan --json` would print, a line for each pair")
    args = parser.parse_args(arguments)
    print("| preset | topology | phase | mesh | rows x micro | remat | GiB of | s/step | MFU | hours |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    try:
        for topology in map(topologies.parse_topology, args.topologies):
            for name in args.presets:
                found = examine(name, topology)
                for line in rows(name, topology.name, found):
                    print(line, flush=True)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def examine(name: str, topology: topologies.Topology) -> dict[str, Any]:
    """The plan of what the search chose, or why there is none."""
    config = presets.load_config(name)
    try:
        search = mesh_search.search_mesh(config, topology)
    except UserError as error:
        return {"name": name, "topology": topology.name, "error": str(error)}
    found = run_plan.plan(search.config, topology, compile_step=search.compiled_step)
    return found | {"remat": search.config.model.remat}


def rows(name: str, topology: str, found: dict[str, Any]) -> list[str]:
    """Of the table: one for each phase."""
    if "error" in found:
        return [f"| {name} | {topology} | | | | | {found['error']} | | | |"]
    mesh = " x ".join(str(size) for size in found["mesh"].values())
    lines = []
    for row in found["phases"]:
        memory = f"{row['memory']['total'] / GIB:.2f} of {row['memory']['available'] / GIB:.2f}"
        last = f"{found['run']['hours']:.2f}" if row is found["phases"][-1] else ""
        lines.append(
            f"| {name} | {topology} | {row['phase']} | {mesh} | {row['rows']} x {row['accumulation']} "
            f"| {found['remat']} | {memory}{'' if row['compiled'] else ' (estimated)'} | {row['step_seconds']:.4g} "
            f"| {100 * row['mfu']:.1f}% | {last} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
