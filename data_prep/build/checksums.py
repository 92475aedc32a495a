"""Checksums of files."""

import hashlib

from etils import epath


def file_entry(path: epath.Path) -> dict:
    """SHA-256 and size of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}
