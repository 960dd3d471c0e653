"""Chat template and rendering options of an exported model.

run: data.chat_template --> export/: the tokenizer's chat template      (every kind of run)
     data.chat, data.train.system_prompt --> rendering.json     (reward models, which render by themselves)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config import Config, ConfigError, build
from hone.data.rendering import Renderer
from hone.data.settings import ChatConfig, DataConfig
from hone.trainers.supervised.settings import RewardModelRunConfig
from hone.types import Message

FILE = "rendering.json"


def write_rendering(folder: Path, config: Config, data: DataConfig, renderer: Renderer) -> None:
    """Write the template and rendering options of a run into its export."""
    renderer.save_template(folder)
    if isinstance(config, RewardModelRunConfig):
        chat = (data.chat or ChatConfig()).model_dump(mode="json")
        said = {"chat": chat, "system_prompt": data.train.system_prompt}
        (folder / FILE).write_text(json.dumps(said, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ExportedRendering:
    """Rendering of messages for a reward model, as in its training."""

    renderer: Renderer
    system_prompt: str = ""

    def with_system_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages after the system prompt, unless they have one of their own."""
        if not self.system_prompt or any(message.get("role") == "system" for message in messages):
            return messages
        return [Message(role="system", content=self.system_prompt), *messages]


def read_rendering(folder: Path, tokenizer: Any) -> ExportedRendering:
    """Read the rendering of an export; without the file, the tokenizer's own template.

    Raises ConfigError for an invalid file.
    """
    path = folder / FILE
    if not path.is_file():
        return ExportedRendering(Renderer(tokenizer))
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    match said:
        case {"chat": dict(settings), "system_prompt": str(system_prompt)}:
            chat = build(ChatConfig, settings, str(path))
            renderer = Renderer(
                tokenizer,
                chat_options=chat.options,
                unrendered=chat.unrendered,
                special_tokens_in_rows=chat.special_tokens_in_rows,
            )
            return ExportedRendering(renderer, system_prompt)
        case _:
            raise ConfigError(f"{path} should hold chat, an object, and system_prompt, a text; found {said!r}")
