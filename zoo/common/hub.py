"""Where a checkpoint lies: a local folder, or a repository of the Hugging Face hub downloaded into its cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zoo.common.reading import read_object

SIDECARS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")  # config, tokenizer, generation; the hub's usual names


def locate(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded first if it is a hub id. ValueError in one sentence when there is none.

    What could be either, an absent `owner/name` in a folder `owner` that is here, is a hub id if it was downloaded before or a
    revision is given; else it is refused as a mistyped path before the hub is asked.
    """
    try:
        path = Path(path_or_hub_id).expanduser()
        local = path.is_dir()
    except (TypeError, OSError, RuntimeError) as error:  # no path, a name too long, no permission, no home folder
        raise ValueError(f"{path_or_hub_id!r:.80} is not a folder and not a hub id (owner/name): {error}") from error
    if local:
        if revision is not None:
            raise ValueError(f"{path} is a local folder and has no revisions, but revision {revision!r} was asked for")
        return path
    if path.is_absolute() or str(path_or_hub_id).startswith((".", "~")) or len(path.parts) > 2 or path.exists():
        raise ValueError(f"{path_or_hub_id} is not a folder and not a hub id (owner/name)")
    repo = str(path_or_hub_id)
    if len(path.parts) == 2 and path.parent.exists() and revision is None and not _cached(repo):
        raise ValueError(f"{repo} is not a folder, though {path.parent} is here; give a revision (main) if the hub's {repo} is meant")
    return _download(repo, revision)


def _cached(repo: str) -> bool:
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(repo, "config.json"), str)
    except errors.HFValidationError:
        return False


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{repo!r}, revision {revision or 'main'!r}, at {_without_login(constants.ENDPOINT)}"
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=["*.safetensors", *SIDECARS], ignore_patterns=["*/*"])
    except errors.HFValidationError as error:
        raise ValueError(f"{repo!r} is neither a local folder nor a hub id (owner/name)") from error
    except errors.GatedRepoError as error:
        raise ValueError(f"{where}: the repository is gated; ask for access there and log in with `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{where}: the repository has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{where}: no such repository (or a private one without a login), and no local folder of that name") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub can't be reached"
        raise ValueError(f"{where}: not in the local cache (or only partly), {state}, and there is no local folder of that name") from error
    except Exception as error:  # whatever the client's transport raises
        said = _without_login(str(error).partition("\n")[0])
        raise ValueError(f"{where}: the download failed ({type(error).__name__}: {said})") from error
    return Path(folder)


def _without_login(text: str) -> str:
    """Addresses without the name and password that may stand in them: an error is shown and logged."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def read_config(path_or_hub_id: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The fields of a checkpoint's config.json. ValueError if it has none or it is not a JSON object."""
    path = locate(path_or_hub_id, revision) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path.parent} has no config.json")
    return read_object(path)
