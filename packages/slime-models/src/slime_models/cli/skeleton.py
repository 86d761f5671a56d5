"""`slime models new`: the skeleton of a package with a model family, and what transformers' own class says of its weights."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from slime_core.errors import ConfigError, DataError, Problem
from slime_core.plugins.registry import Registry

from slime_models.family.families.dense import KEY_NORM, QKV_BIAS, QUERY_NORM, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily

#: config.json of a tiny model, whose sizes differ so that none is mistaken for another.
TINY: Mapping[str, Any] = {
    "vocab_size": 251, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Template -> where it goes. `$package` and the like are filled in there, too.
_FILES = {
    "pyproject.txt": "pyproject.toml",
    "readme.txt": "README.md",
    "init.txt": "src/$package/__init__.py",
    "typed.txt": "src/$package/py.typed",
    "family.txt": "src/$package/family.py",
    "test_family.txt": "tests/test_family.py",
}
_LAYERS = {"layers.txt": "src/$package/layers.py"}


#: Fields of every config.json of transformers that say nothing of what a model computes when it generates or is trained.
_OF_NO_MODEL = frozenset(
    (
        "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
        "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id",
        "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
        "transformers_version", "use_cache",
    )
)  # fmt: skip


class _Recorded(dict[str, Any]):
    """A config.json that knows which of its fields were asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._asked: set[str] = set()

    def get(self, field: str, default: Any = None) -> Any:
        """Return the field; see `dict.get`."""
        self._asked.add(field)
        return super().get(field, default)

    def unread(self) -> list[str]:
        """Return the fields that have a value and were not asked for."""
        return [field for field, value in self.items() if field not in self._asked and value is not None]


@dataclass(frozen=True)
class _Class:
    """What transformers' class makes of the tiny config.json."""

    qkv_bias: bool
    qk_layernorm: bool
    tensors: frozenset[str]
    """Hugging Face names of its weights."""
    config: Mapping[str, Any]
    """The fields of its config.json that a class of its own has, with what they are when a file does not say."""


def new_family(argv: list[str], registry: Registry) -> str:
    """Write the package, and return what to do next.

    Raises:
        ConfigError: NAME is no model_type, is a family already, or transformers has no class for it; or the folder exists.
    """
    parser = argparse.ArgumentParser(prog="slime models new", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="model_type in config.json, exactly")
    parser.add_argument("--layers", action="store_true", help="the family brings layers to the trainer")
    parser.add_argument(
        "--into", type=Path, default=Path(), help="folder in which the package's folder is made"
    )
    options = parser.parse_args(argv)
    name = str(options.name)
    _check_name(name, registry)
    found = _class_of(name)
    folder = options.into / f"slime-{name.replace('_', '-')}-family"
    if folder.exists():
        raise ConfigError([Problem("slime models new", f"{folder}, which exists", "a folder that does not")])
    _write(folder, _words(name, found, with_layers=options.layers), with_layers=options.layers)
    return "\n".join(
        (
            f"wrote {folder}",
            *_differences(name, found),
            "next:",
            f"  uv pip install -e {folder}",
            f"  pytest {folder}/tests        what is still missing, by name",
            "  docs/add-a-model.md walks through an example",
        )
    )


def _check_name(name: str, registry: Registry) -> None:
    where = "slime models new"
    if not _NAME.fullmatch(name):
        wanted = "a model_type of config.json: small letters, digits and underscores"
        raise ConfigError([Problem(where, repr(name), wanted)])
    homes = [plugin.distribution for plugin in registry.plugins("slime.models") if plugin.name == name]
    if homes:
        wanted = "a model_type that is no family yet"
        raise ConfigError([Problem(where, f"{name}, which is a family of {homes[0]}", wanted)])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "install a release of transformers that has it"
        wanted = "a model_type of a causal language model of transformers, which the tests compare with"
        raise ConfigError([Problem(where, name, wanted, hint)])


def _class_of(name: str) -> _Class:
    """Return what transformers' class makes of the tiny config.json; nothing is allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(name, **TINY)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
    except Exception as error:  # whatever a class of transformers says of sizes that it does not take
        why = f"transformers makes no model of the tiny sizes: {type(error).__name__}: {error}"
        raise ConfigError([Problem("slime models new", name, "a decoder of text alone", why)]) from error
    tensors = frozenset(model.state_dict())
    return _Class(
        any(tensor.endswith("self_attn.q_proj.bias") for tensor in tensors),
        any(tensor.endswith("self_attn.q_norm.weight") for tensor in tensors),
        tensors,
        {field: value for field, value in config.to_dict().items() if field not in _OF_NO_MODEL},
    )


def _differences(name: str, found: _Class) -> list[str]:
    """Return lines that say which tensors of transformers' class the skeleton's rules lack, and which it does not have."""
    config = _Recorded(found.config)
    biases, norms = [QKV_BIAS] * found.qkv_bias, [QUERY_NORM, KEY_NORM] * found.qk_layernorm
    try:
        architecture = dense_architecture(
            config, model_type=name, qkv_bias=found.qkv_bias, qk_layernorm=found.qk_layernorm
        )
    except DataError as error:
        return [f"its config.json is not read yet: {error}"]
    family = ModelFamily(
        model_type=name, rules=dense_rules(*biases, *norms), architecture=lambda _: architecture
    )
    known = family.hf_shapes(architecture).keys()
    return [
        *_some("tensors of transformers' model that no rule is for", found.tensors - known),
        *_some("rules for tensors that it does not have", known - found.tensors),
        *_some(
            "fields of its config.json that nothing reads: read or refuse what changes the model",
            config.unread(),
        ),
    ]


def _some(what: str, names: Collection[str]) -> list[str]:
    """Return a line with the names without numbers of layers; none where there are none."""
    shown = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return [f"{what}: {', '.join(shown)}"] if shown else []


def _words(name: str, found: _Class, *, with_layers: bool) -> dict[str, str]:
    """Return what the templates leave open."""
    package = f"slime_{name}_family"
    rules = ["dense.QKV_BIAS"] * found.qkv_bias + ["dense.QUERY_NORM", "dense.KEY_NORM"] * found.qk_layernorm
    options = ", qkv_bias=True" * found.qkv_bias + ", qk_layernorm=True" * found.qk_layernorm
    tiny = {"model_type": name, **TINY}
    return {
        "name": name,
        "constant": name.upper(),
        "package": package,
        "distribution": package.replace("_", "-"),
        "attention_rules": ", ".join(rules),
        "options": options,
        "layers": f'    layers="{package}.layers:LAYERS",\n' if with_layers else "",
        "needs_megatron": '    "slime-megatron>=0.1,<0.2",\n' if with_layers else "",
        "tiny": "\n".join(f"    {field!r}: {value!r},".replace("'", '"') for field, value in tiny.items()),
    }


def _write(folder: Path, words: Mapping[str, str], *, with_layers: bool) -> None:
    """Write all files, or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    templates = files("slime_models.cli") / "templates"
    with tempfile.TemporaryDirectory(dir=folder.parent) as empty:
        for template, place in (_FILES | _LAYERS if with_layers else _FILES).items():
            path = Path(empty) / Template(place).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
        shutil.copytree(empty, folder)
