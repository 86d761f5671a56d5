"""Settings of data, generation, rewards and evaluation. Field names are the reference system's flags, dashes as underscores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BeforeValidator

from slime_core.config.base import (
    MOST,
    Amount,
    Count,
    FilePath,
    Index,
    Positive,
    Seconds,
    SectionModel,
    Seed,
    Share,
    Text,
    Weight,
)


def _top_k(value: int) -> int:
    if value == 0:
        raise ValueError("-1 for all, or how many of the most likely: 1 or more")
    return value


def _as_list(value: Any) -> Any:
    """Return one file, which stands alone, as a list of one, and `none` as an empty one."""
    if value is None or value in ("none", ["none"]):
        return []
    return [value] if isinstance(value, str) else value


#: How many of the most likely tokens to draw from.
TopK = Annotated[int, Ge(-1), Le(MOST), AfterValidator(_top_k)]


class DataSection(SectionModel):
    """Where prompts come from, and which columns hold what."""

    reads = ("prompt_data", "media_root")

    data_source_path: str = "file"
    """Data source."""
    buffer: str = "fifo"
    """Buffer of groups that wait to be trained on."""
    prompt_data: Annotated[list[Annotated[FilePath, MinLen(1)]], BeforeValidator(_as_list)] = []
    """JSONL or Parquet file, or `hf:NAME?split=train` for a Hugging Face dataset; `...@[start:stop]` takes a slice of the rows.
    Several: alternating names and files, mixed by `prompt_data_weights`."""
    prompt_data_weights: dict[str, Positive] = {}
    """Weight of each name of `prompt_data`: prompts are taken in these proportions; 1 where not given."""
    disable_rollout_global_dataset: bool = False
    """Read no prompts: samples are handed out empty, and the generator, or the rollout function, brings the prompts. A data source of
    your own is asked all the same."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = None
    """Column of the ground truth; `column.name` for what a column of tables has under a name, as verl's `reward_model.ground_truth`."""
    metadata_key: str = "metadata"
    """Column of further data for rewards and generators; `*` for all columns that no other setting names."""
    tool_key: str = "tools"
    """Column of tool schemas, for the chat template."""
    multimodal_keys: dict[str, str] | None = None
    """Media type -> column that holds it: `{"image": "images"}` puts the next image in the place of each `<image>`."""
    media_root: FilePath | None = None
    """Folder that the paths of images begin in and may not lead out of; the data file's own when not given."""
    apply_chat_template: bool = False
    """Render the prompt through the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template."""
    loss_mask_type: str = "template"
    """How the rollout `sft` finds what to train on in a conversation."""
    rollout_shuffle: bool = False
    """Shuffle the prompts, anew each epoch."""
    rollout_max_prompt_len: Count | None = None
    """Drop prompts of more tokens than this."""


