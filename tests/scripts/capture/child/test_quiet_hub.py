"""What of the hub a captured script may use: it reads, and changes nothing."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

from zerofit.scripts.capture.child.quiet_hub import _quiet, is_reading

_READ_BY_POST = {
    "auth_check": "a question",
    "get_bucket_paths_info": "a list of paths",
    "get_paths_info": "a list of paths",
}
_CHANGES = re.compile(r"\.(post|put|patch|delete)\(|method=\"(POST|PUT|PATCH|DELETE)\"")


def _public() -> dict[str, Any]:
    from huggingface_hub import HfApi

    return {name: one for name, one in inspect.getmembers(HfApi, callable) if not name.startswith("_")}


def test_no_method_that_is_let_through_changes_anything() -> None:
    changing = {name for name, one in _public().items() if _CHANGES.search(inspect.getsource(one))}
    assert len(changing) > 50
    assert {name for name in changing if is_reading(name)} <= set(_READ_BY_POST)


def test_what_scripts_read_before_they_train_is_let_through() -> None:
    names = [
        "hf_hub_download",
        "snapshot_download",
        "model_info",
        "dataset_info",
        "repo_info",
        "whoami",
        "list_models",
    ]
    assert [name for name in names if not is_reading(name) or name not in _public()] == []


def test_all_else_is_silent_as_method_and_as_function() -> None:
    from huggingface_hub import HfApi, hf_api

    class Api(HfApi):
        pass

    functions = {name: getattr(hf_api, name) for name in _public() if hasattr(hf_api, name)}
    module = SimpleNamespace(HfApi=Api, api=Api(), **functions)
    _quiet(module)
    changing = [name for name in _public() if not is_reading(name)]
    assert {"preupload_lfs_files", "move_repo", "super_squash_history", "run_job", "sync_bucket"} <= {
        *changing
    }
    for name in changing:
        getattr(Api(), name)()  # without what each of them must be given
        getattr(module, name, lambda: None)()
    assert Api().create_repo("me/model", private=True).repo_id == "me/model"
    assert module.create_repo("me/model").repo_id == "me/model"
    assert module.upload_folder(repo_id="me/model", folder_path=".", run_as_future=True).result() is not None
    for name in set(functions) - set(changing):
        assert getattr(module, name) is functions[name]
