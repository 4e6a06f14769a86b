"""How a message names a tensor."""

from torch import Tensor


def shape_text(tensor: Tensor) -> str:
    """Shape and dtype, as in "[2, 3] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
