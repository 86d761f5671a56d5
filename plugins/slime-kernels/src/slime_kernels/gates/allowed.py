"""What a candidate may name: modules, and names of them. Everything else is refused."""

from __future__ import annotations

_TYPING = frozenset(
    [
        "Any",
        "Callable",
        "Dict",
        "Iterable",
        "List",
        "Literal",
        "NamedTuple",
        "Optional",
        "Sequence",
        "Tuple",
        "Union",
    ]
)
#: Module -> names of it that may be used; None for all that have no leading underscore.
MODULES: dict[str, frozenset[str] | None] = {
    "math": None,
    "typing": _TYPING,
    "collections.abc": frozenset({"Callable", "Iterable", "Sequence"}),
    "dataclasses": frozenset({"dataclass", "field"}),
    "functools": frozenset({"cache", "lru_cache", "partial", "reduce"}),
    "itertools": frozenset({"chain", "product", "accumulate"}),
    "__future__": frozenset({"annotations"}),
}

_DTYPES = """float16 float32 float64 bfloat16 half float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 int long
short bool float8_e4m3fn float8_e5m2"""
_MAKING = """empty empty_like empty_strided zeros zeros_like ones ones_like full full_like arange tensor as_tensor
scalar_tensor"""
_MOVING = """reshape transpose permute flatten unsqueeze squeeze broadcast_shapes broadcast_tensors cat concat stack split chunk
unbind movedim swapaxes t numel"""
_ASKING = """is_tensor is_floating_point is_contiguous finfo iinfo promote_types result_type dtype device Size Tensor
memory_format contiguous_format channels_last strided get_default_dtype"""
#: Names of torch that host code may use anywhere: those that make, view or describe tensors.
TORCH = frozenset(
    f"{_DTYPES} {_MAKING} {_MOVING} {_ASKING} no_grad inference_mode nn autograd cuda pi inf nan e".split()
)
#: Names of torch that make weights, in constructors alone.
TORCH_IN_CONSTRUCTOR = TORCH | frozenset(
    ["randn", "rand", "randn_like", "rand_like", "randint", "normal", "eye", "linspace", "sqrt", "Generator"]
)
#: `torch.cuda.NAME`; each is put for a CPU by `portable`.
TORCH_CUDA = frozenset(["current_device", "device", "is_available", "device_count", "get_device_properties"])
#: `torch.nn.NAME` outside of constructors.
TORCH_NN = frozenset({"Module", "Parameter"})
TRITON = frozenset(
    ["jit", "autotune", "heuristics", "Config", "cdiv", "next_power_of_2", "language", "constexpr_function"]
)
#: Modules of functions on numbers that Triton takes from the makers of GPUs.
LIBDEVICE = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")
#: What is a module, and so holds more than it was made for: its names may be used, and never it itself as a value.
VALUELESS = frozenset(
    [
        *MODULES,
        *LIBDEVICE,
        *("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.autograd", "torch.cuda"),
        *(
            "triton",
            "triton.language",
            "triton.language.math",
            "triton.language.random",
            "triton.language.standard",
        ),
    ]
)
#: Names of triton.language that are refused: code of other languages, and the inside of the compiler.
NOT_IN_LANGUAGE = frozenset(
    [
        "inline_asm_elementwise",
        "core",
        "semantic",
        "extra",
        "math_impl",
        "dispatch",
        "target_info",
        "builtin",
        "tensor_descriptor_base",
    ]
)
#: Builtins that reach what a candidate has no business with.
BUILTINS = frozenset(
    [
        "eval",
        "exec",
        "compile",
        "open",
        "input",
        "globals",
        "locals",
        "vars",
        "dir",
        "getattr",
        "setattr",
        "delattr",
        "breakpoint",
        "memoryview",
        "help",
        "exit",
        "quit",
        "id",
        "type",
        "__import__",
        "__builtins__",
        "__build_class__",
        "__loader__",
        "__spec__",
    ]
)
#: Special methods that a class of a candidate may define.
METHODS = frozenset({"__init__", "__call__", "__repr__", "__post_init__"})
#: Classes of torch that are objects themselves, which would be changed for all: they are called, derived from, asked for and annotated.
CLASSES = frozenset({"torch.Tensor", "torch.nn.Module", "torch.nn.Parameter", "torch.autograd.Function"})
BASES = frozenset(
    [
        "nn.Module",
        "torch.nn.Module",
        "object",
        "torch.autograd.Function",
        "autograd.Function",
        "Function",
        "NamedTuple",
        "Module",
    ]
)
#: Parts of torch that are no computation: said so, whatever else they are.
TORCH_REFUSED = frozenset(
    [
        "ops",
        "compile",
        "jit",
        "library",
        "utils",
        "overrides",
        "multiprocessing",
        "load",
        "save",
        "hub",
        "fx",
        "backends",
        "set_default_dtype",
        "manual_seed",
        "set_default_device",
        "get_rng_state",
        "set_rng_state",
        "classes",
        "package",
        "profiler",
    ]
)
#: Attributes of any object by which code, other memory or other launches would be reached.
ATTRIBUTES_REFUSED = frozenset(
    [
        *(
            "data_ptr",
            "untyped_storage",
            "storage",
            "set_",
            "share_memory_",
            "as_subclass",
            "apply_",
            "map_",
            "map2_",
        ),
        *("numpy", "tolist", "run", "fn", "src", "warmup", "add_pre_run_hook", "pre_run_hooks", "cache_hook"),
        *(
            "compile",
            "format",
            "format_map",
            "f_globals",
            "f_back",
            "f_locals",
            "f_builtins",
            "f_code",
            "f_trace",
        ),
        *(
            "gi_frame",
            "gi_code",
            "cr_frame",
            "cr_code",
            "ag_frame",
            "ag_code",
            "tb_frame",
            "tb_next",
            "func_globals",
        ),
        *("mro", "fget", "fset", "fdel"),
    ]
)
#: Methods of modules that keep what they are given; all others of such names call it, in whatever the evaluator does later.
REGISTERING = frozenset({"register_buffer", "register_parameter", "register_module"})