class RolloutSection(SectionModel):
    """How samples are generated."""

    rollout_engine: str = "torch"
    """Engine that generates."""
    rollout_function_path: str = "default"
    """Function that runs a whole rollout."""
    rollout_function_args: dict[str, Any] = {}
    """Options of that function."""
    custom_generate_function_path: str = "single-turn"
    """Function that generates one trajectory."""
    custom_generate_function_args: dict[str, Any] = {}
    """Options of that function."""
    rollout_batch_size: Count
    """Prompts of a step."""
    n_samples_per_prompt: Count = 1
    """Samples generated for each prompt."""
    over_sampling_batch_size: Count | None = None
    """Prompts taken at once, each time that a step needs more (a wave); at least `rollout_batch_size`, which it is when not given. The loop
    fully-async takes them one by one: there it says how many dropped groups `dynamic_sampling_max_waves` counts as a wave."""
    rollout_concurrency: Count | Literal["auto"] | None = None
    """Most requests of the run that are in flight at the engine at once, those of evaluations included; further ones wait here,
    in order. `auto` follows the load that the engine reports: it grows while the KV cache has room, and falls when that is full
    or requests queue. When not given, only the engine's own limits hold."""
    rollout_in_completion_order: bool = False
    """Keep the groups that finish first, instead of deciding in the order of the prompts; faster with
    over-sampling, and not reproducible."""
    max_staleness: Index | None = None
    """Most steps between the weights that generated a sample's oldest token and those that train on it. The loop fully-async
    generates so far ahead (1 when not given); elsewhere it bounds the age of partial responses."""
    max_staleness_policy: Literal["wait", "drop"] = "wait"
    """In the loop fully-async: `wait` submits no prompt that could become older than the bound; `drop` generates a step
    further ahead, and drops what has become too old."""
    dynamic_sampling_filter_path: str | None = None
    """Filter that says which groups to keep."""
    dynamic_sampling_max_waves: Count = 20
    """Rounds of further prompts (waves) that one step may take; where the filter still leaves too few groups, the run stops."""
    filter_args: dict[str, Any] = {}
    """Options of the filter."""
    buffer_filter_path: str | None = None
    """Function that chooses which groups that wait in the buffer are generated next; the first ones when not given."""
    rollout_sample_hook_path: list[Text] = []
    """Functions that see each sample when it is generated and not scored yet, one after the other."""
    rollout_sample_filter_path: str | None = None
    """Function that sets `remove_sample` on samples of a step: they count in their group's statistics, and are not trained on."""
    rollout_all_samples_process_path: str | None = None
    """Function that sees all groups of a step, also those that the filter dropped."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Function that makes the training data of a step's samples."""
    custom_rollout_log_function_path: str | None = None
    """Function that sees a step's samples and metrics; where it returns True, no tracker gets the metrics `rollout/...`."""
    custom_eval_rollout_log_function_path: str | None = None
    """Function that sees an evaluation's samples and metrics; where it returns True, no tracker gets them."""
    hook_args: dict[str, dict[str, Any]] = {}
    """Options of the functions above, by the name of the function."""
    partial_rollout: bool = False
    """Keep aborted groups in the buffer and go on with them in the next step."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on tokens that a group had when a step ended or weights arrived. In the loop `fully-async` responses are cut, as this needs, with
    `--update-weights-in-flight continue`."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature."""
    rollout_top_p: Share = 1.0
    """Top-p (nucleus) sampling. Below 1 the trainer computes log-probs over the same truncated vocabulary, token by token."""
    rollout_top_k: TopK = -1
    """Top-k sampling; -1 for all tokens. The trainer computes log-probs over the same truncated vocabulary."""
    rollout_max_response_len: Count
    """Most tokens of a response."""
    rollout_max_context_len: Count | None = None
    """Most tokens of prompt and response; longer responses are cut. A prompt that leaves no room is refused before a run; later it drops its group."""
    rollout_min_new_tokens: Index = 0
    """Fewest tokens of a response."""
    rollout_stop: list[Text] = []
    """Strings that end a response."""
    rollout_stop_token_ids: list[Index] = []
    """Token ids that end a response."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the decoded response."""
    rollout_seed: Seed = 42
    """Seed of the prompts' order and of sampling."""
    rollout_timeout_s: Seconds = 3600
    """Deadline of one step's rollout, and of one evaluation, seconds."""


class EnvironmentSection(SectionModel):
    """The environment that answers the policy, under the generator `multi-turn`."""

    environment: str | None = None
    """Environment that answers the policy's turns, for the generator `multi-turn`."""
    environment_args: dict[str, Any] = {}
    """Options of the environment."""
    max_turns: Count = 8
    """Most turns of the policy in one response; one that needs more is cut off."""
    max_environment_tokens: Count = 1024
    """Most tokens that the environment puts into one response, which are beyond `rollout_max_response_len`; one that needs
    more is cut off."""
    environment_timeout_s: Seconds = 60
    """Deadline of each call of an environment, seconds."""


