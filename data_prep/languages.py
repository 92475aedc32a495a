"""Languages of documents: codes, identification by CLD2, and which of them have rules for sentences."""

import importlib
import re
from types import ModuleType

from bert_jax.errors import UserError, install_command

DEFAULT = "en"
AUTO = "auto"
"""Setting of a source whose documents are identified."""
UNDETERMINED = "und"
"""ISO 639-2 code of a document whose language is not known."""

# Of sentencex 1.0.32 (src/lib.rs); it uses English rules for codes without rules and without a related language.
_WITH_RULES = dict(
    re.findall(
        r"(\w+)=(\w+)",
        "am=amh ar=ara bg=bul bn=ben ca=cat da=dan de=deu el=ell en=eng es=spa fi=fin "
        "fr=fra gu=guj hi=hin hy=hye it=ita ja=jpn kk=kaz kn=kan ml=mal mr=mar my=mya "
        "nl=nld pa=pan pl=pol pt=por ru=rus sk=slk ta=tam te=tel uk=ukr",
    )
)
"""Codes of two letters with those of three letters (ISO 639-3)."""
_BIBLIOGRAPHIC_CODES = {"ger": "de", "fre": "fr", "dut": "nl", "gre": "el", "arm": "hy", "bur": "my", "slo": "sk"}
"""ISO 639-2/B: other codes of three letters for some languages."""
_SHORT_CODES = {three: two for two, three in _WITH_RULES.items()} | _BIBLIOGRAPHIC_CODES | {"arb": "ar"}
_CODE = re.compile("[a-z]{2,3}(-[a-z0-9]+)*")

_SLICES, _SLICE_CHARACTERS = 4, 2000
# Older names of codes, and CLD2's names of scripts and test languages.
_RENAMED = {"iw": "he", "jw": "jv", "mo": "ro", "un": UNDETERMINED}
_NO_LANGUAGE = re.compile("xx.*|zz.")


def check_setting(setting: str) -> str:
    """The language of a source, in lower case if it is a code: an ISO 639 code, `@FIELD`, or `auto`.

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
    """A code such as `EN` or `zh_Hant` of a field as `en` and `zh-hant`; `und` if it is not one."""
    code = value.strip().lower().replace("_", "-") if isinstance(value, str) else ""
    return code if _CODE.fullmatch(code) else UNDETERMINED


def identify(text: str) -> str:
    """The language of a text by CLD2 (Sites 2013), from four slices of 2,000 characters if it is longer than 8,000.

    CLD2 has tables for 83 languages in the library and computes with integers, so the result is the same everywhere.
    """
    library = _library()
    if len(text) > _SLICES * _SLICE_CHARACTERS:
        places = [(len(text) - _SLICE_CHARACTERS) * i // (_SLICES - 1) for i in range(_SLICES)]
        text = " ".join(text[place : place + _SLICE_CHARACTERS] for place in places)
    try:
        details = library.detect(text, isPlainText=True, bestEffort=True)[2]
    except library.error:  # it refuses control characters
        text = "".join(character if character.isprintable() else " " for character in text)
        details = library.detect(text, isPlainText=True, bestEffort=True)[2]
    code = details[0][1].lower()
    return UNDETERMINED if _NO_LANGUAGE.fullmatch(code) else _RENAMED.get(code, code)


def splitter_code(code: str) -> str:
    """The code of a language for `sentencex`, which knows two letters for most languages and few regions."""
    language = code.partition("-")[0]
    return _SHORT_CODES.get(language, language)


def has_rules(code: str) -> bool:
    """Whether `sentencex` has rules for the language itself."""
    return splitter_code(code) in _WITH_RULES


def _library() -> ModuleType:
    try:
        return importlib.import_module("pycld2")
    except ModuleNotFoundError as error:
        raise UserError(f"--language auto needs pycld2, which is missing: {install_command('languages')}") from error
