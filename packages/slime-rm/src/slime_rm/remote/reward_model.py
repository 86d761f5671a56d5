"""The reward `reward_model`: the score of a reward model that an engine serves."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slime_core.config.base import Amount, Count, Index
from slime_core.errors import ConfigError, PluginError, Problem, RewardError, SampleError
from slime_core.rewards.ending import up_to_special_tokens
from slime_core.samples import Sample

from slime_rm.remote.batches import Batches
from slime_rm.remote.json_client import ClientSettings, JsonClient


class RewardModelSettings(ClientSettings):
    """Options of the reward `reward_model`."""

    reward_model_url: str | None = None
    """Address of the server, without a path; `served:NAME` is a model that the run serves."""
    api: Literal["sglang", "openai"] = "sglang"
    """What the server speaks."""
    output: Index | None = None
    """Which of the model's outputs, or of its classes, is the score, from 0; must be given where there are several, so
    that a number of an embedding is never taken for a score."""
    chat_template_from: str | None = None
    """Folder of the reward model's tokenizer, whose chat template the conversation is put into; without, the text is the
    prompt and then the response. A prompt that is text becomes a user's message."""
    messages_key: str | None = None
    """Key of the metadata that has the messages, where `apply_chat_template` has made text of the prompt."""
    model: str = "default"
    """Name of the model, for `openai`."""
    batch_size: Count = 16
    """Most samples of a request."""
    batch_wait_s: Amount = 0.02
    """Longest that a sample waits for others to fill its batch, seconds."""
    connections: Count = 16
    """Most requests at once; further ones wait."""


class RewardModel:
    """Asks a served reward model, such as SGLang started with `--is-embedding`, for the score of a prompt and its response.

    Special tokens at the end of the response are left out: the model's own template writes those that it was trained on.

    With `api` `sglang`, texts go to `/classify` and the score is the model's own output, of any size; with `openai`
    to `/v1/classify`, as vLLM serves too, and the score is a class's probability; of one class alone it is always 1 with
    SGLang.

    Args:
        settings: the server, and what it is asked.

    Raises:
        ConfigError: no server is given.
        PluginError: the tokenizer of `chat_template_from` cannot be loaded, or has no chat template.

    Source: SGLang 0.5 `EmbeddingReqInput` and `OpenAIServingClassify`; vLLM's classification API.
    """

    def __init__(self, *, settings: RewardModelSettings) -> None:
        if not settings.reward_model_url:
            wanted = "the address of the reward model's server"
            problem = Problem("rm.reward_model_url", "nothing", wanted, "give --reward-model-url")
            raise ConfigError([problem])
        path, self._body, self._outputs = _PROTOCOLS[settings.api]
        self._settings = settings
        self._url = f"{settings.reward_model_url.rstrip('/')}{path}"
        self._client = JsonClient(self._url, settings)
        self.connections = settings.connections * settings.batch_size
        """How many samples may wait for the model at once."""
        folder = settings.chat_template_from
        self._tokenizer = None if folder is None else _tokenizer(folder)
        self._first = "" if self._tokenizer is None else _put_first(self._tokenizer)
        self._batches = Batches(self._post, size=settings.batch_size, wait_s=settings.batch_wait_s)

    async def __call__(self, sample: Sample) -> float:
        """Return the model's score.

        Raises:
            RewardError: the server is down or refuses, or answers with anything but scores.
            SampleError: there is nothing to score; there are no messages under the key; or the prompt is messages,
                and there is no template.
        """
        text = self._text(sample)
        if not text.strip():  # a text without a token ends SGLang 0.5.23
            raise SampleError("prompt and response are blank; there is nothing to score")
        score: float = await self._batches.answer(text)
        return score

    async def close(self) -> None:
        """Close the connections."""
        self._batches.close()
        await self._client.close()

    def _text(self, sample: Sample) -> str:
        response = up_to_special_tokens(sample.response)
        if self._tokenizer is None:
            if isinstance(sample.prompt, str):
                return sample.prompt + response
            raise SampleError("the prompt is chat messages; set chat_template_from in rm_args")
        key = self._settings.messages_key
        if key is not None and not isinstance(sample.metadata.get(key), list):
            raise SampleError(f"metadata has no list of messages under {key!r}, which messages_key names")
        prompt = sample.prompt if key is None else sample.metadata[key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text.removeprefix(self._first)

    async def _post(self, texts: list[str]) -> list[float]:
        output = self._settings.output
        answer = await self._client.post(self._body(texts, self._settings.model))
        try:
            outputs = self._outputs(answer)
            longest = max(map(len, outputs), default=0)
            scores = [each[output or 0] for each in outputs]
            if len(scores) != len(texts) or not all(type(score) in (int, float) for score in scores):
                raise ValueError
        except (KeyError, IndexError, TypeError, ValueError):
            raise RewardError(
                f"{self._url}: answered {str(answer)[:200]!r} to {len(texts)} samples; wanted output "
                f"{output or 0} of a reward model for each"
            ) from None
        if output is None and longest > 1:
            raise RewardError(
                f"{self._url}: answered {longest} numbers for a text; set output in rm_args to the one that is the "
                "score, or serve a reward model"
            )
        return scores


def _sglang_outputs(answer: Any) -> list[Any]:
    return [entry["embedding"] for entry in answer]


def _openai_outputs(answer: Any) -> list[Any]:
    return [entry["probs"] for entry in sorted(answer["data"], key=lambda entry: entry["index"])]


_Protocol = tuple[str, Callable[[list[str], str], Mapping[str, Any]], Callable[[Any], list[Any]]]
#: By `api`: path; (texts, model) -> body; answer -> each text's outputs.
_PROTOCOLS: dict[str, _Protocol] = {
    "sglang": ("/classify", lambda texts, _: {"text": texts}, _sglang_outputs),
    "openai": ("/v1/classify", lambda texts, model: {"model": model, "input": texts}, _openai_outputs),
}


def _tokenizer(folder: str) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise PluginError("chat_template_from needs transformers; install it") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise PluginError(f"chat_template_from: {folder}: {error}") from error
    if tokenizer.chat_template is None:
        raise PluginError(f"chat_template_from: the tokenizer of {folder} has no chat template")
    return tokenizer


def _put_first(tokenizer: Any) -> str:
    """Return the token that the server's tokenizer will put before a text by itself; empty where it puts none."""
    puts = tokenizer.bos_token is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if puts else ""
