"""The files of a run: config, checkpoints, ledger, metrics."""
