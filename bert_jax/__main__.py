"""``python -m bert_jax``."""

import sys

from bert_jax.cli.main import main

if __name__ == "__main__":  # reader processes import this file, too
    sys.exit(main())
