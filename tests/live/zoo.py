"""Random models of transformers' own classes, of every family, head and size, for tests that read and write them."""

import numpy as np

SIZES = {
    "narrow": {"width": 48, "layers": 4, "heads": 4, "wide": 80, "vocab": 211, "positions": 64},
    "wide": {"width": 128, "layers": 3, "heads": 2, "wide": 256, "vocab": 503, "positions": 96},
}
HEADS = {
    "bert": ("ForPreTraining", "ForMaskedLM", "Model", "LMHeadModel"),
    "roberta": ("ForMaskedLM", "Model", "ForCausalLM"),
    "xlm-roberta": ("ForMaskedLM",),
    "camembert": ("Model",),
    "albert": ("ForPreTraining", "ForMaskedLM", "Model"),
    "distilbert": ("ForMaskedLM", "Model"),
    "electra": ("ForPreTraining", "ForMaskedLM", "Model"),
    "modernbert": ("ForMaskedLM", "Model"),
}
TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
PREFIXES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "albert": "Albert",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "modernbert": "ModernBert",
}
CASES = [(family, head) for family, heads in HEADS.items() for head in (*heads, *TASKS)]
LABELS = ("no", "perhaps", "yes")


def settings(family: str, size: str) -> dict:
    """Keyword arguments of the family's config."""
    sizes = SIZES[size]
    shared = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "intermediate_size": sizes["wide"],
        "max_position_embeddings": sizes["positions"],
    }
    narrow = size == "narrow"
    if family in ("roberta", "xlm-roberta", "camembert"):
        return shared | {
            "max_position_embeddings": sizes["positions"] + 2,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        }
    if family == "albert":
        return shared | {"embedding_size": 16, "num_hidden_groups": 2 if narrow else 1}
    if family == "electra":
        return shared | {"embedding_size": 16 if narrow else sizes["width"]}
    if family == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        names |= {"intermediate_size": "hidden_dim"}
        return {names.get(name, name): value for name, value in shared.items()}
    if family == "modernbert":
        special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
        window = {"local_attention": 8} if narrow else {"local_attention": 20, "global_attn_every_n_layers": 2}
        return shared | special | window | {"num_hidden_layers": sizes["layers"] + 1, "norm_eps": 1e-5}
    return shared | ({} if narrow else {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6})


def build(family: str, head: str, size: str = "narrow", **changes):
    """A model whose tensors are all random, biases and scales too: a zero or a one would hide a swap.

    `changes` are settings that differ from those of `settings`.
    """
    import torch
    import transformers

    kind = getattr(transformers, PREFIXES[family] + head)
    config = kind.config_class(**settings(family, size) | changes, attn_implementation="eager")
    if head in ("LMHeadModel", "ForCausalLM"):
        config.is_decoder = True
    if head in TASKS[:2]:
        config.id2label, config.label2id = dict(enumerate(LABELS)), {name: i for i, name in enumerate(LABELS)}
    torch.manual_seed(0)
    spread = 0.15 * (48 / SIZES[size]["width"]) ** 0.5
    model = kind(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            middle = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            tensor.copy_(middle + spread * torch.randn(tensor.shape))
    model.tie_weights()
    return model


def inputs(family: str, size: str) -> dict[str, np.ndarray]:
    """Three rows, two of them padded; with two token types where the family has them."""
    longest = SIZES[size]["positions"]
    lengths = np.array([longest, longest // 2, 7])
    rng = np.random.default_rng(1)
    place = np.arange(longest)[None, :]
    mask = (place < lengths[:, None]).astype(np.int32)
    # RoBERTa counts positions from the padding id, so that no real token may have it.
    ids = np.where(mask, rng.integers(5, SIZES[size]["vocab"], mask.shape), 1).astype(np.int32)
    paired = family in ("bert", "albert", "electra")
    types = (mask * (place >= lengths[:, None] // 2) * paired).astype(np.int32)
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
