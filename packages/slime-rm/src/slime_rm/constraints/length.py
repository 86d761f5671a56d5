"""Constraints on length: numbers of words, sentences and paragraphs, and how often something occurs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from slime_rm.constraints.units import count_is, paragraphs, sentences, small_words, words

COORDINATING = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
PRONOUNS = frozenset(
    [
        "i",
        "me",
        "my",
        "mine",
        "myself",
        "we",
        "us",
        "our",
        "ours",
        "ourselves",
        "you",
        "your",
        "yours",
        "yourself",
        "yourselves",
        "he",
        "him",
        "his",
        "himself",
        "she",
        "her",
        "hers",
        "herself",
        "it",
        "its",
        "itself",
        "they",
        "them",
        "their",
        "theirs",
        "themselves",
        "who",
        "whom",
        "whose",
        "which",
        "what",
        "that",
        "this",
        "these",
        "those",
    ]
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?!\w)")


def number_words(response: str, *, num_words: int, relation: str) -> bool:
    """At least, or less than, so many words."""
    return count_is(len(words(response)), relation, num_words)


def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """At least, or less than, so many sentences."""
    return count_is(len(sentences(response)), relation, num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by `***`."""
    return _divided(response) == num_paragraphs


def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Exactly so many paragraphs, divided by blank lines, of which the n-th begins with a word."""
    blocks = paragraphs(response)
    if len(blocks) != num_paragraphs or not 1 <= nth_paragraph <= len(blocks):
        return False
    return small_words(blocks[nth_paragraph - 1])[:1] == [first_word.lower()]


def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    """From `min_words` to `max_words` words."""
    return min_words <= len(words(response)) <= max_words


def unique_word_count(response: str, *, N: int) -> bool:  # the data's own spelling
    """At least so many different words."""
    return len(set(small_words(response))) >= N


def conjunctions(response: str, *, small_n: int) -> bool:
    """At least so many different coordinating conjunctions."""
    return len(COORDINATING & set(small_words(response))) >= small_n


def numbers(response: str, *, N: int) -> bool:  # as above
    """Exactly so many numbers in digits."""
    return len(_NUMBER.findall(response)) == N


def pronouns(response: str, *, N: int) -> bool:  # as above
    """At least so many pronouns."""
    return sum(word in PRONOUNS for word in small_words(response)) >= N


def repeats(response: str, *, small_n: int) -> bool:
    """No word more often than so many times."""
    return max(Counter(small_words(response)).values(), default=0) <= small_n


def sentence_increment(response: str, *, small_n: int) -> bool:
    """Each sentence has so many words more than the one before."""
    counts = [len(words(sentence)) for sentence in sentences(response)]
    return all(later - earlier == small_n for earlier, later in pairwise(counts))


def prime_lengths(response: str) -> bool:
    """Only words whose number of letters is prime."""
    lengths = {len(word) for word in words(response)}
    return all(n > 1 and all(n % divisor for divisor in range(2, n)) for n in lengths)


def _divided(response: str) -> int:
    blocks = re.split(r"\s*\*\*\*\s*", response.strip())
    return len(blocks) if all(blocks) else -1


LENGTH: dict[str, Callable[..., bool]] = {
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:numbers": numbers,
    "count:pronouns": pronouns,
    "words:repeats": repeats,
    "words:prime_lengths": prime_lengths,
    "sentence:increment": sentence_increment,
}
