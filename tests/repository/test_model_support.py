"""The table of model families says what the tests prove."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

from slime_core.plugins.registry import Registry
from slime_models.family.support import proven, support_of


def test_the_table_is_what_the_marked_tests_prove(root, proofs, tmp_path):
    """Asked of this session where it has all of these tests, else of one that collects them."""
    spec = importlib.util.spec_from_file_location("generate_docs", root / "scripts/generate_docs.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    found, files = proofs
    wanted = generator.proving_files()
    if not files.issuperset(wanted):
        out = tmp_path / "proofs.json"
        words = ["--collect-only", "-q", "-p", "no:cacheprovider", "--proofs", str(out), *map(str, wanted)]
        subprocess.run([sys.executable, "-m", "pytest", *words], check=True, cwd=root, capture_output=True)
        found = json.loads(out.read_text())
    assert {family: frozenset(features) for family, features in found.items()} == proven(), (
        "stale; run scripts/generate_docs.py"
    )


def test_each_family_of_the_repository_trains_and_converts():
    registry = Registry()
    for plugin in registry.plugins("slime.models"):
        support = support_of(registry.resolve("slime.models", plugin.name))
        assert {support[feature].answer for feature in ("train", "convert", "lora")} == {"yes"}, plugin.name
