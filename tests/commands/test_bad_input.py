"""Bad input: one clear error that fits a screen, exit status 2, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.cli import main

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def refuse(slime, slime_here, letters, tmp_path):
    """Run `slime train` and check that it refuses; returns the message. With `env` in a process that has it."""

    def run(
        *flags: str, recipe: Path = letters, leaves_run: bool = False, env: dict[str, str] | None = None
    ) -> str:
        words = ("train", recipe, *flags)
        result = slime_here(*words) if env is None else slime(*words, env=os.environ | env)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert 0 < len(result.stderr.splitlines()) < 25
        assert (tmp_path / "runs").exists() == leaves_run
        return result.stderr

    return run


def plugin(folder: Path, name: str, entry_points: str, **modules: str) -> dict[str, str]:
    """Install a throwaway distribution; returns the environment in which it is seen."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_unknown_flag(refuse):
    assert "--rm-tpye: found an unknown flag; wanted '--rm-type'" in refuse("--rm-tpye", "math")


def test_unknown_key_in_a_recipe(refuse, letters):
    letters.write_text(letters.read_text().replace("n_samples_per_prompt", "n_sample_per_prompt"))
    message = refuse()
    assert (
        f"{letters}: rollout.n_sample_per_prompt: found an unknown key; wanted 'n_samples_per_prompt'"
        in message
    )


