"""Writes chats as transformers renders them, by templates with the features in use.

Each template has the constructions of a family's, in other words. A date is replaced by
a mark. The tests need no transformers; to make the file anew:

    pip install transformers
    python tests/golden/templates/make_templates.py
"""

import datetime
import json
import pathlib

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
CHATS = [
    [{"role": "user", "content": " Is 2 < 3 & 'so'? é "}],
    [
        {"role": "system", "content": "Be brief. /no_think"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "and\nnow"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ],
]
FORMAT, MARK = "%d %b %Y", "<date>"
TEMPLATES = {
    "SmolLM2": """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}
{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "SmolLM3": """{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}{%- endif -%}
{%- if messages[0].role == "system" -%}
{%- set custom = messages[0].content.replace("/no_think", "").rstrip() -%}
{%- set enable_thinking = "/no_think" not in messages[0].content -%}
{%- endif -%}
{{- "Today: " ~ strftime_now("%d %b %Y") ~ "\\n" -}}
{{- custom | default("none") -}}
{%- for message in messages -%}{%- if message.role == "user" -%}
{{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
{%- elif message.role == "assistant" -%}{% generation %}
{%- if enable_thinking -%}{{ "<|im_start|>assistant\\n" + message.content }}
{%- else -%}{{ "<|im_start|>assistant\\n<think>\\n</think>\\n" + message.content }}
{%- endif -%}{{ "<|im_end|>\\n" }}{% endgeneration %}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}""",
    "Granite 3": """{%- if tools -%}{{ tools | tojson(indent=4) }}{%- endif %}
{%- if documents %}{{ documents | tojson }}{%- endif %}
{%- for message in messages %}
<|start_of_role|>{{ message['role'] }}<|end_of_role|>{{ message | tojson(indent=2) }}
{%- if loop.last and add_generation_prompt %}<|start_of_role|>assistant
{%- set c = {'a': [1, 2.5, none, true]} %} {{ c | tojson(sort_keys=true) }}
{%- endif %}{%- endfor %}""",
    "Mistral Small 3": """{%- set today = strftime_now("%d %b %Y") %}
{%- set date = namespace(value=today) %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set loop_messages = messages[1:] %}
[SYSTEM_PROMPT]{{ messages[0]['content'] }} {{ date.value }}[/SYSTEM_PROMPT]
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate.') }}{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{%- endif %}{%- endfor %}""",
    "Llama 3.1": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
    + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "Gemma": """{{ bos_token }}
{%- for message in messages -%}
{%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\\n' -}}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    "Qwen 3": """{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi and message.role == "user" and message.content is string
    and not message.content.startswith('<tool>') %}
{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == "assistant" and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- if loop.index0 == ns.last %}{{- '!' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "loop controls": """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{{ loop.index }}: {{ message.content | upper }}
{% if message.role == 'assistant' %}{% break %}{% endif %}
{% endfor %}""",
    "macros": """{% macro turn(role, text='-') %}
<{{ role }} {{ caller() if caller else '' }}>{{ text }}</{{ role }}>
{% endmacro %}
{% set names = dict(user='U', assistant='A') %}
{% for message in messages %}{{ turn(names.get(message.role, '?'), message.content) }}
{% endfor %}{% for k, v in names.items() %}{{ k }}={{ v }}{{ pad_token }}{% endfor %}
{% for k, v in dict.fromkeys(['a']) | dictsort %}{{ k }}{{ v }}{% endfor %}""",
    "filters": """{{ messages | map(attribute='role') | unique | join(',') }}
{% for m in messages | selectattr('role', 'equalto', 'user') | list %}
{{ m.content | tojson }} {{ m['content'] | replace('hi', unk_token) | string | length }}
{% endfor %}{% set x %}{{ messages[-1].content }}{% endset %}{{ x | indent(2) }}
{% if add_generation_prompt %}{{ '%s:' | format('next') }}{% endif %}""",
}


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")), **SPECIAL
    )
    now = datetime.datetime.now().strftime(FORMAT)
    found = {}
    for name, template in TEMPLATES.items():
        texts = [
            tokenizer.apply_chat_template(
                chat,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=chat[-1]["role"] != "assistant",
            )
            for chat in CHATS
        ]
        texts = [text.replace(now, MARK) for text in texts]
        found[name] = {"template": template, "texts": texts}
    content = {"special": SPECIAL, "chats": CHATS, "format": FORMAT, "mark": MARK}
    text = json.dumps(content | {"templates": found}, indent=1, ensure_ascii=False)
    to = pathlib.Path(__file__).with_name("templates.json")
    to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
