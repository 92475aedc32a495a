"""Cuts cleaned text into sentences."""

import re

import sentencex

_PARAGRAPH_END = re.compile(r"\n{2,}")


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Sentences of a text whose paragraphs are divided by blank lines.

    The end of a paragraph always ends a sentence; a single line end is a space, as in wrapped text.

    Args:
      text: the output of `clean`.
      language: ISO 639 code that `sentencex` knows; it falls back on a related one.

    Returns:
      the sentences without surrounding space, none of them empty.
    """
    sentences = []
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in sentencex.segment(language, paragraph.replace("\n", " ")):
            if sentence := sentence.strip():
                sentences.append(sentence)
    return sentences


def split_lines(text: str) -> list[str]:
    """Sentences of a text that has one on each line; blank lines are skipped."""
    return [line for line in text.split("\n") if line]
