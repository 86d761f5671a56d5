"""The reference's scripts as they stand: accepted, what their arguments mean here, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from slime_compat.launch.folders import stand_in
from slime_core.checks.settings import check_stages
from slime_core.cli.arguments import read_stages, translation_of
from slime_core.config.build import BuildContext
from slime_core.config.load import read_runs
from slime_core.config.model_fit import check_build
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import load_tokenizer
from slime_sglang.settings.server import planned_transport

from .conftest import MODELS


@pytest.fixture(scope="module")
def registry():
    return Registry.from_environment()


@pytest.fixture
def problems(registry, capsys):
    """Return a function that returns all that `slime check` finds wrong, before it reads prompts."""

    def problems(words):
        translation = translation_of(words, registry)
        assert translation is not None
        stages, found = read_runs(
            list(translation.recipes), list(translation.flags), registry=registry, translation=translation
        )
        found = [*found, *check_stages(stages, registry, to_train=True, is_translated=True)]
        if not found:
            settings = stages[0].settings
            path = type(stages[0].folder)(settings.model.hf_checkpoint)
            build = BuildContext(
                settings=settings, registry=registry, load_tokenizer=lambda: load_tokenizer(path), model_path=path,
                run_dir=stages[0].folder,
            )  # fmt: skip
            found = check_build(build)
        return [str(problem) for problem in dict.fromkeys(found)]

    return problems


@pytest.mark.parametrize("name", MODELS)
def test_a_script_is_accepted_as_it_stands(words, problems, name):
    assert problems(words(name)) == []


def test_what_the_script_of_qwen3_4b_means(words, registry, models):
    settings = read_stages(words("qwen3-4B"), registry)[0].settings
    sections = settings.sections
    assert (settings.run.launcher, settings.run.loop, settings.rollout.rollout_engine) == (
        "ray",
        "sync",
        "sglang",
    )
    assert (settings.run.output_dir, settings.run.run_name) == (str(models), "Qwen3-4B_slime")
    assert settings.origin("run", "run_name") == "preset slime"
    assert (
        sections["megatron"].use_distributed_optimizer is True and settings.train.max_tokens_per_gpu == 9216
    )
    assert (settings.eval.eval_temperature, settings.eval.eval_max_response_len) == (1.0, 16384)
    assert sections["roles"].actor_load is None and sections["roles"].ref_load is None
    assert settings.cluster.colocate and sections["fleet"].rollout_num_gpus_per_engine == 2
    lacking = read_stages(words("qwen3-4B", "--weight-decay", "0.5"), registry)[0].settings
    assert lacking.train.weight_decay == 0.5


@pytest.mark.parametrize("name", ["deepseek-r1", "glm5-744B-A40B", "qwen3-235B-A22B"])
def test_weights_of_scripts_of_several_nodes_reach_all_of_them(words, registry, name):
    settings = read_stages(words(name), registry)[0].settings
    assert settings.cluster.actor_num_nodes > 1 and settings.cluster.colocate
    assert settings.train.update_weight_transport is None
    assert planned_transport(settings) == "cuda-ipc"


def test_defaults_are_the_references_where_a_script_is_silent(words, registry):
    silent = [word for word in words("qwen3-4B") if word not in ("--weight-decay", "0.1", "--adam-beta2", "0.98", "--use-dynamic-batch-size",
                                                                   "--lr-decay-style", "constant", "--save")]  # fmt: skip
    silent = [word for word in silent if not word.endswith("Qwen3-4B_slime/") and word != "--load"]
    settings = read_stages(silent, registry)[0].settings
    train = settings.train
    assert (train.weight_decay, train.adam_beta2, train.lr_decay_style) == (0.01, 0.999, "linear")
    assert train.max_tokens_per_gpu == 1  # one sample a micro-batch
    assert settings.checkpoint.save_interval is None and not settings.checkpoint.save_last
    assert read_stages(["train_async.py", *silent[1:]], registry)[0].settings.run.loop == "one-step-off"


def test_a_command_line_of_slime_is_none_of_the_references(registry):
    assert translation_of(["recipe.toml", "--num-layers", "2", "--hidden-size", "8"], registry) is None
    assert translation_of(["--hf-checkpoint", "m", "--num-layers", "2"], registry) is None
    model = ["--num-layers", "2", "--hidden-size", "8"]
    assert translation_of(model, registry).origin == "preset slime"
    assert translation_of([*model, "--preset", "none"], registry) is None
    assert translation_of(["recipe.toml", "--preset", "slime"], registry).recipes == ("recipe.toml",)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-layers", "35"], "megatron.megatron_args.num_layers: found 35; wanted 36, by the model's config.json"),
        (["--post-mlp-layernorm"], "--post-mlp-layernorm: found True; wanted False, by the model's config.json"),
        (["--spec", "slime_plugins.models.glm4", "get_glm_spec"], "--spec: found slime_plugins.models.glm4; wanted the layers of a qwen3"),
        (["--release-train"], "--release-train: found it; wanted nothing: ranks live as long as the run; use --offload-train"),
        (["--rollout-buffer-url", "http://x"], "--rollout-buffer-url: found http://x; wanted nothing: slime has no server"),
        (["--loss-type", "custom_loss"], "--loss-type: found custom_loss; wanted --custom-loss-function-path beside it"),
        (["--ref-load", "other_torch_dist"], "--ref-load: found other_torch_dist: nothing; wanted a folder of Megatron"),
        (["--distributed-backend", "mpi"], "--distributed-backend: found mpi; wanted nccl or gloo"),
        (["--debug-rollout-only", "--debug-train-only"], "--debug-rollout-only: found it beside"),
        (["--debug-train-only"], "--debug-train-only: found it without --load-debug-rollout-data"),
        (["--load"], "--load: found no value; wanted one value"),
        (["--save", "a", "b"], "--save: found a b; wanted one value"),
        (["--custom-config-path"], "--custom-config-path: found no value; wanted one value"),
        (["--load", "a", "--ckpt-step", "last"], "--ckpt-step: found last; wanted one whole number"),
        (["--debug-rollout-only", "--actor-num-nodes", "two"], "--actor-num-nodes: found two; wanted one whole number"),
        (["--custom-config-path", "nowhere.yaml"], "--custom-config-path: found nowhere.yaml"),
        (["--max-tokenz-per-gpu", "9"], "--max-tokenz-per-gpu: found an unknown flag; wanted '--max-tokens-per-gpu'"),
        (["--decoder-last-pipeline-num-layers", "3"], "decoder_last_pipeline_num_layers: found it with pipeline_model_parallel_size 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(words, problems, more, message):
    assert any(message in problem for problem in problems(words("qwen3-4B", *more))), problems(
        words("qwen3-4B", *more)
    )


@pytest.mark.parametrize("flag", ["overlap_param_gather", "overlap_param_gather_with_optimizer_step"])
def test_flags_that_slime_itself_refuses_are_dropped_where_they_change_no_number(words, registry, flag):
    translation = translation_of(words("qwen3-4B", "--" + flag.replace("_", "-")), registry)
    assert flag not in translation.flags
    assert any("nothing to do: what of communication" in str(note) for note in translation.notes)


def test_a_folder_of_another_layout_is_refused(words, problems, tmp_path):
    (tmp_path / "model.pt").touch()
    (problem,) = problems(words("qwen3-4B", "--load", str(tmp_path)))
    assert f"--load: found {tmp_path}, in which there is no checkpoint that slime knows" in problem


def test_keys_are_in_the_environment_and_nowhere_else(words, registry):
    translation = translation_of(words("qwen3-4B", "--use-wandb", "--wandb-key", "secret-1"), registry)
    assert translation.environment == {"WANDB_API_KEY": "secret-1"}
    assert "secret-1" not in str((translation.flags, translation.defaults, translation.notes))


def test_a_file_of_arguments_gives_flags_and_what_hooks_read(words, registry, tmp_path):
    (tmp_path / "more.yaml").write_text(
        "rollout_batch_size: 64\nglobal_batch_size: 512\nmy_own: {depth: 3}\nuse_tis: true\n"
    )
    settings = read_stages(words("qwen3-4B", "--custom-config-path", str(tmp_path / "more.yaml")), registry)[
        0
    ].settings
    assert settings.rollout.rollout_batch_size == 64 and settings.sections["algos"].use_tis
    assert settings.sections["compat"].custom_config == {"my_own": {"depth": 3}}


def test_false_in_a_file_of_arguments_overrides_the_command_line_and_a_default(words, registry, tmp_path):
    (tmp_path / "more.yaml").write_text(
        "use_tis: false\nuse_wandb: false\nbf16: false\nnormalize_advantages: true\n"
    )
    given = ["--use-tis", "--use-wandb", "--bf16", "--no-normalize-advantages"]
    flags = words("qwen3-4B", *given, "--custom-config-path", str(tmp_path / "more.yaml"))
    settings = read_stages(flags, registry)[0].settings
    assert not settings.sections["algos"].use_tis
    assert settings.run.tracker == read_stages(words("qwen3-4B"), registry)[0].settings.run.tracker
    assert not settings.train.bf16
    assert settings.sections["algos"].normalize_advantages


def test_hooks_of_samples_add_up_and_other_flags_given_twice_are_the_last(words, registry):
    given = [
        "--rollout-sample-hook-path",
        "a.one",
        "--lr",
        "1e-5",
        "--rollout-sample-hook-path",
        "b.two",
        "--lr",
        "1e-6",
    ]
    settings = read_stages(words("qwen3-4B", *given), registry)[0].settings
    assert settings.rollout.rollout_sample_hook_path == ["a.one", "b.two"]
    assert settings.train.lr == 1e-6


def test_one_half_of_a_run_without_the_other(words, problems, registry, tmp_path):
    only = words("qwen3-4B", "--debug-rollout-only", "--dump-details", str(tmp_path))
    settings = read_stages(only, registry)[0].settings
    assert (settings.run.loop, settings.train.train_backend, settings.run.launcher) == (
        "rollout-only",
        "none",
        "local",
    )
    assert settings.sections["compat"].save_debug_rollout_data == f"{tmp_path}/rollout_data/{{rollout_id}}.pt"
    assert problems(only) == []
    only = words("qwen3-4B", "--load-debug-rollout-data", f"{tmp_path}/rollout_data/{{rollout_id}}.pt")
    settings = read_stages(only, registry)[0].settings
    assert (settings.rollout.rollout_function_path, settings.rollout.rollout_engine) == (
        "recorded-dump",
        "none",
    )
    assert problems(only) == []


def test_where_nothing_is_trained_the_model_may_be_any_that_the_engine_serves(words, problems, tmp_path):
    """Also where arguments of Megatron's describe another one, which is not built."""
    config = {"model_type": "gpt_neox", "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert problems(words("glm4-9B", "--debug-rollout-only", "--hf-checkpoint", str(tmp_path))) == []


def test_an_older_run_and_a_hugging_face_folder_are_what_load_means(words, registry, models, tmp_path):
    (tmp_path / "run/checkpoints/step_000004").mkdir(parents=True)
    settings = read_stages(words("qwen3-4B", "--load", str(tmp_path / "run")), registry)[0].settings
    assert settings.checkpoint.load == str(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000004/state.json").touch()
    for flag in ("--finetune", "--no-load-optim"):  # a run of its own, with those weights
        for given in ("run", "run/checkpoints"):
            load = ("--load", str(tmp_path / given), flag)
            settings = read_stages(words("qwen3-4B", *load), registry)[0].settings
            found = (settings.checkpoint.load, settings.sections["roles"].actor_load)
            assert found == (None, str(tmp_path / "run"))
        itself = words("qwen3-4B", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "run"), flag)
        settings = read_stages(itself, registry)[0].settings
        found = (settings.checkpoint.load, settings.sections["roles"].actor_load)
        assert found == (None, None)  # it goes on
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps({}))
    settings = read_stages(words("qwen3-4B", "--ref-load", str(tmp_path / "hf")), registry)[0].settings
    assert (
        settings.sections["roles"].actor_load == settings.sections["roles"].ref_load == str(tmp_path / "hf")
    )


