"""A tokenizer that does not come at once, over a hub that is a function."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from tests.epp.parts import MODEL

from kvist_epp.app import model_loader as tokenizer
from kvist_epp.app.model_loader import Tokenizer
from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.settings.settings import Settings

HUB = "hf://kvist/twig"


class Source:
    """Gives what it was told to give, one answer after the other."""

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
    """Pauses of a thousandth of a second at most."""
    monkeypatch.setattr(tokenizer, "LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(tokenizer, "FIRST_PAUSE", 0.001)


async def until_it_came(made: Tokenizer) -> Sequence[Model]:
    """What was told, after which nothing more is."""
    came: list[Model] = []
    there = asyncio.Event()

    def told(model: Model) -> None:
        came.append(model)
        there.set()

    task = asyncio.create_task(made.run(told))
    await there.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    return came


async def test_a_hub_that_is_away_is_asked_again() -> None:
    """Serving begins without it; it is asked for until it comes, whatever goes wrong on the way."""
    source = Source(ModelFilesError("away"), ModelFilesError("away"), KeyError("odd"), MODEL)
    made = Tokenizer(Settings(model=HUB), source)
    assert made.first() is None
    assert (made.failures, made.problem) == (1, "away")
    assert await until_it_came(made) == [MODEL]
    assert (made.failures, made.problem, source.asked) == (3, "", [HUB] * 4)


async def test_a_slow_hub_is_not_waited_for() -> None:
    """An answer that takes too long is taken when it comes: the hub is asked once."""
    go, asked = threading.Event(), []

    def slow(source: str, chats: Chats) -> Model:
        asked.append(source)
        go.wait()
        return MODEL

    made = Tokenizer(Settings(model=HUB), slow, patience=0.01)
    assert made.first() is None
    assert "0.01 s" in made.problem
    go.set()
    assert await until_it_came(made) == [MODEL]
    assert (asked, made.failures) == ([HUB], 0)


async def test_the_end_does_not_wait_for_the_hub() -> None:
    """Cancelled while the hub hangs: it ends at once, and an answer that comes later is for nobody."""
    go, done = threading.Event(), threading.Event()

    def hangs(source: str, chats: Chats) -> Model:
        go.wait()
        done.set()
        return MODEL

    made = Tokenizer(Settings(model=HUB), hangs, patience=0.01)
    assert made.first() is None
    task = asyncio.create_task(made.run(lambda _model: None))
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
    ids=["folder", "required", "our fault", "template"],
)
def test_some_failures_end_the_start(settings: Settings, answer: Exception) -> None:
    """A folder does not mend itself; somebody may want it so; and a fault of ours is not hidden."""
    with pytest.raises(type(answer)):
        Tokenizer(settings, Source(answer)).first()


@pytest.mark.parametrize("model", ["/folder", HUB])
async def test_one_that_is_there_is_not_asked_for_again(model: str) -> None:
    """The usual case: it is given at the start, and nothing more happens."""
    source = Source(MODEL)
    made = Tokenizer(Settings(model=model), source)
    assert made.first() is MODEL
    await nothing_comes(made.run)
    assert (made.problem, source.asked) == ("", [model])


async def test_without_a_model_nobody_is_asked() -> None:
    """Approximate mode was asked for: there is nothing to warn of."""
    made = Tokenizer(Settings(), Source())
    assert made.first() is None
    await nothing_comes(made.run)
    assert made.problem == ""


async def nothing_comes(run: Callable[[Callable[[Model], None]], object]) -> None:
    """It waits for ever, and tells nothing."""
    came: list[Model] = []
    task = asyncio.ensure_future(run(came.append))  # type: ignore[call-overload]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait((task,))
    assert came == []
