"""`slime models new`: what it writes keeps the promises of a family as it is, and what it refuses."""

from __future__ import annotations

import importlib.util
import tomllib

import pytest
from slime_core.errors import ConfigError
from slime_models.cli.models import main
from slime_models.testing import check_family


def family_of(folder, name):
    """Import the module of the family that a skeleton has, without installing it."""
    (path,) = folder.glob("src/*/family.py")
    spec = importlib.util.spec_from_file_location(f"skeleton_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name.upper())


@pytest.mark.parametrize(
    ("name", "options"),
    [("mistral", []), ("seed_oss", ["--layers"])],  # the second has biases
)
def test_a_skeleton_reads_the_weights_of_transformers_class(name, options, tmp_path, capsys):
    assert main(["new", name, "--into", str(tmp_path / "a/b"), *options]) == 0
    folder = tmp_path / "a/b" / f"slime-{name.replace('_', '-')}-family"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    package = f"slime_{name}_family"
    assert project["project"]["entry-points"]["slime.models"] == {name: f"{package}.family:{name.upper()}"}
    assert (folder / f"src/{package}/layers.py").exists() == bool(options)
    assert any("slime-megatron" in need for need in project["project"]["dependencies"]) == bool(options)
    tests = (folder / "tests/test_family.py").read_text()
    scope: dict = {}
    exec(tests[tests.index("TINY = ") : tests.index("\n}\n") + 2], scope)
    family = family_of(folder, name)
    check_family(family, scope["TINY"])
    assert family.architecture(scope["TINY"]).qkv_bias == (name == "seed_oss")
    assert family.layers == (f"{package}.layers:LAYERS" if options else None)
    assert f"wrote {folder}" in capsys.readouterr().out


def test_fields_that_change_the_model_and_that_nothing_reads_are_named(tmp_path, capsys):
    """Granite scales embeddings, scores, residuals and logits; its weights are those of a llama."""
    main(["new", "granite", "--into", str(tmp_path)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nothing reads" in line]
    assert line.endswith(": attention_multiplier, embedding_multiplier, logits_scaling, residual_multiplier")


def test_tensors_without_a_rule_are_named(tmp_path, capsys):
    """OLMo 2 has norms after attention and MLP, none before, and norms of all queries together."""
    main(["new", "olmo2", "--into", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    (missing,) = [line for line in lines if "no rule is for" in line]
    assert missing.endswith(": model.layers.*.post_feedforward_layernorm.weight")
    (unknown,) = [line for line in lines if "does not have" in line]
    assert unknown.endswith(": model.layers.*.input_layernorm.weight")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "qwen3",
            "found qwen3, which is a family of slime-models; wanted a model_type that is no family yet",
        ),
        ("Mistral", "found 'Mistral'; wanted a model_type of config.json: small letters"),
        (
            "mistrall",
            "found mistrall; wanted a model_type of a causal language model.*did you mean 'mistral'",
        ),
        ("../x", "found '../x'; wanted a model_type"),
    ],
)
def test_what_cannot_be_a_family_is_refused_and_nothing_is_written(name, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main(["new", name, "--into", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = tmp_path / "slime-mistral-family"
    folder.mkdir()
    with pytest.raises(
        ConfigError, match="slime-mistral-family, which exists; wanted a folder that does not"
    ):
        main(["new", "mistral", "--into", str(tmp_path)])
    assert list(folder.iterdir()) == []
