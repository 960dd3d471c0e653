"""Images in requests of agents, by each protocol, at a model that sees them: recorded with their trajectory."""

import asyncio
import base64
import io
import threading

import aiohttp
import pytest
from PIL import Image as Pillow

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.envs.agents import images
from hone.envs.agents.endpoint import Endpoint
from hone.envs.agents.images import told_to_agents
from hone.envs.agents.runner import AgentRunner
from hone.envs.agents.sessions import AgentTask
from hone.envs.episode import Play
from hone.envs.settings import EndpointSettings, EpisodeConfig
from hone.models.building import build_model
from hone.models.loading import DTYPES
from hone.models.settings import BuildConfig, ModelConfig, VisionBuildConfig
from hone.models.tokenizer import build_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Prompt, SamplingParams
from tests.data.test_images import png

SIZES = {"hidden_size": 16, "heads": 2, "layers": 1, "mlp_size": 16}
BUILD = BuildConfig(
    architecture="qwen3_vl", max_positions=256, vision=VisionBuildConfig(**SIZES, patch_size=4), **SIZES
)  # fmt: skip
FIRST, SECOND = png(16, 24), png(24, 16, 1)


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(data):
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "low"}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}


@pytest.fixture(scope="module")
def language():
    return Renderer(build_tokenizer(BUILD), image_reader=load_image_processor(ModelConfig(build=BUILD)))


@pytest.fixture(scope="module")
def model():
    return build_model(BUILD, DTYPES["float32"])


@pytest.fixture
def talk(language, model):
    """`talk(requests)`: the replies (status, body) to [(path, body)], and the session. Bodies may depend on replies."""

    def run(*requests, language=language):
        engine = BuiltinEngine(BuiltinSettings(), model, language.tokenizer)

        async def all_of_it():
            async with Endpoint(language) as endpoint, aiohttp.ClientSession() as http:
                task = AgentTask(engine.generate, SamplingParams(100, seed=1), "1/7/0", lambda number: number)
                key = endpoint.open_session(task)
                replies = []
                for path, body in requests:
                    body = {"model": "policy", "max_tokens": 3, **(body(replies) if callable(body) else body)}
                    if path == "responses":
                        body["max_output_tokens"] = body.pop("max_tokens")
                    async with http.post(f"{endpoint.url_of(key)}/{path}", json=body) as reply:
                        replies.append((reply.status, await reply.json()))
                return replies, endpoint.close_session(key)

        return asyncio.run(asyncio.wait_for(all_of_it(), 60))

    return run


def test_each_protocol_shows_the_image_to_the_model(talk, language):
    block = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FIRST).decode()}
    text = {"type": "text", "text": "what?"}
    replies, session = talk(
        ("chat/completions", {"messages": [user(shown(FIRST))], "n": 2}),
        ("responses", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url(FIRST)}
        ]}]}),
        ("messages", {"messages": [{"role": "user", "content": [text, {"type": "image", "source": block}]}]}),
    )  # fmt: skip
    assert [status for status, _ in replies] == [200] * 3
    messages = language.with_images([user({"type": "image", "image": FIRST})])
    prompt = language.render_prompt(messages)
    image = messages[0]["content"][1]["image"]
    assert prompt.count(image.token_id) == image.tokens > 1
    found = session.trajectories("p", 0)
    assert len(found) == 4
    for one in found:
        assert one.token_ids[: one.prompt_length] == prompt
        assert one.images == (image,)


def test_a_later_image_begins_a_trajectory(talk):
    """Three requests: an image, a question about it, another image."""

    def history(replies):
        said = [one["choices"][0]["message"] for _, one in replies]
        asked = [{"role": "user", "content": "sure?"}, user(shown(SECOND))]
        return [user(shown(FIRST)), *(one for pair in zip(said, asked, strict=False) for one in pair)]

    chat = ("chat/completions", lambda replies: {"messages": history(replies)})
    replies, session = talk(chat, chat, chat)
    assert [status for status, _ in replies] == [200] * 3
    first, second = session.trajectories("p", 0)
    assert (first.turns, second.turns) == (2, 1)
    assert [one.data for one in first.images] == [FIRST]
    assert [one.data for one in second.images] == [FIRST, SECOND]
    assert sum(first.loss_mask) + sum(second.loss_mask) == 9, "each sampled token is trained on once"


class Watching:
    """An image reader that notes the thread of each image that it reads."""

    def __init__(self, reader):
        self._reader, self.token_id, self.threads = reader, reader.token_id, []

    def image(self, data):
        self.threads.append(threading.current_thread())
        return self._reader.image(data)


