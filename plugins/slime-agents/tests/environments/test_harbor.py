"""Task folders of Harbor in the sandbox: what the policy's commands see and keep, what the tests give, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slime_agents.environments.harbor.box import Said, SubprocessBox
from slime_agents.environments.harbor.dockerfile import layout_of
from slime_agents.environments.harbor.environment import Harbor, reward_of
from slime_agents.environments.harbor.task import read_task, task_folders
from slime_core.config.sections import EnvironmentSection
from slime_core.errors import DataError, EnvironmentFailure, SampleError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.generators.multi_turn import converse
from slime_core.samples import Sample, Status
from slime_core.testing.contracts.environments import ScriptedEngine, _Bytes, _played

TEST = """\
test -e /app/secret && echo 'the tests saw it'
if [ "$(cat /app/out/sum.txt)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0.25 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def task(tmp_path):
    """A task whose container has /app/numbers.txt; half of the reward is for nothing."""
    folder = tmp_path / "add"
    for name, text in {
        "task.toml": '[verifier]\ntimeout_sec = 10\nenv = { WANTED = "5" }\n[environment]\nmemory_mb = 256\n',
        "instruction.md": "Write the sum of numbers.txt to out/sum.txt.\n",
        "environment/Dockerfile": "FROM python:3.12\n# what it has\nWORKDIR /app\nCOPY data/ .\nENV KIND=sum\n",
        "environment/data/numbers.txt": "2\n3\n",
        "tests/test.sh": TEST,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def played(task, *turns, **options):
    """Return a whole conversation, a token a byte."""
    given = Sample(index=0, group_index=0, prompt="?", tokens=[63], metadata={"harbor": str(task)})
    said = [list(turn.encode()) for turn in turns]
    return asyncio.run(_played(lambda: Harbor(**options), given, _Bytes(), said, None))


def test_commands_work_in_the_tasks_folder_and_its_tests_give_the_reward(task):
    found = played(
        task,
        "<bash>pwd; ls; echo $KIND</bash>",
        "<bash>mkdir out; cd /; cat /app/numbers.txt</bash>",
        "<bash>echo $((2 + 3)) > out/sum.txt; ls /tests</bash>",
        "Done.",
    )
    between = found.response.split("<output>\n")[1:]
    assert between[0].startswith("/app\nnumbers.txt\nsum\n</output>")
    assert between[1].startswith("2\n3\n</output>")
    assert between[2].startswith("</output>")  # the tests are not there before the end
    assert (found.reward, found.status) == (1.0, Status.COMPLETED)
    info = found.metadata["multi_turn"]["info"]
    assert [each.get("code") for each in info] == [0, 0, 0, None]
    masked = "".join(
        chr(token) for token, on in zip(found.response_tokens, found.loss_mask, strict=True) if on
    )
    assert masked.endswith("> out/sum.txt; ls /tests</bash>Done.") and "numbers.txt\nsum" not in masked


def test_work_that_is_wrong_or_missing_gets_what_the_tests_say(task):
    assert played(task, "I do not know.").reward == 0.25


def test_a_reward_that_the_policy_wrote_does_not_count(task):
    cheat = "<bash>mkdir -p /logs/verifier /tests; echo 9 > /logs/verifier/reward.txt; echo true > /tests/test.sh</bash>"
    assert played(task, cheat, "Done.").reward == 0.25


def test_a_command_that_is_stopped_leaves_nothing_and_says_so(task):
    found = played(
        task, "<bash>echo > half; sleep 60</bash>", "<bash>ls</bash>", "Done.", command_timeout_s=5.0
    )
    first, second = found.response.split("<output>\n")[1:]
    assert first.startswith("stopped: time; nothing that the command wrote is kept")
    assert second.startswith("numbers.txt\n</output>")


def test_neither_network_nor_this_machine_is_in_reach(task):
    home = Path.home()
    found = played(
        task,
        f"<bash>ls {home}/.ssh {Path(__file__).parent} {home}/.cache; cat /etc/passwd; exec 3<>/dev/tcp/127.0.0.1/80</bash>",
        "x",
    )
    said = found.response.split("<output>\n")[1]
    assert "root:" not in said and said.count("No such file") >= 3
    assert found.metadata["multi_turn"]["info"][0]["code"] != 0


def test_long_output_is_cut_in_the_middle(task):
    found = played(task, "<bash>seq 1000</bash>", "x", output_chars=20)
    assert "<output>\n1\n2\n3\n4\n5\n\n... 3873 characters ...\n\n999\n1000\n</output>" in found.response


def test_tests_that_do_not_end_give_nothing_and_tests_without_a_reward_are_an_error(task):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
    (task / "tests" / "test.sh").write_text("sleep 60")
    found = played(task, "x")
    assert (found.reward, found.metadata["multi_turn"]["info"]) == (0.0, [{"tests_stopped": "time"}])
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 60\n")
    (task / "tests" / "test.sh").write_text("echo broken; exit 3")
    with pytest.raises(EnvironmentFailure, match=r"left no number .*exit status 3.*broken"):
        played(task, "x")


def test_commands_wait_for_none_of_the_threads_that_asyncio_shares(task):
    async def main():
        loop, is_free = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, is_free.wait)
        boxes = [SubprocessBox(read_task(task)) for _ in range(2)]
        try:
            asked = [box.run("cat numbers.txt", timeout_s=10) for box in boxes]
            return await asyncio.wait_for(asyncio.gather(*asked), 30)
        finally:
            is_free.set()
            await busy

    assert asyncio.run(main()) == [Said("2\n3\n", 0)] * 2


class Counting:
    """A box of another kind, which counts its commands."""

    def __init__(self, task):
        self.n = 0

    async def run(self, command, *, timeout_s):
        self.n += 1
        return Said(f"{self.n}", 0)

    async def verify(self, *, timeout_s):
        return Said("", 0), {"reward.json": f'{{"reward": {self.n}}}'}

    async def close(self):
        self.n = 0


def test_another_box_is_chosen_by_its_name(task):
    found = played(task, "<bash>a</bash>", "<bash>b</bash>", "x", box=f"{__name__}:Counting")
    assert found.reward == 2.0


class Hanging:
    """A box whose tests take all the time that they are given, which is `last_s`."""

    last_s = 0.0

    def __init__(self, task):
        """Run no command."""

    async def verify(self, *, timeout_s):
        Hanging.last_s = timeout_s
        return Said("", None, "time"), {}

    async def close(self):
        """Nothing to do."""


def scored(task, *, timeout_s, n=1):
    """Return the samples of conversations of one turn, one after the other, in one run."""
    engine = ScriptedEngine([list(b"Done.")] * n)
    ctx = GenerateContext(engine=engine, tokenizer=_Bytes())

    async def main():
        settings = EnvironmentSection(environment_timeout_s=timeout_s)
        given = [
            Sample(index=i, group_index=0, prompt="?", tokens=[63], metadata={"harbor": str(task)})
            for i in range(n)
        ]
        params, box = SamplingParams(max_new_tokens=99), f"{__name__}:Hanging"
        return [
            await converse(
                ctx, one, params, settings=settings, name="harbor", create=lambda _: Harbor(box=box)
            )
            for one in given
        ]

    return asyncio.run(main())


@pytest.mark.parametrize(("deadline", "most"), [(30, 24), (60, 50), (900, 600)])
def test_tests_have_the_time_of_their_task_and_at_most_what_the_deadline_of_the_turn_leaves(
    task, deadline, most
):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 600\n")
    (found,) = scored(task, timeout_s=deadline)
    assert most - 5 < Hanging.last_s <= most
    assert (found.reward, found.status) == (0.0, Status.COMPLETED)
    assert found.metadata["multi_turn"]["info"] == [{"tests_stopped": "time"}]


def test_a_run_is_told_once_what_to_raise_for_tests_that_may_take_longer(task, caplog):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 600\n")
    scored(task, timeout_s=60, n=2)
    (record,) = caplog.records
    told = record.getMessage()
    assert str(task) in told and "may take 600 s" in told
    assert int(told.rpartition("--environment-timeout-s ")[2]) == 611


def test_a_run_whose_tests_have_their_time_is_told_nothing(task, caplog):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 600\n")
    scored(task, timeout_s=620)
    assert (Hanging.last_s, caplog.records) == (600.0, [])


@pytest.mark.parametrize(
    ("logs", "reward"),
    [
        ({"reward.txt": " 0.5\n"}, 0.5),
        ({"reward.txt": "", "reward.json": '{"reward": 1, "speed": 3}'}, 1.0),
        ({"reward.json": '{"speed": 3}'}, None),
        ({"reward.json": "["}, None),
        ({"reward.txt": "nan"}, None),
        ({}, None),
    ],
)
def test_rewards_are_read_as_harbor_writes_them(logs, reward):
    assert reward_of(logs) == reward


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("task.toml", "[", "cannot be read"),
        ("task.toml", "verifier = 3", "verifier is 3; wanted a table"),
        ("task.toml", "[verifier]\ntimeout_sec = 0", "timeout_sec is 0; wanted a number above 0"),
        ("task.toml", "[[steps]]\nname = 'a'", "wanted a task of one step"),
        ("instruction.md", " \n", "is empty"),
        ("tests/test.sh", None, "test.sh: is missing"),
    ],
)
def test_a_folder_that_is_no_task_is_refused_by_name(task, file, text, told):
    (task / file).unlink()
    if text is not None:
        (task / file).write_text(text)
    with pytest.raises(DataError, match=told):
        read_task(task)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("RUN apt-get install gcc", "'RUN apt-get install gcc' needs an image built"),
        ("COPY nowhere .", "nowhere: is no file of"),
        ("COPY ../tests /x", "is no file of"),
        ("COPY --from=a b c", "wanted files of the folder environment/"),
        ("ENV", "wanted NAME=VALUE"),
    ],
)
def test_what_needs_docker_is_refused_by_the_box_without_it(task, line, told):
    (task / "environment" / "Dockerfile").write_text(f"FROM x\n{line}\n")
    with pytest.raises(DataError, match=told):
        SubprocessBox(read_task(task))


