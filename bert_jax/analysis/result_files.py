"""Results of suites on disk: what each was computed from, and whether a file is the result of the same request."""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from etils import epath

from bert_jax.analysis import item_scores
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.analysis.suite import ITEMS, UNCERTAINTY, Suite, SuiteInputs, SuiteResult
from bert_jax.errors import UserError, require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.provenance import Provenance, code, describe_code, make_provenance
from bert_jax.storage.files import walk_files, write_atomic
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import StoredPath
from bert_jax.training.param_paths import params_sha256
from bert_jax.training.run_directory.environment import describe_environment

FORMAT_VERSION = 5
SHARED_PACKAGES = ("finetune", "inference", "interventions", "model", "objectives", "tokenizers")
"""Packages of bert_jax whose data, vectors and metrics suites use."""
DIGITS = 6
"""Significant digits of numbers; the next ones differ between devices."""
ADVICE = "choose another --out, or remove the file"


class Request(TypedDict):
    """What a result is a function of."""

    suite: str
    settings: dict[str, Any]
    seed: int
    model: str
    """Hex SHA-256 of config, heads, parameters and tokenizer."""
    data: str
    """Hex SHA-256 of the files of the suite's folders: their names and contents."""
    code: str
    """`code_version` of the suite."""


class ResultFile(TypedDict):
    """A file of a suite's result."""

    format_version: int
    request: Request
    result: SuiteResult
    result_sha256: str
    """Hex SHA-256 of the result: pages and comparisons read its fields as the suite wrote them."""
    provenance: Provenance
    seconds: float
    """Of the suite, with compilation."""
    peak_memory_mb: int
    """Largest resident memory of the process until the suite's end, in 10^6 bytes."""


class Computed(NamedTuple):
    """A result and whether this call computed it."""

    file: ResultFile
    is_new: bool


def model_sha256(model: LoadedModel) -> str:
    """Hex SHA-256 of everything that determines what a model computes."""
    about = [dataclasses.asdict(model.config), dataclasses.asdict(model.heads), model.tokenizer.fingerprint]
    return params_sha256(model.params, json.dumps(about, sort_keys=True))


def data_sha256(data: StoredPath, folders: tuple[str, ...]) -> str:
    """Hex SHA-256 of the files in and below some folders: names and contents; a missing folder counts as empty."""
    digest, root = hashlib.sha256(), epath.Path(data)
    for folder in folders:
        files = walk_files(root / folder) if (root / folder).is_dir() else []
        for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_version(suite: Suite) -> str:
    """12 hex digits of the SHA-256 of the source of a suite: its package, what all suites share, and `SHARED_PACKAGES`.

    A change of a comment is another version, too: a suite that is computed again costs time, and a number that was
    made by code with a fault costs more.
    """
    return _source_digest(Path(inspect.getfile(suite.settings)).parent)


