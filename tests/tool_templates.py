"""Chat templates with tools, written here after the public formats of eight families of models."""

from __future__ import annotations

from chat_models import make_tokenizer
from transformers import PreTrainedTokenizerFast

_IM = ("<|im_start|>", "<|im_end|>")
_TAGGED = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' -%}{{"
    " messages[0].content + '\\n\\n' }}{%- endif -%}{{ 'Functions:\\n<tools>' }}{%- for tool in"
    " tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}{{ '\\n</tools>SAID_HOW<|im_end|>\\n' }}{%-"
    " elif messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' + messages[0].content +"
    " '<|im_end|>\\n' }}{%- endif -%}{%- for message in messages -%}{%- if message.role == 'user'"
    " -%}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- elif message.role =="
    " 'assistant' -%}{{ '<|im_start|>assistant\\n' + message.content }}{%- for call in"
    " message.tool_calls -%}{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif"
    " -%}CALL{%- endfor -%}{{ '<|im_end|>\\n' }}{%- elif message.role == 'tool' -%}{%- if"
    " loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}{{"
    " '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}{%- if loop.last or"
    " loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}{%- endif -%}{%- endfor"
    " -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_JSON_CALL = (
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)
_CODER_CALL = (
    "{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}{%- for key, value in"
    " call.function.arguments | items -%}{{ '<parameter=' + key + '>\\n' }}{{ value if value is"
    " string else value | tojson }}{{ '\\n</parameter>\\n' }}{%- endfor -%}{{"
    " '</function>\\n</tool_call>' }}"
)
_MISTRAL = (
    "{{ bos_token }}{%- set questions = messages | selectattr('role', 'equalto', 'user') | list"
    " -%}{%- for message in messages -%}{%- if message.role == 'user' -%}{%- if tools and message"
    " == questions[-1] -%}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%-"
    " endif -%}{{ '[INST] ' + message.content + '[/INST]' }}{%- elif message.tool_calls -%}CALLS{{"
    " eos_token }}{%- elif message.role == 'assistant' -%}{{ ' ' + message.content + eos_token"
    " }}{%- elif message.role == 'tool' -%}{%- if message.tool_call_id | length != 9 -%}{{"
    " raise_exception('ids have nine characters') }}{%- endif -%}{{ '[TOOL_RESULTS] {\"content\": '"
    ' + message.content | tojson + \', "call_id": "\' }}{{ message.tool_call_id +'
    " '\"}[/TOOL_RESULTS]' }}{%- endif -%}{%- endfor -%}"
)
_MISTRAL_LIST = (
    "{{ '[TOOL_CALLS] [' }}{%- for call in message.tool_calls -%}{{ ', ' if not loop.first else ''"
    ' }}{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments |'
    " tojson }}{{ ', \"id\": \"' + call.id + '\"}' }}{%- endfor -%}{{ ']' }}"
)
_MISTRAL_NAMED = (
    "{%- for call in message.tool_calls -%}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' +"
    " call.function.arguments | tojson }}{%- endfor -%}"
)
_MISTRAL_TOKENS = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"),
)
_DEEPSEEK_ENDS = ("calls▁begin", "calls▁end", "sep")
_QWEN = _TAGGED.replace("CALL", _JSON_CALL)

