"""A source whose blocks contain its text."""

import dataclasses
from collections.abc import Iterator

from data_prep.sources.base import Document, Input, InputRecord, Skipped, Source, SourceBlock


@dataclasses.dataclass(frozen=True)
class FakeSource(Source):
    """Each block is a tuple of texts; None is a skipped item."""

    contents: tuple[tuple[str | None, ...], ...] = ()

    def inputs(self) -> list[Input]:
        return [Input((), len(self.contents))]

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        for index, texts in enumerate(self.contents):
            yield SourceBlock(f"{self.spec}#{index}", texts, 1)

    def documents(self, block: SourceBlock) -> Iterator[Document | Skipped]:
        for text in block.payload:
            if text is None:
                yield Skipped("malformed_json", block.origin, "no brace")
            else:
                yield Document(block.origin, text)


def fake(*texts: str | None, spec: str = "fake", per_block: int = 2) -> FakeSource:
    return FakeSource(spec, tuple(texts[i : i + per_block] for i in range(0, len(texts), per_block)))
