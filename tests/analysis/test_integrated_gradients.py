"""Integrated gradients: equal to plain loops, complete, and on the page of the viewer with their sign."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.analysis import viewer
from bert_jax.analysis.viewer import integrated_gradients
from bert_jax.analysis.viewer.integrated_gradients import AttributionSettings
from bert_jax.cli import main as cli
from bert_jax.convert.conversion import convert
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from tests.interventions.models import SST2_HEADS, make_model, small_model, write_native

TEXT, POSITION = "the quick river [MASK] over a stone.", 4
CLASSIFIER = Heads(mlm=False, task=SST2_HEADS.task)


@functools.lru_cache(maxsize=1)
def classifier() -> LoadedModel:
    return make_model(CLASSIFIER)


@functools.lru_cache(maxsize=8)
def explained(model: LoadedModel, **settings):
    return viewer.attribute(model, TEXT, settings=AttributionSettings(**settings))


def baseline_of(ids: list[int], model: LoadedModel, filler: int) -> list[int]:
    kept = (model.tokenizer.cls_id, model.tokenizer.sep_id, model.tokenizer.mask_id)
    return [one if one in kept else filler for one in ids]


def in_a_loop(model: LoadedModel, filler: int, points: int):
    """The midpoint rule, one gradient after the other, without padding; the output at both ends."""
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode(TEXT), model.tokenizer.sep_id]
    table = np.asarray(model.params["encoder"]["embeddings"]["word"])
    start, end = table[baseline_of(ids, model, filler)], table[ids]
    inputs = whole_rows(*(jnp.array([one]) for one in (ids, [0] * len(ids), [1] * len(ids))))
    network = bert.model_from_params(analysis_config(model.config), model.heads, model.params)
    target = None

    def output(embedded):
        encoded = network.encoder(inputs, inputs_embeds=embedded[None])
        if model.heads.task:
            return network.task_logits(inputs, network.task_view(inputs, encoded))[0, 0]
        logits = network.mlm(encoded.hidden, network.encoder.embeddings.decoder_table())
        return jax.nn.log_softmax(logits[0, POSITION])

    target = int(output(jnp.asarray(end)).argmax())
    slope = jax.jit(jax.grad(lambda embedded: output(embedded)[target]))
    total = sum(np.asarray(slope(start + (i + 0.5) / points * (end - start)), np.float64) for i in range(points))
    ends = [float(output(jnp.asarray(one))[target]) for one in (end, start)]
    return (total / points * (end - start)).sum(-1), *ends


@pytest.mark.parametrize(("make", "baseline"), [(small_model, "mask"), (small_model, "pad"), (classifier, "mask")])
def test_attributions_are_those_of_a_loop(make, baseline):
    model = make()
    found = explained(model, baseline=baseline)
    filler = model.tokenizer.mask_id if baseline == "mask" else model.tokenizer.pad_id
    of_tokens, value, baseline_value = in_a_loop(model, filler, 300)
    np.testing.assert_allclose(found.of_tokens, of_tokens, atol=1e-5)
    assert (found.value, found.baseline_value) == pytest.approx((value, baseline_value), abs=1e-5)
    assert np.abs(found.of_tokens).max() > 0.05 and np.abs(found.of_tokens).min() < 1e-6
    assert found.of_tokens[[0, POSITION, -1]].tolist() == [0, 0, 0]  # the same in text and baseline


def test_the_baselines_differ():
    mask, pad = (explained(small_model(), baseline=one).of_tokens for one in ("mask", "pad"))
    assert np.abs(mask - pad).max() > 0.01


@pytest.mark.parametrize("make", [small_model, classifier])
def test_attributions_are_complete(make):
    """They sum to the difference of the outputs within 1e-5; with one step they do not, and the gap says so."""
    whole, coarse = explained(make()), explained(make(), steps=1)
    assert abs(whole.value - whole.baseline_value) > 0.05 > 1e-5 > abs(whole.gap)
    assert abs(coarse.gap) > 1e-3
    assert coarse.gap == pytest.approx(coarse.of_tokens.sum() - (coarse.value - coarse.baseline_value))
    for shares in whole.beside.values():
        assert shares.sum() == pytest.approx(1) and (shares >= 0).all()


def test_outputs():
    model = small_model()
    (candidate,) = model.fill_mask(TEXT, top=1)[0]
    assert explained(model).output == f"log-probability of {candidate.token} at token {POSITION} (nats)"
    assert explained(model).value == pytest.approx(np.log(candidate.probability), abs=1e-5)
    other = explained(model, target="dark")
    assert other.output.startswith("log-probability of dark at") and other.value < explained(model).value
    assert explained(classifier(), target="0").output == "logit of 0"
    assert explained(model, steps=0) is None
    assert viewer.attribute(model, "the river sings") is None
    two = viewer.attribute(model, TEXT, "a dark mountain falls.")
    assert abs(two.gap) < 1e-5 and len(two.of_tokens) == len(
        viewer.read_attention(model, TEXT, "a dark mountain falls.").tokens
    )


@pytest.mark.parametrize(
    ("make", "text", "target", "message"),
    [
        (small_model, TEXT, "crab", "--view-target crab: is not one token of the vocabulary"),
        (small_model, "stone", "dark", "--view-target dark: nothing predicts it: write the mask token"),
        (classifier, TEXT, "2", "--view-target 2: the model has no such label; there are 0, 1"),
    ],
)
def test_wrong_targets(make, text, target, message):
    with pytest.raises(UserError, match=re.escape(message)):
        viewer.attribute(make(), text, settings=AttributionSettings(target))


def test_the_page_shows_the_sign():
    found = explained(small_model())
    maps = viewer.read_attention(small_model(), TEXT)
    page = viewer.render_page(maps, "A title", attribution=found)
    spans = re.findall(r'<span style="--color: var\(--(\w+)\); --share: ([\d.]+)">([^<]*)<small>([^<]*)</small>', page)
    assert [span[2] for span in spans] == 3 * list(maps.tokens)
    for (color, share, _, number), value in zip(spans, found.of_tokens, strict=False):
        assert float(number) == pytest.approx(value, abs=0.0051) and number[0] == "+-"[int(value < 0)]
        assert color == ("below" if value < 0 else "above")
        assert float(share) == pytest.approx(0.45 * abs(value) / np.abs(found.of_tokens).max(), abs=1e-3)
    assert {"above", "below"} == {span[0] for span in spans}
    assert f"completeness gap {found.gap:+.2g} with 50 steps" in page and f"{found.value:.4g}" in page
    plain = viewer.render_page(maps, "A title")
    assert "completeness" not in plain and '<section id="attribution"' not in plain
    nothing = viewer.render_page(maps, "A title", attribution=found._replace(of_tokens=np.zeros(len(maps.tokens))))
    assert nothing.count("<small>+0.0</small>") == len(maps.tokens)


@pytest.mark.slow
def test_transformers_and_torch_attribute_the_same(tmp_path):
    """Against `transformers` with gradients of torch: the midpoint rule, in float64."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = small_model()
    assert convert(write_native(model, tmp_path / "native"), tmp_path / "hf", "huggingface").passed
    twin = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").double().eval()
    ids = [model.tokenizer.cls_id, *model.tokenizer.encode(TEXT), model.tokenizer.sep_id]
    table = twin.get_input_embeddings().weight.detach()
    start, end = table[baseline_of(ids, model, model.tokenizer.mask_id)], table[ids]
    target = int(twin(inputs_embeds=end[None]).logits[0, POSITION].argmax())
    total, points = torch.zeros_like(end), 300
    for i in range(points):
        embedded = (start + (i + 0.5) / points * (end - start)).requires_grad_()
        twin(inputs_embeds=embedded[None]).logits[0, POSITION].log_softmax(-1)[target].backward()
        total += embedded.grad / points
    np.testing.assert_allclose(explained(model).of_tokens, (total * (end - start)).sum(-1).numpy(), atol=1e-5)


@pytest.mark.slow
def test_command(tiny_run, tmp_path, capsys):
    words = ["analyse", str(tiny_run), "--out", str(tmp_path / "out"), "--view", "the river [MASK] over."]
    assert cli.main([*words, "--view-baseline", "pad", "--view-steps", "7"]) == 0
    page = (tmp_path / "out" / "attention.html").read_text()
    assert "[PAD]" in page and "with 7 steps" in page
    assert cli.main([*words, "--view-steps", "0"]) == 0
    assert "completeness" not in (tmp_path / "out" / "attention.html").read_text()
    for flags, message in (
        (["--view-steps", "1001"], "--view-steps is 1001"),
        (["--view-steps", "0", "--view-target", "river"], "--view-target needs --view-steps of at least 1"),
    ):
        capsys.readouterr()
        assert cli.main([*words, *flags]) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert integrated_gradients.DEFAULTS.steps == 50
