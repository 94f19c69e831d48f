"""Tests of loading a tokenizer that is late or fails; the hub is a function."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.epp.parts import MODEL
from tests.models import vocabularies

from kvist_epp.app import model_loader
from kvist_epp.app.model_loader import ModelLoader
from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.vocab import Vocabulary
from kvist_epp.settings.settings import Settings

HUB = "hf://kvist/twig"


class Source:
    """Returns or raises the given answers, one after the other."""

    def __init__(self, *answers: Model | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, source: str, chats: Chats) -> Model:
        self.asked.append(source)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses to a thousandth of a second at most."""
    monkeypatch.setattr(model_loader, "LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(model_loader, "FIRST_PAUSE", 0.001)


async def until_activated(loader: ModelLoader) -> Sequence[Model]:
    """Return the activated models once the first is; after it the loader only waits."""
    came: list[Model] = []
    there = asyncio.Event()

    def activate(model: Model) -> None:
        came.append(model)
        there.set()

    task = asyncio.create_task(loader.run(activate))
    await there.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    return came


async def test_an_unavailable_hub_is_retried() -> None:
    """The picker starts without the model and retries until it is loaded, whatever the error."""
    source = Source(ModelFilesError("away"), ModelFilesError("away"), KeyError("odd"), MODEL)
    loader = ModelLoader(Settings(model=HUB), source)
    assert loader.load_initial() is None
    assert (loader.failures, loader.problem) == (1, "away")
    assert await until_activated(loader) == [MODEL]
    assert (loader.failures, loader.problem, source.asked) == (3, "", [HUB] * 4)


async def test_startup_does_not_wait_for_a_slow_hub() -> None:
    """A slow first download is used when it completes; the hub is asked only once."""
    go, asked = threading.Event(), []

    def slow(source: str, chats: Chats) -> Model:
        asked.append(source)
        go.wait()
        return MODEL

    loader = ModelLoader(Settings(model=HUB), slow, wait_seconds=0.01)
    assert loader.load_initial() is None
    assert "0.01 s" in loader.problem
    go.set()
    assert await until_activated(loader) == [MODEL]
    assert (asked, loader.failures) == ([HUB], 0)


async def test_shutdown_does_not_wait_for_the_hub() -> None:
    """Cancelling while the hub hangs ends the loader at once; a later answer is ignored."""
    go, done = threading.Event(), threading.Event()

    def hangs(source: str, chats: Chats) -> Model:
        go.wait()
        done.set()
        return MODEL

    loader = ModelLoader(Settings(model=HUB), hangs, wait_seconds=0.01)
    assert loader.load_initial() is None
    task = asyncio.create_task(loader.run(lambda _model: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,), timeout=5)
    assert task.cancelled()
    go.set()
    await asyncio.to_thread(done.wait)


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (Settings(model="/nowhere"), ModelFilesError("no folder /nowhere")),
        (Settings(model=HUB, model_required=True), ModelFilesError("away")),
        (Settings(model=HUB), ZeroDivisionError()),
        (Settings(model=HUB, chat_template="/nowhere.jinja"), ModelFilesError("never asked")),
    ],
    ids=["folder", "required", "defect", "template"],
)
def test_some_failures_end_startup(settings: Settings, answer: Exception) -> None:
    """A missing folder or template, a required model and a defect of the picker are errors at once."""
    with pytest.raises(type(answer)):
        ModelLoader(settings, Source(answer)).load_initial()


@pytest.mark.parametrize("model", ["/folder", HUB])
async def test_a_loaded_model_is_not_loaded_again(model: str) -> None:
    """A model loaded at startup is returned, and the loader does nothing more."""
    source = Source(MODEL)
    loader = ModelLoader(Settings(model=model), source)
    assert loader.load_initial() is MODEL
    await nothing_is_activated(loader.run)
    assert (loader.problem, source.asked) == ("", [model])


async def test_a_model_without_chats_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The log says that no chat can be rendered, and why; nothing if they can."""
    ModelLoader(Settings(model=HUB), Source(MODEL)).load_initial()
    assert caplog.messages == []
    silent = replace(MODEL, name=HUB, template=None, why_no_chats="its files hold no chat template")
    ModelLoader(Settings(model=HUB), Source(silent)).load_initial()
    [said] = caplog.messages
    assert said.startswith(f"chats of {HUB} are matched by their plain text, in approximate mode: ")
    assert said.endswith(": its files hold no chat template")


async def test_a_tokenizer_whose_cuts_are_not_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The log says that its generated blocks cost more, and nothing of others."""
    caplog.set_level("INFO", logger="kvist_epp")
    ModelLoader(Settings(model=HUB), Source(MODEL)).load_initial()
    assert caplog.messages == []
    unigram = replace(MODEL, name=HUB, vocabulary=Vocabulary(vocabularies.unigram()))
    ModelLoader(Settings(model=HUB), Source(unigram)).load_initial()
    [said] = caplog.messages
    assert said.endswith(f"it is not known where the tokenizer of {HUB} cuts texts")


async def test_nothing_is_loaded_without_a_model() -> None:
    """Approximate mode by configuration is not a problem to report."""
    loader = ModelLoader(Settings(), Source())
    assert loader.load_initial() is None
    await nothing_is_activated(loader.run)
    assert loader.problem == ""


async def nothing_is_activated(run: Callable[[Callable[[Model], None]], object]) -> None:
    """Check that ``run`` keeps waiting and activates nothing."""
    came: list[Model] = []
    task = asyncio.ensure_future(run(came.append))  # type: ignore[call-overload]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait((task,))
    assert came == []
