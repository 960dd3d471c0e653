"""Upload of an export to a model hub, by the library huggingface_hub.

folder --plan--> files and sizes --> repository (created if it is not there) --> one commit with all files
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from hone.config import ConfigError

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
WEIGHTS = ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class Upload:
    """The files of an export that go to a repository of a hub."""

    folder: Path
    repository: str
    private: bool
    files: tuple[tuple[str, int], ...]  # path in the folder, bytes

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self.files)


def planned(folder: Path, repository: str, private: bool) -> Upload:
    """The files of an upload and their sizes, without hidden ones (a .env or .git is nobody's business).

    Raises ConfigError for a folder without a model, a wrong name, and a link to a file outside the folder.
    """
    check_repository(repository)
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ConfigError(f"{folder} is no export: it has neither {' nor '.join(WEIGHTS)}")
    inside = folder.resolve()
    shown = (
        path for path in folder.rglob("*") if not any(one.startswith(".") for one in path.relative_to(folder).parts)
    )
    files = sorted(path for path in shown if path.is_file())
    for path in files:
        if not path.resolve().is_relative_to(inside):
            raise ConfigError(f"{path} is a link out of {folder}; put the file itself there, or remove the link")
    sizes = tuple((path.relative_to(folder).as_posix(), path.stat().st_size) for path in files)
    return Upload(folder, repository, private, sizes)


def check_repository(repository: str) -> None:
    """Raise ConfigError for a name that no repository can have."""
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"--push {repository}: a repository is named OWNER/NAME, such as my-team/my-model")


def has_token() -> bool:
    """Return whether huggingface_hub has a token here."""
    return bool(get_token())


def push(upload: Upload) -> str:
    """Upload; returns the address of the commit. Raises ConfigError with the hub's reason."""
    api = HfApi()
    name = f"--push {upload.repository}"
    try:
        api.create_repo(upload.repository, private=upload.private or None, exist_ok=True)
        if upload.private and not api.repo_info(upload.repository).private:
            raise ConfigError(f"{name} --private: this repository is there already, and public; nothing was uploaded")
        message = f"Upload {upload.folder.name} with hone"
        done = api.upload_folder(
            repo_id=upload.repository,
            folder_path=upload.folder,
            commit_message=message,
            allow_patterns=[glob.escape(path) for path, _ in upload.files],
        )
    except HfHubHTTPError as error:
        remedy = "" if has_token() else "; no token was found: log in with `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"{name}: the hub refused it: {error.server_message or error}{remedy}") from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"{name}: HF_HUB_OFFLINE is set; unset it to upload") from error
    except httpx.HTTPError as error:
        raise ConfigError(f"{name}: the hub cannot be reached ({type(error).__name__}: {error})") from error
    return str(done.commit_url)
