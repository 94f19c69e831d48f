"""A model: its chats and its vocabulary, as engines have them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

import jinja2

from kvist_epp.errors import ModelFilesError
from kvist_epp.index.media_marks import TOKEN
from kvist_epp.prompt.canonical_chunks import CanonicalChunks
from kvist_epp.prompt.chat import MALFORMED, ContentFormat, UnrenderableError, with_system_first
from kvist_epp.prompt.chat_rules import NO_RULES, ChatRules
from kvist_epp.prompt.deepseek import MODES
from kvist_epp.prompt.harmony import MODEL_TYPE, HarmonyChats
from kvist_epp.prompt.kimi import CODE, KimiChats
from kvist_epp.prompt.media_texts import MediaTexts, media_of
from kvist_epp.prompt.mistral import MistralChats
from kvist_epp.prompt.model_files import (
    AUTO,
    MISTRAL,
    TEKKEN,
    TEMPLATE_MODES,
    chat_templates,
    model_folder,
    read_json,
    read_tokenizer,
    special_tokens,
    tokenizer_code,
    tokenizer_mode,
)
from kvist_epp.prompt.request_types import Chat, Request
from kvist_epp.prompt.template import Template, requires_system_first
from kvist_epp.prompt.tiktoken_vocab import tekken_tokenizer
from kvist_epp.prompt.vocab import Vocabulary

_MEDIA_WORDS: Final = ("vision", "image", "visual", "audio", "video", "mm_", "thinker", "media")
"""In names of a configuration: those of models that take media."""
_PLACEHOLDERS: Final = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "media_placeholder_token_id",
)
"""Names of placeholder tokens in configurations."""

_CODED: Final = "its engines write chats in code of their own"
NO_TEMPLATE: Final = "its files hold no chat template"


def _ignore(why: str) -> None:
    """Ignore the failure: the default for callers that do not count failures."""


@dataclass(frozen=True, slots=True)
class Chats:
    """Chat settings of the engines, from the flags of the same names; they take precedence over the files."""

    template: str = ""
    """A file, or the template itself; as in vLLM, a path has no brace and no line end."""
    style: ContentFormat | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_mode: str = AUTO
    """``auto``: as the engines choose it by the model's files."""
    rules: ChatRules = NO_RULES

    def templates(self) -> dict[str, str]:
        """Return the templates by name, if one is set. Raises ModelFilesError if the file cannot be read."""
        if not self.template:
            return {}
        try:
            return {"default": Path(self.template).read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            if not set(self.template).isdisjoint("{}\n"):
                return {"default": self.template}
            raise ModelFilesError(
                f"--chat-template: cannot read {self.template} ({type(error).__name__}): give a file of this "
                "machine, or the template itself"
            ) from error


_NO_CHAT_SETTINGS: Final = Chats()


class ChatFormat(Protocol):
    """Writes chats as an engine does: by the template of the model, or by code for its family."""

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt of a chat; ``size`` is that of the request. Raises UnrenderableError."""

    def media_text(self, kind: str) -> str:
        """Return what stands for each medium of this kind in the prompt; empty: it does not show."""


@dataclass(frozen=True, slots=True)
class Model:
    """Renders requests to the bytes the engine's tokens will join to; immutable after load but for what it
    learns of media."""

    name: str
    """The source it was loaded from."""
    vocabulary: Vocabulary = field(repr=False)
    template: ChatFormat | None = field(repr=False)
    """None: chats are not rendered."""
    tool_template: Template | None = field(repr=False)
    """The template for requests with tools, if the model has a separate one."""
    merges_system: bool = False
    """The engines of the Messages API move system messages between others into the first one."""
    rules: ChatRules = NO_RULES
    why_no_chats: str = ""
    """Why chats are not rendered; empty if they are."""
    media: MediaTexts | None = field(default=None, repr=False)
    """What its engines make of pictures, sound and video; None: it takes none."""
    placeholders: frozenset[int] = frozenset()
    """Ids of the tokens of which engines put as many into a prompt as a medium needs."""

    @classmethod
    def load(cls, source: str, chats: Chats = _NO_CHAT_SETTINGS) -> Self:
        """Load a folder or ``hf://repo[@revision]``; ``chats``: the chat settings of the engines.

        Raises:
            ModelFilesError: a file is absent or cannot be used; names it and the remedy.
        """
        home = model_folder(source)
        settings, described = read_json(home / "tokenizer_config.json"), read_json(home / "config.json")
        specials = special_tokens(home, settings)
        mode = chats.tokenizer_mode.lower()
        if mode == AUTO:
            mode = tokenizer_mode(source, home, described)
        tekken = read_json(home / TEKKEN) if mode == MISTRAL and (home / TEKKEN).exists() else None
        vocabulary = Vocabulary(
            read_tokenizer(home, settings, specials) if tekken is None else tekken_tokenizer(tekken)
        )
        templates = chats.templates()
        if mode in TEMPLATE_MODES:
            templates = templates or chat_templates(home, settings)
        default, tools = templates.get("default"), templates.get("tool_use")
        merges = any(map(requires_system_first, {default, tools or default}))
        if described.get("model_type") == MODEL_TYPE:
            coded = HarmonyChats()
            rules = replace(chats.rules, hide_in_responses=False).with_thinking_off(coded.render)
            return cls(source, vocabulary, coded, None, merges_system=merges, rules=rules)
        template: ChatFormat | None = None
        if mode in MODES:
            template = MODES[mode](chats.defaults)
        elif tekken is not None:
            template = MistralChats.load(tekken, chats.defaults)
        elif mode in TEMPLATE_MODES and default is not None:
            template = compiled = _compiled(source, default, specials, chats)
            if tokenizer_code(settings).startswith(CODE):
                template = KimiChats(compiled, default, chats.defaults)
        return cls(
            name=source,
            vocabulary=vocabulary,
            template=template,
            tool_template=None if tools is None else _compiled(source, tools, specials, chats),
            merges_system=merges,
            rules=chats.rules if template is None else chats.rules.with_thinking_off(template.render),
            why_no_chats="" if template else NO_TEMPLATE if mode in TEMPLATE_MODES else f"{_CODED} ({mode})",
            media=MediaTexts() if _takes_media(described) else None,
            placeholders=_placeholders(described, vocabulary),
        )

    @property
    def faithful(self) -> bool:
        """Return whether tokens map to bytes exactly; otherwise approximate mode is used."""
        return not self.vocabulary.why_not

    @property
    def why_not(self) -> str:
        """Return why tokens do not map to bytes exactly; empty if they do."""
        return self.vocabulary.why_not

    @property
    def pieces(self) -> list[bytes]:
        """Return the bytes of each token id in events; ``b""`` for ids in ``absent``."""
        if not self.placeholders:
            return self.vocabulary.pieces
        return [
            TOKEN if at in self.placeholders else piece for at, piece in enumerate(self.vocabulary.pieces)
        ]

    @property
    def absent(self) -> frozenset[int]:
        """Return the ids within ``pieces`` that have no token."""
        return self.vocabulary.absent

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in it are recognised, none is added. Takes µs per token."""
        return self.vocabulary.encode(text)

    @property
    def chunks(self) -> CanonicalChunks | None:
        """Return which chunks of tokens are canonical; None if it is not known where texts are cut."""
        return self.vocabulary.chunks

    def prompts(self, request: Request, failed: Callable[[str], None] = _ignore) -> list[bytes]:
        """Return the bytes of each prompt as the engine tokenizes it; empty: it is not known.

        ``failed`` is then called with the reason, a fixed word for a counter.
        """
        try:
            if request.chat is not None:
                return [self._chat(request)]
            found = [self._completion(prompt, request) for prompt in request.prompts]
        except UnrenderableError as reason:
            failed(str(reason))
            return []
        except UnicodeEncodeError:
            failed("surrogates")
            return []
        except MALFORMED:
            failed("shape")
            return []
        if not found:
            failed(request.why)
        return found

    def _chat(self, request: Request) -> bytes:
        assert request.chat is not None
        chat = self.rules.apply(request.chat)
        tools = self.tool_template if chat.tools is not None else None
        template = tools or self.template
        if template is None:
            raise UnrenderableError("no-template")
        if chat.inline_system and self.merges_system:
            chat = with_system_first(chat)
        text = template.render(chat, request.size)
        # the tokenizer of Mistral makes tokens of chats by itself and adds none
        special = request.add_special_tokens and not isinstance(template, MistralChats)
        prompt = self.vocabulary.prompt(text, add_special_tokens=special)
        if self.media is None:
            return prompt
        prompt = self._as_events(prompt)
        if not (media := media_of(chat, request.model)):
            return prompt
        return self.media.place(
            prompt, media, lambda kind: self._as_events(template.media_text(kind).encode())
        )

    def _as_events(self, prompt: bytes) -> bytes:
        """Return a prompt with placeholders as ``pieces`` has them; clients may write them as text."""
        for token in self.placeholders:
            prompt = prompt.replace(self.vocabulary.pieces[token], TOKEN)
        return prompt

    def _completion(self, prompt: str | list[int], request: Request) -> bytes:
        if isinstance(prompt, str):
            text = self.vocabulary.prompt(prompt, add_special_tokens=request.add_special_tokens)
            return self._as_events(text)
        try:
            if prompt and min(prompt) >= 0:
                return self._as_events(self.vocabulary.join(prompt))
        except IndexError:
            pass
        raise UnrenderableError("token-ids")


def _takes_media(described: dict[str, Any]) -> bool:
    """Return whether the model may take media: by its configuration, or if it has none."""
    return not described or any(word in name for name in described for word in _MEDIA_WORDS)


def _placeholders(described: dict[str, Any], vocabulary: Vocabulary) -> frozenset[int]:
    """Return the placeholder tokens that the configuration names, if they are added tokens."""
    named = [described.get(name) for name in _PLACEHOLDERS]
    return frozenset(token for token in named if type(token) is int and vocabulary.is_added(token))


def _compiled(source: str, template: str, specials: dict[str, str], chats: Chats) -> Template:
    try:
        return Template(template, specials, chats.style, chats.defaults)
    except jinja2.TemplateError as error:
        raise ModelFilesError(f"the chat template of {source} does not compile: {error}") from error
