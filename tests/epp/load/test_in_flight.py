from kvist_epp.load.in_flight import Flight, Flights


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


def test_a_request_id_tells_the_flights_of_a_session_apart() -> None:
    """The one that ended is the one with that id, however old; an id nobody has ends nothing."""
    flights, first, second = Flights(), flight("s"), flight("s")
    first.request_id, second.request_id = "a", "b"
    for one in (first, second):
        flights.departed(one)

    assert flights.landed("s", "c") is None
    assert flights.landed("s", "b") is second
    assert flights.landed("s", "b") is None
    assert flights.landed("s") is first


def test_an_endpoint_tells_the_flights_of_a_session_apart() -> None:
    """What a pod that left had on it is not what its session has elsewhere."""
    flights, here, there = Flights(), flight("s"), flight("s")
    there.endpoint = "there"
    for one in (here, there):
        flights.departed(one)

    assert flights.landed("s", endpoint="there") is there
    assert flights.landed("s", endpoint="there") is None
    assert len(flights) == 1
