"""The whole loop over the tabular policy: it learns, resumes exactly, and uses every prompt once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.errors import DataError, PluginError, SampleError
from slime_core.launch.local import drive
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.protocols import GenerateContext
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import most_new_tokens, run_generator, run_sample
from slime_core.rollout.rollouts.default import rollout
from slime_core.run.assemble import assemble
from slime_core.rundir.records import read_records
from slime_core.samples import Sample


def train(recipe: Path, *flags: str) -> dict[str, object]:
    registry = Registry()
    settings = load_settings([str(recipe)], flags, registry=registry)

    async def main() -> dict[str, object]:
        return await drive(await assemble(settings, registry))

    return asyncio.run(main())


def rows(run: Path) -> list[dict[str, float]]:
    """Metrics of each step, without those of time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def prompts(run: Path) -> list[tuple[int, int]]:
    """(group_index, index) of every sample that was trained on, step by step."""
    found = []
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        found += [(s["group_index"], s["index"]) for s in map(json.loads, file.read_text().splitlines())]
    return found


def test_it_learns_and_leaves_a_complete_run_folder(letters, tmp_path):
    summary = train(letters)
    run = tmp_path / "runs/letters"
    assert summary["status"] == "completed"
    assert summary["steps"] == 12
    assert summary["eval_before"] <= 0.2
    assert summary["eval_after"] >= 0.9
    assert json.loads((run / "summary.json").read_text()) == summary
    assert [row["step"] for row in rows(run)] == [*range(13)]
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step_000008", "step_000012"]
    locked = {
        (p["group"], p["name"], p["distribution"])
        for p in json.loads((run / "plugins.lock.json").read_text())
    }
    assert ("slime.loops", "sync", "slime-core") in locked
    again = load_settings([str(run / "config.toml")], [], registry=Registry())
    assert again.sections == load_settings([str(letters)], [], registry=Registry()).sections


