"""Families of models as transformers names them, each mapped to and from the configs, heads and parameters of bert_jax.

To add one: a file with a `Family`, and its name in this table.
"""

from bert_jax.convert.families.albert import ALBERT
from bert_jax.convert.families.bert import BERT
from bert_jax.convert.families.distilbert import DISTILBERT
from bert_jax.convert.families.electra import ELECTRA
from bert_jax.convert.families.mobilebert import MOBILEBERT
from bert_jax.convert.families.modernbert import MODERNBERT
from bert_jax.convert.families.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

FAMILIES = {
    family.model_type: family
    for family in (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ALBERT, DISTILBERT, ELECTRA, MODERNBERT, MOBILEBERT)
}
"""By model_type."""