def test_an_image_is_read_once_in_a_session_and_not_on_the_event_loop(talk):
    """A small file may be an image of 33 million pixels, and every request repeats the images of its history."""
    reader = Watching(load_image_processor(ModelConfig(build=BUILD)))
    language = Renderer(build_tokenizer(BUILD), image_reader=reader)

    def history(replies):
        said = [one["choices"][0]["message"] for _, one in replies]
        return [user(shown(FIRST), shown(FIRST)), *said, *[user(shown(SECOND))] * len(said)]

    chat = ("chat/completions", lambda replies: {"messages": history(replies)})
    replies, session = talk(chat, chat, language=language)
    assert [status for status, _ in replies] == [200] * 2
    assert [len(one.images) for one in session.trajectories("p", 0)] == [2, 3]
    assert len(reader.threads) == 3, "both places of the first request, then the new image only"
    assert threading.main_thread() not in reader.threads


def test_a_session_forgets_the_oldest_images(monkeypatch, language):
    monkeypatch.setattr(images, "MOST_KEPT", len(FIRST) + len(SECOND))
    kept, read = images.DecodedImages(), []

    def decode(messages):
        read.extend(part["image"] for part in images.parts_of(messages) if isinstance(part.get("image"), bytes))
        return language.with_images(messages)

    third = png(8, 8, 2)
    for data in (FIRST, SECOND, FIRST, third, SECOND, FIRST):
        kept.in_place([user({"type": "image", "image": data})], decode)
    assert read == [FIRST, SECOND, third, FIRST]


def test_a_request_has_a_limit_of_images_and_pixels(talk, monkeypatch):
    request = ("chat/completions", {"messages": [user(shown(FIRST)), user(shown(FIRST), shown(SECOND))]})
    monkeypatch.setattr(images, "MOST_IMAGES", 2)
    ((status, many),), session = talk(request)
    assert (status, "has 3 images; at most 2" in many["error"]["message"]) == (400, True)
    monkeypatch.setattr(images, "MOST_IMAGES", 3)
    monkeypatch.setattr(images, "MOST_PIXELS_TOGETHER", 3 * 16 * 24 - 1)
    ((status, large),), _ = talk(request)
    assert (status, "images have over 1151 pixels" in large["error"]["message"]) == (400, True)
    assert session.tracks == []
    monkeypatch.setattr(images, "MOST_PIXELS_TOGETHER", 3 * 16 * 24)
    ((status, _),), _ = talk(request)
    assert status == 200


def bad(part, **more):
    return "chat/completions", {"messages": [user({"type": "image_url", "image_url": part})], **more}


