"""Names the processes that the others wait for.

The devices of a run end a step together, so all processes have the same time per step. They differ in what they do in
it: a slow process is busy with its rows, its files or other programs of its host, or is suspended, and the others wait
for their devices meanwhile. With each line of metrics, every process writes into jax's key-value store for which share
of the time it did not wait, and process 0 reads the shares of the line before. No process waits for another one. A
device that is slow while its host keeps pace looks the same to all hosts and is not found.
"""

import json
import socket
import statistics
from collections.abc import Sequence
from typing import TypedDict

import jax

from bert_jax.distributed import jax_internals
from bert_jax.training.run_directory.goodput import SlowProcess

SLOW, SLOW_SECONDS = 0.1, 0.2
"""A process is slow if its share is this much above the median of the others, and they waited this long for it: a line
of few and short steps says little."""
KEY = "bert_jax/host_shares"


class HostShare(TypedDict):
    """What a process writes into the store with a line of metrics."""

    process: int
    host: str
    step: int
    share: float
    """of the time since the line before, in which the process did not wait for its devices"""
    seconds: float
    """since the line before"""


def find_slow(shares: Sequence[HostShare]) -> list[SlowProcess]:
    """The slow ones, the slowest first; one process alone is not slow."""
    slow = []
    for one in shares if len(shares) > 1 else []:
        others = statistics.median(other["share"] for other in shares if other is not one)
        above = one["share"] - others
        if above > SLOW and above * one["seconds"] > SLOW_SECONDS:
            slow.append(SlowProcess(process=one["process"], host=one["host"], share=one["share"], others=others))
    return sorted(slow, key=lambda one: -one["share"])


class HostShares:
    """The shares of all processes of an attempt."""

    def __init__(self) -> None:
        self._lines: list[HostShare] = []  # of this process, the last two
        self._host = socket.gethostname()
        self._client = jax_internals.key_value_store() if jax.process_count() > 1 else None

    def exchange(self, step: int, share: float, seconds: float) -> list[SlowProcess]:
        """Write this process's share of a line; returns, in process 0, who was slow in the time of the line before.

        Args:
          step: of the line; all processes have the same lines.
          share, seconds: see `HostShare`.
        """
        if self._client is None:
            return []
        process, before = jax.process_index(), self._lines[-1:]
        found = self._client.key_value_dir_get(KEY) if process == 0 and before else []
        share, seconds = round(share, 4), round(seconds, 3)
        own = HostShare(process=process, host=self._host, step=step, share=share, seconds=seconds)
        self._lines = [*before, own]  # two, since the processes are up to one line apart
        self._client.key_value_set(f"{KEY}/{process}", json.dumps(self._lines), allow_overwrite=True)
        lines = [one for _, text in found for one in json.loads(text)]
        return find_slow([one for one in lines if one["step"] == before[0]["step"]])


def in_words(slow: SlowProcess) -> str:
    """Who is slow, and by how much."""
    return (
        f"process {slow['process']} ({slow['host']}) is slow: it was busy or suspended for {slow['share']:.0%} of the "
        f"time, the others for {slow['others']:.0%}"
    )
