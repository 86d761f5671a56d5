"""The trainer `megatron`: the `Trainer` protocol around a `Learner` on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from slime_core.config.build import BuildContext
from slime_core.config.derive import batch_sizes
from slime_core.config.factories import TrainerFactory
from slime_core.errors import TrainerError
from slime_core.plugins.quick_imports import quick_imports
from slime_core.plugins.registry import Registry
from slime_core.protocols import TOP_P_TOKENS, Columns, Fingerprint, Metrics, Role, TransferPlan
from slime_core.run.assemble import algorithm
from slime_core.run.build import resolve_model
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.runtime.openmp import release_threads
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.weights.sync import Bucket

from slime_megatron.memory.estimate import trainer_memory
from slime_megatron.memory.remedies import trainer_remedies
from slime_megatron.settings.checkpoint_size import checkpoint_bytes
from slime_megatron.settings.derive import LOGITS
from slime_megatron.settings.learner_settings import LearnerSettings, family_of
from slime_megatron.settings.section import CAPABILITIES, MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection
from slime_megatron.settings.user_hooks import SETTINGS, resolve_hooks

if TYPE_CHECKING:
    from slime_models.transfer.sender import WeightSender

    from slime_megatron.learner.critic_learner import CriticLearner
    from slime_megatron.learner.frozen_learner import FrozenLearner
    from slime_megatron.learner.learner import Learner

    #: A rank of one of the roles.
    AnyLearner = Learner | CriticLearner | FrozenLearner

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Optional fields of `TokenView` that this trainer can fill.
FILLED = frozenset(
    {"entropy", "group_ids", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"}
    | LOGITS
    | {"reward_parts", "staleness", "sum_pi_squared", "total_lengths", "values"}
)


class MegatronTrainer:
    """Trains with megatron-core, in this process: the only one, or one rank of several that all get the same calls.

    It is a `PooledTrainer`, too: of a rank whose role is not the policy the methods of both protocols serve that role alone.

    Args:
        settings: of the learner.
        registry: the installed plugins, for the transports of weights.
        close_s: seconds that a call in flight, and destroying the process groups after it, may take when this is closed.

    Raises:
        TrainerError: estimator or loss needs a field that this trainer does not compute.
    """

    capabilities = CAPABILITIES

    def __init__(self, settings: LearnerSettings, *, registry: Registry, close_s: float = 10.0) -> None:
        lacking = settings.algorithm.needs - FILLED
        if lacking:
            raise TrainerError(
                f"estimator and loss need {', '.join(sorted(lacking))}, which the trainer megatron does not "
                f"compute; it fills {', '.join(sorted(FILLED))}"
            )
        self._settings, self._registry, self._close_s = settings, registry, close_s
        self._learner: AnyLearner | None = None
        self._sender: WeightSender | None = None
        # One thread for everything: torch keeps a pool of workers for each thread that calls it.
        self._thread = DaemonThread("megatron")

    async def start(self) -> None:
        """Import Megatron, and build the model from the Hugging Face folder and its optimizer."""
        self._learner = await self._on_thread(_build_learner, self._settings)

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; return `train/*` metrics averaged over them, and `perf/*`.

        An optimizer step whose gradient is not finite is skipped and counted in `train/skipped_steps`.

        Raises:
            TrainerError: more steps in a row were skipped than `max_skipped_steps` allows; a sample is longer
                than the model's context; log-probs are missing that settings ask for.
        """
        return await self._on_thread(self._policy.train, batch)

    async def begin(self, batch: TrainBatch) -> Columns:
        """Compute log-probs of the policy and of the roles that are here; or the columns of the role that this rank has."""
        return await self._on_thread(self._started.begin, batch)

    async def credit(self, columns: Columns) -> Columns:
        """Credit the batch's tokens by the columns of roles that are elsewhere."""
        return await self._on_thread(self._policy.credit, columns)

    async def learn(self, columns: Columns) -> Metrics:
        """Run the optimizer steps of policy or critic; raises as `train` does."""
        return await self._on_thread(self._started.learn, columns)

    async def phases(self) -> list[Phase]:
        """Return what this rank did in the last `train`, as its host saw it."""
        return self._started.times.phases

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send every tensor as the plan says, or those of this rank's pipeline stage, cast to its dtype, and return their fingerprint.

        `disk-delta` keeps a copy of the weights as they were sent, in the host's memory.

        Raises:
            WeightSyncError: no such transport is installed, or the receiving side refused or went.
        """
        await self._on_thread(self._policy.mark_sent, plan.version)
        if self._sender is None:
            self._sender = await self._on_thread(_make_sender, self._on_thread, self._registry)
            self._sender.written = self._post_write
        return await self._sender.send(plan, self._buckets(plan))

    async def stage_sender(self) -> int | None:
        """Return the number of this rank's pipeline stage, if it sends the stage's weights; None of the stage's other ranks."""
        return await self._on_thread(self._policy.stage_sender)

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Write all state that training needs to go on exactly into the folder `path`, made if it is missing.

        In the background, return when it is copied to the host; `written` completes the folder.
        """
        await self._on_thread(self._started.save, path, in_background)

    async def written(self, wait: bool) -> bool:
        """Return whether the folder of the save in the background is complete, which it may be from now on only.

        Raises:
            CheckpointError: it could not be written; names the rank, and why.
        """
        return await self._on_thread(self._started.written, wait)

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: the folder is incomplete, or of another model; names the field that differs.
        """
        await self._on_thread(self._started.load, path)

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Write the weights as a Hugging Face folder that transformers loads.

        With LoRA it is a PEFT adapter folder, unless adapters are to be `merged`.

        Raises:
            CheckpointError: the folder is in the way of something else, or cannot be written.
        """
        await self._on_thread(self._policy.save_hf, path, merged)

    async def offload(self) -> None:
        """Move the optimizer's state to the host and free the gradients; the weights stay for sending."""
        await self._on_thread(self._started.offload)

    async def offload_weights(self) -> None:
        """Move the weights to the host, too."""
        await self._on_thread(self._policy.offload_weights)

    async def onload_weights(self) -> None:
        """Move the weights back to the device, so that they can be sent."""
        await self._on_thread(self._policy.onload_weights)

    async def onload(self) -> None:
        """Undo `offload` and `offload_weights`."""
        await self._on_thread(self._started.onload)

    async def close(self) -> None:
        """Free everything; a call that hangs is left to the end of the process. May be called twice."""
        learner, self._learner = self._learner, None
        try:
            if learner is not None:
                async with asyncio.timeout(self._close_s):
                    await self._on_thread(learner.close)
        except TimeoutError:
            logger.warning(
                "close: the trainer's thread still computes after %g s; it is left alone", self._close_s
            )
        finally:
            self._thread.shutdown(wait=False)

    @property
    def _post_write(self) -> Callable[[Path], None] | None:
        """What is called with the folder of an update that is written."""
        function = self._settings.hooks.post_write
        return None if function is None else lambda folder: function(self._settings, str(folder), [])

    async def _buckets(self, plan: TransferPlan) -> AsyncIterator[tuple[Bucket, Fingerprint]]:
        buckets = self._policy.weights(plan.dtype, stage_alone=plan.sends_stage_alone)
        while (bucket := await self._on_thread(next, buckets, None)) is not None:
            yield bucket, {}

    @property
    def _policy(self) -> Learner:
        if self._settings.rank.role != "policy":
            raise TrainerError(
                f"a rank of the role {self._settings.rank.role} was asked for the policy; wanted a rank of the role policy"
            )
        return cast("Learner", self._started)

    @property
    def _started(self) -> AnyLearner:
        if self._learner is None:
            raise TrainerError(
                "the trainer megatron is not started; call start() first, and nothing after close()"
            )
        return self._learner

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _released, function, *args)


