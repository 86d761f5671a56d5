"""Functions of the reference system inside the Megatron trainer. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import PluginError

from slime_compat.adapters.attributes import calls
from slime_compat.adapters.calling import Theirs
from slime_compat.adapters.table import takes

_GROUP = "slime.megatron_hooks"
#: Role of ours -> prefix of the log-probs that a pass stores there.
_PREFIX = {"actor": "", "ref": "ref_", "teacher": "teacher_", "old_actor": "", "critic": ""}


class _Hook:
    """What the adapters below share.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    flag = ""

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs(_GROUP, path, run_args, flag=self.flag)
        self._call, self._args = self._theirs.function, self._theirs.args


class Init(_Hook):
    """Calls `fn(args)` once the process groups are there."""

    flag = "--custom-megatron-init-path"

    def __call__(self, settings: Any) -> None:
        """Show the settings, with the number of this rank and of all."""
        self._args.rank, self._args.world_size = settings.rank.number, settings.rank.count
        self._call(self._args.before(settings))


class ModelProvider(_Hook):
    """Calls `fn(pre_process, post_process, vp_stage=None) -> GPTModel`.

    Raises:
        PluginError: its file asks for Megatron's global arguments, which are not set here.
    """

    flag = "--custom-model-provider-path"

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        super().__init__(path=path, run_args=run_args)
        if calls(self._call, "get_args"):
            raise PluginError(
                f"{self._theirs.who}: asks for get_args(), Megatron's global arguments, which are not set here; build the model of a "
                "TransformerConfig of your own, or write a provider (config, architecture, *, pre_process, post_process)"
            )

    def __call__(self, config: Any, architecture: Any, *, pre_process: bool, post_process: bool) -> Any:
        """Return the model."""
        more = {"vp_stage": None} if takes(self._call, "vp_stage") else {}
        return self._call(pre_process, post_process, **more)


class BeforeLogProb(_Hook):
    """Calls `fn(args, model, store_prefix)` before each pass for log-probs; the model is a list of one chunk, as there."""

    flag = "--custom-megatron-before-log-prob-hook-path"

    def __call__(self, model: Any, role: str) -> None:
        """Show the model, and for whom log-probs are taken."""
        self._call(self._args, [model], _PREFIX.get(role, f"{role}_"))


class BeforeTrainStep(_Hook):
    """Calls `fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)` before each optimizer step."""

    flag = "--custom-megatron-before-train-step-hook-path"

    def __call__(self, step: int, optimizer_step: int, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Show the parts of the trainer."""
        self._call(self._args, step - 1, optimizer_step, [model], optimizer, scheduler)


class RolloutData(_Hook):
    """Calls `fn(args, rollout_id, rollout_data)` between the advantages of a step and its training."""

    flag = "--rollout-data-postprocess-path"

    def __call__(self, args: Any, rollout_id: int, rollout_data: Any) -> None:
        """Show the data of a step."""
        self._call(self._args.before(args), rollout_id, rollout_data)


class PostWrite(_Hook):
    """Calls `fn(args, version_dir, rollout_engines)` with the folder of each weight update."""

    flag = "--custom-update-weight-post-write-path"

    def __call__(self, args: Any, version_dir: str, rollout_engines: Any) -> None:
        """Show the folder; the engines are none: trainers do not know them."""
        self._call(self._args.before(args), version_dir, rollout_engines)
