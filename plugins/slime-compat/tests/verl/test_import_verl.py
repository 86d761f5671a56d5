"""Configurations of verl become recipes: what its keys mean here, by its own documents, and what has no counterpart."""

from __future__ import annotations

import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from slime_compat.verl.command import main
from slime_compat.verl.keys import KEYS
from slime_compat.verl.others import OPENRLHF, TRL
from slime_core.config.load import load_settings
from slime_core.config.parsing.schema import build_schema
from slime_core.data.make_source import make_source
from slime_core.errors import ConfigError
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_context
from slime_rm.adapters.verl import VerlReward

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = f"""
algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen3-8B {ACTOR}.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
{ACTOR}.ppo_mini_batch_size=256 {ACTOR}.ppo_micro_batch_size_per_gpu=32 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001
{ACTOR}.kl_loss_type=low_var_kl {ACTOR}.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
{ACTOR}.fsdp_config.param_offload=False {ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.name=vllm
{ROLLOUT}.gpu_memory_utilization=0.6 {ROLLOUT}.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"] trainer.project_name=verl_grpo
trainer.experiment_name=qwen3_8b trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
""".split()
PPO = """
data: {train_files: [a/train.parquet, b/train.parquet], train_batch_size: 256, max_prompt_length: 1024, max_response_length: 512}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B}
  actor: {ppo_mini_batch_size: 64, clip_ratio: 0.2, optim: {lr: 1e-6, lr_warmup_steps: 10}, ppo_epochs: 1}
  rollout: {name: sglang, n: 1, temperature: 1.0, tensor_model_parallel_size: 4}
critic: {optim: {lr: 1e-5}, model: {path: "${actor_rollout_ref.model.path}"}, cliprange_value: 0.5}
algorithm: {adv_estimator: gae, gamma: 1.0, lam: 0.95, use_kl_in_reward: true, kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.001}}
custom_reward_function: {path: reward.py, name: score, reward_kwargs: {strict: true}}
trainer: {total_epochs: 3, n_gpus_per_node: 8, nnodes: 2, logger: [console, clearml], save_freq: -1, esi_redundant_time: 0}
"""
DAPO = f"""
algorithm.adv_estimator=grpo data.train_files=dapo.parquet data.train_batch_size=512 +data.gen_batch_size=1536
{ACTOR}.ppo_mini_batch_size=32 {ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10.0
{ACTOR}.loss_agg_mode=token-mean {ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.0 data.max_response_length=20480
actor_rollout_ref.model.path=Qwen2.5-32B {ROLLOUT}.n=16 {ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.top_p=0.7
algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 algorithm.filter_groups.metric=acc
reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=4096
reward_model.overlong_buffer.penalty_factor=1.0 trainer.total_training_steps=200 data.val_files=aime.parquet trainer.test_freq=5
{ACTOR}.ulysses_sequence_parallel_size=8
""".split()


@pytest.fixture(scope="module")
def registry():
    return Registry.from_environment()


@pytest.fixture
def recipe_of(tmp_path, registry, capsys):
    """Return a function that imports a configuration: its settings, and what was told."""

    def recipe_of(*words: str):
        output = tmp_path / "recipe.toml"
        output.unlink(missing_ok=True)
        assert main([*words, "--output", str(output)]) == 0
        return load_settings([str(output)], [], registry=registry), capsys.readouterr().err

    return recipe_of


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["index"]) == ("openai/gsm8k", 3)
    return float(solution_str == ground_truth)
"""


def test_rows_of_its_own_files_are_scored_by_its_own_reward_files(recipe_of, registry, tmp_path):
    """The columns that verl's preprocessing scripts write: prompt, data_source, ability, reward_model and extra_info."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6 times 12?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 3},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    settings, _ = recipe_of(
        f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1",
        "actor_rollout_ref.model.path=smollm2-135m", f"custom_reward_function.path={tmp_path}/reward.py",
    )  # fmt: skip
    build = make_context(settings, registry)
    ((sample, *_),) = make_source(build).take(1)
    assert "6 times 12?" in sample.prompt and sample.label == "72"
    reward = VerlReward(**settings.reward.rm_args)
    sample.response = "72"
    assert reward(sample) == 1.0
    sample.response = "73"
    assert reward(sample) == 0.0


def test_the_grpo_example(recipe_of):
    settings, told = recipe_of(*GRPO)
    assert settings.algorithm.numerics == "verl"
    assert settings.origin("algorithm", "loss_reducer") == "numerics verl"
    assert (
        settings.algorithm.loss_reducer == "token-mean" and settings.algorithm.advantage_estimator == "grpo"
    )
    algos = settings.sections["algos"]
    assert (algos.eps_clip_c, algos.use_kl_loss, algos.kl_loss_coef, algos.kl_loss_type) == (
        3.0,
        True,
        0.001,
        "low_var_kl",
    )
    assert settings.train.num_steps_per_rollout == 4 and settings.rollout.n_samples_per_prompt == 5
    assert (settings.train.lr, settings.train.weight_decay, settings.train.adam_beta2) == (1e-6, 0.01, 0.999)
    assert settings.run.num_epoch == 15 and settings.run.launcher == "ray" and "wandb" in settings.run.tracker
    assert settings.eval.eval_interval == 5 and settings.eval.eval_temperature == 0.0
    assert settings.sections["sglang"].server_args == {"mem_fraction_static": 0.6}
    assert "no counterpart" not in told and "vllm becomes sglang" in told