def _create_trainer(build: BuildContext) -> MegatronTrainer:
    """Return the trainer `megatron`, built from settings; it imports Megatron when it is started.

    Raises:
        PluginError: no installed family has the model's model_type; names it.
        TrainerError: estimator or loss needs a field that this trainer does not compute.
    """

    def folder(name: str | None) -> Path | None:
        return None if name is None else resolve_model(name, build.registry)

    family, _ = family_of(build)
    computed = algorithm(build.settings, build.registry)
    section, roles = build.section(MegatronSection), build.section(RolesSection)
    rollouts = build.settings.run.num_rollout
    critic_alone = roles.num_critic_only_steps if "values" in computed.needs else 0
    steps_each = batch_sizes(build.settings).num_steps_per_rollout
    return MegatronTrainer(
        LearnerSettings(
            model_path=build.model_path,
            family=family,
            train=build.settings.train,
            megatron=section,
            algorithm=computed,
            seed=build.settings.run.seed,
            rank=build.rank,
            total_steps=rollouts and (rollouts - critic_alone) * steps_each,
            critic_total_steps=rollouts and rollouts * steps_each,
            roles=roles,
            lora=build.section(LoraSection),
            hooks=resolve_hooks(
                build.registry,
                build.settings,
                **{name: getattr(section, setting) for name, setting in SETTINGS.items()},
            ),
            actor_path=folder(roles.actor_load),
            ref_path=folder(roles.ref_load),
            teacher_path=folder(roles.opd_teacher_load),
            apart=frozenset(build.settings.cluster.pools),
            critic_path=folder(roles.critic_load),
            restricted=TOP_P_TOKENS in build.engine_needs,
        ),
        registry=build.registry,
    )


def _released[T](function: Callable[..., T], *args: Any) -> T:
    """Call `function`, and leave no idle OpenMP threads beside those of the engine."""
    try:
        return function(*args)
    finally:
        release_threads()


def _learner_classes() -> Mapping[Role, Callable[[LearnerSettings], AnyLearner]]:
    """Import Megatron, and what learns with it; takes seconds."""
    with quick_imports():
        from slime_megatron import compat

        compat.install()
        from slime_megatron.learner.critic_learner import CriticLearner
        from slime_megatron.learner.frozen_learner import FrozenLearner
        from slime_megatron.learner.learner import Learner

    return {"policy": Learner, "critic": CriticLearner, "ref": FrozenLearner}


def _build_learner(settings: LearnerSettings) -> AnyLearner:
    return _learner_classes()[settings.rank.role](settings)


def _make_sender(on_thread: Callable[..., Any], registry: Registry) -> WeightSender:
    from slime_models.transfer.sender import WeightSender

    return WeightSender(on_thread, registry)


#: The entry point `megatron` of `slime.trainers`.
create_trainer = TrainerFactory(
    _create_trainer,
    CAPABILITIES,
    checkpoint_bytes,
    memory=trainer_memory,
    remedies=trainer_remedies,
    imports=_learner_classes,
)
