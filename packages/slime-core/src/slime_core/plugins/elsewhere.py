"""Which distribution of slime brings a name or a section: what a message says where it is not installed."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, Mapping[str, str]] = {
    "slime-algos": {
        "slime.advantages": (
            "cispo gdpo gpg grpo grpo_passk gspo multi_turn opo optimal_token_baseline ppo "
            "reinforce_plus_plus reinforce_plus_plus_baseline remax rloo"
        ),
        "slime.benches": "conformance",
        "slime.generators": "greedy-baseline",
        "slime.losses": (
            "cispo_loss clip_cov_loss dppo_loss dro_loss geo_mean_loss gspo_loss kl_cov_loss "
            "policy_gradient_loss policy_loss sapo_loss sft_loss value_loss"
        ),
        "slime.numerics": "openrlhf slime trl verl",
        "slime.reducers": "constant sample-mean sequence-sum token-mean",
        "slime.reward_transforms": "gpg group-centre leave-one-out pass-at-k",
    },
    "slime-bench": {
        "slime.benches": "graders rewards step",
    },
    "slime-gym": {
        "slime.rewards": "gym",
        "slime.sources": "gym",
    },
    "slime-megatron": {
        "slime.benches": "trainer",
        "slime.commands": "convert",
        "slime.trainers": "megatron",
    },
    "slime-models": {
        "slime.models": "glm4_moe llama qwen2 qwen3 qwen3_moe",
        "slime.tokenizers": "hf",
    },
    "slime-ray": {
        "slime.launchers": "ray",
    },
    "slime-rm": {
        "slime.group_rewards": "majority trl",
        "slime.rewards": (
            "boxed_exact boxed_f1 boxed_gpqa boxed_multiple_choice code dapo deepscaler "
            "exact f1 gpqa gsm8k ifbench judge math math_verify multiple_choice random "
            "remote_rm reward_model trl verifiers verl"
        ),
        "slime.sources": "verifiers",
    },
    "slime-sglang": {
        "slime.benches": "streams weights",
        "slime.engines": "sglang",
    },
    "slime-torch": {
        "slime.benches": "engine",
        "slime.engines": "torch",
    },
    "slime-trackers": {
        "slime.trackers": "tensorboard wandb",
    },
}
_SECTIONS: Mapping[str, str] = {
    "slime-algos": "algos",
    "slime-gym": "gym",
    "slime-megatron": "lora megatron roles",
    "slime-ray": "ray",
    "slime-rm": "rm verifiers",
    "slime-sglang": "fleet sglang",
    "slime-torch": "torch",
    "slime-trackers": "tb wandb",
}

#: (Group, name) -> the distribution that brings it, for those outside of slime-core.
NAMES: Mapping[tuple[str, str], str] = {
    (group, name): distribution
    for distribution, groups in _NAMES.items()
    for group, names in groups.items()
    for name in names.split()
}
#: Section -> the distribution that brings it, for those outside of slime-core.
SECTIONS: Mapping[str, str] = {
    name: distribution for distribution, names in _SECTIONS.items() for name in names.split()
}
