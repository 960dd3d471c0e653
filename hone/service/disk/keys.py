"""Keys of tenants: `tml-ID-SECRET`. The registry has the hash of a key, never the key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

from hone.config import ConfigError
from hone.service.disk.registry import Key, Registry

PREFIX = "tml-"  # clients refuse other keys
NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()  # compared with where no key has the id


def add_key(
    registry: Registry,
    name: str,
    models: int | None = None,
    tokens_per_minute: int | None = None,
    bytes_: int | None = None,
) -> str:
    """Make a key for a tenant and return it; nobody can read it again. Raises ConfigError for a name that is taken."""
    if not 0 < len(name) <= 64 or not all(one.isascii() and (one.isalnum() or one in "._-") for one in name):
        raise ConfigError(f"{name!r} is no name of a tenant: use letters, digits, '.', '_' and '-', 64 at most")
    if registry.one(Key, "name = ?", (name,)) is not None:
        raise ConfigError(f"there is a key of {name!r} already; remove it first: hone serve key remove {name}")
    key_id = secrets.token_hex(6)
    key = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    registry.put(Key(name, key_id, _hash(key), models, tokens_per_minute, bytes_, time.time()))
    return key


def remove_key(registry: Registry, name: str) -> None:
    """Remove a tenant's key; its runs stay on disk. Raises ConfigError for an unknown name."""
    if registry.one(Key, "name = ?", (name,)) is None:
        raise ConfigError(f"there is no key of {name!r}")
    registry.remove(Key, "name = ?", (name,))


def tenant_of(registry: Registry, key: str) -> Key | None:
    """The tenant of a key; None: it is not valid. The time does not depend on how much of a key is right."""
    parts = key.removeprefix(PREFIX).split("-", 1)
    found = registry.one(Key, "id = ?", (parts[0],)) if key.startswith(PREFIX) and len(parts) == 2 else None
    same = hmac.compare_digest(_hash(key), NOBODY if found is None else found.hash)
    return found if same else None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
