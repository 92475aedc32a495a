"""Exact and near duplicates, and text of evaluation sets."""
