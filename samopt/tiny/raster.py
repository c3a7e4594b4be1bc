"""Draws layouts: every pixel's colour, and which object is on top there.

Pixel arithmetic is limited to operations that IEEE rounds exactly (no sine, no power) and to integer hashes, so that on
a CPU the picture does not depend on how the work is split between threads or vector lanes. The same functions draw
a whole batch at once (all objects over the whole picture, meant to be compiled) or one scene (each object over its
bounding box).

Shapes: ``B`` scenes of ``[H, W]`` pixels; per-scene parameters are [B, columns].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import (
    BENDS,
    CENTER,
    HALF_LENGTH,
    HALF_PLANES,
    HALF_WIDTH,
    HARMONICS,
    INVERSE_AXES,
    LIGHT,
    LIGHT_SLOPE,
    NOISE_LEVEL,
    PLANES,
    POLYGON,
    REACH,
    RING,
    ROTATION,
    SCALE,
    SHADOW,
    SHADOW_WIDTH,
    STAR,
    THIN,
    Layout,
)
from .textures import any_pattern, column, columns, hash_pixels, mix, one_pattern, shade

BACKGROUND = -1


def pixel_grid(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixel centres in units of the picture's side: x [1, 1, W] and y [1, H, 1]."""
    along = (torch.arange(size, device=device) + 0.5) / size
    return along[None, None, :], along[None, :, None]


