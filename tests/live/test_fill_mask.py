"""fill_mask compared with the pipeline of transformers, with a tokenizer that is not WordPiece. Needs `parity`."""

import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax.config import ModelConfig
from bert_jax.convert import tokenizer_files
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import native
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, family_of
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import map_with_paths
from tests.live.small_models import byte_bpe

pytestmark = [
    pytest.mark.slow,
    # Warnings inside torch and transformers are not errors here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """A RoBERTa of random numbers in the native format, with byte-level BPE."""
    scratch, directory = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("native") / "model"
    directory.mkdir()
    tokenizer = byte_bpe(scratch)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 3,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        max_positions=40,
        type_vocab_size=1,
        position_offset=2,
        norm_epsilon=1e-5,
    )
    heads, rng = Heads(mlm=True), np.random.default_rng(1)

    def draw(name, leaf):
        return (name.endswith("/scale") + 0.3 * rng.standard_normal(leaf.shape)).astype(np.float32)

    params = map_with_paths(draw, bert.shapes(config, heads))
    assert family_of(config, heads) == "roberta"
    native.write(SourceModel("test", "test", NativeModel("roberta", config, heads, params)), directory)
    assert tokenizer_files.copy_tokenizer_files(epath.Path(scratch), epath.Path(directory)) == [
        "vocab.json",
        "merges.txt",
    ]
    return directory


TEXTS = ("the <mask> sings.", "he runs<mask> over the stone", "Crème <mask> brûlée")


@pytest.mark.parametrize("format", ["huggingface", "pytorch"])
def test_their_pipeline_fills_our_masks(roberta, format, tmp_path):
    assert convert(epath.Path(roberta), epath.Path(tmp_path / "out"), format).passed
    pipeline = transformers.pipeline("fill-mask", model=str(tmp_path / "out"), device="cpu")
    assert type(pipeline.model).__name__ == "RobertaForMaskedLM" and pipeline.tokenizer.mask_token == "<mask>"
    loaded_model = bert_jax.load(roberta)
    size, best = loaded_model.tokenizer.vocab_size, []
    for text in TEXTS:
        (expected,) = loaded_model.fill_mask(text, top=10)
        # transformers includes padding rows of the vocabulary; compare only real tokens.
        hf_output = [found for found in pipeline(text, top_k=loaded_model.config.vocab_size) if found["token"] < size]
        assert len(hf_output) == size
        assert [found["token"] for found in hf_output[:10]] == [candidate.token_id for candidate in expected]
        scores = [found["score"] for found in hf_output[:10]]
        np.testing.assert_allclose(scores, [candidate.probability for candidate in expected], rtol=1e-3)
        best.append(expected[0].token_id)
    assert len(set(best)) > 1  # what is predicted hangs on the text
