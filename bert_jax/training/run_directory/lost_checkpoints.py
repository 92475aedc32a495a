"""A run that had a checkpoint and has none, as when a volume is not mounted: it must not begin again unnoticed."""

from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.checkpoint import (
    HAS_CHECKPOINTS,
    checkpoint_directory,
    committed_checkpoint_paths,
)


def has_lost_checkpoints(workdir: StoredPath) -> bool:
    """Whether the run in a work directory had a checkpoint and has none, so that it would begin again at step 0."""
    return (workdir / HAS_CHECKPOINTS).exists() and not any(committed_checkpoint_paths(checkpoint_directory(workdir)))


def check_no_lost_checkpoints(workdir: StoredPath) -> None:
    """Raise UserError if the run in a work directory had a checkpoint and has none."""
    if has_lost_checkpoints(workdir):
        raise UserError(
            f"{checkpoint_directory(workdir)} has no checkpoint, and the run had saved one: mount its volume, or "
            "restore a copy. To begin again at step 0, add --restart (of bert-jax pretrain), or remove "
            f"{workdir / HAS_CHECKPOINTS}"
        )
