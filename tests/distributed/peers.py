"""A process of several, without jax: its supervisor, and a child that does what the test says.

Usage: peers.py PROCESS PROCESSES PORT REPORT TIMEOUT CHILD, where CHILD is Python that is run with the names of `HEAD`.
"""

import json
import sys

from bert_jax.distributed import supervisor
from bert_jax.distributed.cluster_detection import Seat
from bert_jax.errors import PeerError, UserError

HEAD = """
import json, os, signal, socket, sys, time
place = json.loads(os.environ["BERT_JAX_WORKER"])
wire = socket.socket(fileno=place["wire"])
me = place["seat"][2]
def leave(code):
    wire.send(b"!")
    sys.exit(code)
"""


supervisor.GRACE_SECONDS = 0.5  # nobody here has anything to say at the end


def main(process: int, processes: int, port: int, report: dict, timeout: float, child: str) -> int:
    seat = Seat("127.0.0.1", port, process, processes, None)
    try:
        return supervisor.supervise([sys.executable, "-c", HEAD + child], seat, report, timeout)
    except UserError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except PeerError as error:
        print(f"gone: {error}", file=sys.stderr)
        return 75


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:4]]
    sys.exit(main(*numbers, json.loads(sys.argv[4]), float(sys.argv[5]), sys.argv[6]))
