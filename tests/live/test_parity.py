"""Parity with transformers, live: numbers, files, tokenizers and predictions. Needs the extra `parity`."""

import json

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import inference
from bert_jax.config import ModelConfig
from bert_jax.convert import huggingface
from bert_jax.model import whole
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.tokenizer import Tokenizer
from tests.golden import recipe
from tests.golden.make_parity import PATH, run_reference

pytestmark = [
    pytest.mark.slow,
    # What torch and transformers warn about among themselves is theirs.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "narrow and deep": recipe.SETTINGS | {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 96},
    "wide and short": {
        "vocab_size": 1009,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
    },
}


def our_config(settings, **changes) -> ModelConfig:
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
        max_positions=settings["max_position_embeddings"],
        **changes,
    )


def shapes(config, pair):
    return whole.shapes(config, Heads(pair=pair))


def forward(config, params, theirs) -> dict[str, np.ndarray]:
    ids = theirs["input_ids"]
    place = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    cls = np.zeros((len(ids), 1), np.int32)
    inputs = EncoderInputs(ids, theirs["token_type_ids"], theirs["attention_mask"], place, cls)

    @jax.jit
    def run(params, inputs):
        model = whole.bind(config, Heads(pair="pair" in params), params)
        output = model.encoder(inputs, hidden_states=True)
        found = {
            "hidden_states": output.hidden_states,
            "mlm_logits": model.mlm(output.hidden, model.encoder.embeddings.attend),
        }
        return found | ({"pair_logits": model.pair(output.pooled)[:, 0]} if model.pair else {})

    return jax.tree.map(np.asarray, run(params, inputs))


@pytest.mark.parametrize("attention", ["reference", "xla"])
@pytest.mark.parametrize("size", SIZES)
def test_numbers(size, attention):
    """Every hidden state, padding included, and both logits, within 1e-4 in float32."""
    settings, seed = SIZES[size], 5
    longest = settings["max_position_embeddings"]
    lengths = (longest, longest // 2, 7, longest - 1)
    theirs = recipe.make_inputs(settings, lengths, seed)
    assert (theirs["attention_mask"] == 0).any() and theirs["token_type_ids"].any()
    config = our_config(settings, attention=attention, attention_dropout=0.0)
    weights = recipe.make_weights(settings, seed)
    params = huggingface.from_tensors(config, weights.__getitem__, shapes(config, True), "recipe")
    ours, reference = forward(config, params, theirs), run_reference(settings, seed, lengths)
    assert ours["hidden_states"].shape == (settings["num_hidden_layers"] + 1, 4, longest, settings["hidden_size"])
    for name, values in reference.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-4, err_msg=name)


def test_goldens_are_what_the_reference_gives():
    golden = np.load(PATH)
    reference = run_reference(recipe.SETTINGS, int(golden["seed"]), tuple(golden["lengths"].tolist()))
    for name, values in reference.items():
        np.testing.assert_allclose(golden[name], values, rtol=0, atol=1e-5, err_msg=name)


TEXTS = ["the river sings over the old stone.", "Quick, WIND falls!", "Über das [MASK] und unter 12345", "a"]


def test_their_tools_open_our_export(tiny_export, tiny_run):
    ours = bert_jax.load(tiny_run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_export)
    for text in TEXTS:
        special = text.replace("[MASK]", "[PAD]") if "[MASK]" in text else text
        expected = [ours.tokenizer.cls_id, *ours.tokenizer.encode(special, specials=True), ours.tokenizer.sep_id]
        assert tokenizer(special)["input_ids"] == expected
    batch = tokenizer([TEXTS[0], TEXTS[1]], [TEXTS[1], TEXTS[3]], return_tensors="pt", padding=True)
    assert (batch["attention_mask"] == 0).any() and (batch["token_type_ids"] == 1).any()
    model, report = transformers.BertForPreTraining.from_pretrained(tiny_export, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model.eval()(**batch, output_hidden_states=True)
    found = forward(ours.config, ours.params, {name: array.numpy().astype(np.int32) for name, array in batch.items()})
    np.testing.assert_allclose(found["hidden_states"], torch.stack(theirs.hidden_states).numpy(), atol=1e-4)
    np.testing.assert_allclose(found["mlm_logits"], theirs.prediction_logits.numpy(), atol=1e-4)
    np.testing.assert_allclose(found["pair_logits"], theirs.seq_relationship_logits.numpy(), atol=1e-4)


def test_their_pipeline_fills_our_masks(tiny_export, tiny_run):
    pipeline = transformers.pipeline("fill-mask", model=str(tiny_export), device="cpu", top_k=5)
    ours = bert_jax.load(tiny_run)
    for text in ("the [MASK] sings.", "a slow river [MASK] over the stone"):
        (expected,) = ours.fill_mask(text, top=5)
        # Theirs counts rows of the table that no token stands for; compare among real tokens.
        size = ours.tokenizer.vocab_size
        theirs = [found for found in pipeline(text, top_k=ours.config.vocab_size) if found["token"] < size]
        assert [found["token"] for found in theirs[:5]] == [candidate.token_id for candidate in expected]
        total = sum(found["score"] for found in theirs)
        scores = [found["score"] / total for found in theirs[:5]]
        np.testing.assert_allclose(scores, [candidate.probability for candidate in expected], rtol=1e-3)


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForMaskedLM"])
def test_we_read_what_they_saved(kind, tmp_path, tiny_corpus):
    settings = SIZES["wide and short"] | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.BertConfig(**settings)).eval()
    model.save_pretrained(tmp_path / "theirs")
    config, params = huggingface.read(tmp_path / "theirs", shapes)
    assert ("pair" in params) == (kind == "BertForPreTraining")
    assert (config.activation, config.norm_epsilon) == ("gelu_tanh", 1e-6)
    inputs = recipe.make_inputs(settings, (30, 11), 3)
    with torch.no_grad():
        tensors = {name: torch.tensor(array).long() for name, array in inputs.items()}
        output = model(**tensors, output_hidden_states=True)
    ours = forward(config, params, inputs)
    np.testing.assert_allclose(ours["hidden_states"], torch.stack(output.hidden_states).numpy(), atol=1e-4)
    logits = output.prediction_logits if kind == "BertForPreTraining" else output.logits
    np.testing.assert_allclose(ours["mlm_logits"], logits.numpy(), atol=1e-4)

    # Ours again, theirs again: every tensor bit for bit.
    tokenizer = Tokenizer.load(tiny_corpus)
    huggingface.write(tmp_path / "ours", config, params, tokenizer, "card")
    again, report = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [kind]


def test_round_trip_is_bit_identical(tiny_run, tiny_export, tmp_path):
    inference.export(tiny_export, tmp_path / "again")
    for name in ("model.safetensors", "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny_export / name).read_bytes(), name
