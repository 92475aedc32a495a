"""Markup becomes plain text: Markdown, WikiExtractor's files, MediaWiki's dumps and wikitext."""

import bz2

import pytest

from bert_jax.errors import UserError
from data_prep.sources import mediawiki_markup
from data_prep.sources.mediawiki_markup import plain_text
from tests.data_prep.test_sources_reading import read

MARKDOWN = """\
---
title: Metadata
tags:
- a
---
Preface with *emphasis*, `code`, [a link](http://x.org "t"), a[^1] footnote &amp; <b>HTML</b>.

[^1]: The note.

# One _title_

A wrapped
paragraph, 1\\. not a list.\x20\x20
After a hard break.<br>And another.

![An image](x.png)

> A quotation
> of two lines.
>
> And its second paragraph.

* first item
* second item

  with a second paragraph
  1. nested

| Name | Place |
|------|-------|
| Ada  | *London* |

    Indented verse,
    as in books.

```python
# no heading
code = 1

more = 2
```

<!-- a comment

with a blank line -->
<div>Text in <i>a block</i> of HTML &lt;</div>

-----

Setext
------

~~Gone~~ text. - [x] no task

### Third

Deep.

# Last
"""
PARAGRAPHS = [
    "Preface with emphasis, code, a link, a footnote & HTML.",
    "The note.",
    "One title",
    "A wrapped\nparagraph, 1. not a list.\nAfter a hard break.\nAnd another.",
    "A quotation\nof two lines.",
    "And its second paragraph.",
    "first item",
    "second item",
    "with a second paragraph",
    "nested",
    "Name Place\nAda London",
    "Indented verse,\nas in books.",
    "Text in a block of HTML <",
    "Setext",
    "Gone text. - [x] no task",
    "Third",
    "Deep.",
    "Last",
]


@pytest.fixture
def pyromark():
    return pytest.importorskip("pyromark")


def test_markdown(tmp_path, pyromark):
    path = tmp_path / "a.md"
    path.write_text(MARKDOWN)
    reading = read(f"markdown:{path}")
    assert reading.documents[0].origin == str(path)
    assert reading.texts[0].split("\n\n") == PARAGRAPHS


def test_markdown_headings_begin_documents(tmp_path, pyromark):
    path = tmp_path / "a.md"
    path.write_text(MARKDOWN)
    beginnings = {1: [0, 2, 17], 2: [0, 2, 13, 17], 3: [0, 2, 13, 15, 17]}
    lines = MARKDOWN.split("\n")
    for level, begins in beginnings.items():
        reading = read(f"markdown:{path}@{level}")
        ends = [*begins[1:], None]
        assert reading.texts == ["\n\n".join(PARAGRAPHS[a:b]) for a, b in zip(begins, ends, strict=True)]
        places = [int(document.origin.rpartition(":")[2]) for document in reading.documents]
        named = {2: "# One _title_", 13: "Setext", 15: "### Third", 17: "# Last"}
        assert places == [6, *(lines.index(named[begin]) + 1 for begin in begins[1:])]
    path.write_text("# A\n## B\ntext")
    assert read(f"markdown:{path}@2").texts == ["A", "B\n\ntext"], "nothing stands before the first heading"


def test_long_markdown(tmp_path, pyromark):
    """Fences and comments are not cut, nor is a heading in them taken for one."""
    path = tmp_path / "a.md"
    chapter = MARKDOWN.split("---", 2)[2].replace("[^1]: ", "").replace("[^1]", "")
    path.write_text("\n\n".join(f"# Chapter {i}\n\n{chapter}" for i in range(5)))
    for level in ("", "@1", "@2"):
        whole = read(f"markdown:{path}{level}")
        for block_bytes in (150, 200, 300, 1000, 5000):
            reading = read(f"markdown:{path}{level}", block_bytes=block_bytes)
            assert [text.rstrip() for text in reading.texts] == whole.texts
            assert [d.origin for d in reading.documents] == [d.origin for d in whole.documents]
        assert len(read(f"markdown:{path}{level}", block_bytes=150).parts) > 2 * len(whole.documents) - 1


