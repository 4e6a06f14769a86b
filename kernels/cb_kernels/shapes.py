"""How a message names a tensor, and whether a linear's tensors fit together."""

from torch import Tensor


def shape_text(tensor: Tensor) -> str:
    """Shape and dtype, as in "[2, 3] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def check_bias(bias: Tensor | None, weight: Tensor) -> None:
    """Raises ValueError for a bias that is not one of weight [N, K], in its dtype."""
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias {shape_text(bias)} does not fit a weight {shape_text(weight)}")


def check_onto(onto: Tensor | None, x: Tensor, width: int, *, gated: bool) -> None:
    """Raises ValueError unless x [..., K] times a weight of `width` outputs can be added to it."""
    if onto is None:
        return
    if gated or onto.shape != (*x.shape[:-1], width) or onto.dtype != x.dtype:
        kind = "gated " if gated else ""
        raise ValueError(
            f"the {kind}product of {width} outputs of x {shape_text(x)} cannot be added onto"
            f" {shape_text(onto)}"
        )
