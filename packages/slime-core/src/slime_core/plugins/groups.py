"""The table of entry-point groups: the one source of flags, documentation, `slime plugins` and contract tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A kind of thing that is chosen by name."""

    name: str
    """Entry-point group."""
    flags: tuple[str, ...]
    """Flags that choose from it; empty where it is chosen by other means."""
    contract: str
    """How the object is called: its signature, in one line."""
    summary: str
    """What it is for."""


GROUPS: tuple[Group, ...] = (
    Group("slime.loops", ("--loop",), "async (run: Run) -> None", "a whole training run"),
    Group(
        "slime.launchers",
        ("--launcher",),
        "(settings: Settings, registry: Registry, use: async (run: Run) -> T) -> T",
        "where the processes of a run live",
    ),
    Group("slime.trainers", ("--train-backend",), "(build: BuildContext) -> Trainer", "what learns"),
    Group("slime.engines", ("--rollout-engine",), "(build: BuildContext) -> RolloutEngine", "what generates"),
    Group("slime.tokenizers", ("--tokenizer",), "(model_path: Path) -> Tokenizer", "text to ids and back"),
    Group(
        "slime.rollouts",
        ("--rollout-function-path",),
        "async (run: Run, step: int) -> list[Group]",
        "one whole rollout",
    ),
    Group(
        "slime.loss_masks",
        ("--loss-mask-type",),
        "(conversation: Conversation) -> list[TrainedText]",
        "what of a conversation is trained on, by --rollout-function-path sft",
    ),
    Group(
        "slime.generators",
        ("--custom-generate-function-path",),
        "async (ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Sample | list[Sample]",
        "one trajectory",
    ),
    Group(
        "slime.rewards",
        ("--rm-type", "--custom-rm-path"),
        "(sample: Sample, *, options) -> float | Grade | dict, sync or async; or a class built from the options",
        "the score of one sample",
    ),
    Group(
        "slime.group_rewards",
        ("--rm-type", "--custom-rm-path"),
        "(group: list[Sample], *, options) -> list[float | Grade | dict], sync or async; or such a class",
        "the scores of one group, under --group-rm",
    ),
    Group(
        "slime.reward_transforms",
        ("--custom-reward-post-process-path",),
        "(raw_rewards_N, group_ids_N, *, options) -> rewards_N",
        "rewards to the numbers that are credited",
    ),
    Group(
        "slime.filters",
        ("--dynamic-sampling-filter-path",),
        "(group: list[Sample], *, options) -> None to keep it | reason to drop it",
        "which groups are trained on",
    ),
    Group(
        "slime.advantages",
        ("--advantage-estimator", "--custom-advantage-function-path"),
        "(view: TokenView, *, options) -> (advantages_T, returns_T[, metrics])",
        "rewards to advantages",
    ),
    Group(
        "slime.losses",
        ("--loss-type", "--custom-loss-function-path", "--value-loss-type"),
        "(view: TokenView, advantages_T, *, options) -> (loss, metrics)",
        "what the optimizer minimises",
    ),
    Group(
        "slime.reducers",
        ("--loss-reducer", "--custom-pg-loss-reducer-function-path"),
        "(view: ReductionView, *, options) -> weights_T",
        "share of each token in the loss of an optimizer step",
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
    ),
    Group(
        "slime.buffers", ("--buffer",), "(build: BuildContext) -> Buffer", "groups that wait to be trained on"
    ),
    Group(
        "slime.models",
        ("--model-name",),
        "ModelFamily",
        "weight names and shapes of a Hugging Face model_type",
    ),
    Group(
        "slime.trackers", ("--tracker",), "(build: BuildContext) -> Tracker", "where metrics go; many at once"
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
    ),
    Group("slime.commands", (), "(argv: list[str]) -> exit status", "a command, run by `slime NAME`"),
    Group("slime.benches", (), "(argv: list[str]) -> exit status", "a benchmark, run by `slime bench NAME`"),
)

GROUP_BY_NAME = {group.name: group for group in GROUPS}
