"""`bert-jax launch kubernetes`: manifests against Kubernetes' schemas, and the commands that the pods run."""

import json
import re
import subprocess
from pathlib import Path

import jax
import jsonschema
import kubernetes_validate
import pytest
import yaml
from jax._src.clusters import cloud_tpu_cluster

from bert_jax.cli import main as cli
from bert_jax.distributed import cluster_detection, jax_setup
from bert_jax.distributed.monitor import ProcessFailure
from bert_jax.errors import TRY_AGAIN
from bert_jax.storage.cache import LocalCache

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "jobset_schema.json").read_text())
VERSIONS = ("1.31.0", "1.37.0")
"""Versions of Kubernetes: the first with stable pod failure policies, and the newest with a schema."""

COMMON = ["--name", "first", "--image", "registry/bert_jax:1", "--cpus", "96", "--memory", "800Gi"]
GPU = ["gpu", *COMMON, "--hosts", "4", "--gpus", "8", "--claim", "corpora:/data"]
TPU = ["tpu", *COMMON, "--accelerator", "tpu-v6e-slice", "--topology", "4x4"]
MOUNTED = ["bert_base", "--corpus", "/data/wiki", "--workdir", "/data/runs/first"]
BUCKET = ["bert_base", "--corpus", "gs://here/wiki", "--workdir", "gs://here/runs/first"]


def without(words: list[str], *flags: str) -> list[str]:
    """The words without these flags and their values."""
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & {*flags}]


@pytest.fixture
def make_jobset(capsys):
    def make(*words: str) -> dict:
        assert cli.main(["launch", "kubernetes", *words]) == 0, capsys.readouterr().err
        return yaml.safe_load(capsys.readouterr().out)

    return make


def job_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(jobset: dict) -> dict:
    return job_of(jobset)["template"]["spec"]


def validate(jobset: dict) -> None:
    """Check the JobSet against the schema in this directory, and its Job strictly against Kubernetes' own."""
    jsonschema.validate(jobset, SCHEMA, cls=jsonschema.Draft202012Validator)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "hosts"}, "spec": job_of(jobset)}
    for version in VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)


EXTRAS = ["--namespace", "research", "--claim", "more:/more", "--service-account", "reader", "--toleration", "spot"]
RDMA = ["--host-network", "--rdma", "rdma/shared=1", "--cache", "/mnt/cache"]
NETWORKS = ["--annotation", 'networking.gke.io/interfaces=[{"interfaceName":"eth2","network":"rdma-0"}]']
NETWORKS += ["--host-path", "/home/kubernetes/bin/gib:/usr/local/gib/", "--env-script", "/usr/local/gib/set env.sh"]
NETWORKS += ["--env", "NCCL_DEBUG=INFO", "--env", "EMPTY=", "--env", "NCCL_DEBUG=WARN=$(X)"]


@pytest.mark.parametrize(
    "words",
    [
        (*GPU, "--", *MOUNTED),
        (*GPU, *EXTRAS, *RDMA, "--", *BUCKET),
        (*GPU, *NETWORKS, "--", *MOUNTED),
        (*TPU, "--", *BUCKET),
        (*TPU, *NETWORKS, "--slices", "3", "--", *BUCKET),
    ],
)
def test_manifests_are_valid(make_jobset, words):
    validate(make_jobset(*words))


def test_the_schemas_reject(make_jobset):
    """A misspelled field, in the JobSet and in its Job."""
    jobset = make_jobset(*GPU, "--", *MOUNTED)
    job_of(jobset).update(completionsMode="Indexed")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(jobset)
    jobset["spec"]["failurePolicy"].update(maxRestarts="3")
    with pytest.raises(jsonschema.ValidationError):
        validate(jobset)


def pod_environment(jobset: dict, index: int, slice_index: int = 0) -> dict[str, str]:
    """The variables that the manifest gives a pod, with the label and the annotation that controllers add."""
    metadata = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/job-index']": str(slice_index),
    }
    variables: dict[str, str] = {}
    for entry in pod_of(jobset)["containers"][0]["env"]:
        source = entry.get("valueFrom")
        variables[entry["name"]] = (
            metadata[source["fieldRef"]["fieldPath"]] if source else expanded(entry["value"], variables)
        )
    return variables


def container_command(jobset: dict, index: int) -> list[str]:
    """Arguments of a container's process, as Kubernetes makes them."""
    container, variables = pod_of(jobset)["containers"][0], pod_environment(jobset, index)
    return [expanded(word, variables) for word in container["command"] + container["args"]]


