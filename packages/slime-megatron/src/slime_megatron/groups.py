"""The group of functions of a user's own inside the trainer. Imports neither torch nor megatron."""

from slime_core.plugins.groups import Call, Group

MEGATRON_HOOKS = Group(
    "slime.megatron_hooks",
    (
        "--custom-megatron-init-path",
        "--custom-model-provider-path",
        "--custom-megatron-before-log-prob-hook-path",
        "--custom-megatron-before-train-step-hook-path",
        "--rollout-data-postprocess-path",
        "--custom-update-weight-post-write-path",
    ),
    "see `slime_megatron.settings.user_hooks.MegatronHooks`",
    "functions of a user's own inside the Megatron trainer",
    call_of={
        "--custom-megatron-init-path": Call(("settings",)),
        "--custom-model-provider-path": Call(("config", "architecture"), ("pre_process", "post_process")),
        "--custom-megatron-before-log-prob-hook-path": Call(("model", "role")),
        "--rollout-data-postprocess-path": Call(("args", "rollout_id", "rollout_data")),
        "--custom-update-weight-post-write-path": Call(("args", "version_dir", "rollout_engines")),
        "--custom-megatron-before-train-step-hook-path": Call(
            ("step", "optimizer_step", "model", "optimizer", "scheduler")
        ),
    },
)
"""Functions of a user's own inside the Megatron trainer; `settings.user_hooks` calls them."""
