"""Training time, cadence, signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jojax.clock import Clock, Preemption, every, format_seconds


class Hand:
    """Time that moves when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_every():
    assert [s for s in range(12) if every(s, 4, 10)] == [4, 8, 10]
    assert [s for s in range(12) if every(s, 0, 10)] == [10]
    assert [s for s in range(12) if every(s, 20, 10)] == [10]
    assert [s for s in range(12) if every(s, 5, 10)] == [5, 10]


def test_format_seconds():
    given = {0.4: "0s", 59.4: "59s", 59.6: "1m00s", 185: "3m05s", 7620: "2h07m", 100_800: "1d04h"}
    assert {s: format_seconds(s) for s in given} == given


def test_pauses_do_not_count_and_nest():
    hand = Hand()
    clock = Clock(hand)
    hand.now += 5
    with clock.paused():
        hand.now += 100
        with clock.paused():
            hand.now += 100
        hand.now += 100
        assert clock.seconds == 5
    hand.now += 2
    assert clock.seconds == 7
    with pytest.raises(KeyError), clock.paused():
        raise KeyError
    hand.now += 1
    assert clock.seconds == 8  # an error in a pause ends the pause


def test_laps_tell_speed_and_waiting():
    hand = Hand()
    clock = Clock(hand)
    hand.now += 50  # building the run
    clock.begin(30)
    hand.now += 6
    with clock.waiting():
        hand.now += 2
    with clock.paused():
        hand.now += 1000
    assert clock.lap(50) == (20 / 8, 2 / 8)
    hand.now += 4
    assert clock.lap(60) == (10 / 4, 0)
    assert clock.lap(60)[0] == 0  # no time, no step: no division by zero


def test_time_survives_a_restart():
    hand = Hand()
    first = Clock(hand)
    hand.now += 30
    with first.waiting():
        hand.now += 10
    saved = first.state()
    assert saved == {"seconds": 40, "waited": 10}
    hand.now += 500  # lost: after the checkpoint
    second = Clock(hand)
    hand.now += 3
    second.restore(saved)
    second.begin(7)
    hand.now += 2
    assert second.seconds == 42
    assert second.lap(8) == (1 / 2, 0)  # the first life's waiting is not this lap's
    paused = Clock(hand)
    with paused.paused():
        paused.restore(saved)
        hand.now += 9
        assert paused.seconds == 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_flag(number, capfd):
    before = signal.getsignal(number)
    with Preemption() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == signal.Signals(number).name
        os.kill(os.getpid(), number)  # of the same request: SLURM sends two
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err.count("saving and stopping after this step") == 1


def test_a_later_signal_kills():
    code = """
import sys, time
from jojax.clock import Preemption
Preemption.SECONDS = 0.1
with Preemption() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(0.2)
    print("asked", flush=True)
    time.sleep(60)
"""
    running = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGTERM)
    assert running.stdout.readline() == "asked\n"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == -signal.SIGINT


def test_other_threads_leave_signals_alone():
    seen = []

    def work():
        with Preemption() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
