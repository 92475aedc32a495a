"""Dataclasses from JSON: types are exact, and a message has the file, the key and what its value must be."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import pytest

from bert_jax.errors import UserError
from bert_jax.field_validation import FILE_NAME, Interval, Rate, Sha256, check, from_json


@dataclass(frozen=True)
class Part:
    size: Annotated[int, Interval("[1, 9]")]
    rate: Rate = 0.5
    limit: float | None = None
    tags: Annotated[tuple[str, ...], "flag"] = ()


@dataclass(frozen=True)
class Whole:
    name: str
    part: Part
    parts: tuple[Part, ...] = ()
    pair: tuple[str, float] = ("a", 1.0)
    kind: Literal["plain", "gated"] = "plain"
    on: bool = False
    extra: Part | None = None


class Open(TypedDict):
    sums: dict[str, int]
    names: list[str]


GOOD = {"name": "x", "part": {"size": 3}}


def test_objects_and_arrays_are_converted_and_numbers_are_kept():
    value = from_json(Whole, GOOD | {"parts": [{"size": 1, "limit": 2}], "pair": ["b", 3], "extra": {"size": 9}}, "f")
    assert value == Whole("x", Part(3), (Part(1, limit=2),), ("b", 3), extra=Part(9))
    assert type(value.parts) is tuple and type(value.parts[0].limit) is int
    opened = from_json(Open, {"sums": {"a.b": 1}, "names": [], "more": 1}, "f")
    assert opened == {"sums": {"a.b": 1}, "names": [], "more": 1}
    assert from_json(Whole, GOOD | {"extra": None}, "f").extra is None
    assert from_json(Part, {"size": 1, "tags": ["a"]}, "f").tags == ("a",)


BAD = [
    (Whole, [], r"the whole is \[\]: it must be an object"),
    (Whole, {"part": {"size": 3}}, "field 'name' is missing"),
    (Whole, {"nane": "x", "part": {"size": 3}}, r"unknown field 'nane': did you mean 'name'\?"),
    (Whole, GOOD | {"part": {"sise": 3}}, r"unknown field 'part.sise': did you mean 'size'\?"),
    (Whole, GOOD | {"part": {}}, "field 'part.size' is missing"),
    (Whole, GOOD | {"part": None}, "part is None: it must be an object"),
    (Whole, GOOD | {"part": {"size": True}}, r"part.size is True: it must be a whole number in \[1, 9\]"),
    (Whole, GOOD | {"part": {"size": 3.0}}, r"part.size is 3\.0: it must be a whole number"),
    (Whole, GOOD | {"part": {"size": "3"}}, "part.size is '3': it must be a whole number"),
    (Whole, GOOD | {"part": {"size": 10}}, "part.size is 10: it must be a whole number"),
    (Whole, GOOD | {"part": {"size": 1, "rate": 1}}, r"part.rate is 1: it must be a number in \[0, 1\)"),
    (Whole, GOOD | {"part": {"size": 1, "rate": float("nan")}}, r"part.rate is nan: it must be a number in \[0, 1\)"),
    (Whole, GOOD | {"part": {"size": 1, "limit": False}}, "part.limit is False: it must be a number or None"),
    (Whole, GOOD | {"part": {"size": 1, "limit": [1]}}, r"part.limit is \[1\]: it must be a number"),
    (Whole, GOOD | {"parts": {}}, "parts is {}: it must be a list, each item an object"),
    (Whole, GOOD | {"parts": [{"size": 1}, 2]}, "parts.1 is 2: it must be an object"),
    (Whole, GOOD | {"pair": ["b"]}, r"pair is \['b'\]: it must be \[a string, a number\]"),
    (Whole, GOOD | {"pair": ["b", "c"]}, "pair.1 is 'c': it must be a number"),
    (Whole, GOOD | {"kind": "Plain"}, "kind is 'Plain': it must be one of plain, gated"),
    (Whole, GOOD | {"on": 1}, "on is 1: it must be true or false"),
    (Whole, GOOD | {"name": 1}, "name is 1: it must be a string"),
    (Whole, GOOD | {"extra": {"size": 0}}, "extra.size is 0: it must be a whole number"),
    (Open, {"sums": {"a.b": "1"}, "names": []}, "sums.a.b is '1': it must be a whole number"),
    (Open, {"sums": {"\x1b[2J": "1"}, "names": []}, r"sums\.'\\x1b\[2J' is '1'"),
    (Part, {"\x1b[2J": 1}, r"unknown field ''\\x1b\[2J''"),
    (dict[Sha256, int], {"..": 1}, r"the whole has the key '\.\.': it must be a string that is a SHA-256"),
    (Open, {"sums": {}, "names": [1]}, "names.0 is 1: it must be a string"),
    (Open, {"sums": {}}, "field 'names' is missing"),
]


@pytest.mark.parametrize(("kind", "value", "message"), BAD)
def test_bad_values_are_refused(kind, value, message):
    with pytest.raises(UserError, match=rf"^dir/f\.json: {message}.*: copy it again$"):
        from_json(kind, value, "dir/f.json", "copy it again")


@pytest.mark.parametrize(("change", "name"), [({"pair": ["b", 1.0]}, "pair"), ({"part": {"size": 3}}, "part")])
def test_values_made_in_python_must_have_their_final_type(change, name):
    check(Whole("x", Part(1)), "w.")
    with pytest.raises(UserError, match=rf"^w\.{name} is "):
        check(Whole(**{"name": "x", "part": Part(1)} | change), "w.")


@pytest.mark.parametrize("name", ["a", "..a", "a..", "...", ".hidden", "model-1-of-2.safetensors", "ä b", "a" * 240])
def test_file_names(name):
    assert name in FILE_NAME


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\\b", "a\n", "\0", "\x85", "\ud800", "a" * 241])
def test_names_that_are_not_one_file_in_the_directory(name):
    assert name not in FILE_NAME
