from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry
from slime_models.family.families.llama import LLAMA
from slime_models.hf.config import read_config
from slime_models.hf.fetch import _hub_snapshot, fetch, list_models, model_folder, resolve
from slime_models.hf.folder import HfCheckpoint


def silent(line: str) -> None:
    pass


def test_fetched_model_knows_the_capital_of_france(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0]
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokens[prompt["input_ids"].shape[1] :]) == " Paris."


def test_fetched_folder_is_a_llama_that_goes_there_and_back(smollm2: Path) -> None:
    architecture = LLAMA.architecture(read_config(smollm2))
    assert (architecture.num_layers, architecture.hidden_size, architecture.vocab_size) == (30, 576, 49152)
    assert (architecture.norm_epsilon, architecture.rope_theta) == (1e-5, 100_000.0)
    hf = HfCheckpoint(smollm2)
    n_tensors = 0
    for name, tensor in LLAMA.to_megatron(hf, architecture):
        for hf_name, part in LLAMA.to_hf(name, tensor, architecture):
            assert torch.equal(part, hf[hf_name])
            n_tensors += 1
    assert n_tensors == len(hf) == 272


def test_second_fetch_takes_the_folder_that_is_there(smollm2: Path) -> None:
    lines: list[str] = []
    assert fetch("smollm2-135m", models_dir=smollm2.parent, progress=lines.append) == smollm2
    assert lines == []


def test_folder_that_another_process_finishes_first_is_taken(tmp_path: Path) -> None:
    folder = model_folder("smollm2-135m", tmp_path)

    def finish_first(line: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    assert fetch("smollm2-135m", models_dir=tmp_path, progress=finish_first) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m"]


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_local_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["smolm2-135m", "./here", "/no/such/folder", "a/b/c", "~/nothing-here"])
def test_what_is_no_model_is_refused_without_asking_the_network(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no such folder"):
        resolve(name, models_dir=tmp_path)


def test_misspelt_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m", models_dir=tmp_path)


def lay_out_snapshot(cache: Path) -> Path:
    """A hub cache that holds `owner/tiny` at commit `abc`, as huggingface_hub lays it out."""
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": torch.zeros(1)}, snapshot / "model.safetensors")
    return snapshot


def test_hub_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = lay_out_snapshot(tmp_path)
    nowhere = "http://127.0.0.1:9"
    assert _hub_snapshot("owner/tiny", silent, cache_dir=tmp_path, endpoint=nowhere) == snapshot


def test_hub_that_does_not_answer_is_said(tmp_path: Path) -> None:
    (
        lay_out_snapshot(tmp_path) / "model.safetensors"
    ).unlink()  # an interrupted download must be taken up again
    with pytest.raises(DataError, match=r"model 'owner/other': no such folder, and the hub did not give it"):
        _hub_snapshot("owner/other", silent, cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


def test_known_models_are_offered_to_core() -> None:
    hooks = Registry().hooks
    offered = [entry for answer in hooks.slime_list_models() for entry in answer]
    assert "smollm2-135m" in [name for name, _ in offered]
    assert [model.name for model in list_models()] == ["smollm2-135m"]
    assert hooks.slime_resolve_model(name="no-such-model") is None


def test_families_are_found_by_their_model_type() -> None:
    registry = Registry()
    for model_type in ("llama", "qwen2", "qwen3"):
        assert registry.resolve("slime.models", model_type).model_type == model_type


def test_environment_names_what_is_needed() -> None:
    answers = [answer for answer in Registry().hooks.slime_environment() if "safetensors" in answer]
    assert answers and {"torch", "transformers", "gguf"} <= answers[0].keys()
