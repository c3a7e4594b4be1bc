"""What is where in a procedural picture: parameters of shapes and textures, drawn from a generator.

All lengths are in units of the picture's side, so that one layout serves every size. Shapes:

- STAR: rho(u, v) against a radius with four harmonics, an ellipse or a smooth blob; with ``ring`` < 1 an annulus.
- POLYGON: up to six half planes in the object's own frame, corners cut by a circle.
- THIN: a bar of constant width along a cubic, straight when both bends are 0.

``B`` scenes, ``N`` = ``OBJECTS`` objects in painting order (a part directly follows its whole).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

STAR, POLYGON, THIN = 0, 1, 2
FLAT, STRIPES, CHECKER, GRADIENT, NOISE = 0, 1, 2, 3, 4

LARGE, PARTS, MEDIUM, SMALL, BARS = 6, 5, 4, 3, 2
OBJECTS = LARGE + PARTS + MEDIUM + SMALL + BARS
HALF_PLANES = 6
SHADOW_WIDTH = 0.012

# Columns of Layout.shape.
CENTER, ROTATION, INVERSE_AXES = slice(0, 2), slice(2, 4), slice(4, 6)
SCALE, RING, HARMONICS = 6, 7, slice(8, 16)
PLANES, BENDS, HALF_LENGTH, HALF_WIDTH, REACH = slice(16, 34), slice(34, 36), 36, 37, 38
SHAPE_COLUMNS = 40

# Columns of Layout.paint.
COLOR, SECOND_COLOR, WAVE, PHASE, SHADE, SHADOW = slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10), slice(10, 12), 12
PAINT_COLUMNS = 16

# Columns of Layout.scene.
LIGHT, LIGHT_SLOPE, NOISE_LEVEL = 0, slice(1, 3), 3
SCENE_COLUMNS = 4


@dataclass(frozen=True)
class Layout:
    """Parameters of ``B`` scenes, on one device.

    ``shape`` [B, N, 40] and ``paint`` [B, N + 1, 16] float32 (the last row of ``paint`` is the background),
    ``scene`` [B, 4] float32, ``kind`` [B, N], ``texture`` and ``salt`` [B, N + 1], ``parent`` [B, N] (-1: a whole)
    int32, ``present`` [B, N] bool, ``chance`` [B, N] float32 in [0, 1), which picks an object's prompt point.
    """

    shape: Tensor
    paint: Tensor
    scene: Tensor
    kind: Tensor
    texture: Tensor
    salt: Tensor
    parent: Tensor
    present: Tensor
    chance: Tensor

    def to(self, device: torch.device) -> Layout:
        """Copies to ``device``; from pinned memory, so that a GPU's queue is not waited for."""
        if device.type == "cpu":
            return self
        moved = {}
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            if device.type == "cuda" and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            moved[field.name] = tensor.to(device, non_blocking=True)
        return Layout(**moved)


