"""Print a JobSet (jobset.x-k8s.io/v1alpha2) that pretrains on several hosts of a Kubernetes cluster.

    bert-jax launch kubernetes gpu --name first --image REGISTRY/bert_jax:cuda --hosts 4 --gpus 8 \\
        --claim corpora:/data -- bert_large --corpus /data/wiki --workdir /data/runs/first | kubectl apply -f -
    bert-jax launch kubernetes tpu --name first --image REGISTRY/bert_jax:tpu --accelerator tpu-v6e-slice \\
        --topology 4x4 -- bert_large --corpus gs://bucket/wiki --workdir gs://bucket/runs/first

The arguments of `bert-jax pretrain` follow `--`. Each host runs one pod with one process. On GPUs the process index is
the pod's index in the Job, and process 0 has a fixed host name; on slices of GKE both are detected.

Exit codes 1 (a bug) and 2 (a user's mistake) fail the JobSet at once. Every other end of a pod (75: saved, or another
process is gone; evictions, preemptions, failed hosts) restarts all pods, at most --max-restarts times.

All pods must see the corpora and the work directory: under the mount of a PersistentVolumeClaim (--claim), or in a
bucket (gs://...), which may need a Kubernetes service account (--service-account).
"""

import argparse
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

import yaml

from bert_jax.errors import UserError, require

PORT = 8476
NAME_LENGTH = 40
"""Keeps NAME-hosts-0-INDEX with the five characters that a Job adds below 63 characters."""

TOPOLOGY_DIMENSIONS = {"tpu-v4-podslice": 3, "tpu-v5p-slice": 3, "tpu-v5-lite-podslice": 2, "tpu-v6e-slice": 2}
"""Accelerator of GKE (cloud.google.com/gke-tpu-accelerator) -> dimensions of the topology of its multi-host slices."""
CHIPS_PER_HOST = 4
"""In slices of all these accelerators, if the topology has at least 4 chips."""

