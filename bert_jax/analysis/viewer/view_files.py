"""The files of the viewer: the page, and heads as SVG."""

import re
from collections.abc import Sequence

from bert_jax.analysis.result_files import model_sha256
from bert_jax.analysis.viewer.attention_maps import read_attention
from bert_jax.analysis.viewer.html_page import render_page
from bert_jax.analysis.viewer.integrated_gradients import DEFAULTS, AttributionSettings, attribute
from bert_jax.analysis.viewer.svg import lines_svg
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.provenance import describe, make_provenance
from bert_jax.report.page_file import check_page_file, write_html
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.environment import describe_environment

PAGE = "attention.html"


def parse_heads(words: Sequence[str]) -> list[tuple[int, int]]:
    """Layers and heads of words such as 3.7.

    Raises:
      UserError: a word of another form.
    """
    for word in words:
        if not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", word):
            raise UserError(f"--view-heads {word}: give layer and head, as in 3.7; both count from 0")
    return [(int(layer), int(head)) for layer, head in (word.split(".") for word in words)]


def write_view(
    model: LoadedModel,
    directory: StoredPath,
    title: str,
    texts: Sequence[str],
    heads: Sequence[tuple[int, int]] = (),
    least: float = 0.05,
    settings: AttributionSettings = DEFAULTS,
) -> list[StoredPath]:
    """Write attention.html, and layer-3-head-7.svg for each of `heads`; older ones are replaced.

    Args:
      model: from `inference.load`.
      directory: exists.
      title: of the page and of the figures.
      texts: one, or the two of a pair.
      heads: layer and head of each SVG file; the page shows the first of them first.
      least: smallest weight that is a line in them.
      settings: of the attribution, which the page shows if the text has a mask or the model classifies texts.

    Returns:
      the files.

    Raises:
      UserError: a head that the model does not have, texts as for `read_attention`, a target that the model does not
        have, values that are not finite, or a file that cannot be written.
    """
    layers, per_layer = model.config.num_layers, model.config.num_heads
    for layer, head in heads:
        if layer >= layers or head >= per_layer:
            raise UserError(
                f"--view-heads {layer}.{head}: the model has layers 0 to {layers - 1}, heads 0 to {per_layer - 1}"
            )
    check_page_file(directory / PAGE, "--out")
    maps, attribution = read_attention(model, *texts), attribute(model, *texts, settings=settings)
    made = make_provenance(describe_environment(), hashes={"model and tokenizer": model_sha256(model)})
    made_by = [f"{name}: {value}" for name, value in describe(made).items()]
    first = heads[0] if heads else (0, 0)
    write_html(directory / PAGE, "--out", render_page(maps, title, first, made_by, attribution))
    files = [directory / PAGE]
    for layer, head in heads:
        files.append(directory / f"layer-{layer}-head-{head}.svg")
        name = f"{title}: layer {layer}, head {head}, attention probabilities"
        write_atomic(files[-1], lines_svg(maps, maps.probabilities[layer, head], name, least).encode())
    return files
