from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.errors import DataError, exit_status
from slime_core.protocols import Tokenizer, end_ids
from slime_models.hf.tokenizer import HfTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> HfTokenizer:
    return load_tokenizer(smollm2)


#: SmolLM2's vocabulary lacks some control characters, and the first byte of planes 4 to 15.
SPELLABLE = st.characters(exclude_categories=("Cs", "Cc"), max_codepoint=0x2FFFF) | st.sampled_from("\n\t ")


def test_text_comes_back(tokenizer: HfTokenizer) -> None:
    @settings(max_examples=200)
    @given(st.text(SPELLABLE, max_size=60))
    def comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text

    comes_back()


def test_no_special_tokens_are_added_and_spelled_ones_are_one_id(tokenizer: HfTokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n") == [1, *tokenizer.encode("user\n")]
    assert tokenizer.encode("") == []


def test_digits_stand_alone_and_leave_blanks_whole(tokenizer: HfTokenizer) -> None:
    # llama.cpp's `smollm` splitting: digits first, then GPT-2's pattern on what is between them.
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("x\n\n12  3 apples")]
    assert pieces == ["x", "\n\n", "1", "2", "  ", "3", " apples"]


def test_special_tokens_are_left_out_on_request(tokenizer: HfTokenizer) -> None:
    tokens = tokenizer.encode("hi , there<|im_end|>")
    assert tokens[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokens) == "hi , there"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "hi , there<|im_end|>"


def test_chat_ends_where_the_assistant_is_to_speak(tokenizer: HfTokenizer) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    turns = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat) == turns + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=False) == turns


def test_templates_print_the_day_that_they_are_told(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    tokenizer.inner.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    tokenizer.day = date(2024, 2, 29)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat) == "29 Feb 2024: hi"
    assert load_tokenizer(smollm2).day == date.today()


def test_it_is_what_core_expects(tokenizer: HfTokenizer) -> None:
    as_protocol: Tokenizer = tokenizer
    assert as_protocol.eos_token_id == 2
    assert len(tokenizer) == 49152


def test_folder_without_a_tokenizer_is_bad_input_and_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"found no tokenizer; wanted one of tokenizer\.json, tokenizer\.model"
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert exit_status(caught.value) == 2


def test_broken_tokenizer_is_bad_input(tmp_path: Path, smollm2: Path) -> None:
    shutil.copy(smollm2 / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)


def test_code_of_a_folder_is_not_run(tmp_path: Path, smollm2: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(DataError, match="contains custom code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_a_tokenizer_that_is_a_program_is_named_with_what_to_do(tmp_path: Path) -> None:
    """As Kimi-K2's."""
    (tmp_path / "tiktoken.model").touch()
    own = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(
        DataError, match=r"\(tokenization_kimi\.TikTokenTokenizer\), which is not run; wanted tokenizer\.json"
    ):
        load_tokenizer(tmp_path)


def test_missing_chat_template_is_said(tmp_path: Path, smollm2: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / file, tmp_path)
    with pytest.raises(DataError, match="has no chat template"):
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].content | items | list }}", "TypeError: Can only get item pairs"),
    ],
)
def test_template_that_refuses_the_messages_is_said(tmp_path: Path, smollm2: Path, template, told) -> None:
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"refuses the messages \({told}"):
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])


def test_the_ids_that_end_a_turn_are_the_tokenizers_the_models_and_those_of_a_request(
    smollm2, tmp_path
) -> None:
    for file in smollm2.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt"):
            shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "text_config": {"eos_token_id": 5}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 2
    assert end_ids(tokenizer, [11]) == {2, 5, 7, 9, 11}
    assert end_ids(load_tokenizer(smollm2)) == {2}