def test_the_bound_of_a_ratio_is_written_as_gspo_takes_none_of_conventions(recipe_of):
    settings, _ = recipe_of(*GRPO, f"{ACTOR}.policy_loss.loss_mode=gspo")
    assert (settings.algorithm.loss_type, settings.sections["algos"].eps_clip) == ("gspo_loss", 0.2)
    assert not settings.origin("algos", "eps_clip").startswith("numerics ")


@pytest.mark.parametrize("has_kl", [True, False])
def test_the_straight_through_estimate_is_taken_where_there_is_a_divergence(recipe_of, has_kl):
    words = [word for word in GRPO if "kl_loss" not in word]
    given = (
        f"{ACTOR}.kl_loss_type=low_var_kl+ {ACTOR}.use_kl_loss={has_kl} {ACTOR}.kl_loss_coef={0.001 * has_kl}"
    )
    algos = recipe_of(*words, *given.split())[0].sections["algos"]
    assert (algos.use_kl_loss, algos.kl_straight_through) == (has_kl, has_kl)


def test_the_ppo_example_from_a_file_with_a_reference_and_a_reward_file(recipe_of, tmp_path):
    (tmp_path / "ppo.yaml").write_text(PPO)
    settings, told = recipe_of(str(tmp_path / "ppo.yaml"), "critic.optim.lr=2e-5")
    algos, roles = settings.sections["algos"], settings.sections["roles"]
    assert settings.algorithm.advantage_estimator == "ppo" and algos.normalize_advantages
    assert (algos.lambd, algos.kl_coef, algos.kl_loss_type, algos.value_clip, algos.value_loss_scale) == (
        0.95,
        0.001,
        "k1",
        0.5,
        0.5,
    )
    assert (roles.critic_lr, roles.critic_load) == (2e-5, "Qwen/Qwen2.5-7B")
    assert settings.reward.rm_args == {
        "path": "reward.py",
        "function": "score",
        "reward_kwargs": {"strict": True},
    }
    assert settings.data.prompt_data == ["train-1", "a/train.parquet", "train-2", "b/train.parquet"]
    assert settings.cluster.actor_num_nodes == 2 and settings.checkpoint.save_interval is None
    assert told.splitlines() == [
        "no counterpart: trainer.esi_redundant_time = 0", "no counterpart: trainer.logger = clearml",
    ]  # fmt: skip


def test_a_warm_up_of_ten_rollouts_is_forty_optimizer_steps(recipe_of, tmp_path):
    """verl's schedulers step once a rollout, slime's once an optimizer step: 256 prompts in steps of 64 are 4 of them."""
    (tmp_path / "ppo.yaml").write_text(PPO)
    settings, _ = recipe_of(str(tmp_path / "ppo.yaml"), "critic.optim.lr_warmup_steps=5")
    assert settings.train.num_steps_per_rollout == 4
    assert settings.train.lr_warmup_iters == 10 * 4
    assert settings.sections["roles"].critic_lr_warmup_iters == 5 * 4
    settings, _ = recipe_of(str(tmp_path / "ppo.yaml"), f"{ACTOR}.optim.lr_warmup_steps=-1")
    assert settings.train.lr_warmup_iters == 0


def test_the_dapo_example(recipe_of):
    settings, _ = recipe_of(*DAPO)
    algos, rollout = settings.sections["algos"], settings.rollout
    assert (algos.eps_clip, algos.eps_clip_high, algos.eps_clip_c) == (0.2, 0.28, 10.0)
    assert (rollout.dynamic_sampling_filter_path, rollout.dynamic_sampling_max_waves) == ("nonzero-std", 10)
    assert rollout.over_sampling_batch_size == 1536 and settings.train.num_steps_per_rollout == 16
    assert (settings.reward.overlong_buffer_len, settings.reward.overlong_penalty_factor) == (4096, 1.0)
    assert (settings.eval.eval_temperature, settings.eval.eval_top_p) == (1.0, 0.7)
    assert settings.run.num_rollout == 200 and settings.run.num_epoch is None
    assert settings.sections["megatron"].context_parallel_size == 8