# family: (template, special tokens)
TOOL_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen": (_QWEN.replace("SAID_HOW", ""), _IM),
    "hermes": (_QWEN.replace("SAID_HOW", "\\nAnswer within <tool_call></tool_call>."), _IM),
    "qwen-coder": (_TAGGED.replace("CALL", _CODER_CALL).replace("SAID_HOW", ""), _IM),
    "llama3": (
        (
            "{{ bos_token }}{%- if tools -%}{{"
            " '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}{%- for"
            " tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}{{ '<|eot_id|>' }}{%- endif"
            " -%}{%- for message in messages -%}{%- if message.tool_calls -%}{%- if"
            " message.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%-"
            " endif -%}{%- set called = message.tool_calls[0].function -%}{{"
            " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{ '{\"name\": \"' +"
            " called.name + '\", \"parameters\": ' + called.arguments | tojson + '}<|eot_id|>'"
            " }}{%- elif message.role == 'tool' -%}{{"
            " '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson +"
            " '<|eot_id|>' }}{%- else -%}{{ '<|start_header_id|>' + message.role +"
            " '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{%- endif -%}{%-"
            " endfor -%}{%- if add_generation_prompt -%}{{"
            " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    "mistral": (_MISTRAL.replace("CALLS{{", _MISTRAL_LIST + "{{"), _MISTRAL_TOKENS),
    "mistral-named": (_MISTRAL.replace("CALLS{{", _MISTRAL_NAMED + "{{"), _MISTRAL_TOKENS),
    "deepseek": (
        (
            "{{ bos_token }}{%- if tools -%}{{ '## Tools\\n' + tools | tojson }}{%- endif -%}{%-"
            " for message in messages -%}{%- if message.role == 'system' -%}{{ message.content"
            " }}{%- elif message.role == 'user' -%}{{ '<｜User｜>' + message.content }}{%- elif"
            " message.role == 'assistant' -%}{%- if loop.previtem is not defined or"
            " loop.previtem.role != 'tool' -%}{{ '<｜Assistant｜>' }}{%- endif -%}{{"
            " message.content }}{%- if message.tool_calls -%}{{ '<｜tool▁calls▁begin｜>' }}{%- for"
            " call in message.tool_calls -%}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' +"
            " call.function.name }}{{ '\\n```json\\n' + call.function.arguments | tojson +"
            " '\\n```<｜tool▁call▁end｜>' }}{%- endfor -%}{{ '<｜tool▁calls▁end｜>' }}{%- endif"
            " -%}{{ eos_token }}{%- elif message.role == 'tool' -%}{{ '<｜tool▁output▁begin｜>' +"
            " message.content + '<｜tool▁output▁end｜>' }}{%- endif -%}{%- endfor -%}{%- if"
            " add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<｜Assistant｜>' }}{%-"
            " endif -%}"
        ),
        ("<｜User｜>", "<｜Assistant｜>", *(f"<｜tool▁{end}｜>" for end in _DEEPSEEK_ENDS)),
    ),
    "glm4": (
        (
            "{{ '[gMASK]<sop>' }}{%- if tools -%}{{ '<|system|>\\n' }}{%- for tool in tools -%}{{"
            " '## ' + tool.function.name + '\\n' + tool.function | tojson }}{%- endfor -%}{%- endif"
            " -%}{%- for message in messages -%}{%- if message.tool_calls -%}{%- for call in"
            " message.tool_calls -%}{{ '<|assistant|>' + call.function.name + '\\n' +"
            " call.function.arguments | tojson }}{%- endfor -%}{%- if loop.last -%}{{"
            " '<|observation|>' }}{%- endif -%}{%- elif message.role == 'tool' -%}{{"
            " '<|observation|>\\n' + message.content }}{%- else -%}{{ '<|' + message.role + '|>\\n'"
            " + message.content }}{%- if loop.last and message.role == 'assistant' -%}{{ '<|user|>'"
            " }}{%- endif -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{"
            " '<|assistant|>' }}{%- endif -%}"
        ),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gpt-oss": (
        (
            "{%- if tools -%}{{ '<|start|>developer<|message|># Tools\\n\\nnamespace functions"
            " {\\n' }}{%- for tool in tools -%}{{ 'type ' + tool.function.name + ' = (_: ' +"
            " tool.function.parameters | tojson }}{{ ') => any;\\n' }}{%- endfor -%}{{ '}<|end|>'"
            " }}{%- endif -%}{%- for message in messages -%}{%- if message.tool_calls -%}{%- set"
            " called = message.tool_calls[0].function -%}{%- if message.tool_calls | length != 1"
            " -%}{{ raise_exception('one call at a time') }}{%- endif -%}{{ '<|start|>assistant"
            " to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}{{"
            " called.arguments | tojson + '<|call|>' }}{%- elif message.role == 'tool' -%}{{"
            " '<|start|>functions.' + message.name + '"
            " to=assistant<|channel|>commentary<|message|>' }}{{ message.content | tojson +"
            " '<|end|>' }}{%- elif message.role == 'assistant' -%}{{"
            " '<|start|>assistant<|channel|>final<|message|>' + message.content }}{{ '<|return|>'"
            " if loop.last else '<|end|>' }}{%- else -%}{{ '<|start|>' + message.role +"
            " '<|message|>' + message.content + '<|end|>' }}{%- endif -%}{%- endfor -%}{%- if"
            " add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
        ),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    ),
}
# Several calls in one turn are none of these families'.
ONE_CALL_A_TURN = ("llama3", "gpt-oss")


def tool_tokenizer(name: str) -> PreTrainedTokenizerFast:
    template, specials = TOOL_FAMILIES[name]
    return make_tokenizer(template, specials)
