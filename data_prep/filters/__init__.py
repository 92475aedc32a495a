"""Filters of documents by the quality of their text, its language, or a function of the user; masks of personal data.

A family of rules is a file: its thresholds are the fields of a dataclass, and each rule has the name of its threshold.
"""
