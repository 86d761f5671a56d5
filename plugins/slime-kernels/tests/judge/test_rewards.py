"""The reward `kernels` of a run: how many of its calls there are at once, and a deadline that its evaluations can keep."""

from __future__ import annotations

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_kernels.hooks import check_deadline
from slime_kernels.rewards import KernelsReward
from slime_kernels.section import KernelsSection

RECIPE = '[model]\nhf_checkpoint = "m"\n[rollout]\nrollout_batch_size = 1\nrollout_max_response_len = 1\n'


def test_as_many_are_scored_at_once_as_are_evaluated_so_that_none_waits_within_its_deadline():
    assert KernelsReward(settings=KernelsSection(concurrency=3, service="http://there/eval")).connections == 3


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--rm-type", "kernels"), "30 with kernels.eval_timeout_s = 60"),
        (("--rm-type", "kernels", "--reward-timeout-s", "359"), "359 with kernels.eval_timeout_s = 60"),
        (("--rm-type", "kernels", "--reward-timeout-s", "360"), None),
        (("--rm-type", "kernels", "--kernels-eval-timeout-s", "5"), None),
        (("--rm-type", "math"), None),
    ],
)
def test_a_deadline_that_is_shorter_than_an_evaluation_is_refused(monkeypatch, tmp_path, flags, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    registry, recipe = Registry.from_environment(), tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    problems = check_settings(load_settings([str(recipe)], flags, registry=registry), registry)
    told = [one for one in problems if one.where == "reward.reward_timeout_s"]
    assert [one.found for one in told] == ([] if found is None else [found])
    for one in told:
        assert "--reward-timeout-s 360, or a smaller --kernels-eval-timeout-s" in str(one)


def test_a_deadline_on_a_gpu_has_room_for_its_jobs_and_for_the_others_that_time_there():
    # 6 x 60 s, 3 x 300 s of the module, and the one other, which has the GPU for 60 + 900 s
    section = KernelsSection(concurrency=2)
    assert list(check_deadline(2220, section, n_gpus=1)) == []
    (one,) = check_deadline(2219, section, n_gpus=1)
    assert (
        "2220 or more: an evaluation on a GPU has 6 processes with that deadline and 3 of 300 s" in one.wanted
    )
    assert one.wanted.endswith("waits while 1 others of kernels.concurrency = 2 have the GPU, each for 960 s")
    (alone,) = check_deadline(0, KernelsSection(concurrency=1, eval_timeout_s=10), n_gpus=1)
    assert alone.wanted.startswith("960 or more")
    assert list(check_deadline(2220, KernelsSection(concurrency=16), n_gpus=8)) == []  # two on each GPU
    assert list(check_deadline(360, section, n_gpus=0)) == []
