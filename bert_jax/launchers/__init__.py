"""Launchers for clusters: scripts for Slurm and Cloud TPU, and a JobSet for Kubernetes."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from bert_jax.command import flags
from bert_jax.command.flags import DirectoryArg
from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic

SCRIPTS = {"slurm": ("slurm.sbatch",), "tpu": ("tpu_pod.sh", "tpu_worker.sh")}
"""Cluster -> the files of this package that the command writes."""
USAGE = """usage: bert-jax launch slurm --out DIR
       bert-jax launch tpu --out DIR
       bert-jax launch kubernetes gpu|tpu [OPTION ...] -- CONFIG --corpus PATH --workdir PATH ...

Write the launcher of a cluster: slurm.sbatch for Slurm, tpu_pod.sh and tpu_worker.sh for Cloud TPU. The comment at the
top of each script says how to call it. `kubernetes` prints a JobSet, to be piped into kubectl apply -f -; its --help
lists its options."""


@dataclass(frozen=True, kw_only=True)
class Scripts:
    """Write the scripts of a cluster. The comment at the top of each one says how to call it."""

    out: DirectoryArg
    """Directory for the scripts, which is created if it does not exist. No file in it is overwritten."""


def write_launcher(arguments: Sequence[str]) -> None:
    """Run the command with these arguments.

    Raises:
      UserError: an unknown cluster or flag, or a file exists already.
    """
    cluster, *rest = arguments or ["--help"]
    prog = f"bert-jax launch {cluster}"
    if cluster in ("-h", "--help", "--help-all"):
        print(USAGE)
    elif cluster == "kubernetes":
        from bert_jax.launchers.kubernetes import Kubernetes, manifest

        cut = rest.index("--") if "--" in rest else len(rest)
        print(manifest(flags.parse(Kubernetes, rest[:cut], prog), rest[cut + 1 :]), end="")
    elif cluster in SCRIPTS:
        directory = flags.parse(Scripts, rest, prog).out
        files = [directory / name for name in SCRIPTS[cluster]]
        for file in files:
            if file.exists():
                raise UserError(f"{file} exists already: choose another --out, or remove it")
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            write_atomic(file, resources.files(__package__).joinpath(file.name).read_bytes())
            print(f"wrote {file}")
    else:
        raise UserError(f"launch {cluster}: give slurm, tpu or kubernetes")
