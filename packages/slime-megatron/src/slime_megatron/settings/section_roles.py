"""Settings of the models beside the policy (reference, teacher, critic), and of LoRA."""

from __future__ import annotations

from typing import Literal, get_args

from slime_core.config.base import Amount, Count, FilePath, Index, Positive, SectionModel

LoraTarget = Literal[
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]
#: Linear layers of attention and MLP; no model has all of them.
LINEAR_LAYERS: tuple[str, ...] = get_args(LoraTarget)


class RolesSection(SectionModel):
    """Reference, teacher, earlier policies and critic. Each is there only when an estimator or a loss reads it.

    A folder of weights is one of Hugging Face, or of Megatron in the format torch_dist of a model of the policy's architecture.
    """

    reads = ("actor_load", "ref_load", "opd_teacher_load", "critic_load")
    of_first_stage = ("actor_load",)

    actor_load: FilePath | None = None
    """Model (folder or name) whose weights the policy starts from; `hf_checkpoint`, of which config and tokenizer always are, when
    not given."""
    ref_load: FilePath | None = None
    """Model (folder or name) of the reference; the initial weights when not given."""
    ref_update_interval: Count | None = None
    """Steps after which the reference becomes the policy of that moment; never when not given."""
    opd_teacher_load: FilePath | None = None
    """Model (folder or name) of the teacher of on-policy distillation, of the policy's architecture and tokenizer;
    without it, samples must carry `teacher_log_probs`."""
    keep_old_actor: bool = False
    """Keep the weights of the last two syncs, and take each token's old log-prob under those that generated it."""
    critic_load: FilePath | None = None
    """Model (folder or name) from which the critic starts, or the folder of a run's critic; that of the initial policy when not given."""
    critic_lr: Amount | None = None
    """Peak learning rate of the critic; `lr` when not given."""
    critic_lr_warmup_iters: Index = 0
    """Optimizer steps over which the critic's learning rate rises from 0."""
    num_critic_only_steps: Index = 0
    """First steps of a run in which only the critic is trained."""


class LoraSection(SectionModel):
    """Low-rank adapters; all other weights are frozen."""

    rank: Count | None = None
    """Rank of the adapters; no adapters when not given."""
    alpha: Positive = 32.0
    """What the adapters add is scaled by this over the rank."""
    target_modules: list[LoraTarget] | None = None
    """Megatron layers that get an adapter; all linear layers of attention and MLP when not given."""

    def targets(self, layer: str) -> bool:
        """Return whether a layer with this last part of its name gets an adapter."""
        return layer in (LINEAR_LAYERS if self.target_modules is None else self.target_modules)
