"""tpu_pod.sh with a fake gcloud that simulates preemptions and exit codes, and tpu_worker.sh."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAUNCHERS = HERE.parents[1] / "bert_jax" / "launchers"
SCRIPT, WORKER = LAUNCHERS / "tpu_pod.sh", LAUNCHERS / "tpu_worker.sh"
SLICE = ["--name", "first", "--zone", "europe-west4-b", "--type", "v6e-16", "--poll", "0"]
TRAIN = ["bert_base", "--corpus", "gs://here/wiki", "--workdir", "gs://here/runs/first run"]
PLAIN_PATH = "/usr/bin:/bin"


def pod(*words: str, path: str, **environment: str) -> subprocess.CompletedProcess:
    settings = {"PATH": path, "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=settings, timeout=60)


def without_gcloud(directory: Path) -> str:
    """A PATH with only the required tools; /usr/bin may contain gcloud too."""
    directory.mkdir()
    for tool in ("bash", "dirname", "mktemp", "rm"):
        (directory / tool).symlink_to(f"/usr/bin/{tool}")
    return str(directory)


@pytest.fixture
def cloud(tmp_path):
    """Runs tpu_pod.sh with a fake gcloud (fake_gcloud.py)."""

    class Cloud:
        def run(self, *plan: str, words=("run", *SLICE, "--", *TRAIN), **plans) -> subprocess.CompletedProcess:
            for suffix, lines in {"": plan, **plans}.items():
                (tmp_path / f"plan{suffix}").write_text("\n".join(lines))
            (tmp_path / "commands").write_text("")
            return pod(*words, path=f"{tmp_path}:{PLAIN_PATH}", FAKE=str(tmp_path), TMPDIR=str(tmp_path))

        def actions(self) -> list[str]:
            """Actions on the slice, without queries of its state."""
            found = []
            for line in (tmp_path / "commands").read_text().splitlines():
                verb = line.split()[3]
                if verb == "ssh":
                    verb = line.split("tpu_worker.sh ")[1].split()[0]
                if verb != "describe":
                    found.append(verb)
            return found

        def set_states(self, node: str | None, queue: str | None, slices: int = 1) -> None:
            nodes = ["node"] if slices == 1 else [f"node-{index}" for index in range(slices)]
            for name, state in (("queue", queue), *((name, node) for name in nodes)):
                (tmp_path / name).unlink(missing_ok=True)
                if state is not None:
                    (tmp_path / name).write_text(state)

    fake = tmp_path / "gcloud"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S {HERE / "fake_gcloud.py"} "$@"\n')
    fake.chmod(0o755)
    return Cloud()


NEW = ["create", "scp", "setup"]


READY = ("READY", "ACTIVE")
SCENARIOS = [
    # Plan of fake_gcloud.py; states of the slice and of its request before; further words; exit code, actions, stderr.
    (["0,0"], (None, None), [], 0, [*NEW, "run"], ""),
    # A preempted slice is created again; on the same slice a saved run and a broken connection continue.
    (["75 PREEMPTED", " PREEMPTED", "0"], (None, None), [], 0, [*NEW, "run", *["delete", *NEW, "run"] * 2], "is lost"),
    (["75,75", "", "0,255", "0,0"], READY, [], 0, ["run"] * 4, "restart 3 of at most 100"),
    (["0"], (None, "FAILED"), [], 0, ["delete", *NEW, "run"], ""),
    # Restarts are bounded; mistakes, bugs and `stop` end the launcher.
    (["75,75"] * 9, READY, ["--max-restarts", "2"], 75, ["run"] * 3, "after 2 restarts, the maximum"),
    (["75,75", "2,75"], READY, [], 2, ["run"] * 2, "a mistake"),  # too many starts without a checkpoint
    (["75,1", "0,0"], READY, [], 1, ["run"], "a bug"),
    (["2,75", "0,0"], READY, [], 2, ["run"], "a mistake"),
    (["1,2", "0,0"], READY, [], 2, ["run"], "a mistake"),
    (["75!,75!", "0,0"], READY, [], 75, ["run"], "as requested"),
    (["127"], READY, [], 2, ["run"], "tpu_pod.sh setup"),
]


@pytest.mark.parametrize(("plan", "states", "words", "code", "actions", "message"), SCENARIOS)
def test_runs(cloud, plan, states, words, code, actions, message):
    cloud.set_states(*states)
    done = cloud.run(*plan, words=("run", *SLICE, *words, "--", *TRAIN))
    assert (done.returncode, cloud.actions()) == (code, actions) and message in done.stderr, done.stderr


ALL = ["scp", "scp", "setup", "setup"]
SLICES = [
    # Plans of the two slices; their state before; exit code, actions, stderr.
    (["0,0"], ["0,0"], (None, None), 0, ["create", *ALL, "run", "run"], ""),
    # One slice is preempted: both are requested again.
    (
        ["75,75", "0,0"],
        [" PREEMPTED", "0,0"],
        READY,
        0,
        ["run", "run", "delete", "create", *ALL, "run", "run"],
        "first-1",
    ),
    # Cloud TPU has replaced one slice, which is not set up yet.
    (["75,75", "0,0"], ["127", "0,0"], READY, 0, ["run", "run", *ALL, "run", "run"], "restart 1"),
    (["75,75", "0,0"], ["75,2", "0,0"], READY, 2, ["run", "run"], "a mistake"),
]


@pytest.mark.parametrize(("first", "second", "states", "code", "actions", "message"), SLICES)
def test_several_slices(cloud, first, second, states, code, actions, message):
    cloud.set_states(*states, slices=2)
    words = ("run", *SLICE, "--slices", "2", "--", *TRAIN)
    done = cloud.run(words=words, **{"-0": first, "-1": second})
    assert (done.returncode, cloud.actions()) == (code, actions) and message in done.stderr, done.stderr


def test_the_archive_is_in_a_directory_of_its_own(cloud, tmp_path):
    """Not under a name in /tmp that another user can take before."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (tmp_path / "bert_jax-first.tar.gz").symlink_to(secret)
    cloud.set_states("READY", "ACTIVE")
    assert cloud.run("0", words=("setup", *SLICE[:4])).returncode == 0
    assert secret.read_text() == "mine" and "bert_jax-first" not in (tmp_path / "commands").read_text()


