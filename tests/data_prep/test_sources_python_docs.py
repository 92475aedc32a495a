"""`python-docs`: docstrings as prose, documents of an environment, the cap."""

import pytest

from data_prep.sources import InputRecord, parse, python_docs
from tests.data_prep.test_sources_reading import read

MODULE = '''
"""The module.

It has a second paragraph
over two lines, and says half of \\ud83d.
"""

class Thing:
    """A thing::

        code = that(is_not, prose)

    Back to prose.

    Parameters
    ----------
    x : int
        How many.
    y : str
        What it is called,
        in words.

    ============

    - one
    - two

    >>> Thing(3)
    Thing(x=3)

    ```python
    import thing
    ```
    The end.
    """

    def method(self):
        """Does it."""
        def inner():
            "Inner."

if True:
    async def later():
        """Later."""
'''


def test_module_blocks_are_prose_in_source_order():
    assert python_docs.module_docstrings(MODULE.encode()) == [
        "The module.\n\nIt has a second paragraph over two lines, and says half of .",
        "A thing::\n\nBack to prose.\n\nx : int How many.\n\ny : str What it is called, in words.\n\n- one"
        "\n\n- two\n\nThe end.",
        "Does it.",
        "Inner.",
        "Later.",
    ]
    assert python_docs.module_docstrings(b"print 'python 2'") == []
    assert python_docs.module_docstrings(b"x = '\\d'") == []


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    for path, text in {
        "pydoc_data/topics.py": f"topics = {{'assert': '{'They say what must hold. ' * 10}'}}",
        "long.py": f'"""{"Long enough to be read. " * 12}"""\ndef f():\n    """Shared sentence."""',
        "short.py": '"""Too short."""',
        "test/test_long.py": f'"""{"A test. " * 50}"""',
    }.items():
        (library / path).parent.mkdir(parents=True, exist_ok=True)
        (library / path).write_text(text)
    (packages / "p").mkdir(parents=True)
    (packages / "p/__init__.py").write_text(f'"""{"The package. " * 20}"""\ndef f():\n    """Shared sentence."""')
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: paths)


def test_documents_of_an_environment(small_library):
    documents = dict(python_docs.all_documents())
    assert list(documents) == ["topic assert", "long", "p.__init__"]
    assert documents["long"].endswith("Shared sentence.")
    assert "Shared" not in documents["p.__init__"], "a docstring that occurred before is left out"


def test_the_cap_cuts_at_a_document(small_library, monkeypatch):
    everything = list(python_docs.all_documents())
    monkeypatch.setattr(python_docs, "MAX_BYTES", sum(len(text) for _, text in everything) - 1)
    assert list(python_docs.all_documents()) == everything[:-1]


def test_versions_name_this_python():
    versions = {package["name"]: package["version"] for package in python_docs.versions()}
    assert versions["numpy"] and versions["python"].startswith("3.")


def test_the_source(small_library, monkeypatch):
    texts = list(python_docs.all_documents())
    for block_bytes in (10, 700, 1 << 20):
        reading = read("python-docs", block_bytes=block_bytes)
        assert reading.texts == [text for _, text in texts]
        assert [d.origin for d in reading.documents] == [f"python-docs {name}" for name, _ in texts]
        assert reading.blocks == {10: 3, 700: 2, 1 << 20: 1}[block_bytes]
    assert reading.file_entries == python_docs.versions()


def test_workers_make_no_difference(monkeypatch):
    monkeypatch.setattr(python_docs, "MAX_BYTES", 100_000)
    texts = []
    for workers in (1, 2):
        source = parse("python-docs", workers)
        (part,) = source.inputs()
        texts.append(
            [document.text for block in source.read_blocks(part, InputRecord()) for document in source.documents(block)]
        )
    assert texts[0] == texts[1] and len(texts[0]) > 5
