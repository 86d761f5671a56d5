"""The static gate, by the corpus and by what only it sees; nothing runs here."""

from __future__ import annotations

import types
from importlib import import_module

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
        ("[0 for torch in ()]; return torch.hub.sys", "forbidden"),
        ("f = lambda: (torch := 1); return torch.hub.sys", "forbidden"),
        ("return x.map2_(x, x, max)", "forbidden"),
        ("return '{0.gi_frame.f_back}'.format(x)", "forbidden"),
        ("return '{:{0.gi_frame}}'.format(x)", "forbidden"),
        ("text = '{0.gi_frame}'; return text.format(x)", "forbidden"),
        ("return '{x.gi_frame}'.format_map({'x': x})", "forbidden"),
        ("raise ValueError('{} of {n!r:>8}'.format(x, n=1))", None),
        ("return self.net.compile()", "forbidden"),
        ("return self.register_state_dict_post_hook(x)", "forbidden"),
        ("return self.register_buffer('b', x)", None),
        ("return torch.Tensor.detach(x)", "forbidden"),
        ("return [torch.Tensor]", "forbidden"),
        ("assert isinstance(x, (torch.Tensor, nn.Parameter))", None),
        ("return [ModelNew]", "forbidden"),
        ("return ModelNew.forward(x, x)", "forbidden"),
        ("self = x; self.detach = None", "forbidden"),
        ("[0 for self in [x] for self.detach in [x]]", "forbidden"),
        ("del (self.a, x.b)", "forbidden"),
        ("self.a = x", None),
        ("return tl.math.core", "forbidden"),
        ("return tl.standard.jit", "forbidden"),
        ("return tl.extra.cuda.libdevice.core", "forbidden"),
        ("return tl.load.get_capture_scope", "forbidden"),
        ("return tl.math.exp(tl.standard.cdiv(1, 2)) + tl.float32.primitive_bitwidth", None),
        ("return tl.exponential(x)", "name"),
        ("return relu_kernel.get_capture_scope()", "forbidden"),
        ("return x.obj.core", "forbidden"),
        ("return x.eval().type(torch.float16).chunk(2)[0].trace()", None),
        ("return torch.cuda.device.device", "forbidden"),
    ],
)
def test_a_line_breaks_the_rule(line, rule):
    assert rules(line) == set() if rule is None else rule in rules(line)


WAYS = """exec_by_the_builtins_of_a_module_of_triton importlib_of_functional_in_a_constructor
modules_of_torch_by_functional_in_a_constructor module_of_an_error_about_it import_in_the_body_of_a_class
import_that_is_assigned_to_in_its_function module_read_in_a_class_that_binds_its_name_later names_of_the_module_of_a_kernel
code_in_the_name_of_a_type core_of_libdevice"""


@pytest.mark.parametrize("name", WAYS.split())
def test_a_way_to_what_modules_hold_is_refused(name):
    assert findings(candidates("cheats")[name][1]) != []


IN_CONSTRUCTOR = GOOD.format("return x") + "    def __init__(self):\n        self.held = {}\n"


@pytest.mark.parametrize(
    "module",
    [
        *("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.autograd", "torch.cuda"),
        *("triton", "triton.language", "triton.language.math", "triton.language.random"),
        *(
            "triton.language.standard",
            "triton.language.extra.libdevice",
            "triton.language.extra.cuda.libdevice",
        ),
    ],
)
def test_no_module_is_reached_by_a_name_of_another(module):
    names = [name for name, one in vars(import_module(module)).items() if isinstance(one, types.ModuleType)]
    passed = [name for name in names if not findings(IN_CONSTRUCTOR.format(f"{module}.{name}"))]
    assert passed == []


def test_all_that_triton_says_kernels_may_use_passes_but_modules_and_code_of_other_languages():
    from triton import language

    refused = {name for name in language.__all__ if findings(GOOD.format(f"return tl.{name}"))}
    assert refused == {"extra", "inline_asm_elementwise", "math", "target_info"}


def test_a_name_that_triton_lacks_is_a_mistake_and_no_cheat():
    assert [str(one) for one in findings(GOOD.format("return tl.tanh(x)"))] == [
        "name: line 17: uses triton.language.tanh, which is no function or type that kernels may use"
    ]


def test_what_a_nested_function_binds_is_a_module_around_it():
    line = "f = lambda: 0\n        def g():\n            torch = 1\n        return torch.hub.sys"
    assert ["torch.hub.sys" in one.text for one in findings(GOOD.format(line))] == [True]


@pytest.mark.parametrize(
    "code",
    [
        "def put(self, f):\n    self.detach = f\n",
        "put = lambda self, f: [0 for self.detach in [f]]\n",
        "class A:\n    @staticmethod\n    def put(self, f):\n        self.detach = f\n",
        "class A:\n    def put(self, f):\n        self.detach = f\n    raw = [put]\n",
        "class A:\n    def put(self, f):\n        self.detach = f\n    def use(self, raw=put):\n        raw(1, 2)\n",
        "def keep(f):\n    return f\nclass A:\n    @keep\n    def put(self, f):\n        self.detach = f\n",
        "def keep(c):\n    return c\n@keep\nclass A:\n    def put(self, f):\n        self.detach = f\n",
        "class A:\n    def put(self, f):\n        def inner(self):\n            self.detach = f\n        inner(f)\n",
        "class A:\n    def put(self, f):\n        for self in f:\n            self.detach = f\n",
        "class A:\n    def put(self, f):\n        self.detach = f\nA.put(1, 2)\n",
        "class A:\n    def put(self, f):\n        self.detach = f\nB = A\n",
        "class A(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, f):\n        ctx.detach = f\nA().forward(1, 2)\n",
        "class A(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, f):\n        ctx.forward(f, f)\n",
        "def staticmethod(f):\n    return f\n",
        "def f(isinstance):\n    return isinstance(torch.Tensor)\n",
    ],
)
def test_a_method_that_writes_to_its_object_gets_no_other(code):
    assert {one.rule for one in findings(GOOD.format("return x") + code)} == {"forbidden"}


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
