"""Break the code in one line at a time, and see that tests notice: python scripts/breaks.py [WORD ...]

Each row of TABLE is applied to a copy of the working tree, and its tests must then fail. Words choose the rows whose
path contains one of them. The exit code is 1 if tests did not notice a break. The tests must pass without the breaks,
which this script does not check. Each row takes about a minute, so this is no part of scripts/test.sh: run the rows of
a package after its tests were changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 900
"""Of the tests of a row."""


class Break(NamedTuple):
    """A line that is replaced by a wrong one."""

    path: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: list[str]
    """Arguments of pytest."""


# In the order of packages: a path and tests (in tests/); below them a line, or a part of one, and the wrong one.
TABLE = r"""
bert_jax/analysis/probes/erasure.py: analysis/test_probes_erasure.py
    control_eraser(whitening, labels, classes, one) for one in seeds => leace for _ in seeds
bert_jax/analysis/probes/leace.py: analysis/test_probes_erasure.py
    np.linalg.qr(random)[0] => np.linalg.qr(whitening.to_coordinates @ random[: len(whitening.mean)])[0]
bert_jax/analysis/result_files.py: analysis/test_analyse.py
    if file["request"]["code"] == request["code"]: => if True:
bert_jax/compress/theseus.py: compress/test_theseus.py
    np.argsort(modules, kind="stable") => np.argsort(modules[::-1], kind="stable")
bert_jax/convert/families/albert.py: convert/test_nothing_is_lost.py convert/test_support_matrix.py
    "classifier_dropout_prob": 0.1, => "classifier_dropout_prob": 0.2,
bert_jax/convert/tensors.py: convert/test_conversion.py convert/test_vocabulary.py convert/test_bad_conversions.py
    rows = len(range(tensor.shape[0])[start:stop]) => rows = stop - start
bert_jax/data/cursor.py: data/test_batches.py data/test_epoch_plan.py training/test_recovery.py
    if first <= rows < last: => if first < rows < last:
bert_jax/data/packing.py: data/test_packing.py
    if taken[row] < slots and room > length: => if room > length:
bert_jax/data/shards.py: data/test_remote_reading.py
    if about[1] != LAYOUT_VERSION: => if False:
bert_jax/data/shards.py: data/test_remote_reading.py
    os.ftruncate(self._file, 0) => os.ftruncate(self._file, self._size)
bert_jax/data/word_starts.py: data/test_examples.py data/test_corpus.py
    return (length + 7) // 8 if length => return length // 8 if length
bert_jax/distributed/messages.py: distributed/test_rendezvous.py
    return message if is_ascii else None => return message
bert_jax/distributed/stop_request.py: distributed/test_stop_request.py
    hangup = {signal.SIGHUP}.intersection(stop_signals()) => hangup: set[signal.Signals] = set()
bert_jax/errors.py: cli convert/test_bad_conversions.py
    c if c.isprintable() else c.encode => c if c else c.encode
bert_jax/experiments/curves.py: experiments/test_curves.py
    share * (point["tokens"] - before["tokens"]) => (1 - share) * (point["tokens"] - before["tokens"])
bert_jax/experiments/failure_rates.py: experiments/test_results.py
    counts += [len(task["scores"]), task["failed"], => counts += [len(task["scores"]), task["scores"].count(None),
bert_jax/experiments/finetuned.py: experiments/test_models.py
    rest=~scored: runs => rest=scored: runs
bert_jax/experiments/results.py: experiments/test_results.py
    metric in record["metrics"] for => metric in record["metrics"] and not record["finetuned"][metric]["failed"] for
bert_jax/statistics.py: test_statistics.py
    np.arange(len(known), 0, -1) => len(known)
bert_jax/finetune/label_order.py: finetune/test_label_order.py
    order = [names.index(label) for label in wanted] => order = [wanted.index(label) for label in wanted]
bert_jax/finetune/squad.py: finetune/test_squad.py
    if not skip_damaged: => if True:
bert_jax/finetune/tagging.py: finetune/test_tagging.py
    else names.index("FORM") if "FORM" in names else 0 => else 0
bert_jax/finetune/tagging.py: finetune/test_tagging.py
    [field for field in line.split(" ") if field] => line.split()
bert_jax/finetune/tagging.py: finetune/test_tagging.py
    if (not words and _is_comment(line, layout)) or => if line.startswith("#") or
bert_jax/inference/loaded_model.py: inference/test_embedding.py inference/test_loaded_model.py
    np.linalg.norm(vectors, axis=1, keepdims=True) => np.linalg.norm(vectors, axis=0, keepdims=True)
bert_jax/launchers/kubernetes.py: launchers
    CHIPS_PER_HOST = 4 => CHIPS_PER_HOST = 8
bert_jax/model/attention.py: model/test_encoder.py model/test_layers.py model/test_causal.py
    allowed &= distance <= after => allowed &= distance < after
bert_jax/model/encoder.py: model/test_golden_parity.py
    return jnp.tanh(self.pooler(cls)) => return self.pooler(cls)
bert_jax/objectives/masking.py: objectives/test_masking.py objectives/test_masking_statistics.py
    _threshold(objective.mask_token_share + objective.random_token_share) => _threshold(objective.random_token_share)
bert_jax/objectives/sentence_pair.py: objectives training/test_packed_runs.py
    & (batch["pair_labels"] >= 0) =>
bert_jax/planning/memory_model.py: planning
    "full": work.micro_batch_tokens * width * work.bytes_per_activation, => "full": layer,
bert_jax/tokenizers/cleaning.py: data_prep/test_trained_cleaning.py
    removes, normalizers.NFC()] => removes]
