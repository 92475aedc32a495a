"""Where text comes from: a SPEC (`KIND:GLOB`) is read as a stream of documents in a fixed order."""

import codecs
import dataclasses
import difflib
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import tqdm
from etils import epath

from bert_jax.errors import UserError
from bert_jax.progress import progress
from data_prep import python_docs

_WILDCARD = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Document:
    """One document as its source gave it, not yet cleaned."""

    origin: str
    """where it begins, for messages: a file, a file and its line, or a module"""
    text: str
    """paragraphs divided by blank lines, or one sentence on each line"""
    sentence_per_line: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """A parsed SPEC.

    Reading `documents` shows progress and fills `facts` with what was read (files with their SHA-256
    and size, or versions of packages), complete once the stream has ended.
    """

    spec: str
    documents: Callable[[], Iterator[Document]]
    facts: dict


def parse(spec: str, workers: int = 1) -> Source:
    """The source a SPEC names.

    Args:
      spec: `text:GLOB` (blank line between documents), `text-files:GLOB` (a file is a document),
        `lines:GLOB` (one sentence on each line, blank line between documents) or `python-docs`.
      workers: processes that `python-docs` may use.

    Raises:
      UserError: unknown kind, a missing glob, or one that matches no file.
    """
    kind, _, pattern = spec.partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        raise UserError(f"--source {spec}: unknown kind {kind!r}, did you mean {near!r}? Kinds: {', '.join(KINDS)}")
    if kind == "python-docs":
        if pattern:
            raise UserError(f"--source {spec}: python-docs takes no glob; write just `python-docs`")
        return _python_docs(workers)
    if not pattern:
        raise UserError(f"--source {spec}: say which files, e.g. `{kind}:texts/*.txt`")
    paths = _matches(spec, pattern)
    facts: dict = {"spec": spec, "files": []}
    read = KINDS[kind]

    def documents() -> Iterator[Document]:
        with progress(f"reading {pattern}", sum(path.stat().length for path in paths), "B") as bar:
            for path in paths:
                yield from read(path, _lines(path, facts["files"], bar))

    return Source(spec, documents, facts)


def _matches(spec: str, pattern: str) -> list[epath.Path]:
    """Files a glob matches, sorted by path."""
    # epath refuses "**" everywhere because object stores would take ages; a local disk does not.
    path_type = epath.Path if "://" in pattern else pathlib.Path
    parts = path_type(pattern).expanduser().parts
    fixed = next((i for i, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
    root = path_type(*parts[:fixed])
    try:
        found = list(root.glob("/".join(parts[fixed:]))) if fixed < len(parts) else [root]
    except NotImplementedError as error:
        raise UserError(f"--source {spec}: `**` works on local disks only; name the folders") from error
    files = sorted((epath.Path(path) for path in found if path.exists() and not path.is_dir()), key=os.fspath)
    if not files:
        raise UserError(f"--source {spec}: no file matches {pattern}")
    return files


def _lines(path: epath.Path, files: list[dict], bar: tqdm.tqdm) -> Iterator[str]:
    """Lines of a UTF-8 file, decoded one by one so that an error knows its place; notes it in `files`."""
    digest, offset, only_blank = hashlib.sha256(), 0, True
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); leave it out of the source") from error
    with file:
        for raw in file:
            digest.update(raw)
            body = raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw
            try:
                line = body.decode()
            except UnicodeDecodeError as error:
                place = offset + len(raw) - len(body) + error.start
                raise UserError(f"{path}: not UTF-8 at byte {place}; convert it, e.g. with `iconv -t UTF-8`") from error
            offset += len(raw)
            bar.update(len(raw))
            only_blank = only_blank and not line.strip()
            yield line
    if only_blank:
        raise UserError(f"{path}: no text in this file; leave it out of the source")
    files.append({"path": os.fspath(path), "sha256": digest.hexdigest(), "bytes": offset})


def _blocks(path: epath.Path, lines: Iterator[str], sentence_per_line: bool) -> Iterator[Document]:
    block, first = [], 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not block:
                first = number
            block.append(line)
        elif block:
            yield Document(f"{path}:{first}", "".join(block), sentence_per_line)
            block = []
    if block:
        yield Document(f"{path}:{first}", "".join(block), sentence_per_line)


def _text_file(path: epath.Path, lines: Iterator[str]) -> Iterator[Document]:
    yield Document(str(path), "".join(lines))


def _python_docs(workers: int) -> Source:
    def documents() -> Iterator[Document]:
        for name, text in python_docs.documents(workers):
            yield Document(f"python-docs {name}", text)

    return Source("python-docs", documents, {"spec": "python-docs", **python_docs.versions()})


KINDS: dict[str, Callable] = {
    "text": functools.partial(_blocks, sentence_per_line=False),
    "text-files": _text_file,
    "lines": functools.partial(_blocks, sentence_per_line=True),
    "python-docs": _python_docs,
}
