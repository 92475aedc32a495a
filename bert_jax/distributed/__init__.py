"""The processes of one run: cluster detection, rendezvous, supervision, and agreement during the run."""
