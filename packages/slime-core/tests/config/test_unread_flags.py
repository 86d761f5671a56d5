"""Flags of plugins' sections that nothing reads: refused, unless some stage of the recipe chooses what does."""

from __future__ import annotations

import importlib_metadata
import pytest
from slime_core.checks.settings import check_stages
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.load import load_stages
from slime_core.plugins.registry import Registry

RECIPE = """
[model]
hf_checkpoint = "m"
[data]
prompt_data = "p"
[rollout]
rollout_batch_size = 4
rollout_max_response_len = 8
[reward]
rm_type = "exact"
"""
#: Three sections: one that every plugin of the distribution reads, one that only a tracker does, and one that hooks read.
HOOKS = """
from slime_core.config.base import SectionModel
from slime_core.plugins.adapter import Adapter
from slime_core.plugins.hooks import Section, hookimpl
class Acme(SectionModel):
    size: int = 3
class Board(SectionModel):
    team: str = "us"
class Always(SectionModel):
    more: bool = False
@hookimpl
def slime_config_sections():
    return [
        Section("acme", Acme), Section("board", Board, read_by=["board"]), Section("always", Always, read_by=None)
    ]
@hookimpl
def slime_adapt_plugin(value):
    if value in (keeps, hands_on):
        return Adapter(reference="acme_h:exact", reads=frozenset({"acme_size"}) if value is keeps else None)
def exact(sample): return 0.0
def board(build): pass
def keeps(args, sample): return args.acme_size
def hands_on(args, sample): return args
"""
POINTS = (
    "[slime]\nacme = acme_h\n[slime.engines]\nfast = acme_h:board\n[slime.trackers]\nboard = acme_h:board\n"
)
#: A distribution with a reward and a section that it reads.
SCORES = """
from slime_core.config.base import SectionModel
from slime_core.plugins.hooks import Section, hookimpl
class Scores(SectionModel):
    url: str = ""
@hookimpl
def slime_config_sections(): return [Section("scores", Scores)]
"""
#: Another distribution, with what a recipe chooses where it says nothing.
OTHER = "".join(
    f"[slime.{group}]\n{name} = acme_h:{'exact' if group == 'rewards' else 'board'}\n"
    for group, name in (
        ("engines", "torch"), ("trainers", "megatron"), ("tokenizers", "hf"), ("advantages", "grpo"),
        ("reducers", "sample-mean"), ("rewards", "exact"),
    )
)  # fmt: skip

MASKING = "--partial-rollout, and in the loop fully-async --update-weights-in-flight continue"

DEFAULT = "--rollout-function-path default"


@pytest.fixture
def unread(install, site, tmp_path):
    """Return what is told of flags beside the recipe, and another of the text `more`."""
    install("acme", POINTS, acme_h=HOOKS)
    install("other", OTHER)
    install("scores", "[slime]\nscores = scores_h\n[slime.rewards]\nscored = acme_h:exact\n", scores_h=SCORES)
    points = [p for d in importlib_metadata.distributions(path=[str(site)]) for p in d.entry_points]
    points += [p for p in importlib_metadata.entry_points() if p.dist.name == "slime-core"]
    registry = Registry(points)

    def told(*flags: str, more: str = "", check=unread_flags, **options) -> list[str]:
        for name, text in (("r.toml", RECIPE), ("more.toml", more)):
            (tmp_path / name).write_text(text)
        recipes = [str(tmp_path / "r.toml"), str(tmp_path / "more.toml")]
        stages = load_stages(recipes, list(flags), registry=registry)
        given = [stage.beforehand for stage in stages] if check is unread_flags else stages
        return [str(problem) for problem in check(given, registry, **options)]

    return told


def test_a_flag_of_a_plugin_that_is_not_chosen_is_refused_with_what_would_read_it(unread):
    assert unread("--acme-size", "4") == [
        "acme.size: found --acme-size, which nothing reads here; wanted --rollout-engine fast, --tracker board, or not this flag"
    ]
    assert unread("--rollout-engine", "fast", "--acme-size", "4") == []
    assert unread("--tracker", "board", "--acme-size", "4") == []


def test_a_flag_of_a_reward_is_left_to_rows_which_may_choose_it(unread):
    assert unread("--scores-url", "u") == []


def test_a_section_may_belong_to_some_of_the_plugins_or_to_hooks(unread):
    assert unread("--board-team", "them") == [
        "board.team: found --board-team, which nothing reads here; wanted --tracker board, or not this flag"
    ]
    assert unread("--tracker", "board", "--board-team", "them") == []
    assert unread("--always-more") == []


def test_recipes_may_hold_settings_for_others(unread):
    assert unread(more="[acme]\nsize = 4\n[board]\nteam = 'them'\n") == []
    (told,) = unread("--set", "acme.size=4")
    assert told.startswith("acme.size: found --set acme.size, which nothing")


def test_a_function_of_another_system_may_read_all_settings_or_those_that_are_known(unread):
    assert unread("--rm-type", "acme_h:hands_on", "--acme-size", "4", "--board-team", "them") == []
    (told,) = unread("--rm-type", "acme_h:keeps", "--acme-size", "4", "--board-team", "them")
    assert told.startswith("board.team: found --board-team, which nothing reads here")


