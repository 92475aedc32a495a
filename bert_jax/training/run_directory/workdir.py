"""A run's directory: what belongs to it, and whether it is this run's."""

import contextlib
import json
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.data.corpus import identity_of, read_manifest
from bert_jax.data.epoch_plan import STREAM_VERSION
from bert_jax.data.mixture import CYCLE_ROWS, rows_per_cycle
from bert_jax.directory_lock import LOCK_FILE
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, check_reachable, make_directory, write_atomic

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
LEDGER = "ledger.jsonl"
MARK = "doctor-mark-"
"""What the name of a file begins with that `bert-jax doctor` leaves for the time that it looks."""


def claim(
    workdir: StoredPath,
    before: Config | None,
    config: Config,
    mixture: dict[str, float],
    corpus_paths: list[str],
    tokenizer_text: str,
) -> None:
    """Write into `workdir` which run it holds, unless that is there already.

    Other phases than before replace those in config.json: whether they may is for continuation.check to find out first.

    Args:
      workdir: made if it does not exist.
      before: what `held_config` returns for the other arguments.
      config: of the run.
      mixture: `Corpus.identity` of each corpus and its share of the rows; positive, summing to 1.
      corpus_paths: where they lie, in any order. They may lie elsewhere when the run is continued.
      tokenizer_text: tokenizer.json, kept beside the checkpoints so that they can be used without the corpus.

    Raises:
      UserError: the directory cannot be written.
    """
    if before is not None and config_lib.fingerprint(before) == config_lib.fingerprint(config):
        return
    try:
        make_directory(workdir)
        for name in _halves(workdir):
            (workdir / name).unlink(missing_ok=True)  # the thread of the lock may have renamed its own
        if before is None:
            write_atomic(workdir / TOKENIZER, tokenizer_text.encode())
            write_atomic(workdir / LEDGER, b"")  # a run without config.json has decided nothing
        settings = {"corpus_paths": sorted(corpus_paths), "config": config_lib.to_dict(config)}
        write_atomic(workdir / CONFIG, json.dumps(_described(config, mixture) | settings, indent=1).encode())
    except OSError as error:
        raise UserError(
            f"cannot write to work directory {workdir}: {error.strerror or error}: choose another --workdir, or change "
            "its permissions"
        ) from error


def held_config(
    workdir: StoredPath, config: Config, mixture: dict[str, float], corpus_paths: list[str]
) -> Config | None:
    """The config of the run in a directory, which agrees with `config` in all that decides it but the phases.

    Nothing is written.

    Args:
      workdir, config, mixture, corpus_paths: as for `claim`.

    Returns:
      None if there is no run yet; the directory may become this run's.

    Raises:
      UserError: it holds a different run, or files that are no run's, or is a file, or cannot be reached.
    """
    check_reachable(workdir)
    if (workdir / CONFIG).exists():
        return _refuse_other_run(workdir, config, _described(config, mixture), corpus_paths)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"work directory {workdir} is a file: choose another --workdir")
    own_files = {TOKENIZER, LEDGER, LOCK_FILE} | _halves(workdir)
    if [name for name in _names(workdir) if name not in own_files and not name.startswith(MARK)]:
        raise UserError(f"work directory {workdir} holds files, but no run of bert_jax: choose another --workdir")
    return None


def _names(workdir: StoredPath) -> set[str]:
    return {entry.name for entry in workdir.iterdir()} if workdir.exists() else set()


def _halves(workdir: StoredPath) -> set[str]:
    """Temporary files that a killed process left."""
    started = tuple(f"{name}." for name in (TOKENIZER, LEDGER, CONFIG, LOCK_FILE))
    return {name for name in _names(workdir) if name.startswith(started) and name.endswith(".partial")}


def _described(config: Config, mixture: dict[str, float]) -> dict[str, Any]:
    """What must not change while a run goes on."""
    identities = sorted(mixture)
    counts = rows_per_cycle([mixture[identity] for identity in identities]).tolist()
    return {
        "stream_version": STREAM_VERSION,
        "fingerprint": config_lib.fingerprint(config),
        # As the stream uses them: whole rows of a cycle.
        "corpora": {identity: count / CYCLE_ROWS for identity, count in zip(identities, counts, strict=True)},
    }


def _refuse_other_run(workdir: StoredPath, config: Config, described: dict[str, Any], paths: list[str]) -> Config:
    there = read(workdir)
    advice = "choose another --workdir, or the settings it was started with"
    before = config_lib.from_dict(there["config"])
    # Not the fingerprint in the file: an older version did not know every field that has a default by now.
    if changed := changes(*(config_lib.decisive(c) | {"phases": []} for c in (before, config))):
        raise UserError(f"work directory {workdir} holds a different run ({'; '.join(changed[:4])}): {advice}")
    if there["stream_version"] != described["stream_version"]:
        raise UserError(
            f"work directory {workdir} holds a run of another version of bert_jax, which reads corpora in "
            "another order: continue it with that version, or choose another --workdir"
        )
    was, now = there["corpora"], described["corpora"]
    if was == now:
        return before
    names = _named(there["corpus_paths"]) | _named(paths)
    shown = {one: names.get(one, f"one with identity {one[:12]}") for one in was | now}
    lost, new = (", ".join(shown[one] for one in a if one not in b) for a, b in ((was, now), (now, was)))
    if lost or new:
        change = f"{lost} instead of {new}" if lost and new else f"{lost} too" if lost else f"without {new}"
        raise UserError(f"work directory {workdir} holds a run on other corpora ({change}): {advice}")
    moved = [f"{shown[one]} {was[one]:g} -> {now[one]:g}" for one in was if was[one] != now[one]]
    raise UserError(f"work directory {workdir} holds a run with other shares ({'; '.join(moved[:4])}): {advice}")


def changes(before: Any, now: Any) -> list[str]:
    """What differs between nested values, as "path old -> new"."""
    old, new = config_lib.flatten(before), config_lib.flatten(now)
    return [f"{k} {old.get(k)} -> {new.get(k)}" for k in sorted(old | new) if old.get(k) != new.get(k)]


def _named(paths: list[str]) -> dict[str, str]:
    """Identities of the corpora that lie there still, and where."""
    found = {}
    for path in paths:
        with contextlib.suppress(UserError, OSError):
            found[identity_of(path, read_manifest(path))] = path
    return found


def read(workdir: StoredPath) -> dict[str, Any]:
    """What ``config.json`` says.

    Raises:
      UserError: the directory holds no run or cannot be reached, or its config.json cannot be understood.
    """
    check_reachable(workdir)
    path = workdir / CONFIG
    if not path.exists():
        raise UserError(f"{workdir} holds no run of bert_jax (there is no {CONFIG})")
    try:
        there = json.loads(path.read_text())
        config_lib.from_dict(there["config"])
        there["stream_version"], there["fingerprint"]
        for kind, values in ((float, there["corpora"].values()), (str, there["corpus_paths"])):
            if not all(isinstance(value, kind) for value in values):
                raise TypeError("corpora")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        raise UserError(
            f"{path} is damaged, or of another version of bert_jax ({error}): restore a copy of it, or choose "
            "another --workdir"
        ) from error
    return there


def read_config(workdir: StoredPath) -> Config:
    """The config that the run was started with."""
    return config_lib.from_dict(read(workdir)["config"])