Fields = dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message}: --help explains all options")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options; also return the arguments after ``--``.

    Raises:
      UserError: an option is missing or invalid.
    """
    options, pretrain_args = list(arguments), []
    if "--" in options:
        cut = options.index("--")
        options, pretrain_args = options[:cut], options[cut + 1 :]
    common = _Parser(add_help=False)
    add = common.add_argument
    add("--name", required=True, help="name of the JobSet")
    add("--image", required=True, help="image built with the Dockerfile and --build-arg PLATFORM=cuda or tpu")
    add("--namespace", help="namespace of the JobSet (default: kubectl's)")
    add("--claim", action="append", default=[], metavar="CLAIM:PATH", help="mount a PersistentVolumeClaim at PATH")
    add("--service-account", metavar="NAME", help="service account of the pods, for access to buckets")
    add("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="label that nodes must have")
    add("--toleration", action="append", default=[], metavar="KEY", help="taint that the pods tolerate")
    add("--shared-memory", default="16Gi", metavar="SIZE", help="size of /dev/shm in a pod (default: 16Gi)")
    add("--grace", type=int, default=300, metavar="SECONDS", help="time to save before a pod is killed (default: 300)")
    add("--max-restarts", type=int, default=100, metavar="N", help="restarts of all pods together (default: 100)")
    parser = _Parser(
        prog="bert-jax launch kubernetes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    platforms = parser.add_subparsers(dest="platform", required=True)
    gpu = platforms.add_parser("gpu", parents=[common], allow_abbrev=False)
    gpu.add_argument("--hosts", type=int, required=True, help="number of hosts")
    gpu.add_argument("--gpus", type=int, required=True, help="GPUs per host")
    tpu = platforms.add_parser("tpu", parents=[common], allow_abbrev=False)
    tpu.add_argument("--accelerator", required=True, help=", ".join(TOPOLOGY_DIMENSIONS))
    tpu.add_argument("--topology", required=True, help="topology of the slice, in chips: 4x4, or 2x2x4")
    tpu.add_argument("--chips-per-host", type=int, help="chips per host (default: 4); a slice of one host can have 8")
    args = parser.parse_args(options)
    _check(args)
    _check_pretrain_args(pretrain_args, [_claim(text)[1] for text in args.claim])
    return args, pretrain_args


def _check(args: argparse.Namespace) -> None:
    require(
        len(args.name) <= NAME_LENGTH and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", args.name) is not None,
        f"--name {args.name}: use lower-case letters, digits and hyphens, a letter first, {NAME_LENGTH} at most",
    )
    for name, least in (("hosts", 1), ("gpus", 1), ("chips_per_host", 1), ("grace", 1), ("max_restarts", 0)):
        value = getattr(args, name, None)
        require(value is None or value >= least, f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    require(
        re.fullmatch(r"[1-9]\d*(Mi|Gi|M|G)", args.shared_memory) is not None,
        f"--shared-memory {args.shared_memory}: write a size like 16Gi",
    )
    for text in args.node_selector:
        require(re.fullmatch(r"[^=]+=[^=]*", text) is not None, f"--node-selector {text}: write KEY=VALUE")
    claims = [_claim(text) for text in args.claim]
    require(
        len({name for name, _ in claims}) == len(claims) == len({path for _, path in claims}),
        "--claim: each claim, and each path, is given once",
    )


def _claim(text: str) -> tuple[str, str]:
    name, colon, path = text.partition(":")
    require(
        bool(name and colon) and path.startswith("/") and path.strip("/") != "",
        f"--claim {text}: write the claim and where it is mounted, as in corpora:/data",
    )
    return name, path.rstrip("/")


def _check_pretrain_args(pretrain_args: list[str], mounts: list[str]) -> None:
    """Check that a config, corpora and a work directory are given, and that all pods see them."""
    require(
        bool(pretrain_args) and not pretrain_args[0].startswith("-"),
        "give the config to train after --, as in: -- bert_base --corpus /data/wiki --workdir /data/runs/first",
    )
    given = set()
    for arg, following in zip(pretrain_args, [*pretrain_args[1:], ""], strict=True):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--cluster.") and flag != "--cluster.timeout":
            raise UserError(f"{flag} is set for each pod: leave it out")
        if flag not in ("--corpus", "--workdir"):
            continue
        path = value if equals else following
        visible = re.match(r"[a-z0-9]+://.", path) or any(
            PurePosixPath(path).is_relative_to(mount) for mount in mounts if ".." not in path
        )
        require(
            bool(visible),
            f"{flag} {path}: not all pods see it: mount a --claim that contains it, or use a bucket (gs://...)",
        )
        given.add(flag)
    for flag in ("--corpus", "--workdir"):
        require(flag in given, f"{flag} is missing after --")


def hosts_and_chips(args: argparse.Namespace) -> tuple[int, int]:
    """Number of hosts of a slice, and chips per host.

    Raises:
      UserError: no such slice exists.
    """
    known = ", ".join(TOPOLOGY_DIMENSIONS)
    require(args.accelerator in TOPOLOGY_DIMENSIONS, f"--accelerator {args.accelerator} is unknown: known are {known}")
    dimensions = TOPOLOGY_DIMENSIONS[args.accelerator]
    require(
        re.fullmatch(r"[1-9]\d*(x[1-9]\d*)" + f"{{{dimensions - 1}}}", args.topology) is not None,
        f"--topology {args.topology}: {args.accelerator} has {dimensions} dimensions, as in "
        + "x".join("4" * dimensions),
    )
    total = math.prod(map(int, args.topology.split("x")))
    chips = args.chips_per_host or min(CHIPS_PER_HOST, total)
    require(total % chips == 0, f"--topology {args.topology} has {total} chips: not a multiple of {chips} per host")
    return total // chips, chips


def jobset(args: argparse.Namespace, pretrain_args: list[str]) -> Fields:
    """Return the manifest as plain values: jobset.yaml with the options filled in."""
    manifest = yaml.safe_load(resources.files(__package__).joinpath("jobset.yaml").read_text())
    metadata, spec = manifest["metadata"], manifest["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    # Kubernetes replaces $(NAME) by the variable, and $$( by $(.
    container["args"] = ["pretrain", *(word.replace("$(", "$$(") for word in pretrain_args)]
    selector, tolerated = dict(text.split("=", 1) for text in args.node_selector), list(args.toleration)
    metadata["name"] = spec["network"]["subdomain"] = args.name
    if args.namespace:
        metadata["namespace"] = args.namespace
    if args.platform == "gpu":
        hosts, resource = args.hosts, {"nvidia.com/gpu": args.gpus}
        tolerated.insert(0, "nvidia.com/gpu")
        if hosts > 1:
            container["args"] += ["--cluster.coordinator", f"{args.name}-hosts-0-0.{args.name}:{PORT}"]
            container["args"] += ["--cluster.processes", str(hosts), "--cluster.process", "$(BERT_JAX_HOST)"]
    else:
        hosts, chips = hosts_and_chips(args)
        resource, gke = {"google.com/tpu": chips}, "cloud.google.com/gke"
        selector |= {f"{gke}-tpu-accelerator": args.accelerator, f"{gke}-tpu-topology": args.topology}
        # All pods run in one slice, which is one node pool.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{gke}-nodepool"}
    spec["failurePolicy"]["maxRestarts"] = args.max_restarts
    job["completions"] = job["parallelism"] = hosts
    pod["terminationGracePeriodSeconds"] = args.grace
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = args.shared_memory
    container |= {"image": args.image, "resources": {"requests": resource, "limits": dict(resource)}}
    for i, (claim, path) in enumerate(map(_claim, args.claim)):
        pod["volumes"].append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": f"claim-{i}", "mountPath": path})
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    if selector:
        pod["nodeSelector"] = selector
    if tolerated:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in dict.fromkeys(tolerated)]
    return manifest


def manifest(arguments: Sequence[str]) -> str:
    """Return the JobSet for these arguments as YAML; UserError: invalid arguments."""
    return yaml.safe_dump(jobset(*parse(arguments)), sort_keys=False)
