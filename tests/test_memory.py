"""How much is done at once."""

from __future__ import annotations

import pytest
import torch
from segment_anything.modeling import Sam

from samopt import memory
from samopt.memory import images_at_once, masks_at_once, memory_budget, peak_bytes, prompts_at_once

GIB = 1 << 30


class Vit:
    """The sizes of Meta's models."""

    class image_encoder:
        img_size = 1024

    class prompt_encoder:
        embed_dim = 256
        image_embedding_size = (64, 64)


def test_half_of_a_gpus_free_memory_is_used_with_what_pytorch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 24 * GIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert memory_budget(torch.device("cuda")) == 8 * GIB
    with monkeypatch.context() as graphs:
        graphs.setattr("samopt.passes.cuda_graphs.pooled_bytes", lambda _: 2 * GIB)
        assert memory_budget(torch.device("cuda")) == 7 * GIB
    assert memory_budget(torch.device("cpu")) == memory.CPU_BYTES


@pytest.mark.parametrize(("budget", "images"), [(1, 1), (8 * GIB, 2), (15 * GIB, 3), (500 * GIB, 8)])
def test_images_are_encoded_together_as_memory_allows(budget: int, images: int) -> None:
    assert images_at_once(Vit, budget) == images


def test_small_images_take_less(tiny256: Sam) -> None:
    assert images_at_once(tiny256, memory.CPU_BYTES) == 8


@pytest.mark.parametrize(
    ("budget", "count", "prompts"),
    [(2 * GIB, 1024, 64), (64 * GIB, 1024, 256), (500 * GIB, 1020, 255), (2 * GIB, 65, 33), (1, 3, 1), (GIB, 1, 1)],
)
def test_prompts_are_decoded_together_as_memory_allows(budget: int, count: int, prompts: int) -> None:
    assert prompts_at_once(Vit, budget, count) == prompts


def test_a_peak_holds_what_graphs_keep_on_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [segment(0, (0, 0), 100, 40), segment(0, (0, 1), 64, 10), segment(0, (3, 0), 8, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*segments, segment(1, (0, 1), 1000, 0)])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 500)
    assert peak_bytes(torch.device("cuda", 0)) == 500 + 54 + 8
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert peak_bytes(torch.device("cuda")) == 1500


def test_masks_are_upscaled_a_few_at_a_time() -> None:
    few, many = masks_at_once(Vit, 100 * GIB, (4000, 6000)), masks_at_once(Vit, 100 * GIB, (600, 800))
    assert 1 <= few < 4 < many < 100
    assert masks_at_once(Vit, 1, (4000, 6000)) == 1
