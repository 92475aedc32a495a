"""The file of an HTML page: what may be replaced, and one message for everything that can go wrong."""

import os
from collections.abc import Sequence

from etils import epath

from bert_jax.errors import UserError
from bert_jax.report import Section, html
from bert_jax.storage.files import write_atomic

_HEAD_BYTES = 1000
"""The generator of a page is among its first bytes."""


def check_page_file(path: str | os.PathLike, flag: str) -> None:
    """Check that a page can be written there: to a new file, or in place of an older page.

    Args:
      path: of the page.
      flag: of the command, for messages.

    Raises:
      UserError: another file is there, or the directory does not exist.
    """
    page = epath.Path(path)
    try:
        if not page.parent.is_dir():
            raise UserError(f"{flag} {page}: there is no directory {page.parent}; make it first")
        if page.is_dir():
            raise UserError(f"{flag} {page}: is a directory; give the name of a file")
        if page.exists():
            with page.open("rb") as file:
                if html.GENERATOR.encode() not in file.read(_HEAD_BYTES):
                    raise UserError(
                        f"{flag} {page}: exists already and is not a page of bert_jax; choose another file or remove it"
                    )
    except OSError as error:
        raise UserError(f"{flag} {page}: cannot be written ({error.strerror}); choose another file") from error


def write_page(path: str | os.PathLike, flag: str, sections: Sequence[Section]) -> None:
    """Render sections as a page and write it atomically.

    Args:
      path: of the page, accepted by `check_page_file`.
      flag: of the command, for messages.
      sections: of the page.

    Raises:
      UserError: the file cannot be written, or a figure needs matplotlib.
    """
    write_html(path, flag, html.render(sections))


def write_html(path: str | os.PathLike, flag: str, content: str) -> None:
    """Write a page atomically.

    Args:
      path: of the page, accepted by `check_page_file`.
      flag: of the command, for messages.
      content: of the page, with `html.GENERATOR` in its head.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        write_atomic(epath.Path(path), content.encode())
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror}); choose another file") from error
