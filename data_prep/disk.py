"""Errors of disks and file systems as the user's errors: one line that says what to do."""

import errno

from bert_jax.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "make room and start the same command again",
    errno.EDQUOT: "make room and start the same command again",
    errno.EROFS: "choose a directory that can be written",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.ENOENT: "it is not there, or cannot be made",
    errno.ENOTDIR: "choose a directory, not something inside a file",
    errno.EIO: "the disk could not read or write; check it, then start the same command again",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n` or use fewer --workers",
}


def as_user_error(error: Exception) -> UserError | None:
    """The error in the user's words, or None for one that is not theirs to mend."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    where = error.filename2 or error.filename
    return UserError(
        f"{where}: {error.strerror}; {_REMEDIES[error.errno]}"
        if where
        else f"{error.strerror}; {_REMEDIES[error.errno]}"
    )
