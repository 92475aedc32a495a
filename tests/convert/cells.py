"""Which family is read from and written to which format: what docs/conversion.md says and test_matrix.py tries."""

FAMILIES = ("bert", "roberta", "albert", "distilbert", "electra", "modernbert")
FORMATS = ("huggingface", "pytorch", "tensorflow1", "flax", "fairseq", "nvidia", "bert-jax", "stablehlo")
_EXCEPTIONS = {
    "tensorflow1": dict.fromkeys(FAMILIES, "none") | {"bert": "both", "albert": "both"},
    "flax": dict.fromkeys(FAMILIES, "in") | {"modernbert": "none"},
    "fairseq": dict.fromkeys(FAMILIES, "none") | {"roberta": "in"},
    "nvidia": dict.fromkeys(FAMILIES, "none") | {"bert": "in"},
    "stablehlo": dict.fromkeys(FAMILIES, "out"),
}
CELLS = {(family, format): _EXCEPTIONS.get(format, {}).get(family, "both") for format in FORMATS for family in FAMILIES}
"""(family, format) -> "in", "out", "both" or "none"."""

VERIFIED = {(family, format): False for (family, format), cell in CELLS.items() if cell in ("in", "both")}
"""Whether a file with published weights was read here, of the cells that can be read. Files of random numbers, even if
the original program wrote them, are no such files; docs/conversion.md says what those are."""
VERIFIED["bert", "huggingface"] = True


def can(direction: str) -> list[tuple[str, str]]:
    """Cells that go "in" or "out"."""
    return [cell for cell, found in CELLS.items() if found in (direction, "both")]
