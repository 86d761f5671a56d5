"""The data sources `kernelbench`, over a file of problems, and `kernel-problems`, over generated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.data.prompt_source import PromptSource, refuse_prompt_data, source_of
from slime_core.data.rows.open_rows import open_rows
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.samples import Sample

from slime_kernels.problems.examples import example_of, skeleton_of
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import PROBLEM_KEY, PROMPT_KEY, KernelProblem, expression_of, problem_of
from slime_kernels.section import CODE, EXPRESSION, SKELETON, KernelsSection


def create_kernelbench(build: BuildContext) -> PromptSource:
    """Build the data source `kernelbench`: the problems of `kernels.problems`; in evaluations, of `kernels.eval_problems`.

    The label is the problem's source, as in the fork's data.

    Raises:
        ConfigError: no file is set, or files of prompts are given.
        DataError: a row is no problem, or no problem is of the wanted levels.
    """
    refuse_prompt_data(build)
    section = build.section(KernelsSection)
    name = "eval_problems" if build.evaluation else "problems"
    spec = section.eval_problems if build.evaluation else section.problems
    if spec is None:
        flag = f"--kernels-{name.replace('_', '-')}"
        raise ConfigError(
            [Problem(f"kernels.{name}", "nothing", "a JSON Lines file of problems", f"give {flag}")]
        )
    rows = open_rows(spec)
    records = [rows[number] for number in range(len(rows))]
    problems = [(problem_of(record), record.where) for record in records]
    kept = [one for one in problems if not section.levels or one[0].level in section.levels]
    if not kept:
        raise DataError(f"{spec}: found no problem of the levels {section.levels} (kernels.levels)")
    places = [place for _, place in kept]
    return _source(((problem, problem.code) for problem, _ in kept), build, places.__getitem__)


def create_generated(build: BuildContext) -> PromptSource:
    """Build the data source `kernel-problems`: generated problems; in evaluations, those that are held out.

    The label is a right answer, where the family has some: the rollout `sft` trains on it.

    Raises:
        ConfigError: files of prompts are given.
        DataError: the families do not have that many, or there are none of the wanted levels.
    """
    refuse_prompt_data(build)
    section = build.section(KernelsSection)
    train, held_out = generated_problems(
        section.size, families=section.families, seed=section.seed, held_out=section.eval_size
    )
    problems = held_out if build.evaluation else train
    kept = [one for one in problems if not section.levels or one.level in section.levels]
    if not kept:
        raise DataError("kernels.levels, kernels.eval_size: no generated problem is left; widen them")
    if section.answer == "expression":
        kept = [replace(one, skeleton=skeleton_of(one)) for one in kept]
    labelled = ((one, example_of(one)) for one in kept)
    return _source(labelled, build, lambda number: f"generated problem {number}")


def _source(
    problems: Iterable[tuple[KernelProblem, str | None]], build: BuildContext, place: Callable[[int], str]
) -> PromptSource:
    template = build.section(KernelsSection).prompt_template
    data, tokenizer = build.settings.data, build.tokenizer
    prototypes = []
    for problem, label in problems:
        text = said = _prompt(problem, template)
        if data.apply_chat_template:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, **data.apply_chat_template_kwargs)
        made = {
            "text": said,
            "chat": data.apply_chat_template,
            "template_kwargs": dict(data.apply_chat_template_kwargs),
        }
        metadata: dict[str, Any] = {PROBLEM_KEY: problem.to_dict(), PROMPT_KEY: made}
        if build.evaluation:
            metadata["source_name"] = f"level{problem.level}"
        prototypes.append(Sample(prompt=text, tokens=tokenizer.encode(text), label=label, metadata=metadata))
    return source_of(prototypes, build, place=place)


def _prompt(problem: KernelProblem, template: str) -> str:
    text = template.replace(CODE, problem.code.rstrip())
    if EXPRESSION in template:
        text = text.replace(EXPRESSION, expression_of(problem.code, problem.title))
    if SKELETON in template:
        if not problem.skeleton:
            raise DataError(
                f"{problem.title}: the prompt has {SKELETON} and the problem none; set kernels.answer = 'expression', "
                "or give its row a skeleton"
            )
        text = text.replace(SKELETON, problem.skeleton.rstrip())
    return text
