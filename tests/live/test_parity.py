"""A run's export in transformers, live: numbers, files, tokenizers and predictions. Needs the extra `parity`."""

import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax.convert.conversion import convert
from tests.golden import recipe
from tests.golden.make_parity import PATH, run_reference
from tests.live import small_models
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = BESIDE_TRANSFORMERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_goldens_are_what_the_reference_gives():
    golden = np.load(PATH)
    reference = run_reference(recipe.SETTINGS, int(golden["seed"]), tuple(golden["lengths"].tolist()))
    for name, values in reference.items():
        np.testing.assert_allclose(golden[name], values, rtol=0, atol=1e-5, err_msg=name)


TEXTS = ["the river sings over the old stone.", "Quick, WIND falls!", "Über das [PAD] und unter 12345", "a"]


def test_their_tools_open_our_export(tiny_export, tiny_run):
    """Ids with special tokens, the outputs of `forward` at real tokens, and attentions."""
    loaded_model = bert_jax.load(tiny_run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_export)
    ours = loaded_model.tokenizer
    for text in TEXTS:
        expected = [ours.cls_id, *ours.encode(text), ours.sep_id]
        assert tokenizer(text)["input_ids"] == expected
    found = loaded_model.forward([TEXTS[0], TEXTS[3]], hidden_states=True, attentions=True)
    batch = tokenizer([TEXTS[0], TEXTS[3]], return_tensors="pt", padding=True)
    options = {"attn_implementation": "eager", "output_loading_info": True}
    model, report = transformers.BertForPreTraining.from_pretrained(tiny_export, **options)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        hf_output = model.eval().bert(**batch, output_hidden_states=True, output_attentions=True)
    real = found.attention_mask > 0
    assert real.tolist() == (batch["attention_mask"] > 0).tolist() and not real.all()
    hidden = torch.stack(hf_output.hidden_states).numpy()
    np.testing.assert_allclose(found.hidden_states[:, real], hidden[:, real], atol=1e-4)
    attentions = torch.stack(hf_output.attentions).numpy()
    assert found.attentions.shape == attentions.shape
    for text in range(2):
        here = np.index_exp[:, text, :, : real[text].sum()]
        np.testing.assert_allclose(found.attentions[here], attentions[here], atol=1e-5)
    np.testing.assert_allclose(found.pooled, hf_output.pooler_output.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "format", "texts"),
    [
        ("bert", "huggingface", ("the [MASK] sings.", "a slow river [MASK] over the stone")),
        ("roberta", "pytorch", ("the <mask> sings.", "he runs<mask> over the stone", "Crème <mask> brûlée")),
    ],
)
def test_their_pipeline_fills_our_masks(family, format, texts, tmp_path):
    """Of a model in the native format, with WordPiece or byte-level BPE."""
    (tmp_path / "scratch").mkdir()
    small_models.save(family, tmp_path / "saved", tmp_path / "scratch")
    convert(epath.Path(tmp_path / "saved"), epath.Path(tmp_path / "native"), "bert-jax")
    assert convert(epath.Path(tmp_path / "native"), epath.Path(tmp_path / "out"), format).passed
    pipeline = transformers.pipeline("fill-mask", model=str(tmp_path / "out"), device="cpu")
    loaded_model = bert_jax.load(tmp_path / "native")
    size, best = loaded_model.tokenizer.vocab_size, set()
    assert size < loaded_model.config.vocab_size
    for text in texts:
        (expected,) = loaded_model.fill_mask(text, top=10)
        # transformers includes padding rows of the vocabulary; compare only real tokens.
        hf_output = [found for found in pipeline(text, top_k=loaded_model.config.vocab_size) if found["token"] < size]
        assert [found["token"] for found in hf_output[:10]] == [candidate.token_id for candidate in expected]
        scores = [found["score"] for found in hf_output[:10]]
        np.testing.assert_allclose(scores, [candidate.probability for candidate in expected], rtol=1e-3)
        best.add(expected[0].probability)
    assert len(best) == len(texts)  # what is predicted depends on the text
