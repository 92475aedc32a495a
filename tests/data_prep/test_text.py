"""Cleaning, sentences, sources and python-docs: text in, text out."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import UserError
from data_prep import python_docs, sources
from data_prep.clean import clean
from data_prep.sentences import split_lines, split_sentences


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("  a\t b \r\n c\r", "a b\nc"),
        ("a\n\n \n\n\nb", "a\n\nb"),
        ("e\u0301te\u0301", "été"),
        ("x²", "x²"),
        ("a\x00b\ufeffc\u200bd\u00ade\ufffd", "abcde"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("a\u00a0\u3000b", "a b"),
        ("a\u2028b\x0bc", "a\nb\nc"),
        ("\x00 \n", ""),
    ],
)
def test_clean(dirty, expected):
    assert clean(dirty) == expected


@given(st.text())
def test_clean_twice_is_clean_once(text):
    assert clean(clean(text)) == clean(text)


def test_sentences_end_at_paragraphs_but_not_at_line_ends():
    text = "A heading\n\nDr. Smith arrived\nlate. It rained! “Really?” she asked.\n\nno full stop"
    assert split_sentences(text) == [
        "A heading",
        "Dr. Smith arrived late.",
        "It rained!",
        "“Really?” she asked.",
        "no full stop",
    ]
    assert split_sentences("") == []
    assert split_lines("One. Two.\nThree\n\nFour") == ["One. Two.", "Three", "Four"]


def read(spec):
    source = sources.parse(spec)
    return [(document.origin, document.text) for document in source.documents()], source.facts


def test_kinds(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\n\none\ntwo\n \n\nthree")
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"zero\r\n")
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    documents, facts = read(f"text:{tmp_path}/*.txt")
    assert documents == [(f"{a}:1", "zero\r\n"), (f"{b}:3", "one\ntwo\n"), (f"{b}:7", "three")]
    assert [(file["path"], file["bytes"]) for file in facts["files"]] == [(str(a), 9), (str(b), 18)]
    assert read(f"lines:{tmp_path}/b.txt")[0] == documents[1:]
    assert read(f"text-files:{tmp_path}/**/*.txt")[0] == [
        (str(a), "zero\r\n"),
        (str(b), "\n\none\ntwo\n \n\nthree"),
    ]
    assert [d.sentence_per_line for d in sources.parse(f"lines:{a}").documents()] == [True]


def test_relative_globs(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert read("text:*/*.txt")[0] == [("sub/a.txt:1", "x")]
    assert read("text:sub/a.txt")[0] == [("sub/a.txt:1", "x")]


def test_unreadable_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    source = sources.parse(f"text:{path}")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Is a directory\)"):
        list(source.documents())


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
    assert python_docs.module_blocks(MODULE.encode()) == [
        "The module.\n\nIt has a second paragraph over two lines, and says half of .",
        "A thing::\n\nBack to prose.\n\nx : int How many.\n\ny : str What it is called, in words.\n\n- one"
        "\n\n- two\n\nThe end.",
        "Does it.",
        "Inner.",
        "Later.",
    ]
    assert python_docs.module_blocks(b"print 'python 2'") == []
    assert python_docs.module_blocks(b"x = '\\d'") == []


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
    documents = dict(python_docs.documents())
    assert list(documents) == ["topic assert", "long", "p.__init__"]
    assert documents["long"].endswith("Shared sentence.")
    assert "Shared" not in documents["p.__init__"], "a docstring that occurred before is left out"


def test_the_cap_cuts_at_a_document(small_library, monkeypatch):
    everything = list(python_docs.documents())
    monkeypatch.setattr(python_docs, "MAX_BYTES", sum(len(text) for _, text in everything) - 1)
    assert list(python_docs.documents()) == everything[:-1]


def test_versions_name_this_python():
    versions = python_docs.versions()
    assert versions["packages"]["numpy"] and versions["python"].startswith("3.")
