"""The viewer: the page holds the captured weights within the stated error, and no text breaks the page or an SVG."""

import base64
import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
import zlib

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax import provenance
from bert_jax.analysis import viewer
from bert_jax.analysis.viewer import attention_maps, svg
from bert_jax.cli import main as cli
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_texts
from tests.interventions.models import LAYERS, small_model

TEXTS = ("the river sings over a quick stone.", "a dark mountain falls")
HOSTILE = ("</script><script>alert(1)</script>", "<b>&amp;\"'", "<!--", "\x00\x01\ufffe", "a" * 60)
CHROMIUM = shutil.which("chromium")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def maps():
    return viewer.read_attention(small_model(), *TEXTS)


class Scripts(html.parser.HTMLParser):
    """Collects the elements of a page and the text of its scripts, as a browser splits them."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.scripts, self.attributes, self.id = [], {}, [], None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.id = dict(attributes).get("id", "code") if tag == "script" else None

    def handle_endtag(self, tag):
        self.id = None

    def handle_data(self, data):
        if self.id is not None:
            self.scripts[self.id] = self.scripts.get(self.id, "") + data


def decode(text: str, tokens: int) -> np.ndarray:
    """The weights of a head as the page's script decodes them."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(tokens, tokens).T
    return np.square(levels / 255)


def with_tokens(maps, tokens):
    """As if the vocabulary had such tokens."""
    return maps._replace(tokens=(*tokens, *maps.tokens[len(tokens) :]))


def test_maps_are_those_of_one_forward_pass(maps):
    model = small_model()
    (row,) = encode_texts(TEXTS[:1], model.tokenizer, 64, TEXTS[1:])
    (batch,) = batches([row], model.tokenizer.pad_id, 1)
    n, names = len(row.input_ids), ["layers.*.attention.probabilities", "layers.*.attention.value"]
    probabilities, values = (value[:, 0] for value in capture(model, batch, names).values())
    assert maps.tokens[0] == "[CLS]" and len(maps.tokens) == n
    assert [token for token, yes in zip(maps.tokens, maps.is_boundary, strict=True) if yes] == [
        "[CLS]",
        "[SEP]",
        "[SEP]",
    ]
    assert maps.token_types.tolist() == sorted(maps.token_types.tolist()) and maps.token_types[-2] == 1
    np.testing.assert_array_equal(maps.probabilities, probabilities[..., :n, :n])
    np.testing.assert_allclose(maps.probabilities.sum(-1), 1, atol=1e-5)
    kernel = np.asarray(model.params["encoder"]["layers"]["attention_out"]["kernel"])
    for layer, head in ((0, 1), (2, 0)):
        transformed = values[layer, :n, head] @ kernel[layer, head]
        norms = np.linalg.norm(transformed, axis=-1)
        np.testing.assert_allclose(maps.value_norms[layer, head], norms, rtol=1e-4)
        # Kobayashi et al. (2020): the norm of the weighted vector, then as a share of the query's sum.
        weighted = np.linalg.norm(probabilities[layer, head, :n, :n, None] * transformed, axis=-1)
        expected = weighted / weighted.sum(-1, keepdims=True)
        np.testing.assert_allclose(maps.norm_weighted(layer, head), expected, atol=1e-5)


def test_the_page_holds_the_weights_of_all_heads(maps):
    page = viewer.render_page(maps, "A title", (1, 1))
    assert viewer.render_page(maps, "A title", (1, 1)) == page
    scripts, tokens = Scripts(page).scripts, len(maps.tokens)
    about = json.loads(scripts["about"])
    assert (about["tokens"], about["layers"], about["heads"]) == (list(maps.tokens), LAYERS, 2)
    assert (about["first"], about["boundary"]) == ([1, 1], maps.is_boundary.tolist())
    np.testing.assert_allclose(about["norms"], maps.value_norms, rtol=1e-3)
    for layer in range(LAYERS):
        for head in range(2):
            weights, expected = decode(scripts[f"weights-{layer}-{head}"], tokens), maps.probabilities[layer, head]
            bound = np.sqrt(expected) / 255 + 1 / (4 * 255**2)
            assert (np.abs(weights - expected) <= bound + 1e-6).all()
            assert (np.abs(weights.sum(-1) - expected.sum(-1)) <= bound.sum(-1) + 1e-6).all()
    assert sum(name.startswith("weights-") for name in scripts) == LAYERS * 2


def test_the_error_of_8_bits():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(512, 0.02), 512).astype(np.float32)
    weights[0], weights[1] = 1 / 512, np.eye(512)[7]
    decoded = decode(attention_maps.encode_weights(weights), 512)
    errors = np.abs(decoded - weights)
    assert 0.5 * attention_maps.MAX_ERROR < errors.max() <= attention_maps.MAX_ERROR
    assert (errors <= np.sqrt(weights) / 255 + 1 / (4 * 255**2) + 1e-7).all()
    assert (decoded[1] == weights[1]).all() and np.abs(decoded.sum(-1) - 1).max() < 0.06


