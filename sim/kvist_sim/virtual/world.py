"""One run: users, routers and engines on one agenda. No clock but the agenda's, no dice but the seed's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, Final

from kvist_sim.engine.tiers import SHARED, EngineTiers, TierKind, TierStore
from kvist_sim.virtual.clock import Agenda
from kvist_sim.virtual.engine import VirtualEngine
from kvist_sim.virtual.fleet import Change, Fleet, Site
from kvist_sim.virtual.jobs import BLOCK, Call, CallStatus, Job
from kvist_sim.virtual.legs import LEG_SECONDS, Links, Transfer, first_leg
from kvist_sim.virtual.noting_pool import NotingPool
from kvist_sim.virtual.overlaps import BlockOverlaps, NoOverlaps
from kvist_sim.virtual.policy import Context, Feed, Pod, Policy, Sample, Spec
from kvist_sim.virtual.traffic import Burst, Session, Shape, Turn

WARM_SHARE: Final = 0.25
"""Of the time in which requests begin: what comes in it is served and not judged."""
MEMORY_SECONDS: Final = 10.0
"""After its end the text of a request stays for events and routers that are late."""
WATCH_SECONDS: Final = 1.0
"""Between two looks at every pod's load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Delays with which routers learn of events, in seconds."""

    replicas: int = 1
    gossip: float = 0.1
    events: float = 0.02
    """From the end of the step that changed a cache to the router's index: a ZMQ hop and a queue."""
    ended: float = 0.1
    """Envoy's access log, flushed ten times a second."""
    rate_factor: float = 1.0
    """What operators configure as prefill rate, by the true one."""


USUAL: Final = Setting()


@dataclass(slots=True)
class Outcome:
    """The outcome of a run."""

    calls: list[Call]
    seconds: float
    """In which requests began."""
    loads: list[tuple[float, tuple[int, ...]]]
    """(time, requests on each pod, by position in ``Fleet.engines``), once a second while requests begin."""
    preemptions: int