def test_a_script_of_supervised_data_counts_its_rows(words, registry, models):
    rows = models / "many.jsonl"
    rows.write_text('{"messages": []}\n' * 256)
    given = words("qwen2.5-32B-sft", "--prompt-data", str(rows))
    settings = read_stages(given, registry)[0].settings
    # 3 times 256 rows, 128 a step, are 6 steps of one optimizer step each; a tenth of them is none.
    assert (settings.run.num_rollout, settings.train.lr_warmup_iters) == (6, 0)
    assert (settings.rollout.rollout_engine, settings.rollout.rollout_function_path) == ("none", "sft")
    assert settings.run.loop == "sync" and settings.train.lr_decay_style == "cosine"
    more = read_stages([*given, "--lr-warmup-fraction", "0.5"], registry)[0].settings
    assert more.train.lr_warmup_iters == 3


def test_what_older_scripts_and_one_rank_say_is_followed(words, registry):
    settings = read_stages(words("qwen3-235B-A22B"), registry)[0].settings
    assert settings.sections["sglang"].server_args["ep_size"] == "32"
    tools = read_stages(words("llama3.1-8B-tools", "--sglang-router-policy", "cache_aware"), registry)[
        0
    ].settings
    assert (tools.run.loop, tools.rollout.max_staleness) == ("fully-async", 2)
    assert tools.sections["fleet"].router_policy == "cache_aware"
    single = words(
        "qwen3-4B", "--tensor-model-parallel-size", "1", "--allgather-cp", "--sglang-enable-ep-moe"
    )
    settings = read_stages(single, registry)[0].settings
    assert settings.sections["megatron"].sequence_parallel is False
    assert settings.sections["sglang"].server_args["ep_size"] == "2"  # of the engine's two GPUs


