"""Templates within sentences of the largest Wikipedias besides the English one, as rows of a table.

Names and parameters are those of the wikis' own documentation, e.g. https://fr.wikipedia.org/wiki/Modèle:Date. Names
that several wikis use for different things, and those of the English Wikipedia, are in `mediawiki_templates`.
"""

import re
from collections.abc import Callable, Mapping

_PLACE = re.compile(r"\{([^{}:]+)(?::([a-z]{2}))?\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
_MONTH_NAMES = {
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "pl": "stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia",
    "pt": "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
    "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
}
_MONTHS = {language: names.split() for language, names in _MONTH_NAMES.items()}


def show_form(form: str) -> Callable[[Mapping[str, str]], str]:
    """What a template shows, as a function of its arguments.

    Args:
      form: text with places for arguments: `{1}`, `{text/1}` the first of several that is given, `{2:fr}` the name of a
        month in a language if the argument is its number. A part in brackets is left out if one of its arguments is
        not given; if one outside of brackets is not given, the template shows nothing.
    """

    def fill(part: str, values: Mapping[str, str]) -> str | None:
        missing = False

        def show(place: re.Match[str]) -> str:
            nonlocal missing
            value = next((values[name] for name in place[1].split("/") if values.get(name)), "")
            missing = missing or not value
            return _month(value, place[2]) if place[2] else value

        filled = _PLACE.sub(show, part)
        return None if missing else filled

    pieces = [(part, index % 2 == 1) for index, part in enumerate(_OPTIONAL.split(form))]

    def show_template(values: Mapping[str, str]) -> str:
        shown = [(fill(part, values), optional) for part, optional in pieces]
        if any(text is None and not optional for text, optional in shown):
            return ""
        return "".join(text or "" for text, _ in shown)

    return show_template


def _month(value: str, language: str) -> str:
    number = int(value) if value.isascii() and value.isdigit() and len(value) <= 2 else 0
    return _MONTHS[language][number - 1] if 1 <= number <= 12 else value


# Names, separated by "; ", and the form that they show.
_ROWS = [
    # French
    ("date-; date de naissance; date de naissance-; date de décès; date de décès-", "[{1} ][{2:fr} ][{3}]"),
    ("s; s-; siècle", "{1}[{2}] siècle"),
    ("s2; s2-", "{1}[{2}] et {3}[{4}] siècles"),
    ("sp; sp-", "{1}[{2}] {3} {4}[{5}] siècle"),
    ("-s; -s-", "{1}[{2}] siècle av. J.-C."),
    ("m-; millénaire", "{1}[{2}] millénaire"),
    ("av jc; avjc; av. j.-c.; av jc-", "[{1} ]av. J.-C."),
    ("unité; unité/2; nombre; nb; quantité", "{1}[ {2}][{3}][ {4}]"),
    ("heure; durée", "{1} h[ {2}]"),
    ("1er", "1er"),
    ("1re; 1ère", "1re"),
    ("er", "er"),
    ("re; ère", "re"),
    ("ème; ième", "e"),
    ("ier", "Ier"),
    ("nd", "nd"),
    ("nde", "nde"),
    ("numéro; n°", "no[ {1}]"),
    ("p.", "p.[ {1}]"),
    ("m.", "M.[ {1}]"),
    ("mme", "Mme[ {1}]"),
    ("mlle", "Mlle[ {1}]"),
    ("mgr", "Mgr[ {1}]"),
    ("langue", "{2/texte}"),
    ("citation", "{1}"),
    ("citation étrangère; citation en langue étrangère", "{texte/2/1}"),
    ("incise", "– {1} –"),
    ("lien", "{texte/fr/1/trad}"),
    ("souverain; souverain-; souverain2; souverain3", "{1}"),
    ("abréviation; abr; abréviation discrète; abrd; pc; petites capitales; nobr romains; romain; unicode", "{1}"),
    # German
    ('"', "„{1/text}“"),
    ("zitat; zitat-en; zitat-fr; zitat-la", "\n\n{text/1}\n\n"),
    ("höhe", "{1} m"),
    ("bruch", "{1}⁄{2}"),
    ("§", "§ {1}[ {2}]"),
    ("polytonisch; hebr; kapitälchen; überstrichen; zahl", "{1}"),
    *((f"{code}s", f"{name} {{1}}") for code, name in (
        ("en", "englisch"), ("fr", "französisch"), ("la", "lateinisch"), ("it", "italienisch"), ("es", "spanisch"),
        ("ru", "russisch"), ("pl", "polnisch"), ("nl", "niederländisch"), ("tr", "türkisch"), ("ar", "arabisch"),
        ("cs", "tschechisch"), ("hu", "ungarisch"), ("pt", "portugiesisch"), ("sv", "schwedisch"),
        ("grc", "altgriechisch"),
    )),
    # Spanish
    ("fecha; fechas", "[{1} de ][{2:es}][ de {3}]"),
    ("siglo", "siglo {1}"),
    ("siglos", "siglos {1}[ y {2}]"),
    ("unidad; convertir", "{1} {2}"),
    ("ac; a. c.", "[{1} ]a. C."),
    ("ord", "{1}.{2}"),
    ("cita; cita textual", "{1}"),
    ("esd; versalita", "{1}"),
    # Italian
    ("m; unità", "{1}[×10^{e}][ {u/ul/2}]"),
    ("citazione", "{1}"),
    ("ta; tutto attaccato; maiuscoletto; polytonic", "{1}"),
    # Portuguese
    ("data; dtlink; dataext", "[{1} de ][{2:pt}][ de {3}]"),
    ("séc; século; sec", "século {1}"),
    ("unidade; fmtn; converter", "{1}[ {2}]"),
    ("lknb", "{1} {2}"),
    ("ilc; ilcb", "{1}"),
    ("brpbpe; pbpe; pepb", "{1}/{2}"),
    ("citação; citação2; versalete", "{1}"),
    # Russian
    ("дата", "[{1} ][{2:ru}][ {3}]"),
    ("oldstyledate", "[{1} ]({3}) [{2}]"),
    ("век", "{1} век"),
    ("num; число", "{1}[ {2}]"),
    *((name, "{2/1}") for name in ("нп", "нп2", "нп3", "нп4", "нп5", "не переведено", "не переведено 5")),
    ("comment; год; nobr2", "{1}"),
    ("цитата", "\n\n{1}\n\n"),
    # Polish, Dutch, Swedish
    ("ułamek", "{1}⁄{2}"),
    ("cytat; citaat; citat", "\n\n{1/treść}\n\n"),
    ("datum", "[{1} ][{2:pl}][ {3}]"),
    ("kapitaliki; klein kapitaal; kapitäler", "{1}"),
    # Japanese
    ("読み仮名; 読み仮名 ruby不使用", "{1}（{2}）"),
    ("仮リンク", "{label/1}"),
    ("ルビ; ruby; jis2004フォント; jis90フォント; 補助漢字フォント; cjkv", "{1}"),
    # Chinese
    ("bd", "（{1}[{2}][－{3}][{4}]）"),
    ("le; 僻字; ja-j", "{1}"),
    ("tsl; translink", "{3/2}"),
]  # fmt: skip
LOCAL_TEMPLATES = {name: show_form(form) for names, form in _ROWS for name in names.split("; ")}
"""What templates show, by their name in lower case."""