class World:
    """Made for one run. ``seed`` decides on everything users do, and on nothing else with ``dice``."""

    def __init__(
        self,
        shape: Shape,
        fleet: Fleet,
        spec: Spec,
        *,
        rate: float,
        requests: int,
        seed: int,
        setting: Setting = USUAL,
    ) -> None:
        """``rate`` requests per second until ``requests`` could have begun."""
        self.agenda = Agenda()
        self.calls: list[Call] = []
        self.sites: dict[Pod, Site] = {}
        self._shape, self._fleet, self._spec, self._setting = shape, fleet, spec, setting
        self._rate, self._seed = rate, seed
        self._seconds = requests / rate
        self._open_calls = 0
        self._loads: list[tuple[float, tuple[int, ...]]] = []
        self._pods: tuple[Pod, ...] = ()
        self._numbers = 0
        self._sessions = 0
        self._preemptions = 0
        self._pool = self._shared_pool() if fleet.shared else None
        self._volumes: dict[TierKind, TierStore[int]] = {}
        self._dice = Random(f"replicas {seed}")
        self._feed = self._make_feed()
        self._links = Links(self._after)
        self._legs: dict[Call, tuple[Call, Pod]] = {}
        """Calls whose prompts are being computed, and the pods that will answer them, by the first leg."""
        self._routers = self._make_routers()
        self._replica: dict[Call, Policy] = {}

    def run(self) -> Outcome:
        """Until the last request has ended."""
        for position in range(len(self._fleet.engines)):
            if position not in self._fleet.absent:
                self._join(position)
        for change in self._fleet.changes:
            self.agenda.at(change.share * self._seconds, self._change, change)
        bursts = self._shape.bursts(Random(f"shared {self._seed}"))
        self._stand(bursts)
        self._arrive(bursts)
        self.agenda.at(0.0, self._watch)
        self.agenda.run(lambda: self.agenda.now > self._seconds and not self._open_calls)
        preemptions = self._preemptions + sum(s.engine.totals.preemptions for s in self.sites.values())
        return Outcome(self.calls, self._seconds, self._loads, preemptions)

    # Users

    def _stand(self, bursts: Iterator[Burst]) -> None:
        """Sessions that began before the beginning."""
        shape, dice = self._shape, Random(f"standing {self._seed}")
        for burst in islice(bursts, round(self._rate / shape.requests * shape.standing)):
            for begin in burst:
                turns = list(begin(self._session_dice()))
                left = turns[dice.randrange(len(turns)) :]
                self.agenda.at(dice.random() * left[0].pause, self._ask, self._named(iter(left)))

    def _arrive(self, bursts: Iterator[Burst]) -> None:
        dice = Random(f"arrivals {self._seed}")
        gaps = self._shape.gaps(dice, self._rate / self._shape.requests)

        def arrive(when: float) -> None:
            for begin in next(bursts):
                self._ask(self._named(begin(self._session_dice())))
            plan(when)

        def plan(now: float) -> None:
            when = now + next(gaps)
            if when < self._seconds:
                self.agenda.at(when, arrive, when)

        plan(0.0)

    def _session_dice(self) -> Random:
        self._sessions += 1
        return Random(self._seed << 32 | self._sessions)

    def _named(self, turns: Session) -> tuple[str, Session]:
        return f"s{self._sessions}", turns

    def _ask(self, session: tuple[str, Session]) -> None:
        name, turns = session
        turn = next(turns, None)
        if turn is not None and self.agenda.now < self._seconds:
            self._begin(name, turns, turn)

    def _begin(self, name: str, turns: Session, turn: Turn) -> None:
        now = self.agenda.now
        call = Call(len(self.calls), name, turn.prompt, turn.whole, turn.max_tokens, now)
        call.measured = now >= WARM_SHARE * self._seconds
        call.turns = turns
        self.calls.append(call)
        self._open_calls += 1
        self._route(call)

    # Routers

    def _make_feed(self) -> Feed | None:
        if not self._spec.events:
            return None
        return BlockOverlaps() if self._spec.feed is None else self._spec.feed()

    def _make_routers(self) -> list[Policy]:
        setting, hardware = self._setting, self._fleet.engines[0]
        context = Context(
            Random(),
            NoOverlaps() if not isinstance(self._feed, BlockOverlaps) else self._feed,
            prefill_rate=hardware.timing.prefill_tokens_per_second * setting.rate_factor,
            max_num_seqs=hardware.max_num_seqs,
            block_size=hardware.block_size,
            after=self._after,
            clock=lambda: self.agenda.now,
            send=self._send,
            refuse=self._refuse,
            split=self._split,
            feed=self._feed,
            gossip_seconds=setting.gossip,
            tpot_seconds=self._shape.tpot,
            ended_seconds=setting.ended,
        )
        made = context.peers
        for replica in range(setting.replicas):
            dice = Random(f"router {replica} {self._seed}")
            made.append(self._spec.make(replace(context, random=dice, replica=replica)))
        return made

    def _after(self, seconds: float, what: Callable[[Any], None], about: Any) -> None:
        self.agenda.at(self.agenda.now + seconds, what, about)

    def _route(self, call: Call) -> None:
        now, routers = self.agenda.now, self._routers
        router = routers[0] if len(routers) == 1 else self._dice.choice(routers)
        if not self._pods:
            self._over(call, CallStatus.LOST)
            return
        self._replica[call] = router
        at = router.choose(call, self._pods, now)
        if at is not None:
            self._send(call, self._pods[at])

    def _send(self, call: Call, pod: Pod) -> None:
        self._replica[call].routed(call, pod, self.agenda.now)
        self._submit(self.sites[pod], call)

    def _split(self, call: Call, first: Pod, second: Pod) -> None:
        self._replica[call].routed(call, second, self.agenda.now)
        leg = first_leg(call)
        self._legs[leg] = call, second
        self.sites[second].expected += 1
        self._submit(self.sites[first], leg)

    def _prefilled(self, site: Site, leg: Call) -> None:
        """The first leg of a call has ended; its engine keeps the blocks until they are read.

        If the engine was lost, the second one computes the prompt. If that was lost, too, and the router
        names no other one, so is the request.
        """
        del site.jobs[leg]
        call, planned = self._legs.pop(leg)
        call.cached = leg.cached
        second = self._replica[call].prefilled(call, site.pod, self.agenda.now, lost=site.gone) or planned
        if second is not planned:
            self._expect(planned, -1)
            self._expect(second, 1)
        transfer = Transfer(site.pod, second, self._links, lambda: site.engine.release(leg))
        self._after(LEG_SECONDS, self._second_leg, (call, second, transfer))

    def _second_leg(self, about: tuple[Call, Pod, Transfer]) -> None:
        call, second, transfer = about
        source, site = self.sites.get(transfer.source), self.sites.get(second)
        if site is None:
            self._replica.pop(call).finished(call, second, self.agenda.now)
            self._over(call, CallStatus.LOST)
        else:
            self._submit(site, call, None if source is None or source is site else transfer)
        if source is None or source is site or site is None:  # nobody will read the blocks
            transfer.release()
        self._expect(second, -1)

    def _expect(self, pod: Pod, more: int) -> None:
        if (site := self.sites.get(pod)) is not None:
            site.expected += more
            if site.idle and not site.open:
                self._gone(site)

    def _refuse(self, call: Call) -> None:
        del self._replica[call]
        self._over(call, CallStatus.LOST)

    def _scrape(self, site: Site) -> None:
        seconds = self._spec.scrape_seconds
        if site.gone or seconds is None:
            return
        now, pod = self.agenda.now, site.pod
        page = pod.page = site.engine.sample()
        pod.sample = Sample(page.running, page.waiting, page.cache_usage, now)
        if site.open:
            for router in self._routers:
                router.scraped(pod, now)
        if now < self._seconds or self._open_calls:
            self.agenda.at(now + seconds, self._scrape, site)

    def _tell(self, told: tuple[Site, list[Any]]) -> None:
        site, notes = told
        if self._feed is not None and not site.gone:
            self._feed.told(site.pod, notes, self.agenda.now)

    # Engines

    def _shared_pool(self) -> NotingPool:
        engines = self._fleet.engines
        return NotingPool(sum(one.blocks for one in engines), engines[0].block_size, noting=False)

    def _tiers(self) -> EngineTiers[int] | None:
        """Return the slower places of an engine that joins; only a shared volume has blocks.

        In the ideal pool all engines have the same blocks in every place, each by its own way.
        """
        if not self._fleet.tiers:
            return None
        host, *others = map(self._store, self._fleet.tiers)
        seed = self._seed << 16 | self._numbers
        return EngineTiers(host, others, tokens=BLOCK, seed=seed, noting=self._feed is not None)

    def _store(self, kind: TierKind) -> TierStore[int]:
        if kind.medium == SHARED:
            return self._volumes.setdefault(kind, TierStore(kind))
        if self._pool is None:
            return TierStore(kind)
        whole = replace(kind, blocks=kind.blocks * len(self._fleet.engines))
        return TierStore(whole, self._volumes.setdefault(kind, TierStore(whole)))

    def _join(self, position: int) -> None:
        hardware = self._fleet.engines[position]
        pool = self._pool or NotingPool(hardware.blocks, hardware.block_size, noting=self._feed is not None)
        pod = Pod(self._numbers, f"pod-{self._numbers}", hardware.blocks, hardware.block_size)
        pod.role = self._spec.role(position, len(self._fleet.engines))
        self._numbers += 1
        site = self.sites[pod] = Site(pod, VirtualEngine(hardware, pool, self._tiers()), position)
        self._pods += (pod,)
        if self._feed is not None:
            self._feed.joined(pod)
        for router in self._routers:
            router.joined(pod, self.agenda.now)
        if self._spec.scrape_seconds is not None:
            self._after(self._dice.random() * self._spec.scrape_seconds, self._scrape, site)

    def _change(self, change: Change) -> None:
        if change.up:
            self._join(change.engine)
            return
        for site in list(self.sites.values()):
            if site.position == change.engine and site.open:
                self._leave(site, gently=change.gently)

    def _leave(self, site: Site, *, gently: bool) -> None:
        site.open = False
        self._pods = tuple(pod for pod in self._pods if pod is not site.pod)
        for router in self._routers:
            router.left(site.pod, self.agenda.now)
        if not gently:
            self._gone(site)
            for call in list(site.jobs):
                if call.leg:
                    self._prefilled(site, call)
                else:
                    self._end(site, call, CallStatus.LOST)
        elif site.idle:
            self._gone(site)

    def _gone(self, site: Site) -> None:
        site.gone = True
        self._preemptions += site.engine.totals.preemptions
        del self.sites[site.pod]
        if self._feed is not None:
            self._feed.left(site.pod)

    def _submit(self, site: Site, call: Call, transfer: Transfer | None = None) -> None:
        job = site.jobs[call] = Job.of(call)
        job.transfer = transfer
        site.engine.add(job)
        if not site.busy:
            self._step(site)

    def _step(self, site: Site) -> None:
        now = self.agenda.now
        site.busy = True
        self.agenda.at(now + site.engine.plan(now), self._stepped, site)

    def _stepped(self, site: Site) -> None:
        if site.gone:
            return
        engine, now = site.engine, self.agenda.now
        first, finished = engine.complete(now)
        if self._feed is not None and (notes := engine.take_notes()):
            self.agenda.at(now + self._setting.events, self._tell, (site, notes))
        for job in first:
            if not job.call.leg:
                self._replica[job.call].first_token(job.call, site.pod, now)
        for job in finished:
            if job.call.leg:
                self._prefilled(site, job.call)
            else:
                self._end(site, job.call, CallStatus.DONE)
        if not engine.idle:
            self._step(site)
            return
        site.busy = False
        if site.idle and not site.open:
            self._gone(site)

    def _end(self, site: Site, call: Call, status: CallStatus) -> None:
        del site.jobs[call]
        self._replica.pop(call).finished(call, site.pod, self.agenda.now)
        self._over(call, status)

    def _over(self, call: Call, status: CallStatus) -> None:
        call.status = status
        self._open_calls -= 1
        self._after(MEMORY_SECONDS, Call.forget, call)
        turns, call.turns = call.turns, None
        turn = None if turns is None else next(turns, None)
        if turn is not None:
            self._after(turn.pause, self._go_on, (call.session, turns, turn))

    def _go_on(self, next_turn: tuple[str, Session, Turn]) -> None:
        if self.agenda.now < self._seconds:
            self._begin(*next_turn)

    # Looking on

    def _watch(self, _: Any = None) -> None:
        loads = [0] * len(self._fleet.engines)
        for site in self.sites.values():
            loads[site.position] += len(site.jobs)
        self._loads.append((self.agenda.now, tuple(loads)))
        if self.agenda.now < self._seconds:
            self._after(WATCH_SECONDS, self._watch, None)
