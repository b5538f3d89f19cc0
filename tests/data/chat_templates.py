"""Chat templates of the kinds that are in use, in minimal forms of our own, each with a tokenizer made on the spot.

They differ in what makes continuing a conversation hard: where the beginning-of-sequence token stands, what ends an
assistant's turn, spaces around contents, default system messages, stripped thoughts, system messages that move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Newlines stay together and apart from what follows, as in the tokenizers of Qwen and Llama 3."""

CORPUS = [
    "You are a helpful assistant. You play a game on a frozen lake.",
    "user assistant system model tool <tools></tools> <tool_call></tool_call> <think>\n</think>\n\n",
    "You see a wall.\n\nYou may go left, right, up or down. I go left <answer>left</answer> and you go right.",
]


@dataclass(frozen=True)
class ChatFormat:
    """One template, and what an assistant's turn looks like in it."""

    template: str
    special_tokens: tuple[str, ...]
    """The last one ends an assistant's turn."""
    before_content: str = ""
    """What history shows before a content and the policy writes itself."""
    before_stop: str = ""
    """What history shows after a content, before the token that ends the turn."""
    has_system: bool = True
    bos_token: str | None = None

    @property
    def stop(self) -> str:
        return self.special_tokens[-1]

    def written(self, content: str) -> str:
        """An assistant's turn as a policy that knows the template writes it."""
        return f"{self.before_content}{content}{self.before_stop}{self.stop}"


CHATML = """\
{%- set has_system = messages[0].role == 'system' %}
{%- set said = messages[1:] if has_system else messages %}
{{- '<|im_start|>system\n' + (messages[0].content if has_system else 'You are a helpful assistant.') }}
{%- if tools %}{{- '\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>' }}{% endif %}
{{- '<|im_end|>\n' }}
{%- for message in said %}
{%- if message.role == 'tool' %}
{%- if loop.first or said[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or said[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """\
{%- set seen = namespace(last_user=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set seen.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < seen.last_user %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if message.role == 'assistant' and loop.last and '</think>' not in content %}
{%- set content = '<think>\n\n</think>\n\n' + content %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

LLAMA2 = """\
{%- set said = messages[1:] if messages[0].role == 'system' else messages %}
{%- for message in said %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- set content = message.content | trim %}
{%- if loop.first and messages[0].role == 'system' %}
{%- set content = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' + content %}{% endif %}
{%- if message.role == 'user' %}{{- '<s>[INST] ' + content + ' [/INST]' }}
{%- else %}{{- ' ' + content + ' </s>' }}{% endif %}
{%- endfor %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """\
{{- '<s>' }}
{%- set has_system = messages[0].role == 'system' %}
{%- for message in (messages[1:] if has_system else messages) %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (messages[0].content + '\n\n' if has_system and loop.last else '') + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content | trim + '</s>' }}{% endif %}
{%- endfor %}"""

GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

PHI3 = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% else %}{{- '<|endoftext|>' }}{% endif %}"""

DEEPSEEK = """\
{{- '<|begin|>' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|finish|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' + ('<think>\n' if thinking else '') }}{% endif %}"""

FORMATS = {
    "chatml": ChatFormat(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "qwen3": ChatFormat(QWEN3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "llama2": ChatFormat(LLAMA2, ("<s>", "</s>"), before_content=" ", before_stop=" ", bos_token="<s>"),
    "llama3": ChatFormat(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        bos_token="<|begin_of_text|>",
    ),
    "mistral": ChatFormat(
        MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>"), before_content=" ", has_system=False, bos_token="<s>"
    ),
    "gemma": ChatFormat(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), has_system=False, bos_token="<bos>"
    ),
    "phi3": ChatFormat(PHI3, ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "deepseek": ChatFormat(DEEPSEEK, ("<|begin|>", "<|User|>", "<|Assistant|>", "<|finish|>"), bos_token="<|begin|>"),
}
"""``has_system`` is false for Mistral, which takes a system message, but not in a conversation that goes on."""


@cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 350 tokens with the format's special tokens and template.

    Asked to add special tokens, it would add the beginning-of-sequence token, as the real ones do.
    """
    form = FORMATS[name]
    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in form.special_tokens])
    if form.bos_token is not None:
        bos = (form.bos_token, backend.token_to_id(form.bos_token))
        backend.post_processor = processors.TemplateProcessing(single=f"{form.bos_token} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=form.template,
        bos_token=form.bos_token,
        eos_token=form.special_tokens[0] if name in ("chatml", "qwen3", "phi3") else form.stop,
    )
