"""Arguments of `bert-data build` for filters: names of families, files with thresholds, kinds of masks."""

import typing
from collections.abc import Sequence

from etils import epath

from bert_jax.errors import UserError, did_you_mean
from bert_jax.field_validation import from_json
from bert_jax.storage.json_files import read_json_object
from data_prep.filters.chain import Filters
from data_prep.filters.language import Language
from data_prep.filters.personal_data import Kind

_ADVICE = "correct the file"


def read_filters(given: Sequence[str], keep_language: Sequence[str]) -> Filters:
    """The filters of `--filter` and `--keep-language`.

    Args:
      given: names of families, with their published thresholds, and JSON files with thresholds by family.
      keep_language: codes of languages.

    Raises:
      UserError: a name or a file is wrong, or a family is given twice.
    """
    families: dict[str, object] = {}
    for one in given:
        if one == "language" and keep_language:
            continue  # --keep-language is its only setting without a default
        if one in Filters.families():
            added = {one: Filters.families()[one]()}
        elif epath.Path(one).suffix == ".json":
            values = read_json_object(epath.Path(one), _ADVICE)
            added = from_json(Filters, values, one, _ADVICE).given()
        else:
            hint = did_you_mean(one, Filters.families())
            raise UserError(
                f"--filter {one}: it is none of {', '.join(Filters.families())}, and no .json file with thresholds"
                f"{hint and f'; {hint}'}"
            )
        _add(families, added, f"--filter {one}")
    if keep_language:
        _add(families, {"language": Language(keep=tuple(keep_language))}, "--keep-language")
    return Filters(**families)


def _add(families: dict[str, object], added: dict[str, object], flag: str) -> None:
    if repeated := families.keys() & added.keys():
        raise UserError(f"{flag}: the thresholds of {min(repeated)} are given twice: give them once")
    families |= added


def parse_masks(given: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds of `--mask`, each once, in the order of their names.

    Raises:
      UserError: there is no such kind.
    """
    kinds = typing.get_args(Kind)
    for one in given:
        if one not in kinds:
            raise UserError(f"--mask {one}: it is none of {', '.join(kinds)}")
    return tuple(sorted(set(given)))
