"""One training step: draw scenes, sample prompts, answer them once or twice, sum the losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .forward import ABSENT, Plan, block, decode, dense_positions, embed_tokens, encode, neck
from .layout import Layout
from .losses import mask_losses, prompt_loss
from .model import build_tiny, fit_state
from .plans import choose_plans
from .prompts import CELL, PROMPTS, Prompts, Targets, find_targets, refine_prompts, sample_prompts
from .raster import Painters, draw_batch, expose, paint_background, paint_object

if TYPE_CHECKING:
    from segment_anything.modeling import Sam


def compiled_painters() -> Painters:
    """Drawing steps compiled once for all sizes."""
    return Painters(
        background=torch.compile(paint_background, dynamic=True),
        one=torch.compile(paint_object, dynamic=True),
        expose=torch.compile(expose, dynamic=True),
    )


@dataclass(frozen=True)
class Kernels:
    """The parts of a step that are compiled on a GPU; the defaults run them as they are."""

    block: Callable[..., Tensor] = block
    neck: Callable[..., Tensor] = neck
    decode: Callable[..., tuple[Tensor, Tensor]] = decode
    losses: Callable[..., tuple[Tensor, Tensor]] = mask_losses

    @staticmethod
    def compiled() -> Kernels:
        """Compiled apart from one another, for fixed shapes: blocks of one kind and size share their code."""
        return Kernels(
            block=torch.compile(block, dynamic=False),
            neck=torch.compile(neck, dynamic=False),
            decode=torch.compile(decode, dynamic=False),
            losses=torch.compile(mask_losses, dynamic=False),
        )


@dataclass(frozen=True)
class Drawn:
    """Normalised images [B, 3, S, S] and what is in them."""

    images: Tensor
    targets: Targets


@dataclass(frozen=True)
class SizeSetup:
    """What a step needs to know about one image size."""

    size: int
    batch: int
    window_plan: Plan
    global_plan: Plan
    kernels: Kernels
    dense: Tensor

    @staticmethod
    def choose(sam: Sam, size: int, batch: int, kernels: Kernels, attention: str) -> tuple[SizeSetup, str]:
        """The setup for a size on the model's device, and a line about its attention."""
        window_plan, global_plan, note = choose_plans(size, batch, sam.device, attention)
        dense = dense_positions(sam, size).detach().clone()
        return SizeSetup(size, batch, window_plan, global_plan, kernels, dense), note


@dataclass(frozen=True)
class StepResult:
    """The loss to differentiate, and the mean IoU that one point reached (first round, chosen by predicted IoU)."""

    loss: Tensor
    iou: Tensor


def uses_bf16(device: torch.device) -> bool:
    return device.type == "cuda"


@torch.no_grad()
def draw(sam: Sam, layout: Layout, size: int, painters: Painters) -> Drawn:
    """Draws a layout on the model's device."""
    device = sam.device
    layout = layout.to(device)
    dtype = torch.bfloat16 if uses_bf16(device) else torch.float32
    image, ids = draw_batch(layout, size, painters)
    images = ((image - sam.pixel_mean) / sam.pixel_std).to(dtype)
    return Drawn(images, find_targets(ids, layout, dtype))


