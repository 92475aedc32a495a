"""Estimates of memory, communication, time and cost of a run before it starts."""
