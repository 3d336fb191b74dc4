"""Models with chat templates on disk, and what SGLang makes of prompts for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tools.cpu_engine.tiny_model import cached_tiny_model

DUMP = "{{ messages | tojson }}{{ tools | tojson }}{{ bos_token }}{{ add_generation_prompt }}"
"""Shows everything a template can see of messages and tools."""


CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% endif %}"
)


PARTS = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}[{{ part.type }} {{ part.text }}]{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)


FLAT_TOOLS = (
    "{% for tool in tools or [] %}{% if tool.name is not defined %}"
    "{{ raise_exception('flat tools, please') }}{% endif %}{{ tool.name }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
TEMPLATES = {
    "dump": DUMP,
    "chatml": CHATML,
    "parts": PARTS,
    "parts_dump": PARTS + DUMP,
    "flat": FLAT_TOOLS,
    "refuses": REFUSES,
}


ENGINE = """
import sys
from types import SimpleNamespace
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.parser import template_manager
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer
serving = SimpleNamespace(hf_chat_template_name=None, trust_request_chat_template=False)
template_manager.get_serving = lambda: serving
serving_chat.get_serving = lambda: serving
cases = json.load(open(sys.argv[1]))
for directory in cases["directories"]:
    tokenizer = get_tokenizer(directory)
    config = SimpleNamespace(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    manager = SimpleNamespace(
        tokenizer=tokenizer, processor=None, served_model_name="m",
        model_config=SimpleNamespace(hf_config=config),
    )
    chat = object.__new__(serving_chat.OpenAIServingChat)
    chat.tokenizer_manager = manager
    chat.template_manager = template_manager.TemplateManager()
    chat.template_manager.load_chat_template(manager, None, "/m")
    chat.chat_encoding_spec = chat._encoding_adapter = chat._reasoning_detector = None
    chat.reasoning_parser = chat.tool_call_parser = None
    chat.default_chat_template_kwargs = {}
    chat.is_minimax_m3 = chat.is_gpt_oss = chat.is_gemma4 = False
    chat._chat_template_cache = {}
    chat._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
    chat._prompt_text_round_trip_is_lossy = chat._probe_prompt_text_round_trip()
    found = []
    for body in cases["bodies"]:
        try:
            request = ChatCompletionRequest.model_validate(body | {"model": "m"})
            found.append(list(chat._process_messages(request, False).prompt_ids))
        except ValueError as error:
            found.append(None)
    texts = [tokenizer(text)["input_ids"] for text in cases["prompts"]]
    answer[directory] = {"chats": found, "texts": texts}
"""


def save_model(directory: Path, template: str, *, bos: bool = False, **settings: Any) -> None:
    """The tiny model's tokenizer with another template, and with more in it."""
    directory.mkdir()
    shutil.copy(cached_tiny_model() / "config.json", directory)
    tokenizer = Tokenizer.from_file(str(cached_tiny_model() / "tokenizer.json"))
    config = json.loads((cached_tiny_model() / "tokenizer_config.json").read_text())
    config |= {"chat_template": template} | settings
    if bos:
        tokenizer.add_tokens([AddedToken("<|added|>", normalized=False)])
        tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer.enable_truncation(8)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
