"""Print a JobSet (jobset.x-k8s.io/v1alpha2) that pretrains on several hosts of a Kubernetes cluster.

    bert-jax launch kubernetes gpu --name first --image REGISTRY/bert_jax:cuda --hosts 4 --gpus 8 \\
        --claim corpora:/data -- bert_large --corpus /data/wiki --workdir /data/runs/first | kubectl apply -f -
    bert-jax launch kubernetes tpu --name first --image REGISTRY/bert_jax:tpu --accelerator tpu-v6e-slice \\
        --topology 4x4 -- bert_large --corpus gs://bucket/wiki --workdir gs://bucket/runs/first

The arguments of `bert-jax pretrain` follow `--`. One pod with one process per host. On GPUs the pods learn from their
index in the Job which process they are, and find process 0 by its name; on slices of GKE both are detected.

Exit codes 1 (a bug) and 2 (a mistake) fail the JobSet at once. Every other end of a pod (75: saved, or another process
is gone; evictions, preemptions, hosts that die) starts all pods again, --max-restarts times at most.

Corpora and work directory must be where all pods see them: under the mount of a PersistentVolumeClaim (--claim), or in
a bucket (gs://...), which a Kubernetes service account may have to open (--service-account).
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from bert_jax.errors import UserError, require

JOB = "hosts"
"""Name of the one Job of the set. Its pods are NAME-hosts-0-INDEX, and their service is called NAME."""
PORT = 8476
CONTAINER = "bert-jax"
INDEX = "BERT_JAX_HOST"
"""Environment variable of the container: which host this is, from 0."""
USER = 1000
"""Of the image (Dockerfile)."""
NAME_LENGTH = 40
"""So that NAME-hosts-0-INDEX and the five characters that a Job adds stay below 63 together."""

DIMENSIONS = {"tpu-v4-podslice": 3, "tpu-v5p-slice": 3, "tpu-v5-lite-podslice": 2, "tpu-v6e-slice": 2}
"""Of the topologies of GKE's slices of several hosts (cloud.google.com/gke-tpu-accelerator)."""
CHIPS = 4
"""Per host, in all of them, if the topology has so many."""

