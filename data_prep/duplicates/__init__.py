"""Exact and near duplicates, and decontamination."""
