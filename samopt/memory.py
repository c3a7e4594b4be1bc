"""How much work fits into memory at once: images to encode, prompts to decode, masks to upscale; and peaks of it."""

from __future__ import annotations

from typing import Any

import torch

CPU_BYTES = 2 << 30  # of a host, whose free memory other programs share
MASK_BYTES = 512 << 20  # for upscaled masks: a GPU is busy with that many pixels, and more would only take memory
PROMPTS = 256  # likewise: what the decoder does for that many keeps a GPU busy
LAYER_VALUES = 1 << 30  # of one layer: beyond 31 bits cuDNN leaves a transposed convolution to a loop over images
IMAGES = 8  # encoders gain nothing from more at once
IMAGE_BYTES = 4 << 30  # per image of 1024 px: the unmodified vit_h's attention scores, several copies of them


def memory_budget(device: torch.device) -> int:
    """Bytes that may be used on `device`: of a GPU half of what is free, PyTorch's own cache included, but for what
    CUDA graphs have of it."""
    from samopt.passes.cuda_graphs import pooled_bytes

    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + max(cached - pooled_bytes(device), 0)) // 2


def images_at_once(model: Any, budget: int) -> int:
    """How many images to encode together in `budget` bytes, 1 to 8.

    The unmodified encoder holds the attention scores of whole images, which grow with the fourth power of the side.
    """
    per_image = IMAGE_BYTES * (model.image_encoder.img_size / 1024) ** 4
    return max(1, min(IMAGES, int(budget / per_image)))


def prompts_at_once(model: Any, budget: int, count: int) -> int:
    """How many of `count` prompts of one image to decode together in `budget` bytes, in pieces of nearly equal size.

    The decoder copies the image embedding for every prompt, and the largest layer of its upscaling gives twice as many
    values. At most 7.1 embeddings a prompt are alive at a time (counted on vit_b's decoder); 8 are allowed for.
    """
    height, width = model.prompt_encoder.image_embedding_size
    embedding = model.prompt_encoder.embed_dim * height * width
    return evenly(count, max(1, min(budget // (8 * 4 * embedding), LAYER_VALUES // (2 * embedding), PROMPTS)))


def evenly(count: int, most: int) -> int:
    """The size of the fewest pieces of nearly equal size, of at most `most` each, that `count` is cut into."""
    return -(-count // -(-count // most))


def masks_at_once(model: Any, budget: int, size: tuple[int, int]) -> int:
    """How many masks to upscale to an image of `size` (H, W) together in `budget` bytes.

    A mask is upscaled to the model's square first, in float32, then to the image. There it is compared, a byte a
    pixel, and counted, 4 bytes a pixel.
    """
    per_mask = 8 * model.image_encoder.img_size**2 + 12 * size[0] * size[1]
    return max(1, min(budget, MASK_BYTES) // per_mask)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of a GPU since `reset_peak_memory_stats`, with what CUDA graphs keep for themselves."""
    return torch.cuda.max_memory_allocated(device) + kept_by_graphs(device)


def kept_by_graphs(device: torch.device) -> int:
    """Bytes that CUDA graphs hold in pools of their own, where they count as free after the capture."""
    index = torch.cuda.current_device() if device.index is None else device.index
    pools = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    ]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)
