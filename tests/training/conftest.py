"""All tests of training compile quickly."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick(quick_compilation):
    """Half the time to compile; results are equal to rounding."""
