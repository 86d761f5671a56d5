"""What MLflow keeps of a run as files holds what `metrics.jsonl` holds, read back by MLflow itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slime_core.rundir.records import read_records


@pytest.fixture(scope="module")
def kept(module_train: Any) -> Any:
    """The folder of a run that was resumed, and MLflow's view of it."""
    from mlflow import MlflowClient

    for num_rollout in (4, 8):
        run = module_train(num_rollout, "--use-mlflow", "--log-samples", "3")
    return run, MlflowClient(tracking_uri=(run / "mlflow").as_uri())


def test_every_metric_is_there_and_a_resumed_run_is_the_same_run(kept, rows_of):
    run, client = kept
    (experiment,) = [each for each in client.search_experiments() if each.name == "slime"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == (run / "mlflow_run_id").read_text().strip()
    assert (found.info.run_name, found.info.status) == ("letters", "FINISHED")
    wanted: dict[str, dict[int, float]] = {}
    for step, metrics in rows_of(run).items():
        for name, value in metrics.items():
            group, _, rest = name.replace("@", "_").partition("/")
            wanted.setdefault(f"{group}/{rest.replace('/', '.')}", {})[step] = value
    assert set(found.data.metrics) == set(wanted)
    for name, values in wanted.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert {each.step: each.value for each in history} == pytest.approx(values)


def test_settings_are_parameters_and_a_file(kept):
    run, client = kept
    run_id = (run / "mlflow_run_id").read_text().strip()
    assert client.get_run(run_id).data.params["rollout.n_samples_per_prompt"] == "4"
    (file,) = (run / "mlflow").rglob("config.toml")
    assert file.read_text() == (run / "config.toml").read_text()


def test_tables_show_the_first_sample_of_each_group(kept):
    run, client = kept
    run_id = (run / "mlflow_run_id").read_text().strip()
    assert "samples/step_000005.json" in client.get_run(run_id).data.tags["mlflow.loggedArtifacts"]
    (file,) = (run / "mlflow").rglob("step_000005.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    samples = list(read_records(run / "rollouts/step_000005.jsonl"))
    firsts = {sample["group_index"]: sample for sample in reversed(samples)}
    shown = [firsts[group] for group in dict.fromkeys(sample["group_index"] for sample in samples)][:3]
    assert [row["step"] for row in rows] == [5, 5, 5]
    assert [row["response"] for row in rows] == [sample["response"] for sample in shown]
    assert [row["reward"] for row in rows] == [sample["reward"] for sample in shown]
