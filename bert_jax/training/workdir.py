"""A run's directory: what belongs to it, and whether it is this run's."""

import contextlib
import hashlib
import json
from typing import Any

from etils import epath

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.data.corpus import MANIFEST
from bert_jax.data.mixture import CYCLE, rounded
from bert_jax.data.plan import STREAM_VERSION
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, make_directory, reach, write_whole

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
LEDGER = "ledger.jsonl"


def claim(
    workdir: StoredPath, config: Config, mixture: dict[str, float], corpus_paths: list[str], tokenizer_text: str
) -> None:
    """Make `workdir` this run's, or see that it already is; nothing of another run is touched.

    Args:
      workdir: made if it does not exist.
      config: of the run.
      mixture: `Corpus.identity` of each corpus and its share of the rows; positive, summing to 1.
      corpus_paths: where they lie, in any order. They may lie elsewhere when the run is continued.
      tokenizer_text: tokenizer.json, kept beside the checkpoints so that they can be used without the corpus.

    Raises:
      UserError: the directory holds a different run, or files that are no run's, or cannot be written or reached.
    """
    reach(workdir)
    identities = sorted(mixture)
    counts = rounded([mixture[identity] for identity in identities]).tolist()
    described = {
        "stream_version": STREAM_VERSION,
        "fingerprint": config_lib.fingerprint(config),
        # As the stream uses them: whole rows of a cycle.
        "corpora": {identity: count / CYCLE for identity, count in zip(identities, counts, strict=True)},
    }
    path = workdir / CONFIG
    if path.exists():
        _refuse_other_run(workdir, config, described, corpus_paths)
        return
    # What a kill left of an earlier call of this function is not somebody's.
    ours = {TOKENIZER, LEDGER}
    started = tuple(f"{name}." for name in (*ours, CONFIG))
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"work directory {workdir} is a file: choose another --workdir")
    names = {entry.name for entry in workdir.iterdir()} if workdir.exists() else set()
    halves = {name for name in names if name.startswith(started) and name.endswith(".partial")}
    if names - ours - halves:
        raise UserError(f"work directory {workdir} holds files, but no run of bert_jax: choose another --workdir")
    try:
        make_directory(workdir)
        for name in halves:
            (workdir / name).unlink()
        write_whole(workdir / TOKENIZER, tokenizer_text.encode())
        write_whole(workdir / LEDGER, b"")  # a run without config.json has decided nothing
        settings = {"corpus_paths": sorted(corpus_paths), "config": config_lib.to_dict(config)}
        write_whole(path, json.dumps(described | settings, indent=1).encode())
    except OSError as error:
        raise UserError(f"cannot write to work directory {workdir}: {error.strerror or error}") from error


def _refuse_other_run(workdir: StoredPath, config: Config, described: dict[str, Any], paths: list[str]) -> None:
    there = read(workdir)
    advice = "choose another --workdir, or the settings it was started with"
    if there["fingerprint"] != described["fingerprint"]:
        before = config_lib.from_dict(there["config"])
        old, new = (config_lib.flatten(config_lib.decisive(c)) for c in (before, config))
        changed = [f"{k} {old.get(k)} -> {new.get(k)}" for k in sorted(old | new) if old.get(k) != new.get(k)]
        raise UserError(f"work directory {workdir} holds a different run ({'; '.join(changed[:4])}): {advice}")
    if there["stream_version"] != described["stream_version"]:
        raise UserError(
            f"work directory {workdir} holds a run of another version of bert_jax, which reads corpora in "
            "another order: continue it with that version, or choose another --workdir"
        )
    was, now = there["corpora"], described["corpora"]
    if was == now:
        return
    names = _named(there["corpus_paths"]) | _named(paths)
    shown = {one: names.get(one, f"one whose {MANIFEST} has SHA-256 {one[:12]}") for one in was | now}
    lost, new = (", ".join(shown[one] for one in a if one not in b) for a, b in ((was, now), (now, was)))
    if lost or new:
        change = f"{lost} instead of {new}" if lost and new else f"{lost} too" if lost else f"without {new}"
        raise UserError(f"work directory {workdir} holds a run on other corpora ({change}): {advice}")
    changes = [f"{shown[one]} {was[one]:g} -> {now[one]:g}" for one in was if was[one] != now[one]]
    raise UserError(f"work directory {workdir} holds a run with other shares ({'; '.join(changes[:4])}): {advice}")


def _named(paths: list[str]) -> dict[str, str]:
    """Identities of the corpora that lie there still, and where."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError, ImportError):  # ImportError: a bucket that cannot be reached from here
            found[hashlib.sha256((epath.Path(path) / MANIFEST).read_bytes()).hexdigest()] = path
    return found


def read(workdir: StoredPath) -> dict[str, Any]:
    """What ``config.json`` says.

    Raises:
      UserError: the directory holds no run or cannot be reached, or its config.json cannot be understood.
    """
    reach(workdir)
    path = workdir / CONFIG
    if not path.exists():
        raise UserError(f"{workdir} holds no run of bert_jax (there is no {CONFIG})")
    try:
        there = json.loads(path.read_text())
        config_lib.from_dict(there["config"])
        there["stream_version"], there["fingerprint"], there["corpora"].items(), there["corpus_paths"]
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(
            f"{path} is damaged, or of another version of bert_jax ({error}): restore a copy of it, or choose "
            "another --workdir"
        ) from error
    return there


def read_config(workdir: StoredPath) -> Config:
    """The config that the run was started with."""
    return config_lib.from_dict(read(workdir)["config"])