def test_images_that_are_refused(talk, language, monkeypatch, tmp_path):
    (tmp_path / "secret.png").write_bytes(FIRST)
    (tmp_path / "data:").mkdir()  # with this folder, a data URL without base64 would be a path
    monkeypatch.chdir(tmp_path)
    answer = {"role": "assistant", "content": [shown(FIRST)]}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": [shown(FIRST)]}
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    image = {"type": "input_image", "image_url": url(FIRST)}
    remote = {"type": "image", "source": {"type": "url", "url": "https://a"}}
    requests = [
        (bad({"url": "https://example.org/a.png"}), "should be a data URL"),
        (bad({"url": str(tmp_path / "secret.png")}), "should be a data URL"),
        (bad({"url": "data:/../secret.png"}), "should begin with data:image/png;base64"),
        (bad({"url": "data:image/png;base64,?"}), "base64 is not valid"),
        (bad({"url": url(b"GIF98")}), "an image of 5 bytes is none of PNG, JPEG, WEBP, GIF"),
        (bad({}), "should be a data URL"),
        (("chat/completions", {"messages": [user(), answer, user()]}), "role 'assistant' takes text only"),
        (("chat/completions", {"messages": [user(), called, result, user()]}), "role 'tool' takes text only"),
        (("chat/completions", {"messages": [{**user(shown(FIRST)), "role": "system"}, user()]}), "text only"),
        (("chat/completions", {"messages": [user(shown(FIRST), audio)]}), "found {'type': 'input_audio'"),
        (("chat/completions", {"messages": [user(audio)]}), "takes text and images, found {'type': 'input_audio'"),
        (("responses", {"input": [{"role": "system", "content": [image]}, user()]}), "role 'system' takes text only"),
        (("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}), "takes text and images"),
        (("messages", {"messages": [{"role": "user", "content": [remote]}]}), "data URL"),
    ]  # fmt: skip
    replies, session = talk(*(request for request, _ in requests))
    for (status, body), (_, message) in zip(replies, requests, strict=True):
        assert (status, message in body["error"]["message"]) == (400, True), body
    assert session.tracks == []
    monkeypatch.undo()
    monkeypatch.setattr(images, "LARGEST_IMAGE", len(FIRST) - 1)
    ((_, large),), _ = talk(bad({"url": url(FIRST)}))
    assert f"an image has {len(FIRST)} bytes; at most {len(FIRST) - 1} are taken" in large["error"]["message"]
    monkeypatch.setattr(images, "LARGEST_IMAGE", 1 << 20)
    monkeypatch.setattr(images, "MOST_PIXELS", 16 * 24 - 1)
    ((_, wide),), _ = talk(bad({"url": url(FIRST)}))
    assert "an image has 24 x 16 pixels; at most 383 are taken" in wide["error"]["message"]
    monkeypatch.undo()
    ((_, blind),), _ = talk(bad({"url": url(FIRST)}), language=Renderer(language.tokenizer))
    assert "this model takes text only" in blind["error"]["message"]


def test_an_agent_gets_the_images_of_its_prompt_as_data_urls(language):
    blank = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    (image,) = (
        part["image"] for part in language.with_images([user({"type": "image", "image": FIRST})])[0]["content"][1:]
    )
    prompt = Prompt("set/0", (1,), ({"role": "system", "content": "s"}, blank), None, "set", images=(image,))
    told = told_to_agents(prompt)
    assert told.messages[0] == {"role": "system", "content": "s"}
    assert told.messages[1]["content"] == [
        {"type": "image_url", "image_url": {"url": url(FIRST)}},
        {"type": "text", "text": "?"},
    ]


def told_urls(language, *files):
    shown_to_model = language.with_images([user(*({"type": "image", "image": data} for data in files))])
    read = images.images_in(shown_to_model)
    prompt = Prompt("set/3", (1,), shown_to_model, None, "set", images=read)
    return read, [images.source_of(part) for part in told_to_agents(prompt).messages[0]["content"][1:]]


def test_an_agent_gets_what_the_endpoint_takes_whatever_the_format_of_its_images(language):
    picture = Pillow.open(io.BytesIO(FIRST))
    files = []
    for kind, mode in (("BMP", "RGB"), ("TIFF", "CMYK"), ("TIFF", "I;16"), ("TIFF", "RGBA"), ("JPEG", "L")):
        file = io.BytesIO()
        picture.convert("L" if mode == "I;16" else mode).convert(mode).save(file, kind)
        files.append(file.getvalue())
    read, urls = told_urls(language, *files)
    assert [one.partition(";")[0] for one in urls] == ["data:image/png"] * 4 + ["data:image/jpeg"]
    for image, sent in zip(read, urls, strict=True):
        (again,) = language.with_images(images.with_bytes([user({"type": "image", "image": sent})]))[0]["content"][1:]
        assert (again["image"].patches() == image.patches()).all()


def test_a_prompt_whose_images_the_endpoint_would_refuse_is_named(language, monkeypatch):
    monkeypatch.setattr(images, "LARGEST_IMAGE", len(SECOND) - 1)
    with pytest.raises(ConfigError, match=rf"set/3 cannot be given .*: an image has {len(SECOND)} bytes"):
        told_urls(language, SECOND)
    monkeypatch.undo()
    monkeypatch.setattr(images, "MOST_PIXELS", 16 * 24 - 1)
    with pytest.raises(ConfigError, match=r"set/3 cannot be given .*: an image has 24 x 16 pixels"):
        told_urls(language, FIRST)
    monkeypatch.undo()
    monkeypatch.setattr(images, "LONGEST_URLS", len(url(FIRST)))
    told_urls(language, FIRST)
    with pytest.raises(ConfigError, match=r"set/3 cannot be given .*: its images are .* bytes as data URLs"):
        told_urls(language, FIRST, SECOND)


def test_images_that_an_environment_would_not_show_are_refused(language):
    (message,) = language.with_images([user({"type": "image", "image": FIRST})])
    prompt = Prompt("set/0", (1,), (message,), None, "set", images=(message["content"][1]["image"],))
    settings = EndpointSettings(name="another")
    runner = AgentRunner(EpisodeConfig(), settings, language, program=lambda *asked: None)
    with pytest.raises(ConfigError, match="set/0 has images, and this environment takes its task from the row"):
        asyncio.run(runner.run([prompt], Play(None, SamplingParams(4), seed=0, samples=1), None))
