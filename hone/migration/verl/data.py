"""Training and held-out data, and rewards, of a verl run."""

from __future__ import annotations

from pathlib import PurePosixPath

from hone.migration.migration import Migration

LIMIT = 512
GROUND_TRUTH = "reward_model.ground_truth"
"""Column of verl's Parquet files, next to `prompt` (messages), `data_source` and `extra_info`."""

REWARDS = {"gsm8k": "gsm8k", "math": "math", "aime": "math", "dapo": "math", "geo3k": "math"}
"""Part of a data file's name -> the reward here that scores as verl's own function for that data source."""


def read(migration: Migration) -> None:
    """Read data sets and rewards."""
    train = files(migration, "data.train_files")
    _sets(migration, train)
    held_out = files(migration, "data.val_files")
    for path in held_out:
        name = _name(path, "test")
        _columns(migration, f"evaluation.sets.{name}", path)
        rows = migration.number("data.val_max_samples", default=-1)
        if rows > 0:
            migration.put(f"evaluation.sets.{name}.max_rows", int(rows), f"data.val_max_samples={rows}")
    _prompts(migration)
    _reward(migration, train + held_out)


def files(migration: Migration, option: str) -> list[str]:
    value = migration.value(option)
    files = value if isinstance(value, list) else [value] if value else []
    return [str(one) for one in files]


def _name(path: str, default: str) -> str:
    """Name of a data set: its file's folder and stem, in letters that a key may have."""
    parts = PurePosixPath(path).parts[-2:]
    words = "_".join(part.removesuffix(".parquet").removesuffix(".jsonl") for part in parts)
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in words).strip("_") or default


def _sets(migration: Migration, train: list[str]) -> None:
    if not train:
        migration.decide("data.train_files is not set; set data.train.path")
        return
    _columns(migration, "data.train", train[0])
    for path in train[1:]:
        _columns(migration, f"data.mix.{_name(path, 'more')}", path)
    if len(train) > 1:
        migration.decide(
            f"data.train_files has {len(train)} files, which verl joins. Here each is a set of a mixture, drawn by its "
            "weight: set data.train.weight and data.mix.<name>.weight to their numbers of rows"
        )
    rows = migration.number("data.train_max_samples", default=-1)
    if rows > 0:
        migration.put("data.train.max_rows", int(rows), f"data.train_max_samples={rows}")


def _columns(migration: Migration, key: str, path: str) -> None:
    """Set a data set's file and the columns that verl's files have."""
    migration.put(f"{key}.path", path, "data.val_files" if key.startswith("evaluation") else "data.train_files")
    migration.put(f"{key}.columns.ground_truth", GROUND_TRUTH, "where verl's files keep it")
    for option, column in (
        ("data.prompt_key", "prompt"),
        ("data.reward_fn_key", "data_source"),
        ("data.image_key", "images"),
    ):
        name = migration.text(option)
        if name and name != column:
            migration.put(f"{key}.columns.{column}", name, f"{option}={name}")
    limit = int(migration.number("data.max_prompt_length", default=LIMIT))
    migration.put(f"{key}.max_prompt_tokens", limit, f"data.max_prompt_length={limit}")


def _prompts(migration: Migration) -> None:
    drops = migration.truth("data.filter_overlong_prompts")
    cut = migration.text("data.truncation", default="error")
    if cut != "error" and not drops:
        migration.decide(
            f"data.truncation={cut} cuts longer prompts; hone never cuts a prompt. The file drops them "
            "(data.train.too_long: drop); raise data.train.max_prompt_tokens if they matter",
            *(["data.truncation"] if "data.truncation" in migration else []),
        )
    too_long = "drop" if drops or cut != "error" else "error"
    source = f"data.filter_overlong_prompts={drops}, data.truncation={cut}"
    migration.put("data.train.too_long", too_long, source)
    migration.copy("data.shuffle", convert=lambda value: str(value).lower() == "true")
    seed = migration.value("data.seed")
    if seed is not None:
        migration.put("run.seed", int(seed), f"data.seed={seed}")
    for option in [name for name in migration.options if name.startswith("data.apply_chat_template_kwargs.")]:
        migration.copy(option, f"data.chat.options.{option.rpartition('.')[2]}")
    migration.copy("actor_rollout_ref.model.custom_chat_template")
    migration.copy("data.tokenizer")
    _foreign_code(migration)


