"""A run of replaced-token detection: measured, read, exported, fine-tuned and started from."""

import dataclasses
import json

import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import CheckpointConfig
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.formats.input_formats import open_model
from bert_jax.convert.init_from import load_initial_params
from bert_jax.errors import UserError
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import pretraining
from bert_jax.training.eval_metrics import format_metrics
from tests.finetune.task_files import write_glue
from tests.runs import arrays, final_state

TABLES = ("word", "position", "token_type")


@pytest.fixture(scope="module")
def config(plain_config):
    """Disentangled embeddings of another width than either model's."""
    return config_lib.replace(
        plain_config,
        model={"embedding_size": 24},
        objective={
            "token": "rtd",
            "pair": "none",
            "mask_token_share": 0.85,
            "random_token_share": 0.0,
            "generator_width": 0.5,
            "generator_embeddings": "disentangled",
        },
        phases=(dataclasses.replace(plain_config.phases[0], steps=6),),
        checkpoint=CheckpointConfig(every=2, keep=9),
    )


@pytest.fixture(scope="module")
def trained(config, train, tmp_path_factory):
    """A finished run and its last evaluation."""
    directory = tmp_path_factory.mktemp("rtd") / "run"
    return directory, train(config, directory).evaluation


def test_what_is_measured(trained):
    _, found = trained
    names = {"rtd_loss", "rtd_accuracy", "rtd_recall", "rtd_auc", "rtd_replaced", "generator_loss"}
    names |= {"generator_accuracy", "generator_perplexity", "unigram_loss", "unigram_accuracy"}
    assert found.keys() - {"rtd_precision"} == names and 0.5 < found["rtd_auc"] < 1 and 0 < found["rtd_replaced"] < 0.2
    for name in ("generator_loss", "rtd_loss", "rtd_auc"):
        assert f"{name} {found[name]:.4f}" in format_metrics(found)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Both models in the form of transformers, which share no tables."""
    directory = tmp_path_factory.mktemp("exported")
    for part in ("model", "generator"):
        assert cli.main(["convert", str(trained[0]), str(directory / part), "--part", part]) == 0
    return directory


def test_both_parts_are_read_and_exported(trained, config, exported):
    """Differences are added exactly, and both exports pass the parity report."""
    params = arrays(final_state(trained[0], config)[0].params)
    for part, name in (("model", "ElectraForPreTraining"), ("generator", "ElectraForMaskedLM")):
        with open_model(trained[0], ReadOptions(part=part)) as source:
            found = arrays(source.model.params)
        for table in TABLES:
            path = f"encoder/embeddings/{table}"
            expected = params[f"generator/{path}"] + (params[path] if part == "model" else 0)
            assert np.any(params[path])
            np.testing.assert_array_equal(found[path], expected)
        assert not any(path.startswith("generator/") for path in found)
        assert json.loads((exported / part / "config.json").read_text())["architectures"] == [name]
    assert [len(found.token) > 0 for found in bert_jax.load(exported / "generator").fill_mask("the [MASK] sings.")[0]]
    with open_model(trained[0], ReadOptions(optimizer_state=True)) as source:
        assert arrays(source.optimizer_state.mu).keys() == arrays(source.model.params).keys()


def test_other_models_have_no_generator(tiny_run, tmp_path):
    for source in (tiny_run, epath.Path(tmp_path)):
        with pytest.raises(UserError, match="--part generator: "):
            convert(source, epath.Path(tmp_path / "out"), "huggingface", ReadOptions(part="generator"))


def test_a_run_starts_from_both_models_or_from_the_discriminator(trained, config, tiny_corpus, capsys):
    tokenizer = Tokenizer.load(tiny_corpus)
    start = dataclasses.replace(config.start, source=str(trained[0]))
    again = load_initial_params(dataclasses.replace(config, start=start), tokenizer).params
    expected = arrays(final_state(trained[0], config)[0].params)
    for name, array in arrays(again).items():
        np.testing.assert_array_equal(array, expected[name])
    shared = config_lib.replace(config, start=start, objective={"generator_embeddings": "shared"})
    with pytest.raises(UserError, match=r"set objective\.generator_embeddings disentangled"):
        load_initial_params(shared, tokenizer)
    layers = config.model.num_layers
    deeper = config_lib.replace(config, start=start, objective={"generator_layers": layers + 2})
    message = f"a generator of {layers} layers, this run's has {layers + 2}: set objective.generator_layers {layers}"
    with pytest.raises(UserError, match=message):
        load_initial_params(deeper, tokenizer)
    deep = config_lib.replace(config, start=start, model={"num_layers": 2 * layers})  # the generator follows
    found = arrays(load_initial_params(deep, tokenizer).params)
    assert len(found["generator/encoder/layers/qkv/bias"]) == 2 * layers
    masked = config_lib.replace(config, start=start, objective={"token": "mlm"})
    found = arrays(load_initial_params(masked, tokenizer).params)
    path = "encoder/embeddings/word"
    np.testing.assert_array_equal(found[path], expected[path] + expected[f"generator/{path}"])
    assert "initialized at random: mlm/bias" in capsys.readouterr().err


def from_exports(config, exported, **changes):
    start = dataclasses.replace(
        config.start, source=str(exported / "model"), generator=str(exported / "generator"), **changes
    )
    return dataclasses.replace(config, start=start)


def test_a_run_starts_from_two_published_models(trained, config, exported, tiny_corpus, capsys):
    """Differences of tables are those of the run they came from; nothing is new."""
    found = arrays(load_initial_params(from_exports(config, exported), Tokenizer.load(tiny_corpus)).params)
    expected = arrays(final_state(trained[0], config)[0].params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-7, err_msg=name)
    assert "initialized at random: nothing" in capsys.readouterr().err


def test_generators_that_do_not_belong(trained, config, exported, tiny_run, other_corpus, tiny_corpus):
    tokenizer = Tokenizer.load(tiny_corpus)
    good, start = from_exports(config, exported), config_lib.replace
    cases = (
        (start(good, objective={"generator_embeddings": "shared"}), "is not that of start.source: set objective.gen"),
        (start(good, objective={"generator_width": 1.0}), "this run's generator 64: set objective.generator_width 0.5"),
        (start(good, start={"generator": str(exported / "model")}), "has no MLM head"),
        (start(good, objective={"token": "mlm"}), "set objective.token rtd"),
        (start(good, start={"source": str(trained[0])}), "has a generator: leave start.generator out"),
        (start(good, start={"generator": str(exported / "nowhere")}), "nowhere does not exist"),
    )
    for changed, message in cases:
        with pytest.raises(UserError, match=message):
            load_initial_params(changed, tokenizer)
    with pytest.raises(UserError, match=r"does not go with start\.generator"):
        start(good, start={"optimizer_state": "keep"})


@pytest.mark.slow
def test_both_models_are_adapted(config, exported, tiny_corpus, second_corpus, tmp_path, capsys):
    """`bert-jax adapt` with a discriminator, which alone is refused."""
    words = ["adapt", str(exported / "model"), "--corpus", str(second_corpus), "--general", str(tiny_corpus)]
    words += ["--workdir", str(tmp_path / "run"), "--phases.0.steps", "2", "--phases.0.seq-len", "32"]
    words += ["--phases.0.batch-size", "8", "--evaluation.rows", "8", "--log.no-tensorboard"]
    assert cli.main(words) == 2
    flags = "--objective.token rtd --objective.mask-token-share 0.85 --objective.random-token-share 0 --start.generator"
    assert f"or continue both with {flags} GENERATOR" in capsys.readouterr().err
    words += [*flags.split(), str(exported / "generator"), "--objective.generator-width", "0.5"]
    assert cli.main([*words, "--objective.generator-embeddings", "disentangled"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    for text in results["texts"]:
        assert set(text["metrics"]) == {"generator_loss", "generator_accuracy", "rtd_loss", "rtd_accuracy"}
        assert all(0 <= one["before"] < 6 for one in text["metrics"].values())
    assert "rtd_loss" in capsys.readouterr().out


def test_it_is_evaluated_like_the_run(trained, tiny_corpus):
    """On rows of its own length, all metrics are those of its last evaluation."""
    from bert_jax.data.mixture import CorpusWeight

    found = pretraining.evaluate(trained[0], [CorpusWeight(tiny_corpus)]).metrics
    assert found.keys() == trained[1].keys()
    for name, value in trained[1].items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_discriminator_is_fine_tuned(trained, tmp_path):
    data = write_glue(tmp_path / "sst2", "sst2")
    command = ["finetune", str(trained[0]), "--task", "sst2", "--data", str(data), "--workdir", str(tmp_path / "tuned")]
    assert cli.main([*command, "--epochs", "1", "--max-length", "32"]) == 0
