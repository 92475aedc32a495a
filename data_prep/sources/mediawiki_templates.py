"""The text of the templates that occur within sentences on Wikipedia; all others show nothing.

Names and parameters are those of the English Wikipedia (https://en.wikipedia.org/wiki/Category:Formatting_templates);
other wikis have copies of many of them. `convert` shows the given quantity, without its conversion.
"""

import re
from collections.abc import Callable

from data_prep.sources.mediawiki_local_templates import LOCAL_TEMPLATES, show_form

MAX_CHARACTERS = 20_000
"""Longer templates show nothing: they are infoboxes and lists, not parts of sentences."""

_NAMED = re.compile(r"\s*([^=<>\[\]{}]{1,30}?)\s*=")
_NUMBER = re.compile(r"(-?[0-9]{1,3})((?:[0-9]{3}){1,9})(?=\.|\Z)")
_MONTH = re.compile("0?[1-9]|1[0-2]")
_DAY = re.compile("(0?[1-9]|[12][0-9]|3[01])(er)?")
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_SHORT_MONTHS = {month[:3] for month in _MONTHS}
_SUPERSCRIPTS = str.maketrans("0123456789+-−=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ")

Arguments = dict[str, str]
"""Arguments of a template by name; "1", "2" and so on without one. No value has surrounding space."""


