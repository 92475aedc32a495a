"""One of several processes, without jax: its supervisor, and a child that runs code from the test.

Usage: peers.py INDEX COUNT PORT REPORT TIMEOUT CHILD, where CHILD is Python code that follows `PREAMBLE`.
"""

import json
import socket
import sys

from bert_jax.distributed import monitor, supervisor
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.errors import PeerError, UserError

PREAMBLE = """
import json, os, signal, socket, sys, time
settings = json.loads(os.environ["BERT_JAX_WORKER"])
link = socket.socket(fileno=settings["descriptor"])
process_index = settings["info"][2]
def announce_exit(code):
    link.send(b"!")
    sys.exit(code)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(index: int, count: int, port: int, report: dict, timeout: float, child: str) -> int:
    info = ProcessInfo("127.0.0.1", port, index, count, None)
    monitor.GRACE_SECONDS = 0.5  # these children print nothing at the end
    try:
        return supervisor.supervise([sys.executable, "-c", PREAMBLE + child], info, report, timeout)
    except UserError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except PeerError as error:
        print(f"peer: {error}", file=sys.stderr)
        return 75


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:4]]
    sys.exit(main(*numbers, json.loads(sys.argv[4]), float(sys.argv[5]), sys.argv[6]))
