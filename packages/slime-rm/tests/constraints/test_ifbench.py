"""The reward `ifbench`: each constraint with a response that keeps to it and one that does not."""

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.constraints.ifbench import CONSTRAINTS, ifbench
from slime_rm.constraints.units import paragraphs, sentences, words

#: id, arguments, kept by, broken by
CASES = [
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "one two",
        "one two three",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "It rains. It pours!",
        "It rains on Dr. Smith",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b", "a *** b ***"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First this.\n\nthen that.",
        "Then this.\n\nThat.",
    ),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b c", "a b c d"),
    ("count:unique_word_count", {"N": 3}, "a b c a", "A a b"),
    ("count:conjunctions", {"small_n": 2}, "a and b but c", "a and b and c"),
    ("count:numbers", {"N": 2}, "3 cats, 4.5 dogs", "3 cats and four dogs"),
    ("count:pronouns", {"N": 2}, "She gave it away", "Anna gave books away"),
    ("words:repeats", {"small_n": 1}, "all words differ", "the cat the dog"),
    ("words:prime_lengths", {}, "to the great kingdom", "a word"),
    ("sentence:increment", {"small_n": 1}, "Go. Go on. Go on now.", "Go. Go on now. Go on then now."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**bold**\n* a", "**bold**\n--"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and ** **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION one\nSECTION 2",
    ),
    ("detectable_format:title", {}, "<<Ode>>\nO", "<< >>\nO"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1} is it'),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street]", "[name], []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi.\nP.S. Bye.", "Hi. Bye, PS5 fans"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi.\nP.P.S Bye.", "Hi.\nP.S. Bye."),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. I did.", "I did. Say it."),
    ("startend:end_checker", {"end_phrase": "Any more?"}, "So. any more?", "Any more? No."),
    ("startend:quotation", {}, '"all of it"', '"some" of it'),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    ("change_case:english_capital", {}, "ALL 3!", "All 3!"),
    ("change_case:english_lowercase", {}, "all 3!", "All 3!"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA",
        "NASA and Esa",
    ),
    ("format:title_case", {}, "The Lord of the Rings", "The lord of the Rings"),
    ("format:no_whitespace", {}, "nothing-here\n", "a b"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("format:line_indent", {}, "a\n b\n   c", "a\n b\n c"),
    ("format:parentheses", {}, "([{([x])}])", "((((x)))) ["),
    ("format:emoji", {}, "Hi 😀. Bye! 🎉", "Hi 😀. Bye!"),
    (
        "count:punctuation",
        {},
        "a. b, c; d: e! f? 'g' \"h\" (i) j-k ?!",
        "a. b, c; d: e! f? 'g' \"h\" (i) j-k",
    ),
    ("keywords:existence", {"keywords": ["cat", "Dog"]}, "A dog, a cat", "A dogma, a cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "The CAT"),
    (
        "keywords:frequency",
        {"keyword": "a b", "frequency": 2, "relation": "at least"},
        "a b, A B",
        "a b, a  c",
    ),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"},
        "One",
        "Eel",
    ),
    ("sentence:keyword", {"word": "cat", "N": 2}, "Hi. A cat sat.", "A cat sat. Hi."),
    (
        "count:keywords_multiple",
        {"keyword1": "a", "keyword2": "b", "keyword3": "c", "keyword4": "d", "keyword5": "e"},
        "a bb b b ccc c c c d d d d d e e e e e e e",
        "a b b c c c d d d d d e e e e e e",
    ),
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        "Hi. See my cat.",
        "Hi. See cat my.",
    ),
    ("words:words_position", {"keyword": "be"}, "To be or not be there", "To be or not to be"),
    ("words:alphabet", {}, "xenial yaks zoom around", "a cat"),
    ("words:vowel", {}, "an open sad mode", "an open unit"),
    (
        "words:palindrome",
        {},
        "level radar civic rotor kayak refer madam tenet stats solos",
        "level radar civic rotor kayak refer madam tenet stats noon",
    ),
    ("words:no_consecutive", {}, "big cats dance", "big bad cats"),
    ("words:last_first", {}, "I like tea. Tea is hot.", "I like tea. It is hot."),
]


def score(response, names, arguments=None):
    return ifbench(
        Sample(index=9, response=response, metadata={"instruction_id_list": names, "kwargs": arguments})
    )


