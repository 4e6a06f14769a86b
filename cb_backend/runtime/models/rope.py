"""Rotary position embedding of one step, for any scaling that depends on the position alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from cb_kernels import rope
from torch import Tensor

if TYPE_CHECKING:
    from cb_backend.runtime.models.model_config import ModelConfig

# Their frequencies change with the length of the sequence. Up to the length the model was trained
# on they are constant, so that is where the context of such a model ends here.
LENGTH_DEPENDENT = ("dynamic", "longrope")

_FIRST_POSITIONS = 1024  # that a table begins with; it doubles


class Rope:
    """cos and sin of a step's positions, shaped to turn [T, H, D] in three operations.

    On a CPU they come from a table of the first positions, which grows.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_type: str | None,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv_freq, self._scaling = _frequencies(config, layer_type, head_dim)
        self._inv_freq = inv_freq.to(device=device, dtype=torch.float32)
        self.half = inv_freq.shape[0]  # of the rotary part
        self._num_passed = head_dim - 2 * inv_freq.shape[0]  # trailing dimensions left as they are
        self._dtype = dtype
        self._device = device
        none = torch.empty(0, head_dim, dtype=dtype)
        self._table = (none, none)  # cos and sin of the first positions; on a CPU

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] of positions [T]; sin carries the sign of the half it is applied
        to."""
        if self._device.type == "cpu":
            cos, sin = self.turns_up_to(int(positions.max()) + 1)
            cos, sin = cos[positions], sin[positions]
        else:
            cos, sin = self._computed(positions)
        return cos[:, None], sin[:, None]

    def turns_up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """The same [P, D] of at least the first positions, kept: a few operations less a step.

        What has been computed once stays: torch may compute a number by other means in a tensor of
        another size, and a position has the same bits in every step.
        """
        while (known := len(self._table[0])) < num_positions:
            more = self._computed(torch.arange(known, known + max(known, _FIRST_POSITIONS)))
            cos, sin = (torch.cat(pair) for pair in zip(self._table, more, strict=True))
            self._table = cos, sin
        return self._table

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._inv_freq  # [T, rotary / 2]
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self._num_passed:
            cos = torch.nn.functional.pad(cos, (0, self._num_passed), value=1.0)
            sin = torch.nn.functional.pad(sin, (0, self._num_passed))
        return cos.to(self._dtype), sin.to(self._dtype)

    def apply(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, H, D], which may be overwritten, turned; neox style: the halves of the rotary
        part swapped."""
        return rope(x, *turns, self.half)


def rope_parameters(config: ModelConfig, layer_type: str | None) -> dict[str, object]:
    parameters: dict[str, object] = config.rope_parameters
    nested = parameters.get(layer_type) if layer_type is not None else None
    return nested if isinstance(nested, dict) else parameters


def _frequencies(
    config: ModelConfig, layer_type: str | None, head_dim: int
) -> tuple[Tensor, float]:
    parameters = rope_parameters(config, layer_type)
    rope_type = str(parameters["rope_type"])
    if rope_type == "default":
        share = parameters.get("partial_rotary_factor", 1.0)
        rotary = int(head_dim * float(share))  # type: ignore[arg-type]
        exponents = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
        return 1.0 / (float(parameters["rope_theta"]) ** exponents), 1.0  # type: ignore[arg-type]
    # Here, since it costs a second of imports.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = layer_type if parameters is not config.rope_parameters else None
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        config, torch.device("cpu"), layer_type=nested
    )
    return inv_freq, float(scaling)
