"""Media in prompts: what engines make of them is learned, and written in their place from then on."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models import folders

from kvist_epp.index.media_marks import ITEM, TOKEN, UNKNOWN, item_mark
from kvist_epp.prompt import media_texts
from kvist_epp.prompt.chat import MEDIA_MARK
from kvist_epp.prompt.media_texts import MediaPrompt, MediaTexts, Medium, media_of
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_epp.prompt.request_types import Chat, Request
from kvist_epp.prompt.template import Template

CHAT = "/v1/chat/completions"
SHORT = "<vs><pad><ve>"
CAT, DOG = (Medium("image", name * 8) for name in (b"ca", b"do"))


def written(_kind: str) -> bytes:
    return SHORT.encode()


def shown(name: str, tokens: int = 3) -> bytes:
    """The text that an engine makes of a picture."""
    return b"<vs>" + item_mark(name) + tokens * TOKEN + b"<ve>"


def place(texts: MediaTexts, prompt: str, *media: Medium) -> MediaPrompt:
    return texts.place(prompt.encode(), media, written)


def test_the_worked_example() -> None:
    """A picture ends the match of its first prompt; the engine's blocks show its text, which is in the second
    prompt, whatever is around it there."""
    texts = MediaTexts()
    first = place(texts, f"user {SHORT}What is it?<|im_end|>", CAT)
    assert (first, first.complete) == (
        b"user " + UNKNOWN + CAT[1] + b"<vs><pad><ve>What is it?<|im_end|>",
        False,
    )

    assert texts.learn(first, b"user " + shown("cat") + b"What is it?<|im_e")
    second = place(texts, f"other {SHORT}?", CAT)
    assert (second, second.complete) == (b"other " + shown("cat") + b"?", True)


@pytest.mark.parametrize("size", [0, 3, 5, 9, 30, 40, 46])
def test_too_little_of_a_prompt_shows_nothing(size: int) -> None:
    """Blocks that end within the picture, or just behind it, do not mislead."""
    texts = MediaTexts()
    first = place(texts, f"user {SHORT}What is it?<|im_end|>", CAT)
    engine = b"user " + shown("cat") + b"What is it?<|im_end|>"
    assert not texts.learn(first, engine[:size])
    assert (len(texts), texts.learn(first, engine), len(texts)) == (0, True, 1)


plain = st.text(st.sampled_from("ab <>|\nzé🚀"), max_size=30)
names = st.sampled_from(["cat", "dog", "eel", "fox"])


@given(
    head=plain,
    tail=st.text(st.sampled_from("xyz"), min_size=1, max_size=30),
    middle=st.lists(st.tuples(names, plain), min_size=1, max_size=6),
    known=st.sets(names),
    cut=st.integers(0, 400),
)
def test_prompts_are_those_of_the_engine_once_all_media_were_seen(
    head: str, tail: str, middle: list[tuple[str, str]], known: set[str], cut: int
) -> None:
    """Whatever was known before, and however much of a first prompt the engine shows, media never get a text
    that is not theirs, and all of the prompt shows all of them."""
    texts = MediaTexts()
    for name in known:
        texts.learn(place(texts, f"{SHORT}xyz", medium(name)), shown(name, len(name)) + b"xyz")
    prompt = head + "".join(SHORT + text for _, text in middle) + tail
    media = [medium(name) for name, _ in middle]
    engine = head.encode() + b"".join(shown(n, len(n)) + t.encode() for n, t in middle) + tail.encode()

    texts.learn(place(texts, prompt, *media), engine[:cut])
    texts.learn(place(texts, prompt, *media), engine)
    assert (place(texts, prompt, *media), place(texts, prompt, *media).complete) == (engine, True)


def medium(name: str) -> Medium:
    return Medium("image", name.encode().ljust(16, b"."))


def test_a_url_that_leads_elsewhere_is_learned_again() -> None:
    """The engine's identifier of a known medium has changed: its text is dropped, and the next prompt learns
    the new one."""
    texts = MediaTexts()
    prompt = f"a {SHORT} what is that?"
    texts.learn(place(texts, prompt, CAT), b"a " + shown("cat") + b" what is that?")
    engine = b"a " + shown("dog", 5) + b" what is that? An answer."
    assert texts.learn(place(texts, prompt, CAT), engine)
    assert not place(texts, prompt, CAT).complete
    texts.learn(place(texts, prompt, CAT), engine)
    assert engine.startswith(place(texts, prompt, CAT))


def test_media_on_which_engines_do_not_agree_stay_unknown() -> None:
    """Engines that load the model from different paths have different identifiers: after some changes none is
    believed, so that such prompts are routed by the history."""
    texts = MediaTexts()
    for number in range(20):
        prompt = place(texts, f"a {SHORT} what is that?", CAT)
        texts.learn(prompt, b"a " + shown(f"cat {number % 2}") + b" what is that?")
    assert not place(texts, SHORT, CAT).complete


def test_what_an_engine_writes_differently_is_not_kept() -> None:
    """A text of a medium is dropped if the engine has another text behind the medium than the prompt."""
    texts = MediaTexts()
    first = place(texts, f"a {SHORT}bcd, and more", CAT)
    texts.learn(first, b"a " + shown("cat") + b"bcd, or more")
    texts.learn(first, b"a " + shown("cat") + b"..bcd, and most of it")
    assert len(texts) == 0


def test_texts_that_were_not_asked_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded; each use of a text makes it the newest."""
    monkeypatch.setattr(media_texts, "MEMORY", 3 * (len(shown("0")) + media_texts.KEPT))
    texts = MediaTexts()
    for number in range(6):
        one = Medium("image", b"%016d" % number)
        texts.learn(place(texts, f"{SHORT}what?", one), shown(str(number)) + b"what?")
        place(texts, SHORT, Medium("image", b"%016d" % 0))
    known = [n for n in range(6) if place(texts, SHORT, Medium("image", b"%016d" % n)).complete]
    assert known == [0, 4, 5]


