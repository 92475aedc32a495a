"""What the train step is for a GPU or TPU, read from the program that XLA compiles for it on any machine.

    python scripts/benchmarks/step_program.py --steps bert_large:512:32,bert_base:128:256
    python scripts/benchmarks/step_program.py --chip v5e --remat dots

Needs the extra `plan-gpu`, for TPUs `plan`. For each step it prints kernels and bytes by kind of work
(bert_jax/planning/kernels.py), the same for one layer (from the attention of one layer to that of the next, forward and
backward, without the optimizer), and the bytes of arguments and temporaries. Nothing is timed.

- GPUs: milliseconds are bytes / 4.0 TB/s, a rate that copies reach on an H200. Also the matrix products with their
  epilogues, and the machine code of the kernels of attention, of other Pallas kernels and of the large ones of the
  optimizer: registers, bytes spilled, instructions, those of the longest loop, and loads of two bytes.
- TPUs: milliseconds are the compiler's estimate of cycles, which it has for all kernels but those of Pallas. Also the
  largest kernels. Programs for v5p and v6e cannot be read: they have parts that XLA cannot print.
"""

import argparse
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, positive
from bert_jax.bench.train_step import PRESETS, Case, config_of
from bert_jax.chips import CHIPS, Chip
from bert_jax.config import Config
from bert_jax.errors import install_command, require
from bert_jax.planning.aot_compile import CompiledStepStats, compiled_step_stats
from bert_jax.planning.kernels import Kernel, sum_kernels, sum_kernels_by_kind
from bert_jax.planning.topologies import CUBES, Topology, parse_topology
from bert_jax.training.implementation import choose_implementation

BANDWIDTH = 4.0e12
"""Bytes/s."""
LARGE = 10e6
"""Bytes of the optimizer's kernels whose machine code is shown."""
LARGEST = 30
"""Rows of the table of kernels for TPUs."""
ATTENTION = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}


def with_layers(config: Config, layers: int) -> Config:
    """The config with another number of layers, none in a loop."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers, scan_unroll=layers))


def one_layer(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels from the attention of the first layer to that of the second, and the way back; not the optimizer's."""
    found = []
    for name, (first, second) in (("forward_kernel", (0, 1)), ("(query_gradient|backward)_kernel", (-2, -1))):
        calls = [i for i, one in enumerate(kernels) if one.kind == "attention" and re.search(name, one.op_name)]
        found += kernels[calls[first] : calls[second]] if len(calls) > 1 else []
    return [one for one in found if one.kind != "optimizer"]


def milliseconds(size: int, cycles: int, chip: Chip) -> float:
    """Of kernels that move this many bytes, or for which the compiler estimates this many cycles."""
    return 1000 * (cycles / chip.clock if chip.clock else size / BANDWIDTH)


def table(kernels: Sequence[Kernel], chip: Chip) -> dict[str, dict[str, Any]]:
    """Kernels, GB and milliseconds by kind, and of all that are neither products nor attention."""
    rest = sum_kernels(one for one in kernels if one.kind not in ("products", "attention"))
    rows = sum_kernels_by_kind(kernels) | {"all but products and attention": rest}
    return {
        kind: {"kernels": n, "GB": size / 1e9, "ms": milliseconds(size, cycles, chip)}
        for kind, (n, size, cycles) in rows.items()
    }


def largest(kernels: Sequence[Kernel], chip: Chip) -> list[dict[str, Any]]:
    """The kernels of which the compiler estimates the most cycles; alike in kind, result and origin are one."""
    alike: dict[tuple[str, ...], list[Kernel]] = {}
    for one in kernels:
        alike.setdefault((one.kind, one.result, one.op_name), []).append(one)
    rows = [
        {
            "kind": kind,
            "executions": sum(one.executions for one in group),
            "ms": milliseconds(0, sum(one.cycles * one.executions for one in group), chip),
            "result": result[:60],
            "from": op_name[-60:],
        }
        for (kind, result, op_name), group in alike.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:LARGEST]


def tool(name: str) -> Path:
    """A program of the assembler's package."""
    import nvidia

    found = [path for root in nvidia.__path__ for path in Path(root).glob(f"*/bin/{name}")]
    require(bool(found), f"{name} is not installed: {install_command('plan-gpu')}")
    return found[0]


def machine_code(program: CompiledStepStats) -> Iterator[dict[str, Any]]:
    """Figures of the machine code of attention, other Pallas kernels, and the large kernels of the optimizer."""
    kernels = program.kernels
    large = {one.name.replace(".", "_") for one in kernels if one.kind == "optimizer" and one.bytes >= LARGE}
    pallas = {
        one.op_name.replace("/pallas_call", "").split("/")[-1].rstrip(")").split("(")[-1]: one.kind
        for one in kernels
        if one.kind in ("attention", "other Pallas kernels")
    }
    for text in (program.machine_code or {}).values():
        entry = re.search(r"\.entry (\w+)\(", text)
        name = entry[1] if entry else ""
        kind = pallas.get(re.sub(r"__\d+$", "", name)) or ("optimizer" if name in large else None)
        if kind:
            yield {"kernel": name, "kind": kind} | assembled(text)


