"""Constraints on wording: keywords, letters, order."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from slime_rm.constraints.units import count_is, sentences, small_words


def existence(response: str, *, keywords: list[str]) -> bool:
    """Every keyword occurs."""
    return all(_count(response, keyword) for keyword in keywords)


def forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    """No forbidden word occurs as a word."""
    return not any(_count(response, word) for word in forbidden_words)


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """A keyword occurs at least, or less than, so many times."""
    return count_is(_count(response, keyword), relation, frequency)


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """A letter, small or capital, occurs at least, or less than, so many times."""
    if len(letter) != 1:
        raise ValueError(f"letter is {letter!r}; wanted one letter")
    return count_is(response.lower().count(letter.lower()), let_relation, let_frequency)


def sentence_keyword(response: str, *, word: str, N: int) -> bool:  # the data's own spelling
    """A keyword occurs in the N-th sentence, from 1."""
    found = sentences(response)
    return 1 <= N <= len(found) and bool(_count(found[N - 1], word))


def keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """Five keywords: once, twice, three, five and seven times."""
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(_count(response, keyword) == times for keyword, times in wanted)


def keywords_specific_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """A keyword is the m-th word of the n-th sentence, both from 1."""
    found = sentences(response)
    if not 1 <= n <= len(found):
        return False
    there = small_words(found[n - 1])
    return 1 <= m <= len(there) and there[m - 1] == keyword.lower()


def words_position(response: str, *, keyword: str) -> bool:
    """A keyword is the second word, and the last but one."""
    there = small_words(response)
    return len(there) > 1 and there[1] == there[-2] == keyword.lower()


def alphabet(response: str) -> bool:
    """Each word begins with the letter after that of the word before; `a` follows `z`."""
    firsts = [word[0] for word in small_words(response)]
    return all("a" <= letter <= "z" for letter in firsts) and all(
        (ord(later) - ord(earlier)) % 26 == 1 for earlier, later in pairwise(firsts)
    )


def three_vowels(response: str) -> bool:
    """At most three of the five vowels occur."""
    return len(set("aeiou") & set(response.lower())) <= 3


def palindromes(response: str) -> bool:
    """At least ten words that read the same backwards, each of five letters or more."""
    return sum(len(word) >= 5 and word == word[::-1] for word in small_words(response)) >= 10


def no_consecutive(response: str) -> bool:
    """No two words in a row begin with the same letter."""
    return all(a[0] != b[0] for a, b in pairwise(small_words(response)))


def last_first(response: str) -> bool:
    """The last word of each sentence is the first of the next."""
    found = [small_words(sentence) for sentence in sentences(response)]
    return all(a[-1] == b[0] for a, b in pairwise(found))


def _count(text: str, keyword: str) -> int:
    if not keyword.strip():
        raise ValueError("a keyword is blank; wanted a word")
    return len(re.findall(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", text, re.IGNORECASE))


WORDING: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "sentence:keyword": sentence_keyword,
    "count:keywords_multiple": keywords_multiple,
    "words:keywords_specific_position": keywords_specific_position,
    "words:words_position": words_position,
    "words:alphabet": alphabet,
    "words:vowel": three_vowels,
    "words:palindrome": palindromes,
    "words:no_consecutive": no_consecutive,
    "words:last_first": last_first,
}
