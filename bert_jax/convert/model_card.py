"""The model card of a conversion: description of the model, its source, and the parity report.

Its front matter has the fields of model cards at the Hugging Face Hub (huggingface.co/docs/hub/model-cards).
"""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml

from bert_jax.convert.families.family import CLASS_SUFFIXES
from bert_jax.convert.parity.parity_report import ParityReport
from bert_jax.convert.source_model import SourceModel
from bert_jax.data.corpus_description import NOT_STATED, CorpusDescription, frequent_languages
from bert_jax.provenance import code, describe_code
from bert_jax.report import Note, Section, markdown
from bert_jax.report.cells import make_table
from bert_jax.tokenizers.tokenizer import Tokenizer

CARD = "README.md"
FENCE = "---\n"
SHOWN_LANGUAGES = 8
LIBRARIES = {
    "huggingface": "transformers",
    "pytorch": "transformers",
    "tensorflow1": "tensorflow",
    "bert-jax": "bert_jax",
    "stablehlo": "jax",
    "onnx": "onnxruntime",
    "onnx-int8": "onnxruntime",
    "onnx-both": "onnxruntime",
    "openvino": "openvino",
    "openvino-int8": "openvino",
    "openvino-both": "openvino",
}
"""By output format: the library that loads it (`library_name` of the card)."""
PIPELINES = {
    "classification": "text-classification",
    "multilabel": "text-classification",
    "multiple_choice": "multiple-choice",
    "tagging": "token-classification",
    "span": "question-answering",
}
"""By kind of task head: its name among the pipelines of the Hugging Face Hub."""
FIRST_FIELDS = ("language", "license", "library_name", "pipeline_tag", "base_model", "tags", "datasets", "metrics")
"""The first fields of the front matter; other fields of the source's card follow."""

USAGE_EXAMPLES = {
    "huggingface": """from transformers import AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")""",
    "bert-jax": """import bert_jax

vectors = bert_jax.load("{name}").encode(["A text.", "Another one."])""",
    "stablehlo": """import jax.export
from pathlib import Path
from safetensors.numpy import load_file

model = jax.export.deserialize(Path("{name}/model.stablehlo").read_bytes())
outputs = model.call(load_file("{name}/params.safetensors"), input_ids, token_type_ids, attention_mask)""",
}
USAGE_EXAMPLES["pytorch"] = USAGE_EXAMPLES["huggingface"]
USAGE_EXAMPLES |= dict.fromkeys(
    ("onnx", "onnx-int8", "onnx-both"),
    """import onnxruntime
{tokenizer}
session = onnxruntime.InferenceSession("{name}/{graph}")
ids = [tokenizer.encode("A text."){ids}]
arrays = {{"input_ids": ids, "attention_mask": [[1] * len(ids[0])], "token_type_ids": [[0] * len(ids[0])]}}
outputs = session.run(None, {{port.name: arrays[port.name] for port in session.get_inputs()}})""",
)
USAGE_EXAMPLES |= dict.fromkeys(
    ("openvino", "openvino-int8", "openvino-both"),
    """import openvino
{tokenizer}
settings = {{"INFERENCE_PRECISION_HINT": "f32"}}
model = openvino.Core().compile_model("{name}/{graph}", "CPU", settings)
ids = [tokenizer.encode("A text."){ids}]
arrays = {{"input_ids": ids, "attention_mask": [[1] * len(ids[0])], "token_type_ids": [[0] * len(ids[0])]}}
outputs = model({{port.any_name: arrays[port.any_name] for port in model.inputs}})""",
)
TOKENIZER_EXAMPLE = """from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("{name}/tokenizer.json")"""
SENTENCEPIECE_EXAMPLE = """from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")"""
"""Of models whose directory has a .model file and no tokenizer.json."""
DEFAULT_GRAPHS = ("model.onnx", "openvino_model.xml")
"""What sentence-transformers loads without a file name."""
SENTENCE_EXAMPLE = """from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("{name}"{options}).encode(["A text.", "Another one."])"""
OPENVINO_OPTION = '"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}'
OPENVINO_NOTE = (
    "The differences below hold with INFERENCE_PRECISION_HINT f32. By default, OpenVINO computes in bfloat16 (two to "
    "three digits) on CPUs that have it."
)
SERVING_PACKAGES = (
    "jax, flatbuffers (which jax does not install) and safetensors: pip install jax flatbuffers safetensors"
)
PIPELINE_EXAMPLE = """from transformers import pipeline

pipeline("{pipeline}", model="{name}")("A text{masked}.")"""
CLASS_EXAMPLE = """from transformers import AutoModel{head}, AutoTokenizer

model, tokenizer = AutoModel{head}.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")"""
"""Of a head for which transformers 5 has no pipeline."""


