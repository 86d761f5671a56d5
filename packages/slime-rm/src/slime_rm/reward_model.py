"""The reward `reward_model`: the score of a reward model that an engine serves."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slime_core.errors import ConfigError, PluginError, Problem, RewardError, SampleError
from slime_core.sample import Sample

from slime_rm.batches import Batches
from slime_rm.posting import JsonClient


class RewardModel:
    """Asks a served reward model, such as SGLang started with `--is-embedding`, for the score of a prompt and its response.

    With `api` `sglang`, texts go to `/classify` and the score is the model's own output, of any size; with `openai`
    to `/v1/classify`, as vLLM serves too, and the score is a class's probability; of one class alone it is always 1 with
    SGLang.

    Args:
        reward_model_url: address of the server, without a path; `served:NAME` is a model that the run serves.
        api: what the server speaks.
        output: which of the model's outputs, or of its classes, is the score, from 0; must be given where there are
            several, so that a number of an embedding is never taken for a score.
        chat_template_from: folder of the reward model's tokenizer, whose chat template the conversation is put into;
            without, the text is the prompt and then the response. A prompt that is text becomes a user's message.
        messages_key: key of the metadata that has the messages, where `apply_chat_template` has made text of the prompt.
        model: name of the model, for `openai`.
        batch_size: most samples of a request.
        batch_wait_s: longest that a sample waits for others to fill its batch, seconds.
        api_key_file: file with the key that the server wants.
        connections: most requests at once.
        request_timeout_s: deadline of one try, seconds.
        tries: how often a request is sent before it fails.
        run_dir: folder of the run.

    Source: SGLang 0.5 `EmbeddingReqInput` and `OpenAIServingClassify`; vLLM's classification API.
    """

    def __init__(
        self,
        *,
        reward_model_url: str | None,
        api: Literal["sglang", "openai"] = "sglang",
        output: int | None = None,
        chat_template_from: str | None = None,
        messages_key: str | None = None,
        model: str = "default",
        batch_size: int = 16,
        batch_wait_s: float = 0.02,
        api_key_file: str | None = None,
        connections: int = 16,
        request_timeout_s: float = 60.0,
        tries: int = 5,
        first_wait_s: float = 0.5,
        run_dir: str | None = None,
    ) -> None:
        problems = []
        if not reward_model_url:
            wanted = "the address of the reward model's server"
            problems.append(Problem("rm.reward_model_url", "nothing", wanted, "give --reward-model-url"))
        if api not in _PROTOCOLS:
            problems.append(Problem("reward_model api", repr(api), " or ".join(map(repr, _PROTOCOLS))))
        for name, value, least in (("output", output, 0), ("batch_size", batch_size, 1)):
            if value is not None and value < least:
                problems.append(Problem(f"reward_model {name}", f"{value}", f"at least {least}"))
        if problems:
            raise ConfigError(problems)
        path, self._body, self._outputs = _PROTOCOLS[api]
        self._url = f"{str(reward_model_url).rstrip('/')}{path}"
        self._client = JsonClient(
            self._url,
            connections=connections,
            request_timeout_s=request_timeout_s,
            tries=tries,
            api_key_file=api_key_file,
            first_wait_s=first_wait_s,
            run_dir=run_dir,
        )
        self._output, self._model, self._messages_key = output, model, messages_key
        self._tokenizer = None if chat_template_from is None else _tokenizer(chat_template_from)
        self._first = "" if self._tokenizer is None else _put_first(self._tokenizer)
        self._batches = Batches(self._post, size=batch_size, wait_s=batch_wait_s)

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

    async def aclose(self) -> None:
        """Close the connections."""
        self._batches.close()
        await self._client.aclose()

    def _text(self, sample: Sample) -> str:
        if self._tokenizer is None:
            if isinstance(sample.prompt, str):
                return sample.prompt + sample.response
            raise SampleError("the prompt is chat messages; set chat_template_from in rm_args")
        key = self._messages_key
        if key is not None and not isinstance(sample.metadata.get(key), list):
            raise SampleError(f"metadata has no list of messages under {key!r}, which messages_key names")
        prompt = sample.prompt if key is None else sample.metadata[key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": sample.response})
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return text.removeprefix(self._first)

    async def _post(self, texts: list[str]) -> list[float]:
        answer = await self._client.post(self._body(texts, self._model))
        try:
            outputs = self._outputs(answer)
            longest = max(map(len, outputs), default=0)
            scores = [each[self._output or 0] for each in outputs]
            if len(scores) != len(texts) or not all(type(score) in (int, float) for score in scores):
                raise ValueError
        except (KeyError, IndexError, TypeError, ValueError):
            raise RewardError(
                f"{self._url}: answered {str(answer)[:200]!r} to {len(texts)} samples; wanted output "
                f"{self._output or 0} of a reward model for each"
            ) from None
        if self._output is None and longest > 1:
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