class RewardSection(SectionModel):
    """How responses are scored."""

    rm_type: str | None = None
    """Reward, by name."""
    custom_rm_path: str | None = None
    """Reward, by `module:function`; given by a flag, or by a later recipe, it takes the place of an earlier `rm_type`, as
    that does of an earlier one of these, and of the `rm_type` in a row's metadata. Both in one place are refused."""
    rm_args: dict[str, Any] = {}
    """Options of the reward: its keyword-only parameters."""
    rm_weights: dict[str, Weight] = {}
    """Several rewards, by name, and the weight of each in the score; takes the place of an earlier `rm_type`."""
    rm_args_of: dict[str, dict[str, Any]] = {}
    """Options by the name of their reward, for those of `rm_weights` and of rows' metadata."""
    reward_key: str | None = None
    """Which entry of a reward dict is the score; `score` when not given."""
    eval_reward_key: str | None = None
    """Which entry of a reward dict is the evaluation score; `reward_key` when not given."""
    group_rm: bool = False
    """Score whole groups at once."""
    reward_workers: Annotated[int, Ge(1), Le(10_000)] = 1
    """Worker processes for rewards that are not async."""
    reward_timeout_s: Seconds = 30
    """Deadline of one reward, seconds; a worker that misses it is killed."""
    reward_memory_gb: Annotated[float, Ge(0.1), Le(1e6)] | None = None
    """Most memory of a reward worker, GB; a reward that wants more fails with a MemoryError."""
    on_reward_error: Literal["stop", "drop"] = "stop"
    """What a reward error does: stop the run, or drop the sample's group and count it."""
    overlong_buffer_len: Count | None = None
    """Soft overlong punishment: the last tokens before `rollout_max_response_len` over which a reward falls."""
    overlong_penalty_factor: Amount = 1.0
    """What a response of full length loses under the soft overlong punishment."""
    custom_reward_post_process_path: str | None = None
    """Transform from rewards to credited numbers; the estimator's own when not given."""


class EvalSection(SectionModel):
    """How the model is evaluated on held-out prompts."""

    reads = ("eval_prompt_data", "eval_config")

    eval_interval: Count | None = None
    """Steps between evaluations; the run's start and end are always evaluated when given."""
    skip_eval_before_train: bool = False
    """Do not evaluate at the start."""
    eval_prompt_data: list[FilePath] = []
    """Alternating names and files of evaluation sets."""
    eval_function_path: str = "default"
    """Function that runs a whole evaluation."""
    eval_function_args: dict[str, Any] = {}
    """Options of that function."""
    eval_config: Annotated[FilePath, MinLen(1)] | None = None
    """File (.toml, .json, or .yaml) with evaluation sets that have settings of their own, beside those of `eval_prompt_data`: a
    table `eval` with `datasets`, and `defaults` of them."""
    eval_input_key: str | None = None
    """Column of the prompt in evaluation sets; `input_key` when not given."""
    eval_label_key: str | None = None
    """Column of the ground truth in evaluation sets; `label_key` when not given."""
    eval_tool_key: str | None = None
    """Column of tool schemas in evaluation sets; `tool_key` when not given."""
    eval_data_source_path: str | None = None
    """Data source of the evaluation set, when it is not a file. Where it has prompts of its own, settings of evaluation files are refused
    beside it."""
    eval_num_prompts: Count | None = None
    """Rows of each evaluation file that are used; all when not given."""
    n_samples_per_eval_prompt: Count = 1
    """Samples for each evaluation prompt; pass@k is reported for the powers of two up to it."""
    eval_temperature: Amount = 0.0
    """Temperature; 0 is greedy."""
    eval_top_p: Share = 1.0
    """Nucleus of the sampling distribution."""
    eval_top_k: TopK = -1
    """Most likely tokens to sample from; -1 for all."""
    eval_max_response_len: Count | None = None
    """Most tokens of a response; `rollout_max_response_len` when not given."""
    eval_min_new_tokens: Index = 0
    """Fewest tokens of a response."""
    eval_max_context_len: Count | None = None
    """Most tokens of prompt and response; a longer response is cut. Only the engine's own limit holds when not given."""
    eval_max_prompt_len: Count | None = None
    """Drop evaluation prompts of more tokens than this, of any data source; chat messages without a template have no length, and are refused."""
    eval_pass_threshold: Weight = 1.0
    """A sample with at least this reward counts as solved."""
