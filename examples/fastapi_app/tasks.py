"""The work: count the words of each uploaded text. Web processes and workers import this."""

from collections.abc import Iterator
from pathlib import Path

import procrastinate
import pydantic

from fanout_procrastinate import fanout_child, fanout_manager

app = procrastinate.App(connector=procrastinate.PsycopgConnector())


class Text(pydantic.BaseModel):
    """One uploaded file."""

    name: str
    path: str


class Count(pydantic.BaseModel):
    """What a text holds."""

    name: str
    words: int


@fanout_child(app, queue="texts", max_attempts=3, timeout=60)
def count_words(text: Text) -> Count:
    # Bytes that are no text raise a ValueError: permanent, so that nobody tries again.
    return Count(name=text.name, words=len(Path(text.path).read_text(encoding="utf-8").split()))


@fanout_manager(app, child=count_words, item_key=lambda text: text.path)
def count_all(texts: list[dict[str, str]]) -> Iterator[Text]:
    for text in texts:
        yield Text(**text)
