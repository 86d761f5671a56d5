from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slime_core.errors import CheckpointError, DataError
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, new_folder, save_hf
from torch import Tensor

TENSORS = {f"layer.{i}": torch.full((10,), float(i), dtype=torch.bfloat16) for i in range(5)}  # 20 bytes each


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_text("not copied")
    (folder / "model.safetensors.index.json").write_text("not copied")
    return folder


@pytest.fixture
def sharded(tmp_path: Path, source: Path) -> Path:
    return save_hf(tmp_path / "sharded", TENSORS.items(), config_from=source, max_file_bytes=45)


def assert_holds(folder: Path, tensors: dict[str, Tensor]) -> None:
    read = HfCheckpoint(folder)
    assert sorted(read) == sorted(tensors)
    assert len(read) == len(tensors)
    assert all(
        torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors
    )


def test_one_file_is_read_back(tmp_path: Path, source: Path) -> None:
    folder = save_hf(tmp_path / "out", TENSORS.items(), config_from=source)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_holds(folder, TENSORS)


def test_sharded_folder_is_read_back(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 100
    assert [index["weight_map"][f"layer.{i}"][6:11] for i in range(5)] == [
        "00001",
        "00001",
        "00002",
        "00002",
        "00003",
    ]
    assert_holds(sharded, TENSORS)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    folder = save_hf(tmp_path / "out", weights.items(), config_from=tmp_path / "config", max_file_bytes=1000)
    read = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).state_dict()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("named", "held"), [("bfloat16", torch.float32), ("float32", torch.bfloat16)])
def test_transformers_loads_by_default_what_was_written_from_a_config_of_another_dtype(
    tmp_path: Path, named: str, held: torch.dtype
) -> None:
    from transformers import AutoModel, LlamaConfig

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        dtype=named,
    )
    config.save_pretrained(tmp_path / "config")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).to(held)
        for name, tensor in AutoModel.from_config(config).state_dict().items()
    }
    folder = save_hf(tmp_path / "out", weights.items(), config_from=tmp_path / "config")
    assert_holds(folder, weights)
    read = AutoModel.from_pretrained(folder, local_files_only=True).state_dict()
    assert all(read[name].dtype == held and torch.equal(read[name], weights[name]) for name in weights)


def test_every_dtype_that_a_config_names_is_that_of_most_numbers(tmp_path: Path, source: Path) -> None:
    text = {"torch_dtype": "float32", "dtype": None}
    (source / "config.json").write_text(json.dumps({"dtype": "float16", "text_config": text}))
    tensors = TENSORS | {"bias": torch.ones(2), "ids": torch.arange(9)}
    folder = save_hf(tmp_path / "out", tensors.items(), config_from=source)
    assert read_config(folder) == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "dtype": None},
    }


def test_config_that_names_the_written_dtype_is_copied_as_it_is(tmp_path: Path, source: Path) -> None:
    (source / "config.json").write_text('{"torch_dtype":   "bfloat16"}')
    folder = save_hf(tmp_path / "out", TENSORS.items(), config_from=source)
    assert (folder / "config.json").read_text() == '{"torch_dtype":   "bfloat16"}'


def test_views_are_written_as_tensors_of_their_own(tmp_path: Path, source: Path) -> None:
    fused = torch.arange(12.0).reshape(4, 3)
    tensors = {"gate": fused[:2], "up": fused[2:], "column": fused[:, 1], "whole": fused, "again": fused}
    folder = save_hf(tmp_path / "out", tensors.items(), config_from=source)
    assert_holds(folder, tensors)


def test_missing_file_of_a_sharded_folder_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: missing"):
        HfCheckpoint(sharded)


def test_truncated_file_is_named(sharded: Path) -> None:
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(
        CheckpointError, match=r"model-00003-of-00003\.safetensors: not a whole safetensors file"
    ):
        HfCheckpoint(sharded)


def test_file_without_a_promised_tensor_is_named(sharded: Path) -> None:
    save_file({"layer.0": TENSORS["layer.0"]}, sharded / "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: lacks layer\.1"):
        HfCheckpoint(sharded)


def test_folder_without_weights_says_what_was_looked_for(source: Path) -> None:
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"found neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        HfCheckpoint(source)


def test_config_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: cannot be read as JSON"):
        read_config(tmp_path)


def test_existing_folder_is_not_written_over(sharded: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        save_hf(sharded, TENSORS.items(), config_from=source)
    assert_holds(sharded, TENSORS)


def test_an_earlier_folder_is_there_until_the_new_one_is_whole(sharded: Path, source: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(TENSORS.items()))
        raise OSError(28, "No space left on device")

    beside = sorted(sharded.parent.iterdir())
    with pytest.raises(CheckpointError, match="No space left"):
        save_hf(sharded, broken(), config_from=source, replaces=True)
    assert_holds(sharded, TENSORS)
    new = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_hf(sharded, new.items(), config_from=source, replaces=True)
    assert_holds(sharded, new)
    assert sorted(sharded.parent.iterdir()) == beside


@pytest.fixture
def rename_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Return a function by whose call the folder with the file `new` cannot be renamed; what it is given is done before."""
    rename = os.rename

    def begin(before: Callable[[Path], None]) -> None:
        def failing(source: Path, target: Path) -> None:
            if (source / "new").exists():
                before(target)
                raise OSError(5, "Input/output error")
            rename(source, target)

        monkeypatch.setattr(os, "rename", failing)

    return begin


def replace(target: Path) -> None:
    with new_folder(target, replaces=True) as partial:
        (partial / "new").write_text("new")


def test_an_earlier_folder_comes_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, rename_fails: Callable[..., None]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old")
    rename_fails(lambda target: None)
    with pytest.raises(
        CheckpointError, match=r"cannot be put in place: .*Input/output error; what was there is there"
    ):
        replace(tmp_path / "out")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/old"]


def test_an_earlier_folder_is_kept_beside_another_that_took_its_place(
    tmp_path: Path, rename_fails: Callable[..., None]
) -> None:
    def appears(target: Path) -> None:
        target.mkdir()
        (target / "theirs").write_text("theirs")

    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old")
    rename_fails(appears)
    with pytest.raises(CheckpointError, match=r"is there again, or kept as (.*\.earlier)") as raised:
        replace(tmp_path / "out")
    (earlier,) = (path for path in tmp_path.iterdir() if path.name != "out")
    assert str(earlier) in str(raised.value)
    assert (earlier / "old").read_text() == "old"
    assert (tmp_path / "out/theirs").read_text() == "theirs"


def test_all_chat_templates_of_a_folder_are_copied(tmp_path: Path, source: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    save_hf(tmp_path / "out", TENSORS.items(), config_from=source)
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "with tools"


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), new_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("x")
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="cannot be put in place"),
        new_folder(tmp_path / "out") as partial,
    ):
        (partial / "file").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "theirs"


@pytest.mark.parametrize("file", [3, None, ["a"], "../../x.safetensors", "/x.safetensors"])
def test_an_index_names_files_of_its_folder(sharded: Path, file: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"layer.0": file}}))
    with pytest.raises(CheckpointError, match=r"weight_map: layer.0: found .*; wanted the name of a file"):
        HfCheckpoint(sharded)


def test_a_config_that_is_cut_or_nested_deep_says_what_was_wanted(tmp_path: Path) -> None:
    for text in ('{"model_type"', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"cannot be read as JSON: .*; wanted a JSON object; fetch"):
            read_config(tmp_path)