def test_a_template_that_shows_no_place_leaves_the_prompt_as_it_is() -> None:
    """A medium that cannot be placed is marked at the end: the text before and behind is matched as it is."""
    texts = MediaTexts()
    prompt = texts.place(b"no place", [CAT], lambda _: b"")
    assert (prompt, prompt.complete) == (b"no place" + UNKNOWN + CAT[1], False)
    assert texts.learn(prompt, b"no place at all")


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"image_url": {"url": "data:image/png;base64,AAAB"}}, False),
        ({"cache_control": {"type": "ephemeral"}}, True),
        ({"uuid": "x"}, False),
        ({"type": "video_url"}, False),
    ],
)
def test_media_are_told_apart_by_what_is_sent(change: dict[str, Any], same: bool) -> None:
    """A picture is known by its content, whatever the order of the keys."""
    one, other = (digest_of(part) for part in (PICTURE, dict(reversed((PICTURE | change).items()))))
    assert (one == other) is same


def test_a_named_medium_needs_no_content() -> None:
    """Engines take the client's ``uuid`` for the identifier, and the content may be left out later."""
    named = PICTURE | {"uuid": "x"}
    assert digest_of(named) == digest_of({"type": "image_url", "image_url": None, "uuid": "x"})


def test_settings_of_the_processor_make_other_media() -> None:
    """The number of tokens of a picture depends on them."""
    assert digest_of(PICTURE) != digest_of(PICTURE, mm_processor_kwargs={"max_pixels": 100})


def digest_of(part: dict[str, Any], **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}], **fields}
    chat = parse(CHAT, json.dumps(body).encode()).chat
    assert chat is not None
    [found] = media_of(chat)
    return found.digest


def parts(body: str) -> str:
    """A template that writes this for each part ``p`` of a content."""
    return f"{{% for m in messages %}}{{% for p in m.content %}}{body}{{% endfor %}}{{% endfor %}}"


FIRST = parts("{{ '<img>' if p.type == 'image' }}").replace("{% endfor %}{% endfor %}", "") + (
    "{% endfor %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)


JOINED = parts(
    "{% if p.type == 'image' %}<i/>{% else %}"
    "{{ ' ' if loop.previtem is defined and loop.previtem.type == 'text' }}{{ p.text }}{% endif %}"
)
"""It puts a blank between two texts only."""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", MEDIA_MARK),
        (parts("{{ p.text if p.type == 'text' else '<image>' }}"), "<image>"),
        (parts("{% if p.type == 'image' %}<i>A</i>{% else %}{{ p.text }}{% endif %}"), "<i>A</i>"),
        (parts("{{ p.text or '' }}"), ""),
        (parts("{{ p.text if p.type == 'text' else raise_exception('no') }}"), ""),
        (parts("{{ '<i/>\\n' if p.type == 'image' else p.text }}"), "<i/>"),
        (JOINED, "<i/>"),
        (FIRST, "<img>"),
    ],
    ids=("string", "one text", "several", "none", "refuses", "line end", "joined", "first"),
)
def test_the_text_of_a_medium_is_found_by_rendering_with_and_without(source: str, text: str) -> None:
    """Templates say what they write for a picture when they are run, first or between the texts."""
    template = Template(source, {})
    assert [template.media_text("image") for _ in range(2)] == [text, text]


