"""Rows to prompts: keys, chat templates, images, length limits, and messages that say what is wrong where."""

from pathlib import Path

import pytest
from slime_core.data.prompts import PromptFormat, check_columns, prototype
from slime_core.data.rows.record import Record
from slime_core.errors import DataError

from ..byte_tokenizer import ByteTokenizer


def sample_of(row, **settings):
    return prototype(Record("data.jsonl:7", row), ByteTokenizer(), PromptFormat(**settings))


def test_text_is_taken_as_it_is_and_its_ids_are_the_tokens():
    sample = sample_of({"input": "hi"})
    assert (sample.prompt, sample.tokens, sample.response_length) == ("hi", [104, 105], 0)


def test_under_a_chat_template_text_is_one_user_message():
    sample = sample_of({"input": "hi"}, apply_chat_template=True)
    assert sample.prompt == "user: hi\nassistant:"
    assert bytes(sample.tokens).decode() == sample.prompt


def test_messages_are_rendered_with_tools_and_options():
    row = {
        "input": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}],
        "tools": '[{"name": "add"}]',
    }
    sample = sample_of(row, apply_chat_template=True, apply_chat_template_kwargs={"end": "bot:"})
    assert sample.prompt == 'tools: [{"name": "add"}]\nsystem: be brief\nuser: 2+2\nbot:'
    assert sample.metadata == {"tools": [{"name": "add"}]}


def test_messages_without_a_template_stay_messages():
    messages = [{"role": "user", "content": "hi"}]
    sample = sample_of({"input": messages})
    assert (sample.prompt, sample.tokens) == (messages, [])


@pytest.mark.parametrize(
    ("label", "expected"), [("4", "4"), (4, "4"), (0.5, "0.5"), (["a", 1], '["a", 1]'), (None, None)]
)
def test_a_label_that_is_not_text_is_written_as_json(label, expected):
    assert sample_of({"input": "q", "answer": label}, label_key="answer").label == expected


@pytest.mark.parametrize("metadata", [{"k": 1}, '{"k": 1}'])
def test_metadata_may_be_an_object_or_json_text(metadata):
    assert sample_of({"input": "q", "extra": metadata}, metadata_key="extra").metadata == {"k": 1}


def test_metadata_may_be_all_columns_that_no_setting_names():
    row = {
        "input": "q",
        "answer": "a",
        "tools": None,
        "pics": [],
        "data_source": "gsm8k",
        "extra": {"n": 1},
        "text": "{",
    }
    sample = sample_of(row, label_key="answer", metadata_key="*", multimodal_keys={"image": "pics"})
    assert sample.metadata == {"data_source": "gsm8k", "extra": {"n": 1}, "text": "{"}


def test_a_label_may_be_in_a_column_of_tables():
    row = {"input": "q", "reward_model": {"style": "rule", "ground_truth": "72"}}
    assert sample_of(row, label_key="reward_model.ground_truth").label == "72"
    assert sample_of({"input": "q", "a.b": "1", "a": {"b": "2"}}, label_key="a.b").label == "1"
    for key in "reward_model.truth", "reward_model.style.x", "other.ground_truth":
        with pytest.raises(
            DataError, match=rf"columns \['input', 'reward_model'\]; wanted '{key}' \(label_key"
        ):
            sample_of(row, label_key=key)


@pytest.mark.parametrize("name", ["metadata_key", "tool_key"])
def test_an_optional_column_that_no_row_has_is_mistyped(name):
    records = [
        Record(f"a.jsonl:{n}", row) for n, row in enumerate([{"input": "q"}, {"input": "q", "extra": []}], 1)
    ]
    check_columns(records, PromptFormat(**{name: "extra"}))  # some rows may lack it
    check_columns(records, PromptFormat())  # and all of them what nobody asked for
    check_columns(records, PromptFormat(metadata_key="*"))
    with pytest.raises(
        DataError, match=rf"a.jsonl:1, and .*: found no column 'extr', but \['input'\]; .*set {name}, or"
    ):
        check_columns(records, PromptFormat(**{name: "extr"}))


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"q": "hi"}, {}, r"found the columns \['q'\]; wanted 'input' \(input_key\)"),
        (
            {"input": "q"},
            {"label_key": "answer"},
            r"found the columns \['input'\]; wanted 'answer' \(label_key\)",
        ),
        ({"input": 3}, {}, "found int '3' in 'input'; wanted text, or a list of messages"),
        ({"input": []}, {}, "found an empty list in 'input'"),
        ({"input": [{"content": "x"}]}, {}, "wanted text, or a list of messages with role and content"),
        ({"input": ""}, {}, "found an empty prompt in 'input'"),
        ({"input": "q", "metadata": "{"}, {}, "found text in 'metadata' that is not JSON"),
        ({"input": "q", "metadata": [1]}, {}, "found list in 'metadata'; wanted an object"),
        ({"input": "q", "tools": {"a": 1}}, {}, "found dict in 'tools'; wanted a list"),
        (
            {"input": "q", "pics": ["a.png"]},
            {"multimodal_keys": {"image": "pics"}},
            "found 0 <image> in the prompt",
        ),
        (
            {"input": "<image>", "pics": []},
            {"multimodal_keys": {"image": "pics"}},
            "1 <image> .* and 0 items",
        ),
    ],
)
def test_a_row_that_is_not_what_the_settings_say_is_an_error_that_names_it(row, settings, words):
    with pytest.raises(DataError, match=f"^data.jsonl:7: .*{words}"):
        sample_of(row, **settings)


