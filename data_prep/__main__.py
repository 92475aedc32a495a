"""`python -m data_prep` is `bert-data`."""

import sys

from data_prep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
