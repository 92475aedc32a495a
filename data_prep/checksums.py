"""Checksums of files."""

import hashlib
from collections.abc import Callable

from etils import epath


def file_facts(path: epath.Path, on_bytes: Callable[[int], None] | None = None) -> dict:
    """SHA-256 and size of a file; `on_bytes` hears how much was read, for progress."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
            if on_bytes:
                on_bytes(len(block))
    return {"sha256": digest.hexdigest(), "bytes": size}
