"""Makes tests/golden/parity.npz with transformers, so that the quick tests do not need it.

Command, from the root of the clone, with the extra `parity` installed:

    python -m tests.golden.make_parity

Made with transformers 5 and PyTorch on a CPU, float32, eager attention. SEED and LENGTHS go into the file.
"""

import pathlib

import numpy as np

from tests.golden import recipe

SEED, LENGTHS = 20, (18, 11, 5)
PATH = pathlib.Path(__file__).parent / "parity.npz"


def run_reference(settings: dict[str, int], seed: int, lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """BertForPreTraining on the recipe's weights and inputs: hidden states of all layers, both logits."""
    import torch
    import transformers

    config = transformers.BertConfig(**settings, attn_implementation="eager")
    model = transformers.BertForPreTraining(config).eval()
    weights = {name: torch.tensor(array) for name, array in recipe.make_weights(settings, seed).items()}
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and not [k for k in missing.missing_keys if "position_ids" not in k], missing
    inputs = {name: torch.tensor(array).long() for name, array in recipe.make_inputs(settings, lengths, seed).items()}
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    return {
        "hidden_states": torch.stack(output.hidden_states).numpy(),
        "mlm_logits": output.prediction_logits.numpy(),
        "pair_logits": output.seq_relationship_logits.numpy(),
    }


if __name__ == "__main__":
    np.savez_compressed(PATH, seed=SEED, lengths=np.array(LENGTHS), **run_reference(recipe.SETTINGS, SEED, LENGTHS))
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")
