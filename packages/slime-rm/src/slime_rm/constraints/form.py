"""Constraints on form: lists, titles, sections, brackets, capitals, beginning and end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

from slime_rm.constraints.units import count_is, sentences, words

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BULLET = re.compile(r"^[^\S\n]*(?:\*(?!\*)|-(?!-))\s*\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*[^\S\n]*[^\s*][^*\n]*\*\*|(?<!\*)\*[^\S\n]*[^\s*][^*\n]*\*(?!\*)")
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_NO_CAPITAL = frozenset(
    [
        "a",
        "an",
        "and",
        "as",
        "at",
        "but",
        "by",
        "for",
        "from",
        "in",
        "into",
        "nor",
        "of",
        "on",
        "or",
        "so",
        "the",
        "to",
        "up",
        "with",
        "yet",
    ]
)
_MARKS = (".", ",", ";", ":", "!", "?", "'", '"', "(", ")", "-")


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """Exactly so many bullet points, `* ` or `- `."""
    return len(_BULLET.findall(response)) == num_bullets


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """At least so many parts in `*stars*` or `**stars**`."""
    return len(_HIGHLIGHT.findall(response)) >= num_highlights


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each headed by the divider and its number."""
    pattern = rf"(?<![^\W_])(?<!-){re.escape(section_spliter)}\s?\d+"
    return len(re.findall(pattern, response)) >= num_sections


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]]+\]", response)) >= num_placeholders


def postscript(response: str, *, postscript_marker: str) -> bool:
    """A last part that begins with the marker, `P.S.` or `P.P.S`, and says something."""
    letters = [re.escape(letter) for letter in postscript_marker if letter.isalnum()]
    if not letters:
        raise ValueError(f"postscript_marker is {postscript_marker!r}; wanted letters, such as P.S.")
    marker = re.compile(rf"^(?:[^\S\n]|[*_>])*{r'\.?[^\S\n]?'.join(letters)}\b", re.IGNORECASE | re.MULTILINE)
    return any(re.search(r"[^\W_]|[^\x00-\x7f]", behind) for behind in marker.split(response)[1:])


def title(response: str) -> bool:
    """A title in double angular brackets."""
    return any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", response))


def json_format(response: str) -> bool:
    """The whole response is JSON, in a code fence or not."""
    fenced = _FENCE.fullmatch(response.strip())
    try:
        json.loads(fenced[1] if fenced else response)
    except (ValueError, RecursionError):
        return False
    return True


def constrained_response(response: str) -> bool:
    """One of the three answers that IFEval allows."""
    return any(choice in response for choice in CHOICES)


def two_responses(response: str) -> bool:
    """Two different responses, divided by six asterisks."""
    parts = [part.strip() for part in response.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """Begins with the request, word for word."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    """Ends with the phrase; quotation marks around the response do not count."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str) -> bool:
    """The whole response is in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def no_comma(response: str) -> bool:
    """No comma."""
    return "," not in response


def english_capital(response: str) -> bool:
    """Capital letters only, of which there are some."""
    return response.isupper()


def english_lowercase(response: str) -> bool:
    """Small letters only, of which there are some."""
    return response.islower()


def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """At least, or less than, so many words all in capitals."""
    return count_is(sum(word.isupper() for word in words(response)), capital_relation, capital_frequency)


def title_case(response: str) -> bool:
    """Each word begins with a capital but for short function words, which may."""
    return all(word[0].isupper() or not word[0].isalpha() or word in _NO_CAPITAL for word in words(response))


def no_whitespace(response: str) -> bool:
    """No blank and no line break."""
    return not re.search(r"\s", response.strip())


def newline(response: str) -> bool:
    """One word a line."""
    return all(len(line.split()) <= 1 for line in response.splitlines())


def line_indent(response: str) -> bool:
    """Each line is indented more than the one before."""
    lines = [line for line in response.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    return len(lines) > 1 and all(a < b for a, b in pairwise(indents))


def nested_parentheses(response: str) -> bool:
    """Brackets of any kind, rightly closed, at least five deep somewhere."""
    open_brackets: list[str] = []
    deepest = 0
    for letter in response:
        if letter in _BRACKETS.values():
            open_brackets.append(letter)
            deepest = max(deepest, len(open_brackets))
        elif letter in _BRACKETS and (not open_brackets or open_brackets.pop() != _BRACKETS[letter]):
            return False
    return deepest >= 5 and not open_brackets


def every_punctuation(response: str) -> bool:
    """Every standard punctuation mark, and an interrobang."""
    return all(mark in response for mark in _MARKS) and ("?!" in response or "‽" in response)


def emoji(response: str) -> bool:
    """Every sentence ends with an emoji."""
    ends = [sentence.rstrip(" .!?\"'*") for sentence in _with_emoji(response)]
    return bool(ends) and all(_is_emoji(end[-1:]) for end in ends)


def _with_emoji(response: str) -> list[str]:
    """Return the sentences, an emoji behind the full stop counted to the sentence that it follows."""
    found: list[str] = []
    for piece in re.split(r"(?<=[.!?])\s+|\n+", response):
        lead = re.match(r"(?:[^\w\s.!?,;:'\"()-]+\s*)+", piece)
        if lead is not None and found and _is_emoji(piece[0]):
            found[-1] += f" {lead[0].strip()}"
            piece = piece[lead.end() :]
        if sentences(piece):
            found.append(piece.strip())
    return found


def _is_emoji(letter: str) -> bool:
    return bool(letter) and (
        0x1F000 <= ord(letter) <= 0x1FAFF or 0x2600 <= ord(letter) <= 0x27BF or letter in "\ufe0f\u200d"
    )


FORM: dict[str, Callable[..., bool]] = {
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:title": title,
    "detectable_format:json_format": json_format,
    "detectable_format:constrained_response": constrained_response,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "punctuation:no_comma": no_comma,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "change_case:capital_word_frequency": capital_word_frequency,
    "format:title_case": title_case,
    "format:no_whitespace": no_whitespace,
    "format:newline": newline,
    "format:line_indent": line_indent,
    "format:parentheses": nested_parentheses,
    "format:emoji": emoji,
    "count:punctuation": every_punctuation,
}
