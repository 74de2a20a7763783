"""A feed tells each listener everything once, also over broken connections."""

import asyncio
import json
import random
import threading

import pytest

from hilbert_monitor.service.following.feed import Feed


async def take(feed, count, after=None):
    """The next events, and the id to come back with."""
    events = []
    async for event in feed.listen(after):
        events.append(event)
        if len(events) == count:
            break
    return events


def numbers(events):
    return [json.loads(event.data)["n"] for event in events if event.name == "count"]


def test_a_listener_that_comes_back_misses_nothing_and_gets_nothing_twice():
    feed, rng = Feed(), random.Random(0)

    async def listen():
        [hello] = await take(feed, 1)
        assert hello.name == "hello"
        after, heard = hello.id, []
        threading.Thread(target=lambda: [feed.publish("count", {"n": n}) for n in range(500)]).start()
        while len(heard) < 500:
            events = await take(feed, min(rng.randrange(1, 40), 500 - len(heard)), after)
            heard += numbers(events)
            after = events[-1].id
        return heard

    assert asyncio.run(asyncio.wait_for(listen(), 60)) == list(range(500))


@pytest.mark.parametrize("id", ["", "nonsense", "-", "00000000-1", "{epoch}-999", "{epoch}--1", "{epoch}-" + "9" * 400])
def test_an_id_of_another_server_begins_anew(id):
    feed = Feed()
    feed.publish("count", {"n": 0})
    [event] = asyncio.run(take(feed, 1, id.replace("{epoch}", feed.epoch)))
    assert event.name == "reset"
    assert event.id == f"{feed.epoch}-1"


def test_one_that_was_away_for_too_long_begins_anew():
    feed = Feed(remembered=1000)
    for n in range(200):
        feed.publish("count", {"n": n})
    events = asyncio.run(take(feed, 1, f"{feed.epoch}-3"))
    assert events[0].name == "reset"
    assert numbers(asyncio.run(take(feed, 2, f"{feed.epoch}-198"))) == [198, 199]


def test_a_listener_that_is_too_slow_is_told_so():
    feed = Feed(remembered=1000)

    async def listen():
        heard = feed.listen()
        assert (await anext(heard)).name == "hello"
        for n in range(200):
            feed.publish("count", {"n": n})
        assert (await anext(heard)).name == "reset"
        feed.publish("count", {"n": 200})
        return await anext(heard)

    assert numbers([asyncio.run(listen())]) == [200]


def test_closing_sends_all_home_at_once():
    feed = Feed()

    async def listen():
        tasks = [asyncio.create_task(take(feed, 9)) for _ in range(50)]
        while feed.listeners < 50:
            await asyncio.sleep(0.01)
        threading.Thread(target=feed.close).start()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return feed.listeners

    assert asyncio.run(listen()) == 0


def test_a_listener_whose_loop_is_gone_does_not_disturb():
    feed = Feed()
    loop = asyncio.new_event_loop()
    heard = feed.listen()
    loop.run_until_complete(anext(heard))
    loop.close()
    feed.publish("count", {"n": 1})


def test_what_is_not_finite_goes_as_text():
    feed = Feed()
    feed.publish("count", {"n": [float("nan"), float("inf"), 1.5]})
    [event] = asyncio.run(take(feed, 1, f"{feed.epoch}-0"))
    assert json.loads(event.data) == {"n": ["nan", "inf", 1.5]}


def test_silence_is_broken_by_pings_that_are_no_events():
    feed = Feed(ping=0.05)

    async def listen():
        [hello, *pings] = await take(feed, 4)
        assert hello.name == "hello"
        assert {(ping.name, ping.id) for ping in pings} == {("ping", hello.id)}
        threading.Timer(0.02, lambda: feed.publish("count", {"n": 0})).start()
        return await take(feed, 1, pings[-1].id)

    events = asyncio.run(asyncio.wait_for(listen(), 60))
    assert numbers(events) == [0]
