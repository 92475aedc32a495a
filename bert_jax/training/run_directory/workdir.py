"""The work directory of a run: its files, and the check that it belongs to this run."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from bert_jax import config as config_lib
from bert_jax import field_validation
from bert_jax.config import Config
from bert_jax.data.corpus_description import CorpusDescription, describe_corpora
from bert_jax.data.epoch_plan import STREAM_VERSION
from bert_jax.data.manifest import identity_of, read_manifest
from bert_jax.data.mixture import CYCLE_ROWS, rows_per_cycle
from bert_jax.data.sampling import group_shares
from bert_jax.errors import UserError
from bert_jax.storage.files import make_directory_if_local, write_atomic
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.lock import LOCK_FILE
from bert_jax.storage.paths import StoredPath, check_reachable

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
LEDGER = "ledger.jsonl"
PROBE_PREFIX = "doctor-mark-"
"""Prefix of temporary files of `bert-jax doctor`."""


class _AddedLater(TypedDict, total=False):
    corpus_descriptions: dict[str, CorpusDescription]
    """by identity; not of data for fine-tuning, and not in runs that were begun by older versions"""


class ConfigFile(_AddedLater):
    """The content of config.json."""

    config: Config
    stream_version: int
    fingerprint: str
    corpora: dict[str, float]
    """share of each corpus, by identity"""
    corpus_paths: list[str]


def write_run_config(
    workdir: StoredPath,
    before: Config | None,
    config: Config,
    mixture: dict[str, float],
    corpus_paths: list[str],
    tokenizer_text: str,
) -> None:
    """Write the identity of the run into `workdir`, unless it is there already.

    Changed phases replace those in config.json; call continuation.check_phase_changes before.

    Args:
      workdir: created if it does not exist.
      before: the result of `matching_config` for the other arguments.
      config: of the run.
      mixture: `Corpus.identity` of each corpus and its share of the rows; positive, summing to 1.
      corpus_paths: directories of the corpora, in any order. They may be others when the run is continued.
      tokenizer_text: tokenizer.json, kept with the checkpoints so that they can be used without the corpus.

    Raises:
      UserError: the directory is not writable.
    """
    if before is not None and config_lib.fingerprint(before) == config_lib.fingerprint(config):
        return
    try:
        make_directory_if_local(workdir)
        for name in _partial_files(workdir):
            (workdir / name).unlink(missing_ok=True)  # the thread of the lock may have renamed its file
        if before is None:
            write_atomic(workdir / TOKENIZER, tokenizer_text.encode())
            write_atomic(workdir / LEDGER, b"")  # a run without config.json has no decisions
        settings = {
            "corpus_paths": sorted(corpus_paths),
            "corpus_descriptions": describe_corpora(sorted(corpus_paths)),
            "config": config_lib.to_dict(config),
        }
        write_atomic(workdir / CONFIG, json.dumps(_run_identity(config, mixture) | settings, indent=1).encode())
    except OSError as error:
        raise UserError(
            f"cannot write to work directory {workdir}: {error.strerror or error}: choose another --workdir, or change "
            "its permissions"
        ) from error


def matching_config(
    workdir: StoredPath, config: Config, mixture: dict[str, float], corpus_paths: list[str]
) -> Config | None:
    """The config of the run in a directory, which matches `config` in its identity except for the phases.

    Nothing is written.

    Args:
      workdir, config, mixture, corpus_paths: as in `write_run_config`.

    Returns:
      None if there is no run yet and the directory can be acquired.

    Raises:
      UserError: the directory holds a different run or files of another kind, is a file, or cannot be reached.
    """
    check_reachable(workdir)
    if (workdir / CONFIG).exists():
        return _check_same_run(workdir, config, _run_identity(config, mixture), corpus_paths)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"work directory {workdir} is a file: choose another --workdir")
    run_files = {TOKENIZER, LEDGER, LOCK_FILE} | _partial_files(workdir)
    if [name for name in _names(workdir) if name not in run_files and not name.startswith(PROBE_PREFIX)]:
        raise UserError(f"work directory {workdir} holds files, but no run of bert_jax: choose another --workdir")
    return None


def _names(workdir: StoredPath) -> set[str]:
    return {entry.name for entry in workdir.iterdir()} if workdir.exists() else set()


def _partial_files(workdir: StoredPath) -> set[str]:
    """Temporary files of killed processes."""
    prefixes = tuple(f"{name}." for name in (TOKENIZER, LEDGER, CONFIG, LOCK_FILE))
    return {name for name in _names(workdir) if name.startswith(prefixes) and name.endswith(".partial")}


def _run_identity(config: Config, mixture: dict[str, float]) -> dict[str, Any]:
    """Values that must not change when a run is continued."""
    identities = sorted(mixture)
    counts = rows_per_cycle([mixture[identity] for identity in identities]).tolist()
    return {
        "stream_version": STREAM_VERSION,
        "fingerprint": config_lib.fingerprint(config),
        # As in the stream: whole rows of a cycle.
        "corpora": {identity: count / CYCLE_ROWS for identity, count in zip(identities, counts, strict=True)},
    }


def _check_same_run(workdir: StoredPath, config: Config, identity: dict[str, Any], paths: list[str]) -> Config:
    saved = read_run(workdir)
    names: dict[str, str] = {}
    if saved["corpora"] != identity["corpora"]:
        names = paths_by_identity([*saved["corpus_paths"], *paths])

    def described(config: Config, run: Mapping[str, Any]) -> dict[str, Any]:
        # Not the fingerprint in the file: an older version may not have had all fields.
        shares = {names.get(one, f"identity {one[:12]}"): share for one, share in run["corpora"].items()}
        fields = {"phases": [], "stream_version": run["stream_version"], "corpora": shares}
        return config_lib.identity_fields(config) | fields

    if changed := describe_config_diff(described(saved["config"], saved), described(config, identity)):
        raise UserError(
            f"work directory {workdir} holds a different run ({'; '.join(changed[:4])}): choose another --workdir, or "
            "the settings and the version of bert_jax that it was started with"
        )
    if config.data.samples_documents:
        _check_same_shares(saved, config, describe_corpora(paths))
    return saved["config"]


def _check_same_shares(saved: ConfigFile, config: Config, now: Mapping[str, CorpusDescription]) -> None:
    """Compares weights of documents: the identity of a corpus does not depend on the names and scores they follow."""
    for identity, described in now.items():
        known = saved.get("corpus_descriptions", {}).get(identity, {}), described
        shares = [group_shares(one["groups"], config.data, one["name"]).tolist() for one in known if one.get("groups")]
        if shares[:-1] != shares[1:]:
            raise UserError(
                f"corpus {described['name']}: its documents have other sources, languages or scores than when the run "
                "was started, so data.* weights sample others: use the corpus it was started with, or another --workdir"
            )


def describe_config_diff(before: Any, now: Any) -> list[str]:
    """The differences between nested values, as "path old -> new"."""
    old, new = config_lib.flatten(before), config_lib.flatten(now)
    return [f"{k} {old.get(k)} -> {new.get(k)}" for k in sorted(old | new) if old.get(k) != new.get(k)]


def paths_by_identity(paths: list[str]) -> dict[str, str]:
    """Paths of the corpora that still exist, by identity."""
    by_identity = {}
    for path in paths:
        with contextlib.suppress(UserError, OSError):
            by_identity[identity_of(path, read_manifest(path))] = path
    return by_identity


def read_run(workdir: StoredPath) -> ConfigFile:
    """The content of ``config.json``.

    Raises:
      UserError: the directory holds no run or cannot be reached, or its config.json is not valid.
    """
    check_reachable(workdir)
    path = workdir / CONFIG
    if not path.exists():
        children = sorted(workdir.iterdir(), key=lambda one: one.name) if workdir.is_dir() else []
        runs = [str(child) for child in children if (child / CONFIG).exists()]
        hint = f"; its directories hold runs, give those: {' '.join(runs[:8])}{' ...' if runs[8:] else ''}"
        raise UserError(f"{workdir} holds no run of bert_jax (there is no {CONFIG}){hint if runs else ''}")
    advice = "it is damaged, or of another version of bert_jax: restore a copy of it, or choose another --workdir"
    values = read_json_object(path, advice)
    if values.keys().isdisjoint(ConfigFile.__required_keys__):
        raise UserError(f"{workdir} holds no run of bert_jax (its {CONFIG} is that of something else, such as a model)")
    return field_validation.from_json(ConfigFile, values, path, advice)


def read_config(workdir: StoredPath) -> Config:
    """The config of the run in a work directory."""
    return read_run(workdir)["config"]
