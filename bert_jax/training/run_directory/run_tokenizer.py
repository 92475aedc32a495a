"""The tokenizer of a run, checked against the checkpoint that it was trained for."""

from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.run_directory import workdir
from bert_jax.training.run_directory.checkpoint import read_metadata


def load_tokenizer(directory: StoredPath, checkpoint: epath.Path | None) -> Tokenizer:
    """The tokenizer.json of a work directory.

    Args:
      directory: of the run.
      checkpoint: one of its checkpoints; None: it has none, so that nothing is compared.

    Raises:
      UserError: no tokenizer.json, or not the one that the checkpoint was trained with.
    """
    path = directory / workdir.TOKENIZER
    tokenizer = Tokenizer.load(path)
    trained = None if checkpoint is None else read_metadata(checkpoint)["tokenizer_fingerprint"]
    if trained not in (None, tokenizer.fingerprint):
        corpora = (epath.Path(corpus) / workdir.TOKENIZER for corpus in workdir.read_run(directory)["corpus_paths"])
        same = (file for file in corpora if file.exists() and Tokenizer.load(file).fingerprint == trained)
        source = next((f"copy {file} to it" for file in same), "restore a copy of it")
        raise UserError(
            f"{path} is not the tokenizer that the run was trained with: its ids mean other words; {source}"
        )
    return tokenizer
