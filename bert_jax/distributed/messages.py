"""The form of all that supervisors send each other: one JSON object per line. Other forms are refused here.

Everyone who reaches the port can send bytes, so nothing that is read from a socket is used before `parse_message`.
"""

from typing import Annotated, Any, TypedDict

from bert_jax.distributed.process_report import COMPARED_SECTIONS
from bert_jax.errors import UserError
from bert_jax.field_validation import Count, CountOrZero, Interval, NonNegative, from_json
from bert_jax.storage.json_files import parse_json

Message = dict[str, Any]
Port = Annotated[int, Interval("[1, 65535]")]
_ExitCode = Annotated[int, Interval("[-64, 255]")]
"""Negative for a signal."""


class _Devices(TypedDict):
    count: Count
    kind: str
    slices: list[CountOrZero]
    memory: NonNegative
    most_memory: NonNegative | None
    reports_memory: bool


class _StorageProbe(TypedDict):
    file: str
    error: str


class _LocalProbe(TypedDict):
    error: str
    free: NonNegative


_Sections = TypedDict("_Sections", dict.fromkeys(COMPARED_SECTIONS, dict[str, Any]), total=False)


class _DoctorSections(TypedDict, total=False):
    devices: _Devices | None
    storage_probe: _StorageProbe
    local_probe: _LocalProbe


class _Report(_Sections, _DoctorSections):
    host: str


class _Restart(TypedDict):
    port: Port | None


class _Message(TypedDict, total=False):
    # Before the start: the question of process 0, the answer of another, and the decision of process 0.
    question: str
    process: CountOrZero
    processes: Count
    proof: str
    report: _Report
    refuse: str
    mistake: bool
    again: bool
    # Of a running process.
    done: bool
    failure: _ExitCode | None
    first_failure: tuple[CountOrZero, _ExitCode | None]
    vote: bool
    restart: _Restart


def parse_message(line: bytes) -> Message | None:
    """The message in a line; None if it has another form. It never raises, and does not ask who sent it.

    `result` (a decision) and the values of a report's sections can be any JSON values. Texts can hold lone surrogates,
    except `question` and `proof`, which are ASCII.
    """
    try:
        message = from_json(_Message, parse_json(line, "a message", ""), "a message")
    except UserError:
        return None
    is_ascii = all(message.get(name, "").isascii() for name in ("question", "proof"))
    return message if is_ascii else None