def expanded(text: str, variables: dict[str, str]) -> str:
    """$(NAME) is replaced, if the variable exists, and $$ is $ (expansion.go of Kubernetes)."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: variables.get(found[1], found[0]) if found[1] else "$", text)


def test_flags_of_a_cluster_that_no_pod_gets_are_passed_on(make_jobset):
    words = ["--cluster.patience", "600", "--cluster.secret-file", "/data/secret", "--cluster.notices", "gcp"]
    assert " ".join(words) in " ".join(container_command(make_jobset(*GPU, "--", *MOUNTED, *words), 0))


def test_gpu_pods_have_the_flags_of_one_cluster(make_jobset):
    """`bert-jax pretrain` detects each process from the flags of its pod, at the address that JobSet gives pod 0."""
    jobset = make_jobset(*GPU, "--", *MOUNTED, "--phases.0.steps", "7")
    name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": name}
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 4
    for index in range(4):
        program, command, *words = container_command(jobset, index)
        assert (program, command) == ("bert-jax", "pretrain")
        args = cli.parse("pretrain", words)
        info = cluster_detection.detect(args.cluster)
        assert info.coordinator_host == f"{name}-{job['name']}-0-0.{name}" and (
            info.process_index,
            info.process_count,
        ) == (index, 4)
        assert str(args.workdir) == "/data/runs/first" and args.config.phases[0].steps == 7
    resources = pod_of(jobset)["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": 96, "memory": "800Gi", "nvidia.com/gpu": 8}
    alone = make_jobset(*without(GPU, "--hosts"), "--hosts", "1", "--", *MOUNTED)
    assert container_command(alone, 0) == ["bert-jax", "pretrain", *MOUNTED], "one host has no cluster flags"


@pytest.mark.parametrize(
    "accelerator, topology, words, hosts, chips",
    [
        ("tpu-v6e-slice", "16x16", (), 64, 4),
        ("tpu-v6e-slice", "1x1", (), 1, 1),
        ("tpu-v6e-slice", "2x4", ("--chips-per-host", "8"), 1, 8),
        ("tpu-v5p-slice", "2x2x4", (), 4, 4),
        ("tpu7x", "2x2x1", (), 1, 4),
        ("tpu7x", "4x4x4", (), 16, 4),
    ],
)
def test_tpu_slices(make_jobset, accelerator, topology, words, hosts, chips):
    slices = ("--accelerator", accelerator, "--topology", topology)
    jobset = make_jobset("tpu", *COMMON, *slices, *words, "--", *BUCKET)
    job, pod = job_of(jobset), pod_of(jobset)
    limits = pod["containers"][0]["resources"]["limits"]
    assert (job["completions"], limits) == (hosts, {"cpu": 96, "memory": "800Gi", "google.com/tpu": chips})
    assert pod["securityContext"]["runAsUser"] == 0 and "securityContext" not in pod["containers"][0]
    assert pod["tolerations"] == [{"key": "google.com/tpu", "operator": "Exists"}]
    assert container_command(jobset, 0) == ["bert-jax", "pretrain", *BUCKET], "hosts are detected"
    labels = {"accelerator": accelerator, "topology": topology}
    assert pod["nodeSelector"] == {f"cloud.google.com/gke-tpu-{name}": value for name, value in labels.items()}
    exclusive = jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert exclusive == "cloud.google.com/gke-nodepool"


@pytest.mark.parametrize(
    "accelerator, topology, slices, hosts", [("tpu-v6e-slice", "2x4", 3, 2), ("tpu7x", "2x2x4", 2, 4)]
)
def test_the_pods_of_several_slices_are_one_cluster(make_jobset, monkeypatch, accelerator, topology, slices, hosts):
    """A dry run: jax itself numbers the processes, from the variables of the manifest and those that GKE sets."""
    shape = ("--accelerator", accelerator, "--topology", topology, "--slices", str(slices))
    jobset = make_jobset("tpu", *COMMON, *shape, "--", *BUCKET)
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    assert (replicated["replicas"], replicated["template"]["spec"]["completions"]) == (slices, hosts)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))
    looked_up: set[str] = set()
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", looked_up.add)
    found = []
    for slice_index in range(slices):
        job = f"{name}-{replicated['name']}-{slice_index}"
        names = ",".join(f"{job}-{index}.{jobset['spec']['network']['subdomain']}" for index in range(hosts))
        for index in range(hosts):
            gke = {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": names}
            with monkeypatch.context() as pod:
                for variable, value in (gke | pod_environment(jobset, index, slice_index)).items():
                    pod.setenv(variable, value)
                _, _, *words = container_command(jobset, index)
                info = cluster_detection.detect(cli.parse("pretrain", words).cluster)
            found.append((info.process_index, info.process_count, info.coordinator_host))
    first = f"{name}-{replicated['name']}-0-0.{name}"
    assert found == [(process, slices * hosts, first) for process in range(slices * hosts)] and looked_up == {first}


def test_one_slice_is_the_default(capsys):
    printed = []
    for words in ((), ("--slices", "1")):
        assert cli.main(["launch", "kubernetes", *TPU, *words, "--", *BUCKET]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "MEGASCALE" not in printed[0] and "replicas: 1\n" in printed[0]


def test_names_of_pods_fit(make_jobset):
    """JobSet's webhook refuses a name whose longest pod's name has more than 63 characters."""
    jobset = make_jobset(*without(TPU, "--name"), "--name", "a" * 40, "--slices", "999", "--", *BUCKET)
    replicated = jobset["spec"]["replicatedJobs"][0]
    most = f"{jobset['metadata']['name']}-{replicated['name']}-{replicated['replicas'] - 1}-999999-abcde"
    assert len(most) == 63


def test_networks_of_the_nodes(make_jobset):
    """Annotations, directories of the nodes and variables, as GKE's machines with RDMA need them."""
    jobset = make_jobset(*GPU, *NETWORKS, "--", *MOUNTED)
    annotations = job_of(jobset)["template"]["metadata"]["annotations"]
    assert json.loads(annotations["networking.gke.io/interfaces"]) == [{"interfaceName": "eth2", "network": "rdma-0"}]
    pod = pod_of(jobset)
    assert pod["securityContext"]["runAsUser"] == 0 and "securityContext" not in pod["containers"][0]
    name_of = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volume = next(volume for volume in pod["volumes"] if volume["name"] == name_of["/usr/local/gib"])
    assert volume["hostPath"] == {"path": "/home/kubernetes/bin/gib", "type": "Directory"}
    variables = pod_environment(jobset, 1)
    assert (variables["NCCL_DEBUG"], variables["EMPTY"]) == ("WARN=$(X)", "")


