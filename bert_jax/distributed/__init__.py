"""The processes of one run: where they are, that they agree, who died."""
