from kvist_epp.flights import Flight, Flights


def flight(session: str, endpoint: str = "e", *, told: bool = False) -> Flight:
    """A flight on its way."""
    return Flight(session, endpoint, 0.0, tokens=10, indexed=0, told=told)


def test_flights_of_one_session_land_in_order() -> None:
    """A session that clients use twice at once has two flights; the oldest lands first."""
    flights, first, second = Flights(), flight("s"), flight("s")
    flights.departed(first)
    flights.departed(second)

    assert [flights.landed("s"), flights.landed("s"), flights.landed("s")] == [first, second, None]
    assert len(flights) == 0


def test_an_event_belongs_to_the_oldest_untold_flight_on_its_endpoint() -> None:
    """Events are never taken for those of a flight elsewhere, and each flight is told of first."""
    flights = Flights()
    elsewhere, told, untold = flight("s", "other"), flight("s", told=True), flight("s")
    for one in (elsewhere, told, untold):
        flights.departed(one)

    assert flights.of("s", "e") is untold
    untold.told = True
    assert flights.of("s", "e") is untold
    assert flights.of("s", "third") is None
    assert flights.of("unknown", "e") is None
