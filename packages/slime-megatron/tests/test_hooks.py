"""What the package answers to core: settings, problems, versions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_megatron import hooks


def problems(*flags, recipe=None):
    registry = Registry()
    settings = load_settings(
        [] if recipe is None else [str(recipe)],
        ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8", *flags],
        registry=registry,
    )  # fmt: skip
    return [str(problem) for problem in hooks.slime_check_config(settings, registry)]


def test_defaults_are_fine():
    assert problems() == []


@pytest.mark.parametrize("kind", ["tensor-model", "pipeline-model", "context", "expert-model"])
def test_parallel_sizes_must_be_1_in_one_process(kind):
    name = f"{kind.replace('-', '_')}_parallel_size"
    (problem,) = problems(f"--{kind}-parallel-size", "2")
    assert problem.startswith(f"megatron.{name}: found 2 and 1 process; wanted a divisor of 1; ")


def test_sizes_that_do_not_divide_the_ranks_are_reported_all_at_once():
    found = problems(
        *("--launcher", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "3"),
        *("--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--expert-model-parallel-size", "5"),
    )  # fmt: skip
    assert [problem.partition("; lower it")[0] for problem in found] == [
        "megatron.tensor_model_parallel_size x megatron.context_parallel_size: found 2 x 2 = 4 and 6 processes; "
        "wanted a divisor of 6",
        "megatron.expert_tensor_parallel_size x megatron.expert_model_parallel_size: found 2 x 5 = 10 and 6 processes; "
        "wanted a divisor of 6",
    ]


def test_decay_needs_its_number_of_steps():
    (problem,) = problems("--lr-decay-style", "cosine", "--num-epoch", "2")
    assert problem.startswith("train.lr_decay_iters: found nothing, with lr_decay_style cosine")
    assert problems("--lr-decay-style", "cosine", "--num-rollout", "2") == []


def test_decay_must_outlast_the_warm_up():
    found = problems("--lr-decay-style", "linear", "--lr-decay-iters", "5", "--lr-warmup-iters", "5")
    assert found == ["train.lr_decay_iters: found 5; wanted more than lr_warmup_iters, 5"]


def test_minimal_rate_is_at_most_the_rate():
    assert problems("--lr", "1e-6", "--min-lr", "1e-5") == [
        "train.min_lr: found 1e-05; wanted at most train.lr, 1e-06"
    ]


def test_the_policy_must_be_trained_at_last():
    assert problems("--num-critic-only-steps", "5", "--num-rollout", "5") == [
        "roles.num_critic_only_steps: found 5; wanted less than run.num_rollout, 5; else the policy is never trained"
    ]
    assert problems("--num-critic-only-steps", "5", "--num-rollout", "6") == []


def test_another_trainers_settings_are_not_checked():
    assert problems("--train-backend", "fsdp", "--tensor-model-parallel-size", "2") == []


def test_weights_that_a_recipe_starts_from_are_refused_where_another_trainer_would_not_read_them(tmp_path):
    """Those of a flag are: nothing reads it. With a run's checkpoint it does not matter where the run began."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[roles]\nactor_load = "sft"\n')
    assert problems(recipe=recipe) == []
    (problem,) = problems("--train-backend", "none", recipe=recipe)
    assert problem.startswith(
        "roles.actor_load: found sft with the trainer none, which does not read it: the weights"
    )
    assert problems("--train-backend", "none", "--actor-load", "none", recipe=recipe) == []
    assert problems("--train-backend", "none", "--load", "runs/one", recipe=recipe) == []


def test_versions_are_told():
    versions = hooks.slime_environment()
    assert versions["megatron-core"].startswith("0.19")


def test_hooks_and_trainer_module_import_without_torch():
    code = "import slime_megatron.hooks, slime_megatron.trainer, sys; print({'torch', 'megatron'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (
            ["--transformer-impl", "inference_optimized"],
            "transformer_impl: found inference_optimized; wanted local or",
        ),
        (
            ["--transformer-impl", "transformer_engine", "--lora-rank", "4"],
            "transformer_impl: found it beside lora.rank; wanted one of them",
        ),
        (
            ["--fp8-format", "hybrid"],
            "fp8_format: found hybrid with transformer_impl local; wanted transformer_impl",
        ),
    ],
)
def test_what_transformer_engine_alone_follows_is_refused_without_it(flags, wanted):
    (problem,) = problems(*flags)
    assert wanted in problem


def test_transformer_engine_is_let_pass():
    assert problems("--transformer-impl", "transformer_engine", "--fp8-format", "hybrid") == []


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_a_role_with_ranks_of_its_own_is_cut_as_the_policy_is(role):
    pool = ("--launcher", "ray", "--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2")
    assert problems(*pool, f"--{role}-num-gpus-per-node", "2") == []
    assert problems(*pool, f"--{role}-num-gpus-per-node", "3") == [
        f"cluster.{role}_num_nodes x cluster.{role}_num_gpus_per_node: found 3 ranks of the {role}, and "
        f"megatron.tensor_model_parallel_size 2; wanted a multiple of that: the {role} is cut as the policy is"
    ]


def test_a_reference_with_ranks_of_its_own_does_not_change():
    assert problems("--ref-update-interval", "5") == []
    assert problems("--launcher", "ray", "--ref-num-nodes", "1", "--ref-update-interval", "5") == [
        "roles.ref_update_interval: found 5, beside a reference in ranks of its own; wanted a frozen reference: those "
        "ranks get no weights of the policy; leave --ref-num-nodes and --ref-num-gpus-per-node out, or this"
    ]


@pytest.fixture
def build_problems(tmp_path):
    """Return a function that returns what is wrong with flags beside a model whose folder, `tmp_path`, has no weights."""
    config = {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    registry = Registry()

    def found(*flags: str) -> list[str]:
        given = [
            "--hf-checkpoint",
            str(tmp_path),
            "--rollout-batch-size",
            "2",
            "--rollout-max-response-len",
            "8",
        ]
        settings = load_settings([], [*given, *flags], registry=registry)
        build = BuildContext(
            settings=settings, registry=registry, load_tokenizer=lambda: None, model_path=tmp_path, run_dir=tmp_path
        )  # fmt: skip
        return [str(problem) for problem in hooks.slime_check_build(build=build)]

    return found


def test_a_model_without_weights_is_refused_unless_the_policy_starts_from_others(build_problems, tmp_path):
    (problem,) = build_problems()
    assert (
        "which has no weights; wanted model.safetensors, or model.safetensors.index.json and the" in problem
    )
    assert build_problems("--actor-load", "elsewhere") == []
    (tmp_path / "model.safetensors").touch()
    assert build_problems() == []


def test_weights_of_earlier_syncs_are_refused_where_old_log_probs_are_the_engines(build_problems):
    flags = ("--actor-load", "elsewhere", "--keep-old-actor")
    assert build_problems(*flags) == []
    (problem,) = build_problems(*flags, "--use-rollout-logprobs")
    assert problem.startswith("roles.keep_old_actor: found it with train.use_rollout_logprobs")
    # Which is not all that they compute for an estimator that reads sums of squared probabilities.
    squares = ("--use-rollout-logprobs", "--advantage-estimator", "optimal_token_baseline")
    assert build_problems(*flags, *squares) == []
