"""Images of data sets: where they come from, the tokens they take, where they are in a batch, and what is refused."""

import base64
import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from PIL import ImageOps
from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor

from hone.data.images import encoded
from hone.data.messages import RenderingError
from hone.data.packed_images import ImagePlaceError, places
from hone.data.packing import Sample, balanced, pack, pack_samples, select, sequence_costs
from hone.data.preference_readers import PairMaker
from hone.data.rendering import Renderer
from hone.data.settings import DatasetConfig, HfSettings, ShapesSettings
from hone.data.sources.base import DataError
from hone.data.sources.shapes import COLOURS, QUESTIONS, open_shapes
from hone.data.stream import PromptMaker, SampleMaker, read_all, read_prompts
from hone.models.settings import BuildConfig, ModelConfig, UseConfig, VisionBuildConfig, VisionConfig
from hone.models.tokenizer import build_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.types import Prompt, StopReason, Trajectory, TrajectoryGroup

BUILD = BuildConfig(
    architecture="qwen3_vl",
    hidden_size=16,
    heads=2,
    mlp_size=16,
    layers=1,
    vision=VisionBuildConfig(hidden_size=16, heads=2, layers=1, mlp_size=16, patch_size=4),
)
START, IMAGE, END = 8, 9, 10


def reader(vision=None):
    processor = load_image_processor(ModelConfig(build=BUILD, use=UseConfig(vision=vision)))
    assert processor is not None
    return processor


@pytest.fixture(scope="module")
def renderer():
    return Renderer(build_tokenizer(BUILD), image_reader=reader())


def picture(height=16, width=24, seed=0):
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(*size, kind="PNG"):
    buffer = io.BytesIO()
    picture(*size).save(buffer, kind)
    return buffer.getvalue()


def asking(source, text="what?"):
    return [{"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": text}]}]


def prompts_of(path, renderer, **settings):
    config = DatasetConfig(path=str(path), **settings)
    return read_prompts("train", config, renderer, "data.train")[0]


# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(("height", "width"), [(16, 24), (8, 8), (33, 70), (5, 9), (500, 20), (300, 400)])
@pytest.mark.parametrize("full", [Qwen2_5_VLProcessor, Qwen3VLProcessor])
def test_an_image_takes_as_many_tokens_as_the_models_own_processor_gives_it(height, width, full):
    own = reader()
    image = own.image(png(height, width))
    made = own._processor(images=[picture(height, width)], return_tensors="np")
    assert list(image.grid) == made["image_grid_thw"][0].tolist()
    stand_in = SimpleNamespace(image_processor=own._processor, image_token="#")
    assert image.tokens == len(full.replace_image_token(stand_in, made, 0))
    assert image.patches().shape == (image.grid[1] * image.grid[2], 3 * 2 * 4 * 4)
    np.testing.assert_array_equal(image.patches(), made["pixel_values"])


def test_the_limits_of_the_run_file_are_kept():
    assert reader().image(png(64, 64)).grid == (1, 16, 16)
    assert reader(VisionConfig(max_pixels=1024)).image(png(64, 64)).grid == (1, 8, 8)
    assert reader(VisionConfig(min_pixels=1024)).image(png(8, 8)).grid == (1, 8, 8)


def test_a_rendered_prompt_has_the_tokens_of_its_images_between_their_marks(renderer):
    messages = renderer.with_images([{"role": "system", "content": "see"}, *asking(png(16, 24))])
    ids = renderer.render_prompt(messages)
    text = renderer.decode(ids, keep_special=True)
    assert (
        text.replace("<|image_pad|>", "#")
        == "<bos><system>see<user><|vision_start|>######<|vision_end|>what?<assistant>"
    )


