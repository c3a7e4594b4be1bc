"""Kernels and operators are put into the group that they belong to, and every microsecond is counted once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile, record_function

from samopt.profiling.kernels import GROUPS, RULES, Kernel, by_group, group_of, kernels_of

ATEN = "void at::native::"
NAMES = {
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 12>(float*, int)",
        *("window_attention", "hopper_window_attention", "global_attention", "position_terms"),
        "token_attention_terms",
        *("triton_per_fused__softmax_add_4", "triton_tem_fused_flex_attention_0"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_softmax", "samopt::attention"),
        "samopt::image_to_token",
    ],
    "matmul": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_bias_TNT",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_execute_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasSplitKParams)",
        *("triton_tem_fused_addmm_gelu_7", "scaled_matmul", "mkl::_mkl_linear"),
        *("aten::addmm", "aten::addmm_", "aten::bmm", "aten::mm", "aten::einsum"),
        *("samopt::int8_linear", "samopt::float8_gelu", "samopt::linear"),
    ],
    "convolution": [
        "void implicit_convolve_sgemm<float, float, 1024>(int)",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",
        *("aten::mkldnn_convolution", "aten::slow_conv_transpose2d", "mkldnn::_convolution_pointwise"),
    ],
    "normalisation": [
        f"{ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "graph_1_cpp_fused_clone_constant_pad_nd_native_layer_norm_permute_view_0",
        *("row_norm", "triton_red_fused_add_native_layer_norm_2"),
        *("aten::native_layer_norm", "samopt::add_layer_norm"),
    ],
    "elementwise": [
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
        *("residual_sum", "row_quantize", "samopt::quantize_rows", "triton_poi_fused_gelu_view_5"),
        "triton_poi_fused_addmm_1",  # what comes after a product, not the product
        "graph_3_cpp_fused__to_copy_add_convolution_div_mean_mul_pow_sqrt_sub_unsqueeze_0",
        *("aten::add_", "aten::gelu", "aten::masked_fill_"),
    ],
    "copies": [
        f"{ATEN}elementwise_kernel<128, 2, at::native::gpu_kernel_impl<direct_copy_kernel_cuda(int)> >(int)",
        f"{ATEN}index_elementwise_kernel<128, 4>(int)",
        f"{ATEN}(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<4u>>(float*)",
        *("void cudnn::ops::nchwToNhwcKernel<float, float>(float*)", "triton_poi_fused_clone_permute_view_3"),
        *("Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "triton_poi_fused__to_copy_0"),
        *("aten::copy_", "aten::_to_copy", "aten::index", "aten::_index_put_impl_", "aten::cat"),
        "aten::constant_pad_nd",
    ],
    "other": [
        f"{ATEN}(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int)",
        "## Call CompiledFxGraph fyiauaxfqeksnbbqmgcitlue2psvw6hxcvko ##",
        *("aten::view", "aten::transpose", "aten::expand", "aten::empty"),  # which move nothing
    ],
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in NAMES.items() for name in names])
def test_groups(group: str, name: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (NAMES["attention"][0], NAMES["attention"][0]),
        (NAMES["attention"][1], "flash_fwd_kernel"),
        (NAMES["attention"][2], "fmha_cutlassF_f32_aligned_64x64_rf_sm80"),
        (NAMES["attention"][3], "softmax_warp_forward"),
        (NAMES["matmul"][2], "Kernel2 (cutlass_80_tensorop_s1688gemm_128x256)"),
        (NAMES["normalisation"][0], "vectorized_layer_norm_kernel"),
        (NAMES["elementwise"][0], "vectorized_elementwise_kernel (add)"),
        (f"{ATEN}elementwise_kernel<4, at::native::GeluCUDAKernelImpl(int)>(int)", "elementwise_kernel (Gelu)"),
        (f"{ATEN}elementwise_kernel<4, BinaryFunctor<float, MulFunctor<float> >>(int)", "elementwise_kernel (Mul)"),
        (NAMES["copies"][0], "elementwise_kernel (direct_copy)"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("aten::add_", "aten::add_"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert Kernel(name, "other", 0.0, 1).short == short


def test_every_group_has_a_rule_and_every_rule_a_name() -> None:
    assert set(GROUPS) == set(NAMES) == {group for group, _ in RULES} | {"other"}


@dataclass(frozen=True)
class Row:
    """A row of the profiler's table."""

    key: str
    device_type: DeviceType
    self_cpu_time_total: float
    self_device_time_total: float
    count: int = 1
    is_user_annotation: bool = False


def test_on_a_gpu_its_kernels_count_and_nothing_else() -> None:
    rows = [
        Row("aten::addmm", DeviceType.CPU, 70.0, 40.0, 2),
        Row("cudaLaunchKernel", DeviceType.CPU, 9.0, 0.0, 3),
        Row("image encoder", DeviceType.CPU, 9.0, 0.0, is_user_annotation=True),
        Row("image encoder", DeviceType.CUDA, 0.0, 90.0, is_user_annotation=True),
        Row("ProfilerStep#1", DeviceType.CUDA, 0.0, 90.0),
        Row("row_norm", DeviceType.CUDA, 0.0, 10.0, 4),
        Row("nvjet_hsh_128x256", DeviceType.CUDA, 0.0, 40.0, 2),
    ]
    assert kernels_of(rows, cuda=True) == (
        Kernel("nvjet_hsh_128x256", "matmul", 40e-6, 2),
        Kernel("row_norm", "normalisation", 10e-6, 4),
    )
    assert [(kernel.name, kernel.seconds) for kernel in kernels_of(rows, cuda=False)] == [
        ("aten::addmm", 70e-6),
        ("cudaLaunchKernel", 9e-6),
    ]


def test_groups_add_up() -> None:
    kernels = (
        Kernel("aten::add", "elementwise", 1.0, 3),
        Kernel("aten::addmm", "matmul", 2.0, 5),
        Kernel("aten::gelu", "elementwise", 5.0, 1),
    )
    matmul, elementwise = by_group(kernels)
    assert (matmul.group, matmul.seconds, matmul.share, matmul.calls) == ("matmul", 2.0, 0.25, 5)
    assert (elementwise.group, elementwise.seconds, elementwise.share, elementwise.calls) == (
        "elementwise",
        6.0,
        0.75,
        4,
    )
    assert elementwise.names == ("aten::gelu", "aten::add")
    assert by_group(()) == ()


def test_operators_of_a_cpu_by_the_time_that_is_their_own() -> None:
    layer, x = torch.nn.Linear(64, 64), torch.ones(32, 64)
    with torch.no_grad(), profile() as found, record_function("mine"):
        layer(x).softmax(-1).clone()
    kernels = {kernel.name: kernel for kernel in kernels_of(found.key_averages(), cuda=False)}
    assert {"aten::addmm", "aten::_softmax", "aten::copy_"} <= set(kernels)
    assert "mine" not in kernels
    (linear,) = (event for event in found.key_averages() if event.key == "aten::linear")
    assert 0 <= kernels["aten::linear"].seconds < linear.cpu_time_total / 1e6
