"""Megatron's own flags: known by name, typed by Megatron's parser, and refused where slime says otherwise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, TrainerError
from slime_core.plugins.registry import Registry
from slime_megatron import hooks
from slime_megatron.settings.megatron_flags import parsed
from slime_megatron.settings.section import MegatronSection

from ..batches import make_batch

SCRIPT = Path(__file__).parents[4] / "scripts/megatron_flags.py"
NEEDED = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]


def settings_of(*flags):
    return load_settings([], [*NEEDED, *flags], registry=Registry())


def test_the_list_of_flags_is_that_of_the_installed_megatron():
    spec = importlib.util.spec_from_file_location("megatron_flags", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text() == script.rendered()


def test_flags_of_megatron_are_taken_by_name_and_our_own_come_first():
    section = settings_of(
        "--recompute-granularity", "full", "--recompute-method", "block", "--no-rope-fusion", "--recompute-num-layers=2"
    ).section(MegatronSection)  # fmt: skip
    assert section.recompute_granularity == "full"
    assert section.megatron_args == {
        "recompute_method": "block", "no_rope_fusion": True, "recompute_num_layers": "2",
    }  # fmt: skip


def test_a_recipe_takes_them_beside_our_own(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[megatron]\nshare_prefix = false\nrecompute_method = "block"\n')
    settings = load_settings([str(recipe)], [*NEEDED, "--recompute-num-layers", "2"], registry=Registry())
    section = settings.section(MegatronSection)
    assert section.megatron_args == {"recompute_method": "block", "recompute_num_layers": "2"}
    assert section.share_prefix is False


def test_a_misspelt_flag_of_megatron_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match="--recompute-metod: found an unknown flag; wanted '--recompute-method'"
    ):
        settings_of("--recompute-metod", "block")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--mtp-use-repeated-layer"], "the multi-token prediction (MTP) layers of the model's folder"),
        (["--num-layers-per-virtual-pipeline-stage", "2"], "pipeline stages of consecutive layers"),
        (["--attention-backend", "flash"], "attention over packed rows"),
        (["--attention-softmax-in-fp32"], "softmax is always in float32"),
        (["--moe-single-grouped-weight"], "moe_grouped_gemm, which is what experts do"),
        (["--overlap-param-gather"], "weights that each rank has whole when an optimizer step ends"),
        (["--overlap-param-gather-with-optimizer-step"], "weights that each rank has whole"),
        (["--use-megatron-fsdp"], "weights that each rank has whole"),
        (["--deterministic-mode"], "what it asks of NCCL, cuBLAS and torch"),
    ],
)
def test_flags_that_cannot_be_followed_say_why(flags, wanted):
    (problem,) = (str(problem) for problem in hooks.slime_check_config(settings_of(*flags), Registry()))
    assert wanted in problem


def test_flags_that_would_do_nothing_are_refused():
    settings = settings_of("--train-iters", "5", "--set", "megatron.megatron_args={lr_warmup = 3}")
    (unknown,) = (str(problem) for problem in hooks.slime_check_config(settings, Registry()))
    assert unknown.startswith("megatron.megatron_args.lr_warmup: found no flag of Megatron")
    (idle,) = (
        str(problem) for problem in hooks.slime_check_config(settings_of("--train-iters", "5"), Registry())
    )
    assert idle.startswith(
        "megatron.megatron_args.train_iters: found a flag of Megatron's own training script"
    )


def test_values_get_their_types_from_megatrons_parser():
    given = {
        "recompute_num_layers": "2", "no_rope_fusion": True, "adam_eps": "1e-5", "ddp_bucket_size": "9",
    }  # fmt: skip
    assert parsed(given) == {
        "bucket_size": ("--ddp-bucket-size", 9),
        "recompute_num_layers": ("--recompute-num-layers", 2),
        "apply_rope_fusion": ("--no-rope-fusion", False),
        "adam_eps": ("--adam-eps", 1e-5),
    }
    with pytest.raises(
        TrainerError, match=r"Megatron's parser: argument --recompute-method: invalid choice: 'x'"
    ):
        parsed({"recompute_method": "x"})


def test_what_a_recipe_turns_off_is_off():
    assert parsed({"overlap_grad_reduce": False, "no_rope_fusion": False, "recompute_num_layers": False}) == {
        "overlap_grad_reduce": ("--overlap-grad-reduce false", False),
        "apply_rope_fusion": ("--no-rope-fusion false", True),
    }


def test_they_reach_the_models_the_optimizers_and_the_buffers_configuration(make_learner):
    args = {
        "recompute_method": "block",
        "recompute_num_layers": "2",
        "decoupled_lr": "0.5",
        "overlap_grad_reduce": True,
        "ddp_bucket_size": "1000",
    }
    learner = make_learner(megatron=MegatronSection(recompute_granularity="full", megatron_args=args))
    assert learner.model.config.recompute_method == "block"
    assert learner.model.config.recompute_num_layers == 2
    assert learner._policy.optimizer.config.decoupled_lr == 0.5
    (buffer,) = learner._policy.model.buffers
    assert len(buffer.buckets) > 3
    assert learner.train(make_batch())["train/skipped_steps"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_layers": "4"}, r"megatron_args\.num_layers: found 4; wanted 3, by the model's config\.json"),
        ({"rotary_interleaved": True}, r"rotary_interleaved: found True; wanted False, by the model's"),
        ({"rotary_base": "5e5"}, r"rotary_base: found 5e5; wanted 10000\.0, by the model's config\.json"),
        ({"moe_router_topk": "2"}, r"moe_router_topk: found 2; wanted None"),
        (
            {"moe_grouped_gemm": True},
            "--moe-grouped-gemm makes Megatron's moe_grouped_gemm True, and slime derives False",
        ),
        ({"fp16": True}, "--fp16 makes Megatron's fp16 True, and slime derives False"),
    ],
)
def test_a_flag_that_contradicts_what_slime_derives_names_both(make_learner, args, message):
    with pytest.raises(TrainerError, match=message):
        make_learner(megatron=MegatronSection(megatron_args=args))


def test_names_are_known_without_importing_megatron():
    code = "import slime_megatron.settings.megatron_flags as f, sys; assert f.known_flags(); print({'torch', 'megatron'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
