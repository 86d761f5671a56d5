"""Settings of a run and where it runs: its name, model, processes, checkpoints. Field names are the reference system's flags, dashes as underscores."""

from __future__ import annotations

from slime_core.config.base import (
    Count,
    FilePath,
    Index,
    SectionModel,
    Seed,
)
from slime_core.protocols import Role


class RunSection(SectionModel):
    """What the run is called, where it goes, and which loop drives it."""

    run_name: str = "run"
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: FilePath = "runs"
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
    use_mlflow: bool = False
    """Add the tracker `mlflow`."""
    use_swanlab: bool = False
    """Add the tracker `swanlab`."""
    use_trackio: bool = False
    """Add the tracker `trackio`."""
    log_samples: Index = 8
    """Samples of each step in the tables of trackers that have such, one of each prompt first; 0 for no table."""
    events: bool = True
    """Write `events.jsonl`: what the run did and when, for `slime trace`."""
    seed: Seed = 1234
    """Seed of everything random in training."""
    num_rollout: Count | None = None
    """Number of steps (rollout and train); needed unless `num_epoch` is given."""
    num_epoch: Count | None = None
    """Number of passes over the prompts. Where `num_rollout` is given too, the one given last counts (a flag after a recipe, a later recipe
    after an earlier one), and `num_rollout` where both are in one place."""


class ModelSection(SectionModel):
    """The model that is trained and served."""

    reads = ("hf_checkpoint",)

    hf_checkpoint: FilePath
    """Hugging Face folder or hub name of the model, or a name that `slime models list` shows."""
    model_name: str | None = None
    """Model family, when it is not the `model_type` of config.json, which it has to accept: one of another package, as those of slime accept
    their own alone."""
    tokenizer: str = "hf"
    """Tokenizer loader."""


class ClusterSection(SectionModel):
    """How many processes train, and where. Launcher `local` is one process."""

    actor_num_nodes: Count = 1
    """Machines that train."""
    actor_num_gpus_per_node: Count = 1
    """Ranks of the trainer on each machine: a GPU each, or a process on the CPU where no machine has GPUs."""
    critic_num_nodes: Count | None = None
    """Machines of ranks that hold the critic alone; where only `critic_num_gpus_per_node` is given, as many as the policy has. Without
    either the critic is in the policy's ranks."""
    critic_num_gpus_per_node: Count | None = None
    """Ranks of the critic on each of its machines, on GPUs of their own; where only `critic_num_nodes` is given, as many as the policy has.
    They compute and train the critic while those of the policy do the same."""
    ref_num_nodes: Count | None = None
    """Machines of ranks that hold the frozen models alone: the reference, and the teacher of on-policy distillation. Where only
    `ref_num_gpus_per_node` is given, as many as the policy has. Without either these models are in the policy's ranks."""
    ref_num_gpus_per_node: Count | None = None
    """Ranks of the frozen models on each of their machines, on GPUs of their own; where only `ref_num_nodes` is given, as many as the policy
    has. They compute log-probs while those of the policy do the same."""
    num_gpus_per_node: Count | None = None
    """GPUs of each machine that trainer and engines together may take; what the largest has when not given."""
    colocate: bool = False
    """Trainer and engine share devices: each gives its memory up while the other is at work. Under launcher `ray` servers of
    the engine have the GPUs of the trainer's ranks."""
    offload_train: bool | None = None
    """Move the trainer's state to the host while samples are generated; its weights, too, where the engine offloads as well; if not
    given, as `colocate`."""
    offload_rollout: bool | None = None
    """Release the engine's memory while the trainer is at work; if not given, as `colocate`."""
    train_env_vars: dict[str, str] = {}
    """Environment variables of the trainer's processes, set before they import anything."""

    @property
    def pools(self) -> dict[Role, tuple[int, int]]:
        """(machines, ranks on each) of each role that has ranks of its own; the others are in the policy's ranks."""
        given: dict[Role, tuple[int | None, int | None]] = {
            "critic": (self.critic_num_nodes, self.critic_num_gpus_per_node),
            "ref": (self.ref_num_nodes, self.ref_num_gpus_per_node),
        }
        return {
            role: (machines or self.actor_num_nodes, per_machine or self.actor_num_gpus_per_node)
            for role, (machines, per_machine) in given.items()
            if machines or per_machine
        }

    @property
    def shares_devices(self) -> bool:
        """Whether trainer or engine gives memory up to the other."""
        return self.offloads_train or self.offloads_rollout

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

    reads = of_first_stage = ("load",)

    save_interval: Count | None = None
    """Steps between checkpoints; the last step alone is saved when not given."""
    save_last: bool = True
    """Save the last step, also where it is not its turn."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """Go on with the run while a checkpoint is written, from a copy of the trainer's state in the host's memory."""
    save_hf: FilePath | None = None
    """Folder for other programs, written with every checkpoint: `out/step_{step}`, by Hugging Face or PEFT."""
    load: FilePath | None = None
    """Run folder to start from, when this run has no checkpoint of its own."""

    def due(self, step: int, *, last: bool) -> bool:
        """Say whether a checkpoint is to be written after `step` steps."""
        in_turn = self.save_interval is not None and step % self.save_interval == 0
        return in_turn or (last and self.save_last)
