"""Starting from another model: another depth, another vocabulary, frozen parts."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.convert.formats import input_formats, native
from bert_jax.convert.init_from import VOCABULARY_PARAMS, load_initial_params
from bert_jax.convert.vocabulary_transfer import source_pieces
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.inference import loaded_model
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer, wordpiece
from bert_jax.training import pretraining
from bert_jax.training.state import repeat_layers
from data_prep.cli import main as bert_data
from tests.building import make_documents
from tests.runs import Killed, arrays, assert_same_arrays, kill_after

pytestmark = pytest.mark.usefixtures("quick_compilation")
pretrain = functools.partial(pretraining.pretrain, load_initial_params=load_initial_params)


def starting(config: Config, source, embeddings: str = "keep", **model) -> Config:
    """A run of the same recipe that starts from `source`."""
    changed = dataclasses.replace(config.model, **model)
    return config_lib.replace(
        config, name="second", model=changed, start={"source": str(source), "embeddings": embeddings}
    )


def short(config: Config) -> Config:
    """Two updates, and no evaluation."""
    phase = dataclasses.replace(config.phases[0], steps=2, warmup_steps=0)
    return config_lib.replace(config, phases=(phase,), evaluation={"every": 0})


@pytest.mark.parametrize("kind", ["run", "export"])
def test_a_deeper_model_repeats_the_layers(tiny_config, tiny_corpus, tiny_run, tiny_export, kind):
    source = tiny_run if kind == "run" else tiny_export
    config = starting(tiny_config, source, num_layers=3)
    found, there = (
        arrays(load_initial_params(config, Tokenizer.load(tiny_corpus)).params),
        arrays(loaded_model.load(source).params),
    )
    assert found.keys() == there.keys()
    for name, array in there.items():
        expected = np.concatenate([array] * 3) if "/layers/" in name else array
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_blocks_are_repeated_in_their_order():
    """0 1 2 becomes 0 1 2 0 1 2; a smaller depth drops the last layers."""
    tree = {"encoder": {"layers": {"bias": np.arange(3)}, "embeddings": {"word": np.arange(5)}}}
    for depth, expected in ((6, [0, 1, 2, 0, 1, 2]), (4, [0, 1, 2, 0]), (2, [0, 1]), (3, [0, 1, 2])):
        like = {"encoder": {"layers": {"bias": np.zeros(depth)}, "embeddings": {"word": np.zeros(5)}}}
        found = repeat_layers(tree, like)["encoder"]
        assert found["layers"]["bias"].tolist() == expected and found["embeddings"]["word"].tolist() == [0, 1, 2, 3, 4]


def test_a_head_that_the_source_lacks_is_drawn(tiny_config, tiny_corpus, tiny_run, tmp_path, capsys):
    config = config_lib.replace(starting(tiny_config, tiny_run), objective={"pair": "none"})
    found = arrays(load_initial_params(config, Tokenizer.load(tiny_corpus)).params)
    assert not any(name.startswith("pair/") or "pooler" in name for name in found)
    assert "initialized at random: nothing" in capsys.readouterr().err
    with input_formats.open_model(tiny_run) as source_model:
        params = {name: part for name, part in source_model.model.params.items() if name != "pair"}
        params["encoder"] = {name: part for name, part in params["encoder"].items() if name != "pooler"}
        heads = dataclasses.replace(source_model.model.heads, pair=False, pooler=False)
        model = source_model.model._replace(heads=heads, params=params)
        native.write(dataclasses.replace(source_model, model=model), tmp_path)
    again = arrays(load_initial_params(starting(tiny_config, tmp_path), Tokenizer.load(tiny_corpus)).params)
    assert {"pair/dense/kernel", "encoder/pooler/kernel"} <= again.keys()
    assert (
        "initialized at random: encoder/pooler/bias, encoder/pooler/kernel, pair/dense/bias" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_new_embeddings_on_a_frozen_body(tiny_config, tiny_run, other_corpus, tmp_path):
    """Another vocabulary: only what belongs to it is trained (Artetxe et al. 2020)."""
    tokens = Tokenizer.load(other_corpus).vocab_size
    config = starting(tiny_config, tiny_run, "new", vocab_size=tokens)
    frozen = dataclasses.replace(
        config.phases[0], frozen=("layers/.*", "position|token_type", "norm/.*", "(pooler|transform|dense)/.*")
    )
    config = short(dataclasses.replace(config, phases=(frozen,)))
    start = arrays(load_initial_params(config, Tokenizer.load(other_corpus)).params)
    pretrain(config, [CorpusWeight(other_corpus)], tmp_path / "run")
    source, trained = arrays(loaded_model.load(tiny_run).params), arrays(loaded_model.load(tmp_path / "run").params)
    for name in trained:
        if name in VOCABULARY_PARAMS:
            assert trained[name].shape[0] == tokens and not np.array_equal(trained[name], start[name])
        else:
            np.testing.assert_array_equal(trained[name], source[name], err_msg=name)


@pytest.mark.slow
def test_what_a_run_started_from_is_not_needed_again(tiny_config, tiny_corpus, tiny_run, tiny_programs, tmp_path):
    """It is stopped before its first own checkpoint, the source goes, and the same command continues."""
    source, parts = shutil.copytree(tiny_run, tmp_path / "source"), [CorpusWeight(tiny_corpus)]
    config = short(starting(tiny_config, source, num_layers=2))
    undisturbed = pretrain(config, parts, tmp_path / "undisturbed", make_programs=tiny_programs())
    with pytest.raises(Killed):
        pretrain(config, parts, tmp_path / "run", make_programs=tiny_programs(after_step=kill_after(1)))
    shutil.rmtree(source)
    assert pretrain(config, parts, tmp_path / "run", make_programs=tiny_programs()) == undisturbed
    found, expected = (loaded_model.load(tmp_path / place).params for place in ("run", "undisturbed"))
    assert_same_arrays(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "has model.hidden_size 64, this run 128: only the depth and, with start.embeddings new"),
        ({"max_positions": 32}, "has model.max_positions 64, this run 32"),
        ({"activation": "relu"}, "has model.activation gelu, this run relu"),
        ({"vocab_size": 200}, "embeddings/word has shape [120, 64], this run needs [200, 64]"),
    ],
)
def test_other_widths_are_refused(tiny_config, tiny_corpus, tiny_run, tmp_path, change, message):
    config = starting(tiny_config, tiny_run, **change)
    with pytest.raises(UserError) as caught:
        pretrain(config, [CorpusWeight(tiny_corpus)], tmp_path / "run")
    assert message in str(caught.value) and not (tmp_path / "run").exists()


def test_a_head_with_another_activation_is_refused(tiny_config, tiny_corpus, tiny_run, tmp_path):
    """Published models may have one, runs have that of the layers."""
    with input_formats.open_model(tiny_run) as source_model:
        heads = dataclasses.replace(source_model.model.heads, mlm_activation="relu")
        changed = dataclasses.replace(source_model, model=source_model.model._replace(heads=heads))
        native.write(changed, tmp_path)
    with pytest.raises(UserError, match="has an MLM head with relu, this run's has gelu"):
        load_initial_params(starting(tiny_config, tmp_path), Tokenizer.load(tiny_corpus))


def test_another_tokenizer_is_refused(tiny_config, tiny_run, other_corpus, tmp_path):
    with pytest.raises(
        UserError, match=r"was trained with another tokenizer than the corpus.*start.embeddings transfer"
    ):
        pretrain(starting(tiny_config, tiny_run), [CorpusWeight(other_corpus)], tmp_path / "run")
    assert not (tmp_path / "run").exists()


SOURCE_PIECES = [*SPECIAL_TOKENS, "my", "##o", "##card", "##ium", "card", "ium", "a", "##a", "heart"]
NEW_PIECES = ["heart", "[MASK]", "[UNK]", "[PAD]", "[CLS]", "[SEP]", "my", "myocard", "##ium", "##cardium", "zz", "a"]
BY_HAND = {
    "myocard": ["my", "##o", "##card"],
    "##cardium": ["##card", "##ium"],
    "zz": ["[UNK]"],
}
"""The source's pieces of the tokens that it lacks."""


