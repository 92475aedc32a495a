"""The JobSet (jobset.x-k8s.io/v1alpha2) of ``bert-jax launch kubernetes``: jobset.yaml with the flags filled in."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

import jinja2
import tyro

from bert_jax.errors import UserError, require, short_repr
from bert_jax.field_validation import Count, CountOrZero, Form, Interval

PORT = 8476
NEEDED = {"gpu": ("hosts", "gpus"), "tpu": ("accelerator", "topology")}
"""Fields that one platform needs and the other does not have."""
THREE_DIMENSIONAL = ("tpu-v4-podslice", "tpu-v5p-slice", "tpu7x")
"""Accelerators whose slices have topologies of three dimensions; the others have two."""
CHIPS_PER_HOST = 4
"""In slices of all these accelerators, if the topology has at least 4 chips."""
RESERVED = ("BERT_JAX_HOST", "BERT_JAX_CACHE", "XDG_CACHE_HOME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
RESERVED += ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
"""Environment variables that the JobSet or GKE sets."""
Accelerator = Literal["tpu-v4-podslice", "tpu-v5p-slice", "tpu-v5-lite-podslice", "tpu-v6e-slice", "tpu7x"]
Size = Annotated[str, Form("a size, as in 400Gi", r"[1-9][0-9]{0,8}[MGT]i?")]
# With 40 characters, NAME-hosts-SLICE-INDEX and the six that a Job adds are at most 63, for three digits of a slice and
# six of an index.
Name = Annotated[
    str,
    Form(
        "made of lower-case letters, digits and hyphens, a letter first, 40 at most",
        "[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?",
    ),
]
Slices = Annotated[int, Interval("[1, 999]")]
# What Kubernetes accepts (apimachinery/pkg/util/validation, apis/core/validation); surrogates are not UTF-8.
LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
DOMAIN = rf"(?=[^/=:]{{1,253}}(?:[/=:]|\Z)){LABEL}(?:\.{LABEL})*"
KEY = rf"(?:{DOMAIN}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
TEXT = r"[^\x00\ud800-\udfff]*"
PATH = r"(?:/(?!\.\.?(?:[/:]|\Z))[^/:\x00-\x1f\x7f\ud800-\udfff]+)+"
MOUNT = rf"(?!/(?:dev|sys)/?\Z|/proc(?:/|\Z)){PATH}/?"
Namespace = Annotated[str, Form("made of lower-case letters, digits and hyphens", LABEL)]
Account = Annotated[str, Form("made of lower-case letters, digits, hyphens and dots", DOMAIN)]
Image = Annotated[str, Form("the name of an image, as in registry/bert_jax:1", "[!-~]{1,1000}")]
Claim = Annotated[str, Form("CLAIM:PATH, as in corpora:/data", f"{DOMAIN}:{MOUNT}")]
HostPath = Annotated[str, Form("NODE_PATH:PATH, as in /home/kubernetes/bin/gib:/usr/local/gib", f"{PATH}/?:{MOUNT}")]
Cache = Annotated[
    str,
    Form("an absolute path on a disk, as in /mnt/disks/ssd0/cache", rf"(?!/(?:dev|proc|sys)(?:/|\Z)){PATH}/?"),
]
Topology = Annotated[str, Form("chips, as in 4x4 or 2x2x4", "[1-9][0-9]{0,3}(?:x[1-9][0-9]{0,3}){1,2}")]
Variable = Annotated[
    str,
    Form(
        f"NAME=VALUE, as in NCCL_DEBUG=INFO, and not one of {', '.join(RESERVED)}",
        rf"(?!(?:{'|'.join(RESERVED)})=)[A-Za-z_][A-Za-z_0-9]*={TEXT}",
    ),
]
Annotation = Annotated[str, Form("KEY=VALUE", f"{KEY}={TEXT}")]
Script = Annotated[str, Form("an absolute path, as in /usr/local/gib/scripts/set_nccl_env.sh", PATH)]
Card = Annotated[
    str,
    Form(
        "RESOURCE=COUNT, as in rdma/rdma_shared_device_a=1 (GPUs are --gpus)",
        rf"(?!nvidia\.com/gpu=|google\.com/tpu=)(?=[^=]+/){KEY}=[1-9][0-9]{{0,3}}",
    ),
]
Label = Annotated[str, Form("KEY=VALUE", f"{KEY}=(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?)?")]
Taint = Annotated[str, Form("the key of a taint", KEY)]


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Print a JobSet that pretrains on several hosts of a Kubernetes cluster, to be piped into kubectl apply -f -.

    The arguments of `bert-jax pretrain` follow `--`. Each host runs one pod with one process. Exit codes 1 (a bug) and
    2 (a user's mistake) fail the JobSet at once; every other end of a pod restarts all pods. All pods must see the
    corpora and the work directory: under the mount of a claim, or in a bucket.
    """

    platform: Annotated[Literal["gpu", "tpu"], tyro.conf.Positional, tyro.conf.arg(metavar="gpu|tpu")]
    """gpu needs --hosts and --gpus; tpu needs --accelerator and --topology, a slice of GKE."""
    name: Name
    """Name of the JobSet."""
    image: Image
    """Image built with the Dockerfile and --build-arg PLATFORM=cuda or tpu."""
    cpus: Count
    """CPUs of a pod, as request and limit."""
    memory: Size
    """Memory of a pod, as request and limit: 400Gi. What is in /dev/shm counts."""
    hosts: Count | None = None
    """Number of hosts."""
    gpus: Count | None = None
    """GPUs per host."""
    accelerator: Accelerator | None = None
    """Accelerator of the slice (cloud.google.com/gke-tpu-accelerator)."""
    topology: Topology | None = None
    """Topology of a slice, in chips: 4x4, or 2x2x4. It determines the number of hosts."""
    chips_per_host: Count | None = None
    """Chips per host of a slice. Default: 4; a slice of one host can have 8."""
    slices: Slices = 1
    """Number of slices, each in a node pool of its own, joined over the network of the data centre (Multislice)."""
    claim: Annotated[tuple[Claim, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="CLAIM:PATH")] = ()
    """Mount a PersistentVolumeClaim at PATH."""
    host_path: Annotated[tuple[HostPath, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NODE_PATH:PATH")] = ()
    """Mount a directory of the nodes at PATH, as for the network libraries of GKE."""
    env: Annotated[tuple[Variable, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Environment variable of the pods, as in NCCL_DEBUG=INFO."""
    env_script: Script | None = None
    """Script in the pods that sets environment variables; bash sources it before `bert-jax` starts."""
    annotation: Annotated[tuple[Annotation, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Annotation of the pods, as in networking.gke.io/default-interface=eth0."""
    cache: Cache | None = None
    """Directory that keeps copies of corpora and compiled programs for the next start: in the mount of a claim, or else
    on the disk of each node, where it is created if it does not exist."""
    host_network: bool = False
    """Use the network of the nodes, which can be faster than that of the pods."""
    rdma: Annotated[tuple[Card, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="RESOURCE=COUNT")] = ()
    """RDMA cards of a pod, by the resource of the cluster's device plugin, as in rdma/rdma_shared_device_a=1."""
    namespace: Namespace | None = None
    """Namespace of the JobSet. Default: kubectl's."""
    service_account: Account | None = None
    """Service account of the pods, for access to buckets."""
    node_selector: Annotated[tuple[Label, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Label that nodes must have."""
    toleration: Annotated[tuple[Taint, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY")] = ()
    """Taint that the pods tolerate."""
    shared_memory: Size = "16Gi"
    """Size of /dev/shm in a pod."""
    grace: Count = 300
    """Seconds to save before a pod is killed."""
    max_restarts: CountOrZero = 100
    """Restarts of all pods together."""

    def __post_init__(self) -> None:
        for platform, fields in NEEDED.items():
            for field in fields:
                given, needed = getattr(self, field) is not None, platform == self.platform
                require(given == needed, f"--{field}: {self.platform} {'needs it' if needed else 'has no such flag'}")
        require(self.platform == "tpu" or self.chips_per_host is None, "--chips-per-host: gpu has no such flag")
        require(self.platform == "gpu" or not self.rdma, "--rdma: tpu has no such flag")
        require(self.platform == "tpu" or self.slices == 1, "--slices: gpu has no such flag")

        # Kubernetes takes the JobSet, and then refuses its Jobs, which kubectl apply does not show.
        paths = [
            "/dev/shm",
            *(path for _, path in mounts(self.claim + self.host_path)),
            *[self.cache] * self.node_cache,
        ]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        require(not twice, f"--claim, --host-path: {', '.join(map(short_repr, twice))} would be mounted twice in a pod")

    @property
    def claims(self) -> list[tuple[str, str]]:
        """The name of each claim, and where it is mounted."""
        return mounts(self.claim)

    @property
    def node_cache(self) -> bool:
        """Whether the cache is on the disks of the nodes."""
        return self.cache is not None and not is_mounted(self.cache, [path for _, path in self.claims])

    def slice_hosts(self) -> tuple[int, int]:
        """Number of hosts of a TPU slice, and chips per host.

        Raises:
          UserError: no such slice exists, or GKE does not join several of it.
        """
        dimensions = 3 if self.accelerator in THREE_DIMENSIONAL else 2
        require(
            self.topology.count("x") == dimensions - 1,
            f"--topology {self.topology}: {self.accelerator} has {dimensions} dimensions, as in "
            + "x".join("4" * dimensions),
        )
        total = math.prod(map(int, self.topology.split("x")))
        chips = self.chips_per_host or min(CHIPS_PER_HOST, total)
        require(total % chips == 0, f"--topology {self.topology} has {total} chips: not a multiple of {chips} per host")
        # https://docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice
        require(
            self.slices == 1 or total > chips,
            f"--slices {self.slices}: GKE joins slices of several hosts, and --topology {self.topology} is one host",
        )
        return total // chips, chips


def mounts(texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """What is mounted, and where, from texts WHAT:PATH."""
    return [(what, path.rstrip("/")) for what, _, path in (text.partition(":") for text in texts)]


def pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """Names and values, from texts NAME=VALUE; of a name that is given twice, the last."""
    return dict(text.split("=", 1) for text in texts)


def is_mounted(path: str, directories: list[str]) -> bool:
    """Whether a path of a pod is in one of these directories."""
    return ".." not in path and any(PurePosixPath(path).is_relative_to(directory) for directory in directories)


def check_pretrain_args(words: list[str], directories: list[str]) -> None:
    """Check that a config, corpora and a work directory are given, and that all pods see them.

    Raises:
      UserError: one of them is missing or not visible, or a flag is given that each pod gets from the JobSet.
    """
    require(
        bool(words) and not words[0].startswith("-"),
        "give the config to train after --, as in: -- bert_base --corpus /data/wiki --workdir /data/runs/first",
    )
    require(
        not words[0].endswith(".py") or is_mounted(words[0], directories),
        f"config {short_repr(words[0])}: the pods do not have it: give its path in the mount of a --claim, or "
        "add it to configs before the image is built, and give its name without .py",
    )
    for word in words:
        require(re.fullmatch(TEXT, word) is not None, f"argument {short_repr(word)}: it is not UTF-8")
    given = set()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in ("--cluster.coordinator", "--cluster.processes", "--cluster.process"):
            raise UserError(f"{short_repr(flag)} is set for each pod: leave it out")
        if flag not in ("--corpus", "--workdir"):
            continue
        path = value if equals else following
        require(
            re.match(r"[a-z0-9]+://.", path) is not None or is_mounted(path, directories),
            f"{flag} {short_repr(path)}: not all pods see it: mount a --claim that contains it, or use a bucket (gs://...)",
        )
        given.add(flag)
    for flag in ("--corpus", "--workdir"):
        require(flag in given, f"{flag} is missing after --")


def to_yaml(value: object, **options: bool) -> str:
    """A value as JSON that is YAML, too: JSON's pairs of surrogates are an error in the YAML of kubectl."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return re.sub("[^ -~]", lambda found: rf"\U{ord(found[0]):08x}", text)


def manifest(args: Kubernetes, pretrain_args: list[str]) -> str:
    """The JobSet as YAML: jobset.yaml filled in.

    Args:
      args: the flags.
      pretrain_args: the arguments of `bert-jax pretrain`.

    Raises:
      UserError: see `check_pretrain_args` and `Kubernetes.slice_hosts`.
    """
    check_pretrain_args(pretrain_args, [path for _, path in args.claims])
    # Kubernetes replaces $(NAME) by the variable, and $$ by $.
    words = [word.replace("$", "$$") for word in pretrain_args]
    labels, taints = pairs(args.node_selector), list(args.toleration)
    if args.platform == "gpu":
        hosts, devices = args.hosts, {"nvidia.com/gpu": args.gpus}
        devices |= {name: int(count) for name, count in pairs(args.rdma).items()}
        taints.insert(0, "nvidia.com/gpu")
        if hosts > 1:
            words += ["--cluster.coordinator", f"{args.name}-hosts-0-0.{args.name}:{PORT}"]
            words += ["--cluster.processes", str(hosts), "--cluster.process", "$(BERT_JAX_HOST)"]
    else:
        hosts, chips = args.slice_hosts()
        devices = {"google.com/tpu": chips}
        taints.insert(0, "google.com/tpu")
        labels |= {f"cloud.google.com/gke-tpu-{name}": getattr(args, name) for name in ("accelerator", "topology")}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.launchers", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_function"] = to_yaml
    template = environment.get_template("jobset.yaml")
    return template.render(
        args=args,
        words=words,
        labels=labels,
        taints=taints,
        hosts=hosts,
        variables=pairs(args.env),
        annotations=pairs(args.annotation),
        host_paths=mounts(args.host_path),
        resources={"cpu": args.cpus, "memory": args.memory, **devices},
        node_cache=args.node_cache,
        as_root=args.platform == "tpu" or bool(args.rdma or args.host_path) or args.node_cache,
    )
