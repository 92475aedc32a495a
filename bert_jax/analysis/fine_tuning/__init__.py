"""What fine-tuning changes: similarity to the pretrained model by layer, restored layers, the loss between the two."""

from bert_jax.analysis.fine_tuning.fine_tuning import SUITE

__all__ = ["SUITE"]