def test_the_page_loads_nothing(maps):
    page = viewer.render_page(maps, "A title")
    found = Scripts(page)
    assert not {name for name, _ in found.attributes} & {"src", "href", "onload", "onerror"}
    assert "link" not in found.tags and "@import" not in page and "url(" not in page
    assert {line for line in found.scripts["code"].split('"') if "://" in line} == {"http://www.w3.org/2000/svg"}


def test_no_token_or_title_breaks_the_page(maps):
    plain, page = Scripts(viewer.render_page(maps, "A title")), viewer.render_page(with_tokens(maps, HOSTILE), "<i>&x")
    hostile = Scripts(page)
    assert hostile.tags == plain.tags and hostile.scripts["code"] == plain.scripts["code"]
    tokens = json.loads(hostile.scripts["about"])["tokens"]
    assert tokens[:3] == ["</script><script>aler…", *HOSTILE[1:3]] and tokens[3] == "\ufffd" * 3
    assert len(tokens[4]) == 22 and "<title>&lt;i&gt;&amp;x</title>" in page and "<i>" not in page


def test_svg_has_the_tokens_and_a_line_for_each_large_weight(maps):
    weights = maps.probabilities[1, 1]
    least = float(np.quantile(weights, 0.7))
    root = ElementTree.fromstring(viewer.lines_svg(maps, weights, "layer 1, head 1", least))
    groups = {group.get("class"): group for group in root.iter(f"{SVG}g")}
    for side in ("queries", "keys"):
        assert [text.text for text in groups[side]] == list(maps.tokens)
    lines = [[float(line.get(name)) for name in ("y1", "y2", "stroke-opacity")] for line in groups["lines"]]
    assert len(lines) == (weights >= least).sum() > 10
    drawn = np.zeros_like(weights)
    for y1, y2, opacity in lines:
        query, key = (int((y - svg.DRAWING["top"]) // svg.DRAWING["row"]) for y in (y1, y2))
        drawn[query, key] = (opacity - 0.12) / 0.88
    np.testing.assert_allclose(drawn, np.where(weights >= least, weights, 0), atol=1e-3)
    assert lines == sorted(lines, key=lambda line: line[2])
    share = 100 * weights[weights >= least].sum() / weights.sum()
    assert f"{len(lines):,} weights of at least {least:g}: {share:.1f} % of all attention" in "".join(root.itertext())
    (second,) = (line for line in root.iter(f"{SVG}line") if line.get("class") == "second-text")
    boundary = svg.DRAWING["top"] + svg.DRAWING["row"] * maps.token_types.tolist().index(1)
    assert float(second.get("y1")) == boundary


def test_svg_of_many_weights_and_of_any_tokens(maps, monkeypatch):
    monkeypatch.setitem(svg.DRAWING, "most_lines", 7)
    document = viewer.lines_svg(with_tokens(maps, HOSTILE), maps.probabilities[0, 0], "<head> & \x00", 0)
    root = ElementTree.fromstring(document)
    lines = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "lines")
    opacities = [float(line.get("stroke-opacity")) for line in lines]
    expected = 0.12 + 0.88 * np.sort(maps.probabilities[0, 0].ravel())[-7:]
    np.testing.assert_allclose(opacities, expected, atol=1e-3)
    assert "7 weights of at least 0, the largest: " in document and document.count("<script") == 0
    assert root.find(f"{SVG}text").text == "<head> & \ufffd"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("stone " * 63,), r"the text to view has 65 tokens, and the model has positions for at most 64: shorten it"),
        (("stone", "dark " * 61), r"has 65 tokens"),
        ((" ",), "the text to view has no tokens"),
        (("stone", ""), "the second text to view has no tokens"),
        (("\udcff",), "is not Unicode text"),
    ],
)
def test_texts_that_cannot_be_viewed(texts, message):
    with pytest.raises(UserError, match=message):
        viewer.read_attention(small_model(), *texts)


def test_the_longest_text(monkeypatch):
    maps = viewer.read_attention(small_model(), "stone " * 62)
    assert len(maps.tokens) == 64
    monkeypatch.setattr(attention_maps, "MAX_TOKENS", 32)
    with pytest.raises(UserError, match="has 64 tokens, and the viewer shows at most 32"):
        viewer.read_attention(small_model(), "stone " * 62)


def changed(change, **config) -> LoadedModel:
    """The small model with another config, and with parameters that `change` has changed in place."""
    model = small_model()
    params = jax.device_get(model.params)
    change(params["encoder"])
    return LoadedModel(dataclasses.replace(model.config, **config), model.heads, params, model.tokenizer)


def test_a_model_with_one_token_type_gets_it_for_both_texts():
    def choose_types(*types):
        return lambda params: params["embeddings"].update(token_type=params["embeddings"]["token_type"][list(types)])

    models = (changed(choose_types(0), type_vocab_size=1), changed(choose_types(0, 0)))
    pairs = [viewer.read_attention(one, *TEXTS) for one in models]
    np.testing.assert_allclose(pairs[0].probabilities, pairs[1].probabilities, atol=1e-6)
    assert pairs[0].token_types[-1] == 1


