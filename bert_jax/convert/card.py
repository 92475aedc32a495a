"""The model card of a conversion: what the model is, where it came from, and what the parity report found."""

import jax

from bert_jax import __version__
from bert_jax.convert.contents import Contents
from bert_jax.convert.parity import Report

USES = {
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
USES["pytorch"] = USES["huggingface"]
FILL_MASK = """from transformers import pipeline

pipeline("fill-mask", model="{name}")("A text with a {mask}.")"""


def write_card(name: str, contents: Contents, to: str, report: Report, mask: str | None) -> str:
    """Text of the card.

    Args:
      name: of the destination.
      contents: what was converted.
      to: the format it was converted to.
      report: on the conversion.
      mask: what the tokenizer calls its mask; None without a tokenizer.
    """
    family, config, heads, params = contents.model
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    words = {"mlm": heads.mlm, "sentence-pair": heads.pair, "pooler": heads.has_pooler}
    parts = [part for part, there in words.items() if there] + ([heads.task.kind] if heads.task else [])
    lines = [
        f"# {name}",
        "",
        f"A {family} with {config.num_layers} layers of width {config.hidden_size}, {count:,} parameters; on its "
        f"encoder: {', '.join(parts) or 'nothing'}.",
        "",
        f"Converted from {contents.format} ({contents.source.rstrip('/').rpartition('/')[2]}) to {to} by bert_jax "
        f"{__version__}.",
    ]
    for note in contents.notes:
        lines += ["", note]
    example = USES.get(to, "") if mask is not None or to == "stablehlo" else ""
    if to in ("huggingface", "pytorch") and heads.mlm and mask is not None and config.direction == "bidirectional":
        example = FILL_MASK
    if example:
        lines += ["", "```python", example.format(name=name, mask=mask), "```"]
    return "\n".join([*lines, "", "## Parity", "", "```", *report.lines(), "```", ""])
