"""What gateways tell of a request after its pick: who served it, what it used, that it has ended.

Two sources: Envoy's access log, and the response itself where it is observed. A gateway may have both; the
request id sees to it that an end counts once, also when a client uses one session for many requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvist_epp.director.director import Picker
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.response import ObservedResponse, Usage
from kvist_epp.load.in_flight import Flight
from kvist_epp.scheduling.pick import allows


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Brings it into the picker's books."""

    picker: Picker

    def ended(self, entries: Sequence[AccessLogEntry]) -> None:
        """Requests have ended, by the access log; perhaps some that another replica routed."""
        for entry in entries:
            if not entry.session:
                continue
            if self.picker.flights.find(entry.session, entry.request_id or "") is None:
                self.picker.elsewhere(entry)
            else:
                self._end(entry.session, entry.request_id or "", "access-log", entry.upstream, entry.status)

    def responded(self, seen: ObservedResponse) -> None:
        """A response went past."""
        flight = self.picker.flights.find(seen.session, seen.request_id)
        if flight is not None:
            self._truth(flight, seen.usage)
        self._count(seen)
        self._end(seen.session, seen.request_id, "response", seen.served, seen.status)

    def _end(self, session: str, request_id: str, how: str, served: str | None, status: int) -> None:
        flight = self.picker.flights.find(session, request_id)
        if flight is not None and served and served != flight.hostport:
            self._served(flight, served)
        refused = not 200 <= status < 400 and (status != 0 or how == "access-log")
        self.picker.settled([session], how, refused=refused, request_id=request_id)

    def _served(self, flight: Flight, address: str) -> None:
        """An address that is none of the fleet's is a proxy on the way: it says nothing."""
        names = (address,)
        served = next((c.endpoint for c in self.picker.candidates if allows(names, c.endpoint)), None)
        if served is not None:
            self.picker.served(flight, served)

    def _truth(self, flight: Flight, usage: Usage) -> None:
        """Engines that tell no sessions in their events may say here what they had cached."""
        if usage.cached is not None and not flight.told:
            flight.told = True
            self.picker.truth(flight, usage.cached, self.picker.clock())

    def _count(self, seen: ObservedResponse) -> None:
        metrics, usage = self.picker.metrics, seen.usage
        metrics.responses["usage" if usage.known else "none" if seen.complete else "cut"] += 1
        for kind in ("prompt", "completion", "cached"):
            metrics.usage[kind] += getattr(usage, kind) or 0
