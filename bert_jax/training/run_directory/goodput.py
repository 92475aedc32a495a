"""Where the time of a run went: what was training, and what was everything else.

``goodput.jsonl`` has a line for every save and every line of metrics: seconds since this process, or this attempt
after going back, began, by kind. The last line of each attempt counts.
"""

import contextlib
import time
from collections.abc import Iterator

from bert_jax.distributed.agreement import is_first
from bert_jax.storage import StoredPath
from bert_jax.training.run_directory.json_lines import JsonLines, cut_back, is_number, read_lines

FILE = "goodput.jsonl"
KINDS = ("init", "compile", "data_wait", "evaluation", "checkpoint")
"""What can be told apart while it happens. What is left of the time is `step`."""


class Goodput:
    """The clock of one attempt to train."""

    def __init__(self, workdir: StoredPath, begun: float):
        """Starts at once; lines that cannot be read are removed.

        Args:
          workdir: of the run.
          begun: `time.time()` when the process, or the attempt, began; what was since then is `init`.
        """
        self.begun, self._file = begun, None
        if is_first():
            cut_back(workdir / FILE, _is_line)
            self._file = JsonLines(workdir / FILE, durable=False)
        self.seconds = dict.fromkeys(KINDS, 0.0)

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Time in here is of this kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start

    def ready(self, step: int) -> None:
        """The update behind `step` updates can be prepared: all until now was `init`."""
        self.seconds["init"] += time.time() - self.begun - sum(self.seconds.values())
        self.record(step)

    def record(self, step: int) -> None:
        """Add a line, at `step` updates; of several processes the first does."""
        if self._file is None:
            return
        elapsed = time.time() - self.begun
        kinds = self.seconds | {"step": elapsed - sum(self.seconds.values())}
        line = {"begun": self.begun, "update": step, "seconds": {k: round(v, 3) for k, v in kinds.items()}}
        self._file.add(line)

    def close(self) -> None:
        """All lines are in the file when this returns."""
        if self._file is not None:
            self._file.close()


def _is_line(line: dict) -> bool:
    seconds = line.get("seconds")
    if not isinstance(seconds, dict) or not {*KINDS, "step"} <= seconds.keys():
        return False
    return all(map(is_number, (line.get("begun"), line.get("update"), *seconds.values())))


def summary(workdir: StoredPath) -> dict[str, float]:
    """Seconds of the run by kind, over all attempts.

    Returns:
      `KINDS`; `step`, for updates that are part of the result; `lost`, for updates that were done again later;
      `down`, between attempts; `wall`, from the first to the last moment; and `goodput`, step / wall.
    """
    attempts: dict[float, list[dict]] = {}
    for entry in read_lines(workdir / FILE, _is_line):
        attempts.setdefault(entry["begun"], []).append(entry)
    ordered = [attempts[begun] for begun in sorted(attempts)]
    total = dict.fromkeys((*KINDS, "step", "lost", "down"), 0.0)
    for i, lines in enumerate(ordered):
        last = lines[-1]["seconds"]
        for kind in (*KINDS, "step"):
            total[kind] += last[kind]
        if later := ordered[i + 1 :]:
            redone_from = min(attempt[0]["update"] for attempt in later)
            kept = [line["seconds"]["step"] for line in lines if line["update"] <= redone_from]
            lost = last["step"] - max(kept, default=0.0)
            total["step"], total["lost"] = total["step"] - lost, total["lost"] + lost
            total["down"] += max(0.0, later[0][0]["begun"] - lines[0]["begun"] - sum(last.values()))
    wall = sum(total.values())
    return total | {"wall": wall, "goodput": total["step"] / wall if wall else 0.0}


def describe(seconds: dict[str, float]) -> str:
    """One line for a person: the goodput, and where the rest of the time went."""
    wall = seconds["wall"]
    shares = [f"{name.replace('_', ' ')} {seconds[name] / max(wall, 1e-9):.1%}" for name in (*KINDS, "lost", "down")]
    return f"goodput {seconds['goodput']:.1%} of {wall:,.0f} s: {', '.join(shares)}"
