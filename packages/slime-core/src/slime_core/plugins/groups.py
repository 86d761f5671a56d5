"""The table of entry-point groups: the one source of flags, documentation, `slime plugins` and contract tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """How slime calls what is chosen from a group; `plugins.contract` holds it against a signature."""

    by_position: tuple[str, ...]
    """What is passed by position, named as messages name it."""
    by_name: tuple[str, ...] = ()
    """What is passed by name."""
    is_async: bool | None = False
    """Whether the result is awaited; None where both will do."""
    takes_options: bool = False
    """Keyword-only parameters of its own are options, filled from settings."""
    or_class: bool = False
    """A class will do whose objects are called so; the class itself is built from the options."""

    def __str__(self) -> str:
        """Write it as a signature."""
        words = [*self.by_position, *(["*", *self.by_name] if self.by_name else [])]
        if self.takes_options:
            words += ["*", "options"]
        return f"{'async ' if self.is_async else ''}({', '.join(words)})"


@dataclass(frozen=True)
class Group:
    """A kind of thing that is chosen by name."""

    name: str
    """Entry-point group."""
    flags: tuple[str, ...]
    """Flags that choose from it; empty where it is chosen by other means."""
    contract: str
    """What the object is, or how it is called, in one line."""
    summary: str
    """What it is for."""
    call: Call | None = None
    """How it is called; None where it is no callable, or where that depends on the flag."""
    call_of: Mapping[str, Call] = field(default_factory=dict)
    """How it is called, by the flag that chooses it, where each calls otherwise."""


_BUILD = Call(("build",))

GROUPS: tuple[Group, ...] = (
    Group(
        "slime.loops",
        ("--loop",),
        "async (run: Run) -> None",
        "a whole training run",
        Call(("run",), is_async=True),
    ),
    Group(
        "slime.launchers",
        ("--launcher",),
        "(settings: Settings, registry: Registry, use: async (run: Run) -> T) -> T",
        "where the processes of a run live",
        Call(("settings", "registry", "use")),
    ),
    Group("slime.trainers", ("--train-backend",), "(build: BuildContext) -> Trainer", "what learns", _BUILD),
    Group(
        "slime.engines",
        ("--rollout-engine",),
        "(build: BuildContext) -> RolloutEngine",
        "what generates",
        _BUILD,
    ),
    Group(
        "slime.tokenizers",
        ("--tokenizer",),
        "(model_path: Path) -> Tokenizer",
        "text to ids and back",
        Call(("model_path",)),
    ),
    Group(
        "slime.rollouts",
        ("--rollout-function-path",),
        "async (run: Run, step: int) -> list[Group]",
        "one whole rollout",
        Call(("run", "step"), is_async=True),
    ),
    Group(
        "slime.loss_masks",
        ("--loss-mask-type",),
        "(conversation: Conversation) -> list[TrainedText]",
        "what of a conversation is trained on, by --rollout-function-path sft",
        Call(("conversation",)),
    ),
    Group(
        "slime.generators",
        ("--custom-generate-function-path",),
        "async (ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample | list[Sample]",
        "one trajectory",
        Call(("ctx", "sample", "params"), is_async=True),
    ),
    Group(
        "slime.rewards",
        ("--rm-type", "--custom-rm-path"),
        "(sample: Sample, *, options) -> float | Grade | dict, sync or async; or a class built from the options",
        "the score of one sample",
        Call(("sample",), is_async=None, takes_options=True, or_class=True),
    ),
    Group(
        "slime.group_rewards",
        ("--rm-type", "--custom-rm-path"),
        "(group: list[Sample], *, options) -> list[float | Grade | dict], sync or async; or such a class",
        "the scores of one group, under --group-rm",
        Call(("group",), is_async=None, takes_options=True, or_class=True),
    ),
    Group(
        "slime.reward_transforms",
        ("--custom-reward-post-process-path",),
        "(raw_rewards_N, group_ids_N, *, options) -> rewards_N",
        "rewards to the numbers that are credited",
        Call(("raw_rewards_N", "group_ids_N"), takes_options=True),
    ),
    Group(
        "slime.filters",
        ("--dynamic-sampling-filter-path",),
        "(group: list[Sample], *, options) -> None to keep it | reason to drop it",
        "which groups are trained on",
        Call(("group",), takes_options=True),
    ),
    Group(
        "slime.advantages",
        ("--advantage-estimator", "--custom-advantage-function-path"),
        "(view: TokenView, *, options) -> (advantages_T, returns_T[, metrics])",
        "rewards to advantages",
        Call(("view",), takes_options=True),
    ),
    Group(
        "slime.losses",
        ("--loss-type", "--custom-loss-function-path", "--value-loss-type"),
        "(view: TokenView, advantages_T, *, options) -> (loss, metrics)",
        "what the optimizer minimises",
        Call(("view", "advantages_T"), takes_options=True),
    ),
    Group(
        "slime.reducers",
        ("--loss-reducer", "--custom-pg-loss-reducer-function-path"),
        "(view: ReductionView, *, options) -> weights_T",
        "share of each token in the loss of an optimizer step",
        Call(("view",), takes_options=True),
    ),
    Group(
        "slime.numerics",
        ("--numerics",),
        "Mapping: section -> setting -> value",
        "conventions of a framework: what settings are where nothing gives them",
    ),
    Group(
        "slime.sources",
        ("--data-source-path",),
        "(build: BuildContext) -> DataSource",
        "where prompts come from",
        _BUILD,
    ),
    Group(
        "slime.buffers",
        ("--buffer",),
        "(build: BuildContext) -> Buffer",
        "groups that wait to be trained on",
        _BUILD,
    ),
    Group(
        "slime.models",
        ("--model-name",),
        "ModelFamily",
        "weight names and shapes of a Hugging Face model_type",
    ),
    Group(
        "slime.trackers",
        ("--tracker",),
        "(build: BuildContext) -> Tracker",
        "where metrics go; many at once",
        _BUILD,
    ),
    Group(
        "slime.megatron_hooks",
        (
            "--custom-megatron-init-path",
            "--custom-model-provider-path",
            "--custom-megatron-before-log-prob-hook-path",
            "--custom-megatron-before-train-step-hook-path",
        ),
        "see `slime_megatron.hook_functions.MegatronHooks`",
        "functions of a user's own inside the Megatron trainer",
        call_of={
            "--custom-megatron-init-path": Call(("settings",)),
            "--custom-model-provider-path": Call(("config", "architecture"), ("pre_process", "post_process")),
            "--custom-megatron-before-log-prob-hook-path": Call(("model", "role")),
            "--custom-megatron-before-train-step-hook-path": Call(
                ("step", "optimizer_step", "model", "optimizer", "scheduler")
            ),
        },
    ),
    Group(
        "slime.commands",
        (),
        "(argv: list[str]) -> exit status",
        "a command, run by `slime NAME`",
        Call(("argv",)),
    ),
    Group(
        "slime.benches",
        (),
        "(argv: list[str]) -> exit status",
        "a benchmark, run by `slime bench NAME`",
        Call(("argv",)),
    ),
)

GROUP_BY_NAME = {group.name: group for group in GROUPS}
