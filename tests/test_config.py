"""Run files: composition, overrides, provenance, choices, unread keys, explanations, schema; errors in one line."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError, model_validator

from hone.composition import Layer, from_yaml, read_layers, to_yaml
from hone.config import (
    Choice,
    Config,
    ConfigError,
    FromRegistry,
    build,
    dump,
    load,
    plain,
    require_all_read,
    setting,
    unread,
    walk,
)
from hone.explain import annotated, explain, schema, type_text
from hone.registry import Entry, Registry, unknown


class Square(Choice):
    name: str = "square"
    side: float = setting(1.0, "length of a side", unit="m", gt=0)
    colour: str = setting("red", "what it looks like")


class Circle(Choice):
    name: str = "circle"
    radius: float = setting(2.0, "distance from the middle", unit="m", gt=0)
    colour: str = setting("blue", "what it looks like")


SHAPES = Registry(
    "shape",
    {
        "square": Entry("math:sqrt", Square),
        "circle": Entry("math:pi", Circle),
        "point": Entry("math:e"),
        "broken": Entry("math:tau", "no_such_package.settings:X"),
    },
)


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


class Optimizer(Config):
    """How weights move."""

    lr: float = setting(1e-3, "step size", gt=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "running averages")
    steps: int = setting(10, "how many", unit="steps", ge=1)


class Actor(Config):
    """What is trained."""

    optimizer: Optimizer = setting(meaning="the optimizer", factory=Optimizer)
    second: Optimizer = setting(Optimizer(lr=0.5, steps=3), "another one, with defaults of its own")
    frozen: bool = setting(False, "train nothing")


class Tool(Config):
    name: str = setting(meaning="what it is called")
    limit: int = setting(1, "calls")


PRESETS = {"round": {"shape": {"name": "circle", "radius": 6}, "limits": {"low": 1}}}


class Drawing(Config):
    """A section whose `preset` fills what is not set."""

    preset: str | None = setting(None, "fills the other keys")
    shape: Annotated[Choice, FromRegistry(SHAPES)] = setting(factory=Square, meaning="which shape")
    limits: dict[str, int] = setting(factory=dict, meaning="some numbers")

    @classmethod
    def underlay(cls, given):
        if given.get("preset") is None:
            return None
        if given["preset"] not in PRESETS:
            raise ConfigError(unknown("preset", given["preset"], list(PRESETS)))
        return Layer(f"preset {given['preset']}", PRESETS[given["preset"]])


class Run(Config):
    """A run."""

    title: str = setting("a run", "what to call it")
    actor: Actor = setting(meaning="the actor", factory=Actor)
    shape: Annotated[Choice, FromRegistry(SHAPES)] = setting(Square(side=4.0), "which shape")
    spare: Annotated[Choice | None, FromRegistry(SHAPES)] = setting(None, "a second shape")
    shapes: Annotated[list[Choice], FromRegistry(SHAPES)] = setting(factory=list, meaning="several shapes")
    by_name: Annotated[dict[str, Choice], FromRegistry(SHAPES)] = setting(factory=dict, meaning="named shapes")
    sets: dict[str, Optimizer] = setting(factory=dict, meaning="named sections")
    tools: list[Tool] = setting([Tool(name="hammer", limit=2)], "sections in a list")
    tool: Tool | None = setting(None, "a section with a name that is no choice")
    extra: dict[str, Any] = setting(factory=dict, meaning="anything")
    mode: Literal["sync", "async"] = setting("sync", "how")
    level: Level = setting(Level.LOW, "how much")
    budget: int | Literal["auto"] = setting("auto", "tokens, or auto")
    folder: Path = setting(Path("runs"), "where")
    stop: tuple[str, ...] = setting((), "stop strings")


class Strict(Config):
    needed: int = setting(meaning="has no default")
    low: int = setting(0, "lower end")
    high: int = setting(1, "upper end")

    @model_validator(mode="after")
    def _ordered(self) -> "Strict":
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        return self


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def run_of(folder: Path, text: str, *overrides: str) -> Run:
    return load(Run, write(folder, text), overrides).config


def error_of(folder: Path, text: str, *overrides: str, cls: type[Config] = Run) -> str:
    with pytest.raises(ConfigError) as caught:
        load(cls, write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(folder) + "/", "")


# ------------------------------------------------------------------------------------------------ files and overrides


def test_an_empty_mapping_gives_the_defaults(tmp_path):
    assert run_of(tmp_path, "{}") == Run()


def test_a_file_over_its_defaults_file_over_nothing(tmp_path):
    write(tmp_path, "title: base\nactor: {frozen: true, optimizer: {lr: 0.1, steps: 7}}", "base.yaml")
    loaded = load(
        Run, write(tmp_path, "defaults: base.yaml\nactor: {optimizer: {lr: 0.2}}"), ["actor.optimizer.steps=9"]
    )
    assert loaded.config.title == "base"
    assert loaded.config.actor.frozen is True
    assert (loaded.config.actor.optimizer.lr, loaded.config.actor.optimizer.steps) == (0.2, 9)
    assert loaded.provenance["title"] == str(tmp_path / "base.yaml")
    assert loaded.provenance["actor.optimizer.lr"] == str(tmp_path / "run.yaml")
    assert loaded.provenance["actor.optimizer.steps"] == "command line"
    assert loaded.provenance["actor.optimizer.betas"] == "default"
    assert set(loaded.provenance) == {key for key, _ in walk(loaded.config)}


def test_defaults_are_named_relative_to_the_file(tmp_path):
    (tmp_path / "inner").mkdir()
    write(tmp_path, "title: from above", "base.yaml")
    path = write(tmp_path / "inner", "defaults: ../base.yaml")
    assert load(Run, path).config.title == "from above"


def test_python_files_and_templates_beside_a_run_file_are_found_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("inner/task.py", "elsewhere/task.py", "elsewhere/own.py", "inner/chat.jinja", "base.py"):
        (tmp_path / name).touch()
    write(tmp_path, "extra: {base: 'base.py:rows'}", "base.yaml")
    text = (
        "defaults: ../base.yaml\nextra: {a: ['task.py:rows', 'own.py:x'], b: chat.jinja, c: task.py, d: 'no task.py:x'}"
    )
    path = write(tmp_path / "inner", text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    inner = tmp_path / "inner"
    found = {
        "a": [f"{inner}/task.py:rows", "own.py:x"],
        "b": f"{inner}/chat.jinja",
        "c": "task.py",
        "d": "no task.py:x",
    }
    assert load(Run, path).config.extra == {"base": f"{tmp_path}/base.py:rows", **found}
    given = load(Run, Path("../inner/run.yaml"), ["extra.a=task.py:rows"]).config.extra
    assert (given["a"], given["b"]) == ("task.py:rows", "../inner/chat.jinja")  # the command line is in this folder


def test_defaults_go_one_level_deep(tmp_path):
    write(tmp_path, "defaults: other.yaml", "base.yaml")
    assert error_of(tmp_path, "defaults: base.yaml") == (
        "base.yaml: a file named by 'defaults' cannot have 'defaults' itself; copy those settings into it"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: [a, b]", "run.yaml: 'defaults' should name one file, found ['a', 'b']"),
        ("defaults: missing.yaml", "no run file missing.yaml (named by 'defaults' in run.yaml)"),
        ("- 1", "run.yaml should contain a mapping (key: value), found list"),
        ("", "run.yaml should contain a mapping (key: value), found nothing"),
        ("just text", "run.yaml should contain a mapping (key: value), found str"),
    ],
)
def test_files_of_the_wrong_shape(tmp_path, text, expected):
    assert error_of(tmp_path, text).startswith(expected)


def test_yaml_that_is_none_says_where(tmp_path):
    assert "line 2" in error_of(tmp_path, "title: a\nactor: [")


def test_a_key_given_twice_is_an_error(tmp_path):
    message = error_of(tmp_path, "actor:\n  frozen: true\n  frozen: false")
    assert "duplicate key 'frozen'; remove one of the two" in message
    assert "line 3" in message


def test_a_template_that_is_not_quoted_is_an_error(tmp_path):
    message = error_of(tmp_path, "title: {{ a }}")
    assert "a key should be text; put a value that begins with {{ in quotes" in message
    assert "line 1" in message


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"title: \xff\xfe")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(Run, tmp_path / "run.yaml")


def test_yaml_tags_build_no_objects(tmp_path):
    assert "not valid YAML" in error_of(tmp_path, "title: !!python/object/apply:os.system ['true']")


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "sort").mkdir()
    write(tmp_path / "sort", "{}", "grpo.yaml")
    with pytest.raises(ConfigError, match=r"no run file .*/sort/gpro\.yaml; did you mean .*/sort/grpo\.yaml\?"):
        load(Run, tmp_path / "sort" / "gpro.yaml")


def test_a_folder_is_no_run_file(tmp_path):
    with pytest.raises(ConfigError, match="no run file"):
        load(Run, tmp_path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("title=x=y", "x=y"),
        ("title=", ""),
        ("title='12'", "12"),
        ("actor.optimizer.lr=1e-4", 1e-4),
        ("actor.optimizer.lr=2", 2.0),
        ("actor.optimizer.steps=1_000", 1000),
        ("actor.frozen=true", True),
        ("mode=async", "async"),
        ("level=high", Level.HIGH),
        ("budget=64", 64),
        ("folder=/tmp/x y", Path("/tmp/x y")),
        ("stop=[a, 'on', \"1\"]", ("a", "on", "1")),
        ("extra={a: {b: 1}}", {"a": {"b": 1}}),
        ("extra.a.b=1", {"a": {"b": 1}}),
        ("spare=null", None),
    ],
)
def test_override_values_are_yaml(tmp_path, override, value):
    config: Any = run_of(tmp_path, "{}", override)
    for part in override.partition("=")[0].split("."):
        if part in type(config).model_fields:
            config = getattr(config, part)
        if not isinstance(config, Config):
            break
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize("override", ["title", "=x", "a..b=1", ".a=1", "a.=1"])
def test_malformed_overrides(tmp_path, override):
    assert error_of(tmp_path, "{}", override) == f"override {override!r} should be key=value, such as run.steps=10"


def test_an_override_that_is_not_yaml(tmp_path):
    assert error_of(tmp_path, "{}", "stop=[a").startswith("override 'stop=[a': the value is not valid YAML")


def test_the_last_of_two_equal_overrides_counts(tmp_path):
    assert run_of(tmp_path, "{}", "title=a", "title=b").title == "b"


def test_a_whole_is_set_before_its_parts_in_any_order(tmp_path):
    for overrides in (["shape.radius=9", "shape=circle"], ["shape=circle", "shape.radius=9"]):
        assert run_of(tmp_path, "{}", *overrides).shape == Circle(radius=9)


def test_free_mappings_add_up_key_by_key_and_say_who_set_them(tmp_path):
    write(tmp_path, "extra: {a: 1, b: {c: 2}}", "base.yaml")
    loaded = load(Run, write(tmp_path, "defaults: base.yaml\nextra: {b: {d: 3}}"), ["extra.e=4"])
    assert loaded.config.extra == {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    assert loaded.provenance["extra"] == f"{tmp_path / 'base.yaml'} and {tmp_path / 'run.yaml'} and command line"


def test_a_null_removes_an_entry_and_an_empty_mapping_all_of_them(tmp_path):
    text = "by_name: {a: square, b: circle}\nsets: {x: {lr: 0.2}}\nextra: {k: 1}"
    loaded = load(Run, write(tmp_path, text), ["by_name.a=null", "sets={}", "extra.k=null"])
    assert list(loaded.config.by_name) == ["b"]
    assert (loaded.config.sets, loaded.provenance["sets"]) == ({}, "command line")
    assert loaded.config.extra == {"k": None}  # here null is a value
    assert list(run_of(tmp_path, text, "sets={}", "sets.y.lr=0.5").sets) == ["x", "y"]
    assert "by_name.a is null, but needs a value" in error_of(tmp_path, "by_name: {a: null}")
    missing = "command line: there is no by_name.aa to remove; by_name has: a, b"
    assert missing in error_of(tmp_path, text, "by_name.aa=null")


def test_lists_are_replaced_whole_or_changed_by_number(tmp_path):
    write(tmp_path, "tools: [{name: saw, limit: 5}, {name: axe}]", "base.yaml")
    path = write(tmp_path, "defaults: base.yaml")
    assert load(Run, path, ["tools=[{name: file}]"]).config.tools == [Tool(name="file")]
    loaded = load(Run, path, ["tools.1.limit=7"])
    assert loaded.config.tools == [Tool(name="saw", limit=5), Tool(name="axe", limit=7)]
    assert loaded.provenance["tools.0.limit"] == str(tmp_path / "base.yaml")
    assert loaded.provenance["tools.1.limit"] == "command line"
    assert load(Run, write(tmp_path, "{}"), ["tools.0.limit=9"]).config.tools == [Tool(name="hammer", limit=9)]
    assert error_of(tmp_path, "defaults: base.yaml", "tools.2.limit=7") == (
        "command line: there is no tools.2: tools has 2 entries, numbered from 0"
    )
    assert "tools should be a list, found {'a': 1}" in error_of(tmp_path, "tools: {a: 1}")


def test_a_section_switched_off_and_on_again_starts_afresh(tmp_path):
    write(tmp_path, "spare: {name: circle, radius: 7}", "base.yaml")
    assert run_of(tmp_path, "defaults: base.yaml", "spare=null").spare is None
    write(tmp_path, "spare: null", "base.yaml")
    assert run_of(tmp_path, "defaults: base.yaml\nspare: circle").spare == Circle()


def test_a_default_object_keeps_what_is_not_set(tmp_path):
    config = run_of(tmp_path, "actor: {second: {steps: 4}}")
    assert config.actor.second == Optimizer(lr=0.5, steps=4)
    assert config.actor.optimizer == Optimizer()


def test_a_key_called_name_outside_choices_is_an_ordinary_key(tmp_path):
    write(tmp_path, "tool: {name: saw, limit: 5}", "base.yaml")
    assert run_of(tmp_path, "defaults: base.yaml", "tool.name=axe").tool == Tool(name="axe", limit=5)


# ------------------------------------------------------------------------------------------------------------ choices


def test_a_choice_by_name_or_with_settings(tmp_path):
    assert run_of(tmp_path, "shape: circle").shape == Circle()
    assert run_of(tmp_path, "shape: {name: circle, radius: 3}").shape == Circle(radius=3)
    assert run_of(tmp_path, "shape: point").shape == Choice(name="point")


def test_without_a_name_the_default_choice_is_adjusted(tmp_path):
    assert run_of(tmp_path, "shape: {colour: green}").shape == Square(side=4.0, colour="green")
    assert "spare should name a shape (broken, circle, point, square)" in error_of(tmp_path, "spare: {side: 1}")


def test_another_name_drops_the_settings_of_the_old_choice(tmp_path):
    write(tmp_path, "shape: {name: square, side: 9, colour: white}", "base.yaml")
    loaded = load(Run, write(tmp_path, "defaults: base.yaml"), ["shape.name=circle"])
    assert loaded.config.shape == Circle()
    assert loaded.provenance["shape.colour"] == "default"
    assert loaded.provenance["shape.name"] == "command line"


@pytest.mark.parametrize("again", ["shape: square", "shape: {name: square}"])
def test_the_same_name_again_keeps_them(tmp_path, again):
    write(tmp_path, "shape: {name: square, side: 9}", "base.yaml")
    assert run_of(tmp_path, f"defaults: base.yaml\n{again}").shape == Square(side=9)


def test_a_name_alone_can_be_adjusted_by_a_later_layer(tmp_path):
    loaded = load(Run, write(tmp_path, "shape: circle"), ["shape.radius=5"])
    assert loaded.config.shape == Circle(radius=5)
    assert loaded.provenance["shape.name"] == str(tmp_path / "run.yaml")


def test_choices_in_lists_and_mappings(tmp_path):
    text = "shapes: [circle, {name: square, side: 3}]\nby_name: {a: point, b: {name: circle, radius: 1}}"
    config = run_of(tmp_path, text, "shapes.0.radius=8", "by_name.b.radius=6")
    assert config.shapes == [Circle(radius=8), Square(side=3)]
    assert config.by_name == {"a": Choice(name="point"), "b": Circle(radius=6)}


def test_choices_built_in_python_have_the_class_of_their_entry():
    assert Run(shape={"name": "circle", "radius": 8}).shape == Circle(radius=8)
    assert Run(shape="circle").shape == Circle()
    assert Run(shape=Circle(radius=3)).shape == Circle(radius=3)
    assert Run(spare={"name": "square"}).spare == Square()
    assert Run(shapes=[{"name": "circle", "radius": 2}, "point"]).shapes == [Circle(radius=2), Choice(name="point")]
    assert Run(shape=Square(name="circle")).shape == Circle(), "the name chooses, not the class that bears it"
    for wrong, said in (
        ({"name": "sqare"}, "shape: unknown shape 'sqare'; did you mean 'square'"),
        ({"name": "circle", "side": 1}, "shape.side is a setting of shape=square, and shape is circle"),
        ({"name": "circle", "radius": 0}, r"shape.radius should be greater than 0 \(found 0\)"),
    ):
        with pytest.raises(ValidationError, match=said):
            Run(shape=wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("shape: sqare", "run.yaml: shape: unknown shape 'sqare'; did you mean 'square'? (there is: broken, circle,"),
        ("shape: {name: circle, side: 1}", "run.yaml: shape.side is a setting of shape=square, and shape is circle: "),
        (
            "shape: {name: point, side: 1}",
            "run.yaml: shape.side is a setting of shape=square, and shape is point: set sh",
        ),
        ("shape: {name: point, edge: 1}", "run.yaml: unknown key 'shape.edge' (shape has: name)"),
        ("shape: 3", "run.yaml: shape should name a shape (broken, circle, point, square), found 3"),
        ("shape: null", "run.yaml: shape is null, but needs a value; remove the key to get its default"),
        ("shapes: [{side: 1}]", "run.yaml: shapes.0 should name a shape"),
        ("by_name: {a: {name: circle, radius: 0}}", "run.yaml: by_name.a.radius should be greater than 0 (found 0)"),
        ("shape: broken", "run.yaml: shape: shape 'broken' (no_such_package.settings:X) cannot be loaded: No module"),
    ],
)
def test_choices_that_cannot_be(tmp_path, text, expected):
    assert error_of(tmp_path, text).startswith(expected)


def test_a_preset_lies_below_everything_that_is_set(tmp_path):
    loaded = load(Drawing, write(tmp_path, "preset: round\nlimits: {high: 2}"), ["shape.colour=white"])
    assert loaded.config.shape == Circle(radius=6, colour="white")
    assert loaded.config.limits == {"low": 1, "high": 2}
    assert loaded.provenance["shape.radius"] == "preset round"
    assert loaded.provenance["shape.colour"] == "command line"
    assert load(Drawing, tmp_path / "run.yaml", ["shape=square"]).config.shape == Square()
    assert error_of(tmp_path, "preset: ruond", cls=Drawing) == (
        "run.yaml: unknown preset 'ruond'; did you mean 'round'? (there is: round)"
    )


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            "titel: x",
            (),
            "run.yaml: unknown key 'titel'; did you mean 'title'? (the top level has: title, actor, shape,",
        ),
        ("actor: {froze: true}", (), "run.yaml: unknown key 'actor.froze'; did you mean 'actor.frozen'?"),
        (
            "actor: {optimizer: {lrr: 1}}",
            (),
            "run.yaml: unknown key 'actor.optimizer.lrr'; did you mean 'actor.optimizer.lr'?",
        ),
        ("sets: {a: {step: 1}}", (), "run.yaml: unknown key 'sets.a.step'; did you mean 'sets.a.steps'?"),
        ("tools: [{name: a, limt: 1}]", (), "run.yaml: unknown key 'tools.0.limt'; did you mean 'tools.0.limit'?"),
        (
            "{}",
            ("actor.optimizer.zzzzz=1",),
            "command line: unknown key 'actor.optimizer.zzzzz' (actor.optimizer has: lr,",
        ),
        ("1: 2", (), "run.yaml: unknown key '1'"),
        ("actor: 3", (), "run.yaml: actor should be a mapping (key: value), found 3"),
        ("actor: {optimizer: {lr: -1}}", (), "run.yaml: actor.optimizer.lr should be greater than 0 (found -1)"),
        ("{}", ("actor.optimizer.lr=fast",), "command line: actor.optimizer.lr should be a valid number"),
        ("actor: {optimizer: {lr: true}}", (), "run.yaml: actor.optimizer.lr should be a number (found true)"),
        ("actor: {optimizer: {steps: 1.5}}", (), "run.yaml: actor.optimizer.steps should be a valid integer"),
        ("actor: {optimizer: {lr: .nan}}", (), "run.yaml: actor.optimizer.lr should be a finite number (found nan)"),
        ("actor: {optimizer: {betas: [0.9, x]}}", (), "run.yaml: actor.optimizer.betas.1 should be a valid number"),
        ("actor: {optimizer: {betas: [0.9]}}", (), "run.yaml: actor.optimizer.betas has too few entries (found [0.9])"),
        ("mode: asinc", (), "run.yaml: mode should be 'sync' or 'async' (found 'asinc'; did you mean 'async'?)"),
        ("level: hihg", (), "run.yaml: level should be 'low' or 'high' (found 'hihg'; did you mean 'high'?)"),
        (
            "budget: all",
            (),
            "run.yaml: budget should be a valid integer, unable to parse string as an integer or should be 'auto'",
        ),
        ("title: 12", (), "run.yaml: title should be a valid string (found 12)"),
        ("title: null", (), "run.yaml: title is null, but needs a value"),
        ("tools: [{limit: 1}]", (), "run.yaml: tools.0.name is required and was not set"),
        ("tools: [null]", (), "run.yaml: tools.0 is null, but needs a value"),
    ],
)
def test_errors_name_file_key_value_and_expectation(tmp_path, text, overrides, expected):
    assert error_of(tmp_path, text, *overrides).startswith(expected)


def test_a_missing_required_key_is_blamed_on_the_file(tmp_path):
    assert error_of(tmp_path, "low: 0", "high=3", cls=Strict) == "run.yaml: needed is required and was not set"


def test_all_missing_keys_are_named_at_once(tmp_path):
    class Two(Strict):
        other: int

    said = error_of(tmp_path, "low: 0", cls=Two)
    assert said == "run.yaml: needed is required and was not set; so are: other"


def test_a_missing_section_names_the_keys_that_are_required_in_it(tmp_path):
    class Inner(Config):
        size: int
        free: int = 1

    class Outer(Config):
        inner: Inner
        parts: list[Inner]

    said = error_of(tmp_path, "{}", cls=Outer)
    assert said == "run.yaml: inner.size is required and was not set; so are: parts"
    said = error_of(tmp_path, "inner: {free: 2}\nparts: []", cls=Outer)
    assert said == "run.yaml: inner.size is required and was not set"


def test_null_takes_back_what_a_lower_layer_set(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("title: mine\nactor: {optimizer: {lr: 0.5}, second: {steps: 9}}\nshape: circle\n")
    loaded = load(Run, file, ["title=null", "actor.optimizer.lr=null", "actor.second=null", "shape=null"])
    config = loaded.config
    assert (config.title, config.actor.optimizer.lr) == ("a run", 1e-3)
    assert (config.actor.second, config.shape) == (Optimizer(lr=0.5, steps=3), Square(side=4.0))
    assert "title" not in loaded.explicit()


def test_a_validator_of_the_class_speaks_for_its_section(tmp_path):
    message = error_of(tmp_path, "{needed: 1, low: 3, high: 2}", cls=Strict)
    assert message == "run.yaml: the run file: low = 3 is above high = 2"


def test_settings_are_frozen(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        Run().title = "x"


def test_build_of_plain_data_names_source_and_path():
    assert build(Optimizer, {"lr": 2}, "preset").lr == 2
    with pytest.raises(ConfigError, match=r"preset: a\.b\.lr should be greater than 0 \(found 0\)"):
        build(Optimizer, {"lr": 0}, "preset", "a.b")
    already = Optimizer(lr=3)
    assert build(Optimizer, already, "preset") is already


# --------------------------------------------------------------------------------------------------------- round trip

CONFIGS = st.builds(
    Run,
    title=st.text(),
    actor=st.builds(Actor, optimizer=st.builds(Optimizer, lr=st.floats(1e-300, 1e300), steps=st.integers(1, 10**30))),
    shape=st.one_of(st.builds(Square, colour=st.text()), st.builds(Circle, radius=st.floats(1e-9, 1e9))),
    spare=st.one_of(st.none(), st.builds(Circle)),
    shapes=st.lists(st.one_of(st.builds(Square), st.builds(Circle)), max_size=2),
    by_name=st.dictionaries(st.text(), st.builds(Square), max_size=2),
    sets=st.dictionaries(st.text(), st.builds(Optimizer), max_size=2),
    extra=st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text()), max_size=3),
    mode=st.sampled_from(["sync", "async"]),
    level=st.sampled_from(Level),
    budget=st.one_of(st.just("auto"), st.integers()),
    stop=st.lists(st.text(), max_size=3).map(tuple),
)


@given(CONFIGS)
def test_what_is_dumped_loads_to_the_same_settings(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump(config), encoding="utf-8")
    again = load(Run, path).config
    assert again == config
    assert dump(again) == dump(config)


AMBIGUOUS = "1e-4 on off yes no null ~ 010 0x1f 1:30 2026-01-01 1_000 .inf << = true 1. .5 +1 !x &a *a | > # - {a} [a]"
TEXTS = st.one_of(
    st.text(), st.sampled_from([*AMBIGUOUS.split(), "", "- a", "a: b", "# a", "'", '"', "\t", "a\nb", "\x85"])
)


@given(st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))))
def test_yaml_round_trip(data):
    assert from_yaml(to_yaml(data)) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E3", -2000.0),
        ("off", "off"),
        ("no", "no"),
        ("010", "010"),
        ("0x10", 16),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("1_000_000", 1_000_000),
        ("1.5", 1.5),
        (".5", 0.5),
        ("~", None),
        ("true", True),
        ("0", 0),
    ],
)
def test_plain_scalars(text, value):
    found = from_yaml(text)
    assert found == value
    assert type(found) is type(value)


def test_equality_is_of_class_and_values_only():
    left, right = Optimizer(), Optimizer()
    _ = left.lr
    assert left == right
    assert hash(left) == hash(right)
    assert left != Optimizer(lr=5)
    assert type("A", (Optimizer,), {})() != type("B", (Optimizer,), {})()


def test_plain_keeps_the_fields_of_the_chosen_class():
    assert plain(Run(shape=Circle(radius=3)))["shape"] == {"name": "circle", "radius": 3.0, "colour": "blue"}


# -------------------------------------------------------------------------------------------------------- unread keys


def test_a_key_nobody_reads_is_an_error_that_names_what_set_it(tmp_path):
    loaded = load(Run, write(tmp_path, "title: x\nactor: {frozen: true}"), ["actor.optimizer.lr=2", "shape.side=3"])
    assert unread(loaded) == ["title", "actor.optimizer.lr", "actor.frozen", "shape.side"]
    _ = loaded.config.title, loaded.config.actor.optimizer.lr, loaded.config.shape.side
    with pytest.raises(ConfigError) as caught:
        require_all_read(loaded)
    assert str(caught.value) == (
        f"no part of this run uses these keys: actor.frozen (set by {tmp_path / 'run.yaml'}); "
        "remove them, or choose the part that does"
    )
    _ = loaded.config.actor.frozen
    require_all_read(loaded)


def test_reaching_through_a_section_reads_none_of_its_keys(tmp_path):
    loaded = load(Run, write(tmp_path, "actor: {frozen: true}"))
    _ = loaded.config.actor
    assert unread(loaded) == ["actor.frozen"]


def test_looking_is_not_reading(tmp_path):
    loaded = load(Run, write(tmp_path, "title: x\ntools: [{name: a}]\nsets: {a: {lr: 1}}\nextra: {a: 1}"))
    dump(loaded.config)
    explain(loaded, "title")
    repr(loaded.config)
    list(walk(loaded.config))
    list(annotated(loaded))
    assert loaded.config == load(Run, tmp_path / "run.yaml").config
    assert unread(loaded) == ["title", "sets.a.lr", "tools.0.name", "extra"]


def test_the_name_of_a_choice_is_read_by_its_registry_other_names_are_not(tmp_path):
    loaded = load(Run, write(tmp_path, "shape: circle\ntool: {name: saw}"))
    assert unread(loaded) == ["tool.name"]


def test_validators_do_not_count_as_readers(tmp_path):
    loaded = load(Strict, write(tmp_path, "{needed: 1, low: 1, high: 2}"))
    assert unread(loaded) == ["needed", "low", "high"]


def test_a_default_that_is_written_out_need_not_be_read(tmp_path):
    loaded = load(Strict, write(tmp_path, "{needed: 1, low: 0, high: 2}"))
    assert unread(loaded) == ["needed", "high"]


# -------------------------------------------------------------------------------------------------------- explanations


def test_explain_tells_everything_about_a_key(tmp_path):
    loaded = load(Run, write(tmp_path, "actor: {optimizer: {steps: 20}}"))
    (found,) = explain(loaded, "actor.optimizer.steps")
    assert (found.meaning, found.unit, found.type) == ("how many", "steps", "int >= 1")
    assert (found.default, found.value, found.source) == ("10", 20, str(tmp_path / "run.yaml"))


def test_explain_of_a_section_covers_its_keys(tmp_path):
    loaded = load(Run, write(tmp_path, "{}"))
    assert [e.key for e in explain(loaded, "actor.second")] == [f"actor.second.{k}" for k in ("lr", "betas", "steps")]
    assert explain(loaded, "actor.second.lr")[0].default == "0.5"


def test_the_default_shown_is_that_of_the_place_not_of_the_class(tmp_path):
    loaded = load(Run, write(tmp_path, "actor: {second: {lr: 7}}\nshape: {side: 1}"))
    assert explain(loaded, "actor.second.lr")[0].default == "0.5"
    assert explain(loaded, "shape.side")[0].default == "4.0"


def test_explain_of_a_choice_lists_the_registry(tmp_path):
    loaded = load(Run, write(tmp_path, "shapes: [circle]"))
    (found,) = explain(loaded, "shape.name")
    assert (found.meaning, found.type, found.default) == (
        "which shape",
        "one of broken, circle, point, square",
        "square",
    )
    assert explain(loaded, "shapes.0.name")[0].meaning == "several shapes"
    assert explain(loaded, "shapes.0.radius")[0].unit == "m"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor.optimiser.lr", "unknown key 'actor.optimiser.lr'; did you mean actor.optimizer.lr or "),
        ("tool.limit", "tool.limit has no value in this run, because tool is not set"),
        ("zzz", "unknown key 'zzz'"),
    ],
)
def test_explain_of_a_key_that_is_not_there(tmp_path, key, expected):
    loaded = load(Run, write(tmp_path, "{}"))
    with pytest.raises(ConfigError) as caught:
        explain(loaded, key)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("title", "text"),
        ("mode", "one of sync, async"),
        ("level", "one of low, high"),
        ("budget", "int or one of auto"),
        ("folder", "path"),
        ("stop", "list of text"),
        ("sets", "mapping of text to a section"),
        ("extra", "mapping of text to anything"),
        ("tool", "a section or null"),
    ],
)
def test_types_in_words(field, text):
    assert type_text(Run.model_fields[field]) == text


def test_annotated_yaml_says_on_each_line_what_set_it(tmp_path):
    text = 'title: "two\\nlines"\nshape: {name: square, side: 2}\ntools: [{name: saw}, {name: axe, limit: 3}]'
    loaded = load(Run, write(tmp_path, text), ["stop=[a, b]"])
    lines = list(annotated(loaded))
    assert from_yaml("\n".join(line for line, _ in lines)) == from_yaml(dump(loaded.config))
    marked = {line.strip(): source.rpartition("/")[2] for line, source in lines if source}
    assert marked["side: 2.0"] == "run.yaml"
    assert marked["limit: 3"] == "run.yaml"
    assert marked["stop:"] == "command line"
    assert marked["- name: axe"] == "run.yaml"
    assert "colour: red" not in marked
    commented = "\n".join(f"{line}  # {source}" if source else line for line, source in lines)
    assert from_yaml(commented) == from_yaml(dump(loaded.config))


# ------------------------------------------------------------------------------------------------------------- schema


def test_schema_holds_the_registries_choices():
    described = schema(Run)
    json.dumps(described)
    arms = described["properties"]["shape"]["anyOf"]
    assert arms[0] == {"enum": ["broken", "circle", "point", "square"]}
    circle = next(arm for arm in arms[1:] if arm["properties"]["name"] == {"const": "circle"})
    assert circle["properties"]["radius"]["exclusiveMinimum"] == 0
    assert circle["additionalProperties"] is False
    assert described["properties"]["spare"]["anyOf"][1] == {"type": "null"}
    assert described["properties"]["shapes"]["items"]["anyOf"][0] == arms[0]
    assert described["properties"]["by_name"]["additionalProperties"]["anyOf"][0] == arms[0]


def test_schema_of_sections_and_values():
    described = schema(Run)
    assert described["properties"]["mode"]["enum"] == ["sync", "async"]
    assert described["properties"]["title"]["description"] == "what to call it"
    reference = described["properties"]["actor"]["$ref"].removeprefix("#/$defs/")
    actor = described["$defs"][reference]
    assert actor["additionalProperties"] is False
    inner = described["$defs"][actor["properties"]["optimizer"]["$ref"].removeprefix("#/$defs/")]
    assert inner["properties"]["steps"] == {"type": "integer", "minimum": 1, "default": 10, "description": "how many"}
    assert "required" not in json.dumps(described)
    assert described["properties"]["defaults"]["type"] == "string"


def test_read_layers_in_the_order_in_which_they_win(tmp_path):
    write(tmp_path, "title: a", "base.yaml")
    path = write(tmp_path, "defaults: base.yaml\nmode: async")
    assert [(Path(source).name, data) for source, data in read_layers(path, ["a.b=1", "a.c=2"])] == [
        ("base.yaml", {"title": "a"}),
        ("run.yaml", {"mode": "async"}),
        ("command line", {"a": {"b": 1, "c": 2}}),
    ]
