"""What imports of large packages are spared, and that nothing else of them changes."""

from __future__ import annotations

import gc
from importlib import metadata
from pathlib import Path

import pytest
from slime_core.plugins.quick_imports import quick_imports, recorded_packages


def test_recorded_packages_are_those_that_a_look_at_every_file_finds():
    looked = metadata.packages_distributions()
    recorded = recorded_packages()
    assert recorded.keys() == looked.keys()
    for package, names in looked.items():
        assert sorted(recorded[package]) == sorted(names)


@pytest.mark.parametrize(
    ("files", "packages"),
    [
        ({"RECORD": "one/__init__.py,sha256=x,1\none/two.py,,\nlone.py,,\nnative.abi3.so,,\n"}, {"one", "lone", "native"}),
        ({"RECORD": '"of, commas/__init__.py",,\n\n../bin/tool,,\nname-1.dist-info/METADATA,,\n'}, {"of, commas"}),
        ({"RECORD": "one/__init__.py,,\nbin/tool,,\ngone.py,,\n"}, {"one"}),
        ({"RECORD": "one/__init__.py,,\n", "top_level.txt": "first\nsecond\n"}, {"first", "second"}),
        ({}, set()),
    ],
)  # fmt: skip
def test_packages_of_a_distribution_are_what_it_declares_or_its_topmost_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], packages: set[str]
):
    for package in ("one", "of, commas"):
        (tmp_path / package).mkdir()
    for module in ("lone.py", "native.abi3.so"):
        (tmp_path / module).touch()
    folder = tmp_path / "name-1.dist-info"
    folder.mkdir()
    for file, text in ({"METADATA": "Metadata-Version: 2.1\nName: name\nVersion: 1\n"} | files).items():
        (folder / file).write_text(text)
    monkeypatch.setattr(metadata, "distributions", lambda: [metadata.Distribution.at(folder)])
    assert recorded_packages() == {package: ["name"] for package in packages}


def test_what_is_replaced_during_quick_imports_is_put_back_where_they_fail():
    before = gc.get_threshold(), metadata.packages_distributions
    with pytest.raises(ImportError), quick_imports():
        assert gc.get_threshold()[0] > before[0][0]
        assert metadata.packages_distributions is recorded_packages
        raise ImportError
    assert (gc.get_threshold(), metadata.packages_distributions) == before