def test_what_may_be_made_of_a_plugin_may_read_its_section(unread):
    assert unread("--tracker", "acme_h:board", "--board-team", "them") == []
    assert len(unread("--rollout-engine", "acme_h:board", "--board-team", "them")) == 1
    assert unread("--rollout-engine", "acme_h:board", "--acme-size", "4") == []


@pytest.mark.parametrize(
    "flag", ["--rollout-function-path", "--eval-function-path", "--rollout-sample-hook-path"]
)
def test_a_function_of_ones_own_that_sees_the_run_may_read_everything(unread, flag):
    assert unread(flag, "acme_h:board", "--board-team", "them", "--max-turns", "3") == []


def test_one_stage_that_reads_a_flag_is_enough(unread):
    flags = ("--board-team", "them")
    stages = "[stage.a]\nrun.num_rollout = 1\n[stage.b]\nrun.num_rollout = 1\n"
    assert len(unread(*flags, more=stages)) == 1
    stages += "run.tracker = ['board']\n"
    assert unread(*flags, more=stages) == []
    assert unread("--set", "stage.b.board.team=them", more=stages) == []
    (told,) = unread("--set", "stage.a.board.team=them", more=stages)
    assert told.startswith("board.team: found --set stage.a.board.team, which nothing")


def test_beside_a_name_that_is_not_there_nothing_is_said_of_flags(unread):
    assert unread("--rm-type", "exat", "--board-team", "them") == []


def test_flags_that_were_translated_are_left_alone(unread):
    def about_flags(**options) -> list[str]:
        told = unread("--num-rollout", "1", "--board-team", "them", check=check_stages, **options)
        return [problem for problem in told if problem.startswith("board.")]

    assert len(about_flags()) == 1
    assert about_flags(is_translated=True) == []


@pytest.mark.parametrize(
    ("flags", "wanted", "beside"),
    [
        (("--max-staleness", "3"), "--loop fully-async, or --partial-rollout", ("--partial-rollout",)),
        (("--max-staleness", "3"), "--loop fully-async, or --partial-rollout", ("--loop", "fully-async")),
        (
            ("--skip-eval-before-train",),
            "--eval-interval",
            ("--eval-interval", "1", "--eval-prompt-data", "a", "a.jsonl"),
        ),
        (
            ("--max-turns", "3"),
            "--custom-generate-function-path multi-turn",
            ("--custom-generate-function-path", "multi-turn"),
        ),
        (("--max-staleness-policy", "drop"), "--loop fully-async", ("--loop", "fully-async")),
        (("--update-weights-in-flight", "keep"), "--loop fully-async", ("--loop", "fully-async")),
        (("--mask-offpolicy-in-partial-rollout",), MASKING, ("--partial-rollout",)),
        (
            ("--mask-offpolicy-in-partial-rollout", "--partial-rollout", "--loop", "fully-async"),
            MASKING,
            ("--update-weights-in-flight", "continue"),
        ),
        (
            ("--std-eps", "1e-4", "--disable-grpo-std-normalization"),
            "--no-disable-grpo-std-normalization",
            ("--no-disable-grpo-std-normalization",),
        ),
        (("--overlong-penalty-factor", "0.5"), "--overlong-buffer-len", ("--overlong-buffer-len", "4")),
        (("--min-lr", "1e-8"), "--lr-decay-style linear or cosine", ("--lr-decay-style", "linear")),
        (
            ("--tis-args", '{"a": 1}'),
            "--custom-tis-function-path",
            ("--custom-tis-function-path", "json:dumps"),
        ),
        (
            ("--over-sampling-batch-size", "8", "--loop", "fully-async"),
            f"{DEFAULT}, and in the loop fully-async --dynamic-sampling-filter-path",
            ("--dynamic-sampling-filter-path", "json:dumps"),
        ),
        (
            ("--partial-rollout", "--rollout-function-path", "sft"),
            DEFAULT,
            ("--rollout-function-path", "default"),
        ),
        (
            ("--dynamic-sampling-filter-path", "json:dumps", "--rollout-function-path", "recorded"),
            DEFAULT,
            ("--rollout-function-path", "default"),
        ),
        (
            ("--loss-mask-type", "json:dumps"),
            "--rollout-function-path sft",
            ("--rollout-function-path", "sft"),
        ),
        (("--media-root", "m"), "--multimodal-keys", ("--multimodal-keys", '{"image": "images"}')),
        (("--apply-chat-template-kwargs", '{"a": 1}'), "--apply-chat-template", ("--apply-chat-template",)),
        (
            ("--apply-chat-template-kwargs", '{"a": 1}'),
            "--apply-chat-template",
            ("--rollout-function-path", "sft"),
        ),
        (
            ("--update-weight-delta-encoding", "overwrite"),
            "--update-weight-mode delta",
            ("--update-weight-mode", "delta"),
        ),
    ],
)
def test_settings_of_core_that_are_read_beside_others_are_refused_without_them(unread, flags, wanted, beside):
    (told,) = unread(*flags)
    assert told.endswith(f": found {flags[0]}, which nothing reads here; wanted {wanted}, or not this flag")
    assert unread(*flags, *beside) == []


def test_what_is_the_default_may_be_said(unread):
    assert unread("--max-staleness-policy", "wait", "--no-mask-offpolicy-in-partial-rollout") == []
