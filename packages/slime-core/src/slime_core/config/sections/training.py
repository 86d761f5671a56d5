"""Settings of the algorithm and of training. Field names are the reference system's flags, dashes as underscores."""

from __future__ import annotations

from typing import Any, Literal

from slime_core.config.base import (
    Amount,
    Count,
    Decay,
    FilePath,
    Index,
    Positive,
    Seconds,
    SectionModel,
)


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
    custom_tis_function_path: str | None = None
    """Function that weighs and rejects tokens by the log-probs of engine and trainer, in the place of what `use_tis` does."""
    calculate_per_token_loss: bool = False
    """Same as `--loss-reducer token-mean`; another reducer beside it is refused."""
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
    tis_args: dict[str, Any] = {}
    """Options of `custom_tis_function_path`."""
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
    logprob_diff_limit: Positive | None = None
    """Largest mean difference between rollout and trainer log-probs (nats) before the run stops, of a step and of each of its
    samples; tokens of older weights than the step trains count only where all are, or with keep_old_actor. Not given: 0.5,
    and from the second step on 0.1 for a sample if those before agreed 100 times better."""
    update_weights_interval: Count = 1
    """Steps between two weight updates of the engine."""
    update_weights_in_flight: Literal["recompute", "keep", "continue"] = "recompute"
    """What becomes of requests in flight at a weight update, in the loop fully-async: their KV cache is recomputed with the new
    weights, or kept; or they are ended, and continued from their tokens as new requests, which every engine can."""
    update_weight_transport: str | None = None
    """How weights go to the engine: `memory`, `distributed`, `nccl`, `cuda-ipc`, `disk`, or the name of another transport that is
    installed; when not given, the engine's best that the trainer has too, and that reaches the machines of the run."""
    update_weight_host: str | None = None
    """Address of the driver's machine at which `distributed`, `nccl` and `cuda-ipc` meet ranks and servers, IPv4: one that their
    machines reach. Whoever reaches it can read what is sent. Not given: 127.0.0.1, and on a cluster of several machines the one by
    which they know the driver's."""
    update_weight_mode: Literal["full", "delta"] = "full"
    """Send all weights, or the changes since the last update: by way of the disk, or of `distributed` where that is the transport."""
    update_weight_disk_dir: FilePath | None = None
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
