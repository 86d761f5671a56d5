"""The calculator and the guessing game: what they answer, and the promises of their kind."""

import asyncio
import dataclasses
from typing import ClassVar

import pytest
from slime_core.errors import ContractError, SampleError
from slime_core.samples import Sample, Status
from slime_core.testing.contracts import check_environment
from slime_gym.environments.calculator import Calculator
from slime_gym.environments.guess_number import GuessNumber


def steps(environment, sample, *turns):
    """Return what the environment says to each turn."""

    async def main():
        await environment.reset(sample)
        return [await environment.step(sample, turn) for turn in turns]

    return asyncio.run(main())


def test_the_calculator_answers_the_expression_that_ends_a_turn():
    used, wrong, answer = steps(
        Calculator(),
        Sample(),
        "Let me see <calc>1</calc> or <calc>12*7</calc>\n",
        "<calc>12*</calc>",
        "It is 84.",
    )
    assert (used.content, used.done, used.reward) == (" = 84", False, None)
    assert used.info == {"expression": "12*7", "result": "84"}
    assert (wrong.content, wrong.done) == (" = error: not an expression", False)
    assert (answer.content, answer.done) == ("", True)


def test_the_calculator_does_not_answer_a_turn_that_was_cut_off():
    (last,) = steps(Calculator(), Sample(status=Status.TRUNCATED), "<calc>12*7</calc>")
    assert last.done


def test_a_closing_tag_alone_is_no_call():
    (last,) = steps(Calculator(), Sample(), "12*7</calc>")
    assert last.done


def test_tags_and_the_form_of_the_answer_are_options():
    calculator = Calculator(opening="[", closing="]", template="->{result};")
    (said,) = steps(calculator, Sample(), "[2+2]")
    assert said.content == "->4;"


def test_the_game_hints_until_the_guess_is_right():
    said = steps(GuessNumber(high=50), Sample(label="17"), "Is it 25?", "10", "hm", "17")
    assert [one.content for one in said] == ["\nlower\n", "\nhigher\n", "\nA number, please.\n", "\nright\n"]
    assert [one.reward for one in said] == [0.0, 0.0, 0.0, 1.0]
    assert [one.done for one in said] == [False, False, False, True]
    assert said[-1].info == {"guesses": 4}


def test_a_number_of_more_digits_than_python_reads_is_none():
    (said,) = steps(GuessNumber(), Sample(label="17"), "1" * 5000)
    assert said.content == "\nA number, please.\n"


@pytest.mark.parametrize("label", [None, "x", "51", "0"])
def test_a_label_that_is_no_number_of_the_game_is_an_error(label):
    with pytest.raises(
        SampleError, match=r"sample 3: found the label .*; wanted the number to guess, 1 to 50"
    ):
        steps(GuessNumber(high=50), Sample(index=3, label=label))


def test_both_keep_the_promises_of_environments():
    check_environment(Calculator, answers=["<calc>1+1</calc>", "<calc>oops</calc>", "#### 2"])
    check_environment(GuessNumber, answers=["50", "none", "2"])


class Forgets(GuessNumber):
    """A game that loses count when it goes on."""

    async def restore(self, sample, state):
        await self.reset(sample)


class Wavers(GuessNumber):
    """A game that answers otherwise every time."""

    said: ClassVar[list[str]] = []

    async def step(self, sample, text):
        self.said.append(text)
        found = await super().step(sample, text)
        return dataclasses.replace(found, content=f"{len(self.said)}\n")


@pytest.mark.parametrize(
    ("environment", "answers", "words"),
    [
        (Forgets, ["50", "2"], "found another conversation when it goes on after 2 of the policy's tokens"),
        (Wavers, ["50", "2"], "found other answers anew; wanted the same"),
        (GuessNumber, ["50", "40"], "wanted it to be done after the 2 given ones"),
        (GuessNumber, ["2", "40"], "found 1 turns ended by done; wanted it to be done after the 2"),
        (
            lambda: GuessNumber(low=5),
            ["50"],
            "found EnvironmentFailure: sample 0: the environment .* label '2'",
        ),
    ],
)
def test_the_kit_finds_broken_promises(environment, answers, words):
    with pytest.raises(ContractError, match=words):
        check_environment(environment, answers=answers)
