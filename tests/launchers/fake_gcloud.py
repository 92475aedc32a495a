"""A fake gcloud: records each command, and simulates each start of the run after a line of a plan.

The directory $FAKE holds `commands` (the recorded commands), `node` and `queue` (states; absent: no such resource),
`no_scp` (the next copy fails), and `plan`, one line for each start of the run: the exit codes of the hosts, then the
new state of the slice, as in `75,75 PREEMPTED`; or `wait`, which Ctrl-C ends (`interrupted`). Of several slices,
`first-0` has `node-0`, `plan-0` and so on.
"""

import os
import sys
import time
from pathlib import Path

FAKE = Path(os.environ["FAKE"])


def state(name: str) -> None:
    path = FAKE / name
    if not path.exists():
        print("ERROR: (gcloud) NOT_FOUND: Resource was not found", file=sys.stderr)
        sys.exit(1)
    print(path.read_text())


def run_on_hosts(suffix: str) -> None:
    plan = FAKE / f"plan{suffix}"
    lines = plan.read_text().splitlines()
    try:
        plan.write_text("\n".join(lines[1:]))
        if lines[0] == "wait":
            time.sleep(30)
    except KeyboardInterrupt:
        (FAKE / f"interrupted{suffix}").touch()
        raise
    codes, _, new_state = lines[0].partition(" ")
    print("update 7 of 9, exit code 1 means a bug")
    for host, code in enumerate(filter(None, codes.split(","))):
        print(f"tpu_worker: host-{host} ended with code {code.replace('!', ' as requested')}")
    if new_state:
        (FAKE / f"node{suffix}").write_text(new_state)
    broken = 1 if new_state or not codes else 0
    sys.exit(next((int(code.strip("!")) for code in codes.split(",") if code.strip("!0")), broken))


def main() -> None:
    words = sys.argv[1:]
    with (FAKE / "commands").open("a") as file:
        file.write(" ".join(words) + "\n")
    kind, verb, name = words[2:5]
    suffix = (words[5] if verb == "scp" else name).partition(":")[0].removeprefix("first")
    assert words[:2] == ["compute", "tpus"], words
    if verb == "describe":
        state({"tpu-vm": f"node{suffix}", "queued-resources": "queue"}[kind])
    elif verb == "create":
        assert not (FAKE / "queue").exists(), "ALREADY_EXISTS"
        (FAKE / "queue").write_text("ACTIVE")
        count = next((int(word.partition("=")[2]) for word in words if word.startswith("--node-count=")), 0)
        for node in [f"node-{index}" for index in range(count)] or ["node"]:
            (FAKE / node).write_text("READY")
    elif verb == "delete":
        for path in (FAKE / "queue", *FAKE.glob("node*")):
            path.unlink(missing_ok=True)
    elif verb == "scp" and (FAKE / "no_scp").exists():
        (FAKE / "no_scp").unlink()
        sys.exit("ERROR: (gcloud) no route to the host")
    elif verb == "ssh":
        assert (FAKE / f"node{suffix}").read_text() == "READY"
        if any("tpu_worker.sh run" in word for word in words):
            run_on_hosts(suffix)


main()
