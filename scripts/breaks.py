"""Break the code in one line at a time, and see that tests notice: python scripts/breaks.py [WORD ...]

Each row of BREAKS is applied to a copy of the working tree, and its tests must then fail. Words choose the rows whose
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


class Break(NamedTuple):
    """A line that is replaced by a wrong one."""

    path: str
    old: str
    """Occurs once in the file."""
    new: str
    tests: str
    """Arguments of pytest."""


# In the order of packages.
BREAKS = (
    Break(
        "bert_jax/analysis/probes/erasure.py",
        "control_eraser(whitening, labels, classes, one) for one in seeds",
        "leace for _ in seeds",
        "tests/analysis/test_probes_erasure.py",
    ),
    Break(
        "bert_jax/analysis/probes/leace.py",
        "return whitening.eraser(np.linalg.qr(random)[0])",
        "return whitening.eraser(np.linalg.qr(whitening.to_coordinates @ random[: len(whitening.mean)])[0])",
        "tests/analysis/test_probes_erasure.py",
    ),
    Break(
        "bert_jax/analysis/results.py",
        'if file["request"]["code"] == request["code"]:',
        "if True:",
        "tests/analysis/test_analyse.py",
    ),
    Break(
        "bert_jax/compress/theseus.py",
        'np.argsort(modules, kind="stable")',
        'np.argsort(modules[::-1], kind="stable")',
        "tests/compress/test_theseus.py",
    ),
    Break(
        "bert_jax/convert/families/albert.py",
        '"classifier_dropout_prob": 0.1,',
        '"classifier_dropout_prob": 0.2,',
        "tests/convert/test_nothing_is_lost.py tests/convert/test_support_matrix.py",
    ),
    Break(
        "bert_jax/convert/tensors.py",
        "rows = len(range(tensor.shape[0])[start:stop])",
        "rows = stop - start",
        "tests/convert/test_conversion.py tests/convert/test_vocabulary.py tests/convert/test_bad_conversions.py",
    ),
    Break(
        "bert_jax/data/cursor.py",
        "if first <= rows < last:",
        "if first <= rows <= last:",
        "tests/data/test_batches.py tests/data/test_epoch_plan.py tests/training/test_recovery.py",
    ),
    Break(
        "bert_jax/data/packing.py",
        "if taken[row] < slots and room > length:",
        "if room > length:",
        "tests/data/test_packing.py",
    ),
    Break(
        "bert_jax/data/word_starts.py",
        "return (length + 7) // 8 if length",
        "return length // 8 if length",
        "tests/data/test_examples.py tests/data/test_corpus.py",
    ),
    Break(
        "bert_jax/distributed/messages.py",
        "return message if is_ascii else None",
        "return message",
        "tests/distributed/test_rendezvous.py",
    ),
    Break(
        "bert_jax/distributed/stop_request.py",
        "hangup = {signal.SIGHUP}.intersection(stop_signals())",
        "hangup: set[signal.Signals] = set()",
        "tests/distributed/test_stop_request.py",
    ),
    Break(
        "bert_jax/errors.py",
        "c if c.isprintable() else c.encode",
        "c if c else c.encode",
        "tests/cli tests/convert/test_bad_conversions.py",
    ),
    Break(
        "bert_jax/experiments/failure_rates.py",
        'counts += [len(task["scores"]), task["failed"],',
        'counts += [len(task["scores"]), task["scores"].count(None),',
        "tests/experiments/test_results.py",
    ),
    Break(
        "bert_jax/experiments/results.py",
        'if all(record is not None and metric in record["metrics"] for record in of_seed):',
        "if all(one and metric in one['metrics'] and not one['finetuned'][metric]['failed'] for one in of_seed):",
        "tests/experiments/test_results.py",
    ),
    Break(
        "bert_jax/experiments/statistics.py",
        "np.arange(len(known), 0, -1)",
        "len(known)",
        "tests/experiments/test_statistics.py",
    ),
    Break(
        "bert_jax/finetune/label_order.py",
        "order = [names.index(label) for label in wanted]",
        "order = [wanted.index(label) for label in wanted]",
        "tests/finetune/test_label_order.py",
    ),
    Break("bert_jax/finetune/squad.py", "if not skip_damaged:", "if True:", "tests/finetune/test_squad.py"),
    Break(
        "bert_jax/finetune/tagging.py",
        'else names.index("FORM") if "FORM" in names else 0',
        "else 0",
        "tests/finetune/test_tagging.py",
    ),
    Break(
        "bert_jax/finetune/tagging.py",
        '[field for field in line.split(" ") if field]',
        "line.split()",
        "tests/finetune/test_tagging.py",
    ),
    Break(
        "bert_jax/finetune/tagging.py",
        "if (not words and _is_comment(line, layout)) or",
        'if line.startswith("#") or',
        "tests/finetune/test_tagging.py",
    ),
    Break(
        "bert_jax/inference/loaded_model.py",
        "np.linalg.norm(vectors, axis=1, keepdims=True)",
        "np.linalg.norm(vectors, axis=0, keepdims=True)",
        "tests/inference/test_embedding.py tests/inference/test_loaded_model.py",
    ),
    Break("bert_jax/launchers/kubernetes.py", "CHIPS_PER_HOST = 4", "CHIPS_PER_HOST = 8", "tests/launchers"),
    Break(
        "bert_jax/model/attention.py",
        "allowed &= distance <= after",
        "allowed &= distance < after",
        "tests/model/test_encoder.py tests/model/test_layers.py tests/model/test_causal.py",
    ),
    Break(
        "bert_jax/model/encoder.py",
        "return jnp.tanh(self.pooler(cls))",
        "return self.pooler(cls)",
        "tests/model/test_golden_parity.py",
    ),
    Break(
        "bert_jax/objectives/masking.py",
        "_threshold(objective.mask_token_share + objective.random_token_share)",
        "_threshold(objective.random_token_share)",
        "tests/objectives/test_masking.py tests/objectives/test_masking_statistics.py",
    ),
    Break(
        "bert_jax/objectives/sentence_pair.py",
        '& (batch["pair_labels"] >= 0)',
        "",
        "tests/objectives tests/training/test_packed_runs.py",
    ),
    Break(
        "bert_jax/planning/memory_model.py",
        '"full": work.tokens * width * work.bytes_per_activation,',
        '"full": layer,',
        "tests/planning",
    ),
    Break(
        "bert_jax/tokenizers/cleaning.py",
        'tokenizers.Regex("[\\x0b\\x0c\\x85]"), " "), removes, normalizers.NFC()]',
        'tokenizers.Regex("[\\x0b\\x0c\\x85]"), " "), removes]',
        "tests/data_prep/test_trained_cleaning.py",
    ),
    Break(
        "bert_jax/tokenizers/wordpiece.py",
        "if not (token.special and backend.encode_special_tokens)",
        "if not token.special",
        "tests/tokenizers/test_added_tokens.py",
    ),
    Break(
        "bert_jax/training/divergence.py",
        "IN_A_ROW = 3",
        "IN_A_ROW = 2",
        "tests/training/test_recovery.py",
    ),
    Break(
        "bert_jax/training/optimizers/lamb.py",
        "return rule.decayed or FLAVOURS",
        "return FLAVOURS",
        "tests/training/test_optimizer.py",
    ),
    Break(
        "bert_jax/training/optimizers/schedules.py",
        "return end + (peak - end) * share",
        "return peak * share",
        "tests/training/test_schedules.py",
    ),
    Break(
        "bert_jax/training/recovery.py",
        "begins = max(before - config.recovery.stable_steps, cursor.step, before - within)",
        "begins = max(before - config.recovery.stable_steps, cursor.step)",
        "tests/training/test_recovery.py",
    ),
    Break(
        "bert_jax/training/recovery.py",
        "return max(config.recovery.max_skipped, IN_A_ROW) - 1",
        "return config.recovery.max_skipped - 1",
        "tests/training/test_recovery.py",
    ),
    Break(
        "bert_jax/training/run_directory/goodput.py",
        "ordered = list(attempts.values())",
        "ordered = [attempts[time] for time in sorted(attempts)]",
        "tests/training/test_goodput.py",
    ),
    Break(
        "bert_jax/training/run_directory/lost_checkpoints.py",
        "return (workdir / HAS_CHECKPOINTS).exists() and not any",
        "return (workdir / HAS_CHECKPOINTS).is_dir() and not any",
        "tests/training/test_workdir.py",
    ),
    Break(
        "bert_jax/training/run_directory/orbax_errors.py",
        "[:MAX_RECORDS]\n        return False",
        "[:MAX_RECORDS]\n        return True",
        "tests/training/test_checkpoint.py",
    ),
    Break(
        "bert_jax/training/run_directory/run_tokenizer.py",
        "if trained not in (None, tokenizer.fingerprint):",
        "if trained == tokenizer:",
        "tests/training/test_evaluate.py",
    ),
    Break(
        "bert_jax/training/time_budget.py",
        'if one["hours"] == self.phase.hours]\n        return',
        "]\n        return",
        "tests/training/test_time_budget.py",
    ),
    Break(
        "data_prep/builder/resume.py",
        "        if not scratch.prepared_blocks(scratch_dir):",
        "        if True:",
        "tests/data_prep/test_resume.py",
    ),
    Break(
        "data_prep/sources/encodings.py",
        "_MAX_LOST_SHARE = 0.01",
        "_MAX_LOST_SHARE = 0.5",
        "tests/data_prep/test_encodings.py",
    ),
    Break(
        "data_prep/sources/encodings.py",
        "if lost < max(1, characters):",
        "if not lost:",
        "tests/data_prep/test_encodings.py",
    ),
    Break(
        "data_prep/vocabularies/train.py",
        "if strips and marks.deleted > _MANY_DELETED * marks.characters:",
        "if strips and marks.deleted > marks.characters:",
        "tests/data_prep/test_unknown_text.py",
    ),
    Break(
        "data_prep/vocabularies/wordpiece_bpe.py",
        "if rare > _MANY_UNKNOWN * every:",
        "if rare > every:",
        "tests/data_prep/test_unknown_text.py",
    ),
    Break(
        "data_prep/vocabularies/wordpiece_bpe.py",
        "        kept |= added",
        "        kept |= set()",
        "tests/data_prep/test_train_vocabularies.py",
    ),
)


def main(words: list[str]) -> int:
    """Try the rows that are chosen; returns the exit code."""
    rows = [row for row in BREAKS if not words or any(word in row.path for word in words)]
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
        *row.tests.split(),
    ]
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    finally:
        file.write_text(whole)
    lines = run.stdout.splitlines() or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return run.returncode == 1, failed.removeprefix("FAILED ").partition(" - ")[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
