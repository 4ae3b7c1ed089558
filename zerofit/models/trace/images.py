"""Images beside tokens: their inputs, and the tokens of --seq-len that one image takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

_SIDE = 448
"""ASSUMPTION: pixels on each side of an image, for models that take any size."""
_KEPT = "_zerofit_image"
"""Attribute of a model that holds its Image once it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a sample, as a model's processor hands it on."""

    side: int
    """Pixels on each side."""
    num_tokens: int
    """Tokens of the text that stand for it."""
    token_id: int
    shape: tuple[int, ...]
    """Dimensions of its pixel_values; the first is multiplied by the samples."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of its patches, for models that take patches in one list."""

    def inputs(self, samples: int) -> dict[str, Any]:
        """Return the arguments beside the tokens, for one image in each sample."""
        import torch

        made = {"pixel_values": torch.ones(self.shape[0] * samples, *self.shape[1:])}
        if self.grid is not None:
            made["image_grid_thw"] = torch.tensor([self.grid] * samples)
        return made

    @property
    def note(self) -> str:
        """What a plan assumes of images, in a sentence."""
        return (
            f"each sample has one image of {self.side} x {self.side} pixels, which takes {self.num_tokens} "
            "of its tokens: plan a script for other images"
        )


def takes_images(model: Any, accepts: set[str]) -> bool:
    """Return True if a model takes images beside tokens."""
    return getattr(model.config, "vision_config", None) is not None and "pixel_values" in accepts


def image_of(model: Any) -> Image | None:
    """Return the image that find_image() found for a model; None if it takes none."""
    image: Image | None = getattr(model, _KEPT, None)
    return image


def find_image(model: Any, accepts: set[str], refusal: Callable[[str], UserError]) -> None:
    """Find out what a model takes for an image, and keep it with the model.

    The number of tokens is that of the features that the model itself makes of an image.

    Args:
        refusal: returns the error for what can't be fed, in words.

    Raises:
        UserError: its images are of another form.
    """
    config, vision = model.config, model.config.vision_config
    names = ("image_token_id", "image_token_index")
    token = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if token is None:
        raise refusal("images without a token that stands for them, as in models with cross-attention")
    if "image_grid_thw" in accepts:
        image = _patches(vision, token)
    elif others := sorted(
        accepts & {"image_sizes", "spatial_shapes", "aspect_ratio_ids", "image_position_ids"}
    ):
        raise refusal(f"pixel_values with {', '.join(others)}, whose shapes depend on the processor")
    else:
        image = _pixels(model, vision, token, accepts, refusal)
    setattr(model, _KEPT, image)


def _patches(vision: Any, token: int) -> Image:
    """Return an image as Qwen-VL's processors make it: patches of all images in one list, and their grids."""
    merge, patch = vision.spatial_merge_size, vision.patch_size
    rows = max(1, _SIDE // (patch * merge)) * merge
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    values = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
    return Image(
        side=rows * patch,
        num_tokens=rows**2 // merge**2,
        token_id=token,
        shape=(rows**2, values),
        grid=(1, rows, rows),
    )


def _pixels(
    model: Any, vision: Any, token: int, accepts: set[str], refusal: Callable[[str], UserError]
) -> Image:
    """Return an image of fixed size, whose tokens are counted on what the model makes of it."""
    import torch

    side = getattr(vision, "image_size", _SIDE)
    side = side if isinstance(side, int) else max(side)
    shape: tuple[int, ...] = (1, getattr(vision, "num_channels", 3), side, side)
    if "pixel_attention_mask" in accepts:  # Idefics' processors make a list of images for each sample
        shape = (1, *shape)
    weight = next(model.parameters())
    try:
        with torch.no_grad():
            found = model.get_image_features(pixel_values=torch.ones(shape, dtype=weight.dtype))
            features = getattr(found, "pooler_output", found)
    except Exception as error:  # of the model's own code
        said = (str(error).strip().splitlines() or [""])[0][:120]
        raise refusal(f"pixel_values of one image: {type(error).__name__}: {said}") from error
    rows = features if isinstance(features, (list, tuple)) else [features]
    num_tokens = sum(int(part.numel() // part.shape[-1]) for part in rows)
    return Image(side=side, num_tokens=num_tokens, token_id=token, shape=shape)
