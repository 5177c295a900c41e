"""Metrics of a server in Prometheus' format, and what is said without the packages that only some servers need."""

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fmoe_ext.remote import EtcdDiscovery, loop
from fmoe_ext.remote.server.pages import Metrics, Pages


def test_metrics_in_prometheus_format():
    metrics = Metrics()
    metrics.add("calls_total", method="info", code="OK")
    metrics.add("calls_total", 2, method="forward", code="OK")
    metrics.time("call_seconds", 0.03, method="info")
    metrics.time("call_seconds", 20.0, method="info")
    metrics.gauge("experts", lambda: 4)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.to_text())
        for sample in family.samples
    }
    one = ("method", "info")
    assert found["fmoe_remote_calls_total", ("code", "OK"), one] == 1
    assert found["fmoe_remote_calls_total", ("code", "OK"), ("method", "forward")] == 2
    assert found[("fmoe_remote_experts",)] == 4
    bounds = {
        le: found["fmoe_remote_call_seconds_bucket", ("le", le), one]
        for le in ("0.025", "0.05", "10.0", "+Inf")
    }
    assert bounds == {"0.025": 0, "0.05": 1, "10.0": 1, "+Inf": 2}
    assert found["fmoe_remote_call_seconds_count", one] == 2
    assert found["fmoe_remote_call_seconds_sum", one] == 20.03
    assert metrics.count("calls_total") == 3 and metrics.count("calls_total", method="info") == 1


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("aetcd", lambda: EtcdDiscovery("127.0.0.1:1")),
        ("prometheus_client", lambda: Metrics().to_text()),
        ("prometheus_client", lambda: loop.run(Pages(dict, Metrics()).start("127.0.0.1:0"), 10)),
    ],
    ids=["registry", "metrics", "page"],
)
def test_missing_package_is_named(monkeypatch, package, use):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install '{package}'"):
        use()
