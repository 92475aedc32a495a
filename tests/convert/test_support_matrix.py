"""Which family can be read from and written to which format: as in docs/conversion.md, and as in the command."""

import re
from pathlib import Path

from bert_jax.convert import conversion
from bert_jax.convert.translate import FAMILIES as TRANSLATED

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "albert", "distilbert", "electra", "modernbert")
FAMILIES += ("mobilebert",)
SERVING = ("stablehlo", "onnx", "onnx-int8", "onnx-both", "openvino", "openvino-int8", "openvino-both")
"""Formats that are written only."""
FORMATS = ("huggingface", "pytorch", "tensorflow1", "flax", "fairseq", "nvidia", "bert-jax", *SERVING)
_EXCEPTIONS = {
    "tensorflow1": dict.fromkeys(FAMILIES, "none") | {"bert": "both", "albert": "both"},
    "flax": dict.fromkeys(FAMILIES, "in") | dict.fromkeys(("modernbert", "camembert", "mobilebert"), "none"),
    "fairseq": dict.fromkeys(FAMILIES, "none") | {"roberta": "in"},
    "nvidia": dict.fromkeys(FAMILIES, "none") | {"bert": "in"},
    "stablehlo": dict.fromkeys(FAMILIES, "out"),
    **{format: dict.fromkeys(FAMILIES, "out") | {"mobilebert": "none"} for format in SERVING[1:]},
}
SUPPORT = {
    (family, format): _EXCEPTIONS.get(format, {}).get(family, "both") for format in FORMATS for family in FAMILIES
}
"""(family, format) -> "in", "out", "both" or "none"."""

VERIFIED = {(family, "huggingface"): "random" for family in FAMILIES}
VERIFIED |= {(family, "pytorch"): "random" for family in FAMILIES}
VERIFIED |= {(family, "flax"): "random" for family in FAMILIES if SUPPORT[family, "flax"] == "in"}
VERIFIED |= {("bert", "tensorflow1"): "in part", ("albert", "tensorflow1"): "in part"}
VERIFIED |= {
    ("roberta", "fairseq"): "random",
    ("bert", "nvidia"): "no",
    ("xlm-roberta", "flax"): "no",
    ("bert", "huggingface"): "published",
}
"""Which files of other software were tested. "published": released weights. "random": files that the original
software wrote of random numbers. "in part": TensorFlow's writer wrote the file, but Google's code did not name what is
in it. "no": only files of our own."""


def supported(direction: str) -> list[tuple[str, str]]:
    """Pairs (family, format) that support "in" or "out"."""
    return [cell for cell, found in SUPPORT.items() if found in (direction, "both")]


PAGE = (Path(__file__).parent.parent.parent / "docs" / "conversion.md").read_text()


def rows(first: str) -> list[list[str]]:
    """Cells of the table that begins with `first`, without the separator line."""
    table = PAGE[PAGE.index(first) :].split("\n\n")[0]
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [head, *lines]


def test_the_table_of_the_docs():
    (_, *formats), *lines = rows("| | `huggingface`")
    assert [name.strip("`") for name in formats] == list(FORMATS)
    assert [family for family, *_ in lines] == list(FAMILIES)
    documented = {(family, name): cell for family, *cells in lines for name, cell in zip(FORMATS, cells, strict=True)}
    assert documented == SUPPORT


def test_what_the_docs_call_verified():
    (_, *lines) = rows("| format | families | verified | with |")
    documented = [
        ((family, name.strip("`")), word) for name, families, word, _ in lines for family in families.split(", ")
    ]
    assert dict(documented) == VERIFIED and len(documented) == len(VERIFIED)
    # Every readable format except the native one has an entry.
    assert set(VERIFIED) == {cell for cell in supported("in") if cell[1] != "bert-jax"}
    meanings = re.findall(r'"(\w+)" (?:means released|that the original)', PAGE)
    assert meanings == ["Published", "random"]
    assert [cell for cell, word in VERIFIED.items() if word == "published"] == [("bert", "huggingface")]


def test_the_matrix_and_the_command_have_the_same_names():
    assert set(FAMILIES) == set(TRANSLATED)
    assert {name for _, name in supported("out")} == set(conversion.OUTPUT_FORMATS)
    assert "`--to` is one of " + ", ".join(f"`{name}`" for name in list(conversion.OUTPUT_FORMATS)[:1]) in PAGE
    for name in conversion.OUTPUT_FORMATS:
        assert f"`{name}`" in PAGE