def test_the_first_step_is_step_1_for_everybody_who_looks(letters, tmp_path, capsys):
    train(
        letters,
        "--num-rollout",
        "2",
        "--save-interval",
        "1",
        "--eval-interval",
        "1",
        "--tracker",
        "jsonl",
        "console",
    )
    run = tmp_path / "runs/letters"
    assert [row["step"] for row in rows(run)] == [0, 1, 2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == [
        "eval_step_000000.jsonl", "eval_step_000000.npz", "eval_step_000001.jsonl", "eval_step_000001.npz",
        "eval_step_000002.jsonl", "eval_step_000002.npz",
        "step_000001.jsonl", "step_000001.npz", "step_000002.jsonl", "step_000002.npz",
    ]  # fmt: skip
    heads = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert heads == ["before", "step 1/2", "step 2/2"]
    train(letters, "--num-rollout", "3", "--tracker", "jsonl", "console")
    assert "goes on with step 3" in capsys.readouterr().out


def test_saving_in_the_background_changes_nothing_but_times(letters, tmp_path):
    train(letters)
    train(letters, "--run-name", "async", "--async-save", "--num-rollout", "10")
    train(letters, "--run-name", "async", "--async-save")
    one, other = (tmp_path / "runs" / name for name in ("letters", "async"))
    kept = [sorted(p.name for p in (run / "checkpoints").iterdir()) for run in (one, other)]
    assert kept == [["step_000008", "step_000012"], ["step_000010", "step_000012"]]
    assert prompts(other) == prompts(one)
    tables = [(run / "checkpoints/step_000012/trainer/table.npy").read_bytes() for run in (one, other)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("flags", [["--colocate"], ["--offload-train"], ["--colocate", "--no-offload-train"]])
def test_sharing_devices_changes_nothing_but_times(letters, tmp_path, flags):
    alone = train(letters, "--run-name", "alone")
    shared = train(letters, "--run-name", "shared", *flags)
    assert rows(tmp_path / "runs/shared") == rows(tmp_path / "runs/alone")
    assert shared["eval_after"] == alone["eval_after"]


def test_checkpoint_of_a_run_that_shares_devices_is_gone_on_from(letters, tmp_path):
    train(letters, "--run-name", "whole")
    train(letters, "--run-name", "cut", "--colocate", "--num-rollout", "6")
    train(letters, "--run-name", "cut", "--colocate")
    assert rows(tmp_path / "runs/cut")[-1] == rows(tmp_path / "runs/whole")[-1]


def test_a_state_that_is_kept_has_what_was_dropped_for_the_step_ahead_also_once_that_is_recorded(
    letters, root, monkeypatch
):
    """A run that is asked to end after a rollout and before its training saves the state after the step before: going on, it deletes
    the records of later steps, and writes those of what the state has."""
    monkeypatch.syspath_prepend(root / "tests/plugins")
    kept = {}

    class Look:
        @hookimpl
        def slime_rollout_end(self, run, step):
            if run.whole is not None:
                kept[step] = {one["step"]: one["reasons"] for one in run.whole()["ahead"]}

    registry = Registry()
    registry.hook_manager.register(Look())
    words = [
        "--loop",
        "one-step-off",
        "--dynamic-sampling-filter-path",
        "letters.slow:some",
        "--num-rollout",
        "3",
    ]
    settings = load_settings([str(letters)], words, registry=registry)

    async def main() -> None:
        await drive(await assemble(settings, registry))

    asyncio.run(main())
    assert {step: set(ahead[step]) for step, ahead in kept.items()} == {2: {"third"}, 3: {"third"}}


def test_no_prompt_is_lost_or_used_twice(letters, tmp_path):
    """Over-sampling aborts surplus groups: they come back later, and every prompt is trained on in turn."""
    train(
        letters, "--over-sampling-batch-size", "6", "--num-rollout", "10", "--rollout-max-response-len", "3"
    )
    seen = Counter(index for _, index in prompts(tmp_path / "runs/letters"))
    assert set(seen.values()) == {1}
    groups = sorted({group for group, _ in prompts(tmp_path / "runs/letters")})
    waiting = json.loads(
        sorted((tmp_path / "runs/letters/checkpoints").iterdir())[-1].joinpath("state.json").read_text()
    )
    buffered = {sample["group_index"] for group in waiting["buffer"]["groups"] for sample in group}
    assert sorted({*groups, *buffered}) == list(range(waiting["source"]["group_index"]))


def test_custom_loop_stops_early(letters, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    summary = train(letters, "--loop", "docs.examples.custom_loop:until_solved", "--num-rollout", "100")
    assert summary["status"] == "completed"
    assert 3 <= summary["steps"] < 100
    rewards = [
        row["rollout/raw_reward"] for row in rows(tmp_path / "runs/letters") if "rollout/raw_reward" in row
    ]
    assert min(rewards[-3:]) >= 0.95
    assert min(rewards[-4:-1]) < 0.95


async def two_steps(run):
    """Stop after the second step."""
    await run.begin()
    for step in (1, 2):
        groups = await run.rollout(step)
        await run.train(run.batch(step, groups))
        await run.sync_weights(step)
        await run.end_step(step)


def test_the_evaluation_after_a_loop_that_stops_early_is_of_the_last_steps_weights(letters, tmp_path):
    """Weights are sent every third step: after the second the engine still has those from before the first."""
    flags = ("--loop", f"{__name__}:two_steps", "--update-weights-interval", "3", "--max-staleness", "2")
    train(letters, *flags)
    run = tmp_path / "runs/letters"
    trained = read_records(run / "rollouts/step_000002.jsonl")
    assert {tuple(sample["weight_versions"]) for sample in trained} == {("0",)}
    evaluated = read_records(run / "rollouts/eval_step_000002.jsonl")
    assert {tuple(sample["weight_versions"]) for sample in evaluated} == {("2",)}


def test_plugins_hear_of_each_rollout_before_it_is_trained_on(letters, tmp_path):
    heard: list[tuple[str, int]] = []

    class Listener:
        @hookimpl
        def slime_rollout_end(self, step, groups):
            assert all(sample.reward is not None for group in groups for sample in group)
            heard.append((f"rollout of {len(groups)} groups", step))

        @hookimpl
        def slime_step_end(self, step):
            heard.append(("step", step))

    registry = Registry()
    registry.hook_manager.register(Listener())
    settings = load_settings([str(letters)], ["--num-rollout", "2"], registry=registry)

    async def main() -> None:
        await drive(await assemble(settings, registry))

    asyncio.run(main())
    assert heard == [
        ("step", 0),
        ("rollout of 4 groups", 1),
        ("step", 1),
        ("rollout of 4 groups", 2),
        ("step", 2),
    ]


def test_responses_end_where_prompt_and_response_fill_the_context(letters, tmp_path):
    """Prompts have one token: of five that a response may have two are left."""
    train(letters, "--rollout-max-response-len", "5", "--rollout-max-context-len", "3", "--num-rollout", "1")
    samples = read_records(tmp_path / "runs/letters/rollouts/step_000001.jsonl")
    assert max(len(sample["tokens"]) for sample in samples) == 3
    with pytest.raises(DataError, match=r"letters.jsonl:1: found a prompt of 1 tokens; wanted at most 0"):
        train(letters, "--rollout-max-context-len", "1", "--overwrite")
    settings = load_settings([str(letters)], ["--rollout-max-context-len", "1"], registry=Registry())
    longer = Sample(index=7, tokens=[1])  # as a source may give one that says nothing beforehand
    with pytest.raises(SampleError, match=r"sample 7: its prompt of 1 tokens leaves no room"):
        most_new_tokens(longer, settings.rollout)


def test_a_sample_may_have_a_generator_of_its_own(letters):
    registry = Registry()
    settings = load_settings([str(letters)], [], registry=registry)

    async def main() -> list[int]:
        run = await assemble(settings, registry)
        await run.engine.start()
        first, second, third, *_ = run.take(1)[0]
        first.generate_function_path, third.generate_function_path = "greedy-baseline", "greedy-baselin"
        context = GenerateContext(engine=run.engine, tokenizer=run.tokenizer)
        params = run.sampling_params(first)
        try:
            of_run = run_generator(run)
            found = [len(await run_sample(run, context, of_run, one, params)) for one in (first, second)]
            with pytest.raises(
                SampleError, match=rf"{third.name}: generate_function_path: .*greedy-baseline"
            ):
                await run_sample(run, context, of_run, third, params)
        finally:
            await run.close()
        return found

    assert asyncio.run(main()) == [2, 1]


def test_groups_that_a_filter_drops_are_recorded_with_the_reason_and_shown(slime, letters, tmp_path):
    flags = ("--num-rollout", "2", "--dynamic-sampling-filter-path", f"{__name__}:odd_prompts")
    train(letters, *flags)
    run = tmp_path / "runs/letters"
    for step in (1, 2):
        trained, dropped = (
            [
                json.loads(line)
                for line in (run / f"rollouts/{name}_{step:06d}.jsonl").read_text().splitlines()
            ]
            for name in ("step", "dropped_step")
        )
        assert {sample["group_index"] % 2 for sample in trained} == {1}
        assert {sample["group_index"] % 2 for sample in dropped} == {0}
        assert {sample["dropped"] for sample in dropped} == {"even"}
        assert all(sample["reward"] is not None for sample in dropped)
        groups = {sample["group_index"] for sample in dropped}
        assert rows(run)[step]["rollout/dynamic_filter/drop_even"] == len(groups)
    shown = slime("samples", run, "--dropped", "--step", "2", "--limit", "1")
    assert "dropped: even" in shown.stdout
    train(letters, *flags[2:], "--num-rollout", "1", "--overwrite")
    assert [path.name for path in sorted((run / "rollouts").glob("dropped*"))] == [
        "dropped_step_000001.jsonl",
        "dropped_step_000001.npz",
    ]


def odd_prompts(group):
    return None if group[0].group_index % 2 else "even"


def test_generators_and_rollouts_get_options_like_other_functions(letters, tmp_path, capsys):
    flags = (
        *("--num-rollout", "1", "--custom-generate-function-path", f"{__name__}:noted"),
        *("--custom-generate-function-args", '{"note": "hello"}', "--eval-interval", "none"),
        *(
            "--rollout-function-path",
            f"{__name__}:reversed_rollout",
            "--rollout-function-args",
            '{"last_first": true}',
        ),
    )
    train(letters, *flags)
    lines = (tmp_path / "runs/letters/rollouts/step_000001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert {sample["metadata"]["note"] for sample in samples} == {"hello"}
    order = [sample["group_index"] for sample in samples]
    assert order == sorted(order, reverse=True)
    with pytest.raises(
        PluginError, match=r"custom_generate_function_args: found the key 'nota'; did you mean 'note'"
    ):
        train(letters, *flags[:4], "--custom-generate-function-args", '{"nota": "x"}', "--overwrite")


async def noted(ctx, sample, params, *, note):
    sample.metadata = {**sample.metadata, "note": note}
    return await single_turn(ctx, sample, params)


async def reversed_rollout(run, step, *, last_first=False):
    groups = await rollout(run, step)
    return groups[::-1] if last_first else groups


def mixed(tmp_path, *flags):
    """Flags of a run over two files, three prompts of one for each of the other."""
    (tmp_path / "rest.jsonl").write_text("".join(f'{{"input": "{a}", "label": "x"}}\n' for a in "klmno"))
    files = ["first", str(tmp_path / "letters.jsonl"), "rest", str(tmp_path / "rest.jsonl")]
    return ["--prompt-data", *files, "--prompt-data-weights", '{"first": 3}', *flags]


def test_two_files_are_mixed_by_their_weights_and_told_apart(letters, tmp_path):
    flags = mixed(tmp_path, "--num-rollout", "6")
    train(letters, *flags, "--run-name", "whole")
    train(letters, *flags, "--run-name", "begun", "--num-rollout", "2")
    train(letters, *flags, "--run-name", "begun")
    for row in rows(tmp_path / "runs/whole")[1:]:
        assert (row["rollout/source/first/samples"], row["rollout/source/rest/samples"]) == (48, 16)
        parts = 0.75 * row["rollout/source/first/raw_reward"] + 0.25 * row["rollout/source/rest/raw_reward"]
        assert parts == pytest.approx(row["rollout/raw_reward"])
    whole, begun = (
        [
            {key: value for key, value in row.items() if not key.startswith("eval/")}
            for row in rows(tmp_path / "runs" / name)
        ]
        for name in ("whole", "begun")
    )
    assert whole == begun
    for step in range(1, 7):
        seen = [
            [(one["prompt"], one["index"], one["metadata"], one["tokens"]) for one in read_records(file)]
            for name in ("whole", "begun")
            for file in [tmp_path / f"runs/{name}/rollouts/step_{step:06}.jsonl"]
        ]
        assert seen[0] == seen[1]
        assert {one[2]["source_name"] for one in seen[0] if one[0] in "klmno"} == {"rest"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompt-data", "a", "a.jsonl", "b"], "data.prompt_data: found ['a', 'a.jsonl', 'b']; wanted one file, or names"),
        (["--prompt-data", "a", "no.jsonl", "b", "nor.jsonl"], "data.prompt_data: nor.jsonl: found nothing"),
        (["--prompt-data-weights", '{"maths": 2}'], "data.prompt_data_weights: found 'maths'; wanted names of prompt_data: nothing"),
        (["--prompt-data-weights", '{"maths": 0}'], "more than 0"),
    ],
)  # fmt: skip
def test_mixtures_that_cannot_be_meant_are_refused(slime, letters, flags, told):
    refused = slime("check", letters, *flags)
    assert refused.returncode == 2
    assert told in " ".join(refused.stderr.split())