@functools.cache
def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for directory in dict.fromkeys((here, package, *(here.parent / name for name in SHARED_PACKAGES))):
        for path in sorted(directory.glob("*.py")):
            digest.update(f"{directory.name}/{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def read(path: StoredPath) -> ResultFile:
    """A file of `compute_or_read`; UserError if it is damaged, or its result was changed."""
    file = read_json_as(path, ResultFile, ADVICE, FORMAT_VERSION)
    same = file["result_sha256"] == _result_sha256(file["result"])
    require(same, f"{path}: the result was changed after it was written: {ADVICE}")
    return file


def _result_sha256(result: SuiteResult) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def items_path(path: StoredPath) -> StoredPath:
    """The file of the scores of items beside that of a result."""
    return path.parent / f"{path.stem}.items.jsonl"


def read_items(path: StoredPath, result: SuiteResult) -> dict[str, ItemScores]:
    """The scores of the items of a result, by test.

    Args:
      path: of the result's file.
      result: that was read from it.

    Raises:
      UserError: their file is missing or damaged.
    """
    items = items_path(path)
    require(items.exists(), f"{items} is missing: remove {path}, and the suite is computed again")
    found = item_scores.read_json_lines(items, f"remove {path}, and the suite is computed again")
    about = result[UNCERTAINTY]
    counts = {test: len(one.items) for test, one in found.items()}
    whole = counts == {test: one["items"] for test, one in about.items()}
    require(whole, f"{items} has other items than {path}: remove {path}, and the suite is computed again")
    return {
        test: found[test]._replace(**{key: one[key] for key in ("unit", "same_tokenizer")})
        for test, one in about.items()
    }


def compute_or_read(path: StoredPath, suite: Suite, inputs: SuiteInputs, settings: Any, model_digest: str) -> Computed:
    """The result of a suite, from its file if the same code has made it; otherwise the file is written atomically.

    Raises:
      UserError: the file is the result of another request, or damaged; the data or the model do not suit the suite.
    """
    request = Request(
        suite=suite.name,
        settings=json.loads(json.dumps(dataclasses.asdict(settings))),
        seed=inputs.seed,
        model=model_digest,
        data=data_sha256(inputs.data, suite.folders),
        code=code_version(suite),
    )
    if path.exists():
        file = read(path)
        _check_same(path, file["request"] | {"code": request["code"]}, request)
        if file["request"]["code"] == request["code"]:
            return Computed(file, False)
        print(f"note: {suite.name} is computed again: {other_code_text(path, file)}", file=sys.stderr)
    hashes = {"model and tokenizer": request["model"], "data": request["data"]}
    # Before the suite runs: its code can be changed on the disk meanwhile.
    made = make_provenance(describe_environment(), hashes=hashes, configs={"model": inputs.model.config})
    start = time.perf_counter()
    result, items = finish(suite.run(inputs, settings), suite.name)
    if items is not None:
        write_atomic(items_path(path), item_scores.to_json_lines(items))
    file = ResultFile(
        format_version=FORMAT_VERSION,
        request=request,
        result=result,
        result_sha256=_result_sha256(result),
        provenance=made,
        seconds=round(time.perf_counter() - start, 2),
        peak_memory_mb=_peak_memory() // 10**6,
    )
    write_atomic(path, json.dumps(file, indent=1, allow_nan=False).encode())
    return Computed(file, True)


def other_code_text(path: StoredPath, file: ResultFile) -> str:
    """A clause that names the code of a file that another version of the suite made, and that of this process."""
    return f"{path} was made by other code, {describe_code(file['provenance']['code'])}; now {describe_code(code())}"


def finish(result: SuiteResult, name: str) -> tuple[SuiteResult, dict[str, ItemScores] | None]:
    """A result as its file has it, with `UNCERTAINTY` in place of the scores of items; and these, if there are any."""
    items = result.get(ITEMS)
    found = {key: value for key, value in result.items() if key != ITEMS}
    if items is not None:
        found[UNCERTAINTY] = item_scores.uncertainty(items)
    return _plain(found, name), items


def _check_same(path: StoredPath, written: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raise UserError that names the first difference."""
    if written == request:
        return
    before, now = (
        {**one, **{f"--{one['suite']}.{k.replace('_', '-')}": v for k, v in one["settings"].items()}}
        for one in (written, request)
    )
    differing = [key for key in now if key != "settings" and before.get(key) != now[key]]
    key = differing[-1] if differing else "settings"
    how = {"model": "another model", "data": "other data"}.get(key, f"{key} {before.get(key)}, now {now.get(key)}")
    raise UserError(f"{path} is the result of {how}: {ADVICE}")


def _plain(value: Any, where: str) -> Any:
    """A result as JSON holds it: NumPy's numbers and arrays become Python's, with DIGITS; NaN becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), where)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    assert value is None or isinstance(value, bool | int | str), f"{where}: {type(value)}"
    return value


def _peak_memory() -> int:
    """Bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