class _FrontMatter(yaml.SafeLoader):
    """YAML 1.2, which the Hugging Face Hub uses: `no` is the language Norwegian, and not false as in YAML 1.1."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (of the base class)
        first: [(tag, pattern) for tag, pattern in resolvers if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def format_model_card(
    name: str,
    source_model: SourceModel,
    to: str,
    report: ParityReport,
    graphs: Sequence[str] = (),
    *,
    sentences: bool = False,
) -> str:
    """Return the text of the card.

    Args:
      name: name of the destination.
      source_model: the model that was converted.
      to: the output format.
      report: the parity report.
      graphs: files that a runtime opens, in the directory; the usage example is of the first.
      sentences: whether sentence-transformers loads it, too.
    """
    family, config, heads, params = source_model.model
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    words = {"mlm": heads.mlm, "sentence-pair": heads.pair, "pooler": heads.has_pooler}
    parts = [part for part, present in words.items() if present] + ([heads.task.kind] if heads.task else [])
    tokenizer = source_model.loaded_tokenizer
    mask = None if tokenizer is None else tokenizer.id_to_token(tokenizer.mask_id)
    front, warnings = _front_matter(source_model, to, sentences)
    lines = [
        f"# {name}",
        "",
        f"A {family} with {config.num_layers} layers of width {config.hidden_size}, {count:,} parameters; on its "
        f"encoder: {', '.join(parts) or 'nothing'}.",
        "",
        f"Converted from {source_model.format} ({source_model.source.rstrip('/').rpartition('/')[2]}) to {to} "
        f"by {describe_code(code())}.",
    ]
    for note in (*source_model.notes, *warnings):
        lines += ["", note]
    example = USAGE_EXAMPLES.get(to, "") if mask is not None or to == "stablehlo" else ""
    pipeline, masked = front.get("pipeline_tag"), f" with a {mask}" if heads.task is None else ""
    if sentences:
        example = SENTENCE_EXAMPLE
    elif to in ("huggingface", "pytorch") and mask is not None:
        if heads.task is not None and heads.task.kind in ("span", "multiple_choice"):
            example = CLASS_EXAMPLE
        elif pipeline in ("fill-mask", *PIPELINES.values()):
            example = PIPELINE_EXAMPLE
    if example:
        graph = graphs[0] if graphs else ""
        values = {"name": name, "options": _sentence_options(graph), **_load_tokenizer(name, tokenizer)}
        values["head"] = CLASS_SUFFIXES[heads.task.kind] if heads.task else ""
        lines += ["", "```python", example.format(pipeline=pipeline, masked=masked, graph=graph, **values), "```"]
    for graph in graphs[1:]:
        load = f': `SentenceTransformer("{name}"{_sentence_options(graph)})`' if sentences else ""
        lines += ["", f"`{graph}` has the same model in int8{load}."]
    if note := {"openvino": OPENVINO_NOTE, "jax": f"This needs {SERVING_PACKAGES}."}.get(LIBRARIES[to]):
        lines += ["", note]
    head = f"{FENCE}{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}{FENCE}\n"
    lines += ["", *_training_data(source_model.corpora), "## Parity", "", "```"]
    return head + "\n".join([*lines, *report.lines(), "```", ""])


def _training_data(corpora: Sequence[tuple[float, CorpusDescription]]) -> list[str]:
    """Lines about what a run was trained on; none if it did not record it."""
    if not corpora:
        return []

    def listed(values: Iterable[str | None], missing: str = "none") -> str:
        return ", ".join(one or NOT_STATED for one in values) or missing

    def languages(tokens: Mapping[str, int]) -> str:
        order, total = sorted(tokens, key=lambda code: (-tokens[code], code)), sum(tokens.values())
        shown = [f"{code} {tokens[code] / max(total, 1):.1%}" for code in order[:SHOWN_LANGUAGES]]
        return listed([*shown, *([f"{len(order) - len(shown)} more"] if len(order) > len(shown) else [])], NOT_STATED)

    columns = {
        "corpus": "{name}",
        "share of the rows": "{share:.1%}",
        "documents": "{documents:,}",
        "tokens": "{tokens:,}",
        "languages": lambda corpus: languages(corpus["languages"]),
        "licenses": lambda corpus: listed(corpus["licenses"], NOT_STATED),
        "filters": lambda corpus: listed(corpus["filters"]),
        "masked": lambda corpus: listed(corpus["masks"]),
        "removed documents": lambda corpus: listed(
            f"{reason.replace('_', ' ')} {count:,}" for reason, count in corpus["removed"].items()
        ),
    }
    note = Note(
        "What the run was trained on. Licenses are those of the text, not of the model; they were given when the"
        " corpora were built, and not checked. Languages are shares of the tokens."
    )
    table = make_table(({"share": share, **corpus} for share, corpus in corpora), columns, words=True)
    return markdown.render([Section("Training data", (note, table))]).split("\n")


def _load_tokenizer(name: str, tokenizer: Tokenizer | None) -> dict[str, str]:
    """`tokenizer`: lines that load the tokenizer of a directory; `ids`: what of its result are the ids."""
    if tokenizer is None or not tokenizer.kind.startswith("SentencePiece"):
        return {"tokenizer": TOKENIZER_EXAMPLE.format(name=name), "ids": ".ids"}
    return {"tokenizer": SENTENCEPIECE_EXAMPLE.format(name=name), "ids": ""}


def _sentence_options(graph: str) -> str:
    """Arguments of SentenceTransformer that load a graph; "" without one, or if it is no format of a backend."""
    backend, _, file = graph.rpartition("/")
    if not backend:
        return ""
    options = [] if file in DEFAULT_GRAPHS else [f'"file_name": "{graph}"']
    options += [OPENVINO_OPTION] if backend == "openvino" else []
    return f', backend="{backend}"' + (f", model_kwargs={{{', '.join(options)}}}" if options else "")


def _front_matter(source_model: SourceModel, to: str, sentences: bool) -> tuple[dict[str, Any], list[str]]:
    """The card's front matter, and warnings about what could not be read.

    Fields of the source's card are kept, except `library_name`.
    """
    _, config, heads, _ = source_model.model
    source_front, warnings = _source_front_matter(source_model)
    tags = source_front.get("tags")
    tags = tags if isinstance(tags, list) else [tags] if tags else []
    front = source_front | {"library_name": "sentence-transformers" if sentences else LIBRARIES[to]}
    front["tags"] = [*dict.fromkeys([*map(str, tags), source_model.model.family, "bert_jax"])]
    if sentences:
        pipeline = "sentence-similarity"
    elif heads.task is not None:
        pipeline = PIPELINES.get(heads.task.kind)
    elif heads.mlm:
        pipeline = "fill-mask" if config.direction == "bidirectional" else "text-generation"
    else:
        pipeline = "feature-extraction"
    tokens: collections.Counter[str] = collections.Counter()
    for _, corpus in source_model.corpora:
        tokens.update(corpus["languages"])
    derived = {"pipeline_tag": pipeline, "base_model": _hub_name(source_model.hf_config.get("_name_or_path"))}
    derived["language"] = frequent_languages(tokens) or None
    front = {name: value for name, value in derived.items() if value is not None} | front
    return {name: front[name] for name in sorted(front, key=lambda n: (*FIRST_FIELDS, n).index(n))}, warnings


def _source_front_matter(source_model: SourceModel) -> tuple[dict[str, Any], list[str]]:
    """The front matter of the source's card, and warnings about what could not be read."""
    path = Path(source_model.source)
    card = (path if path.is_dir() else path.parent) / CARD
    if source_model.format == "run" or not card.is_file():
        return {}, []
    match = re.match(rf"{FENCE}(.*?\n){FENCE}", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        front = yaml.load(match[1], _FrontMatter) if match else {}
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}, ["The front matter of the source's card could not be read: license and language are unknown."]
    known = isinstance(front, dict) and all(isinstance(name, str) for name in front)
    return (front, []) if known else ({}, [])


def _hub_name(name: object) -> str | None:
    """A model's name on the Hugging Face Hub; None if it is a local directory or not a valid name."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or Path(name).is_dir():
        return None
    return name