def test_metadata_stands_only_at_the_beginning_of_a_file(tmp_path, pyromark):
    path = tmp_path / "a.md"
    path.write_text(f"{'word ' * 20}\n\n---\nnote: kept\n---\n\nmore")
    for block_bytes in (110, 1000):
        assert "note: kept" in read(f"markdown:{path}", block_bytes=block_bytes).texts[0]


def test_markdown_without_text(tmp_path, pyromark):
    (tmp_path / "a.md").write_text("![only](an_image.png)\n")
    (tmp_path / "b.md").write_text("\n")
    (tmp_path / "c.md").write_bytes(b"text \xff")
    (tmp_path / "d.md").write_text("---\n\na ruler, no metadata\n\n---\n")
    reading = read(f"markdown:{tmp_path}/*.md")
    assert reading.texts == ["a ruler, no metadata"]
    reasons = ["empty_document", "empty_file", "undecodable"]
    assert [reason for reason, _ in reading.places] == reasons


WIKIEXTRACTOR = """\
<doc id="1" url="https://x.org?curid=1" title="Tom &amp; Jerry">
Tom &amp; Jerry

They say &lt;doc&gt;.
A second line.

A third one.
</doc>
<doc id="2" url="https://x.org?curid=2" title="Empty">
Empty

</doc>
<doc id="3" url="u" title="No title line">
Text at once.
</doc>
"""