@pytest.mark.parametrize(("name", "arguments", "kept", "broken"), CASES, ids=[case[0] for case in CASES])
def test_a_constraint_tells_what_keeps_to_it_from_what_does_not(name, arguments, kept, broken):
    assert score(kept, [name], [arguments]).score == 1.0
    assert score(broken, [name], [arguments]).score == 0.0


def test_every_constraint_has_a_case():
    assert {case[0] for case in CASES} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) >= 25


def test_all_constraints_must_be_kept_and_the_share_is_a_part():
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    grade = score("No comma", names, [{}, {"num_words": None}])
    assert (grade.score, grade.parts) == (0.0, {"share": 0.5})
    assert grade.details["kept"] == {"0 punctuation:no_comma": True, "1 change_case:english_lowercase": False}
    assert score("no comma", names).score == 1.0


@pytest.mark.parametrize("name", ["punctuation:no_comma", "format:no_whitespace", "words:repeats"])
def test_an_empty_response_keeps_to_nothing(name):
    assert score(" \n", [name], [{"small_n": 1} if name == "words:repeats" else {}]).score == 0.0


@pytest.mark.parametrize(
    ("names", "arguments", "words_"),
    [
        (
            ["punctuation:no_coma"],
            None,
            "no constraint is named 'punctuation:no_coma'; did you mean 'punctuation:no_comma'",
        ),
        (None, None, r"metadata\['instruction_id_list'\] is None"),
        ([], None, r"metadata\['instruction_id_list'\] is \[\]"),
        (["punctuation:no_comma"], [{}, {}], "wanted a dict for each of 1 constraints"),
        (["count:numbers"], [{}], "is given \\[\\], it takes"),
        (["count:numbers"], [{"n": 3}], "is given \\['n'\\], it takes"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "more than"}],
            "relation is 'more than'; wanted one of",
        ),
        (["count:numbers"], [{"N": "3 or so"}], "N is '3 or so'; wanted int"),
        (["count:numbers"], [{"N": 3.5}], "N is 3.5; wanted int"),
        (["keywords:existence"], [{"keywords": "cat"}], "keywords is 'cat'; wanted list"),
    ],
)
def test_what_is_wrong_with_the_constraints_is_an_error_that_names_the_sample(names, arguments, words_):
    with pytest.raises(SampleError, match=f"^sample 9: .*{words_}"):
        score("x", names, arguments)


def test_units_are_counted_as_a_reader_counts_them():
    assert words("It's a well-known fact: 3.") == ["It's", "a", "well-known", "fact", "3"]
    assert sentences('Dr. Who came. "Really?" he asked! No dot') == [
        "Dr. Who came.",
        '"Really?',
        "he asked!",
        "No dot",
    ]
    assert paragraphs("a\nb\n\n \n c\n") == ["a\nb", "c"]


def test_special_tokens_at_the_end_are_no_part_of_the_response():
    end = ["startend:end_checker"]
    assert score("I am done<|im_end|>\n", end, [{"end_phrase": "I am done"}]).score == 1.0
    assert score("I am <|im_end|> done", ["format:no_whitespace"]).score == 0.0
    assert score("<|im_end|>", ["punctuation:no_comma"]).score == 0.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "unit", ["\n", " ", "* ", "**a", "*a ", "Dr. ", "P.S. ", "```", "\n\n", "(", "<<a", "1,"]
)
def test_a_response_that_repeats_itself_without_end_is_read_once(unit):
    """A policy that fell into a loop writes such. Read once it takes a second, in squares minutes."""
    for name, arguments, _, _ in CASES:
        assert score("Hi **" + unit * (200_000 // len(unit)), [name], [arguments]).score in (0.0, 1.0)


def test_a_thought_is_no_part_of_the_response():
    metadata = {"instruction_id_list": ["punctuation:no_comma"]}
    for response, score in (
        ("<think>well, so</think>\n\nno comma here", 1.0),
        ("well, so</think>no comma here", 1.0),
        ("<think>no</think>one, two", 0.0),
        ("<think>no comma, and no end", 0.0),
        ("no comma here", 1.0),
    ):
        assert ifbench(Sample(response=response, metadata=metadata)).score == score
