"""Every implementation of attention by name is the same function, is the one that its name says, or
says why not.

Shape suffixes as in labkit.kernels.attention: B batch, H heads, S length, D head dimension.
"""

import itertools
import math
import subprocess
import sys
import types

import pytest
import torch
from torch import Tensor

from labkit.kernels import attention as module
from labkit.kernels import flash_attention as labkit_flash
from labkit.kernels.attention import IMPLS, SDPA_BACKENDS, attention, unavailable_reason, what_runs
from labkit.kernels.reference import attention_reference

SHAPES = {
    "even": ((2, 3, 64, 16), 64),
    "odd": ((1, 2, 77, 24), 77),
    "one row": ((2, 1, 1, 16), 1),
    "no heads": ((3, 50, 16), 50),
    "fewer queries": ((1, 2, 30, 16), 47),
}


def draw(shape: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Returns q, k, v (with gradients) and the gradient of the output."""
    q_shape, num_keys = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    k_shape = (*q_shape[:-2], num_keys, q_shape[-1])
    tensors = [
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in (q_shape, k_shape, k_shape, q_shape)
    ]
    *leaves, grad_out = (x.to(dtype).to(device) for x in tensors)
    return [*(x.requires_grad_() for x in leaves), grad_out]


def results(function, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    out = function(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return {
        name: x.detach().double().cpu()
        for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)
    }


def eager(dtype: torch.dtype, tensors: list[Tensor], causal: bool) -> dict[str, Tensor]:
    *leaves, grad_out = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    return results(lambda q, k, v: attention_reference(q, k, v, causal=causal), *leaves, grad_out)


def check_errors(
    impl: str, shape: str, dtype: torch.dtype, causal: bool, device: str = "cpu"
) -> None:
    """Asserts errors against fp64 of at most 2 (output) or 3 (gradients) times eager's and one
    rounding.

    On a GPU as `judge` does, with those of a sum in any order: SDPA's products there are three of
    TF32 each. One product of TF32 is held to eager's errors in fp16, which has as many bits of
    mantissa.
    """
    tensors = draw(shape, dtype, device)
    got = results(lambda q, k, v: attention(q, k, v, causal=causal, impl=impl), *tensors)
    held_to = torch.float16 if impl == "triton_tf32" else dtype
    exact, of_eager = eager(torch.float64, tensors, causal), eager(held_to, tensors, causal)
    num_terms = tensors[1].shape[-2] if device == "cuda" else 0
    rounding = (torch.finfo(held_to).eps + num_terms**0.5 * torch.finfo(torch.float32).eps) / 2
    for name, reference in exact.items():
        # P∘dP and P∘D are rounded apart, and with one key their difference is exactly zero.
        largest = max(reference.abs().max().item(), exact["dv"].abs().max().item())
        error, allowed = ((x[name] - reference).abs().max().item() for x in (got, of_eager))
        budget = (2 if name == "out" else 3) * (allowed + rounding * largest)
        assert error <= budget, (name, shape, causal)


ON_A_CPU = ("eager", "compiled", "sdpa", "sdpa_math", "sdpa_flash", "tiled", "auto")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("impl", [impl for impl in ON_A_CPU if impl != "compiled"])
def test_every_implementation_is_the_same_function(impl, causal, shape):
    if impl.startswith("sdpa") and causal and shape == "fewer queries":
        pytest.skip("refused, see test_sdpa_is_refused_where_its_mask_is_another")
    check_errors(impl, shape, torch.float32 if causal else torch.bfloat16, causal)


def test_the_compiled_formula_is_the_same_function():
    check_errors("compiled", "odd", torch.float32, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_of_the_gpu_is_the_same_function(impl, dtype):
    reasons = []
    for shape in SHAPES:
        for causal in (False, True):
            q, k, *_ = draw(shape, dtype, "cuda")
            if reason := unavailable_reason(impl, q, k, causal=causal):
                reasons.append(reason)
                continue
            check_errors(impl, shape, dtype, causal, "cuda")
    if len(reasons) == 2 * len(SHAPES):
        pytest.skip(reasons[0])


def test_what_runs_on_a_cpu_is_known_and_the_others_give_a_reason():
    q, k, *_ = draw("even", torch.float32)
    assert (
        tuple(impl for impl in IMPLS if not unavailable_reason(impl, q, k, causal=True)) == ON_A_CPU
    )
    assert all(unavailable_reason(impl, q, k, causal=True) is None for impl in ON_A_CPU)


@pytest.mark.parametrize("function", [attention, unavailable_reason, what_runs])
def test_an_unknown_name_is_refused_with_the_accepted_ones(function):
    q, k, v, _ = draw("even", torch.float32)
    arguments = (q, k, v) if function is attention else ("flash", q, k)
    options = {"impl": "flash"} if function is attention else {}
    with pytest.raises(ValueError, match="unknown attention 'flash'") as caught:
        function(*arguments, causal=True, **options)
    assert all(name in str(caught.value) for name in IMPLS)


@pytest.mark.parametrize("impl", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_that_cannot_run_raises_and_none_stands_in(impl):
    q, k, v, _ = draw("even", torch.float32)
    assert unavailable_reason(impl, q, k, causal=False)
    with pytest.raises(RuntimeError):
        attention(q, k, v, impl=impl)


@pytest.mark.parametrize("impl", ["sdpa", *SDPA_BACKENDS])
def test_sdpa_is_refused_where_its_mask_is_another(impl):
    q, k, v, _ = draw("fewer queries", torch.float32)
    assert "top left" in unavailable_reason(impl, q, k, causal=True)
    with pytest.raises(ValueError, match="30 queries and 47 keys"):
        attention(q, k, v, causal=True, impl=impl)
    if impl in ("sdpa", "sdpa_math"):
        assert unavailable_reason(impl, q, k, causal=False) is None


def test_the_reasons_of_a_backend_are_its_own(monkeypatch):
    """PyTorch explains by warnings, among them that the other backends were disabled and where in
    its source.
    """
    texts = [
        "Flash attention kernel not used because: (Triggered internally at /src/sdp.cpp:1.)",
        "Expected query to be bfloat16, got Float (Triggered internally at /src/sdp.cpp:2.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at "
        "/src/sdp.cpp:3.)",
    ]

    def refuse(*_):
        for text in texts:
            module.warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", refuse)
    q, k, *_ = draw("even", torch.float32)
    assert (
        unavailable_reason("sdpa_flash", q, k, causal=True)
        == "Expected query to be bfloat16, got Float"
    )
    texts.clear()
    assert (
        unavailable_reason("sdpa_flash", q, k, causal=True)
        == "No available kernel. Aborting execution."
    )


def test_what_runs_names_the_choice():
    q, k, *_ = draw("even", torch.float32)
    assert what_runs("auto", q, k, causal=True) == "tiled"
    assert what_runs("sdpa", q, k, causal=True) == "sdpa_flash"
    assert what_runs("sdpa", *draw("no heads", torch.float32)[:2], causal=True) == "sdpa_flash"
    assert what_runs("eager", q, k, causal=True) == "eager"


def test_an_implementation_that_another_stands_in_for_is_not_available(monkeypatch):
    q, k, *_ = draw("even", torch.float32)
    monkeypatch.setattr(labkit_flash, "resolve_impl", lambda *_: "tiled")
    assert "runs 'tiled' in place of 'triton'" in unavailable_reason("triton", q, k, causal=True)
    assert unavailable_reason("auto", q, k, causal=True) is None


def test_a_head_dimension_beyond_ours_is_a_reason():
    q = torch.empty(1, 1, 8, 264)
    assert "up to 256; got 264" in unavailable_reason("auto", q, q, causal=True)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(6, 6), (4, 7), (7, 4)])
def test_the_block_mask_is_aligned_to_the_bottom_right(num_queries, num_keys):
    mask = module._causal_block_mask(num_queries, num_keys, torch.device("cpu"))
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
    seen = mask.mask_mod(0, 0, query, key)
    assert torch.equal(seen, torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool())
    assert module._causal_block_mask(num_queries, num_keys, torch.device("cpu")) is mask


def test_no_rival_is_imported_before_it_is_asked_for():
    code = (
        "import sys, torch\n"
        "from labkit.kernels.attention import IMPLS, unavailable_reason\n"
        "q = torch.empty(1, 1, 8, 16)\n"
        "for impl in IMPLS: unavailable_reason(impl, q, q, causal=True)\n"
        "names = ('xformers', 'flash_attn_interface', 'flash_attn_3', "
        "'torch.nn.attention.flex_attention')\n"
        "print([name for name in names[:3] if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.fixture
def fresh_fa3():
    module.load_fa3.cache_clear()
    yield
    module.load_fa3.cache_clear()


def test_the_library_is_found_without_importing_its_package(tmp_path, monkeypatch, fresh_fa3):
    package = tmp_path / "xformers"
    (package / "flash_attn_3").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('xformers was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module._xformers_library() is None
    library = package / "flash_attn_3" / "_C.so"
    library.write_bytes(b"no library")
    assert module._xformers_library() == library
    reason = module.load_fa3()
    assert reason.startswith("installed, but does not load: ") and "/" not in reason
    assert "xformers" not in sys.modules


def test_without_it_the_reason_names_both_places(monkeypatch, fresh_fa3):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    assert (
        module.load_fa3()
        == "not installed: neither flash_attn_interface nor xformers with flash_attn_3/_C.so"
    )
    with pytest.raises(ValueError, match="impl 'fa3' cannot run: not installed"):
        attention(*draw("even", torch.float32)[:3], impl="fa3")


def formula(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, causal: bool) -> Tensor:
    return attention_reference(
        *(x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD)), causal=causal
    ).transpose(1, 2)


def packed_of(lengths: list[int]) -> dict:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    values = {"cu_seqlens": starts, "max_seqlen": max(lengths)}
    return {f"{name}_{side}": value for name, value in values.items() for side in "qk"}


@pytest.mark.parametrize("returns_lse", [False, True])
@pytest.mark.parametrize("impl", module.FA3)
def test_the_official_package_is_called_with_heads_inside_the_rows(
    monkeypatch, fresh_fa3, returns_lse, impl
):
    calls = []

    def flash_attn_func(q_BSHD, k_BSHD, v_BSHD, causal, deterministic):
        calls.append((tuple(q_BSHD.shape), causal, deterministic))
        out = formula(q_BSHD, k_BSHD, v_BSHD, causal)
        return (out, None) if returns_lse else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, deterministic
    ):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == 3
        return flash_attn_func(*(x[None] for x in (q, k, v)), causal, deterministic)

    fake = types.ModuleType("flash_attn_interface")
    fake.flash_attn_func, fake.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    fake.__spec__ = types.SimpleNamespace(name="flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake)
    check_errors(impl, "odd", torch.float32, causal=True)
    module.load_fa3()(*torch.randn(3, 3, 1, 8), False, True, packed_of([3]))
    assert calls == [
        ((1, 77, 2, 24), True, impl == "fa3_deterministic"),
        ((1, 3, 1, 8), False, True),
    ]


# The schemas of the library in xformers 0.0.34.
FORWARD_SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = "
    "None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? "
    "cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k "
    "= None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,Tensor? "
    "rotary_cos = None,"
    "Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? "
    "k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int "
    "window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,bool "
    "is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "bwd(Tensor dout,Tensor q,Tensor k,Tensor v,Tensor out,Tensor softmax_lse,Tensor(dq!)? dq = "
    "None,"
    "Tensor(dk!)? dk = None,Tensor(dv!)? dv = None,Tensor? cu_seqlens_q = None,Tensor? "
    "cu_seqlens_k = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k "
    "= None,"
    "float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,int "
    "window_size_right = -1,"
    "float softcap = 0.0,bool deterministic = False,int sm_margin = 0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@pytest.fixture(scope="module")
def library():
    """Operators of the library's names and schemas, computed by the formula on a CPU; strict about
    their inputs.

    Gives the flags of every backward pass.
    """
    flags = []
    namespace = torch.library.Library("flash_attn_3", "DEF")
    namespace.define(FORWARD_SCHEMA)
    namespace.define(BACKWARD_SCHEMA)

    def by_name(operator, given, named):
        schema = getattr(torch.ops.flash_attn_3, operator).default._schema
        return (
            dict(zip((argument.name for argument in schema.arguments), given, strict=False)) | named
        )

    def computed(q, k, v, given):
        causal, starts = given.get("is_causal", False), given.get("cu_seqlens_q")
        if starts is None:
            return formula(q, k, v, causal)
        assert starts is given["cu_seqlens_k"] and starts.dtype == torch.int32 and q.dim() == 3
        lengths = starts.diff().tolist()
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == max(lengths)
        parts = zip(*(x[None].split(lengths, 1) for x in (q, k, v)), strict=True)
        return torch.cat([formula(*part, causal) for part in parts], 1)[0]

    def forward(q, k, v, *rest, **named):
        assert all(x.stride(-1) == 1 for x in (q, k, v)), "the library takes dense rows only"
        out = computed(q, k, v, by_name("fwd", (q, k, v, *rest), named))
        return (
            out.contiguous(),
            q.new_zeros(q.shape[:-1]).transpose(-1, -2),
            q.new_empty(0),
            q.new_empty(0),
        )

    def backward(dout, q, k, v, out, lse, *rest, **named):
        given = by_name("bwd", (dout, q, k, v, out, lse, *rest), named)
        flags.append(given.get("deterministic", False))
        assert given["softmax_scale"] == 1 / math.sqrt(q.shape[-1]) and dout.stride(-1) == 1
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = computed(*leaves, given)
        return (*torch.autograd.grad(again, leaves, dout), *(q.new_empty(0) for _ in range(5)))

    namespace.impl("fwd", forward, "CPU")
    namespace.impl("bwd", backward, "CPU")
    yield flags
    namespace._destroy()


@pytest.mark.parametrize("shape", ["even", "no heads", "fewer queries"])
@pytest.mark.parametrize("impl", module.FA3)
def test_the_librarys_operators_are_called_by_their_schema(library, monkeypatch, shape, impl):
    monkeypatch.setattr(module, "load_fa3", lambda: module.FlashAttention3Function.apply)
    library.clear()
    check_errors(impl, shape, torch.float32, causal=shape != "even")
    assert set(library) == {impl == "fa3_deterministic"}
    # A transposed input and the expanded gradient of a sum have no dense rows.
    x = torch.randn(2, 3, 16, 40, dtype=torch.float64).transpose(2, 3).requires_grad_()
    (got,) = torch.autograd.grad(attention(x, x, x, causal=True, impl=impl).sum(), x)
    (expected,) = torch.autograd.grad(attention_reference(x, x, x, causal=True).sum(), x)
    assert (got - expected).abs().max() <= 1e-12


def test_the_library_takes_packed_sequences(library):
    """(T, H, D) tensors that share a fused projection, and the sequences' boundaries."""
    lengths = [5, 1, 9]
    qkv = torch.randn(15, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    grad_out = torch.randn(15, 2, 16, dtype=torch.float64)
    out = module.FlashAttention3Function.apply(*qkv.unbind(1), False, False, packed_of(lengths))
    parts = [formula(*part.unsqueeze(0).unbind(2), False)[0] for part in qkv.split(lengths)]
    results = [torch.autograd.grad(x, qkv, grad_out)[0] for x in (out, torch.cat(parts))]
    assert (out - torch.cat(parts)).abs().max() <= 1e-12
    assert (results[0] - results[1]).abs().max() <= 1e-12