def test_a_waiting_request_is_kept(cloud):
    cloud.set_states("CREATING", "PROVISIONING")
    waiting = cloud.run("0", words=("run", *SLICE, "--max-restarts", "0", "--dry-run", "--", *TRAIN))
    assert waiting.returncode == 0 and cloud.actions() == []


def test_a_failed_set_up_is_a_mistake_at_first_and_retried_later(cloud, tmp_path):
    (tmp_path / "no_scp").touch()
    done = cloud.run("0")
    assert done.returncode == 2 and "no route" in done.stderr and cloud.actions() == ["create", "scp"]
    (tmp_path / "no_scp").touch()
    cloud.set_states(*READY)
    assert cloud.run("75 PREEMPTED", "0").returncode == 0
    assert cloud.actions() == ["run", "delete", "create", "scp", "scp", "setup", "run"]


@pytest.mark.parametrize(("slices", "plans"), [(1, ["plan"]), (2, ["plan-0", "plan-1"])])
def test_ctrl_c_does_not_stop_the_run(cloud, tmp_path, slices, plans):
    """It ends the connections to all slices, not the commands on the hosts."""
    cloud.set_states(*READY, slices)
    for plan in plans:
        (tmp_path / plan).write_text("wait")
    settings = {"PATH": f"{tmp_path}:{PLAIN_PATH}", "FAKE": str(tmp_path)}
    command = ["bash", SCRIPT, "run", *SLICE, "--slices", str(slices), "--", *TRAIN]
    launcher = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while any((tmp_path / plan).read_text() for plan in plans):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(launcher.pid, signal.SIGINT)
    stderr = launcher.communicate(timeout=20)[1]
    assert launcher.returncode == 130 and stderr.rstrip().endswith("stop ends it")
    assert cloud.actions() == ["run"] * slices
    while len(list(tmp_path.glob("interrupted*"))) < slices:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("verb", "slices", "times"), [("stop", 1, 1), ("logs", 1, 1), ("delete", 1, 1), ("stop", 3, 3), ("logs", 2, 1)]
)
def test_verbs(cloud, verb, slices, times):
    cloud.set_states(*READY, slices)
    done = cloud.run(words=(verb, "--name", "first", "--zone", "europe-west4-b", "--slices", str(slices)))
    assert done.returncode == 0 and cloud.actions() == [verb] * times, done.stderr


def test_a_dry_run_of_several_slices(cloud, tmp_path):
    """The commands that gcloud gets in a run, for each slice; those of one step in any order."""
    words = ("run", *SLICE, "--slices", "2")
    dry = pod(*words, "--dry-run", "--", *TRAIN, path=PLAIN_PATH, TMPDIR=str(tmp_path))
    printed = [shlex.split(line)[1:] for line in dry.stdout.splitlines() if line.startswith("gcloud")]
    assert "--node-count=2" in printed[2] and "--node-prefix=first" in printed[2]
    assert [line[4] for line in printed[-4:]] == ["first-0", "first-1"] * 2
    assert cloud.run(words=(*words, "--", *TRAIN), **{"-0": ["0,0"], "-1": ["0,0"]}).returncode == 0
    given = (tmp_path / "commands").read_text().splitlines()
    own_directory = re.compile(r"/tmp\.\w+/")
    lines = [sorted(own_directory.sub("/", line) for line in part) for part in (given, map(" ".join, printed))]
    assert lines[0] == lines[1]


