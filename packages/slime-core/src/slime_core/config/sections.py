"""The sections that core itself reads. Field names are the reference system's flags, dashes as underscores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator

from slime_core.config.base import (
    MOST,
    Amount,
    Count,
    Decay,
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


#: How many of the most likely tokens to draw from.
TopK = Annotated[int, Ge(-1), Le(MOST), AfterValidator(_top_k)]


class RunSection(SectionModel):
    """What the run is called, where it goes, and which loop drives it."""

    run_name: str = "run"
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: str = "runs"
    """Folder that holds run folders."""
    overwrite: bool = False
    """Delete an earlier run of the same name instead of resuming it."""
    loop: str = "sync"
    """Loop that drives the run."""
    launcher: str = "local"
    """Where the processes of the run live."""
    tracker: list[str] = ["console", "jsonl", "plot"]
    """Trackers, several at once."""
    use_wandb: bool = False
    """Add the tracker `wandb`."""
    use_tensorboard: bool = False
    """Add the tracker `tensorboard`."""
    seed: Seed = 1234
    """Seed of everything random in training."""
    num_rollout: Count | None = None
    """Number of steps (rollout and train); needed unless `num_epoch` is given."""
    num_epoch: Count | None = None
    """Number of passes over the prompts, when `num_rollout` is not given."""


class ModelSection(SectionModel):
    """The model that is trained and served."""

    hf_checkpoint: str
    """Hugging Face folder or hub name of the model, or a name that `slime models list` shows."""
    model_name: str | None = None
    """Model family, when it is not the `model_type` of config.json."""
    tokenizer: str = "hf"
    """Tokenizer loader."""


class DataSection(SectionModel):
    """Where prompts come from, and which columns hold what."""

    data_source_path: str = "file"
    """Data source."""
    buffer: str = "fifo"
    """Buffer of groups that wait to be trained on."""
    prompt_data: str | None = None
    """JSONL or Parquet file; `path@[start:stop]` takes a slice of its rows."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = None
    """Column of the ground truth."""
    metadata_key: str = "metadata"
    """Column of further data for rewards and generators."""
    tool_key: str = "tools"
    """Column of tool schemas, for the chat template."""
    multimodal_keys: dict[str, str] | None = None
    """Media type -> column that holds it: `{"image": "images"}` puts the next image in the place of each `<image>`."""
    media_root: str | None = None
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
    custom_generate_function_path: str = "single-turn"
    """Function that generates one trajectory."""
    rollout_batch_size: Count
    """Prompts of a step."""
    n_samples_per_prompt: Count = 1
    """Samples generated for each prompt."""
    over_sampling_batch_size: Count | None = None
    """Prompts taken in each wave of sampling; at least `rollout_batch_size`, which it is when not given."""
    rollout_in_completion_order: bool = False
    """Keep the groups that finish first, instead of deciding in the order of the prompts; faster with
    over-sampling, and not reproducible."""
    dynamic_sampling_filter_path: str | None = None
    """Filter that says which groups to keep."""
    dynamic_sampling_max_waves: Count = 20
    """Waves of sampling in one step after which a filter that drops too much stops the run."""
    filter_args: dict[str, Any] = {}
    """Options of the filter."""
    partial_rollout: bool = False
    """Keep aborted groups in the buffer and go on with them in the next step."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on tokens that an earlier policy generated."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature."""
    rollout_top_p: Share = 1.0
    """Nucleus of the sampling distribution. Below 1 the trainer holds to the ids that it left for each token."""
    rollout_top_k: TopK = -1
    """Most likely tokens to sample from; -1 for all. The trainer holds to them."""
    rollout_max_response_len: Count
    """Most tokens of a response."""
    rollout_max_context_len: Count | None = None
    """Most tokens of prompt and response; longer responses are cut, and a prompt that leaves no room is refused."""
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


class AlgorithmSection(SectionModel):
    """Which estimator, loss and reduction; their options are their own section's."""

    numerics: str | None = None
    """Framework whose conventions hold where neither recipe nor flag gives a value: standard deviation, reduction,
    clipping, KL."""
    advantage_estimator: str = "grpo"
    """Advantage estimator."""
    loss_type: str | None = None
    """Loss; the estimator's own when not given."""
    value_loss_type: str | None = None
    """Loss of the critic, where the estimator reads values; `value_loss` when not given."""
    loss_reducer: str = "sample-mean"
    """How token losses become one number."""
    custom_advantage_function_path: str | None = None
    """Estimator, by `module:function`; takes the place of `advantage_estimator`."""
    custom_loss_function_path: str | None = None
    """Loss, by `module:function`; takes the place of `loss_type`."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Reducer, by `module:function`; takes the place of `loss_reducer`."""
    calculate_per_token_loss: bool = False
    """Same as `--loss-reducer token-mean`."""
    disable_rewards_normalization: bool = False
    """Credit rewards as they are: the transform `raw` in the place of the estimator's."""
    disable_grpo_std_normalization: bool = False
    """Do not divide by the standard deviation of rewards (Dr. GRPO)."""
    std_ddof: Literal[0, 1] = 1
    """1 for the unbiased variance of rewards, 0 for the population's."""
    std_eps: Amount = 1e-6
    """Added to the standard deviation of rewards."""
    std_over_batch: bool = False
    """Take the standard deviation of all rewards of a step, not of each group's."""
    leave_one_out: bool = False
    """Compare a reward with the mean of the other rewards of its group."""
    advantage_args: dict[str, Any] = {}
    """Options of the estimator, before those of its section."""
    loss_args: dict[str, Any] = {}
    """Options of the loss, before those of its section."""
    value_loss_args: dict[str, Any] = {}
    """Options of the critic's loss, before those of its section."""
    reducer_args: dict[str, Any] = {}
    """Options of the reducer, before those of its section."""
    reward_transform_args: dict[str, Any] = {}
    """Options of the reward transform, before those of its section."""