bert_jax/tokenizers/wordpiece.py: tokenizers/test_added_tokens.py
    if not (token.special and backend.encode_special_tokens) => if not token.special
bert_jax/training/divergence.py: training/test_recovery.py
    IN_A_ROW = 3 => IN_A_ROW = 2
bert_jax/training/optimizers/lamb.py: training/test_optimizer.py
    return rule.decayed or FLAVOURS => return FLAVOURS
bert_jax/training/optimizers/schedules.py: training/test_schedules.py
    return end + (peak - end) * share => return peak * share
bert_jax/training/pretraining_task.py: training/test_schedule_run.py
    active_objectives(self.model_config, => active_objectives(self.config.model,
bert_jax/training/programs.py: training/test_schedule_run.py
    inputs.seed, inputs.mask_counts) => inputs.seed)
bert_jax/training/recovery.py: training/test_recovery.py
    cursor.step, before - within) => cursor.step)
bert_jax/training/recovery.py: training/test_recovery.py
    return max(config.recovery.max_skipped, IN_A_ROW) - 1 => return config.recovery.max_skipped - 1
bert_jax/training/replicas.py: multi_device/test_replicas.py
    if 2 * counts.max() > replicas: => if 2 * counts.max() >= replicas:
bert_jax/training/replicas.py: multi_device/test_replicas.py
    if not places & corrupted] => ]
bert_jax/training/run_directory/goodput.py: training/test_goodput.py
    ordered = list(attempts.values()) => ordered = [attempts[time] for time in sorted(attempts)]
bert_jax/training/run_directory/local_copies.py: training/test_local_copies.py
    len(set(same)) > 1 or layouts.index(layouts[process]) != process => len(set(same)) > 1
bert_jax/training/run_directory/lost_checkpoints.py: training/test_workdir.py
    return (workdir / HAS_CHECKPOINTS).exists() and not any => return (workdir / HAS_CHECKPOINTS).is_dir() and not any
bert_jax/training/run_directory/orbax_errors.py: training/test_checkpoint.py
    [:MAX_RECORDS]\n        return False => [:MAX_RECORDS]\n        return True
bert_jax/training/run_directory/retention.py: training/test_save_schedule.py
    kept.append(best) => pass
bert_jax/training/run_directory/run_tokenizer.py: training/test_evaluate.py
    if trained not in (None, tokenizer.fingerprint): => if trained == tokenizer:
bert_jax/training/save_schedule.py: training/test_save_schedule.py
    * (1 - share) / (2 * share) => * 2 * (1 - share) / share
bert_jax/training/time_budget.py: training/test_time_budget.py
    if one["hours"] == self.phase.hours]\n        return => ]\n        return
data_prep/builder/filtered.py: data_prep/test_filtered_builds.py
    (2 * self._removed_characters => (1 * self._removed_characters
data_prep/builder/prepare.py: data_prep/test_filtered_builds.py
    return FUNCTION_FAILED in metadata["skipped"] and => return False and
data_prep/builder/resume.py: data_prep/test_resume.py
    if not scratch.prepared_blocks(scratch_dir): => if True:
data_prep/filters/chain.py: data_prep/test_filters.py
    heapq.nsmallest(EXAMPLES, different) => list(different)[:EXAMPLES]
data_prep/sources/encodings.py: data_prep/test_encodings.py
    _MAX_LOST_SHARE = 0.01 => _MAX_LOST_SHARE = 0.5
data_prep/sources/encodings.py: data_prep/test_encodings.py
    if lost < max(1, characters): => if not lost:
data_prep/vocabularies/train.py: data_prep/test_train_vocabularies.py
    if strips and marks.deleted > _MANY_DELETED * marks.characters: => if strips and marks.deleted > marks.characters:
data_prep/vocabularies/wordpiece_bpe.py: data_prep/test_train_vocabularies.py
    if rare > _MANY_UNKNOWN * every: => if rare > every:
data_prep/vocabularies/wordpiece_bpe.py: data_prep/test_train_vocabularies.py
    kept |= added => kept |= set()
"""


def read_table() -> list[Break]:
    """The breaks of TABLE, where \\n is the end of a line."""
    lines, rows = TABLE.strip().splitlines(), []
    for where, what in zip(lines[::2], lines[1::2], strict=True):
        path, tests = where.split(":")
        old, new = (part.strip(" ") for part in what.replace("\\n", "\n").split(" =>"))
        rows.append(Break(path, old, new, [f"tests/{one}" for one in tests.split()]))
    return rows


def main(words: list[str]) -> int:
    """Try the rows that are chosen; returns the exit code."""
    rows = [row for row in read_table() if not words or any(word in row.path for word in words)]
    for row in rows:
        count = (ROOT / row.path).read_text().count(row.old)
        assert count == 1, f"{row.path} has {count} times: {row.old}"
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="breaks-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".gpu", "*.egg-info"))
        for row in rows:
            start = time.perf_counter()
            noticed, failed = is_noticed(copy, row)
            unnoticed += not noticed
            mark = "noticed" if noticed else "NOT NOTICED"
            print(
                f"{mark}: {row.path}: {row.new or '(nothing)'}: {failed} ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    print(f"{len(rows) - unnoticed} of {len(rows)} noticed")
    return int(unnoticed > 0)


def is_noticed(tree: Path, row: Break) -> tuple[bool, str]:
    """Whether a test fails on a broken copy, and its name, or what pytest printed last."""
    file = tree / row.path
    whole = file.read_text()
    file.write_text(whole.replace(row.old, row.new))
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *row.tests,
    ]
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {TIMEOUT_SECONDS} s"
    finally:
        file.write_text(whole)
    lines = run.stdout.splitlines() or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return run.returncode == 1, failed.removeprefix("FAILED ").partition(" - ")[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