def test_a_script_sets_variables(make_jobset, tmp_path):
    """The container's command, with a `bert-jax` that prints them. The script sees none of the arguments."""
    script, program = tmp_path / "set $(env).sh", tmp_path / "bert-jax"
    program.write_text('#!/bin/sh\necho "$FOUND $*"\n')
    program.chmod(0o755)
    command = container_command(make_jobset(*GPU, "--env-script", str(script), "--", *MOUNTED), 2)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    missing = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert missing.returncode == 2 and "No such file" in missing.stderr and missing.stdout == ""
    script.write_text('export FOUND="yes $#"\n[[ $FOUND == no ]] # not an error\n')
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["yes", "0", *command[command.index("pretrain") :]]


def test_bugs_and_mistakes_fail_the_jobset_and_other_exits_restart_all_pods(make_jobset):
    jobset = make_jobset(*GPU, "--max-restarts", "9", "--", *MOUNTED)
    job, pod = job_of(jobset), pod_of(jobset)
    (rule,) = job["podFailurePolicy"]["rules"]
    final = {code for code in range(-15, 256) if ProcessFailure(0, code).peer_exit_code != TRY_AGAIN}
    assert set(rule["onExitCodes"]["values"]) == final and rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 9 and policy["restartStrategy"] == "BlockingRecreate"
    (last,) = policy["rules"]
    assert (last["action"], last["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_pod_options(make_jobset):
    words = ("--grace", "60", "--shared-memory", "2Gi", "--node-selector", "pool=a", "--toleration", "spot")
    pod = pod_of(make_jobset(*GPU, *words, "--service-account", "reader", "--", *MOUNTED))
    assert pod["shareProcessNamespace"] and "hostNetwork" not in pod
    assert pod["securityContext"] == {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    assert pod["terminationGracePeriodSeconds"] == 60 and pod["serviceAccountName"] == "reader"
    assert pod["nodeSelector"] == {"pool": "a"}
    assert [taint["key"] for taint in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    volume_of = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[volume_of["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert volumes[volume_of["/data"]]["persistentVolumeClaim"] == {"claimName": "corpora"}


def test_rdma_needs_root_and_locked_memory(make_jobset):
    pod = pod_of(make_jobset(*GPU, "--host-network", "--rdma", "rdma/shared=2", "--", *MOUNTED))
    (container,) = pod["containers"]
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert container["resources"]["requests"]["rdma/shared"] == 2
    assert pod["securityContext"]["runAsUser"] == 0
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


@pytest.mark.parametrize(("path", "on_nodes"), [("/mnt/cache", True), ("/data/cache", False)])
def test_a_cache_survives_restarts(make_jobset, monkeypatch, tmp_path, path, on_nodes):
    """Corpora and compiled programs are in the mount of a claim, or in a directory of the node."""
    pod = pod_of(make_jobset(*GPU, "--cache", path, "--", *BUCKET))
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    mount = next(volume for place, volume in mounts.items() if Path(path).is_relative_to(place))
    assert mount.get("hostPath") == ({"path": path, "type": "DirectoryOrCreate"} if on_nodes else None)
    assert ("runAsUser" in pod["securityContext"]) == on_nodes
    for variable in container["env"][1:]:
        monkeypatch.setenv(variable["name"], variable["value"].replace(path, str(tmp_path)))
    assert LocalCache().path.is_relative_to(tmp_path / "corpora")
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        jax_setup.set_compilation_cache(None)
        assert Path(jax.config.jax_compilation_cache_dir).is_relative_to(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("name", ["$(BERT_JAX_HOST)", "a$$b", "$$(BERT_JAX_HOST)", "$$$(X)$", "$", "é\U0001f600\\\x85"])
def test_texts_of_the_user_are_escaped(make_jobset, name):
    jobset = make_jobset(*GPU, "--cache", f"/disk/{name}", "--", *MOUNTED, "--name", name)
    assert container_command(jobset, 3)[:9][-1] == name
    container = pod_of(jobset)["containers"][0]
    values = [expanded(variable["value"], {"BERT_JAX_HOST": "3"}) for variable in container["env"][1:]]
    assert values == [f"/disk/{name}/corpora", f"/disk/{name}"]
    assert f"/disk/{name}" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize(
    "words, message",
    [
        ((*GPU[1:], "--", *MOUNTED), "needs gpu|tpu"),
        ((*without(GPU, "--image"), "--", *MOUNTED), "needs --image TEXT"),
        ((*without(GPU, "--hosts"), "--", *MOUNTED), "--hosts: gpu needs it"),
        ((*GPU, "--topology", "4x4", "--", *MOUNTED), "--topology: gpu has no such flag"),
        ((*without(GPU, "--hosts"), "--hosts", "0", "--", *MOUNTED), "hosts is 0: it must be a whole number in [1, "),
        ((*without(GPU, "--name"), "--name", "First_run", "--", *MOUNTED), "--name is 'First_run': it must be"),
        ((*without(GPU, "--name"), "--name", "a" * 41, "--", *MOUNTED), "40 at most"),
        ((*GPU, "--claim", "corpora", "--", *MOUNTED), "--claim is 'corpora': it must be a string that is CLAIM:PATH"),
        (
            (*without(GPU, "--memory"), "--memory", "lots", "--", *MOUNTED),
            "--memory is 'lots': it must be a string that is a size",
        ),
        (
            (*GPU, "--rdma", "infiniband", "--", *MOUNTED),
            "--rdma is 'infiniband': it must be a string that is RESOURCE=COUNT",
        ),
        (
            (*GPU, "--cache", "/dev/cache", "--", *MOUNTED),
            "--cache is '/dev/cache': it must be a string",
        ),
        ((*GPU, "--cache", "/data/../x", "--", *MOUNTED), "that is an absolute path on a disk"),
        ((*GPU, "--rdma", "nvidia.com/gpu=1", "--", *MOUNTED), "GPUs are --gpus"),
        ((*GPU, "--", "/home/me/mine.py", *MOUNTED[1:]), "config '/home/me/mine.py': the pods do not have it"),
        ((*GPU, "--node-selector", "pool", "--", *MOUNTED), "that is KEY=VALUE"),
        ((*GPU, "--", *MOUNTED[1:]), "give the config to train"),
        ((*GPU, "--", *without(MOUNTED, "--workdir")), "--workdir is missing"),
        ((*GPU, "--", *MOUNTED, "--corpus=/database/wiki"), "--corpus '/database/wiki': not all pods see it"),
        ((*GPU, "--", *MOUNTED, "--corpus", "/data/../wiki"), "not all pods see it"),
        ((*GPU, "--", *MOUNTED, "--cluster.process=1"), "'--cluster.process' is set for each pod"),
        ((*without(TPU, "--accelerator"), "--accelerator", "v9", "--", *BUCKET), "one of tpu-v4-podslice, "),
        ((*without(TPU, "--topology"), "--topology", "2x2x4", "--", *BUCKET), "has 2 dimensions, as in 4x4"),
        ((*without(TPU, "--topology"), "--topology", "9" * 5000 + "x4", "--", *BUCKET), "that is chips, as in 4x4"),
        ((*GPU, "--rdma", "rdma/shared=" + "1" * 5000, "--", *MOUNTED), "that is RESOURCE=COUNT"),
        ((*GPU, "--env", "A\N{ARABIC-INDIC DIGIT ONE}=b", "--", *MOUNTED), "that is NAME=VALUE"),
        ((*without(TPU, "--topology"), "--topology", "3x3", "--", *BUCKET), "9 chips: not a multiple of 4"),
        ((*TPU, "--slices", "0", "--", *BUCKET), "slices is 0: it must be a whole number in [1, 999]"),
        ((*without(TPU, "--topology"), "--topology", "2x2", "--slices", "2", "--", *BUCKET), "2x2 is one host"),
        ((*GPU, "--slices", "2", "--", *MOUNTED), "--slices: gpu has no such flag"),
        (
            (*GPU, "--env", "NCCL_DEBUG", "--", *MOUNTED),
            "--env is 'NCCL_DEBUG': it must be a string that is NAME=VALUE",
        ),
        ((*GPU, "--env", "1A=b", "--", *MOUNTED), "that is NAME=VALUE"),
        ((*TPU, "--env", "MEGASCALE_SLICE_ID=1", "--", *BUCKET), "=INFO, and not one of BERT_JAX_HOST, "),
        ((*GPU, "--env", "XDG_CACHE_HOME=/x", "--", *MOUNTED), "XDG_CACHE_HOME=/x': it must be"),
        ((*GPU, "--annotation", "key", "--", *MOUNTED), "that is KEY=VALUE"),
        ((*GPU, "--host-path", "gib:/gib", "--", *MOUNTED), "that is NODE_PATH:PATH"),
        ((*GPU, "--host-path", "/gib:/data/", "--", *MOUNTED), "'/data' would be mounted twice in a pod"),
        ((*GPU, "--claim", "more:/dev/shm", "--", *MOUNTED), "'/dev/shm' would be mounted twice in a pod"),
        ((*GPU, "--claim", "more:/more:ro", "--", *MOUNTED), "that is CLAIM:PATH"),
        ((*GPU, "--env-script", "env.sh", "--", *MOUNTED), "that is an absolute path"),
        ((*GPU, "--rdma", "google.com/tpu=1", "--", *MOUNTED), "that is RESOURCE=COUNT"),
        ((*GPU, "--claim", "c:/../a", "--", *MOUNTED), "that is CLAIM:PATH"),
        ((*GPU, "--claim", "c d:/a", "--", *MOUNTED), "that is CLAIM:PATH"),
        ((*GPU, "--host-path", "/a:/proc", "--", *MOUNTED), "that is NODE_PATH:PATH"),
        ((*GPU, "--host-path", "/a/..:/b", "--", *MOUNTED), "that is NODE_PATH:PATH"),
        ((*GPU, "--cache", "/a\nb", "--", *MOUNTED), "that is an absolute path on a disk"),
        ((*GPU, "--namespace", "my team", "--", *MOUNTED), "made of lower-case letters"),
        ((*GPU, "--service-account", "A", "--", *MOUNTED), "made of lower-case letters"),
        ((*GPU, "--toleration", "a\n", "--", *MOUNTED), "the key of a taint"),
        ((*GPU, "--annotation", "a\nb=c", "--", *MOUNTED), "that is KEY=VALUE"),
        ((*GPU, "--annotation", "a=\udcff", "--", *MOUNTED), "that is KEY=VALUE"),
        ((*GPU, "--node-selector", "a=b c", "--", *MOUNTED), "that is KEY=VALUE"),
        ((*without(GPU, "--image"), "--image", "a\nb", "--", *MOUNTED), "the name of an image"),
        ((*GPU, "--", *MOUNTED, "--name", "\udcff"), "argument '\\udcff': it is not UTF-8"),
        ((*GPU, "--", *MOUNTED, "--corpus", "/" + "x" * 5000), "xx...: not all pods see it"),
    ],
)
def test_mistakes_get_one_line(capsys, words, message):
    assert cli.main(["launch", "kubernetes", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1 and len(err) < 500
