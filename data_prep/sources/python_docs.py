"""`python-docs`: the documentation installed with Python, a real English corpus without a download.

pydoc's topics, and the docstrings of the standard library and of every installed package, read from the source files
with `ast`; no module is imported or executed.
"""

import ast
import dataclasses
import gc
import hashlib
import importlib.metadata
import inspect
import pathlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator

from data_prep.parallel import ordered_map
from data_prep.sources.base import Document, Input, InputRecord, Source, SourceBlock

MAX_BYTES = 24_000_000
"""Maximum size of the corpus in UTF-8 bytes; with many installed packages it would be much larger."""
MIN_CHARACTERS = 200
"""Modules with shorter docstrings are skipped."""

# Tests have few docstrings; vendored copies repeat those of the package; the standard library may
# contain the site-packages of another environment.
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "_vendor", "vendored", "site-packages"})
_FILES_PER_TASK = 64

_DOCTEST = re.compile(r"\s*(>>>|In \[\d+\]:|\$ )")
_FENCE = re.compile(r"\s*(```|~~~)")
_CODE_DIRECTIVE = re.compile(
    r"\s*\.\. (code|code-block|sourcecode|math|doctest|test\w+|parsed-literal|plot|ipython|toctree"
    r"|autosummary|jupyter-execute|productionlist|image|figure|bibliography)::"
)
_RULER = re.compile(r"\s*[-=~^#*]{3,}\s*$")
_MARKUP = re.compile(r"\s*(\.\. |:\w+:\s*$|[\W_]*$)")
_ITEM = re.compile(r"\s*([-*+•]\s|\d+[.)]\s|\*{0,2}[\w.]+( ?\([^)]*\))? ?:\s|:\w+ [^:]*:|\[\d+\])")


@dataclasses.dataclass(frozen=True)
class PythonDocsSource(Source):
    """`python-docs`: `read_blocks` reads the modules, because each document depends on those before it."""

    workers: int = 1
    """processes that read modules; the result does not depend on it"""

    def inputs(self) -> list[Input]:
        """All of it at once."""
        return [Input((), MAX_BYTES)]

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Names and texts of documents."""
        gathered: list[tuple[str, str]] = []
        size = reported = 0
        for name, text in all_documents(self.workers):
            length = len(text.encode())
            if gathered and size + length > self.block_bytes:
                yield SourceBlock(_origin(gathered[0][0]), tuple(gathered), size)
                gathered, size, reported = [], 0, reported + size
            gathered.append((name, text))
            size += length
        record.files.extend(versions())
        yield SourceBlock("python-docs", tuple(gathered), part.size - reported)

    def documents(self, block: SourceBlock) -> Iterator[Document]:
        """The documents of a block, in order."""
        for name, text in block.payload:
            yield Document(_origin(name), text)


def _origin(name: str) -> str:
    return f"python-docs {name}"


def all_documents(workers: int = 1) -> Iterator[tuple[str, str]]:
    """Name and text of every document, with blank lines between paragraphs.

    Topics come first, then the modules, ordered by a hash of their names, so that at 24 MB every package has its share.
    A docstring that occurred before is skipped.

    Args:
      workers: processes that read modules; the result does not depend on it.
    """
    known: set[bytes] = set()
    size = 0
    for name, blocks in _candidates(workers):
        text = "\n\n".join(_new_blocks(blocks, known))
        if len(text) < MIN_CHARACTERS:
            continue
        size += len(text.encode())
        if size > MAX_BYTES:
            return
        yield name, text


def versions() -> list[dict]:
    """Versions of the documentation: {"name", "version"} of Python and of the installed packages."""
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versioned = [("python", platform.python_version()), *sorted(packages.items())]
    return [{"name": name, "version": version} for name, version in versioned]


def module_docstrings(source: bytes) -> list[str]:
    """Docstrings of a module as prose: its own, then those of classes and functions in source order.

    A file that this Python cannot parse (a template, Python 2) has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. about invalid escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [block for docstring in _docstrings(tree) if (block := prose(docstring))]


def prose(docstring: str) -> str:
    """A docstring without doctests, code blocks, rulers and directives.

    Lines of a paragraph are joined; list items and parameters are paragraphs of their own.
    """
    paragraphs: list[list[str]] = [[]]
    code_indent: int | None = None  # lines deeper than this are code
    in_doctest = in_fence = False
    previous_depth = 0
    # An escape in a docstring can give a lone surrogate, which UTF-8 cannot represent.
    docstring = docstring.encode(errors="ignore").decode()
    for line in inspect.cleandoc(docstring).split("\n"):
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            in_fence = not in_fence
            paragraphs.append([])
        elif not stripped:
            in_doctest = False
            paragraphs.append([])
        elif in_fence or (code_indent is not None and depth > code_indent):
            continue
        elif in_doctest or _DOCTEST.match(line):
            in_doctest = True  # up to the next blank line: what follows is its output
        else:
            is_code_next = stripped.endswith("::") or _CODE_DIRECTIVE.match(line) is not None
            code_indent = depth if is_code_next else None
            if _RULER.match(line) and len(paragraphs[-1]) == 1 and len(paragraphs[-1][0].split()) < 3:
                paragraphs.pop()  # "Parameters" above a ruler: a heading without content
            if _MARKUP.match(line):
                paragraphs.append([])
                continue
            if _ITEM.match(line) or depth < previous_depth:
                paragraphs.append([])
            paragraphs[-1].append(stripped)
            previous_depth = depth
    return "\n\n".join(" ".join(" ".join(lines).split()) for lines in paragraphs if lines)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):  # expressions contain no docstrings
            yield from _docstrings(child)


def _new_blocks(blocks: list[str], known: set[bytes]) -> Iterator[str]:
    for block in blocks:
        digest = hashlib.sha256(block.encode()).digest()[:16]
        if digest not in known:
            known.add(digest)
            yield block


def _candidates(workers: int) -> Iterator[tuple[str, list[str]]]:
    """Name and docstrings of the topics and of every module, in their final order."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    yield from _topics(library / "pydoc_data" / "topics.py")
    modules = _modules(library)
    tasks = [modules[i : i + _FILES_PER_TASK] for i in range(0, len(modules), _FILES_PER_TASK)]
    for batch in ordered_map(_read_modules, tasks, workers, lambda task: str(task[0][1]), gc.disable):
        yield from batch


def _topics(path: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield f"topic {topic}", [prose(text)]


def _modules(library: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Name and file of the modules, the standard library's first, then by a hash of the name."""
    paths = sysconfig.get_paths()
    modules: dict[str, tuple[bool, bytes, pathlib.Path]] = {}
    for root in dict.fromkeys([library, pathlib.Path(paths["purelib"]), pathlib.Path(paths["platlib"])]):
        for path in root.rglob("*.py"):
            inner = path.relative_to(root)
            if _SKIPPED_DIRECTORIES.intersection(inner.parts[:-1]):
                continue
            name = ".".join(inner.with_suffix("").parts)
            digest = hashlib.sha256(name.encode()).digest()
            modules.setdefault(name, (root != library, digest, path))
    return [(name, modules[name][2]) for name in sorted(modules, key=lambda name: modules[name][:2])]


def _read_modules(modules: list[tuple[str, pathlib.Path]]) -> list[tuple[str, list[str]]]:
    return [(name, module_docstrings(path.read_bytes())) for name, path in modules]
