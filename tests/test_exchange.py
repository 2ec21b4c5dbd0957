"""The exchange between actors and the learner: waits, stops and a naive twin."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fps_jax.runtime.exchange import Exchange, Segment, StalledError, Stopped

PATIENCE_S = 30.0
NEVER = lambda: False


def make_segment(number):
    return Segment(None, [], number, number, 0, None, {})


def open_exchange(actors=2, *, max_lag=1, time_limit_s=PATIENCE_S):
    """An exchange whose waits only a notification ends: polling would hang."""
    exchange = Exchange(actors, max_lag=max_lag, time_limit_s=time_limit_s)
    wait = exchange._changed.wait
    exchange._changed.wait = lambda timeout: wait(PATIENCE_S)
    return exchange


def in_thread(f, *args, **kwargs):
    """Calls in a thread; returns a function that gives the result or raises it."""
    outcome = []

    def run():
        try:
            outcome.append((f(*args, **kwargs), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S / 3)
        assert outcome, "the thread still waits"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    result.is_waiting = thread.is_alive
    return result


def let_wait(*results):
    """Gives threads the time to begin to wait; fails if one does not."""
    time.sleep(0.05)
    assert all(result.is_waiting() for result in results)


def test_parameters_wait_for_their_version_and_go_to_their_actor():
    exchange = open_exchange()
    exchange.publish(4, ["4 for 0", "4 for 1"])
    assert exchange.params(4, 1) == "4 for 1"
    later = in_thread(exchange.params, 5, 0)
    let_wait(later)
    exchange.publish(5, ["5 for 0", "5 for 1"])
    assert later() == "5 for 0"


def test_a_full_queue_waits_for_room_and_an_empty_one_for_a_segment():
    exchange = open_exchange(max_lag=1)
    for actor, number in ((0, 0), (0, 1), (1, 0)):
        exchange.put(actor, make_segment(number))
    full = in_thread(exchange.put, 0, make_segment(2))
    let_wait(full)
    taken = exchange.take(is_interrupted=NEVER)
    assert [s.rollout for s in taken] == [0, 0]
    full()
    empty = in_thread(exchange.take, is_interrupted=NEVER)
    let_wait(empty)
    exchange.put(1, make_segment(1))
    assert [s.rollout for s in empty()] == [1, 1]


def test_stop_wakes_every_waiter_at_once():
    exchange = open_exchange(max_lag=0)
    exchange.put(0, make_segment(0))
    waiters = [
        in_thread(exchange.params, 3, 0),
        in_thread(exchange.put, 0, make_segment(1)),
        in_thread(exchange.take, is_interrupted=NEVER),
    ]
    let_wait(*waiters)
    exchange.stop()
    for result in waiters:
        with pytest.raises(Stopped):
            result()
    assert exchange.is_stopped()


def test_the_first_error_is_what_the_learner_gets():
    exchange = open_exchange()
    taken = in_thread(exchange.take, is_interrupted=NEVER)
    first, second = KeyError("first"), KeyError("second")
    let_wait(taken)
    exchange.stop()
    with pytest.raises(Stopped):
        taken()
    exchange.stop(first)
    exchange.stop(second)
    with pytest.raises(KeyError, match="first") as caught:
        exchange.take(is_interrupted=NEVER)
    assert caught.value is first
    with pytest.raises(Stopped):
        exchange.params(0, 0)


def test_an_interruption_is_seen_while_waiting():
    exchange = Exchange(1, max_lag=0, time_limit_s=PATIENCE_S)
    flag = threading.Event()
    taken = in_thread(exchange.take, is_interrupted=flag.is_set)
    let_wait(taken)
    flag.set()
    with pytest.raises(Stopped):
        taken()
    assert not exchange.is_stopped()


@pytest.mark.parametrize("wait", ["params", "put", "take"])
def test_a_wait_beyond_its_limit_names_the_option(wait):
    exchange = Exchange(1, max_lag=0, time_limit_s=0.05)
    exchange.put(0, make_segment(0))
    waits = {
        "params": lambda: exchange.params(0, 0),
        "put": lambda: exchange.put(0, make_segment(1)),
        "take": lambda: [exchange.take(is_interrupted=NEVER) for _ in range(2)],
    }
    with pytest.raises(StalledError, match=r"0\.05 s for .*stall_limit_s"):
        waits[wait]()


class TwinExchange:
    """What the exchange should do, in lists; tells instead of waiting."""

    def __init__(self, actors, max_lag):
        self.queues = [[] for _ in range(actors)]
        self.newest, self.max_lag = -1, max_lag
        self.is_stopped, self.error = False, None

    def publish(self):
        self.newest += 1

    def params(self, version, actor):
        if self.is_stopped:
            return Stopped
        is_kept = self.newest - self.max_lag <= version <= self.newest
        return (version, actor) if version >= 0 and is_kept else StalledError

    def put(self, actor, number):
        if self.is_stopped:
            return Stopped
        if len(self.queues[actor]) > self.max_lag:
            return StalledError
        self.queues[actor].append(number)
        return None

    def take(self):
        if self.is_stopped:
            return self.error or Stopped
        if not all(self.queues):
            return StalledError
        return [queue.pop(0) for queue in self.queues]

    def stop(self, error):
        self.is_stopped = True
        self.error = self.error or error


def outcome(f):
    """The result of a call, or the error's type, or a KeyError itself."""
    try:
        return f()
    except KeyError as error:
        return error
    except Exception as error:
        return type(error)


OPERATIONS = st.one_of(
    st.just(("publish",)),
    st.tuples(st.just("params"), st.integers(-4, 1), st.integers(0, 1)),
    st.tuples(st.just("put"), st.integers(0, 1)),
    st.just(("take",)),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(OPERATIONS, max_size=60),
    st.integers(0, 3),
    st.lists(st.sampled_from([None, KeyError(1), KeyError(2)]), max_size=3),
)
def test_the_exchange_does_what_its_twin_does(operations, max_lag, stops):
    # Below 0 the limit is over before the first wait.
    exchange, twin = (
        Exchange(2, max_lag=max_lag, time_limit_s=-1.0),
        TwinExchange(2, max_lag),
    )
    number = 0

    def step(name, *args):
        nonlocal number
        if name == "publish":
            twin.publish()
            version = twin.newest
            exchange.publish(version, [(version, 0), (version, 1)])
        elif name == "params":
            version, actor = twin.newest + args[0], args[1]
            actual = outcome(lambda: exchange.params(version, actor))
            assert actual == twin.params(version, actor)
        elif name == "put":
            number += 1
            actual = outcome(lambda: exchange.put(args[0], make_segment(number)))
            assert actual == twin.put(args[0], number)
        else:
            taken = lambda: exchange.take(is_interrupted=NEVER)
            actual = outcome(lambda: [s.rollout for s in taken()])
            assert actual == twin.take()

    for operation in operations:
        step(*operation)
    for error in stops:
        exchange.stop(error)
        twin.stop(error)
        for name in (["params", 0, 0], ["put", 0], ["take"]):
            step(*name)
