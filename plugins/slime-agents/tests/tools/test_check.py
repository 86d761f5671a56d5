"""Tools and agents that cannot be used are refused by `slime check`, before anything starts, each by its name."""

from __future__ import annotations

import pytest
from slime_agents.hooks import slime_check_build, slime_check_config
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

from ..byte_chat import ByteChat, SilentChat
from .test_tool_loop import HERE


@pytest.fixture(scope="module")
def registry():
    return Registry()


def settings_of(registry, tmp_path, text, *flags, generator="tool-loop"):
    recipe = tmp_path / "r.toml"
    recipe.write_text(text)
    reward = ["--rm-type", "exact"] if generator == "tool-loop" and "--rm-type" not in flags else []
    words = [*SIZES, "--custom-generate-function-path", generator, *reward, *flags]
    return load_settings([recipe], words, registry=registry)


def problems(registry, tmp_path, text, *flags, generator="tool-loop"):
    settings = settings_of(registry, tmp_path, text, *flags, generator=generator)
    return [str(problem) for problem in slime_check_config(settings, registry)]


SIZES = ("--hf-checkpoint", "x", "--rollout-batch-size", "1", "--rollout-max-response-len", "1")
RIGHT = f'[agents.tools.multiply]\nkind = "python"\nfunction = "{HERE}:multiply"\n'


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('function = "x:y"', "found no kind; wanted kind = NAME"),
        ('kind = "carrier-pigeon"', "carrier-pigeon"),
        ('kind = "python"\nfunction = "no_such_module:f"', "does not import"),
        (f'kind = "python"\nfunction = "{HERE}:untyped"', "the parameter a has no type; annotate it"),
        (f'kind = "python"\nfunction = "{HERE}:positional"', "the parameter a cannot be given by name"),
        (f'kind = "python"\nfunction = "{HERE}:not_a_function"', "wanted a function"),
        (f'kind = "python"\nfunction = "{HERE}:multiply"\ntimeout_s = 0', "timeout_s: found 0; wanted a number above 0"),
        (f'kind = "python"\nfunction = "{HERE}:multiply"\nspeed = 3', "found the key 'speed'"),
        ('kind = "http"\nurl = "http://x"\nparameters = {type = "string"}', "no JSON Schema of an object"),
        ('kind = "http"\nurl = "http://x"\nparameters = {type = "object", properties = {a = {type = "integr"}}}', "parameters.properties.a.type: 'integr'"),
        ('kind = "http"\nurl = "http://x"\nparameters = {type = "object", required = ["b"]}', "it requires ['b']"),
        ('kind = "http"\nurl = "http://x"', "needs the option 'parameters'"),
        ('kind = "mcp"', "wanted command or url"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_refused_by_name(registry, tmp_path, table, told):
    (problem,) = problems(registry, tmp_path, f"[agents.tools.broken]\n{table}\n")
    assert "agents.tools.broken" in problem
    assert told in problem


def test_right_tools_have_no_problems_and_other_generators_are_not_asked(registry, tmp_path):
    assert problems(registry, tmp_path, RIGHT) == []
    assert problems(registry, tmp_path, "[agents]\nmax_turns = 1\n", generator="single-turn") == []


@pytest.mark.parametrize(
    ("tokenizer", "flags", "generator", "n"),
    [
        (SilentChat(), [], "tool-loop", 1),
        (SilentChat(), ["--agents-tool-format", "json"], "tool-loop", 0),
        (SilentChat(), [], "roles", 0),
        (ByteChat(), [], "tool-loop", 0),
    ],
)
def test_tools_are_refused_before_a_run_where_nobody_says_how_calls_of_them_are_written(
    registry, tmp_path, tokenizer, flags, generator, n
):
    settings = settings_of(registry, tmp_path, RIGHT, *flags, generator=generator)
    build = BuildContext(
        settings=settings,
        registry=registry,
        load_tokenizer=lambda: tokenizer,
        model_path=tmp_path,
        run_dir=tmp_path,
    )
    found = [str(problem) for problem in slime_check_build(build)]
    assert len(found) == n
    assert all("agents.tool_format: found none, and the chat template of SilentChat" in one for one in found)


def test_a_tool_loop_without_tools_or_with_rendered_prompts_is_refused(registry, tmp_path):
    assert "agents.tools: found none" in problems(registry, tmp_path, "")[0]
    (problem,) = problems(registry, tmp_path, RIGHT, "--apply-chat-template")
    assert "renders the chat template itself" in problem
    (problem,) = problems(registry, tmp_path, RIGHT, "--agents-tool-format", "yaml")
    assert "yaml" in problem


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "agents.program, agents.function: found neither"),
        ('[agents]\nprogram = ["x"]\nfunction = "asyncio:sleep"', "found both"),
        ('[agents]\nfunction = "no_such:f"', "does not import"),
        ('[agents]\nfunction = "json:loads"', "is not async"),
        ('[agents]\nprogram = ["x"]', "found 'plugin', and no reward"),
        (
            '[agents]\nprogram = ["x"]\nreward = "program"\n[reward]\nrm_type = "exact"',
            "a session has one reward",
        ),
    ],
)
def test_a_wrong_agent_is_refused_by_name(registry, tmp_path, text, told):
    (problem,) = problems(registry, tmp_path, text, generator="agent")
    assert told in problem


def test_samples_of_tools_and_roles_need_a_reward_of_their_own_or_of_the_run(registry, tmp_path):
    (told,) = problems(registry, tmp_path, RIGHT, "--rm-type", "none")
    assert told.startswith("reward.rm_type: found nothing, with the generator tool-loop; wanted a reward")
    solver = '[[agents.roles]]\nname = "solver"\nprompt = "{task}"\n'
    checker = '[[agents.roles]]\nname = "checker"\nprompt = "{solver}"\nreward = "math"\n'
    (told,) = problems(registry, tmp_path, solver + checker, generator="roles")
    assert told.startswith(
        "agents.roles: found no reward for solver, and none of the run; wanted a reward for each"
    )
    assert problems(registry, tmp_path, solver + checker, "--rm-type", "math", generator="roles") == []
    own = solver + 'reward = "math"\n' + checker
    assert problems(registry, tmp_path, own, generator="roles") == []