def test_transferred_embeddings(tiny_config, tiny_run, tmp_path):
    """Rows of tokens that both have stay, others are means of the rows of their old pieces, biases likewise."""
    config = starting(tiny_config, tmp_path, "transfer", vocab_size=14)
    with input_formats.open_model(tiny_run) as source_model:
        params = jax.tree.map(np.asarray, source_model.model.params)
        params["encoder"]["embeddings"]["word"] = params["encoder"]["embeddings"]["word"][: len(SOURCE_PIECES)]
        params["mlm"]["bias"] = params["mlm"]["bias"][: len(SOURCE_PIECES)]
        smaller = dataclasses.replace(source_model.model.config, vocab_size=len(SOURCE_PIECES))
        model = source_model.model._replace(config=smaller, params=params)
        (tmp_path / "vocab").mkdir()
        wordpiece(SOURCE_PIECES, True, "the source").save(tmp_path / "vocab" / "tokenizer.json")
        native.write(dataclasses.replace(source_model, model=model, tokenizer_path=tmp_path / "vocab"), tmp_path)
    tokenizer = wordpiece(NEW_PIECES, True, "the domain")
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("myocardium zz")] == ["myocard", "##ium", "zz"]
    found, old = arrays(load_initial_params(config, tokenizer).params), arrays(params)
    drawn = arrays(load_initial_params(starting(tiny_config, tmp_path, "new", vocab_size=14), tokenizer).params)
    for name in found:
        if name not in VOCABULARY_PARAMS:
            np.testing.assert_array_equal(found[name], old[name], err_msg=name)
            continue
        for row, piece in enumerate(NEW_PIECES):
            own = [SOURCE_PIECES.index(part) for part in BY_HAND.get(piece, [piece])]
            np.testing.assert_allclose(found[name][row], sum(old[name][i] for i in own) / len(own), rtol=1e-6)
        np.testing.assert_array_equal(found[name][len(NEW_PIECES) :], drawn[name][len(NEW_PIECES) :])


