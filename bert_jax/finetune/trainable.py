"""Which parameters a fine-tuning run trains, as patterns for `Phase.frozen`.

The statistics of `TaskHead.cls_norm` are never trained, whatever the patterns are (`PARAM_RULES`).
"""

ALL_BUT_ADAPTERS = (r"encoder/(?!(.*/)?(\w+_adapter|\w*norm)/).*",)
"""Only adapters, all LayerNorms and the task head are trained, the pooler is not (Houlsby et al. 2019, section 3.1;
google-research/adapter-bert). Of a model without adapters, only LayerNorms and head."""
ENCODER = (r"encoder/(embeddings|layers|final_norm)/.*",)
"""Only the task head, and the pooler that it reads, are trained."""