def test_files_of_a_container_are_where_its_dockerfile_puts_them(tmp_path):
    for name in ("a.txt", "b/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nWORKDIR /srv\nWORKDIR in\nCOPY a.txt .\nCOPY a.txt b/c.txt there/\nCOPY b \\\n  /b2\nADD a.txt /z\nENV A=1 B='2 3'\nENV C d"
    )
    layout = layout_of(tmp_path)
    assert layout.workdir == "/srv/in"
    assert [target for _, target in layout.files] == [
        "/srv/in/a.txt", "/srv/in/there/a.txt", "/srv/in/there/c.txt", "/b2/c.txt", "/z"
    ]  # fmt: skip
    assert layout.env == {"A": "1", "B": "2 3", "C": "d"}


def test_tasks_are_found_below_a_folder_in_order(task, tmp_path):
    shutil.copytree(task, tmp_path / "more" / "b")
    assert list(task_folders(tmp_path)) == [task, tmp_path / "more" / "b"]
    with pytest.raises(DataError, match=r"no folder below has a task.toml"):
        list(task_folders(task / "tests"))


def test_a_row_without_a_task_is_named():
    with pytest.raises(SampleError, match="sample 3: metadata has no 'harbor'"):
        asyncio.run(Harbor().reset(Sample(index=3)))