Fields = dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message}: --help explains all options")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the arguments after ``--``.

    Raises:
      UserError: something is missing, or is not what it should be.
    """
    options, words = list(arguments), []
    if "--" in options:
        cut = options.index("--")
        options, words = options[:cut], options[cut + 1 :]
    common = _Parser(add_help=False)
    add = common.add_argument
    add("--name", required=True, help="of the JobSet")
    add("--image", required=True, help="made with the Dockerfile and --build-arg PLATFORM=cuda or tpu")
    add("--namespace", help="without it, kubectl's own")
    add("--claim", action="append", default=[], metavar="CLAIM:PATH", help="mount a PersistentVolumeClaim there")
    add("--service-account", metavar="NAME", help="of the pods, as buckets ask for")
    add("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="more labels that nodes must have")
    add("--toleration", action="append", default=[], metavar="KEY", help="taints that nodes may have")
    add("--shared-memory", default="16Gi", metavar="SIZE", help="of /dev/shm in a pod (default: 16Gi)")
    add("--grace", type=int, default=300, metavar="SECONDS", help="to save in when a pod is asked to go (default: 300)")
    add("--max-restarts", type=int, default=100, metavar="N", help="of all pods together (default: 100)")
    parser = _Parser(
        prog="bert-jax launch kubernetes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    gpu = kinds.add_parser("gpu", parents=[common], allow_abbrev=False)
    gpu.add_argument("--hosts", type=int, required=True, help="how many")
    gpu.add_argument("--gpus", type=int, required=True, help="of a host")
    tpu = kinds.add_parser("tpu", parents=[common], allow_abbrev=False)
    tpu.add_argument("--accelerator", required=True, help=", ".join(DIMENSIONS))
    tpu.add_argument("--topology", required=True, help="of the slice, in chips: 4x4, or 2x2x4")
    tpu.add_argument("--chips-per-host", type=int, help="if it is not 4: a slice of one host can have 8")
    asked = parser.parse_args(options)
    _check(asked)
    _check_words(words, [_claim(text)[1] for text in asked.claim])
    return asked, words


def _check(asked: argparse.Namespace) -> None:
    require(
        len(asked.name) <= NAME_LENGTH and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", asked.name) is not None,
        f"--name {asked.name}: take lower-case letters, digits and hyphens, a letter first, {NAME_LENGTH} at most",
    )
    for name, least in (("hosts", 1), ("gpus", 1), ("chips_per_host", 1), ("grace", 1), ("max_restarts", 0)):
        value = getattr(asked, name, None)
        require(value is None or value >= least, f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    require(
        re.fullmatch(r"[1-9]\d*(Mi|Gi|M|G)", asked.shared_memory) is not None,
        f"--shared-memory {asked.shared_memory}: write a size like 16Gi",
    )
    for text in asked.node_selector:
        require(re.fullmatch(r"[^=]+=[^=]*", text) is not None, f"--node-selector {text}: write KEY=VALUE")
    claims = [_claim(text) for text in asked.claim]
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


def _check_words(words: list[str], mounts: list[str]) -> None:
    """Arguments of ``bert-jax pretrain``: is all there, and do all pods see it."""
    require(
        bool(words) and not words[0].startswith("-"),
        "say what to train behind --, as in: -- bert_base --corpus /data/wiki --workdir /data/runs/first",
    )
    given = set()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag.startswith("--cluster.") and flag != "--cluster.timeout":
            raise UserError(f"{flag} is filled in for each pod: leave it out")
        if flag not in ("--corpus", "--workdir"):
            continue
        place = value if equals else following
        seen = re.match(r"[a-z0-9]+://.", place) or any(
            PurePosixPath(place).is_relative_to(mount) for mount in mounts if ".." not in place
        )
        require(
            bool(seen), f"{flag} {place}: not all pods see it: mount a --claim above it, or take a bucket (gs://...)"
        )
        given.add(flag)
    for flag in ("--corpus", "--workdir"):
        require(flag in given, f"{flag} is missing behind --")


def hosts_and_chips(asked: argparse.Namespace) -> tuple[int, int]:
    """Hosts of a slice, and chips of each.

    Raises:
      UserError: there is no such slice.
    """
    known = ", ".join(DIMENSIONS)
    require(asked.accelerator in DIMENSIONS, f"--accelerator {asked.accelerator} is unknown: known are {known}")
    dimensions = DIMENSIONS[asked.accelerator]
    require(
        re.fullmatch(r"[1-9]\d*(x[1-9]\d*)" + f"{{{dimensions - 1}}}", asked.topology) is not None,
        f"--topology {asked.topology}: {asked.accelerator} has {dimensions} dimensions, as in "
        + "x".join("4" * dimensions),
    )
    total = math.prod(map(int, asked.topology.split("x")))
    chips = asked.chips_per_host or min(CHIPS, total)
    require(total % chips == 0, f"--topology {asked.topology} has {total} chips, no multiple of {chips} per host")
    return total // chips, chips


def jobset(asked: argparse.Namespace, words: list[str]) -> Fields:
    """The manifest, as plain values."""
    metadata: Fields = {"name": asked.name}
    if asked.namespace:
        metadata["namespace"] = asked.namespace
    # Kubernetes fills $(NAME) in, and takes $$( for $(.
    arguments = ["pretrain", *(word.replace("$(", "$$(") for word in words)]
    selector = dict(text.split("=", 1) for text in asked.node_selector)
    if asked.kind == "gpu":
        hosts, resource = asked.hosts, {"nvidia.com/gpu": asked.gpus}
        if hosts > 1:
            first = f"{asked.name}-{JOB}-0-0.{asked.name}:{PORT}"
            arguments += ["--cluster.coordinator", first, "--cluster.processes", str(hosts)]
            arguments += ["--cluster.process", f"$({INDEX})"]
    else:
        hosts, chips = hosts_and_chips(asked)
        resource = {"google.com/tpu": chips}
        selector |= {
            "cloud.google.com/gke-tpu-accelerator": asked.accelerator,
            "cloud.google.com/gke-tpu-topology": asked.topology,
        }
        # All pods in one slice, which is one node pool.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {"name": JOB, "replicas": 1, "template": {"spec": _job(asked, hosts, resource, selector, arguments)}}
    ends = {"name": "bugAndMistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": asked.name},
        # Blocking: two generations of pods must never write to one work directory.
        "failurePolicy": {
            "maxRestarts": asked.max_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [ends],
        },
        "replicatedJobs": [job],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _job(
    asked: argparse.Namespace, hosts: int, resource: Fields, selector: dict[str, str], arguments: list[str]
) -> Fields:
    """Spec of the Job: all hosts or none."""
    volumes: list[Fields] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": asked.shared_memory}}
    ]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for i, (claim, path) in enumerate(map(_claim, asked.claim)):
        volumes.append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{i}", "mountPath": path})
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": CONTAINER,
        "image": asked.image,
        "command": ["bert-jax"],
        "args": arguments,
        "env": [{"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        "resources": {"requests": resource, "limits": dict(resource)},
        "volumeMounts": mounts,
    }
    pod: Fields = {
        "restartPolicy": "Never",
        # Then the container's process is not the first one, which would ignore SIGTERM until it asks for it.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": asked.grace,
        "securityContext": {"fsGroup": USER},
        "containers": [container],
        "volumes": volumes,
    }
    if asked.service_account:
        pod["serviceAccountName"] = asked.service_account
    if selector:
        pod["nodeSelector"] = selector
    tolerated = [*(["nvidia.com/gpu"] if asked.kind == "gpu" else []), *asked.toleration]
    if tolerated:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in dict.fromkeys(tolerated)]
    codes = {"containerName": CONTAINER, "operator": "In", "values": [1, 2]}
    return {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }


def manifest(arguments: Sequence[str]) -> str:
    """The JobSet of these arguments, as YAML; UserError: a mistake in them."""
    return yaml.safe_dump(jobset(*parse(arguments)), sort_keys=False)
