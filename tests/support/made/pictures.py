"""Pictures and sounds made at random, with their labels, and tiny models of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from made import tokenizers
from made.text import sentence

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

SIDE = 32
"""Pixels of a picture's side."""
_SAMPLING_RATE = 16_000
_CLASSES = ("cat", "dog")


def save_pictures(folder: Path, chance: random.Random) -> None:
    """Write a dataset for each task, of 32 samples and 8, as its name on the hub would give it.

    The tasks: photos (a class), segments (a mask), boxes (objects), captions
    (turns about a picture), sounds (what was said), facades (two pictures of one thing).
    """
    from datasets import ClassLabel, Dataset, Features, Image, Sequence, Value

    image, name = Image(), ClassLabel(names=list(_CLASSES))
    box = {"id": [Value("int64")], "area": [Value("int64")], "bbox": [Sequence(Value("float32"), length=4)]}
    features = {
        "photos": Features({"image": image, "labels": name}),
        "segments": Features({"image": image, "label": image}),
        "boxes": Features(
            {"image_id": Value("int64"), "image": image, "objects": {**box, "category": [name]}}
        ),
        "captions": None,
        "facades": Features({"imageA": image, "imageB": image}),
    }
    for task, of in features.items():
        (folder / task).mkdir()
        for split, number in (("train", 32), ("validation", 8), ("test", 8)):
            rows = [_SAMPLES[task](chance, index) for index in range(number)]
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            dataset = Dataset.from_dict(columns, features=of)
            dataset.to_parquet(folder / task / f"{split}-00000-of-00001.parquet")
    (folder / "photos_folder").mkdir()
    for index in range(104):  # denoising_diffusion_pytorch wants a hundred
        _picture(chance).save(folder / "photos_folder" / f"{index}.png")


def save_sounds(folder: Path, chance: random.Random) -> None:
    """Write half a second of noise for each sentence, as a folder that datasets reads as sounds."""
    import json
    import wave

    for split, number in (("train", 32), ("validation", 8)):
        (folder / split).mkdir(parents=True)
        lines = []
        for index in range(number):
            with wave.open(str(folder / split / f"{index}.wav"), "wb") as file:
                file.setparams((1, 2, _SAMPLING_RATE, 0, "NONE", ""))
                file.writeframes(chance.randbytes(_SAMPLING_RATE))
            lines.append({"file_name": f"{index}.wav", "text": sentence(chance, most=8), "label": index % 2})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / split / "metadata.jsonl").write_text(text, encoding="utf-8")


def _picture(chance: random.Random) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (SIDE, SIDE), chance.randbytes(3 * SIDE * SIDE))


def _mask(chance: random.Random) -> Any:
    from PIL import Image

    return Image.frombytes("L", (SIDE, SIDE), bytes(chance.choices((0, 1), k=SIDE * SIDE)))


def _photo(chance: random.Random, index: int) -> dict[str, Any]:
    return {"image": _picture(chance), "labels": index % 2}


def _segment(chance: random.Random, index: int) -> dict[str, Any]:
    return {"image": _picture(chance), "label": _mask(chance)}


def _boxes(chance: random.Random, index: int) -> dict[str, Any]:
    sides = [chance.randint(8, 16) for _ in range(2)]
    return {
        "image_id": index,
        "image": _picture(chance),
        "objects": {
            "id": [2 * index, 2 * index + 1],
            "area": [side * side for side in sides],
            "bbox": [[chance.randint(0, 15), chance.randint(0, 15), side, side] for side in sides],
            "category": [0, 1],
        },
    }


def _caption(chance: random.Random, index: int) -> dict[str, Any]:
    return {
        "images": [_picture(chance)],
        "prompt": [{"role": "user", "content": sentence(chance, most=8)}],
        "completion": [{"role": "assistant", "content": sentence(chance, most=8)}],
    }


def _pair(chance: random.Random, index: int) -> dict[str, Any]:
    return {"imageA": _picture(chance), "imageB": _picture(chance)}


_SAMPLES: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "photos": _photo,
    "segments": _segment,
    "boxes": _boxes,
    "captions": _caption,
    "facades": _pair,
}


def _mae() -> tuple[Any, Any]:
    from transformers import ViTImageProcessor, ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {f"decoder_{key}": value for key, value in sizes.items()}
    config = ViTMAEConfig(**sizes, **decoder, image_size=SIDE, patch_size=8)
    return ViTMAEForPreTraining(config), ViTImageProcessor(size={"height": SIDE, "width": SIDE})


def _segformer() -> tuple[Any, Any]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return SegformerForSemanticSegmentation(config), SegformerImageProcessor(
        size={"height": SIDE, "width": SIDE}
    )


def _detr() -> tuple[Any, Any]:
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic"
    )
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        d_model=32,
        num_queries=8,
        dropout=0.0,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        **layers,
    )
    return DetrForObjectDetection(config), DetrImageProcessor(size={"height": SIDE, "width": SIDE})


def _llava() -> tuple[Any, Any]:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = tokenizers.gpt_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=8, projection_dim=32)
    text = LlamaConfig(
        **sizes, num_key_value_heads=1, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=tokenizer.image_token_id)
    side = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessor(size=side, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return LlavaForConditionalGeneration(config), processor


def _whisper() -> tuple[Any, Any]:
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    tokenizer = tokenizers.gpt_tokenizer()
    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = WhisperConfig(
        **sizes,
        **heads,
        **ids,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        vocab_size=len(tokenizer),
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=64,
        dropout=0.0,
    )
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return WhisperForConditionalGeneration(config), (extractor, tokenizer)


PICTURE_MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mae": _mae,
    "segformer": _segformer,
    "detr": _detr,
    "llava": _llava,
    "whisper": _whisper,
}


def save_picture_models(folder: Path, *, seed: int) -> None:
    """Write each model, with what prepares its inputs, into a folder of its name."""
    import torch

    for kind, make in PICTURE_MODELS.items():
        torch.manual_seed(seed)
        model, processors = make()
        model.save_pretrained(folder / kind)
        for one in processors if isinstance(processors, tuple) else (processors,):
            one.save_pretrained(folder / kind)
    save_unet_config(folder.parent / "unet")


def save_unet_config(folder: Path) -> None:
    """Write the configuration of a tiny UNet of diffusers."""
    from diffusers import UNet2DModel

    UNet2DModel(
        sample_size=SIDE,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
    ).save_config(folder)
