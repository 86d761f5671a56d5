"""The static gate, by the corpus and by what only it sees; nothing runs here."""

from __future__ import annotations

import pytest
from slime_kernels.gates.findings import Finding
from slime_kernels.gates.portable import portable
from slime_kernels.gates.static import check, parse

from ..kernel_corpus import KERNEL_IMPORTS, RELU, candidates, written

GOOD = KERNEL_IMPORTS + RELU + "class ModelNew(nn.Module):\n    def forward(self, x):\n        {}\n"


def findings(source):
    tree = parse(source)
    return [tree] if isinstance(tree, Finding) else check(tree)


def rules(line):
    return {one.rule for one in findings(GOOD.format(line))}


def test_the_right_kernels_of_the_written_problems_pass():
    assert {name: findings(kernel) for name, (_, kernel, _) in written().items() if findings(kernel)} == {}


def test_the_honest_lookalikes_pass():
    assert {name: findings(one) for name, (_, one) in candidates("honest").items() if findings(one)} == {}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("return torch.softmax(x, 0)", "delegation"),
        ("return nn.functional.relu(x)", "delegation"),
        ("return x @ x", "delegation"),
        ("return eval('x')", "forbidden"),
        ("return getattr(x, 'relu')()", "forbidden"),
        ("return x.__class__", "forbidden"),
        ("return '{0._x}{0.__class__}'.format(x)", "forbidden"),
        ("return relu_kernel.fn(x, x, 1, 1)", "forbidden"),
        ("return torch.cuda.Stream()", "forbidden"),
        ("return torch._C", "forbidden"),
        ("torch.relu = None", "forbidden"),
        ("torch = x", None),
        ("return type('T', (torch.Tensor,), {})", "forbidden"),
        ("import os", "import"),
        ("from os import path", "import"),
        ("from . import x", "import"),
        ("return [torch][0].relu(x)", "forbidden"),
        ("return tl.inline_asm_elementwise", "forbidden"),
        ("return triton.testing.do_bench", "forbidden"),
    ],
)
def test_a_line_breaks_the_rule(line, rule):
    assert rules(line) == set() if rule is None else rule in rules(line)


def test_a_syntax_error_is_a_finding_with_its_line():
    assert findings("def f(:\n") == [Finding("syntax", 1, "invalid syntax")]


@pytest.mark.parametrize("source", ["\0", "x" * 200_000, "(" * 5000 + ")" * 5000, "\ud800"])
def test_what_is_no_source_is_a_finding(source):
    assert findings(source)[0].rule in ("syntax", "structure")


def test_without_entry_kernel_and_launch_each_is_said():
    assert [one.text for one in findings("x = 1\n")] == [
        "has no class ModelNew",
        "has no function under @triton.jit",
    ]
    unused = (
        KERNEL_IMPORTS + "@triton.jit\ndef k(x):\n    tl.store(x, 1)\nclass ModelNew(nn.Module):\n    pass\n"
    )
    assert [one.text for one in findings(unused)] == [
        "launches none of its kernels: kernel[grid](...)",
        "ModelNew has no forward",
    ]


def test_a_candidate_for_cuda_becomes_one_for_the_cpu():
    source = "y = torch.empty(3, device='cuda:0')\nassert y.is_cuda\ny = y.cuda()\nn = torch.cuda.get_device_properties(0).multi_processor_count\n"
    expected = "y = torch.empty(3, device='cpu')\nassert True\ny = y\nn = 108"
    assert portable(parse(source)) == expected
