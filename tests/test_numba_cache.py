"""Machine code on disk is compiled again after a change in another file."""

import os
import subprocess
import sys

import pytest

HEAD = "from bert_jax.numba_cache import cached_njit\n"
FILES = {
    "far.py": HEAD + "SCALE = 2\n@cached_njit\ndef far(x):\n    return x * SCALE\n",
    "near.py": HEAD + "from far import far\n@cached_njit\ndef near(x):\n    return far(x)\n",
    "size.py": "import numpy as np\nSIZE = np.int64(1)\n",
    "top.py": HEAD
    + "from near import near\nfrom size import SIZE\n@cached_njit\ndef top(x):\n    return near(x) + SIZE\n",
}
PROGRAM = "from top import top; print(top(10), sum(top.stats.cache_hits.values()))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "result"),
    [("far.py", "x *", "1 + x *", 22), ("far.py", "SCALE = 2", "SCALE = 3", 31), ("size.py", "(1)", "(5)", 25)],
)
def test_a_change_in_another_file(tmp_path, file, old, new, result):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path) == "21 0"
    assert run(tmp_path) == "21 1"
    (tmp_path / file).write_text(FILES[file].replace(old, new))
    assert run(tmp_path) == f"{result} 0"


def run(directory):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(directory), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment["NUMBA_CACHE_DIR"] = str(directory / "cache")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