def test_prompts_of_a_vision_model(tmp_path: Path) -> None:
    """The files of a model tell that it takes media, and its placeholder tokens, which events spell short."""
    model = Model.load(str(folders.write_vision(tmp_path)))
    assert model.media is not None
    assert model.pieces.count(TOKEN) == 2

    [first] = model.prompts(request("What is it?"))
    before, _, behind = first.partition(UNKNOWN)
    engine = (
        before
        + b"<|vision_start|>"
        + item_mark("cat")
        + 40 * TOKEN
        + b"<|vision_end|>What is it?<|im_end|>\n"
    )
    assert isinstance(first, MediaPrompt)
    assert behind[16:].startswith(b"<|vision_start|>" + TOKEN + b"<|vision_end|>What")
    assert first.texts.learn(first, engine)
    [second] = model.prompts(request("What is it?"))
    assert second.startswith(engine)


def test_models_of_text_look_for_no_media(tmp_path: Path) -> None:
    """Their engines refuse pictures."""
    folder = folders.write("chatml", tmp_path)
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8}')
    model = Model.load(str(folder))
    assert model.media is None
    assert not isinstance(model.prompts(request("a"))[0], MediaPrompt)


def test_clients_cannot_write_marks(tmp_path: Path) -> None:
    """Neither texts nor token ids have the first byte of a mark; placeholders in them are the engine's."""
    model = Model.load(str(folders.write_vision(tmp_path)))
    text = "".join(mark.decode("latin-1") for mark in (ITEM, UNKNOWN, TOKEN))
    ids = [at for at in range(len(model.pieces)) if at not in model.placeholders]
    [chat] = model.prompts(request(text))
    [of_text] = model.prompts(completion(text + "<|image_pad|>"))
    [of_ids] = model.prompts(completion(ids))

    assert chat.count(UNKNOWN) == chat.count(b"\xff") - 1 == 1  # that of the picture, and its placeholder
    assert of_text == text.encode() + TOKEN
    assert b"\xff" not in of_ids


def completion(prompt: str | list[int]) -> Request:
    return parse("/v1/completions", json.dumps({"model": "m", "prompt": prompt}).encode())


def test_more_than_a_thousand_pictures_are_not_placed(tmp_path: Path) -> None:
    """A request whose media would take long is matched by its plain text."""
    model = Model.load(str(folders.write_vision(tmp_path)))
    body = {"model": "m", "messages": [{"role": "user", "content": [PICTURE] * (media_texts.MOST + 1)}]}
    failures: list[str] = []
    assert model.prompts(parse(CHAT, json.dumps(body).encode()), failures.append) == []
    assert failures == ["media"]


@pytest.mark.parametrize(
    ("part", "lasting"),
    [
        (PICTURE, True),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, False),
        ({"type": "image_url", "image_url": "HTTP://example.com/a.png"}, False),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, "uuid": "a"}, True),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, True),
    ],
)
def test_what_a_url_leads_to_may_change(part: dict[str, Any], lasting: bool) -> None:
    """Hits behind a medium of which only a URL was sent are not held against the index."""
    [found] = media_of(Chat([{"role": "user", "content": [part]}]))
    assert found.lasting is lasting


def test_digests_cannot_be_made_equal() -> None:
    """A name is never the content of another medium, however it is written."""
    content = json.dumps({"image_url": {"url": "data:image/png;base64,AAAA"}, "type": "image_url"})
    assert digest_of(PICTURE) != digest_of({"type": "image_url", "uuid": content})


def test_a_text_that_was_cut_wrongly_is_learned_again() -> None:
    """A text behind a picture may look like the picture's end, where the placeholder is not known: the next
    prompt shows the mistake, and the text is learned anew."""
    texts = MediaTexts()
    end = "<ve>" * 20
    texts.learn(place(texts, f"{SHORT}{end}", CAT), shown("cat") + 9 * b"<ve>")
    for _ in range(2):
        texts.learn(place(texts, f"{SHORT}What is it?", CAT), shown("cat") + b"What is it?")
    assert place(texts, f"{SHORT}What", CAT) == shown("cat") + b"What"


def request(text: str) -> Request:
    content = [PICTURE, {"type": "text", "text": text}]
    return parse(
        CHAT, json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    )