def test_a_dry_run_prints_the_commands_of_a_run(cloud, tmp_path):
    """Without gcloud; the same arguments that gcloud gets in a run."""
    words = ("run", *SLICE, "--spot", "--project", "mine")
    dry = pod(*words, "--dry-run", "--", *TRAIN, path=without_gcloud(tmp_path / "tools"), TMPDIR=str(tmp_path))
    assert dry.returncode == 0 and dry.stderr == ""
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    assert [line[0] for line in printed] == ["gcloud"] * 4 + ["tar"] + ["gcloud"] * 3
    assert cloud.run("0,0", words=(*words, "--", *TRAIN)).returncode == 0
    given = (tmp_path / "commands").read_text().splitlines()
    expected = [" ".join(line[1:]) for line in printed if line[0] == "gcloud"]
    own_directory = re.compile(r"/tmp\.\w+/")  # another one in each call
    assert [own_directory.sub("/", line) for line in given] == [own_directory.sub("/", line) for line in expected]
    assert "--spot" in given[2].split() and "--runtime-version=v2-alpha-tpuv6e" in given[2].split()
    assert all("--project=mine" in line for line in given)
    on_host = printed[-1][-1].removeprefix("--command=")
    assert shlex.split(on_host) == ["bash", "bert_jax/tpu_worker.sh", "run", *TRAIN]


@pytest.mark.parametrize("name", ["v2-8", "v3-2048", "v4-24", "v5litepod-256", "v5p-12288", "v6e-1", "v6e-256"])
def test_types_that_exist(name):
    words = ("create", *SLICE, "--type", name, "--dry-run")
    assert f"--accelerator-type={name} " in pod(*words, path=PLAIN_PATH).stdout


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give create, setup, run"),
        (("fly", *SLICE), "not fly"),
        (("create", "--name", "n", "--type", "v6e-8"), "--zone is missing"),
        (("create", "--name", "n", "--zone", "z"), "--type is missing"),
        (("create", "--name"), "--name needs a value"),
        (("create", "--name", "N_1", "--zone", "z"), "--name N_1"),
        (("create", *SLICE, "--type", "v6e-17"), "v6e comes in the sizes 1 4 8"),
        (("create", *SLICE, "--type", "v5p-12"), "multiples of 8"),
        (("create", *SLICE, "--type", "h100-8"), "--type h100-8 is unknown"),
        (("create", *SLICE, "--poll", "soon"), "--poll soon"),
        (("create", *SLICE, "--max-restarts", "08"), "--max-restarts 08: it must be a number up to"),
        (("create", *SLICE, "--max-restarts", "9" * 20), "it must be a number up to 999999999"),
        (("create", *SLICE, "--slices", "0"), "--slices 0: it must be a number from 1 to 999"),
        (("create", *SLICE, "--type", "v3-32", "--slices", "2"), "--slices 2: v3-32 cannot be joined"),
        (("create", *SLICE, "--speed", "9"), "there is no option --speed"),
        (("delete", *SLICE, "--", "bert_base"), "are for run"),
        (("run", *SLICE), "give the config to train"),
        (("run", *SLICE, "--", *TRAIN[:3]), "--workdir is missing"),
        (("run", *SLICE, "--", *TRAIN, "--corpus=/data/wiki"), "--corpus /data/wiki: give a path in a bucket"),
        (("run", *SLICE, "--", "bert_bse", *TRAIN[1:]), "config bert_bse: "),
        (("run", *SLICE, "--", "mine.py", *TRAIN[1:]), "/configs, and give configs/mine.py"),
        (("run", *SLICE, "--", "configs/../mine.py", *TRAIN[1:]), "the hosts do not have it"),
        (("run", *SLICE, "--", "configs/none.py", *TRAIN[1:]), "has no file configs/none.py"),
        (("create", *SLICE), "gcloud is not on PATH"),
        (("setup", *SLICE, "--clone", "/nowhere"), "/nowhere has no LICENSE: give --clone"),
    ],
)
def test_mistakes_get_one_line(words, message, tmp_path):
    done = pod(*words, path=without_gcloud(tmp_path / "tools"))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- on a host

