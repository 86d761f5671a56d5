"""`trainer.json` that was cut or edited: one error that names the file and what was found."""

import json

import pytest
from slime_core.errors import CheckpointError
from slime_megatron.settings.manifest import read_description

WHOLE = {"format": 1, "architecture": {"num_layers": 2}, "optimizer_steps": 3}


def test_a_description_is_read_with_the_defaults_of_what_it_lacks(tmp_path):
    (tmp_path / "trainer.json").write_text(json.dumps(WHOLE))
    description = read_description(tmp_path)
    assert description["optimizer_steps"] == 3
    assert description["architecture"].keys() > {"num_layers"}


def test_a_folder_without_one_is_incomplete(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no trainer.json; wanted a complete checkpoint"):
        read_description(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", json.dumps(WHOLE)[:-5], "[]", "3", "[" * 100_000, '{"a": ' * 3000 + "1" + "}" * 3000, "\0" * 50,
        *(
            json.dumps(WHOLE | change)
            for change in (
                {"format": 2}, {"format": "1"}, {"architecture": None}, {"architecture": [1]},
                {"optimizer_steps": -1}, {"optimizer_steps": "3"}, {"optimizer_steps": 1.5}, {"optimizer_steps": float("nan")},
                {"skipped_in_a_row": True}, {"lora": {"rank": 0, "alpha": 1.0}}, {"lora": {"rank": 4, "alpha": float("inf")}},
                {"estimator": 1}, {"train": {"lr": []}}, {"roles": "ref"},
            )
        ),
        *(json.dumps({k: v for k, v in WHOLE.items() if k != key}) for key in WHOLE),
        '{"format": 1, "architecture": {}, "optimizer_steps": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_no_trainer_writes_is_refused_by_name(tmp_path, text):
    path = tmp_path / "trainer.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_description(tmp_path)
    assert str(caught.value).startswith(f"{path}: found ")
    assert "wanted what the trainer megatron writes" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("change", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe{}")])
def test_what_is_no_text_file_is_refused_by_name(tmp_path, change):
    change(tmp_path / "trainer.json")
    with pytest.raises(CheckpointError, match=r"trainer.json: found "):
        read_description(tmp_path)