class TrainSection(SectionModel):
    """Optimisation, for whichever trainer is chosen."""

    train_backend: str = "megatron"
    """Trainer; `none` for `slime eval` of a model as its folder is."""
    global_batch_size: Count | None = None
    """Executions of an optimizer step; all of a rollout when neither this nor `num_steps_per_rollout` is given."""
    num_steps_per_rollout: Count | None = None
    """Optimizer steps of a rollout; another way to give `global_batch_size`."""
    max_tokens_per_gpu: Count = 4096
    """Most tokens of a micro-batch; a longer sample gets a micro-batch of its own."""
    bf16: bool = True
    """Compute in bfloat16 with float32 master weights; float32 throughout when off."""
    fp16: bool = False
    """Compute in float16, not in bfloat16, with float32 master weights and a loss that is scaled against underflow."""
    lr: Amount = 1e-6
    """Peak learning rate."""
    min_lr: Amount = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    lr_warmup_iters: Index = 0
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay_iters: Count | None = None
    """Optimizer steps over which the learning rate decays; the whole run when not given."""
    weight_decay: Amount = 0.0
    """Weight decay of AdamW."""
    adam_beta1: Decay = 0.9
    """First AdamW decay rate."""
    adam_beta2: Decay = 0.98
    """Second AdamW decay rate."""
    adam_eps: Positive = 1e-8
    """AdamW epsilon."""
    clip_grad: Amount = 1.0
    """Largest gradient norm; 0 does not clip."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as those of the old policy."""
    logprob_diff_limit: Positive = 0.5
    """Largest mean difference between rollout and trainer log-probs (nats) before the run stops."""
    update_weight_transport: str | None = None
    """How weights go to the engine: `memory`, `distributed` or `disk`; the engine's best that the trainer has too when
    not given."""
    update_weight_mode: Literal["full", "delta"] = "full"
    """Send all weights, or, by way of the disk, the changes since the last update."""
    update_weight_disk_dir: str | None = None
    """Folder that the trainer writes weights to and the engine reads them from; `weights` in the run's folder when not
    given."""
    update_weight_disk_keep_files: bool = False
    """Keep what was written to that folder for earlier versions."""
    update_weight_delta_encoding: Literal["xor", "overwrite"] = "xor"
    """How changes are written: the exclusive or of old and new bytes, or places and new values."""
    weight_sync_timeout_s: Seconds = 600
    """Deadline of one weight sync, seconds."""
    train_timeout_s: Seconds = 7200
    """Deadline of one step's training, and of writing one checkpoint, seconds."""


class ClusterSection(SectionModel):
    """How many processes train, and where. Launcher `local` is one process."""

    actor_num_nodes: Count = 1
    """Machines that train."""
    actor_num_gpus_per_node: Count = 1
    """Ranks of the trainer on each machine: a GPU each, or a process on the CPU where no machine has GPUs."""
    colocate: bool = False
    """Trainer and engine share devices: each gives its memory up while the other is at work."""
    offload_train: bool | None = None
    """Move the trainer's state, all but its weights, to the host while samples are generated; if not given, as `colocate`."""
    offload_rollout: bool | None = None
    """Release the engine's memory while the trainer is at work; if not given, as `colocate`."""
    train_env_vars: dict[str, str] = {}
    """Environment variables of the trainer's processes, set before they import anything."""

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer gives memory up."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """Whether the engine gives memory up."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout


class CheckpointSection(SectionModel):
    """When the run is saved, and what is kept."""

    save_interval: Count | None = None
    """Steps between checkpoints; the last step alone is saved when not given."""
    save_last: bool = True
    """Save the last step, also where it is not its turn."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """Go on with the run while a checkpoint is written, from a copy of the trainer's state in the host's memory."""
    save_hf: str | None = None
    """Folder for other programs, written with every checkpoint: `out/step_{step}`, by Hugging Face or PEFT."""
    load: str | None = None
    """Run folder to start from, when this run has no checkpoint of its own."""

    def due(self, step: int, *, last: bool) -> bool:
        """Say whether a checkpoint is to be written after `step` steps."""
        in_turn = self.save_interval is not None and step % self.save_interval == 0
        return in_turn or (last and self.save_last)


class EvalSection(SectionModel):
    """How the model is evaluated on held-out prompts."""

    eval_interval: Count | None = None
    """Steps between evaluations; the run's start and end are always evaluated when given."""
    skip_eval_before_train: bool = False
    """Do not evaluate at the start."""
    eval_prompt_data: list[str] = []
    """Alternating names and files of evaluation sets."""
    eval_data_source_path: str | None = None
    """Data source of the evaluation set, when it is not a file."""
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
    eval_pass_threshold: Weight = 1.0
    """A sample with at least this reward counts as solved."""


#: Sections of core, by table name.
CORE_SECTIONS: dict[str, type[SectionModel]] = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "rollout": RolloutSection,
    "reward": RewardSection,
    "algorithm": AlgorithmSection,
    "train": TrainSection,
    "cluster": ClusterSection,
    "checkpoint": CheckpointSection,
    "eval": EvalSection,
}

#: Settings that choose one thing: of several the last one given, in recipes and then flags, is taken.
RIVALS = (("reward", ("rm_type", "custom_rm_path", "rm_weights")),)

#: Other spellings of flags, from the reference system's older guides.
ALIASES = {
    "prompt_key": "input_key",
    "reward_fn_path": "custom_rm_path",
    "rollout_generate_func_path": "custom_generate_function_path",
}
