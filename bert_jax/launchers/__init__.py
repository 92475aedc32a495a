"""Launchers for clusters: scripts for Slurm and Cloud TPU, and a JobSet for Kubernetes."""

from collections.abc import Sequence
from importlib import resources

from bert_jax import storage
from bert_jax.errors import UserError

SCRIPTS = {"slurm": ("slurm.sbatch",), "tpu": ("tpu_pod.sh", "tpu_worker.sh")}
"""Cluster -> the files of this package that the command writes."""
HELP = {"-h", "--help", "--help-all"}
USAGE = """usage: bert-jax launch slurm --out DIR
       bert-jax launch tpu --out DIR
       bert-jax launch kubernetes gpu|tpu [OPTION ...] -- CONFIG --corpus PATH --workdir PATH ...

Write the launcher of a cluster: slurm.sbatch for Slurm, tpu_pod.sh and tpu_worker.sh for Cloud TPU. The comment at the
top of each script says how to call it. `kubernetes` prints a JobSet, to be piped into kubectl apply -f -; its --help
lists its options."""


def launch(arguments: Sequence[str]) -> None:
    """Run the command with these arguments.

    Raises:
      UserError: an unknown cluster or option, or a file exists already.
    """
    cluster, *rest = arguments or ["--help"]
    if cluster in HELP or (cluster in SCRIPTS and HELP & set(rest)):
        print(USAGE)
        raise SystemExit(0)
    if cluster == "kubernetes":
        from bert_jax.launchers import kubernetes

        print(kubernetes.manifest(rest), end="")
        return
    if cluster not in SCRIPTS:
        raise UserError(f"launch {cluster}: give slurm, tpu or kubernetes")
    write(cluster, _directory(rest))


def write(cluster: str, directory: storage.StoredPath) -> None:
    """Write the scripts of a cluster into a directory, which is created if it does not exist.

    Raises:
      UserError: one of the files exists already; none is written.
    """
    files = [directory / name for name in SCRIPTS[cluster]]
    for file in files:
        if file.exists():
            raise UserError(f"{file} exists already: choose another --out, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_text(resources.files(__package__).joinpath(file.name).read_text())
        print(f"wrote {file}")


def _directory(arguments: Sequence[str]) -> storage.StoredPath:
    match [part for argument in arguments for part in argument.split("=", 1)]:
        case ["--out", directory] if directory:
            return storage.to_path(directory)
    raise UserError("launch slurm and launch tpu take --out DIR, the directory for the scripts, and nothing else")
