"""The encoder and its heads: plain functions of plain trees of arrays."""