def test_where_generation_never_stops_responses_are_cut_by_updates_if_what_came_before_is_masked(
    words, registry
):
    partial, masks = "--partial-rollout", "--mask-offpolicy-in-partial-rollout"
    for flags, mode in (([partial], "recompute"), ([masks], "recompute"), ([partial, masks], "continue")):
        settings = read_stages(words("llama3.1-8B-tools", *flags), registry)[0].settings
        assert settings.run.loop == "fully-async"
        assert settings.train.update_weights_in_flight == mode
    sync = read_stages(words("qwen3-4B", partial, masks), registry)[0].settings
    assert (sync.run.loop, sync.train.update_weights_in_flight) == ("sync", "recompute")


@pytest.mark.parametrize(
    ("folder", "hugging_face", "beside", "found"),
    [
        ("M_torch_dist", "M", "", "M"),
        ("M_torch_dist", "M-FP8", "", "M-FP8"),
        ("M_torch_dist", "M_int4_g32", "", "M_int4_g32"),
        ("M_torch_dist", "M-FP8", "M", "M"),
        ("M_torch_dist", "N", "", None),
        ("M_torch_dist", "M-Base", "", None),
        ("M", "M-FP8", "", None),
    ],
)
def test_weights_that_a_folder_was_to_hold_are_found_by_its_name(
    tmp_path, folder, hugging_face, beside, found
):
    for name in {hugging_face, beside} - {""}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert stand_in(tmp_path / folder, tmp_path / hugging_face) == (found and tmp_path / found)


