"""Generates the inputs of a model for one training step from its signature and its configuration.

A table of input types, most specific first, each recognised by its arguments:

    images as patches with a grid   Qwen2-VL and its descendants, GLM-4V
    images among the tokens         LLaVA, Gemma 3, PaliGemma, Idefics 3, InternVL …
    image and text, contrasted      CLIP, SigLIP
    image and text                  BLIP, GIT
    spectrogram in, text out        Whisper
    audio                           wav2vec 2.0, HuBERT, AST
    images                          ViT, ResNet, ConvNeXt …
    text                            causal, masked, encoder-decoder

Integers are real tensors with valid values, because models read them (placeholders, grids). For a model on
the meta device, floating-point tensors are there too, since their values are not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BatchError, UsageError
from .model_view import BatchRequest, ModelView

Batch = dict[str, Any]

_GRID_IMAGE_SIZE = 448
_CTC_LABELS = 8


def example_batch(model: nn.Module, request: BatchRequest) -> Batch:
    """Keyword arguments for one training step of `model`, with labels if it takes them."""
    view = ModelView(model)
    for input_type in _INPUT_TYPES:
        if view.takes(*input_type.arguments) and input_type.fits(view, request):
            return input_type.make(view, request)
    raise UsageError(
        f"no batch can be generated for {type(model).__name__}: let the factory return (module, batch)"
    )


def _classes(view: ModelView, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape) % max(view.classes, 1)


def _labelled(view: ModelView, batch: Batch, samples: int) -> Batch:
    """Add the labels that the head of a text model expects."""
    ids = batch["input_ids"]
    if view.takes("start_positions", "end_positions"):
        edges = torch.zeros(samples, dtype=torch.long, device="cpu")
        return {**batch, "start_positions": edges, "end_positions": edges}
    if not view.takes("labels"):
        return batch
    if view.head("ForSequenceClassification"):
        return {**batch, "labels": _classes(view, samples)}
    if view.head("ForTokenClassification"):
        return {**batch, "labels": _classes(view, *ids.shape)}
    if view.head("ForPreTraining") and view.takes("next_sentence_label"):
        return {**batch, "labels": ids, "next_sentence_label": _classes(view, samples)}
    return {**batch, "labels": ids}


def _text(view: ModelView, request: BatchRequest) -> Batch:
    length = view.length(request)
    if view.head("ForMultipleChoice"):
        return {
            "input_ids": view.tokens(request.samples, 2, length),
            "labels": _classes(view, request.samples),
        }
    batch: Batch = {"input_ids": view.tokens(request.samples, length)}
    batch = _labelled(view, batch, request.samples)
    encoder_decoder = view.takes("decoder_input_ids") and getattr(view.config, "is_encoder_decoder", False)
    if encoder_decoder and ("labels" not in batch or batch["labels"].shape != batch["input_ids"].shape):
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


def _with_placeholders(view: ModelView, request: BatchRequest, tokens_per_image: int) -> Tensor:
    """Tokens with `tokens_per_image` placeholders for each image of each sample."""
    token, length = view.image_token, view.length(request)
    marks = (getattr(view.config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
    start, end = ([mark] if isinstance(mark, int) and mark < view.vocab else [] for mark in marks)
    image = [*start, *[token] * tokens_per_image, *end]
    used = len(image) * request.images
    if used >= length:
        raise BatchError(
            f"{request.images} image(s) of {tokens_per_image} visual tokens do not fit into a sequence of "
            f"{length}: use at least {used + 1}, or a smaller image size"
        )
    ids = view.tokens(request.samples, length)
    ids[:, 1 : 1 + used] = torch.tensor(image * request.images, device="cpu")
    return ids


def _image_text(view: ModelView, ids: Tensor, images: Batch) -> Batch:
    """Tokens with placeholders, labels only on the text, and the images themselves."""
    is_image = ids.eq(-1 if view.image_token is None else view.image_token)
    batch: Batch = {"input_ids": ids, **images}
    if view.takes("labels"):
        batch["labels"] = ids.masked_fill(is_image, -100)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if view.takes(name):
            batch[name] = is_image.long()
    return batch


def _grid(view: ModelView, request: BatchRequest) -> Batch:
    vision = view.vision
    patch, merge = int(vision.patch_size), int(getattr(vision, "spatial_merge_size", 2))
    frames = int(getattr(vision, "temporal_patch_size", 1))
    unit = patch * merge
    edge = request.image_size or _GRID_IMAGE_SIZE
    side = max(round(edge / unit), 1) * merge
    count = request.samples * request.images
    images: Batch = {
        "pixel_values": view.floats(count * side * side, view.channels * frames * patch * patch),
        "image_grid_thw": torch.tensor([[1, side, side]] * count, device="cpu"),
    }
    return _image_text(view, _with_placeholders(view, request, (side // merge) ** 2), images)


def _images_among_tokens(view: ModelView, request: BatchRequest) -> Batch:
    """One feature per placeholder; the layout of the pixels depends on the model."""
    height, width = view.image_edges(request)
    count = request.samples * request.images
    sizes = torch.tensor([[height, width]] * count, device="cpu")
    images: Batch = {"pixel_values": view.floats(count, view.channels, height, width)}
    if crops := _crops(view, height, width):
        own = view.image_edges(BatchRequest(samples=1))
        images = {"pixel_values": view.floats(count, crops, view.channels, *own), "image_sizes": sizes}
    formula = _TOKENS_PER_IMAGE.get(getattr(view.config, "model_type", ""))
    if formula is not None:
        images["pixel_values"] = images["pixel_values"].unflatten(0, (request.samples, request.images))
        tokens = formula(view.config, height, width)
    elif getattr(view.vision, "model_type", "") == "pixtral":
        images["image_sizes"] = sizes
        unit = int(view.vision.patch_size) * int(getattr(view.config, "spatial_merge_size", 1))
        tokens = (height // unit) * (width // unit)
    else:
        tokens = _visual_tokens(view, {name: value[:1] for name, value in images.items()})
    return _image_text(view, _with_placeholders(view, request, tokens), images)


def _shuffled(config: Any, height: int, width: int) -> int:
    patch = int(config.vision_config.patch_size)
    return (height // patch) * (width // patch) // int(config.scale_factor) ** 2


# Models whose towers read pixel values, so that the meta device cannot give their number of tokens. Their
# pixel_values have the shape (samples, images, channels, height, width).
_TOKENS_PER_IMAGE: Mapping[str, Callable[[Any, int, int], int]] = {
    "idefics2": lambda config, height, width: int(config.perceiver_config.resampler_n_latents),
    "idefics3": _shuffled,
    "smolvlm": _shuffled,
}


def _crops(view: ModelView, height: int, width: int) -> int:
    """Crops of one image, including the overview, for models that split it to fit their tower."""
    pinpoints = getattr(view.config, "image_grid_pinpoints", None)
    if not pinpoints:
        return 0
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return int(image_size_to_num_patches([height, width], pinpoints, view.vision.image_size))


def _visual_tokens(view: ModelView, image: Batch) -> int:
    """The number of tokens of one image: the rows of the image features that the model computes."""
    with torch.no_grad(), torch.device("meta" if view.on_meta else "cpu"):
        try:
            whole: Any = view.model
            owner = whole if hasattr(whole, "get_image_features") else whole.base_model
            features = owner.get_image_features(**image)
        except Exception as error:
            raise BatchError(
                f"{type(view.model).__name__} does not show how many tokens an image takes: "
                f"{type(error).__name__}: {error}"
            ) from error
    features = getattr(features, "pooler_output", features)
    if isinstance(features, list | tuple):
        features = torch.cat([feature.flatten(0, -2) for feature in features])
    return int(features.flatten(0, -2).shape[0])


def _contrasted(view: ModelView, request: BatchRequest) -> Batch:
    ids = view.tokens(request.samples, view.length(request))
    return {"input_ids": ids, "pixel_values": view.images(request.samples, request), "return_loss": True}


def _image_and_text(view: ModelView, request: BatchRequest) -> Batch:
    return {**_text(view, request), "pixel_values": view.images(request.samples, request)}


def _spectrogram(view: ModelView, request: BatchRequest) -> Batch:
    bins = int(getattr(view.config, "num_mel_bins", 80))
    frames = 2 * int(getattr(view.config, "max_source_positions", 1500))
    batch: Batch = {"input_features": view.floats(request.samples, bins, frames)}
    if view.head("Classification"):
        return {**batch, "labels": _classes(view, request.samples)}
    ids = view.tokens(request.samples, view.length(request))
    return {**batch, "labels" if view.takes("labels") else "decoder_input_ids": ids}


def _audio(view: ModelView, request: BatchRequest) -> Batch:
    bins, frames = getattr(view.config, "num_mel_bins", None), getattr(view.config, "max_length", None)
    if isinstance(bins, int) and isinstance(frames, int):
        batch: Batch = {"input_values": view.floats(request.samples, frames, bins)}
    else:
        ratio = getattr(view.config, "inputs_to_logits_ratio", 320)
        per_frame = ratio() if callable(ratio) else ratio
        batch = {"input_values": view.floats(request.samples, view.length(request) * int(per_frame))}
    if not view.takes("labels"):
        return batch
    if view.head("ForCTC"):
        return {**batch, "labels": view.tokens(request.samples, _CTC_LABELS)}
    return {**batch, "labels": _classes(view, request.samples)}


def _images(view: ModelView, request: BatchRequest) -> Batch:
    batch: Batch = {"pixel_values": view.images(request.samples, request)}
    if not view.takes("labels"):
        return batch
    if view.takes("decoder_input_ids"):
        return {**batch, "labels": view.tokens(request.samples, view.length(request))}
    if view.head("ForSemanticSegmentation"):
        return {**batch, "labels": _classes(view, request.samples, *view.image_edges(request))}
    if view.head("ForImageClassification", "Classification", "WithTeacher"):
        return {**batch, "labels": _classes(view, request.samples)}
    return batch


@dataclass(frozen=True)
class _InputType:
    """An input type: the forward arguments that identify it, and how its batch is generated."""

    arguments: tuple[str, ...]
    make: Callable[[ModelView, BatchRequest], Batch]
    fits: Callable[[ModelView, BatchRequest], bool] = lambda view, request: True


def _has_images(view: ModelView, request: BatchRequest) -> bool:
    return view.image_token is not None and request.images > 0


def _no_tokens(view: ModelView, request: BatchRequest) -> bool:
    return not view.takes("input_ids")


_INPUT_TYPES = (
    _InputType(("input_ids", "pixel_values", "image_grid_thw"), _grid, _has_images),
    _InputType(("input_ids", "pixel_values"), _images_among_tokens, _has_images),
    _InputType(("input_ids", "pixel_values", "return_loss"), _contrasted),
    _InputType(("input_features",), _spectrogram, _no_tokens),
    _InputType(("input_values",), _audio, _no_tokens),
    _InputType(("input_ids", "pixel_values"), _image_and_text, lambda view, request: request.images > 0),
    _InputType(("pixel_values",), _images, _no_tokens),
    _InputType(("input_ids",), _text, lambda view, request: not view.takes("input_features")),
)
