"""Checks that a converted model computes what its source computes."""
