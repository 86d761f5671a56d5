"""Entry-point groups: the one source of flags, documentation, `slime plugins` and contract tests.

Those of core are here. A package that has things to choose from for itself lists groups of its own in the entry-point group
`slime.groups`: each entry is a `Group`, in a module that imports in milliseconds.
"""

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
    has: tuple[str, ...] = ()
    """Attributes by which it is known, where it is no callable."""


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
        "async (run: RolloutRun, step: int, *, options) -> list[Group]",
        "one whole rollout",
        Call(("run", "step"), is_async=True, takes_options=True),
    ),
    Group(
        "slime.eval_functions",
        ("--eval-function-path",),
        "async (run: RolloutRun, step: int, source: DataSource | None, *, options) -> dict[str, list[Group]] | "
        "tuple[that, metrics]",
        "one whole evaluation",
        Call(("run", "step", "source"), is_async=True, takes_options=True),
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
        "async (ctx: GenerateContext, sample: Sample, params: SamplingParams, *, options) -> Sample | list[Sample]; or a class "
        "built from the options",
        "one trajectory",
        Call(("ctx", "sample", "params"), is_async=True, takes_options=True, or_class=True),
    ),
    Group(
        "slime.environments",
        ("--environment",),
        "(*, options) -> Environment; called for each sample",
        "what answers the policy in a conversation, by the generator multi-turn",
        Call((), takes_options=True),
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
        "slime.rollout_hooks",
        (
            "--buffer-filter-path",
            "--rollout-sample-hook-path",
            "--rollout-sample-filter-path",
            "--rollout-all-samples-process-path",
            "--custom-convert-samples-to-train-data-path",
            "--custom-rollout-log-function-path",
            "--custom-eval-rollout-log-function-path",
        ),
        "see `slime_core.rollout.user_hooks.RolloutHooks`",
        "functions of a user's own that see the buffer, samples and groups of a rollout",
        call_of={
            "--buffer-filter-path": Call(("args", "rollout_id", "buffer", "num_samples"), takes_options=True),
            "--rollout-sample-hook-path": Call(
                ("args", "sample"), ("rollout_id", "evaluation"), is_async=None, or_class=True
            ),
            "--rollout-sample-filter-path": Call(("args", "groups"), takes_options=True),
            "--rollout-all-samples-process-path": Call(
                ("args", "all_groups", "get_samples"), takes_options=True
            ),
            "--custom-convert-samples-to-train-data-path": Call(("args", "samples"), takes_options=True),
            "--custom-rollout-log-function-path": Call(
                ("rollout_id", "args", "samples", "metrics", "rollout_time"), takes_options=True
            ),
            "--custom-eval-rollout-log-function-path": Call(
                ("rollout_id", "args", "data", "metrics"), takes_options=True
            ),
        },
    ),
    Group(
        "slime.advantages",
        ("--advantage-estimator", "--custom-advantage-function-path"),
        "(view: TokenView, *, options) -> (advantages_T, returns_T[, metrics])",
        "rewards to advantages",
        Call(("view",), takes_options=True),
    ),
    Group(
        "slime.corrections",
        ("--custom-tis-function-path",),
        "(view: TokenView, *, options) -> Correction | (Correction, metrics)",
        "importance weights and rejected tokens where the engine's policy is not the trainer's",
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
        has=("items", "keys"),
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
        "slime.trackers",
        ("--tracker",),
        "(build: BuildContext) -> an object that answers hooks",
        "where metrics go; many at once",
        _BUILD,
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