def test_rows_that_are_left_out_stay_so(recipe_of):
    settings, told = recipe_of(*GRPO, "data.train_max_samples=1000", "data.val_max_samples=64")
    assert (
        settings.data.prompt_data == ["gsm8k/train.parquet@[0:1000]"] and settings.eval.eval_num_prompts == 64
    )
    assert "data.train_max_samples: the first 1000 rows, also where verl draws them" in told
    settings, told = recipe_of(*GRPO, "data.train_max_samples=-1", "data.val_max_samples=-1")
    assert settings.data.prompt_data == ["gsm8k/train.parquet"] and settings.eval.eval_num_prompts is None
    assert "samples" not in told
    _, told = recipe_of(*GRPO, "data.train_files=[a.parquet,b.parquet]", "data.train_max_samples=1000")
    assert "no counterpart: data.train_max_samples = 1000" in told


@pytest.mark.parametrize(
    ("key", "idle", "other"),
    [
        (f"{ROLLOUT}.ignore_eos", "False", "True"),
        ("critic.ppo_epochs", "1", "4"),
        ("trainer.resume_mode", "auto", "disable"),
        ("trainer.device", "cuda", "npu"),
    ],
)
def test_a_key_that_needs_nothing_for_one_value_is_named_for_others(recipe_of, key, idle, other):
    assert key not in recipe_of(*GRPO, f"{key}={idle}")[1]
    assert f"no counterpart: {key} = " in recipe_of(*GRPO, f"{key}={other}")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: found No such file"),
        (["data.train_files=a", f"{ACTOR}.ppo_epochs=2"], f"{ACTOR}.ppo_epochs: found 2; wanted 1: samples of a step are trained on once"),
        (["data.train_files=a", "algorithm.adv_estimator=new"], "algorithm.adv_estimator: found 'new'; wanted one of gae, grpo"),
        (["data.train_files=a", "trainer.nnodes"], "override: found 'trainer.nnodes'; wanted key=value"),
        (["data.train_files=${no.such}"], "data.train_files: found .*wanted a key that is there: no.such is not"),
        (["algorithm.adv_estimator=grpo"], "data.train_files: found nothing; wanted a file of prompts"),
        (["data.train_files=a", f"{ACTOR}.ppo_mini_batch_size=100"], "wanted a divisor of data.train_batch_size, 1024"),
    ],
)  # fmt: skip
def test_bad_configurations_are_refused_by_name_and_nothing_is_written(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main([*words, "--output", "recipe.toml"])
    assert not (tmp_path / "recipe.toml").exists()


@pytest.mark.parametrize("value", ["abc", "0", "[1]", "-8", "null", "2.5", "true", ".inf"])
@pytest.mark.parametrize("key", ["data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"])
def test_a_batch_size_is_a_count(key, value):
    with pytest.raises(ConfigError, match=f"{key}: found .*; wanted a (whole )?number"):
        main(["data.train_files=a", f"{key}={value}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{ACTOR}.optim.betas=x"], "betas: found 'x'; wanted a list of two numbers"),
        ([f"{ACTOR}.optim.betas=[1,2,3]"], "betas: found .1, 2, 3.; wanted a list of two numbers"),
        ([f"{ACTOR}.optim.betas=[a,b]"], "betas: found .'a', 'b'.; wanted a number"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=zzz"], "kl_penalty: found 'zzz'; wanted one of kl, k1"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=[1]"], "kl_penalty: found .1.; wanted one of kl, k1"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=x"], "kl_coef: found 'x'; wanted a number"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=x"], "target_kl: found 'x'"),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=x"], "batches: found 'x'; wanted a whole"),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=x"], "threshold: found 'x'"),
        (["data.train_files=3"], "data.train_files: found 3; wanted text, or a list of it"),
        (["data.train_files=[3]"], "data.train_files: found .3.; wanted text, or a list of it"),
        (["data.val_files=3"], "data.val_files: found 3; wanted text"),
        (["trainer.logger=3"], "trainer.logger: found 3; wanted text"),
        (["trainer.nnodes=x"], "trainer.nnodes: found 'x'; wanted a whole number"),
        ([f"{ROLLOUT}.name=x"], "rollout.name: found 'x'; wanted one of sglang"),
        ([f"{ROLLOUT}.top_k=x"], "top_k: found 'x'; wanted a whole number"),
        ([f"{ACTOR}.kl_loss_coef=x"], "kl_loss_coef: found 'x'; wanted a number"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_by_its_key(words, message):
    with pytest.raises(ConfigError, match=message):
        main(["data.train_files=a", *words])


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(ConfigError, match="wanted a new file"):
        main([*GRPO, "--output", str(tmp_path / "recipe.toml")])


def test_every_key_leads_to_a_setting_that_is_there(registry):
    schema = build_schema(registry)
    named = {name: key.to for name, key in KEYS.items() if key.to} | TRL | OPENRLHF
    for name, to in named.items():
        section, _, setting = to.partition(".")
        assert setting.split(".")[0] in schema.models[section].model_fields, name


def test_the_recipe_is_toml_that_names_what_it_lacks(capsys):
    assert main([*GRPO, "+trainer.surprise=[1]"]) == 0
    text = capsys.readouterr().out
    assert "#   trainer.surprise = '[1]'" in text and tomllib.loads(text)["run"]["run_name"] == "qwen3_8b"