class _Draw:
    """Random tensors from one generator on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.uniform(math.log(low), math.log(high), *shape).exp()

    def choice(self, weights: list[float], *shape: int) -> Tensor:
        edges = torch.tensor(weights).cumsum(0) / sum(weights)
        return torch.bucketize(self.uniform(0.0, 1.0, *shape), edges[:-1], right=True)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


def sample_layout(generator: torch.Generator, batch: int) -> Layout:
    """Draws ``batch`` layouts from a CPU ``generator``; equal generator state and ``batch`` give equal layouts."""
    draw = _Draw(generator)
    # Objects are made group by group (large, parts, medium, small, bars) and sorted by depth at the end.
    bars = torch.arange(OBJECTS) >= OBJECTS - BARS
    host = draw.integers(LARGE, batch, PARTS)  # the whole that each part sits in
    parent = torch.full((batch, OBJECTS), -1)
    parent[:, LARGE : LARGE + PARTS] = host

    radius = torch.cat(
        [
            draw.log_uniform(0.10, 0.19, batch, LARGE),
            draw.uniform(0.34, 0.58, batch, PARTS),
            draw.log_uniform(0.06, 0.10, batch, MEDIUM),
            draw.log_uniform(0.029, 0.05, batch, SMALL),
            draw.uniform(0.05, 0.09, batch, BARS),
        ],
        dim=1,
    )
    radius[:, LARGE : LARGE + PARTS] *= radius.gather(1, host)
    aspect = draw.uniform(1.0, 1.8, batch, OBJECTS).sqrt()
    axes = torch.stack([radius * aspect, radius / aspect], dim=-1)
    angle = draw.uniform(0.0, 2 * math.pi, batch, OBJECTS)
    rotation = torch.stack([angle.cos(), angle.sin()], dim=-1)

    kind = draw.choice([0.5, 0.5], batch, OBJECTS)
    kind = torch.where(bars, torch.full_like(kind, THIN), kind)
    ring = torch.ones(batch, OBJECTS)
    hollow = draw.uniform(0.0, 1.0, batch, LARGE) < 0.15
    ring[:, :LARGE] = torch.where(hollow, draw.uniform(0.2, 0.3, batch, LARGE), 1.0)
    kind[:, :LARGE] = torch.where(hollow, STAR, kind[:, :LARGE])

    center = _centers(draw, batch, axes, rotation, host)
    shape = torch.zeros(batch, OBJECTS, SHAPE_COLUMNS)
    shape[..., CENTER] = center
    shape[..., ROTATION] = rotation
    shape[..., INVERSE_AXES] = 1.0 / axes
    shape[..., SCALE] = axes[..., 1]
    shape[..., RING] = ring
    shape[..., HARMONICS] = _harmonics(draw, batch)
    shape[..., PLANES] = _half_planes(draw, batch)
    length = draw.uniform(0.09, 0.22, batch, OBJECTS)
    bend = draw.uniform(-0.55, 0.55, batch, OBJECTS) / length
    twist = draw.uniform(-0.5, 0.5, batch, OBJECTS) / length**2
    straight = draw.uniform(0.0, 1.0, batch, OBJECTS) < 0.35
    shape[..., BENDS] = torch.stack([bend, twist], dim=-1).masked_fill(straight[..., None], 0.0)
    shape[..., HALF_LENGTH] = length
    shape[..., HALF_WIDTH] = draw.uniform(0.006, 0.012, batch, OBJECTS)
    shape[..., REACH] = torch.where(bars, 1.45 * length + 0.02, 1.5 * axes[..., 0])

    present = draw.uniform(0.0, 1.0, batch, OBJECTS) < 0.86
    hosted = present[:, :LARGE].gather(1, host) & ~hollow.gather(1, host)
    present[:, LARGE : LARGE + PARTS] &= hosted

    paint, texture = _paint(draw, batch, shape, radius, parent, bars)
    light = draw.uniform(0.85, 1.1, batch, 1)
    scene = torch.cat([light, draw.uniform(-0.2, 0.2, batch, 2), draw.uniform(0.008, 0.035, batch, 1)], dim=1)

    # Small things lie above large ones more often than below; a part keeps just above its whole.
    depth = draw.uniform(0.0, 1.0, batch, OBJECTS)
    depth[:, LARGE + PARTS :] += 0.4
    depth[:, LARGE : LARGE + PARTS] = depth.gather(1, host) + 1e-6 * torch.arange(1, PARTS + 1)
    order = depth.to(torch.float64).argsort(dim=1)
    rank = order.argsort(dim=1)
    parent = torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0)))
    with_background = torch.cat([order, torch.full((batch, 1), OBJECTS)], dim=1)
    return Layout(
        shape=_take(shape, order),
        paint=_take(paint, with_background),
        scene=scene,
        kind=kind.gather(1, order).int(),
        texture=texture.gather(1, with_background).int(),
        salt=draw.integers(1 << 20, batch, OBJECTS + 1).int(),
        parent=parent.gather(1, order).int(),
        present=present.gather(1, order),
        chance=draw.uniform(0.0, 1.0, batch, OBJECTS),
    )


def _take(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[-1])).contiguous()


def _centers(draw: _Draw, batch: int, axes: Tensor, rotation: Tensor, host: Tensor) -> Tensor:
    """[B, N, 2]: large objects spread over a jittered 3x3 grid, parts inside their host, the rest anywhere."""
    center = draw.uniform(0.05, 0.95, batch, OBJECTS, 2)
    cell = draw.uniform(0.0, 1.0, batch, 9).argsort(dim=1)[:, :LARGE]
    column, row = cell % 3, cell // 3
    jitter = draw.uniform(0.15, 0.85, batch, LARGE, 2)
    center[:, :LARGE] = (torch.stack([column, row], dim=-1) + jitter) / 3
    offset = draw.uniform(-0.4, 0.4, batch, PARTS, 2)
    index = host[..., None].expand(-1, -1, 2)
    u, v = (offset * axes.gather(1, index)).unbind(-1)
    cos, sin = rotation.gather(1, index).unbind(-1)
    turned = torch.stack([u * cos - v * sin, u * sin + v * cos], dim=-1)
    center[:, LARGE : LARGE + PARTS] = center.gather(1, index) + turned
    return center


def _harmonics(draw: _Draw, batch: int) -> Tensor:
    """[B, N, 8]: cosine and sine amplitudes of orders 2 to 5; a third of the objects are plain ellipses."""
    limit = torch.tensor([0.15, 0.13, 0.09, 0.06])
    amplitude = draw.uniform(0.3, 1.0, batch, OBJECTS, 4) * limit
    amplitude = amplitude.masked_fill(draw.uniform(0.0, 1.0, batch, OBJECTS, 1) < 0.33, 0.0)
    phase = draw.uniform(0.0, 2 * math.pi, batch, OBJECTS, 4)
    return torch.cat([amplitude * phase.cos(), amplitude * phase.sin()], dim=-1)


def _half_planes(draw: _Draw, batch: int) -> Tensor:
    """[B, N, 18]: (normal x, normal y, distance) of three to six sides; half of all polygons are rectangles."""
    sides = draw.integers(4, batch, OBJECTS) + 3
    rectangle = draw.uniform(0.0, 1.0, batch, OBJECTS) < 0.5
    sides = torch.where(rectangle, 4, sides)
    side = torch.arange(HALF_PLANES)
    jitter = draw.uniform(-0.12, 0.12, batch, OBJECTS, HALF_PLANES).masked_fill(rectangle[..., None], 0.0)
    angle = (side + jitter) * (2 * math.pi / sides[..., None])
    inner = torch.tensor([0.58, 0.78, 0.85, 0.88])[sides - 3]
    distance = inner[..., None].expand(-1, -1, HALF_PLANES)
    unused = side >= sides[..., None]
    planes = torch.stack([angle.cos(), angle.sin(), distance], dim=-1)
    absent = torch.tensor([0.0, 0.0, 1.0])
    return torch.where(unused[..., None], absent, planes).flatten(-2)


def _apart(draw: _Draw, color: Tensor, other: Tensor, least: float) -> Tensor:
    """``color``, moved where it is closer than ``least`` to ``other`` (Euclidean, RGB in [0, 1])."""
    away = torch.where(other > 0.5, other - 0.45, other + 0.45)
    away = (away + draw.uniform(-0.12, 0.12, *color.shape)).clamp(0.04, 0.96)
    near = (color - other).norm(dim=-1, keepdim=True) < least
    return torch.where(near, away, color)


def _paint(
    draw: _Draw, batch: int, shape: Tensor, radius: Tensor, parent: Tensor, bars: Tensor
) -> tuple[Tensor, Tensor]:
    """Colours and textures: ``paint`` [B, N + 1, 16] and texture codes [B, N + 1]; the last row is the background."""
    grey = draw.uniform(0.25, 0.75, batch, 1, 1)
    ground = (grey + draw.uniform(-0.1, 0.1, batch, 1, 3)).clamp(0.05, 0.95)
    color = _apart(draw, draw.uniform(0.05, 0.95, batch, OBJECTS, 3), ground, 0.35)
    index = parent.clamp(min=0)[..., None].expand(-1, -1, 3)
    color = torch.where(parent[..., None] >= 0, _apart(draw, color, color.gather(1, index), 0.4), color)
    strong = draw.uniform(0.18, 0.45, batch, OBJECTS, 1)
    second = (color + torch.where(color > 0.5, -strong, strong)).clamp(0.02, 0.98)
    second_ground = ground + draw.uniform(0.06, 0.16, batch, 1, 1) * torch.where(ground > 0.5, -1.0, 1.0)

    texture = draw.choice([0.18, 0.24, 0.16, 0.14, 0.28], batch, OBJECTS)
    thin_texture = torch.where(draw.uniform(0.0, 1.0, batch, OBJECTS) < 0.5, FLAT, STRIPES)
    texture = torch.where(bars, thin_texture, texture)
    texture_ground = torch.where(draw.uniform(0.0, 1.0, batch, 1) < 0.75, NOISE, STRIPES)

    # Cycles per picture side; a gradient runs once from one end of the object to the other.
    period = (radius * draw.uniform(0.3, 0.75, batch, OBJECTS)).clamp(min=0.014)
    period = torch.where(texture == GRADIENT, 2.2 * radius, period)
    direction = draw.uniform(0.0, 2 * math.pi, batch, OBJECTS + 1)
    period = torch.cat([period, draw.log_uniform(0.03, 0.2, batch, 1)], dim=1)
    wave = torch.stack([direction.cos(), direction.sin()], dim=-1) / period[..., None]
    phase = draw.uniform(0.0, 1.0, batch, OBJECTS + 1, 2)
    middle = 0.5 - (shape[..., CENTER] * wave[:, :OBJECTS]).sum(-1)
    phase[:, :OBJECTS, 0] = torch.where(texture == GRADIENT, middle, phase[:, :OBJECTS, 0])

    light = draw.uniform(0.0, 2 * math.pi, batch, 1)
    amount = draw.uniform(0.08, 0.32, batch, OBJECTS) / torch.where(bars, shape[..., HALF_LENGTH], radius)
    shade = amount[..., None] * torch.stack([light.cos(), light.sin()], dim=-1)
    # Only things lying above others cast a contact shadow; that is what tells a part from an occluder.
    shadow = draw.uniform(0.25, 0.5, batch, OBJECTS) * (parent < 0)

    paint = torch.zeros(batch, OBJECTS + 1, PAINT_COLUMNS)
    paint[..., COLOR] = torch.cat([color, ground], dim=1)
    paint[..., SECOND_COLOR] = torch.cat([second, second_ground], dim=1)
    paint[..., WAVE] = wave
    paint[..., PHASE] = phase
    paint[:, :OBJECTS, SHADE] = shade
    paint[:, :OBJECTS, SHADOW] = shadow
    return paint, torch.cat([texture, texture_ground], dim=1)