TRAINER = """#!/usr/bin/env bash
echo "training with: $*"
[[ ! -f $2 ]] || echo "$2 is found"
sleep 4 >/dev/null 2>&1 & # a child that outlives it
trap 'echo saved; exit 75' TERM
while [[ ! -e $HOME/end ]]; do sleep 0.05; done
exit "$(<"$HOME/end")"
"""


@pytest.fixture
def host(tmp_path):
    """A host with a fake `bert-jax` that runs until the file `end` holds its exit code."""
    worker = tmp_path / "bert_jax" / WORKER.name
    trainer = tmp_path / "bert_jax" / ".venv" / "bin" / "bert-jax"
    for path, text in ((worker, WORKER.read_text()), (trainer, TRAINER)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    class Host:
        started: list[subprocess.Popen] = []  # noqa: RUF012
        log = tmp_path / "bert_jax_run" / "log"

        def start(self, *words: str, path: str = PLAIN_PATH) -> subprocess.Popen:
            environment = {"PATH": path, "HOME": str(tmp_path)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.started.append(
                subprocess.Popen(["bash", worker, *words], env=environment, start_new_session=True, **pipes)
            )
            return self.started[-1]

        def end(self, code: int) -> None:
            (tmp_path / "end").write_text(str(code))

        def wait_for_training(self) -> None:
            deadline = time.monotonic() + 60
            while not (self.log.exists() and "training" in self.log.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    fake_host = Host()
    yield fake_host
    fake_host.end(0)
    for process in fake_host.started:
        process.kill()
        process.communicate()


def test_a_run_survives_its_connection_and_is_followed_again(host):
    first = host.start("run", "bert_base", "--corpus", "a b")
    host.wait_for_training()
    os.killpg(first.pid, signal.SIGKILL)  # all processes of the connection
    again = host.start("run", "bert_base")
    assert "is followed" in again.stdout.readline()
    refused = host.start("setup")
    assert refused.wait(20) == 2 and "stop it first" in refused.stdout.read()
    host.end(1)
    output, _ = again.communicate(timeout=20)
    assert again.returncode == 1 and output.rstrip().endswith("ended with code 1")
    assert host.log.read_text().count("training with: pretrain bert_base --corpus a b") == 1
    assert "training with: pretrain bert_base\n" not in host.log.read_text()


def test_a_config_of_the_clone_is_found(host, tmp_path):
    """The launcher accepts it, and a host has it in the directory in which it runs the command."""
    clone = tmp_path / "bert_jax"
    (clone / "configs").mkdir(parents=True)
    for name in ("LICENSE", "README.md", "setup.cfg", "setup.py", "constraints", "bert_jax", "data_prep"):
        (clone / name).touch()
    (clone / "configs" / "mine.py").touch()
    words = ("run", *SLICE, "--dry-run", "--clone", str(clone), "--", "configs/mine.py", *TRAIN[1:])
    accepted = pod(*words, path=PLAIN_PATH, TMPDIR=str(tmp_path))
    assert accepted.returncode == 0 and " configs " in accepted.stdout, accepted.stderr
    host.end(0)
    output, _ = host.start("run", "configs/mine.py").communicate(timeout=20)
    assert "configs/mine.py is found" in output


def test_a_host_that_is_not_set_up_says_so_by_its_code(host, tmp_path):
    (tmp_path / "bert_jax/.venv/bin/bert-jax").unlink()
    run = host.start("run", *TRAIN)
    assert run.wait(20) == 127 and "is not set up: bash tpu_pod.sh setup" in run.stdout.read()


def test_a_host_is_set_up_with_the_pinned_versions(host, tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$PWD: $*"\n')
    python.chmod(0o755)
    output, _ = host.start("setup", path=f"{tmp_path}:{PLAIN_PATH}").communicate(timeout=20)
    *_, install, end = output.splitlines()
    words = install.split()
    assert words[0] == f"{tmp_path / 'bert_jax'}:" and words[-1] == ".[tpu,gcs]" and end.endswith("is set up")
    assert words[words.index("--constraint") + 1] == "constraints/tpu-py312.txt"


def test_stop_saves_and_reports_that_it_was_requested(host):
    assert host.start("stop").wait(20) == 2, "there is no run yet"
    running = host.start("run", "bert_base")
    host.wait_for_training()
    assert host.start("stop").wait(20) == 0
    output, _ = running.communicate(timeout=20)
    assert running.returncode == 75 and "saved\n" in output
    assert output.rstrip().endswith("ended with code 75 as requested")


def test_a_later_run_shows_only_its_own_lines(host):
    host.end(0)
    for words in (("run", "first"), ("run", "second")):
        output, _ = host.start(*words).communicate(timeout=20)
    assert "pretrain second" in output and "pretrain first" not in output and "ended with code 0" in output
