"""Studies: factors, cells, statistics and verdicts."""