def _foreign_code(migration: Migration) -> None:
    path = migration.text("data.custom_cls.path")
    if path and path != "None":
        migration.decide(
            f"data.custom_cls is the class {migration.text('data.custom_cls.name')} of {path}; write its rows as a "
            "function (seed, size) -> rows: data.train.source={name: python, function: FILE.py:NAME}",
            "data.custom_cls.path",
            "data.custom_cls.name",
        )


# --------------------------------------------------------------------------------------------------------- rewards


def _reward(migration: Migration, files: list[str]) -> None:
    _overlong(migration)
    places = ("reward.reward_model.model_path", "reward_model.model.path", "reward.reward_model.model.path")
    model = migration.text(*places)
    judged = migration.truth("reward.reward_model.enable", "reward_model.enable") and model not in ("", "None")
    if _custom(migration):
        if judged:
            migration.decide(
                f"verl serves the reward model {model} for the own reward function to ask: let it ask a server of "
                "yours, or set reward.components.model.model.path, which adds the model's score",
                *[name for name in places if name in migration],
            )
        return
    if judged:
        migration.put("reward.components.model.model.path", model, "reward.reward_model.model_path")
        return
    known = {reward for path in files for word, reward in REWARDS.items() if word in path.lower()}
    if len(known) == 1:
        reward = known.pop()
        migration.put(f"reward.components.{reward}.reward", reward, "verl scores these data sources by a rule")
        migration.notes.append(
            f"verl chooses a rule by the column data_source; here it is the reward {reward!r} for all rows. Compare on "
            "answers that verl logged: hone score"
        )
        return
    migration.put("reward.components.score.reward", "math", "to be checked")
    rules = f"for these files that is {', '.join(sorted(known))}" if known else "these files name none that hone knows"
    migration.decide(
        f"verl chooses the reward by the column data_source; {rules}. Set reward.components: a reward of "
        "`hone list rewards`, or FILE.py:FUNCTION (verl's compute_score signature is accepted)"
    )


def _custom(migration: Migration) -> bool:
    """Read the user's own reward function; returns whether there is one."""
    path = migration.text("reward.custom_reward_function.path", "custom_reward_function.path")
    name = migration.text("reward.custom_reward_function.name", "custom_reward_function.name", default="compute_score")
    if not path or path in ("None", "null"):
        return False
    migration.put("reward.components.score.reward", f"{path}:{name}", "reward.custom_reward_function")
    for option in list(migration.options):
        head, separator, key = option.partition("custom_reward_function.reward_kwargs.")
        if separator and head in ("reward.", ""):
            migration.copy(option, f"reward.components.score.options.{key}")
    return True


def _overlong(migration: Migration) -> None:
    """Read DAPO's penalty near the length limit."""
    manager = migration.text("reward.reward_manager.name", "reward_model.reward_manager", default="naive")
    places = [
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
    ]
    enabled = migration.truth(*(f"{place}.enable" for place in places))
    tokens = migration.number(*(f"{place}.len" for place in places), default=0)
    factor = migration.number(*(f"{place}.penalty_factor" for place in places), default=1.0)
    for place in places:
        migration.drop(f"{place}.log", "hone always logs the penalty")
    for base in ("reward", "reward_model"):
        migration.drop(f"{base}.reward_kwargs.max_resp_len", "the limit is rollout.sampling.max_response_tokens")
    if enabled and tokens > 0:
        source = next(place for place in places if f"{place}.enable" in migration)
        migration.put("algorithm.overlong.buffer_tokens", int(tokens), source)
        migration.put("algorithm.overlong.factor", float(factor), source)
    if manager not in ("naive", "dapo", "gdpo", "prime"):
        migration.decide(f"the reward manager {manager} is code of verl's side; write it as a reward: FILE.py:FUNCTION")