def _answer(
    sam: Sam, setup: SizeSetup, embeddings: Tensor, prompts: Prompts, masks: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens = embed_tokens(sam, prompts.coords, prompts.labels, setup.size)
    count, side = len(tokens), setup.size // CELL
    if masks is None:
        dtype = torch.bfloat16 if uses_bf16(tokens.device) else torch.float32
        given = tokens.new_zeros((count, side, side), dtype=dtype)
    else:
        given = masks
    has_mask = torch.full((count,), masks is not None, device=tokens.device)
    absent = prompts.labels == ABSENT
    return setup.kernels.decode(sam, embeddings, setup.dense, tokens, absent, given, has_mask)


def _loss(
    setup: SizeSetup, prompts: Prompts, logits: Tensor, predicted: Tensor, sharpness: Tensor
) -> tuple[Tensor, Tensor]:
    count = len(logits)
    # The first prompt of each image also counts against the whole around its object.
    cost, actual = setup.kernels.losses(
        torch.cat([logits, logits[::PROMPTS]]), torch.cat([prompts.target, prompts.whole]), sharpness
    )
    loss = prompt_loss(cost[:count], actual[:count], predicted, prompts.weight, cost[count:], prompts.whole_weight)
    return loss, actual[:count]


def train_step(
    sam: Sam, setup: SizeSetup, drawn: Drawn, generator: torch.Generator, sharpness: Tensor, refine: bool
) -> StepResult:
    """The loss of one batch; with ``refine`` the answers are fed back as mask prompts for a second round."""
    device = drawn.images.device
    mixed = torch.autocast(device.type, torch.bfloat16) if uses_bf16(device) else nullcontext()
    with torch.no_grad():
        prompts = sample_prompts(drawn.targets, generator)
    with mixed:
        plans = (setup.window_plan, setup.global_plan)
        embeddings = encode(sam, drawn.images, *plans, setup.kernels.block, setup.kernels.neck)
        logits, predicted = _answer(sam, setup, embeddings, prompts, None)
        loss, actual = _loss(setup, prompts, logits, predicted, sharpness)
        with torch.no_grad():
            first = torch.arange(0, len(actual), PROMPTS, device=device)
            picked = actual[first, 1 + predicted[::PROMPTS, 1:].argmax(-1)]
            weight = prompts.weight[::PROMPTS]
            iou = (picked * weight).sum() / weight.sum().clamp(min=1)
        if refine:
            with torch.no_grad():
                refined, masks = refine_prompts(prompts, logits.detach(), predicted.detach(), generator)
            again, predicted_again = _answer(sam, setup, embeddings, refined, masks)
            second, _ = _loss(setup, refined, again, predicted_again, sharpness)
            loss = (loss + second) / 2
    return StepResult(loss, iou)


@torch.no_grad()
def forward_error(device: torch.device, size: int = 256) -> float:
    """How far ``encode`` and ``decode`` are from segment_anything's own forward, relative, in float32.

    Positions are randomised, since at initialisation they are zero and would hide an error.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained = build_tiny()
        for name, tensor in trained.image_encoder.named_parameters():
            if "pos" in name:
                tensor.normal_(std=0.5)
        own = build_tiny(size)
        own.load_state_dict(fit_state(trained.state_dict(), size))
        image = torch.randn(2, 3, size, size).to(device)
    trained, own = trained.to(device), own.to(device)
    expected = own.image_encoder(image)
    found = encode(trained, image, Plan(), Plan())
    errors = [_relative(found.permute(0, 3, 1, 2), expected)]

    absent = torch.full((8, 11), ABSENT, device=device)
    labels, coords = absent.clone(), torch.linspace(0, size - 1, 8 * 11 * 2, device=device).view(8, 11, 2).flip(0)
    labels[:, [0, 6]] = torch.tensor([1, 0], device=device)  # two points
    labels[:4, 9] = -1  # and SAM's padding, or
    labels[4:, 7:9] = torch.tensor([2, 3], device=device)  # a box
    masks = torch.linspace(-5, 5, size // CELL, device=device).expand(8, size // CELL, -1)
    logits, quality = decode(
        trained,
        expected.permute(0, 2, 3, 1),
        dense_positions(trained, size),
        embed_tokens(trained, coords, labels, size),
        labels == ABSENT,
        masks,
        torch.tensor([False, True] * 4, device=device),
    )
    for index in range(8):
        points = (coords[index : index + 1, [0, 6]], labels[index : index + 1, [0, 6]])
        box = coords[index : index + 1, 7:9].flatten(1) if index >= 4 else None
        mask = masks[index : index + 1, None] if index % 2 else None
        sparse, dense = own.prompt_encoder(points=points, boxes=box, masks=mask)
        wanted = own.mask_decoder.predict_masks(
            expected[index // 4 : index // 4 + 1], own.prompt_encoder.get_dense_pe(), sparse, dense
        )
        errors += [_relative(logits[index : index + 1], wanted[0]), _relative(quality[index : index + 1], wanted[1])]
    return max(errors)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
