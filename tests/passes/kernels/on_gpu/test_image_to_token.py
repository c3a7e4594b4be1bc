"""The step from image to prompt as a GPU runs it, in every configuration, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samopt.passes.kernels import image_to_token
from tests.image_token_problems import EPS, random_problem
from tests.image_token_problems import truth as image_token_truth
from tests.numerics import relative_error
from tests.passes.kernels.on_gpu.configurations import TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Image tokens, their channels and the inner ones: of Meta's decoder, and of one where nothing is a multiple of a block.
DECODERS = {"Meta's": (4096, 256, 128), "odd": (1001, 64, 48)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 64])
@pytest.mark.parametrize("case", DECODERS)
def test_every_configuration_of_image_to_token_is_right(case: str, tokens: int, dtype: torch.dtype) -> None:
    from triton.runtime.errors import OutOfResources

    fitting = 0
    for images in (1, 5):
        given = random_problem(5, *DECODERS[case], tokens, images=images, dtype=dtype, device="cuda")
        wanted = image_token_truth(given)
        for config in image_to_token.CANDIDATES:
            out = torch.full(wanted.shape, torch.nan, dtype=dtype, device="cuda")
            try:
                image_to_token.launch(config, given, 8, EPS, out)
            except OutOfResources:
                continue
            assert relative_error(out, wanted) < TOLERANCE[dtype], config
            fitting += 1
    assert fitting


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [7, 65])
def test_image_to_token_errs_no_more_than_pytorch(tokens: int, dtype: torch.dtype, cache: Path) -> None:
    """As the tuner has it, and with more tokens than the kernel takes."""
    given = random_problem(16, *DECODERS["Meta's"], tokens, dtype=dtype, device="cuda")
    wanted = image_token_truth(given)
    ours = torch.ops.samopt.image_to_token(*given, 8, EPS)
    theirs = image_to_token.by_pytorch(given, 8, EPS)
    assert (ours.shape, ours.dtype) == (wanted.shape, dtype)
    assert relative_error(ours, wanted) <= 1.05 * relative_error(theirs, wanted)


@pytest.mark.usefixtures("untuned")
def test_image_to_token_runs_in_a_cuda_graph() -> None:
    given = random_problem(4, *DECODERS["Meta's"], dtype=torch.bfloat16, device="cuda")
    before = torch.ops.samopt.image_to_token(*given, 8, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after = torch.ops.samopt.image_to_token(*given, 8, EPS)
    for tensor, new in zip(
        given, random_problem(4, *DECODERS["Meta's"], dtype=torch.bfloat16, device="cuda", seed=2), strict=True
    ):
        tensor.copy_(new)
    graph.replay()
    assert relative_error(after, image_token_truth(given)) < TOLERANCE[torch.bfloat16]
    assert relative_error(after, before) > 0.5
