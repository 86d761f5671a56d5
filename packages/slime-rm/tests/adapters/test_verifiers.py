"""Tasksets of verifiers v1: the source, the reward, and what is refused.

`PYTHONPATH=FOLDER pytest` with verifiers in FOLDER runs them on the package itself.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.rewards.pool import RewardPool
from slime_core.samples import Sample, Status
from slime_rm.adapters.taskset import LoadedTaskset
from slime_rm.adapters.verifiers import VerifiersReward
from slime_rm.adapters.verifiers_source import create_source
from slime_rm.section import VerifiersSection

pytestmark = pytest.mark.timeout(120)
TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    n: int = 4
    system: str | None = None


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        if trace.last_reply == "boom":
            raise ValueError("too loud")
        return 1.0 / len(trace.last_reply)

    @vf.metric
    async def cut(self, trace) -> float:
        return float(trace.is_truncated)
EXTRA

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.n):
            data = SumData(prompt=f"{i} + {i} =", answer=str(2 * i), system_prompt=self.config.system)
            yield SumTask(data, self.config.task)
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Verifiers, or what stands in for it, and a folder of tasksets, on the import path."""
    before = list(sys.path)
    folder = tmp_path_factory.mktemp("tasksets")
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("verifiers") is None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "verifiers_double"))
    (folder / "sums.py").write_text(TASKSET.replace("EXTRA", ""))
    yield folder
    sys.path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in ("verifiers", "sums")]:
        del sys.modules[name]


class Letters:
    """A tokenizer whose ids are code points."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, *, tools=None, **kwargs):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def source(evaluation=False, data=None, **verifiers):
    sections = {
        "verifiers": VerifiersSection(**{"taskset": "sums"} | verifiers),
        "data": DataSection(**data or {}),
        "eval": EvalSection(n_samples_per_eval_prompt=1),
        "rollout": RolloutSection(rollout_batch_size=2, rollout_max_response_len=4, n_samples_per_prompt=2),
    }
    settings = Settings(sections, {}, {})
    return create_source(
        SimpleNamespace(
            settings=settings, section=settings.section, tokenizer=Letters(), evaluation=evaluation
        )
    )


def test_each_task_is_a_prompt_and_the_first_ones_are_held_out():
    train, held_out = source(eval_size=1), source(evaluation=True, eval_size=1)
    first, second, third = (group[0] for group in train.take(3))
    assert [s.prompt for s in (first, second, third)] == ["1 + 1 =", "2 + 2 =", "3 + 3 ="]
    assert (len(train), first.label, first.tokens[0]) == (3, "2", ord("1"))
    ((only,),) = held_out.take(1)
    assert (len(held_out), only.prompt, only.metadata["source_name"]) == (1, "0 + 0 =", "sums")


def test_an_evaluation_without_held_out_tasks_is_refused():
    with pytest.raises(ConfigError, match=r"verifiers\.eval_size: found 0; wanted how many"):
        source(evaluation=True)


def test_options_reach_the_taskset_and_a_system_prompt_the_chat_template():
    options = {"n": 9, "system": "Be brief."}
    made = source(taskset_args=options, size=5, data={"apply_chat_template": True})
    assert len(made) == 5
    assert made.take(1)[0][0].prompt == "<system>Be brief.<user>0 + 0 ="
    with pytest.raises(
        DataError, match="sums: task 0: its prompt is a conversation; set apply_chat_template"
    ):
        source(taskset_args=options)


def scored(samples):
    async def main():
        options = {"taskset": "sums"}
        reference = "slime_rm.adapters.verifiers:VerifiersReward"
        async with RewardPool(reference, options, workers=1, timeout_s=60) as pool:
            return [await pool.score(sample) for sample in samples]

    return asyncio.run(main())


def test_a_response_is_scored_by_the_tasks_own_rewards_and_metrics():
    right, cut, loud = source(eval_size=1).take(1)[0][0], *source(eval_size=1).take(1)[0]
    right.response, right.status = " 2 ", Status.COMPLETED
    cut.response, cut.status = (
        "four<|endoftext|>",
        Status.TRUNCATED,
    )  # special tokens are no part of a message
    loud.response, loud.status = "boom", Status.COMPLETED
    *results, failure, stranger = scored([right, cut, loud, Sample(index=7)])
    # 2 · right + 1/2 · 1/length
    assert results[0].value == {"score": 2.5, "reward_right": 1.0, "reward_short": 1.0, "metric_cut": 0.0}
    assert results[1].value == {"score": 0.125, "reward_right": 0.0, "reward_short": 0.25, "metric_cut": 1.0}
    assert failure.kind == "raised"
    assert failure.message.startswith("sample 1: ")
    assert "too loud" in failure.message
    assert stranger.message.startswith("sample 7: ")
    assert "raised SampleError: metadata has no 'verifiers'" in stranger.message


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("    async def setup(self, trace, runtime): ...", r"other brings tasks with setup\(\); slime plays"),
        ("    @classmethod\n    def toolsets(cls, config): return [1]", "other brings tools; slime plays"),
        ("    NEEDS_CONTAINER = True", "other brings tasks that need a container"),
    ],
)
def test_a_taskset_that_slime_cannot_play_is_refused(folder, monkeypatch, extra, words):
    monkeypatch.delitem(sys.modules, "other", raising=False)
    (folder / "other.py").write_text(TASKSET.replace("EXTRA", extra))
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        with pytest.raises(PluginError, match=words):
            LoadedTaskset("other", {})
    finally:
        sys.dont_write_bytecode = before


def test_a_scorer_that_wants_a_sandbox_is_an_error_and_not_left_out(folder):
    extra = "    @vf.reward(weight=1.0)\n    async def passes(self, runtime) -> float: return 1.0"
    (folder / "boxed_sums.py").write_text(TASKSET.replace("EXTRA", extra))
    importlib.invalidate_caches()
    sample = source(taskset="boxed_sums").take(1)[0][0]
    sample.response = "0"
    with pytest.raises(PluginError, match="the scorer passes, which needs a sandbox"):
        VerifiersReward(taskset="boxed_sums")(sample)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (None, {}, "verifiers.taskset: found nothing; wanted the id of an installed taskset"),
        ("nothing_there", {}, "verifiers.taskset: .*nothing_there"),
        ("sums", {"m": 3}, r"verifiers.taskset_args: found \{'m': 3\}; wanted m"),
    ],
)
def test_wrong_settings_are_refused(name, options, words):
    with pytest.raises((ConfigError, PluginError), match=words):
        LoadedTaskset(name, options)
