"""Process index and count, from flags and from the environment variables of launchers."""

import os

import pytest
from jax._src.clusters import cloud_tpu_cluster

from bert_jax.distributed import cluster_detection
from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo, detect
from bert_jax.distributed.process_report import make_report
from bert_jax.errors import UserError

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[3-4],other1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI_5 = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Removes the variables of the machine that the tests run on; returns a function that sets others."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "KUBERNETES_", "CUDA_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


def place(config: ClusterConfig) -> ProcessInfo:
    """What is detected, without the secret."""
    return detect(config)._replace(secret="")


def test_secrets(environment, tmp_path):
    """The same in all processes of a job; another one in another job, and with another file."""
    file, secrets = tmp_path / "secret", []
    for job in ({}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}):
        environment(job)
        for content in (None, "a", "b"):
            flags = {"coordinator": "h:1", "processes": 2, "secret_file": content and str(file)}
            file.write_text(content or "")
            first, second = (detect(ClusterConfig(process=process, **flags)).secret for process in (0, 1))
            assert first == second
            secrets.append(first)
    assert len(set(secrets)) == len(secrets)
    with pytest.raises(UserError, match=r"--cluster.secret-file .* cannot be read"):
        detect(ClusterConfig(coordinator="h:1", processes=2, process=0, secret_file=str(tmp_path)))


def test_one_process():
    assert detect(ClusterConfig()) is None


def test_flags():
    config = ClusterConfig(coordinator="host:123", processes=4, process=2)
    assert place(config) == ProcessInfo("host", 123, 2, 4, None)
    assert place(ClusterConfig(coordinator="[::1]:123", processes=4, process=2)) == ProcessInfo("::1", 123, 2, 4, None)


def test_slurm(environment):
    environment(SLURM)
    assert place(ClusterConfig()) == ProcessInfo("node3", 61440 + 7, 3, 6, [1])


def test_flags_overrule_the_environment(environment):
    environment(SLURM)
    assert detect(ClusterConfig(processes=1)) is None
    config = ClusterConfig(coordinator="host:123", processes=2, process=0)
    assert place(config) == ProcessInfo("host", 123, 0, 2, None)


def test_the_only_task_of_a_node_has_all_devices(environment):
    environment(SLURM | {"SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"})
    assert detect(ClusterConfig()).local_device_ids is None


def test_a_task_that_sees_only_its_own_device_uses_it(environment):
    environment(SLURM | {"CUDA_VISIBLE_DEVICES": "5"})
    assert detect(ClusterConfig()).local_device_ids is None


def test_one_task_of_slurm_is_one_process(environment):
    environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
    assert detect(ClusterConfig()) is None


def test_open_mpi_5_needs_an_address(environment):
    environment(OPEN_MPI_5)
    with pytest.raises(UserError, match=r"add --cluster\.coordinator HOST:PORT"):
        detect(ClusterConfig())
    assert place(ClusterConfig(coordinator="host:123")) == ProcessInfo("host", 123, 2, 4, None)


@pytest.mark.parametrize("slices", [1, 3])
def test_hosts_of_cloud_tpu_slices(monkeypatch, slices):
    """TPU VMs of a queued resource, numbered by jax from the metadata of their slice."""
    monkeypatch.setattr(cluster_detection, "_maybe_distributed", lambda: True)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", str)
    found = []
    for slice_index in range(slices):
        joined = {"COORDINATOR_ADDRESS": "10.0.0.0:8080", "NUM_SLICES": slices, "SLICE_ID": slice_index}
        lines = [f"MEGASCALE_{name}: '{value}'" for name, value in joined.items()] if slices > 1 else []
        addresses = ",".join(f"unknown:unknown:10.0.{slice_index}.{host}" for host in range(2))
        for host in range(2):
            metadata = {"agent-worker-number": str(host), "worker-network-endpoints": addresses}
            metadata["tpu-env"] = "\n".join(["ZONE: 'z'", *lines])
            monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key, values=metadata: (values[key], 200))
            found.append(place(ClusterConfig()))
    count = 2 * slices
    assert found == [ProcessInfo("10.0.0.0", 8482, process, count, None) for process in range(count)]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"processes": 2, "process": 0}, r"need --cluster\.coordinator"),
        ({"process": 0}, r"need --cluster\.coordinator"),
        ({"coordinator": "host:1"}, r"needs --cluster\.processes"),
        ({"coordinator": "host"}, "write HOST:PORT"),
        ({"coordinator": "host:99999"}, "write HOST:PORT"),
        ({"processes": 0}, "a whole number in"),
        ({"processes": 2, "process": 2}, "from 0 to 1"),
        ({"timeout": 0}, r"cluster\.timeout is 0"),
        ({"patience": 0}, r"cluster\.patience is 0"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        detect(ClusterConfig(**fields))


def test_variables_that_change_compiled_programs_are_compared(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    report = make_report({"corpus": ("a",), "optimizer": {"beta1": 0.9}})
    assert {"XLA_FLAGS", "JAX_ENABLE_X64"} <= report["environment"].keys()
    assert "JAX_LOCAL_DEVICE_IDS" not in report["environment"]
    assert report["config"] == {"corpus": "('a',)", "optimizer.beta1": "0.9"}