def test_a_critic_of_ppo_gets_gpus_of_its_own_and_another_estimator_none(words, registry):
    pool = ("--critic-num-nodes", "1", "--critic-num-gpus-per-node", "4")
    ppo = read_stages(words("qwen2.5-0.5B-ppo", *pool), registry)[0].settings
    assert ppo.cluster.pools == {"critic": (1, 4)}
    assert read_stages(words("qwen3-4B", *pool), registry)[0].settings.cluster.pools == {}


@pytest.mark.parametrize(
    ("more", "warmup"),
    [
        (["--num-rollout", "1000", "--lr-decay-iters", "100"], 10),
        (["--num-rollout", "1000"], 100),
    ],
)
def test_a_share_of_warm_up_is_of_the_decay_as_megatron_has_it(words, registry, more, warmup):
    more = [*more, "--lr-decay-style", "linear", "--lr-warmup-fraction", "0.1", "--global-batch-size", "256"]
    settings = read_stages(words("qwen3-4B", *more), registry)[0].settings
    assert settings.train.lr_warmup_iters == warmup


def test_epochs_are_counted_where_no_schedule_is_named_as_the_references_is_linear(words, registry):
    given = words("qwen3-4B")
    for name in ("--lr-decay-style", "--num-rollout"):
        del given[given.index(name) : given.index(name) + 2]
    settings = read_stages([*given, "--num-epoch", "16"], registry)[0].settings
    assert (settings.run.num_rollout, settings.train.lr_decay_style) == (2, "linear")  # 4 rows, 32 a step


def test_an_iteration_that_is_not_there_is_refused(words, problems, tmp_path):
    (tmp_path / "megatron/iter_0000100").mkdir(parents=True)
    (tmp_path / "megatron/iter_0000100/.metadata").touch()
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text("100")
    (tmp_path / "run/checkpoints/step_000100").mkdir(parents=True)
    for name, wanted in (
        ("megatron", "an iteration that is there"),
        ("run", "one of its checkpoints by name"),
    ):
        found = problems(words("qwen3-4B", "--load", str(tmp_path / name), "--ckpt-step", "50"))
        assert (
            [one for one in found if one.startswith("--ckpt-step")]
            == [
                one
                for one in found
                if f"found 50, which is no iteration in {tmp_path / name}; wanted {wanted}" in one
            ]
            != []
        )
