"""Fixtures that many tests share, each made once per session: a tiny corpus and a tiny trained run."""

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    Phase,
)

VOCABULARY = "the a river mountain sings falls over quick slow light dark stone under green old wind runs near far"
WORDS = VOCABULARY.split()


def make_documents(seed: int, count: int) -> list[str]:
    """Documents of one to nine sentences of three to eleven words."""
    rng = np.random.default_rng(seed)

    def sentence() -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(3, 12)))).capitalize() + "."

    return [" ".join(sentence() for _ in range(rng.integers(1, 10))) for _ in range(count)]


def build_corpus(directory: Path, documents: list[str], vocab_size: int) -> Path:
    """Tokenizer and corpus as a user makes them; returns the corpus directory."""
    from data_prep.cli import main

    source = directory / "text.txt"
    source.write_text("\n\n".join(documents))
    tokenizer, corpus = directory / "tokenizer.json", directory / "corpus"
    common = ["--source", f"text:{source}", "--workers", "1"]
    assert main.main(["tokenizer", *common, "--vocab-size", str(vocab_size), "--out", str(tokenizer)]) == 0
    build = ["build", *common, "--tokenizer", str(tokenizer), "--out", str(corpus), "--validation-fraction", "0.2"]
    assert main.main(build) == 0
    return corpus


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Path:
    """A corpus of 60 documents and fewer than 120 token ids. Read only."""
    return build_corpus(tmp_path_factory.mktemp("tiny"), make_documents(0, 60), 120)


@pytest.fixture(scope="session")
def special_ids(tiny_corpus):
    """Ids of the special tokens of `tiny_corpus`."""
    from bert_jax.data.batch import SpecialIds
    from bert_jax.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tiny_corpus)
    return SpecialIds(tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)


@pytest.fixture(scope="session")
def second_corpus(tmp_path_factory, tiny_corpus) -> Path:
    """Other text with the tokenizer of `tiny_corpus`, for mixtures. Read only."""
    from data_prep.cli import main

    directory = tmp_path_factory.mktemp("second")
    source, corpus = directory / "text.txt", directory / "second"
    source.write_text("\n\n".join(make_documents(5, 30)))
    build = ["build", "--source", f"text:{source}", "--tokenizer", str(tiny_corpus / "tokenizer.json")]
    assert main.main([*build, "--out", str(corpus), "--workers", "1", "--validation-fraction", "0.3"]) == 0
    return corpus


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory) -> Path:
    """Like `tiny_corpus`, with other text and another tokenizer. Read only."""
    return build_corpus(tmp_path_factory.mktemp("other"), make_documents(1, 40), 100)


@pytest.fixture(scope="session")
def tiny_config() -> Config:
    """Eight updates of one layer, 64 wide; everything that happens in a run happens."""
    return Config(
        name="tiny",
        model=ModelConfig(
            vocab_size=120, hidden_size=64, num_layers=1, num_heads=2, intermediate_size=96, max_positions=64
        ),
        data=DataConfig(prefetch=2, examples_per_row=4),
        phases=(Phase(steps=8, seq_len=32, batch_size=8, learning_rate=5e-3, warmup_steps=2),),
        checkpoint=CheckpointConfig(every=4, keep=2),
        log=LogConfig(every=2),
        evaluation=EvaluationConfig(every=4, rows=12, batch_size=8),
    )


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_corpus, tiny_config, tiny_programs) -> Path:
    """The work directory of a finished run of `tiny_config` on `tiny_corpus`. Read only: copy it to change it."""
    from bert_jax.data.mixture import CorpusWeight
    from bert_jax.training import pretraining

    directory = tmp_path_factory.mktemp("run") / "workdir"
    with _optimizations(True):  # whichever module asks first
        parts = [CorpusWeight(tiny_corpus)]
        progress = pretraining.pretrain(tiny_config, parts, directory, make_programs=tiny_programs())
    assert progress.cursor.step == tiny_config.total_steps
    return directory


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory, tiny_run) -> Path:
    """`tiny_run` in Hugging Face form. Read only."""
    from bert_jax.convert.conversion import convert

    directory = tmp_path_factory.mktemp("export") / "model"
    convert(tiny_run, directory, "huggingface")
    return directory


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory) -> Path:
    """The files of `sst2`, `tagging` and `squad2` in directories with these names. Read only."""
    from tests.finetune import task_files

    directory = tmp_path_factory.mktemp("tasks")
    task_files.write_glue(directory / "sst2", "sst2")
    task_files.write_tagging(directory / "tagging")
    task_files.write_squad(directory / "squad2", unanswerable=True)
    return directory


@pytest.fixture(scope="session")
def sst2_run(task_folder, tiny_run, tmp_path_factory) -> Path:
    """`tiny_run` fine-tuned on `sst2` in 40 steps, compiled as with `quick_compilation`. Read only."""
    from bert_jax.finetune import finetune
    from bert_jax.finetune.options import FinetuneOptions

    directory = tmp_path_factory.mktemp("finetuned") / "sst2"
    options = FinetuneOptions(steps=40, batch_size=16, learning_rate=5e-3, dropout=0.0)
    with _optimizations(False):
        finetune.finetune(tiny_run, "sst2", task_folder / "sst2", directory, options)
    return directory


@pytest.fixture(scope="session")
def two_phases(tiny_config) -> Config:
    """`tiny_config` with a second, longer phase, for streams and schedules."""
    first = dataclasses.replace(tiny_config.phases[0], steps=7, batch_size=24, seq_len=24)
    second = dataclasses.replace(tiny_config.phases[0], steps=5, batch_size=4, seq_len=48)
    return dataclasses.replace(tiny_config, phases=(first, second))


@pytest.fixture(scope="session")
def s3_server():
    """A server that speaks S3's protocol: its address, and what it has been asked so far."""
    pytest.importorskip("moto", reason="needs the extra `stores`")
    from tests import stores

    with stores.s3_server() as server:
        yield server


@contextlib.contextmanager
def _optimizations(wanted: bool):
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not wanted)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def quick_compilation():
    """Half the time to compile for modules that do little else; what is computed is the same to rounding."""
    with _optimizations(False):
        yield


@pytest.fixture(scope="session")
def tiny_programs():
    """See `runs.share_programs`; shared by all tests of a process."""
    from tests.runs import share_programs

    return share_programs()