def test_wikiextractor(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(WIKIEXTRACTOR)
    (tmp_path / "wiki_01.bz2").write_bytes(bz2.compress(WIKIEXTRACTOR.encode()))
    texts = ["They say <doc>.\n\nA second line.\n\nA third one.", "Text at once."]
    for block_bytes in (16, 100, 1 << 20):
        reading = read(f"wikiextractor:{path}", block_bytes=block_bytes)
        assert reading.texts == texts
        assert [document.origin for document in reading.documents] == [f"{path}#Tom & Jerry", f"{path}#No title line"]
        assert reading.places == [("empty_document", f"{path}#Empty")]
    assert read(f"wikiextractor:{tmp_path}/*").texts == texts * 2


def test_damaged_wikiextractor_files(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_bytes(
        b'stray text\n<doc id="1" url="" title="A">\nnever ends\n<doc id="2" url="" title="B">\nB\n\nfine\n</doc>\n'
        b'<doc id="3" url="" title="C">\n\xff\n</doc>\n<doc id="4" url="" title="D">\ncut o'
    )
    for block_bytes in (64, 1 << 20):
        reading = read(f"wikiextractor:{path}", block_bytes=block_bytes)
        assert reading.texts == ["fine"]
        assert reading.places == [
            ("outside_document", f"{path}:1"),
            ("malformed_document", f"{path}:2"),
            ("undecodable", f"{path}:9"),
            ("malformed_document", f"{path}:12"),
        ]
    (tmp_path / "plain").write_text("no articles at all")
    with pytest.raises(UserError, match="outside_document"):
        read(f"wikiextractor:{tmp_path}/plain")


def page(title, text, ns=0, more="", model="wikitext"):
    return f"""\
  <page>
    <title>{title}</title>
    <ns>{ns}</ns>
    <id>7</id>{more}
    <revision>
      <id>8</id>
      <model>{model}</model>
      <text bytes="9" xml:space="preserve">{text}</text>
    </revision>
  </page>
"""


HEAD = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"


def test_mediawiki(tmp_path):
    pages = [
        page("Eins", "'''Eins''' &amp;amp; [[Datei:X|mini|Ein Bild]]mehr.\n[[Kategorie:Zahl]]"),
        page("Diskussion:Eins", "Was soll das?", ns=1),
        page("Weiter", "#REDIRECT [[Eins]]", more='<redirect title="Eins" />'),
        page("Skript", "return 1", model="Scribunto"),
        page("Nichts", "{{nur|Vorlage}}"),
        page("Kaputt", "a &unknown; b"),
        page("Gelöscht", "").replace('<text bytes="9" xml:space="preserve"></text>', ""),
        page("Zwei", "Zwei &lt;ref&gt;weg&lt;/ref&gt;ist."),
    ]
    path = tmp_path / "dewiki.xml"
    path.write_text(HEAD + "".join(pages) + TAIL)
    streams = [HEAD, *pages, TAIL]
    (tmp_path / "dewiki.xml.bz2").write_bytes(b"".join(bz2.compress(stream.encode()) for stream in streams))
    for name in ("dewiki.xml", "dewiki.xml.bz2"):
        for block_bytes in (64, 500, 1000, 1 << 20):
            reading = read(f"mediawiki:{tmp_path}/{name}", block_bytes=block_bytes)
            assert reading.texts == ["Eins & mehr.", "Zwei ist."]
            assert [document.origin.partition("#")[2] for document in reading.documents] == ["Eins", "Zwei"]
            line = 1 + (HEAD + "".join(pages[:5])).count("\n")
            assert reading.places == [
                ("not_wikitext", f"{tmp_path}/{name}#Skript"),
                ("empty_document", f"{tmp_path}/{name}#Nichts"),
                ("malformed_xml", f"{tmp_path}/{name}:{line}"),
                ("missing_text", f"{tmp_path}/{name}#Gelöscht"),
            ]


def test_a_dump_that_is_cut_off(tmp_path):
    path = tmp_path / "dump.xml"
    path.write_text(HEAD + page("A", "Text.") + page("B", "Lost.")[:-20])
    reading = read(f"mediawiki:{path}")
    assert reading.texts == ["Text."]
    assert reading.places == [("malformed_xml", f"{path}:21")]
    assert "is the dump complete?" in reading.skipped[0].detail


def test_the_last_revision_counts(tmp_path):
    first = page("A", "Old.")
    old, new = first.index("    <revision>"), first.index("  </page>")
    path = tmp_path / "dump.xml"
    path.write_text(HEAD + first[:new] + first[old:new].replace("Old.", "New.") + first[new:] + TAIL)
    assert read(f"mediawiki:{path}").texts == ["New."]


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("'''Bold''', ''italics'' and '''''both'''''.", "Bold, italics and both."),
        ("L'''amour''\n''Titanic'''s band", "L'amour\nTitanic's band"),
        ("''{{x}}'' '''{{y}}'''a", "a"),
        ("''[[A|'''b''']]''", "b"),
        ("[[Link]], [[target|shown]], [[plural]]s, [[:Category:C]]", "Link, shown, plurals, Category:C"),
        ("a [[Help:X|b]] [[2001: A Space Odyssey]]", "a b 2001: A Space Odyssey"),
        ("[http://x.org shown] [http://x.org] //x [https://x.org/a]", "shown //x"),
        ("x{{template|a={{inner|[[b]]}}\n|c=d}}y", "xy"),
        ("a {{unclosed [[b]] c", "a unclosed b c"),
        ("a }} [[b]] c", "a b c"),
        ("a {{b [[c}} d]] e", "a d]] e"),
        ('a<ref name="x">{{cite|t=[[y]]}}</ref>b<ref name=z />c<REF>d</REF>', "abc"),
        ("a<ref>never ends", "anever ends"),
        ("a<!-- [[b]] -->c<!-- never ends", "ac"),
        ("[[File:A.jpg|thumb|A [[link]] in ''it''\nover lines]]text", "text"),
        ("[[Bild:A.jpg|mini|x]][[Image:b.png]][[Category:C|key]][[de:Ein Artikel]]text", "text"),
        ("[[Datei:X]]text [[Doi:10.1]] [[doi:10.1]]", "text Doi:10.1 doi:10.1"),
        ('{| class="x"\n! H\n|-\n| a || {{b}}\n{| \n| nested\n|}\n|}\ntext', "text"),
        (":{|\n| indented table\n|}\ntext", "text"),
        ("<table><tr><td>x<table>y</table></td></tr></table>text", "text"),
        ("before\n{|\n| never ends\ntext", "before\n\ntext"),
        ('before\n:{| class="x"\n| never ends\ntext', "before\n\ntext"),
        ("* a\n** b\n# c\n; d : e\n: f", "a\n\nb\n\nc\n\nd : e\n\nf"),
        ("one\ntwo\n\nthree", "one\ntwo\n\nthree"),
        ("a<br>b<br />c<div>d</div>e", "a\nb\nc\nd\ne"),
        ("H<sub>2</sub>O <span style='x'>y</span>", "H2O y"),
        ("a <math>x < y</math>b <nowiki>''[[c]]'' {{d}} <e></nowiki>", "a b ''[[c]]'' {{d}} <e>"),
        ("<nowiki>* no item</nowiki>", "* no item"),
        ("<syntaxhighlight lang='c'>x</syntaxhighlight>a<gallery>\nFile:x.jpg|y\n</gallery>", "a"),
        ("A&nbsp;B &amp;lt; &lt;b&gt; &#65;&#x42; &unknown; AT&T", "A\u00a0B &lt; <b> AB &unknown; AT&T"),
        ("Paris ({{lang|fr|x}}; {{ipa|y}}) is ( ) a city ({{x}}, a) .", "Paris (x) is ( ) a city (a) ."),
        ("__NOTOC__ text\n----\nmore", "text\n\nmore"),
        ("a < b and c > d, x<y", "a < b and c > d, x<y"),
    ],
)
def test_wikitext(markup, expected):
    assert plain_text(markup, frozenset({"Datei"})) == expected


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("coined in {{circa|1850}} by Browne's {{convert|5|mi|km|adj=on}} walk ({{IPAc-en|x}}; from {{lang-fr|''a''}})",
         "coined in c. 1850 by Browne's 5-mile walk (from French: a)"),
        ("l''''amour''''", "l'amour'"),
        ("a '''''''b'''''", "a ''b"),
        ("''a'' x l'''b'' c '''d'''", "a x l'b c d"),
        ("{{convert|242500|km2|sqmi}}, {{convert|5|to|10|km|mi}}, {{convert|5|ft|8|in|m}}, {{cvt|1|C}}",
         "242,500 square kilometres, 5 to 10 kilometres, 5 feet 8 inches, 1 °C"),
        ("{{Birth date|1941|6|24|df=y}}, {{death date|1941|6|24}}, {{as of|2010|5|lc=y}}",
         "24 June 1941, June 24, 1941, as of May 2010"),
        ("{{frac|3|1|2}} {{val|12345|u=km|e=6}} {{formatnum:1234567}} 10<sup>6</sup> 1<sup>st</sup>",
         "3 1⁄2 12,345×10⁶ km 1,234,567 10⁶ 1st"),
        ("{{transl|ar|ALA|Abu}} {{ill|A B|de|C}} "
         "{{nowrap|[[a|b c]]}} {{abbr|c d|e}} {{lang|fr|2=x}}", "Abu A B b c c d x"),
        ("5{{ndash}}6{{snd}}7{{mdash}}8{{nbsp}}9", "5–6 – 7—8 9"),
        ("a {{quote|To be.|author=X}} b", "a\n\nTo be.\n\nb"),
        ("a{{efn|b}}{{sfn|C|1999}}{{citation needed|date=May}}{{unknown|d}}.", "a."),
        ("a ({{unknown}}, b; {{unknown}}) {{unknown}} c, {{unknown}}, d {{unknown}}.", "a (b) c, d."),
        ("X ({{unknown}}; {{unknown}}), {{a}}, {{b}}, y<ref>z</ref>, w <math>v</math>; {{a}} u", "X, y, w; u"),
        ("{{unknown}}, a town. [[File:A.png]]; b\n{{unknown}}. c", "a town.; b\nc"),
        ("He said . . . \"( )\" , f() ; so", "He said . . . \"( )\" , f() ; so"),
        ("{{quote|by the [[wikt:bondman|bond-man]]'s toil [[File:A.png|thumb|a [[b|c]]]]}}", "by the bond-man's toil"),
        ("''Eagle''{{'s}} {{lang-sq|a}}, {{lang-aln|b}}; 5.98{{e|24}} A{{Music|flat}} {{vr|a}}",
         "Eagle's Albanian: a, b; 5.98×10²⁴ A♭ ⟨a⟩"),
        ("between {{convert|60|and(-)|80|kg}}", "between 60 and 80 kilograms"),
        ("{{convert|1|e6km2}}, {{cvt|1.5|e9m3}}, {{convert|2|e6acre|km2}}, {{convert|3|e5x}}",
         "1 million square kilometres, 1.5 billion m³, 2 million acres, 3 e5x"),
        ("{{birth date|1941|²|24}} {{birth date|1941|" + "1" * 5000 + "|24}}", "1941 ² 1941 " + "1" * 5000),
        ("{{convert|" + "1" * 5001 + "|km}}", "1" * 5001 + " kilometres"),
        ("{{£}}5, {{£|6}}, {{US$|7}}, {{euro|8}}", "£5, £6, US$7, €8"),
        ("aged {{age|1900|5|2|2000|5|1}} or {{age|1900|5|2|2000|5|2}}; {{age|1900|5|2}}.", "aged 99 or 100;."),
        ("a {{hlist|b|c}} d{{ubl|e|f}}g{{plainlist|\n* h\n* i\n}}j", "a b · c d\n\ne\n\nf\n\ng\n\nh\n\ni\n\nj"),
        ("-{zh-hans:计算机; zh-hant:電腦}-机 -{A|zh-cn:软件;zh-tw:軟體}- -{H|zh-cn:x}- -{y}-", "计算机机 软件 y"),
        ("{{{1|default}}} {{{2}}}{{{name|}}} b", "default b"),
        ("Cela ; dit : oui", "Cela ; dit : oui"),
        ("{{small|{{nowrap|{{lang|fr|a}}}}}}", "a"),
        ("{{infobox|" + "x" * 30_000 + "}}{{small|" + "x" * 30_000 + "}}a", "a"),
    ],
)  # fmt: skip
def test_templates_within_sentences(markup, expected):
    assert plain_text(markup) == expected


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("le {{date|14|juillet|1789}}, {{date-|14|7|1789}}, {{date|14 juillet 1789}}, en {{date||mai|1968}}",
         "le 14 juillet 1789, 14 juillet 1789, 14 juillet 1789, en mai 1968"),
        ("{{date|1941|6|24}} {{date|1941|6}}", "June 24, 1941 June 1941"),
        ("{{date|24|6|41}}, {{date|1er|6|41}}, {{date|24|6}}, {{date||6|41}}, {{date|24|6|1941}}",
         "24 juin 41, 1er juin 41, 24 juin, juin 41, 24 juin 1941"),
        ("{{date|44|3|15}} {{dts|1941|June|24}} {{dts|1941|Jun}}", "March 15, 44 June 24, 1941 Jun 1941"),
        ("{{dts|44|BC}}, {{start date|1941|present}}, {{dts|1941|Sept.|24}}", "44 BC, 1941 present, Sept. 24, 1941"),
        ("{{unité|1234|km}}, {{unité|5}}, {{nombre|3|habitants}}, au {{s-|XIX|e}}, {{s2-|XVI|e|XVII|e}}",
         "1234 km, 5, 3 habitants, au XIXe siècle, XVIe et XVIIe siècles"),
        ("du {{sp-|XII|e|au|XIV|e}}, {{-s|IV|e}}, {{av JC|52}}, XVIII{{e}} siècle, le {{1er}} mai, 2{{e|3}}",
         "du XIIe au XIVe siècle, IVe siècle av. J.-C., 52 av. J.-C., XVIIIe siècle, le 1er mai, 2×10³"),
        ("{{heure|12|30}}, {{Langue|en|x}}, {{citation|un mot}}, {{n°|5}}, m{{exp|2}}, {{Lien|trad=A|fr=B|langue=en}}",
         "12 h 30, x, un mot, no 5, m², B"),
        ("a{{citation|title=T|author=A}}.", "a."),
        ('{{"|Zitat}}, {{frS|Paris}}, {{Höhe|1234|DE-NN}}, {{Bruch|1|2}}', "„Zitat“, französisch Paris, 1234 m, 1⁄2"),
        ("{{fecha|14|7|1789}}, {{unidad|5|km}}, {{siglo|XIX}}, {{AC|52}}, {{esd|a b}}",
         "14 de julio de 1789, 5 km, siglo XIX, 52 a. C., a b"),
        ("{{M|5|ul=km}}, {{M|5|u=km}}, {{TA|a b}}", "5 km, 5 km, a b"),
        ("{{dtlink|14|7|1789}}, {{séc|XIX}}, {{fmtn|1234|km}}, {{lknb|Pedro|II}}",
         "14 de julho de 1789, século XIX, 1234 km, Pedro II"),
        ("{{дата|14|7|1789}}, {{num|1234|км}}, {{нп5|A|Б|en|C}}, {{lang-en|x}}, {{век|XIX}}",
         "14 июля 1789, 1234 км, Б, English: x, XIX век"),
        ("{{読み仮名|東京|とうきょう}}, {{仮リンク|甲|en|A}}, {{ルビ|字|じ}}", "東京（とうきょう）, 甲, 字"),
        ("{{bd|1893年|12月26日|1976年|9月9日}}, {{link-en|甲|A}}, {{tsl|en|A|甲}}, {{le|乙|B}}",
         "（1893年12月26日－1976年9月9日）, 甲, 甲, 乙"),
        ("{{ułamek|1|2}}, {{cytat|Tekst.}}", "1⁄2,\n\nTekst."),
        ("a {{s-}}{{unité}}{{fecha}}{{bd}} b", "a b"),
    ],
)  # fmt: skip
def test_templates_of_other_wikipedias(markup, expected):
    assert plain_text(markup) == expected


