"""The tables in docs/conversion.md agree with tests/convert/support_matrix.py and with the command."""

import re
from pathlib import Path

from bert_jax.convert import conversion
from bert_jax.convert.translate import FAMILIES as TRANSLATED
from tests.convert.support_matrix import FAMILIES, FORMATS, SUPPORT, VERIFIED, supported

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
