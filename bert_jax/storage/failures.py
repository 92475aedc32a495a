"""Errors of disks and object stores, each described in one line."""

import errno
import os

from bert_jax.errors import causes

STORE_LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google.auth", "s3fs")

_FULL = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`)",
}
FULL_OR_READ_ONLY = _FULL | {errno.EROFS: "mount it for writing and run the same command again"}
_LIMITS = {errno.EMFILE: "raise the limit of open files (`ulimit -n`)"}
_NOT_BUGS = {
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, *_LIMITS),
}


def describe_error(error: BaseException) -> str | None:
    """Describe an error of a disk or of a store's library in one line; None for any other error."""
    if line := describe_full_disk(error):
        return line
    if isinstance(error, OSError) and error.errno in _NOT_BUGS:
        advice = _LIMITS.get(error.errno, "choose another path, or check its permissions and its disk")
        return f"{_file_of(error)}{error.strerror}; {advice}"
    if is_object_store_error(error):
        return f"{describe_unreachable('the object store', error)}; the same command continues where this one stopped"
    return None


def is_object_store_error(error: BaseException) -> bool:
    """Whether the library of an object store raised an error."""
    return any(type(link).__module__.startswith(STORE_LIBRARIES) for link in causes(error))


def describe_full_disk(error: BaseException, remedies: dict[int, str] = _FULL) -> str | None:
    """Describe an error of a full disk or quota in one line, whichever library was writing; None for any other error.

    Libraries that are not written in Python raise exceptions of their own, with the system's message in them.
    """
    link: BaseException | None = error
    while link is not None:
        number = link.errno if isinstance(link, OSError) else None
        for known, remedy in remedies.items():
            if number == known or os.strerror(known) in str(link):
                return f"{_file_of(link)}{os.strerror(known)}; {remedy}"
        link = link.__cause__ or link.__context__
    return None


def _file_of(error: BaseException) -> str:
    file = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return f"{file}: " if file else ""


def describe_unreachable(target: object, error: BaseException) -> str:
    """Describe in one line why a store cannot be reached."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{target} cannot be reached ({reason}): check credentials, permissions, endpoint and network"