def test_pairs_of_roberta_have_two_separators():
    def add_positions(params):
        table = params["embeddings"]["position"]
        params["embeddings"]["position"] = np.concatenate([table[:2], table])

    roberta = changed(add_positions, position_offset=2)
    maps = viewer.read_attention(roberta, "the stone", "dark")
    assert maps.tokens == ("[CLS]", "the", "stone", "[SEP]", "[SEP]", "dark", "[SEP]")
    assert maps.token_types.tolist() == [0, 0, 0, 0, 0, 1, 1]
    sides = ["stone " * 30], roberta.tokenizer, 64
    rows = [encode_texts(*sides, ["dark " * count], separators=2)[0] for count in (30, 31)]
    assert len(rows[0].input_ids) == 64 and rows[1] is None
    with pytest.raises(UserError, match="has 65 tokens"):
        viewer.read_attention(roberta, "stone " * 30, "dark " * 31)


def test_layers_that_share_parameters():
    def keep_first_layer(params):
        params["layers"] = jax.tree.map(lambda leaf: leaf[:1], params["layers"])

    shared, own = changed(keep_first_layer, parameter_groups=1), viewer.read_attention(small_model(), TEXTS[0])
    maps = viewer.read_attention(shared, TEXTS[0])
    np.testing.assert_allclose(maps.value_norms[0], own.value_norms[0], rtol=1e-4)
    assert maps.value_norms.shape == own.value_norms.shape


def call(*words) -> int:
    return cli.main(["analyse", *map(str, words)])


@pytest.mark.slow
def test_command(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "current_date", lambda: "2026-11-28T00:00:00+00:00")
    out = tmp_path / "out"
    words = (tiny_run, "--view", *TEXTS, "--out", out, "--view-heads", "0.1", "--view-least", 0.2)
    assert call(*words) == 0
    assert sorted(path.name for path in out.iterdir()) == ["attention.html", "layer-0-head-1.svg"]
    assert f"wrote {out / 'attention.html'}" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert json.loads(Scripts(before["attention.html"].decode()).scripts["about"])["first"] == [0, 1]
    assert b"weights of at least 0.2" in before["layer-0-head-1.svg"]
    assert call(*words) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.slow
def test_checkpoints_have_a_page_each(tiny_run, tmp_path):
    assert call(tiny_run, "--view", TEXTS[0], "--out", tmp_path / "out", "--checkpoints", "all") == 0
    pages = sorted(epath.Path(tmp_path).glob("out/*/attention.html"))
    assert len(pages) >= 2 and len({page.read_bytes() for page in pages}) == len(pages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "bert-jax analyse needs --data DIR, or --view TEXT"),
        (("--view", "stone", "--suites", "lens"), "bert-jax analyse needs --data DIR, or --view TEXT"),
        (("--view", "stone", "dark", "light"), "--view has 3 texts"),
        (("--view", "stone", "--view-heads", "1-1"), "--view-heads 1-1: give layer and head, as in 3.7"),
        (("--view", "stone", "--view-heads", "0.9"), "--view-heads 0.9: the model has layers 0 to 0, heads 0 to 1"),
        (("--view", "stone " * 600), "the text to view has 602 tokens"),
        (("--view", "stone", "--view-least", "2"), "--view-least is 2"),
    ],
)
def test_wrong_requests(tiny_run, tmp_path, capsys, words, message):
    assert call(tiny_run, "--out", tmp_path / "out", *words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not list(tmp_path.glob("out/*.html"))


def test_a_file_of_the_user_is_kept(tiny_run, tmp_path, capsys):
    (tmp_path / "attention.html").write_text("mine")
    assert call(tiny_run, "--view", "stone", "--out", tmp_path) == 2
    assert "is not a page of bert_jax" in capsys.readouterr().err
    assert (tmp_path / "attention.html").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_the_same_lines(maps, tmp_path):
    """The page's script against the SVG writer: tokens, lines and their opacities."""
    least, page = 10**-1.3, tmp_path / "page.html"  # of the page's slider
    page.write_text(viewer.render_page(with_tokens(maps, HOSTILE), "A title", (2, 1)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    body = done.stdout
    assert '<body data-ready="yes">' in body, done.stderr[-2000:]
    figure = re.search(r'<div id="figure">(<svg.*?</svg>)', body, re.S)[1].replace("&nbsp;", "\u00a0")
    drawn = ElementTree.fromstring(figure)
    decoded = decode(attention_maps.encode_weights(maps.probabilities[2, 1]), len(maps.tokens))
    written = ElementTree.fromstring(viewer.lines_svg(with_tokens(maps, HOSTILE), decoded, "", least))
    sides = []
    for root, prefix in ((drawn, ""), (written, SVG)):
        lines = next(group for group in root.iter(f"{prefix}g") if group.get("class") == "lines")
        numbers = [[float(line.get(n)) for n in ("x1", "y1", "x2", "y2", "stroke-opacity")] for line in lines]
        texts = [text.text for text in root.iter(f"{prefix}text")]
        sides.append((sorted(numbers), texts[2:], texts[1].split(":")[1]))
    assert len(sides[0][0]) > 10
    np.testing.assert_allclose(sides[0][0], sides[1][0], atol=2e-3)
    assert sides[0][1:] == sides[1][1:]
