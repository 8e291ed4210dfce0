"""Guess a text's language by its most ordinary words."""

import re
from collections import Counter

STOP_WORDS = {
    "en": "the of and to in is that for with was are as this not be by which from have but",
    "de": "der die das und ist nicht ein eine den von mit zu auf sich des dem im als auch wird",
    "fr": "le la les des est et un une dans que qui pour pas sur du au ne avec ce par",
    "es": "el la los las y en que de un una por con no se del es para su lo como",
    "it": "il la di che e un una per non si con del della nel gli era sono le ma mi",
    "nl": "de het een en van is niet dat op te zijn met voor er aan die maar om ook naar",
}
_LANGUAGES_BY_WORD: dict[str, list[str]] = {}
for _language, _words in STOP_WORDS.items():
    for _word in _words.split():
        _LANGUAGES_BY_WORD.setdefault(_word, []).append(_language)

_WORD = re.compile(r"[^\W\d_]+")
MIN_HITS = 4
MIN_SHARE = 0.12
MIN_LEAD = 1.25


def guess_language(text: str) -> str | None:
    """Name the language of a text (`en`, `de`, `fr`, `es`, `it`, `nl`), or None.

    None means "cannot tell": too few words, a language that is not on the list, or two languages
    that fit about equally well.
    """
    words = _WORD.findall(text.lower())
    hits = Counter(
        language for word in words for language in _LANGUAGES_BY_WORD.get(word, ())
    ).most_common(2)
    if not hits:
        return None
    language, best = hits[0]
    runner_up = hits[1][1] if len(hits) > 1 else 0
    clear = best >= MIN_HITS and best >= MIN_SHARE * len(words) and best >= MIN_LEAD * runner_up
    return language if clear else None
