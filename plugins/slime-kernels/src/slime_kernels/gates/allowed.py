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
#: Modules of triton.language by which names of it may be named as well: `tl.math.exp`.
LANGUAGE_MODULES = ("triton.language.math", "triton.language.random", "triton.language.standard")
#: What is a module, and so holds more than it was made for: its names may be used, and never it itself as a value.
VALUELESS = frozenset(
    [
        *MODULES,
        *LIBDEVICE,
        *("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.autograd", "torch.cuda"),
        *("triton", "triton.language", *LANGUAGE_MODULES),
    ]
)
_TYPES = """PropagateNan float16 float32 float64 bfloat16 float8e4b15 float8e4nv float8e4b8 float8e5 float8e5b16 int1 int8 int16
int32 int64 uint8 uint16 uint32 uint64 void pi32_t"""
_IN_LANGUAGE = """TRITON_MAX_TENSOR_NUMEL abs add advance arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas
atomic_max atomic_min atomic_or atomic_xchg atomic_xor bitonic_merge block_type broadcast broadcast_to cast cat cdiv ceil clamp
condition const constexpr constexpr_type cos cumprod cumsum debug_barrier device_assert device_print div_rn dot dot_scaled dtype erf
exp exp2 expand_dims expect_zero fdiv flip floor fma full gather histogram interleave join load load_tensor_descriptor log log2
make_block_ptr make_tensor_descriptor map_elementwise max max_constancy max_contiguous maximum min minimum mul multiple_of
num_programs pair_uniform_to_normal permute philox philox_impl pointer_type program_id rand rand4x randint randint4x randn randn4x
range ravel reduce reduce_or reshape rsqrt sigmoid sin slice softmax sort split sqrt sqrt_rn squeeze static_assert static_print
static_range store store_tensor_descriptor sub sum swizzle2d tensor tensor_descriptor tensor_descriptor_type to_tensor topk trans
tuple tuple_type uint_to_uniform_float umulhi unsqueeze view where xor_sum zeros zeros_like"""
#: Types of triton.language, and what else of it has attributes that kernels read: `tl.float32.primitive_bitwidth`.
LANGUAGE_TYPES = frozenset(_TYPES.split())
#: Names of triton.language that kernels may use, of the versions from 3.2 to 3.8: neither modules, nor the inside of the compiler, nor code
#: of other languages.
LANGUAGE = LANGUAGE_TYPES | frozenset(_IN_LANGUAGE.split())
#: Names of triton.language that are refused, and said so; all that are in neither list are said to be none that a kernel may use.
NOT_IN_LANGUAGE = frozenset(
    [
        *("inline_asm_elementwise", "core", "semantic", "extra", "tl", "jit", "wraps"),
        *("target_info", "builtin", "tensor_descriptor_base", "str_to_ty", "math_impl", "dispatch"),
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
#: Names of modules that hold what a candidate has no business with: modules hold modules, and so lead to these.
_NAMES_OF_MODULES = frozenset(
    [
        "ast",
        "asyncio",
        "atexit",
        "builtins",
        "codeop",
        "collections",
        "concurrent",
        "contextlib",
        "copyreg",
        "ctypes",
        "dataclasses",
        "faulthandler",
        "functools",
        "gc",
        "hashlib",
        "importlib",
        "inspect",
        "io",
        "itertools",
        "linecache",
        "logging",
        "marshal",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "pickle",
        "pkgutil",
        "posix",
        "posixpath",
        "pty",
        "resource",
        "runpy",
        "shutil",
        "site",
        "socket",
        "subprocess",
        "sys",
        "sysconfig",
        "tempfile",
        "textwrap",
        "threading",
        "traceback",
        "typing",
        "warnings",
        "weakref",
        "zipfile",
        "zipimport",
        "core",
        "driver",
        "hub",
        "interpreter",
        "knobs",
        "libdevice",
        "np",
        "numpy",
        "runtime",
        "semantic",
        "target_info",
        "tl",
        "torch",
        "triton",
    ]
)
#: Attributes of any object by which code, modules, other memory or other launches would be reached.
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
        # Of errors, what lacked an attribute; of kernels, the names of their module, and the compiler; of interpreted numbers, NumPy's.
        *("obj", "get_capture_scope", "used_global_vals", "device_caches", "rewriter", "str_to_ty", "handle"),
        *("import_module", *_NAMES_OF_MODULES),
        *(
            BUILTINS - {"eval", "type", "input", "id", "dir"}
        ),  # which modules, tensors, functions of autograd and settings have
    ]
)
#: Methods of modules that keep what they are given; all others of such names call it, in whatever the evaluator does later.
REGISTERING = frozenset({"register_buffer", "register_parameter", "register_module"})
