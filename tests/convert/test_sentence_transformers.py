"""Directories as sentence-transformers saves them: what `encode` makes of them, and that conversions keep them."""

import json
import shutil

import numpy as np
import pytest

import bert_jax
from bert_jax.convert.conversion import convert
from bert_jax.convert.sentence_transformers import SentenceEmbedding, read_sentence_embedding
from bert_jax.errors import UserError

OLD = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
NEW = [
    ("base.modules.transformer.Transformer", ""),
    ("sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
    ("base.modules.normalize.Normalize", "2_Normalize"),
]


def write(directory, modules, **configs):
    """modules.json and configs: `pooling` of the module, `settings` and `encoder` of the directory."""
    prefix = "sentence_transformers." if "." in modules[0][0] else "sentence_transformers.models."
    described = [
        {"idx": i, "name": str(i), "path": folder, "type": kind if kind.startswith("my.") else prefix + kind}
        for i, (kind, folder) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(described))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    names = {"settings": "config_sentence_transformers.json", "encoder": "sentence_bert_config.json"}
    for name, config in {"pooling": {}, **configs}.items():
        (directory / names.get(name, "1_Pooling/config.json")).write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("modules", "configs", "expected"),
    [
        (OLD, {}, {"normalize": True}),
        (OLD[:2], {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}, {"pooling": "cls"}),
        (
            OLD[:2],
            {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}},
            {"pooling": ("max", "mean")},
        ),
        (
            NEW,
            {"pooling": {"pooling_mode": "mean_sqrt_len_tokens", "include_prompt": False}},
            {"pooling": "mean_sqrt_len_tokens", "include_prompt": False, "normalize": True},
        ),
        (NEW[:2], {"pooling": {"pooling_mode": ["mean", "cls"]}}, {"pooling": ("mean", "cls")}),
        (
            OLD[:2],
            {
                "pooling": {"word_embedding_dimension": 32},
                "encoder": {"max_seq_length": 9, "do_lower_case": True},
                "settings": {"prompts": None},
            },
            {"max_length": 9, "lowercase": True},
        ),
        (
            OLD[:2],
            {"settings": {"prompts": {"query": "the "}, "default_prompt_name": "query"}},
            {"prompts": {"query": "the "}, "default_prompt": "the "},
        ),
    ],
)
def test_what_is_read(tmp_path, modules, configs, expected):
    found = read_sentence_embedding(write(tmp_path, modules, **configs), 32)
    pooling = expected.get("pooling", "mean")
    modes = {"pooling": (pooling,) if isinstance(pooling, str) else pooling}
    assert found == SentenceEmbedding(**{**expected, **modes}, files=found.files)
    assert set(found.files) == {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.json")}


def test_the_tokenizer_knows_the_maximum_where_the_encoder_does_not(tmp_path):
    write(tmp_path, NEW)
    for length, expected in ((40, 40), (1e30, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        assert read_sentence_embedding(tmp_path, 32).max_length == expected


@pytest.mark.parametrize(
    ("modules", "configs", "message"),
    [
        ([*OLD[:2], ("Dense", "2_Dense")], {}, "the modules .*Dense are not supported: .* remove modules.json to"),
        (OLD[:1], {}, "are not supported"),
        ([("my.Transformer", ""), OLD[1]], {}, "are not supported"),
        ([("Transformer", "0_Transformer"), OLD[1]], {}, "the folders '0_Transformer', '1_Pooling' are not supported"),
        ([OLD[0], ("Pooling", "..")], {}, r"the folders '', '\.\.' are not supported"),
        ([OLD[0], ("Pooling", 3)], {}, "1.path is 3: it must be a string"),
        (OLD, {"pooling": {"pooling_mode": "lasttoken"}}, "'lasttoken'. is not supported: use one or several of cls"),
        (
            OLD,
            {"pooling": {"pooling_mode_weightedmean_tokens": True}},
            "pooling mode .'weightedmean'. is not supported",
        ),
        (OLD, {"pooling": {"pooling_mode_evil_tokens": True}}, "'pooling_mode_evil_tokens' is unknown: remove"),
        (OLD, {"pooling": {"pooling_mode_mean_tokens": False}}, r"pooling mode \[\] is not supported"),
        (OLD, {"pooling": {"word_embedding_dimension": 64}}, "_dimension is 64, but the model's hidden size is 32"),
        (NEW, {"pooling": {"embedding_dimension": 64}}, "_dimension is 64, but the model's hidden size is 32"),
        (OLD, {"pooling": {"include_prompt": "no"}}, "include_prompt is 'no': it must be true or false"),
        (
            OLD,
            {"encoder": {"transformer_task": "fill-mask"}},
            "transformer_task is 'fill-mask': .* remove modules.json",
        ),
        (OLD, {"settings": {"truncate_dim": 8}}, "truncate_dim is 8: it must be None: remove modules.json to read the"),
        (OLD, {"settings": {"prompts": {"a": 1}}}, "prompts.a is 1: it must be a string"),
        (OLD, {"settings": {"default_prompt_name": "a"}}, "default_prompt_name 'a' is not one of its prompts"),
    ],
)
def test_what_is_refused(tmp_path, modules, configs, message):
    with pytest.raises(UserError, match=message) as caught:
        read_sentence_embedding(write(tmp_path, modules, **configs), 32)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '"text"'])
def test_damaged_modules(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(UserError, match=r"modules\.json is (not|nested)"):
        read_sentence_embedding(tmp_path, 32)


TEXTS = ["the river sings", "wind", "over the old stone and the wind over the river"]


def test_encode_does_what_the_directory_says_and_conversions_keep_it(tiny_export, tmp_path):
    source = shutil.copytree(tiny_export, tmp_path / "source")
    write(
        source,
        OLD,
        pooling={"pooling_mode": "max", "include_prompt": False},
        settings={"prompts": {"query": "wind "}, "default_prompt_name": "query"},
        encoder={"max_seq_length": 8, "do_lower_case": True},
    )
    plain, model = bert_jax.load(tiny_export), bert_jax.load(source)
    lowered = [f"wind {text}" for text in TEXTS]
    skip = 1 + len(model.tokenizer.encode("wind"))
    tokens = [plain.forward([text], max_length=8).last_hidden_state[0][skip:] for text in lowered]
    expected = np.stack([hidden.max(0) / np.linalg.norm(hidden.max(0)) for hidden in tokens])
    with pytest.warns(UserWarning, match="1 of 3 texts have more than 8 tokens and were truncated"):
        found = model.encode([TEXTS[0].upper(), *TEXTS[1:]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(plain.encode(TEXTS) - expected).max() > 0.1
    np.testing.assert_array_equal(
        model.encode(TEXTS, "mean", max_length=64, normalize=False, prompt=""), plain.encode(TEXTS)
    )
    for to in ("bert-jax", "huggingface"):
        convert(source, tmp_path / to, to)
        for name in read_sentence_embedding(source, 64).files:
            assert (tmp_path / to / name).read_bytes() == (source / name).read_bytes(), name
        source = tmp_path / to


def test_a_model_of_ours_for_sentence_transformers(tiny_run, tmp_path):
    convert(tiny_run, tmp_path / "out", "huggingface", pooling="cls")
    assert read_sentence_embedding(tmp_path / "out", 64).pooling == ("cls",)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and 'SentenceTransformer("out")' in card
    model = bert_jax.load(tmp_path / "out")
    np.testing.assert_array_equal(model.encode(TEXTS), model.encode(TEXTS, "cls"))
    with pytest.raises(UserError, match="--pooling cls: stablehlo cannot hold a pooling"):
        convert(tiny_run, tmp_path / "served", "stablehlo", pooling="cls")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_decoder": True}))
    for pooling, message in (("cls", "in a causal model"), ("sum", "'sum' is not one of cls, max")):
        with pytest.raises(UserError, match=message):
            convert(tmp_path / "out", tmp_path / "causal", "huggingface", pooling=pooling)
        assert not (tmp_path / "causal").exists()
