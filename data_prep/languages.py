"""Languages of documents: codes, identification by CLD2, and which of them have rules for sentences."""

import functools
import importlib
from collections.abc import Collection
from types import ModuleType

import langcodes

from bert_jax.data.corpus_description import UNDETERMINED
from bert_jax.errors import UserError, install_command

DEFAULT = "en"
AUTO = "auto"
"""Setting of a source whose documents are identified."""

# Of sentencex 1.0.32 (src/lib.rs); it uses English rules for codes without rules and without a related language.
_WITH_RULES = frozenset(
    "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk".split()  # noqa: SIM905
)

_SLICES, _SLICE_CHARACTERS = 4, 2000


def check_setting(setting: str) -> str:
    """The language of a source: an ISO 639 code as `normalize` writes it, `@FIELD`, or `auto`.

    Raises:
      UserError: it is none of them, or identification is not installed.
    """
    if setting.startswith("@") and len(setting) > 1:
        return setting
    if setting == AUTO:
        _library()
        return setting
    code = normalize(setting)
    if code == UNDETERMINED and setting != UNDETERMINED:
        raise UserError(
            f"--language {setting}: it is not an ISO 639 code such as en, de or zh, nor @FIELD (a field of each"
            " record) or auto (identified for each document)"
        )
    return code


def normalize(value: object) -> str:
    """A language tag as BCP 47 writes it: `EN`, `eng` as `en`, `zh_hant` as `zh-Hant`, `iw` as `he`.

    `und` if its parts are not registered with IANA, which has the codes of ISO 639.
    """
    if not isinstance(value, str):
        return UNDETERMINED
    try:
        code = langcodes.standardize_tag(value.strip())
    except langcodes.LanguageTagError:
        return UNDETERMINED
    is_registered = langcodes.tag_is_valid(code) and not code.startswith("x-")
    return code if is_registered else UNDETERMINED


def identify(text: str) -> str:
    """The language of a text by CLD2 (Sites 2013), from four slices of 2,000 characters if it is longer than 8,000.

    CLD2 has tables for its languages in the library and computes with integers, so the result is the same everywhere.
    """
    return next(iter(_shares(text, best_effort=True)))


def identified_shares(text: str) -> dict[str, float]:
    """The share of a text, or of its slices as for `identify`, in each of at most three languages, the largest first.

    Empty if CLD2 does not take its own guess as reliable.
    """
    return {code: share for code, share in _shares(text, best_effort=False).items() if share and code != UNDETERMINED}


def _shares(text: str, best_effort: bool) -> dict[str, float]:
    library = _library()
    if len(text) > _SLICES * _SLICE_CHARACTERS:
        places = [(len(text) - _SLICE_CHARACTERS) * i // (_SLICES - 1) for i in range(_SLICES)]
        text = " ".join(text[place : place + _SLICE_CHARACTERS] for place in places)
    try:
        details = library.detect(text, isPlainText=True, bestEffort=best_effort)[2]
    except library.error:  # it refuses control characters
        text = "".join(character if character.isprintable() else " " for character in text)
        details = library.detect(text, isPlainText=True, bestEffort=best_effort)[2]
    # Its codes for scripts and test languages are not of ISO 639; several of these are one.
    shares: dict[str, float] = {}
    for _, code, percent, _ in details:
        shares[normalize(code)] = shares.get(normalize(code), 0) + percent / 100
    return shares


@functools.lru_cache(1024)
def identified_code(code: str) -> str:
    """The code for one of the languages that CLD2 knows, without region and script: `zh-Hant` and `cmn` are `zh`.

    Raises:
      UserError: it is no registered code, or CLD2 does not know the language.
    """
    library = _library()
    detected = [known for name, known in library.LANGUAGES if name in library.DETECTED_LANGUAGES]
    main = _main_code(normalize(code))
    if normalize(code) == UNDETERMINED or main not in {_main_code(normalize(known)) for known in detected}:
        raise UserError(f"language {code}: it is not the ISO 639 code of a language that CLD2 identifies, such as en")
    return main


@functools.lru_cache(1024)
def _main_code(code: str) -> str:
    return langcodes.Language.get(code).prefer_macrolanguage().language or UNDETERMINED


def is_language(code: str, main_codes: Collection[str]) -> bool:
    """Whether a code, as from `identified_shares`, is of one of the languages, given by `identified_code`."""
    return _main_code(code) in main_codes


@functools.lru_cache(1024)
def splitter_code(code: str) -> str:
    """The code of a language for `sentencex`, which knows few regions, and `ar` but not `arb`."""
    tag = langcodes.Language.get(code)
    collective = _main_code(code)
    return collective if collective in _WITH_RULES else tag.language or UNDETERMINED


def has_rules(code: str) -> bool:
    """Whether `sentencex` has rules for the language itself; what is no code has none."""
    return splitter_code(normalize(code)) in _WITH_RULES


def _library() -> ModuleType:
    try:
        return importlib.import_module("pycld2")
    except ModuleNotFoundError as error:
        raise UserError(
            f"identification of languages (--language auto, --keep-language) needs pycld2, which is missing:"
            f" {install_command('languages')}"
        ) from error