def _local(shape: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates in the object's own turned frame, unscaled."""
    cx, cy = columns(shape, CENTER)
    cos, sin = columns(shape, ROTATION)
    dx, dy = x - cx, y - cy
    return dx * cos + dy * sin, dy * cos - dx * sin


def star_distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Roughly the signed distance (negative inside) to a blob, an ellipse or a ring, [B, H, W]."""
    p, q = _local(shape, x, y)
    inverse_a, inverse_b = columns(shape, INVERSE_AXES)
    u, v = p * inverse_a, q * inverse_b
    rho = (u * u + v * v + 1e-12).sqrt()
    c, s = u / rho, v / rho
    harmonics = columns(shape, HARMONICS)
    # Angle multiples by complex multiplication: (c + is)^k = cos(k phi) + i sin(k phi).
    ck, sk, radius = c, s, torch.ones_like(c)
    for order in range(4):
        ck, sk = ck * c - sk * s, sk * c + ck * s
        radius = radius + harmonics[order] * ck + harmonics[order + 4] * sk
    ring = column(shape, RING)
    return ((rho / radius - (1 - ring)).abs() - ring) * column(shape, SCALE)


def polygon_distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The same for a polygon whose corners end at a circle."""
    p, q = _local(shape, x, y)
    inverse_a, inverse_b = columns(shape, INVERSE_AXES)
    u, v = p * inverse_a, q * inverse_b
    planes = columns(shape, PLANES)
    distance = (u * u + v * v).sqrt() - 1.35
    for side in range(HALF_PLANES):
        normal_x, normal_y, offset = planes[3 * side : 3 * side + 3]
        distance = torch.maximum(distance, u * normal_x + v * normal_y - offset)
    return distance * column(shape, SCALE)


def thin_distance(shape: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The same for a bar of constant width along q = bend (p^2 - l^2 / 3) + twist p (p^2 - l^2)."""
    p, q = _local(shape, x, y)
    bend, twist = columns(shape, BENDS)
    length = column(shape, HALF_LENGTH)
    p2, l2 = p * p, length * length
    slope = 2 * bend * p + twist * (3 * p2 - l2)
    across = (q - bend * (p2 - l2 / 3) - twist * p * (p2 - l2)) / (1 + slope * slope).sqrt()
    beyond = (p.abs() - length).clamp(min=0)
    return (across * across + beyond * beyond).sqrt() - column(shape, HALF_WIDTH)


def _any_distance(shape: Tensor, kind: Tensor, x: Tensor, y: Tensor) -> Tensor:
    kind = kind[:, None, None]
    curved = torch.where(kind == THIN, thin_distance(shape, x, y), star_distance(shape, x, y))
    return torch.where(kind == POLYGON, polygon_distance(shape, x, y), curved)


def _lay(
    canvas: Tensor,
    ids: Tensor,
    colors: Tensor,
    distance: Tensor,
    paint: Tensor,
    index: Tensor,
    allowed: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Lays ``colors`` [B, 3, H, W] over the canvas where ``distance`` [B, H, W] is negative, with a shadow around.

    The edge is soft over one pixel; a pixel belongs to the object when its centre lies inside.
    """
    near = (1 - distance * (1 / SHADOW_WIDTH)).clamp(0, 1)
    under = canvas * (1 - column(paint, SHADOW) * near * near)[:, None]
    cover = (0.5 - distance * size).clamp(0, 1)[:, None]
    painted = torch.where(allowed[:, None], under + (colors - under) * cover, canvas)
    return painted, torch.where((distance < 0) & allowed, index, ids)


def paint_object(
    canvas: Tensor,
    ids: Tensor,
    x: Tensor,
    y: Tensor,
    shape: Tensor,
    paint: Tensor,
    codes: Tensor,
    index: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Paints one object of each of ``B`` scenes over the whole picture; returns the new canvas and ids.

    ``codes`` [B, 5] int32 holds kind, texture, salt, parent and presence, ``index`` is the object's number, int8.
    """
    kind, texture, salt, parent, present = codes.unbind(1)
    parent = parent[:, None, None]
    allowed = (present > 0)[:, None, None] & ((parent < 0) | (ids == parent))
    colors = mix(paint, any_pattern(paint, texture, salt, x, y)) * shade(paint, shape, x, y)[:, None]
    return _lay(canvas, ids, colors, _any_distance(shape, kind, x, y), paint, index, allowed, size)


def paint_background(x: Tensor, y: Tensor, paint: Tensor, codes: Tensor) -> Tensor:
    """The canvas [B, 3, H, W] below all objects."""
    return mix(paint, any_pattern(paint, codes[:, 1], codes[:, 2], x, y))


def expose(canvas: Tensor, x: Tensor, y: Tensor, scene: Tensor, salt: Tensor) -> Tensor:
    """Lights the canvas, adds sensor noise and rounds: uint8 [B, 3, H, W]."""
    height, width = canvas.shape[-2:]
    slope_x, slope_y = columns(scene, LIGHT_SLOPE)
    light = column(scene, LIGHT) + (x - 0.5) * slope_x + (y - 0.5) * slope_y
    across = torch.arange(width, device=canvas.device, dtype=torch.int32)[None, None, :]
    down = torch.arange(height, device=canvas.device, dtype=torch.int32)[None, :, None]
    channels = []
    for channel in range(3):
        mixed = hash_pixels(across, down, salt[:, None, None] + (channel + 7))
        # The sum of two uniform numbers: a triangle of variance 1/6.
        noise = ((mixed & 0xFFFF) + ((mixed >> 16) & 0xFFFF)).to(canvas.dtype) * (1 / 65536) - 1
        channels.append(canvas[:, channel] * light + noise * (column(scene, NOISE_LEVEL) * 2.45))
    return (torch.stack(channels, dim=1).clamp(0, 1) * 255).round().to(torch.uint8)


@dataclass(frozen=True)
class Painters:
    """The steps of ``draw_batch``, which a training run replaces by compiled ones."""

    background: Callable[..., Tensor] = paint_background
    one: Callable[..., tuple[Tensor, Tensor]] = paint_object
    expose: Callable[..., Tensor] = expose


def draw_batch(layout: Layout, size: int, painters: Painters | None = None) -> tuple[Tensor, Tensor]:
    """Draws all scenes of a layout on its device: images uint8 [B, 3, H, W], ids int8 [B, H, W] (-1: background)."""
    painters = painters or Painters()
    device = layout.shape.device
    batch, count = layout.kind.shape
    x, y = pixel_grid(size, device)
    codes = torch.stack(
        [
            F.pad(layout.kind, (0, 1)),
            layout.texture,
            layout.salt,
            F.pad(layout.parent, (0, 1)),
            F.pad(layout.present.int(), (0, 1)),
        ],
        dim=-1,
    )
    # One contiguous table per object, so that a compiled step sees the same layout at every call.
    shapes = layout.shape.transpose(0, 1).contiguous().unbind(0)
    paints = layout.paint.transpose(0, 1).contiguous().unbind(0)
    code = [table.contiguous() for table in codes.transpose(0, 1).unbind(0)]
    numbers = torch.arange(count, device=device, dtype=torch.int8)
    canvas = painters.background(x, y, paints[count], code[count])
    ids = torch.full((batch, size, size), BACKGROUND, device=device, dtype=torch.int8)
    for number in range(count):
        canvas, ids = painters.one(
            canvas, ids, x, y, shapes[number], paints[number], code[number], numbers[number].clone(), size
        )
    return painters.expose(canvas, x, y, layout.scene, code[count][:, 2].contiguous()), ids


_DISTANCES = {STAR: star_distance, POLYGON: polygon_distance, THIN: thin_distance}


def draw_single(layout: Layout, size: int, colors: bool = True) -> tuple[Tensor | None, Tensor]:
    """Draws the one scene of a layout, each object over its bounding box only.

    Args:
        layout: one scene (``B`` = 1), on the device to draw on.
        size: side of the picture in pixels.
        colors: False skips the picture.

    Returns:
        The image uint8 [3, H, W] (or None) and the ids int8 [H, W].
    """
    device = layout.shape.device
    x, y = pixel_grid(size, device)
    ids = torch.full((1, size, size), BACKGROUND, device=device, dtype=torch.int8)
    canvas = x.new_zeros(1, 3, size, size)
    textures, salts = layout.texture[0].tolist(), layout.salt
    if colors:
        canvas = mix(layout.paint[:, -1], one_pattern(layout.paint[:, -1], textures[-1], salts[:, -1], x, y))
    kinds, parents, present = layout.kind[0].tolist(), layout.parent[0].tolist(), layout.present[0].tolist()
    boxes = _bounding_boxes(layout, size)
    for number, (left, top, right, bottom) in enumerate(boxes):
        if not present[number] or left >= right or top >= bottom:
            continue
        shape, paint = layout.shape[:, number], layout.paint[:, number]
        window = (slice(None), slice(top, bottom), slice(left, right))
        bx, by = x[:, :, left:right], y[:, top:bottom]
        below = ids[window]
        distance = _DISTANCES[kinds[number]](shape, bx, by)
        allowed = below == parents[number] if parents[number] >= 0 else torch.ones_like(below, dtype=torch.bool)
        if colors:
            pattern = one_pattern(paint, textures[number], salts[:, number], bx, by)
            shaded = mix(paint, pattern) * shade(paint, shape, bx, by)[:, None]
            index = torch.tensor(number, dtype=torch.int8, device=device)
            over = (slice(None), slice(None), *window[1:])
            canvas[over], ids[window] = _lay(canvas[over], below, shaded, distance, paint, index, allowed, size)
        else:
            ids[window] = torch.where((distance < 0) & allowed, number, below)
    image = expose(canvas, x, y, layout.scene, salts[:, -1])[0] if colors else None
    return image, ids[0]


def _bounding_boxes(layout: Layout, size: int) -> list[list[int]]:
    """Per object (left, top, right, bottom) in pixels, shadow included."""
    reach = layout.shape[0, :, REACH, None] + SHADOW_WIDTH
    center = layout.shape[0, :, CENTER]
    low = ((center - reach) * size).floor().clamp(0, size)
    high = ((center + reach) * size).ceil().clamp(0, size)
    boxes: list[list[int]] = torch.cat([low, high], dim=1).int().tolist()
    return boxes