def _codes(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


_LANGUAGES = _codes(
    "ar:Arabic az:Azerbaijani be:Belarusian bg:Bulgarian ca:Catalan cs:Czech cy:Welsh da:Danish de:German el:Greek "
    "en:English es:Spanish et:Estonian eu:Basque fa:Persian fi:Finnish fr:French ga:Irish grc:Greek he:Hebrew "
    "hi:Hindi hr:Croatian hu:Hungarian hy:Armenian is:Icelandic it:Italian ja:Japanese ka:Georgian ko:Korean "
    "kw:Cornish la:Latin lt:Lithuanian lv:Latvian nl:Dutch no:Norwegian pl:Polish pt:Portuguese ro:Romanian "
    "ru:Russian sa:Sanskrit sk:Slovak sl:Slovene sq:Albanian sr:Serbian sv:Swedish ta:Tamil th:Thai tr:Turkish "
    "uk:Ukrainian ur:Urdu vi:Vietnamese yi:Yiddish zh:Chinese"
)
# Units by code: symbol, if it is not the code; singular and plural.
_UNIT_TABLE = """\
km::kilometre:kilometres m::metre:metres cm::centimetre:centimetres mm::millimetre:millimetres mi::mile:miles
yd::yard:yards ft::foot:feet in::inch:inches nmi::nautical_mile:nautical_miles
km2:km²:square_kilometre:square_kilometres m2:m²:square_metre:square_metres ha::hectare:hectares acre::acre:acres
acres:acre:acre:acres
sqmi:sq_mi:square_mile:square_miles sqft:sq_ft:square_foot:square_feet m3:m³:cubic_metre:cubic_metres
km3:km³:cubic_kilometre:cubic_kilometres kg::kilogram:kilograms g::gram:grams t::tonne:tonnes lb::pound:pounds
oz::ounce:ounces L::litre:litres l::litre:litres USgal:US_gal:US_gallon:US_gallons
impgal:imp_gal:imperial_gallon:imperial_gallons kW::kilowatt:kilowatts MW::megawatt:megawatts hp::horsepower:horsepower
km/h::kilometre_per_hour:kilometres_per_hour mph::mile_per_hour:miles_per_hour kn::knot:knots
m/s::metre_per_second:metres_per_second C:°C:°C:°C F:°F:°F:°F K::kelvin:kelvins
/km2:/km²:inhabitant_per_square_kilometre:inhabitants_per_square_kilometre
/sqmi:/sq_mi:inhabitant_per_square_mile:inhabitants_per_square_mile
"""
_UNITS = {
    code: (symbol or code, singular, plural)
    for code, symbol, singular, plural in (unit.replace("_", " ").split(":") for unit in _UNIT_TABLE.split())
}
_POWERS = {"e3": "thousand", "e6": "million", "e9": "billion", "e12": "trillion"}
_POWER = re.compile(r"(e\d+)(\D.*)")
_RANGES = _codes("to:to to(-):to and:and and(-):and or:or or(-):or x:× xx:× by:by by(x):by")
_RANGES |= {"-": "–", "–": "–", "+/-": "±", "±": "±", "to about": "to about"}


def shown_text(name: str, inside: str) -> str:
    """What a template shows.

    Args:
      name: the name of the template, with space around it.
      inside: the template without braces, with what the templates in it show.
    """
    known = _known(name)
    if known is None:
        return _function(inside)
    if isinstance(known, str):
        return known
    return known(arguments(inside)) if len(inside) <= MAX_CHARACTERS else ""


def may_show_text(name: str) -> bool:
    """Whether a template with this name can show text; quick, because most cannot."""
    return ":" in name or _known(name) is not None


def _known(name: str) -> str | Callable[[Arguments], str] | None:
    name = name.strip().replace("_", " ").lower()
    return _TEMPLATES.get(name) or (_argument("1") if name.startswith(("lang-", "link-")) else None)


def arguments(inside: str) -> Arguments:
    """The arguments of a template, whose text has no links with bars."""
    values: Arguments = {}
    position = 0
    for part in inside.split("|")[1:]:
        if match := _NAMED.match(part):
            values[match[1]] = part[match.end() :].strip()
        else:
            position += 1
            values[str(position)] = part.strip()
    return values


def superscript(text: str) -> str:
    """A number as superscript (10<sup>6</sup> is not 106); other text as it is."""
    raised = text.translate(_SUPERSCRIPTS)
    return raised if not any(character in raised for character in text) else text


def _function(inside: str) -> str:
    """What a parser function such as `{{lc:TEXT}}` shows."""
    name, colon, text = inside.partition(":")
    if colon and (function := _FUNCTIONS.get(name.strip().lower())):
        return function(text.partition("|")[0].strip())
    return ""


def _grouped(number: str) -> str:
    """A number with a comma between thousands."""
    match = _NUMBER.match(number)
    if not match or len(match[0].lstrip("-")) < 4:
        return number
    return f"{int(match[0]):,}{number[match.end() :]}"


def _argument(*names: str) -> Callable[[Arguments], str]:
    """The first of some arguments that is given."""
    return lambda values: next((values[name] for name in names if values.get(name)), "")


def _last(values: Arguments) -> str:
    return next((values[name] for name in ("4", "3", "2") if values.get(name)), "")


def _around(before: str, after: str = "") -> Callable[[Arguments], str]:
    return lambda values: f"{before}{text}{after}" if (text := values.get("1", "")) else ""


def _amount(sign: str) -> Callable[[Arguments], str]:
    return lambda values: sign + values.get("1", "")


def _positional(values: Arguments) -> list[str]:
    return [value for name, value in values.items() if name.isdigit() and value]


def _age(values: Arguments) -> str:
    """Years between two dates; nothing with one, which would depend on the day of the build."""
    try:
        born, then = ([int(values[name]) for name in names] for names in ("123", "456"))
    except (KeyError, ValueError):
        return ""
    return str(then[0] - born[0] - (then[1:] < born[1:]))


def _language(code: str) -> Callable[[Arguments], str]:
    return lambda values: _named_language(code, values.get("1", ""), values)


def _langx(values: Arguments) -> str:
    return _named_language(values.get("1", ""), values.get("2", "") or values.get("text", ""), values)


def _named_language(code: str, text: str, values: Arguments) -> str:
    name = _LANGUAGES.get(code)
    return f"{name}: {text}" if text and name and values.get("label", "") != "none" else text


def _circa(mark: str) -> Callable[[Arguments], str]:
    def show(values: Arguments) -> str:
        dates = [values[name] for name in ("1", "2") if values.get(name)]
        return " – ".join(f"{mark} {date}" for date in dates) or f"{mark} "

    return show


def _convert(values: Arguments, short: bool = False) -> str:
    """The quantity of `convert` or `cvt`, as with one unit: 5 km, 5 to 10 kilometres, 5 feet 8 inches, 5-mile."""
    short = short or values.get("abbr") in ("on", "in", "~")
    shown, position = "", 1
    while (number := values.get(str(position), "")) and position < 10:
        unit = values.get(str(position + 1), "")
        position += 2
        shown += _grouped(number.replace(",", ""))
        if unit in _RANGES:
            mark = _RANGES[unit]
            shown += mark if mark == "–" else f" {mark} "
            continue
        if (power := _POWER.fullmatch(unit)) and power[1] in _POWERS:
            shown, unit, number = f"{shown} {_POWERS[power[1]]}", power[2], ""
        symbol, singular, plural = _UNITS.get(unit, (unit, unit, unit))
        if values.get("adj") in ("on", "mid") and not short:
            return f"{shown}-{singular.replace(' ', '-')}"
        shown += f" {symbol if short else singular if number == '1' else plural}"
        following = values.get(str(position + 1), "")
        if (unit, following) not in (("ft", "in"), ("lb", "oz"), ("st", "lb")):
            break
        shown += " "
    return shown.strip()


def _date(values: Arguments) -> str:
    year, month, day = (values.get(name, "") for name in "123")
    is_named = month.rstrip(".").isalpha() and (bool(day) or month[:3].title() in _SHORT_MONTHS)
    if not (_MONTH.fullmatch(month) or is_named):
        return " ".join(filter(None, (year, month)))
    name = month if is_named else _MONTHS[int(month) - 1]
    if not day:
        return f"{name} {year}"
    return f"{day} {name} {year}" if values.get("df", "")[:1] in ("y", "t") else f"{name} {day}, {year}"


_DAY_FIRST = show_form("[{1} ][{2:fr} ][{3}]")


def _date_of_any_wiki(values: Arguments) -> str:
    """{{date|1941|6|24}}, and {{date|24|juin|1941}} or {{date|24|6|41}} of the French Wikipedia.

    A first number up to 31 is a day, so {{date|24|6|41}} is in the year 41, as the French template shows it.
    """
    day, month, year = (values.get(name, "") for name in "123")
    is_day_first = not day or _DAY.fullmatch(day) or len(year) > 2 or (month and not month[0].isdigit())
    return (_DAY_FIRST(values) if is_day_first else _date(values)).strip()


def _as_of(values: Arguments) -> str:
    date = _date({**values, "df": values.get("df", "y")})
    mark = "Since" if values.get("since") else "As of"
    return values.get("alt") or f"{mark.lower() if values.get('lc') else mark} {date}"


def _fraction(values: Arguments) -> str:
    numbers = [values[name] for name in "123" if values.get(name)]
    if len(numbers) == 3:
        return f"{numbers[0]} {numbers[1]}⁄{numbers[2]}"
    return "⁄".join(numbers if len(numbers) == 2 else ["1", *numbers])


def _value(values: Arguments) -> str:
    shown = _grouped(values.get("1", ""))
    if error := values.get("2"):
        shown += f"±{error}"
    if exponent := values.get("e"):
        shown += f"×10{superscript(exponent)}"
    unit = values.get("u") or values.get("ul") or ""
    return f"{shown} {unit}".strip()


def _quote(values: Arguments) -> str:
    return f"\n\n{text}\n\n" if (text := values.get("text") or values.get("quote") or values.get("1")) else ""


def _nihongo(values: Arguments) -> str:
    english, *others = (values.get(name, "") for name in "123")
    inside = ", ".join(filter(None, others))
    return f"{english} ({inside})" if english and inside else english or inside


def _sic(values: Arguments) -> str:
    text = "".join(values.get(name, "") for name in "12")
    return text if values.get("hide") or values.get("nolink") == "hide" else f"{text} [sic]".strip()


# Templates that show their first argument.
# fmt: off
_FIRST_ARGUMENT = [
    "nowrap", "nobr", "nobold", "noitalic", "small", "smaller", "big", "larger", "abbr", "abbrlink",
    "tooltip", "em", "strong", "mono", "code", "samp", "kbd", "sc", "smallcaps", "small", "caps", "keypress",
    "key", "press", "math", "mvar", "not a typo", "proper name", "as written", "title", "birth-date",
    "death-date", "start-date", "end-date", "birth based on age as of date", "flag", "flagcountry", "flagu",
    "chem2", "bigmath", "underline", "strikethrough", "resize", "nobreak", "normal", "gloss", "linktext",
    "visible anchor", "vanchor", "anchor text", "angbr", "no wrap", "font", "color", "sub", "var", "italic", "bold",
    "dfn",
]
# fmt: on

_TEMPLATES: dict[str, str | Callable[[Arguments], str]] = {
    **LOCAL_TEMPLATES,
    **dict.fromkeys(
        _FIRST_ARGUMENT,
        _argument("1", "text"),
    ),
    **dict.fromkeys(["lang", "rtl-lang", "native name", "wikt-lang"], _argument("2", "text")),
    **{f"lang-{code}": _language(code) for code in _LANGUAGES},
    **dict.fromkeys(["transl", "transliteration"], _last),
    **dict.fromkeys(["ill", "interlanguage link", "interlanguage link multi", "link-interwiki"], _argument("lt", "1")),
    **dict.fromkeys(["circa", "c.", "ca.", "ca"], _circa("c.")),
    **dict.fromkeys(["floruit", "fl."], _circa("fl.")),
    **dict.fromkeys(["reign", "r."], _circa("r.")),
    **dict.fromkeys(["birth date", "birth date and age", "death date", "death date and age", "bda"], _date),
    **dict.fromkeys(["start date", "end date", "start date and age", "dob", "dts"], _date),
    "date": _date_of_any_wiki,
    **dict.fromkeys(["quote", "blockquote", "cquote", "quotation", "bquote", "quote box", "rquote"], _quote),
    **dict.fromkeys(["frac", "fraction", "sfrac"], _fraction),
    **dict.fromkeys(["ndash", "endash", "en dash", "–", "nsndns"], "–"),
    **dict.fromkeys(["mdash", "mdashb", "emdash", "em dash", "—"], "—"),
    **dict.fromkeys(["snd", "spnd", "spaced ndash", "spaced en dash", "dash"], " – "),
    **dict.fromkeys(["nbsp", "space", "spaces", "thinsp", "hair space", "gap", "0ws", "zwsp"], " "),
    **dict.fromkeys(["'", "-'", "'-", "apostrophe"], "'"),
    **dict.fromkeys(["·", "dot", "middot", "•", "bullet"], " · "),
    "langx": _langx,
    "convert": _convert,
    "cvt": lambda values: _convert(values, short=True),
    "as of": _as_of,
    "val": _value,
    "sic": _sic,
    "nihongo": _nihongo,
    "formatnum": _argument("1"),
    "pi": "π",
    "!": "|",
    "=": "=",
    "'s": "'s",
    "' \"": "'\"",
    '-"': '"',
    "eqm": "⇌",
    "vr": _around("⟨", "⟩"),
    "e": lambda values: f"×10{superscript(values['1'])}" if values.get("1") else "e",  # XVIII{{e}} siècle
    "music": lambda values: {"flat": "♭", "sharp": "♯", "natural": "♮"}.get(values.get("1", ""), ""),
    "'\"": "'\"",
    "\"'": "\"'",
    "\\": " / ",
    "--": "—",
    "=)": "=",
    **dict.fromkeys(["sup", "exp", "exposant"], lambda values: superscript(values.get("1", ""))),
    "chem": lambda values: "".join(values.values()),
    **dict.fromkeys(["us$", "usd"], _amount("US$")),
    **dict.fromkeys(["£", "gbp", "pound sign"], _amount("£")),
    **dict.fromkeys(["€", "eur", "euro"], _amount("€")),
    **dict.fromkeys(["¥", "jpy", "yen"], _amount("¥")),
    **dict.fromkeys(["₹", "inr", "indian rupee", "indian rupees"], _amount("₹")),
    **dict.fromkeys(["plainlist", "plain list", "flatlist", "flat list"], _around("\n", "\n")),
    **dict.fromkeys(["ubl", "unbulleted list"], lambda values: "\n\n".join(["", *_positional(values), ""])),
    **dict.fromkeys(["hlist", "horizontal list"], lambda values: " · ".join(_positional(values))),
    "age": _age,
    "hms": _around("HMS "),
    "uss": _around("USS "),
    "ss": _around("SS "),
    "rms": _around("RMS "),
    "ship": lambda values: " ".join(filter(None, (values.get("1"), values.get("2")))),
}
_TEMPLATES.setdefault("lang-grc-gre", _language("el"))

_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "lc": str.lower,
    "uc": str.upper,
    "lcfirst": lambda text: text[:1].lower() + text[1:],
    "ucfirst": lambda text: text[:1].upper() + text[1:],
    "formatnum": _grouped,
    "nowrap": str,
}