def test_unknown_reward(refuse):
    message = refuse("--rm-type", "mathh")
    assert "no plugin is named 'mathh'; did you mean 'math'?" in message


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--custom-reward-post-process-path", "nope"), "reward.custom_reward_post_process_path (--custom"),
        (("--value-loss-type", "nope"), "algorithm.value_loss_type (--value-loss-type): found 'nope'"),
        (("--reward-transform-args", '{"std_dof": 0}'), "the key 'std_dof'; did you mean 'std_ddof'?"),
        (("--reducer-args", '{"x": 1}'), "algorithm.reducer_args: found the key 'x'"),
        (("--rm-args", '{"x": 1}', "--label-key", "none"), "reward.rm_args: found the key 'x'"),
        (
            ("--dynamic-sampling-filter-path", "nonzero-std", "--filter-args", '{"thresold": 1}'),
            "rollout.filter_args: found the key 'thresold'; did you mean 'threshold'?",
        ),
        (
            ("--filter-args", '{"threshold": 1}'),
            "rollout.filter_args: found {'threshold': 1} and no filter; wanted rollout.dynamic_sampling_filter",
        ),
        (
            ("--rollout-function-path", "sft", "--rollout-temperature", "0.5"),
            "rollout.n_samples_per_prompt: found 16; wanted 1: the rollout sft trains on each conversation once "
            "a pass\n  rollout.rollout_temperature: found 0.5; wanted 1: the trainer divides its logits by it",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_check_refuses_what_train_refuses_before_it_starts(
    letters, tmp_path, capsys, command, flags, message
):
    assert main.run([command, str(letters), *flags]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "every plugin imports" not in shown.out
    assert not (tmp_path / "runs").exists()


def test_reward_that_raises_names_the_sample(refuse, tmp_path):
    env = plugin(
        tmp_path / "site", "acme", "", acme_raise="def f(sample):\n    raise ZeroDivisionError('nope')\n"
    )
    message = refuse("--rm-type", "acme_raise:f", "--eval-interval", "none", env=env, leaves_run=True)
    assert "RewardError" in message
    assert "sample " in message
    assert "ZeroDivisionError: nope" in message
    assert "the run failed" not in message  # one error is enough; the log has its traceback
    assert (
        "ERROR slime_core.launch.local: the run failed\nTraceback"
        in (tmp_path / "runs/letters/log.txt").read_text()
    )
    assert json.loads((tmp_path / "runs/letters/summary.json").read_text())["status"] == "failed"
    assert list((tmp_path / "runs/letters/checkpoints").iterdir()) == []


def test_reward_that_hangs_misses_its_deadline(refuse, tmp_path):
    env = plugin(
        tmp_path / "site", "acme", "", acme_hang="import time\ndef f(sample):\n    time.sleep(1000)\n"
    )
    message = refuse(
        "--rm-type",
        "acme_hang:f",
        "--reward-timeout-s",
        "1",
        "--eval-interval",
        "none",
        env=env,
        leaves_run=True,
    )
    assert "sample " in message
    assert "no result within 1 s" in message


def test_missing_label_key(refuse, tmp_path):
    message = refuse("--label-key", "answer")
    assert f"{tmp_path}/letters.jsonl" in message
    assert "'answer'" in message
    assert "input" in message
    assert "label" in message  # the columns that are there


def test_broken_line_of_jsonl(refuse, tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_text(path.read_text() + '{"input": "k", "label"\n')
    assert f"{path}:11" in refuse()


def test_parquet_without_the_column(refuse, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"question": ["a", "b"], "label": ["x", "y"]}), path)
    message = refuse("--prompt-data", str(path), "--eval-interval", "none")
    assert str(path) in message
    assert "'input'" in message
    assert "question" in message


def test_batch_sizes_that_do_not_multiply_out(refuse):
    assert "4 x 16 = 64, and 48 x 1 = 48" in refuse("--global-batch-size", "48")


def test_model_folder_without_a_tokenizer(refuse, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    message = refuse("--tokenizer", "hf")
    assert str(tmp_path / "model") in message
    assert "tokenizer" in message


def test_folder_that_is_no_model(refuse, tmp_path):
    assert "nowhere" in refuse("--hf-checkpoint", str(tmp_path / "nowhere"))


def test_unsupported_model_type(refuse, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mamba17"}')
    message = refuse(
        "--train-backend", "megatron", "--advantage-estimator", "grpo", "--loss-type", "policy_loss"
    )
    assert "mamba17" in message
    assert "`slime plugins list models` shows the " in message


BROKEN = "raise ImportError('libacme.so is missing')\n"


def test_plugin_that_fails_to_import_is_fatal_when_chosen(refuse, tmp_path):
    env = plugin(tmp_path / "site", "acme", "[slime.rewards]\nbad = acme_bad:f\n", acme_bad=BROKEN)
    message = refuse("--rm-type", "bad", env=env)
    assert "acme/bad" in message
    assert "libacme.so is missing" in message


def test_plugin_that_fails_to_import_is_only_shown_when_not_chosen(slime, letters, tmp_path):
    env = os.environ | plugin(tmp_path / "site", "acme", "[slime]\nacme = acme_bad\n", acme_bad=BROKEN)
    trained = slime("train", letters, "--num-rollout", "1", env=env)
    assert trained.returncode == 0
    assert "warning: the hooks of acme are left out: slime 'acme/acme'" in trained.stderr
    assert "libacme.so is missing" in trained.stderr
    checked = slime("plugins", "check", env=env | {"SLIME_PLUGINS": "acme"})
    assert "libacme.so is missing" in checked.stdout
    assert "ok  slime acme/acme" not in checked.stdout
    assert checked.returncode == 1
    listed = slime("plugins", env=env)
    assert listed.returncode == 0
    assert "acme" in listed.stdout
    assert "libacme.so is missing" in listed.stdout


def test_engine_that_lacks_what_another_plugin_needs(refuse, tmp_path):
    needs = (
        "from slime_core.plugins.hooks import hookimpl\n"
        "@hookimpl\ndef slime_engine_needs(settings):\n    return ['routed_experts']\n"
    )
    message = refuse(env=plugin(tmp_path / "site", "acme", "[slime]\nacme = acme_needs\n", acme_needs=needs))
    assert "tabular:create_engine, whose completions have no routed_experts; wanted an engine that" in message


def test_two_plugins_with_one_name(refuse, tmp_path):
    plugin(tmp_path / "site", "acme", "[slime.rewards]\nmath = acme:f\n")
    env = plugin(tmp_path / "site", "zeta", "[slime.rewards]\nlength = zeta:f\n")
    plugin(tmp_path / "site", "yeta", "[slime.rewards]\nlength = yeta:f\n")
    assert "acme/math or slime-rm/math" in refuse("--rm-type", "math", env=env)
    assert "yeta/length or zeta/length" in refuse("--rm-type", "length", env=env)


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["", "async"])
def test_full_disk_while_saving_leaves_the_previous_checkpoint(slime, letters, tmp_path, flags):
    source = """
import errno
from slime_core.config.factories import TrainerFactory
from slime_core.testing import tabular
class Full(tabular.TabularTrainer):
    saves = 0
    def write(self, path, table):
        self.saves += 1
        if self.saves == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, table)
def create_trainer(build):
    made = tabular.create_trainer(build)
    made.__class__ = Full
    return made
create_trainer = TrainerFactory(create_trainer, tabular.TabularTrainer.capabilities)
"""
    env = os.environ | plugin(tmp_path / "site", "acme", "", acme_full=source)
    result = slime("train", letters, "--train-backend", "acme_full:create_trainer", *flags, env=env)
    assert result.returncode == 2
    assert "No space left on device" in result.stderr
    assert "step_000004 is intact" in result.stderr
    assert [p.name for p in (tmp_path / "runs/letters/checkpoints").iterdir()] == ["step_000004"]
    assert slime("train", letters, *flags, env=env).returncode == 0  # room was made: it goes on from there


def test_saving_in_the_background_by_a_trainer_that_cannot(refuse, tmp_path):
    source = """
from slime_core.config.factories import TrainerFactory
from slime_core.testing import tabular
def create_trainer(build):
    return tabular.create_trainer(build)
"""
    env = plugin(tmp_path / "site", "acme", "", acme_plain=source)
    message = refuse("--train-backend", "acme_plain:create_trainer", "--async-save", env=env)
    assert (
        "checkpoint.async_save: found it with the trainer 'acme_plain:create_trainer'; wanted a trainer that"
        in message
    )


def test_checkpoint_of_other_data(slime, letters, tmp_path):
    assert slime("train", letters, "--num-rollout", "4").returncode == 0
    path = tmp_path / "letters.jsonl"
    path.write_text(path.read_text().replace('"j"', '"k"'))
    result = slime("train", letters)
    assert result.returncode == 2
    assert "resume with the data set" in result.stderr


def test_weight_transport_that_the_engine_lacks(refuse):
    flags = ("--update-weight-transport", "memory", "--update-weight-mode", "delta")
    message = refuse("--rollout-engine", "torch", *flags)
    assert (
        "train.update_weight_transport: found memory-delta, which the engine torch lacks; wanted one of memory"
        in message
    )


def test_weight_transport_for_ranks_of_servers_with_an_engine_that_has_none(refuse):
    message = refuse(
        "--rollout-engine", "torch", "--train-backend", "megatron", "--update-weight-transport", "nccl"
    )
    assert "found nccl with the engine torch, which has no servers whose ranks could join" in message


def test_weight_folder_that_is_a_file_or_that_nothing_goes_to(refuse, letters):
    message = refuse("--update-weight-disk-dir", str(letters))
    assert "train.update_weight_disk_dir: found" in message
    assert "with nothing that goes there; wanted --update-weight-transport disk" in message
    assert "which is a file; wanted a folder" in message


def test_images_with_a_trainer_or_without_a_chat_template(refuse):
    message = refuse("--multimodal-keys", '{"image": "pics", "video": "clips"}')
    assert "data.multimodal_keys: found ['image', 'video'] with the trainer" in message
    assert "wanted --train-backend none and `slime eval`" in message
    assert "data.multimodal_keys: found ['video']; wanted image" in message
    assert "data.apply_chat_template: found false with multimodal_keys; wanted true" in message


def test_images_with_an_engine_that_takes_none(slime_here, letters):
    flags = ["--multimodal-keys", '{"image": "pics"}', "--apply-chat-template", "--train-backend", "none"]
    result = slime_here("check", letters, *flags)
    assert result.returncode == 2
    assert "tabular:create_engine, which takes no images, with data.multimodal_keys" in result.stderr


def test_training_without_a_trainer(refuse):
    assert "train.train_backend: found none; wanted a trainer" in refuse("--train-backend", "none")


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("{'acc': 1.0, 'why': 'x'}", "keys ['acc', 'why'], reward_key is None; set --reward-key"),
        ("{}", "reward is a dict with keys []"),
        ("{'score': 'x'}", "reward is a dict with keys ['score']"),
        ("1.0 if sample.prompt == 'a' else {}", "reward is a dict with keys []"),
    ],
)
def test_check_refuses_a_reward_without_a_score(slime_here, letters, tmp_path, monkeypatch, returned, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoreless.py").write_text(f"def reward(sample):\n    return {returned}\n")
    flags = ("--rm-type", "scoreless:reward", "--no-rollout-shuffle")
    result = slime_here("check", letters, *flags)
    assert result.returncode == 2, result.stdout + result.stderr
    assert wanted in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(60)
def test_check_makes_no_samples_that_it_does_not_look_at(slime_here, letters):
    result = slime_here("check", letters, "--n-samples-per-prompt", str(2**31 - 1))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "error", ["KeyboardInterrupt", "GeneratorExit", "type('Own', (BaseException,), {})('x')"]
)
def test_modules_that_raise_what_is_no_exception_at_import_do_not_import(
    refuse, tmp_path, monkeypatch, error
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising.py").write_text(f"raise {error}\n")
    script = "from slime_core.cli import main; main.main()"  # which hears signals itself
    words = ["train", str(tmp_path / "letters.toml"), "--rm-type", "raising:f"]
    result = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "raising:f' (raising:f) does not import: ImportError: the module raises" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "runs").exists()


def test_a_function_of_c_that_does_not_say_what_it_takes_is_called_all_the_same(slime_here, letters):
    result = slime_here("check", letters, "--rm-type", "builtins:max")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "the reward cannot score" in result.stderr and "TypeError" in result.stderr


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--tokenizer", "model.tokenizer"),
        ("--buffer", "data.buffer"),
        ("--data-source-path", "data.data_source_path"),
        ("--eval-data-source-path", "eval.eval_data_source_path"),
        ("--tracker", "run.tracker"),
        ("--rollout-engine", "rollout.rollout_engine"),
        ("--train-backend", "train.train_backend"),
        ("--launcher", "run.launcher"),
    ],
)
def test_a_factory_that_raises_is_named_with_its_setting_and_line(
    refuse, tmp_path, monkeypatch, flag, setting
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising_factory.py").write_text("def make(*given):\n    raise RuntimeError('boom')\n")
    message = refuse(flag, "raising_factory:make")
    file = tmp_path / "raising_factory.py"
    assert (
        f"{setting}: found raising_factory:make, which raised RuntimeError: boom ({file}:2); wanted"
        in message
    )


def test_a_folder_without_a_checkpoint_is_nothing_to_load(refuse, slime_here, letters, tmp_path):
    for words in (("--load", tmp_path / "model"), ("--load", tmp_path / "model", "--overwrite")):
        message = refuse(*map(str, words))
        assert f"checkpoint.load: found '{tmp_path}/model', which holds no checkpoint; wanted" in message
        assert slime_here("check", letters, *words).returncode == 2


@pytest.mark.parametrize("flag", ["--freeze-params-name-list", "--only-train-params-name-list"])
def test_patterns_of_parameters_are_regular_expressions(refuse, flag):
    message = refuse("--train-backend", "megatron", flag, "[")
    assert f"{flag}: found ['[']; wanted regular expressions ('[': unterminated character set" in message


def test_a_program_of_agents_that_is_not_there(refuse, slime_here, letters):
    words = ("--custom-generate-function-path", "agent", "--agents-program", "/nope/x")
    assert "agents.program: found '/nope/x'; wanted a program that can be run" in refuse(*words)
    python = slime_here("check", letters, *words[:-1], "{python}", "x.py", "--eval-interval", "none")
    assert "agents.program" not in python.stderr


def test_options_that_an_environment_does_not_take(refuse):
    words = ("--custom-generate-function-path", "multi-turn", "--environment", "calculator")
    message = refuse(*words, "--environment-args", '{"zzz": 1}')
    assert "environment.environment_args: found {'zzz': 1}; wanted options of" in message
    assert "found the key 'zzz'; Calculator takes opening, closing, template" in message


@pytest.mark.parametrize(
    "source",
    [
        "def f(sample):\n    yield 1.0\n", "async def f(sample):\n    yield 1.0\n",
        "class f:\n    async def __call__(self, sample):\n        yield 1.0\n",
    ],
)  # fmt: skip
def test_a_reward_that_yields(refuse, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yielding_reward.py").write_text(source)
    message = refuse("--rm-type", "yielding_reward:f")
    assert "found 'yielding_reward:f': a function that yields; wanted one that returns its result" in message