@pytest.mark.parametrize("kind", ["byte-bpe", "sentencepiece-bpe"])
def test_pieces_of_other_vocabularies(tmp_path, kind):
    """A larger vocabulary of the same text: a new piece is what the smaller one makes of its text, at the beginning of
    a word or inside of one."""
    (tmp_path / "text.txt").write_text("\n\n".join(make_documents(3, 40)))
    sizes = (300, 330) if kind == "byte-bpe" else (60, 75)
    for size in sizes:
        train = f"tokenizer --source text:{tmp_path}/text.txt --kind {kind} --vocab-size {size}"
        assert bert_data.main([*train.split(), "--out", f"{tmp_path}/{size}.json"]) == 0
    source, tokenizer = (Tokenizer.load(tmp_path / f"{size}.json") for size in sizes)
    pieces = source_pieces(source, tokenizer)
    new = [i for i in range(tokenizer.vocab_size) if source.token_to_id(tokenizer.id_to_token(i)) is None]
    assert len(new) > 5 and len(pieces) == tokenizer.vocab_size
    for i, ids in enumerate(pieces):
        assert "".join(map(source.id_to_token, ids)) == tokenizer.id_to_token(i)
        assert (len(ids) > 1) == (i in new)


def test_pieces_of_another_kind_are_not_transferred(tiny_config, tiny_run, monkeypatch):
    tokenizer = wordpiece(NEW_PIECES, True, "the domain")
    monkeypatch.setattr(tokenizer, "kind", "Unigram")
    with pytest.raises(UserError, match=r"has a WordPiece tokenizer, the corpus Unigram.*set start.embeddings new"):
        load_initial_params(starting(tiny_config, tiny_run, "transfer"), tokenizer)