def assembled(text: str) -> dict[str, Any]:
    """Registers, bytes spilled, and instructions of a kernel in PTX."""
    target = re.search(r"\.target (\w+)", text)[1]
    with tempfile.TemporaryDirectory() as directory:
        source, code = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        source.write_text(text)
        command = [tool("ptxas"), "-v", f"-arch={target}", source, "-o", code]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        text = subprocess.run([tool("nvdisasm"), "-c", code], check=True, capture_output=True, text=True).stdout
    instructions, loops = disassembled(text)
    loop = max(loops, key=len, default=[])
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "instructions": len(instructions),
        "loop": len(loop),
        "two-byte loads": sum(one.startswith("LDG") and ".U16" in one for one in instructions),
        "matrix": sum(one.startswith(("HGMMA", "HMMA", "UTCHMMA")) for one in loop),
    }


def disassembled(text: str) -> tuple[list[str], list[list[str]]]:
    """Instructions of a kernel, and those of each of its loops: from the target of a jump backwards to the jump."""
    labels, instructions, jumps = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)\s*(.*?);", line):
            if target := re.search(r"`\((\.L_\w+)\)", found[2]) if found[1].startswith("BRA") else None:
                jumps.append((target[1], len(instructions)))
            instructions.append(found[1])
    return instructions, [instructions[labels[to] : at + 1] for to, at in jumps if labels.get(to, at) < at]


def topology_of(chip: str) -> Topology:
    """The smallest one of a chip."""
    return parse_topology(f"{chip}:{'2x2x1' if chip in CUBES else '1x1'}")


def compile_step(case: Case, layers: int, chip: str, dump: str | None = None) -> CompiledStepStats:
    """The step of a case, compiled for a chip, with this number of layers and the batch on every device.

    Raises:
      UserError: the compiler is not installed, the step does not fit, or its program cannot be read.
    """
    topology = topology_of(chip)
    require(topology.devices is not None, f"compiling for absent GPUs needs {install_command('plan-gpu')}")
    case = dataclasses.replace(case, batch=case.batch * topology.count)
    config = choose_implementation(with_layers(config_of(case), layers), topology.chip.device_kinds[0])
    found = compiled_step_stats(config, 0, topology.mesh(config.mesh), 1, dump)
    name = f"{case.preset} with {layers} layers, {case.batch} rows of {case.seq_len}"
    require(isinstance(found, CompiledStepStats), f"{name} does not fit into the memory of a {chip}: give fewer rows")
    require(found.kernels is not None, f"--chip {chip}: XLA cannot print programs for it: choose v5e")
    return found


def parse_step(word: str) -> tuple[str, int, int]:
    """A preset, tokens and rows, as in ``bert_base:128:256``."""
    found = re.fullmatch(r"(\w+):(\d+):(\d+)", word)
    if not found or found[1] not in PRESETS:
        raise ValueError(f"write PRESET:TOKENS:ROWS, as in bert_base:128:256; presets are {', '.join(PRESETS)}")
    return found[1], int(found[2]), int(found[3])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compile each step and describe it."""
    require(options.chip in CHIPS, f"--chip {options.chip}: chips are {', '.join(CHIPS)}")
    report, chip = {}, CHIPS[options.chip]
    attention = options.attention or ATTENTION["tpu" if chip.clock else "gpu"]
    for preset, seq_len, rows in options.steps:
        name = f"{preset}:{seq_len}:{rows}"
        harness.progress(f"compiling {name}")
        rates = {"hidden_dropout": options.dropout, "attention_dropout": options.dropout}
        settings = {"attention": attention, "remat": options.remat, "optimizer": "lamb"}
        case = Case(preset, seq_len, rows, dtype="bfloat16", **settings, **rates)
        found = compile_step(case, options.layers, options.chip, options.dump)
        report |= {
            f"{name}, all kernels": table(found.kernels, chip),
            f"{name}, one layer": table(one_layer(found.kernels), chip),
            f"{name}, bytes": [{"arguments": found.argument_bytes, "temporaries": found.temporary_bytes}],
        }
        if chip.clock:
            report[f"{name}, largest kernels"] = largest(found.kernels, chip)
            continue
        products = Counter(one.product for one in found.kernels if one.product)
        report[f"{name}, products"] = [{"product": product, "executions": n} for product, n in products.items()]
        report[f"{name}, machine code"] = list(machine_code(found))
    return report


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    steps = [("bert_large", 512, 32), ("bert_base", 128, 256)]
    add("--steps", type=listed(parse_step), default=steps, help="default: bert_large:512:32,bert_base:128:256")
    add("--layers", type=positive, default=3, help="layers of the model that are compiled; default: 3")
    add("--chip", default="h200", help="as in `bert-jax plan --topology`; default: h200")
    add("--attention", help="model.attention; default: pallas_gpu or pallas_tpu")
    add("--remat", choices=("none", "dots", "full"), default="none", help="model.remat; default: none")
    add("--dropout", type=float, default=0.1, help="at hidden sites and in attention; default: 0.1")
    add("--dump", help="directory to which XLA writes the program and its machine code, of one step")


main = functools.partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
