"""Table of the results of `bert-jax plan --search` for every preset on every topology.

    python scripts/plan_matrix.py --json matrix.jsonl

Needs no device, but libtpu (the extra `plan`) and hours: each pair compiles up to 6 programs. An impossible pair is a
row with the reason.
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

from bert_jax import command_line  # noqa: E402
from bert_jax.chips import GIB  # noqa: E402
from bert_jax.config import presets  # noqa: E402
from bert_jax.errors import UserError  # noqa: E402
from bert_jax.planning import mesh_search, run_plan, topologies  # noqa: E402

TOPOLOGIES = ("v3:32x32", "v4:8x8x8", "v5e:16x16", "2xv5e:16x16", "v5p:8x8x8", "v6e:16x16", "h100:8x8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of the table after each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(presets.preset_files()), help="default: all")
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, help="default: one of each kind of chip")
    parser.add_argument("--json", type=Path, help="also append the output of `plan --json`, a line for each pair")
    args = parser.parse_args(arguments)
    print("| preset | topology | phase | mesh | rows x micro | remat | GiB of | s/step | MFU | hours |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for topology in map(topologies.parse_topology, args.topologies):
        for name in args.presets:
            plan = search_plan(name, topology)
            print("\n".join(rows(name, topology.name, plan)), flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(plan) + "\n")


def search_plan(name: str, topology: topologies.Topology) -> dict[str, Any]:
    """Plan of the setting that the search chose, or the error."""
    config = presets.load_config(name)
    try:
        search = mesh_search.search_mesh(config, topology)
    except UserError as error:
        return {"name": name, "topology": topology.name, "error": str(error)}
    plan = run_plan.plan(search.config, topology, compile_step=search.compiled_step)
    return plan | {"remat": search.config.model.remat}


def rows(name: str, topology: str, plan: dict[str, Any]) -> list[str]:
    """Rows of the table, one for each phase."""
    if "error" in plan:
        return [f"| {name} | {topology} | | | | | {plan['error']} | | | |"]
    mesh = " x ".join(str(size) for size in plan["mesh"].values())
    lines = []
    for row in plan["phases"]:
        memory = f"{row['memory']['total'] / GIB:.2f} of {row['memory']['available'] / GIB:.2f}"
        last = f"{plan['run']['hours']:.2f}" if row is plan["phases"][-1] else ""
        lines.append(
            f"| {name} | {topology} | {row['phase']} | {mesh} | {row['rows']} x {row['accumulation']} "
            f"| {plan['remat']} | {memory}{'' if row['compiled'] else ' (estimated)'} | {row['step_seconds']:.4g} "
            f"| {100 * row['mfu']:.1f}% | {last} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(command_line.run(main))