def test_sections_of_links_are_left_out():
    text = "Lead.\n== See also ==\n* [[A]]\n=== Deeper ===\nb\n== Life ==\nc\n=== Notes ===\nd\n=== Work ===\ne\n"
    text += "==Weblinks==\n* f"
    assert plain_text(text) == "Lead.\n\nLife\n\nc\n\nWork\n\ne"


def test_redirects_that_the_dump_does_not_mark(tmp_path):
    path = tmp_path / "dump.xml"
    path.write_text(
        HEAD + page("A", "#redirect [[B]]") + page("C", " #WEITERLEITUNG: [[B]]") + page("B", "Text.") + TAIL
    )
    assert read(f"mediawiki:{path}").texts == ["Text."]


def test_headings_without_text_are_left_out():
    empty = "== A ==\n=== A1 ===\n{{x}}\n"
    text = "== B ==\n=== ''B1'' ===\nText.\n===B2===\n"
    assert plain_text(f"Lead.\n{empty}{text}== See also ==\n{{{{y}}}}\n[[Category:Z]]") == "Lead.\n\nB\n\nB1\n\nText."


STARTS = ["{{a|", "[[", "[[aaaaaaaa", "<x>", "\n{|", "'''a''", "<ref>", "<ref>{{", "<!--", "<a", "[http://a", "(", "( "]
STARTS += [" ", "=", "&", "'", "{{{{", "[", "__", "\n::::", "<nowiki>", "|}", "[[a:", "&#1", "[[a|[[b|", "{{lang|fr|"]
STARTS += ["{{small|", "{{convert|1|", "{{{", "-{", "-{A|", "(,", ",;", "''''", "l'''", "<sup>", "\n==Notes==\n"]
STARTS += [" {{a}}", "({{a}}", ", {{a}}"]


@pytest.mark.parametrize("start", STARTS)
def test_unclosed_markup_costs_no_time(start):
    """Time is linear; a parser that tries again from every bracket would hang here for many minutes."""
    ends = [end for begin, end in (("[", "]]"), ("{", "}}")) if begin in start]
    for text in (start * (200_000 // len(start)), *(start * 20_000 + end * 20_000 for end in ends)):
        assert len(plain_text(text)) <= len(text)


def test_spaces_before_templates_cost_no_time():
    """Each removed template would otherwise read all spaces before it again."""
    assert plain_text("a" + " " * 200_000 + "{{x}} " * 20_000 + "b") == "a b"


def test_what_bounds_the_time(monkeypatch):
    searched = []

    class EndTag:
        def search(self, text, place):
            searched.append(place)

    monkeypatch.setitem(mediawiki_markup._END_TAGS, "ref", EndTag())
    assert plain_text("a<ref>b<ref>c<ref>d") == "abcd"
    assert searched == [7], "an end tag that is missing is looked for once"
    assert plain_text("[[a" * 20 + "b]]" * 20).count("[[") == 19 - mediawiki_markup._MAX_LINK_DEPTH, (
        "all but the innermost"
    )
