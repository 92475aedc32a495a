"""Parity with transformers, live: numbers, files, tokenizers and predictions. Needs the extra `parity`."""

import numpy as np
import pytest

import bert_jax
from bert_jax.convert.conversion import convert
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.translate import NativeModel
from tests.golden import recipe
from tests.golden.make_parity import PATH, run_reference

pytestmark = [
    pytest.mark.slow,
    # Warnings inside torch and transformers are not errors here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_goldens_are_what_the_reference_gives():
    golden = np.load(PATH)
    reference = run_reference(recipe.SETTINGS, int(golden["seed"]), tuple(golden["lengths"].tolist()))
    for name, values in reference.items():
        np.testing.assert_allclose(golden[name], values, rtol=0, atol=1e-5, err_msg=name)


TEXTS = ["the river sings over the old stone.", "Quick, WIND falls!", "Über das [MASK] und unter 12345", "a"]


def test_their_tools_open_our_export(tiny_export, tiny_run):
    loaded_model = bert_jax.load(tiny_run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_export)
    for text in TEXTS:
        special = text.replace("[MASK]", "[PAD]") if "[MASK]" in text else text
        expected = [
            loaded_model.tokenizer.cls_id,
            *loaded_model.tokenizer.encode(special, specials=True),
            loaded_model.tokenizer.sep_id,
        ]
        assert tokenizer(special)["input_ids"] == expected
    batch = tokenizer([TEXTS[0], TEXTS[1]], [TEXTS[1], TEXTS[3]], return_tensors="pt", padding=True)
    assert (batch["attention_mask"] == 0).any() and (batch["token_type_ids"] == 1).any()
    model, report = transformers.BertForPreTraining.from_pretrained(tiny_export, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        hf_output = model.eval()(**batch, output_hidden_states=True)
    arrays = [batch[name].numpy().astype(np.int32) for name in ("input_ids", "token_type_ids", "attention_mask")]
    found = jax_forward.run(
        NativeModel("bert", loaded_model.config, loaded_model.heads, loaded_model.params), ForwardInputs(*arrays)
    )
    np.testing.assert_allclose(found.hidden_states, torch.stack(hf_output.hidden_states).numpy(), atol=1e-4)
    np.testing.assert_allclose(found.logits["mlm"], hf_output.prediction_logits.numpy(), atol=1e-4)
    np.testing.assert_allclose(found.logits["pair"], hf_output.seq_relationship_logits.numpy(), atol=1e-4)


def test_hidden_states_and_attentions_of_texts(tiny_export):
    """Outputs of a loaded model compared with transformers, at real tokens."""
    loaded_model = bert_jax.load(tiny_export).forward([TEXTS[0], TEXTS[3]], hidden_states=True, attentions=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_export)
    model = transformers.BertModel.from_pretrained(tiny_export, attn_implementation="eager").eval()
    batch = tokenizer([TEXTS[0], TEXTS[3]], return_tensors="pt", padding=True)
    with torch.no_grad():
        hf_output = model(**batch, output_hidden_states=True, output_attentions=True)
    real = loaded_model.attention_mask > 0
    assert real.tolist() == (batch["attention_mask"] > 0).tolist() and not real.all()
    hidden = torch.stack(hf_output.hidden_states).numpy()
    np.testing.assert_allclose(loaded_model.hidden_states[:, real], hidden[:, real], atol=1e-4)
    attentions = torch.stack(hf_output.attentions).numpy()
    assert loaded_model.attentions.shape == attentions.shape
    for text in range(2):
        length = int(real[text].sum())
        np.testing.assert_allclose(
            loaded_model.attentions[:, text, :, :length], attentions[:, text, :, :length], atol=1e-5
        )
    np.testing.assert_allclose(loaded_model.pooled, hf_output.pooler_output.numpy(), atol=1e-4)


def test_their_pipeline_fills_our_masks(tiny_export, tiny_run):
    pipeline = transformers.pipeline("fill-mask", model=str(tiny_export), device="cpu", top_k=5)
    loaded_model = bert_jax.load(tiny_run)
    for text in ("the [MASK] sings.", "a slow river [MASK] over the stone"):
        (expected,) = loaded_model.fill_mask(text, top=5)
        # transformers includes padding rows of the vocabulary; compare only real tokens.
        size = loaded_model.tokenizer.vocab_size
        hf_output = [found for found in pipeline(text, top_k=loaded_model.config.vocab_size) if found["token"] < size]
        assert [found["token"] for found in hf_output[:5]] == [candidate.token_id for candidate in expected]
        scores = [found["score"] for found in hf_output[:5]]
        np.testing.assert_allclose(scores, [candidate.probability for candidate in expected], rtol=1e-3)


def test_round_trip_is_bit_identical(tiny_run, tiny_export, tmp_path):
    convert(tiny_export, tmp_path / "again", "huggingface")
    for name in ("model.safetensors", "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny_export / name).read_bytes(), name
