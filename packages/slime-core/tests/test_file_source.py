"""Data files to prompts: rows, slices, keys, templates, and messages that say what is wrong where."""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.config.sections import DataSection, EvalSection, RolloutSection
from slime_core.errors import DataError
from slime_core.sources.file import create_source
from slime_core.sources.prompts import PromptFormat, build_prompts, prototype
from slime_core.sources.records import Record, parse_spec, read_records


class ByteTokenizer:
    """A token a byte; the template writes each message as `role: content` on a line."""

    eos_token_id = None

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=True):
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(self, messages, *, tools=None, **kwargs):
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join(
            [f"tools: {json.dumps(tools)}"] * bool(tools) + lines + [kwargs.get("end", "assistant:")]
        )


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def sample_of(row, **settings):
    return prototype(Record("data.jsonl:7", row), ByteTokenizer(), PromptFormat(**settings))


def source_of(*, evaluation=False, rollout=None, **settings):
    sections = {
        DataSection: DataSection(
            **{key: value for key, value in settings.items() if not key.startswith(("eval", "n_"))}
        ),
        EvalSection: EvalSection(
            **{key: value for key, value in settings.items() if key.startswith(("eval", "n_"))}
        ),
        RolloutSection: RolloutSection(rollout_batch_size=1, rollout_max_response_len=8, **(rollout or {})),
    }
    return create_source(
        SimpleNamespace(section=sections.__getitem__, tokenizer=ByteTokenizer(), evaluation=evaluation)
    )


def test_blank_lines_are_no_rows_and_lines_count_from_one(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n   \n{"a": "é"}\n', encoding="utf-8")
    assert read_records(str(path)) == [
        Record(f"{path}:1", {"a": 1}, tmp_path),
        Record(f"{path}:4", {"a": "é"}, tmp_path),
    ]


@settings(deadline=None)
@given(
    n=st.integers(1, 8),
    start=st.none() | st.integers(-10, 10),
    stop=st.none() | st.integers(-10, 10),
    kind=st.sampled_from(["jsonl", "parquet"]),
)
def test_a_slice_takes_what_it_takes_of_a_list(n, start, stop, kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / f"data.{kind}"
    rows = [{"row": i} for i in range(n)]
    if kind == "jsonl":
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
    expected = rows[start:stop]
    if expected:
        records = read_records(f"{path}@[{bounds}]")
        assert [record.values for record in records] == expected
        line = f"row {expected[0]['row'] + 1}" if kind == "parquet" else expected[0]["row"] + 1
        assert records[0].where == f"{path}:{line}"
    else:
        with pytest.raises(DataError, match=r"no row in the slice|an empty file"):
            read_records(f"{path}@[{bounds}]")


def test_a_slice_from_the_front_does_not_look_beyond_its_end(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\nbroken\n')
    assert len(read_records(f"{path}@[:1]")) == 1


@pytest.mark.parametrize(
    "spec", ["d.jsonl@[1]", "d.jsonl@[a:b]", "d.jsonl@[1:2:3]", "d.jsonl@[:1", "d.jsonl@[-:]"]
)
def test_a_malformed_slice_is_an_error(spec):
    with pytest.raises(DataError, match="malformed slice"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            b'{"a": 1}\n{"a": \n',
            r"data.jsonl:2: found '\{\"a\":', which is not JSON \(Expecting value at column",
        ),
        (b"[1]\n", "data.jsonl:1: found a JSON list; wanted one JSON object a line"),
        (b'{"a": "\xff"}\n', r"data.jsonl:1: found bytes that are not UTF-8 \(at 7\)"),
        (b"\n\n", "found an empty file"),
    ],
)
def test_a_broken_line_is_an_error_that_names_it(text, words, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=words):
        read_records(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.jsonl", "found nothing; wanted a data file"),
        ("data.csv", "found a .csv file; wanted .jsonl or .parquet"),
        ("broken.parquet", "found a broken Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(name, words, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=words):
        read_records(str(tmp_path / name))


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

    with pytest.raises(DataError, match=r"^data.jsonl:7: found an image, and Blind reads none"):
        prompt_with_images({"input": "<image>", "pics": ["a"]}, Blind())


def test_long_prompts_are_dropped_and_counted():
    records = [Record(f"d:{i}", {"input": "x" * i}) for i in (1, 5, 3, 4)]
    prompts = build_prompts(records, ByteTokenizer(), prompt_format=PromptFormat(), max_prompt_len=3)
    assert [len(sample.tokens) for sample in prompts.prototypes] == [1, 3]
    assert prompts.n_dropped == 2


def test_a_limit_that_drops_every_prompt_is_an_error():
    records = [Record("d:1", {"input": "xxxxx"}), Record("d:2", {"input": "xxxx"})]
    with pytest.raises(DataError, match=r"all 2 prompts .* the shortest 4; raise the limit"):
        build_prompts(records, ByteTokenizer(), prompt_format=PromptFormat(), max_prompt_len=3)


def test_a_limit_on_messages_that_are_not_rendered_is_an_error():
    records = [Record("d:1", {"input": [{"role": "user", "content": "hi"}]})]
    with pytest.raises(DataError, match=r"d:1: .* set apply_chat_template"):
        build_prompts(records, ByteTokenizer(), prompt_format=PromptFormat(), max_prompt_len=3)


def test_the_file_source_hands_out_groups_of_its_rows(tmp_path, caplog):
    path = write(
        tmp_path / "train.jsonl", [{"q": "one", "a": 1}, {"q": "three", "a": 3}, {"q": "two", "a": 2}]
    )
    source = source_of(
        prompt_data=path,
        input_key="q",
        label_key="a",
        rollout_max_prompt_len=3,
        rollout={"n_samples_per_prompt": 2},
    )
    groups = source.take(3)
    assert [[s.label for s in group] for group in groups] == [["1", "1"], ["2", "2"], ["1", "1"]]
    assert "dropped 1 of 3 prompts" in caplog.text


def test_the_file_source_shuffles_by_the_rollout_seed(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"input": f"prompt {i}"} for i in range(30)])

    def order(seed):
        source = source_of(prompt_data=path, rollout_shuffle=True, rollout={"rollout_seed": seed})
        return [group[0].prompt for group in source.take(30)]

    assert order(1) == order(1) != order(2)


def test_evaluation_reads_its_own_sets_in_order_with_their_names(tmp_path):
    easy = write(tmp_path / "easy.jsonl", [{"input": "1+1"}, {"input": "2+2"}, {"input": "3+3"}])
    hard = write(tmp_path / "hard.jsonl", [{"input": "17*23"}])
    source = source_of(
        evaluation=True,
        prompt_data="not read",
        rollout_shuffle=True,
        rollout_max_prompt_len=3,
        eval_prompt_data=["easy", easy, "hard", f"{hard}@[:1]"],
        eval_num_prompts=2,
        n_samples_per_eval_prompt=3,
    )
    groups = source.take(len(source))
    assert [(g[0].metadata["source_name"], g[0].prompt) for g in groups] == [
        ("easy", "1+1"),
        ("easy", "2+2"),
        ("hard", "17*23"),
    ]
    assert {len(group) for group in groups} == {3}


@pytest.mark.parametrize("pairs", [[], ["easy"], ["easy", "a.jsonl", "easy", "b.jsonl"]])
def test_evaluation_sets_are_names_and_files_in_turn(pairs):
    with pytest.raises(DataError, match="wanted names and files in turn"):
        source_of(evaluation=True, eval_prompt_data=pairs)


def test_no_data_file_is_an_error():
    with pytest.raises(DataError, match=r"data.prompt_data: found nothing"):
        source_of()
