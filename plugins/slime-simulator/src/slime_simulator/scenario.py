"""`Scenario`: all that one simulation is of, and the variants of it that are set beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_core.config.derive import FULLY_ASYNC, ONE_STEP_OFF
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry

from slime_simulator.costs.costs import Costs
from slime_simulator.costs.traces import Trace
from slime_simulator.simulation import Cluster, Simulated, simulate

#: Seconds of deadlines: virtual time is not what they guard against.
_NO_DEADLINE = 3e8
#: Settings of what no simulation has, as it goes without; evaluations and checkpoints only where their time is known.
NEVER_SIMULATED: Mapping[tuple[str, ...], Any] = {
    ("rollout", "rollout_timeout_s"): _NO_DEADLINE,
    ("train", "train_timeout_s"): _NO_DEADLINE,
    ("train", "weight_sync_timeout_s"): _NO_DEADLINE,
    ("checkpoint", "save_interval"): None,
    ("checkpoint", "save_last"): False,
    ("eval", "eval_interval"): None,
    ("reward", "reward_key"): None,
    ("rollout", "custom_generate_function_path"): "single-turn",
    ("rollout", "rollout_max_context_len"): None,
    ("rollout", "rollout_min_new_tokens"): 0,
    ("rollout", "rollout_max_response_len"): 2
    ** 30,  # of ids, which are numbers of tokens; the trace has the limit
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to simulate: what it does, what that costs, and on what."""

    settings: Settings
    costs: Costs
    cluster: Cluster
    trace: Trace

    def simulate(self, registry: Registry) -> Simulated:
        """Return what the run would do.

        Raises:
            ConfigError: a half has no GPU, or the loop refuses the settings.
        """
        self.check()
        costs = {"checkpoint": self.costs.save_s, "eval": self.costs.eval_s}
        changed = {key: value for key, value in NEVER_SIMULATED.items() if not costs.get(key[0])}
        settings = having(self.settings, changed)
        return simulate(settings, registry, self.costs, self.cluster, self.trace)

    def having(self, **settings: Any) -> Scenario:
        """Return it with other settings, each as `section__key=value`."""
        changed = {tuple(name.split("__", 1)): value for name, value in settings.items()}
        return replace(self, settings=having(self.settings, changed))

    def check(self) -> None:
        """Check that it can be simulated.

        Raises:
            ConfigError: a half has no GPU, no prompt could be admitted under the bound on staleness, or concurrency is `auto`.
        """
        cluster, settings = self.cluster, self.settings
        problems = []
        if cluster.replicas < 1:
            wanted = f"at least {cluster.gpus_per_replica}: those of one replica (--gpus-per-replica)"
            problems.append(Problem("the engine's GPUs", "too few for one replica", wanted, "raise --gpus"))
        if cluster.trainer_gpus < 1:
            problems.append(Problem("--trainer-gpus", str(cluster.trainer_gpus), "at least 1"))
        if settings.rollout.rollout_concurrency == "auto":
            wanted = "a number: the KV cache, which auto follows, is not modelled"
            problems.append(Problem("rollout.rollout_concurrency", "auto", wanted))
        bound, interval = settings.rollout.max_staleness, settings.train.update_weights_interval
        if bound is None and means(settings.run.loop, FULLY_ASYNC):
            bound = 1
        least = interval - 1 + means(settings.run.loop, ONE_STEP_OFF)
        if bound is not None and bound < least:
            wanted = f"at least {least}: with weights sent every {interval} steps no prompt could be admitted"
            problems.append(
                Problem("rollout.max_staleness", f"{bound}, and the loop {settings.run.loop}", wanted)
            )
        if problems:
            raise ConfigError(problems)


def having(settings: Settings, changed: Mapping[tuple[str, ...], Any]) -> Settings:
    """Return settings with others in the place of some, by (section, key)."""
    for (section, key), value in changed.items():
        settings = settings.having(section, key, value, origin="slime simulate")
    return settings


def variants(scenario: Scenario, *, gpus: int) -> dict[str, Scenario]:
    """Return the loops beside each other on the same number of GPUs: the synchronous one also with all GPUs for both halves.

    Args:
        scenario: with GPUs of their own for engine and trainer.
        gpus: of both together.
    """
    apart = scenario.having(cluster__colocate=False)
    shared = replace(
        scenario.having(cluster__colocate=True, run__loop="sync"),
        cluster=replace(
            scenario.cluster,
            replicas=gpus // scenario.cluster.gpus_per_replica,
            trainer_gpus=gpus,
        ),
    )
    return {
        "sync, shared GPUs": shared,
        "sync": apart.having(run__loop="sync"),
        "one-step-off": apart.having(run__loop="one-step-off"),
        "fully-async": apart.having(run__loop="fully-async"),
    }
