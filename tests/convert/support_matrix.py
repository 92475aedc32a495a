"""Which family can be read from and written to which format, as in docs/conversion.md; tested by test_matrix.py."""

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
