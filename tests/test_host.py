"""The host's probes time the issuing of one call each, in microseconds."""

import types

import pytest

from labkit.measure import host, timing
from labkit.measure.host import NUM_CALLS, PROBES, probe


def test_a_sample_is_many_calls_and_the_device_is_waited_for_outside_of_it(monkeypatch):
    clock = types.SimpleNamespace(now_s=0.0, waits=0)

    def call(x):
        clock.now_s += 2e-6

    def synchronize(device_kind):
        assert device_kind == "cuda"
        clock.waits += 1
        clock.now_s += 1.0

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(host, "synchronize", synchronize)
    monkeypatch.setattr(host.torch, "ones", lambda *shape, **options: None)
    monkeypatch.setitem(host._CALLS, "operator", call)
    timed = probe("operator", "cuda")
    assert timed.median_ms == pytest.approx(2e-3) and clock.waits == timed.n + 1
    assert clock.now_s == pytest.approx(clock.waits * (1 + NUM_CALLS * 2e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBES["cuda"])
def test_every_probe_can_be_taken_on_a_gpu(name):
    timed = probe(name, "cuda")
    assert 1e-5 < timed.median_ms < 1
