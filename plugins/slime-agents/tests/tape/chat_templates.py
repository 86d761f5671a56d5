"""Chat templates with the layout that Qwen3, Qwen3.5, Llama 3.1 and GLM-4.5 have, over SmolLM2's vocabulary and their special tokens."""

from __future__ import annotations

from dataclasses import dataclass

_QWEN = """\
{%- set ns = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and not message.content.startswith('<tool_response>') -%}
    {%- set ns.query = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools or messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n# Tools\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = namespace(text='', said=message.content) -%}
    {%- if message.reasoning_content is defined and message.reasoning_content -%}
      {%- set thought.text = message.reasoning_content -%}
    {%- elif '</think>' in message.content -%}
      {%- set thought.text = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set thought.said = message.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.query and (loop.last or thought.text) -%}
      {{- '<think>\\n' + thought.text.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- thought.said -}}
    {%- for call in message.tool_calls or [] -%}
CALL    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

QWEN3 = _QWEN.replace(
    "CALL",
    """\
      {%- if not loop.first or thought.said -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
""",
)

# Numbers, truth and null are as Python writes them.
QWEN3_5 = _QWEN.replace(
    "CALL",
    """\
      {%- if not loop.first or thought.said -%}{{- '\\n' -}}{%- endif -%}
      {%- if loop.first and thought.said -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<parameter=' + key + '>\\n' -}}
        {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string -}}
        {{- '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
""",
)

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools -%}
  {{- 'You may call functions by JSON with name and parameters.\\n' -}}
  {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{%- endif -%}
{{- system + '<|eot_id|>' -}}
{%- for message in rest -%}
  {%- if message.tool_calls -%}
    {%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set function = message.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + function.name + '", "parameters": ' -}}
    {{- (function.arguments | tojson) + '}<|eot_id|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

GLM45 = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- '<|system|>\\n# Tools\\n<tools>\\n' -}}
  {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
  {{- '</tools>' -}}
{%- endif -%}
{%- set ns = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|user|>\\n' + message.content -}}
  {%- elif message.role == 'system' -%}
    {{- '<|system|>\\n' + message.content -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- if loop.index0 > ns.query and message.reasoning_content -%}
      {{- '\\n<think>' + message.reasoning_content.strip() + '</think>' -}}
    {%- else -%}
      {{- '\\n<think></think>' -}}
    {%- endif -%}
    {%- if message.content.strip() -%}{{- '\\n' + message.content.strip() -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n<tool_call>' + call.function.name + '\\n' -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
        {{- (value if value is string else value | tojson) + '</arg_value>\\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A template, and the tokens that its model has."""

    template: str | None
    tool_format: str
    """The name of how its model writes calls."""
    special: tuple[str, ...] = ()
    """Special tokens that are added, the one that ends turns first."""
    added: tuple[str, ...] = ()
    """Tokens that are added, and are text."""
    also_ends: tuple[str, ...] = ()
    """Tokens that end turns besides."""


TEMPLATES = {
    "smollm2": Published(template=None, tool_format="json"),
    "qwen3": Published(
        template=QWEN3, tool_format="json",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "qwen3_5": Published(
        template=QWEN3_5, tool_format="qwen3_coder",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "llama3": Published(
        template=LLAMA3, tool_format="llama",
        special=("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"),
        also_ends=("<|eom_id|>",),
    ),
    "glm45": Published(
        template=GLM45, tool_format="xml",
        special=("<|glm_end|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        also_ends=("<|user|>", "<|observation|>"),
    ),
}  # fmt: skip
