"""Makes tests/golden/formats/: a model, the same in 8-bit integers, and a run's work directory in each released format.

Files of a released format are never regenerated: users have such files. When a released format changes, raise its
version and add the output of this script under the new number. A format that was never released is replaced.
Run it as a module, from the root:

    python -m tests.golden.make_formats DIRECTORY

The run is one step of two layers, 8 wide, on a dozen tokens.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, LogConfig, ModelConfig, Phase
from bert_jax.training.param_paths import name_leaves

FORMATS = Path(__file__).parent / "formats"
WORDS = ("the", "river", "sings", "old", "stone", "falls", ".")
CONFIG = Config(
    name="frozen",
    model=ModelConfig(vocab_size=12, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=8, max_positions=16),
    data=DataConfig(prefetch=2),
    phases=(Phase(steps=1, seq_len=16, batch_size=2, warmup_steps=0),),
    checkpoint=CheckpointConfig(every=1, keep=1),
    log=LogConfig(tensorboard=False),
    evaluation=EvaluationConfig(every=0, rows=2, batch_size=2),
)


def digest(params: Any) -> str:
    """SHA-256 of all names, shapes and values, float32."""
    total = hashlib.sha256()
    for name, leaf in sorted(name_leaves(params).items()):
        array = np.ascontiguousarray(leaf, np.float32)
        total.update(f"{name} {list(array.shape)}\n".encode() + array.tobytes())
    return total.hexdigest()


def build_corpus(directory: Path) -> Path:
    """Ten documents of three sentences, and a tokenizer of a dozen tokens."""
    from data_prep.cli.main import main as bert_data

    rng = np.random.default_rng(0)
    texts = [" ".join(" ".join(rng.choice(WORDS[:-1], 3)) + " ." for _ in range(3)) for _ in range(10)]
    source, vocabulary, corpus = directory / "text.txt", directory / "vocab.txt", directory / "corpus"
    source.write_text("\n\n".join(texts))
    vocabulary.write_text("".join(f"{piece}\n" for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)))
    command = ["build", "--source", f"text:{source}", "--workers", "1", "--tokenizer", str(vocabulary)]
    assert bert_data([*command, "--out", str(corpus), "--validation-fraction", "0.3"]) == 0
    return corpus


def main(directory: Path) -> None:
    """Write all, and the digests of their parameters."""
    from bert_jax.compress.quantise import round_model
    from bert_jax.convert.conversion import convert
    from bert_jax.convert.formats import input_formats, native
    from bert_jax.data.mixture import CorpusWeight
    from bert_jax.training import pretraining
    from bert_jax.training.run_directory import checkpoint, commit, workdir

    scratch = directory / "scratch"
    scratch.mkdir(parents=True)
    run = scratch / "run"
    pretraining.pretrain(CONFIG, [CorpusWeight(build_corpus(scratch))], run)
    kept = directory / f"run-{checkpoint.FORMAT_VERSION}"
    for name in (workdir.CONFIG, workdir.TOKENIZER, workdir.LEDGER):
        kept.mkdir(exist_ok=True)
        shutil.copy(run / name, kept / name)
    described = json.loads((kept / workdir.CONFIG).read_text())
    described["corpus_paths"] = ["corpus"]  # no path of the machine that made it
    (kept / workdir.CONFIG).write_text(json.dumps(described, indent=1))
    shutil.copytree(run / "checkpoints", kept / "checkpoints")
    (save,) = checkpoint.checkpoint_directory(kept).iterdir()
    success = save / "state" / "commit_success.txt"  # Orbax writes an absolute path
    success.write_text(success.read_text().replace(f"{run.absolute()}/", ""))
    commit.write_commit(save, commit.checksums_of_this_process(save))
    model = directory / f"model-{native.FORMAT_VERSION}"
    with_moments = input_formats.ReadOptions(optimizer_state=True)
    convert(kept, model, "bert-jax", with_moments)
    with input_formats.open_model(model, with_moments) as source_model:
        rounded = dataclasses.replace(round_model(source_model), optimizer_state=source_model.optimizer_state)
        convert(rounded, in_int8 := directory / f"{model.name}-int8", "bert-jax", with_moments)
    sums = {}
    for path, of in ((kept, kept), (model, kept), (in_int8, in_int8)):
        with input_formats.open_model(of) as source_model:
            sums[path.name] = digest(source_model.model.params)
    (directory / "digests.json").write_text(json.dumps(sums, indent=1) + "\n")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
