"""The one exception that stands for a mistake of the user, not of the program."""


class UserError(Exception):
    """Something the user asked for cannot be done.

    The message is one line: what is wrong, where, and what to do about it. The commands print it
    after ``error: `` and leave with exit code 2; a traceback therefore always means a bug.
    """


def require(condition: bool, message: str) -> None:
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)