def test_the_loss_of_a_sample_is_on_the_answer_alone(renderer):
    messages = renderer.with_images([*asking(png(16, 24)), {"role": "assistant", "content": "ab"}])
    ids, mask = renderer.render_sample(messages)
    assert renderer.decode([i for i, learnt in zip(ids, mask, strict=True) if learnt], keep_special=True) == "ab<eos>"
    assert sum(mask) == 3
    assert ids.count(IMAGE) == 6
    two = renderer.with_images(
        [
            *asking(png(16, 24)),
            {"role": "assistant", "content": "ab"},
            *asking(png(8, 8)),
            {"role": "assistant", "content": "c"},
        ]
    )
    ids, mask = renderer.render_sample(two)
    assert ids.count(IMAGE) == 7
    assert renderer.decode([i for i, m in zip(ids, mask, strict=True) if m], keep_special=True) == "ab<eos>c<eos>"


# ------------------------------------------------------------------------------------------------------------- sources


def test_every_way_to_give_an_image_gives_the_same_one(tmp_path, renderer, write_jsonl, write_parquet):
    data = png(16, 24)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    said = {"type": "text", "text": "what?"}
    rows = [
        {"messages": asking("pictures/a.png")},
        {"messages": asking(str(tmp_path / "pictures/a.png"))},
        {"messages": asking(url)},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, said]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, said]}], "images": ["pictures/a.png"]},
        {"prompt": "<image>what?", "images": ["pictures/a.png"]},
        {"prompt": "what?", "images": ["pictures/a.png"]},
        {"prompt": "what?", "images": url},
    ]  # fmt: skip
    found = prompts_of(write_jsonl(tmp_path / "rows.jsonl", rows), renderer)
    packed = write_parquet(tmp_path / "rows.parquet", [{"prompt": "what?", "images": [{"bytes": data, "path": None}]}])
    found += prompts_of(packed, renderer)
    assert len(found) == len(rows) + 1
    assert {prompt.token_ids for prompt in found} == {found[0].token_ids}
    assert {prompt.images for prompt in found} == {found[0].images}
    assert found[0].images[0].data == data
    for prompt in found:  # rewards and chat templates are given text, never bytes
        assert prompt.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
        assert "images" not in prompt.row
        json.dumps([prompt.messages, dict(prompt.row)])