def test_a_template_that_refuses_is_a_data_error_with_the_line():
    class Refusing(ByteTokenizer):
        def apply_chat_template(self, messages, *, tools=None, **kwargs):
            raise ValueError("roles must alternate")

    with pytest.raises(DataError, match=r"data.jsonl:7: the chat template refuses .* roles must alternate"):
        prototype(Record("data.jsonl:7", {"input": "q"}), Refusing(), PromptFormat(apply_chat_template=True))


def test_placeholders_become_content_parts_with_the_items_in_order():
    row = {"input": "left <image>, right <image>", "pics": ["/a.png", "/b.png"]}
    sample = sample_of(row, multimodal_keys={"image": "pics"}, media_root=Path("/"))
    assert sample.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "left "},
                {"type": "image", "image": "/a.png"},
                {"type": "text", "text": ", right "},
                {"type": "image", "image": "/b.png"},
            ],
        }
    ]
    assert sample.multimodal_inputs == {"image": ["/a.png", "/b.png"]}


class SeeingTokenizer(ByteTokenizer):
    """A token a byte; an image is 0 and the last byte of its name, three times."""

    def apply_chat_template(self, messages, *, tools=None, **kwargs):
        return "".join("#" if part["type"] == "image" else part["text"] for part in messages[0]["content"])

    def encode_with_images(self, text, images):
        if "/data/missing" in images:
            raise DataError("/data/missing: no such file")
        waiting = iter(images)
        return [
            id
            for byte in text.encode()
            for id in ([0, *next(waiting).encode()[-1:] * 3] if byte == 35 else [byte])
        ]


def prompt_with_images(row, tokenizer=None, media_root=None):
    prompt_format = PromptFormat(
        multimodal_keys={"image": "pics"}, media_root=media_root, apply_chat_template=True
    )
    record = Record("data.jsonl:7", row, Path("/data"))
    return prototype(record, tokenizer or SeeingTokenizer(), prompt_format)


def test_a_rendered_prompt_has_the_ids_that_a_model_sees():
    sample = prompt_with_images({"input": "x<image>y<image>", "pics": ["a", "b"]})
    assert sample.prompt == "x#y#"
    assert sample.tokens == [120, 0, 97, 97, 97, 121, 0, 98, 98, 98]


@pytest.mark.parametrize(
    ("image", "held"),
    [
        ("/data/a.png", "/data/a.png"),
        ("sub/a.png", "/data/sub/a.png"),
        ("sub/../a.png", "/data/a.png"),
        ("..a.png", "/data/..a.png"),
        ("data:image/png;base64,AAAA", "data:image/png;base64,AAAA"),
        (b"\x00\x00\x00", "data:image;base64,AAAA"),
        ({"bytes": b"\x00\x00\x00", "path": "a.png"}, "data:image;base64,AAAA"),
        ({"bytes": None, "path": "a.png"}, "/data/a.png"),
    ],
)
def test_an_image_is_a_path_or_its_bytes(image, held):
    assert prompt_with_images({"input": "<image>", "pics": [image]}).multimodal_inputs == {"image": [held]}


@pytest.mark.parametrize(
    "image",
    [
        "/etc/passwd",
        "../a.png",
        "sub/../../a.png",
        "/data/../a.png",
        "/database/a.png",
        "..",
        {"path": "/a.png"},
    ],
)
def test_an_image_that_is_not_in_the_folder_of_its_data_is_an_error_that_names_the_row(image):
    with pytest.raises(
        DataError, match=r"^data.jsonl:7: found the image '.*', which is not in /data; .* \(--media-root\)"
    ):
        prompt_with_images({"input": "<image>", "pics": ["a.png", image]})


@pytest.mark.parametrize(
    ("root", "image", "held"),
    [
        ("/pictures", "a.png", "/pictures/a.png"),
        ("/pictures", "/pictures/sub/a.png", "/pictures/sub/a.png"),
        ("/", "/elsewhere/a.png", "/elsewhere/a.png"),
        ("/", "../../a.png", "/a.png"),
        ("/pictures", "/data/a.png", None),
        ("/pictures", "../data/a.png", None),
    ],
)
def test_where_a_folder_is_named_for_images_they_begin_and_stay_there(root, image, held):
    row = {"input": "<image>", "pics": [image]}
    if held is None:
        with pytest.raises(DataError, match=r"^data.jsonl:7: found the image .* which is not in /pictures"):
            prompt_with_images(row, media_root=Path(root))
    else:
        sample = prompt_with_images(row, media_root=Path(root))
        assert sample.multimodal_inputs == {"image": [held]}


@pytest.mark.parametrize("image", ["https://example.org/a.png", 7, None, "", "a\0b", {"url": "a.png"}])
def test_what_is_no_image_is_an_error_that_names_the_row(image):
    with pytest.raises(DataError, match=r"^data.jsonl:7: found .* for an image; wanted the path of a file"):
        prompt_with_images({"input": "<image>", "pics": [image]})


def test_an_image_that_cannot_be_read_is_an_error_that_names_the_row():
    with pytest.raises(DataError, match=r"^data.jsonl:7: /data/missing: no such file"):
        prompt_with_images({"input": "<image>", "pics": ["missing"]})


def test_a_tokenizer_that_reads_no_images_is_refused():
    class Blind(ByteTokenizer):
        def apply_chat_template(self, messages, *, tools=None, **kwargs):
            return "x"

        def encode_with_images(self, text, images):
            raise DataError("found an image, and Blind reads none")

    with pytest.raises(DataError, match=r"^data.jsonl:7: found an image, and Blind reads none"):
        prompt_with_images({"input": "<image>", "pics": ["a"]}, Blind())
