"""Finds a model's config.json: in a folder, as a file, in the hub's cache, or on the hub (only that file)."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.json_text import parse_json
from zerofit.models.catalog import catalog_models, find_in_catalog, nearest_in_catalog
from zerofit.models.source import LocatedConfig, ModelOrigin
from zerofit.models.weight_formats import format_of, method_of, said_format

_CONFIG = "config.json"
_MAX_LISTED = 6
"""Maximum entries of a folder listed in an error."""


def locate_config(text: str, *, takes_quantized: bool = False) -> LocatedConfig:
    """Return a model's config.json; weights are never read or downloaded.

    The order is: a folder or file of that name, as in transformers, the catalog, the hub's cache (located by
    HF_HOME and related variables), and the hub, unless HF_HUB_OFFLINE is set.

    Args:
        takes_quantized: whether the weights may be quantized, in a known format.

    Raises:
        UserError: nothing of that name is found, or it has no usable config.json.
    """
    found = _located(text)
    said = said_format(found.config)
    if said is not None and (not takes_quantized or format_of(found.config) is None):
        raise _quantized(found, method_of(said), is_known=format_of(found.config) is not None)
    return found


def _located(text: str) -> LocatedConfig:
    path = Path(text).expanduser()
    try:
        if text and path.is_dir():
            return _of_folder(text, path)
        if path.is_file():
            return LocatedConfig(
                name=text, config=_read(path), origin=ModelOrigin.FILE, place=str(path.parent)
            )
    except OSError as error:
        raise _unreadable(path, error) from error
    entry = find_in_catalog(text)
    if entry is not None:
        return LocatedConfig(
            name=entry.name,
            config=copy.deepcopy(entry.config),
            origin=ModelOrigin.CATALOG,
            place=text if "/" in text else entry.hub_ids[0],
        )
    if _looks_like_a_path(text):
        raise _no_such_path(text, path)
    return _of_hub(text)


def _of_folder(text: str, folder: Path) -> LocatedConfig:
    if not (folder / _CONFIG).is_file():
        raise _no_config(text, folder)
    return LocatedConfig(
        name=text,
        config=_read(folder / _CONFIG),
        origin=ModelOrigin.FOLDER,
        place=str(folder),
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a config.json that names its model type."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(file, error) from error
    except ValueError as error:
        raise UserError(
            "model-config-not-json",
            "the model's config is not JSON",
            found=f"{file}: {error}",
            why="its dimensions are read from a config.json",
            fix="fix the file, or download it again; for a weights file, name its folder",
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(
            "model-config-without-type",
            "the model's config does not name its model type",
            found=f'{file} without "model_type"',
            why="transformers needs it to choose the class",
            fix='add "model_type", such as "llama", or name the config.json of a transformers model',
        )
    return content


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        "model-config-unreadable",
        "the model's config can't be read",
        found=f"{path}: {error.strerror}",
        why="it contains the model's dimensions",
        fix="fix the permissions of file and folder, or name another model",
    )


def _quantized(found: LocatedConfig, method: str, *, is_known: bool) -> UserError:
    of_folder = os.path.join(found.place, _CONFIG)
    place = {ModelOrigin.FOLDER: of_folder, ModelOrigin.FILE: found.name}.get(found.origin, found.place)
    limit = "which only plans of training take" if is_known else "in a format that is not known"
    return UserError(
        "model-quantized",
        f"this checkpoint is quantized, {limit}",
        found=f"quantization_config ({method}) in {place}",
        why="the size of its weights differs from the model's",
        fix="name the original model",
    )


def _no_config(text: str, folder: Path) -> UserError:
    if (folder / "adapter_config.json").is_file():
        return _adapter(text, folder / "adapter_config.json")
    names = sorted(entry.name for entry in folder.iterdir())
    num_more = len(names) - _MAX_LISTED
    listed = ", ".join(names[:_MAX_LISTED]) + (f" and {num_more} more" if num_more > 0 else "")
    inside = [name for name in names if (folder / name / _CONFIG).is_file()]
    return UserError(
        "model-folder-without-config",
        "this folder has no config.json",
        found=f"--model {text}, with {listed or 'nothing'} in it",
        why="config.json contains the model's dimensions",
        fix=f"name {os.path.join(text, inside[-1])}"
        if inside
        else "name a folder written by save_pretrained, or the model's hub id",
    )


def _adapter(text: str, file: Path) -> UserError:
    try:
        base = parse_json(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return UserError(
        "model-is-adapter",
        "this folder contains an adapter (LoRA or similar), not a model",
        found=f"--model {text}, with adapter_config.json in it",
        why="an adapter is trained on top of its base model, which determines the memory",
        fix=f"--model {base}" if base else "name the base model",
    )


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".json") or not text


def _no_such_path(text: str, path: Path) -> UserError:
    parent = next((folder for folder in path.parents if folder.is_dir()), None)
    return UserError(
        "model-path-missing",
        "there is no such folder or file",
        found=f"--model {text}" + (f"; {parent} exists" if parent is not None else ""),
        why="it looks like a path, so the hub was not asked",
        fix="fix the path, or name a model as ORGANISATION/NAME",
    )


def _of_hub(text: str) -> LocatedConfig:
    """Return the config of a hub id, from the cache if possible, else downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(text, _CONFIG)
    except HFValidationError as error:
        raise _unknown_model(text, "it is not a valid hub id either") from error
    if isinstance(cached, str):
        return LocatedConfig(name=text, config=_read(Path(cached)), origin=ModelOrigin.CACHE, place=text)
    return LocatedConfig(name=text, config=_read(_download(text)), origin=ModelOrigin.HUB, place=text)


def _download(text: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # One request: hf_hub_download alone tries six times, over 23 s, if the network is down.
        get_hf_file_metadata(hf_hub_url(text, _CONFIG))
        return Path(hf_hub_download(text, _CONFIG))
    except GatedRepoError as error:
        raise UserError(
            "model-gated",
            "the hub does not give you access to this model",
            found=f"--model {text}, a gated repository",
            why="its licence must be accepted first",
            fix="accept it on the model's page and run hf auth login, or name a config.json",
            see=f"https://huggingface.co/{text}",
        ) from error
    except RepositoryNotFoundError as error:
        raise _unknown_model(text, "the hub has no such repository, or it is private") from error
    except LocalEntryNotFoundError as error:
        raise _unknown_model(text, _why_not_asked(error)) from error
    except EntryNotFoundError as error:
        raise UserError(
            "model-folder-without-config",
            "this repository has no config.json",
            found=f"--model {text}",
            why="config.json contains the model's dimensions; adapters, pipelines and GGUF files have none",
            fix="name the original model",
            see=f"https://huggingface.co/{text}/tree/main",
        ) from error
    except Exception as error:
        # Network errors differ between releases of huggingface_hub (requests, httpx, its own).
        raise _unknown_model(text, _why_not_asked(error)) from error


def _why_not_asked(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub was not asked"
    cause = error.__cause__ or error
    return f"the hub could not be reached ({type(cause).__name__}: {cause})"


def _unknown_model(text: str, hub: str) -> UserError:
    """Return the error for a model that is found nowhere.

    Args:
        hub: the hub's answer, or why it was not asked.
    """
    near = nearest_in_catalog(text)
    return UserError(
        "model-unknown",
        "no such model",
        found=f"--model {text}: no folder, none of the {len(catalog_models())} models of the catalog "
        "(`zerofit models`), not in the hub's cache",
        why=hub,
        fix=(f"--model {' or '.join(near)}, if that was meant; else " if near else "")
        + "name a folder with a config.json, or a hub id while the hub can be reached",
    )