def as_read(image, kind="PNG", **options):
    """The pixels that the model is given, seen through patches of a picture that needs no resizing."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return reader().image(buffer.getvalue()).patches()


def test_a_picture_is_read_as_people_see_it():
    plain = picture(16, 24)
    for orientation in range(1, 9):
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        buffer = io.BytesIO()
        plain.save(buffer, "PNG", exif=exif)
        shown = as_read(ImageOps.exif_transpose(Pillow.open(buffer)))
        np.testing.assert_array_equal(as_read(plain, exif=exif), shown)
        np.testing.assert_array_equal(reader().image(encoded(Pillow.open(buffer), Path())).patches(), shown)
    # EXIF data of a camera that writes a unit as text, which Pillow cannot write again
    odd = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    odd += struct.pack(">HHI4s", 0x0128, 2, 4, b"cm\0\0") + b"\0\0\0\0"
    buffer = io.BytesIO()
    plain.save(buffer, "PNG", exif=odd)
    with pytest.raises(struct.error):
        ImageOps.exif_transpose(Pillow.open(buffer))
    np.testing.assert_array_equal(as_read(plain, exif=odd), as_read(plain.transpose(Pillow.Transpose.ROTATE_270)))

    half = plain.convert("RGBA")
    half.paste((0, 0, 0, 0), (0, 0, 12, 16))
    on_white = plain.copy()
    on_white.paste("white", (0, 0, 12, 16))
    np.testing.assert_array_equal(as_read(half), as_read(on_white))
    np.testing.assert_array_equal(as_read(half.quantize()), as_read(half.quantize().convert("RGBA")))

    grey = np.asarray(plain.convert("L"))
    deep = Pillow.fromarray(grey.astype(np.uint16) * 257)
    np.testing.assert_array_equal(as_read(deep), as_read(Pillow.fromarray(grey)))
    with pytest.raises(ValueError, match="32-bit numbers without a range; save it as PNG with 8 or 16 bits"):
        as_read(Pillow.fromarray(grey.astype(np.float32)), "TIFF")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "PA", "I;16"])
def test_pil_images_of_every_mode_are_taken(renderer, mode):
    white = Pillow.new("RGB", (24, 16), "white")
    given = white.convert(mode) if mode != "I;16" else Pillow.fromarray(np.full((16, 24), 65535, np.uint16))
    (message,) = renderer.with_images(asking(given))
    np.testing.assert_allclose(message["content"][0]["image"].patches(), as_read(white), atol=0.02)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_pil_image_without_a_range_is_refused(renderer, mode):
    with pytest.raises(RenderingError, match=f"PIL image of mode {mode} has no range of brightness; convert it"):
        renderer.with_images(asking(picture().convert(mode)))


def test_a_data_set_of_the_datasets_library_gives_its_decoded_images(tmp_path, renderer):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "pictures": datasets.List(datasets.Image())})
    rows = datasets.Dataset.from_list([{"prompt": "what?", "pictures": [picture(16, 24)]}], features=features)
    rows.save_to_disk(tmp_path / "saved")
    config = DatasetConfig(path=str(tmp_path / "saved"), source=HfSettings(), columns={"images": "pictures"})
    ((prompt,), _) = read_prompts("train", config, renderer, "data.train")
    np.testing.assert_array_equal(prompt.images[0].patches(), reader().image(png(16, 24)).patches())
    assert prompt.row == {}


def test_preference_pairs_show_the_image_on_both_sides(tmp_path, renderer, write_jsonl):
    (tmp_path / "a.png").write_bytes(png())
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "what?", "images": ["a.png"], "chosen": "a", "rejected": "b"}])
    pair = PairMaker("train", DatasetConfig(path=str(path)), renderer, "data.train").make(0)
    assert pair.chosen.images == pair.rejected.images
    assert len(pair.chosen.images) == 1


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": asking("gone.png")}, "image .*gone.png cannot be read: there is no such file"),
        ({"messages": asking("text.png")}, "image text.png: its 5 bytes are no image of a known format"),
        ({"messages": asking("half.png")}, "image half.png: it cannot be decoded: .*truncated"),
        ({"messages": asking("line.png")}, "image line.png: absolute aspect ratio must be smaller than 200"),
        ({"messages": asking("https://a.b/c.png")}, "image https://a.b/c.png is elsewhere: hone fetches none"),
        ({"messages": asking("data:image/png;base64,!!")}, "given as base64 is not valid"),
        ({"messages": asking("data:image/png,raw")}, "should begin with data:image/png;base64"),
        ({"messages": asking(7)}, "should be a path, bytes, .* or a PIL image, found int"),
        ({"messages": asking(None)}, "should be a path, bytes, .* or a PIL image, found NoneType"),
        (
            {"prompt": "<image> and <image>", "images": ["ok.png"]},
            "the column of images has 1, the messages have 2 marks",
        ),
        ({"messages": [{"role": "system", "content": "x"}], "images": ["ok.png"]}, "no message of the user could show"),
    ],
)
def test_a_row_whose_image_cannot_be_used_is_named_in_one_sentence(tmp_path, renderer, write_jsonl, row, says):
    (tmp_path / "ok.png").write_bytes(png())
    (tmp_path / "text.png").write_bytes(b"hello")
    (tmp_path / "half.png").write_bytes(png(64, 64)[:2000])
    (tmp_path / "line.png").write_bytes(png(1, 300))
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "first"}, row])
    maker = PromptMaker("train", DatasetConfig(path=str(path)), renderer, "data.train")
    maker.make(0)
    with pytest.raises(DataError, match=rf"rows\.jsonl line 2: .*{says}") as caught:
        maker.make(1)
    assert "\n" not in str(caught.value)


def test_a_placeholder_in_the_text_of_a_row_is_text(tmp_path, renderer, write_jsonl):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "is <|image_pad|> it?"}])
    prompt = PromptMaker("train", DatasetConfig(path=str(path)), renderer, "data.train").make(0)
    assert renderer.tokenizer.convert_tokens_to_ids("<|image_pad|>") not in prompt.token_ids
    assert prompt.images == ()


def test_rows_whose_images_are_too_large_are_dropped_and_the_reason_says_so(tmp_path, renderer, write_jsonl):
    (tmp_path / "large.png").write_bytes(png(64, 64))
    (tmp_path / "small.png").write_bytes(png(8, 8))
    rows = [{"prompt": "what?", "images": [name]} for name in ("large.png", "small.png")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = DatasetConfig(path=str(path), max_prompt_tokens=32)
    prompts, dropped = read_prompts("train", config, renderer, "data.train")
    assert ([len(prompt.images) for prompt in prompts], dropped) == ([1], 1)
    with pytest.raises(
        DataError, match=r"longer than max_prompt_tokens=32; the shortest has 74 tokens, 64 of them images"
    ):
        read_prompts("train", DatasetConfig(path=str(path), max_prompt_tokens=32, max_rows=1), renderer, "data.train")


def test_a_model_of_text_refuses_images():
    text = Renderer(build_tokenizer(BuildConfig()))
    with pytest.raises(RenderingError, match="this model takes text only"):
        text.with_images(asking(png()))
    with pytest.raises(RenderingError, match="an image that was not read"):
        text.render_prompt(asking(png()))


def test_a_template_that_leaves_images_out_is_refused(renderer):
    dumb = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}<eos>"
    other = Renderer(renderer.tokenizer, dumb, image_reader=reader())
    with pytest.raises(RenderingError, match="the chat template renders 0 of the 1 images"):
        other.render_prompt(other.with_images(asking(png())))


def test_answers_and_later_turns_show_no_images(renderer):
    shown = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "image", "image": png()}]}]
    with pytest.raises(RenderingError, match="stands in an answer to learn"):
        renderer.render_sample(renderer.with_images(shown))
    with pytest.raises(RenderingError, match="images can be in the prompt only"):
        renderer.render_continuation((1, 2), renderer.with_images(asking(png())))


# ------------------------------------------------------------------------------------------------------------- batches


def shown(*sizes):
    images = tuple(reader().image(png(*size)) for size in sizes)
    ids = (1, *(token for image in images for token in (START, *[IMAGE] * image.tokens, END)), 30, 31)
    return Sample(ids, (*[0] * (len(ids) - 1), 1), "s", images)


def batch():
    """Sequences with 1, 0, 2 and 1 images; the first and the last show the same one."""
    return pack_samples([shown((16, 24)), Sample((1, 2, 3), (0, 0, 1)), shown((8, 8, 1), (8, 16, 2)), shown((16, 24))])


def test_a_batch_holds_each_image_once_and_says_where_it_is():
    images = batch().images
    assert images.grids.tolist() == [[1, 4, 6], [1, 2, 2], [1, 2, 4]]
    assert images.tokens.tolist() == [6, 1, 2]
    assert images.index.tolist() == [0, 1, 2, 0]
    assert images.counts.tolist() == [1, 0, 2, 1]
    assert images.starts.tolist() == [2, 2, 5, 2]
    assert images.patches.shape == (24 + 4 + 8, 96)


def test_select_takes_the_images_of_the_sequences_in_their_order():
    whole = batch()
    part = select(whole, [2, 1, 2]).images
    assert part.grids.tolist() == [[1, 2, 2], [1, 2, 4]]
    assert (part.index.tolist(), part.counts.tolist(), part.starts.tolist()) == ([0, 1, 0, 1], [2, 0, 2], [2, 5, 2, 5])
    assert torch.equal(part.patches, whole.images.patches[24:])
    assert select(whole, [1]).images is None
    assert select(whole, []).images is None
    back = select(select(whole, [3, 2, 1, 0]), [3, 2, 1, 0]).images
    assert torch.equal(back.patches, whole.images.patches)
    assert back.index.tolist() == [0, 1, 2, 0]


def test_parts_of_ranks_hold_what_their_sequences_show():
    whole = batch()
    for part in balanced(sequence_costs(whole), 2):
        chosen = select(whole, part)
        counts = [int(whole.images.counts[i]) for i in part]
        assert ([0] * len(part) if chosen.images is None else chosen.images.counts.tolist()) == counts


def test_trajectories_are_packed_with_the_images_of_their_prompts():
    one = shown((16, 24))
    prompt = Prompt("p/0", one.token_ids[:-1], (), None, "p", images=one.images)
    trajectory = Trajectory(
        prompt_id="p/0", sample=0, token_ids=(*one.token_ids[:-1], IMAGE, 31), prompt_length=len(one.token_ids) - 1,
        loss_mask=(*[0] * (len(one.token_ids) - 1), 1, 1), rollout_logprobs=(0.0,) * (len(one.token_ids) + 1),
        weight_versions=(0,) * (len(one.token_ids) + 1), response="", stop_reason=StopReason.STOP, images=one.images,
    )  # fmt: skip
    packed = pack([TrajectoryGroup(prompt, (trajectory, trajectory))])
    assert packed.images.counts.tolist() == [1, 1]  # the placeholder that was sampled is no image
    assert packed.images.patches.shape[0] == 24


def test_tokens_without_room_for_their_images_are_refused():
    (image,) = shown((16, 24)).images
    assert places((5, *[IMAGE] * 6, 7, IMAGE), [image], "x") == [1]
    with pytest.raises(
        ImagePlaceError, match=r"trajectory 3: image 0 takes 6 tokens .* 5 image placeholders for 1 images of 6"
    ):
        places((5, *[IMAGE] * 5, 7), [image], "trajectory 3")
    with pytest.raises(ImagePlaceError, match="image 0 takes 6 tokens in a row"):
        places((5, IMAGE, 7, *[IMAGE] * 5), [image], "x")


# -------------------------------------------------------------------------------------------------------------- shapes


def _cells(row):
    """The colour of each of the 9 cells of a picture, from its pixels."""
    data = row["messages"][0]["content"][0]["image"]
    pixels = np.asarray(Pillow.open(io.BytesIO(data))).astype(int)
    cell = pixels.shape[0] // 3
    found = {}
    for number in range(9):
        top, left = (cell * part for part in divmod(number, 3))
        block = pixels[top : top + cell, left : left + cell].reshape(-1, 3)
        for name, colour in COLOURS.items():
            if (block == colour).all(1).sum() > cell:
                found[number] = name
    return found


def test_the_answers_of_the_shapes_are_what_the_pictures_show():
    rows = open_shapes(DatasetConfig(source=ShapesSettings(size=60, seed=3)))
    seen = set()
    for index in range(60):
        row = rows[index]
        cells, answer = _cells(row), row["ground_truth"]
        task = row["data_source"].removeprefix("shapes/")
        seen.add(task)
        assert row["messages"][0]["content"][1]["text"] == QUESTIONS[task]
        if task == "colour":
            assert list(cells.values()) == [answer]
        elif task == "count":
            assert len(cells) == int(answer)
        else:
            assert "".join(cells[number][0] for number in sorted(cells)) == answer
    assert seen == set(QUESTIONS)


def test_shapes_depend_on_seed_and_row_and_mix_with_text():
    rows = open_shapes(DatasetConfig(source=ShapesSettings(size=40, seed=1, text_share=0.5, tasks=("order",))))
    again = open_shapes(DatasetConfig(source=ShapesSettings(size=40, seed=1, text_share=0.5, tasks=("order",))))
    other = open_shapes(DatasetConfig(source=ShapesSettings(size=40, seed=2, text_share=0.5, tasks=("order",))))
    assert [rows[i] for i in range(40)] == [again[i] for i in range(40)] != [other[i] for i in range(40)]
    kinds = [len(rows[i]["messages"][0]["content"]) for i in range(40)]
    assert 8 < kinds.count(1) < 32


def test_shapes_are_samples_and_prompts(renderer):
    config = DatasetConfig(source=ShapesSettings(size=4, seed=1))
    samples, _ = read_all(SampleMaker("train", config, renderer, "data.train"))
    assert [len(sample.images) for sample in samples] == [1] * 4
    prompts, _ = read_prompts("train", config, renderer, "data.train")
    for sample, prompt in zip(samples, prompts, strict=True):
        assert sample.token_ids[: len(prompt.token_ids)] == prompt.token_ids
        assert renderer.decode(sample.token_ids[len(prompt.token_ids) :]) == prompt.ground_truth
    assert SampleMaker("train", config, renderer, "k").make(2) == samples[2]
