"""Count what a server does, and show it over HTTP (--http_on): / for people, /status as JSON, /metrics for Prometheus.

Metrics has three kinds of numbers: counts that only grow (add), histograms of seconds (time), and gauges that are read
when they are shown (gauge). Pages is the HTTP server.
"""

import asyncio
import bisect
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from fmoe_ext._require import require

# Bounds of a histogram's buckets, up to the 10 s that a client gives a call by default.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PREFIX = "fmoe_remote_"
_Key: TypeAlias = "tuple[str, tuple[tuple[str, str], ...]]"  # a name and its labels


class Metrics:
    """Numbers of a server by name (without PREFIX) and labels. A label has few values, never one for each client.

    They are gathered here and not by prometheus_client, because the status page and the line of progress show them too.
    That package only writes Prometheus' format; --http_on asks for it at the start.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[_Key, float] = defaultdict(float)
        # the number of calls in each bucket (one more for the slowest), and [the sum of their seconds]
        self._times: dict[_Key, tuple[list[int], list[float]]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self._counts[name, tuple(sorted(labels.items()))] += amount

    def time(self, name: str, seconds: float, **labels: str) -> None:
        key = name, tuple(sorted(labels.items()))
        buckets, total = self._times.setdefault(key, ([0] * (len(SECONDS) + 1), [0.0]))
        buckets[bisect.bisect_left(SECONDS, seconds)] += 1
        total[0] += seconds

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Add a number that is read when the metrics are."""
        self._gauges[name] = read

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of all counts of a name that have these labels, whatever their other labels are."""
        wanted = labels.items()
        return sum(v for (n, given), v in self._counts.items() if n == name and wanted <= dict(given).items())

    def to_text(self) -> str:
        """Return everything in Prometheus' text format; ImportError without prometheus_client."""
        library = require("prometheus_client", "the page /metrics")
        registry = library.CollectorRegistry()
        registry.register(self)
        return library.generate_latest(registry).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as prometheus_client's objects, one for each name; the registry of to_text() calls this."""
        from prometheus_client import core

        counters: dict[str, core.Metric] = {}
        for (name, labels), value in sorted(self._counts.items()):
            # prometheus_client wants a counter's name without _total, and writes that again
            metric = counters.setdefault(
                name, core.Metric(PREFIX + name.removesuffix("_total"), name, "counter")
            )
            metric.add_sample(PREFIX + name, dict(labels), value)
        yield from counters.values()
        for name, read in sorted(self._gauges.items()):
            yield core.GaugeMetricFamily(PREFIX + name, name, value=read())
        histograms: dict[str, core.HistogramMetricFamily] = {}
        for (name, labels), (buckets, (total,)) in sorted(self._times.items()):
            names = [key for key, _ in labels]
            family = histograms.setdefault(
                name, core.HistogramMetricFamily(PREFIX + name, name, labels=names)
            )
            bounds, counts = [*map(str, SECONDS), "+Inf"], itertools.accumulate(buckets)
            family.add_metric([value for _, value in labels], list(zip(bounds, counts, strict=True)), total)
        yield from histograms.values()


_MAX_REQUEST = 8 << 10  # bytes
_MAX_CONNECTIONS = 64  # at a time; others are closed without an answer
_ANSWER_SECONDS = 5.0  # for a request and its answer


class Pages:
    """A small HTTP/1.0 server of three pages: /, /status and /metrics. It has no access control."""

    def __init__(self, status: Callable[[], dict[str, Any]], metrics: Metrics):
        self._status, self._metrics = status, metrics
        self._page = (
            Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        )  # asks for /status every second
        self._http: asyncio.Server | None = None
        self._open = 0
        self.port = 0

    async def start(self, listen_on: str) -> None:
        # here, so that a missing package ends the start and not the first look at /metrics
        require("prometheus_client", "--http_on")
        host, _, port = listen_on.rpartition(":")
        self._http = await asyncio.start_server(
            self._serve, host.strip("[]") or None, int(port), limit=_MAX_REQUEST
        )
        self.port = self._http.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._http is not None:
            self._http.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MAX_CONNECTIONS:
                await asyncio.wait_for(self._answer(reader, writer), _ANSWER_SECONDS)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # such a request gets no answer
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        method, path, *_ = [*request.split(b"\r\n", 1)[0].split(b" "), b"", b""]
        status, kind, text = "200 OK", "text/plain; version=0.0.4", ""
        if method != b"GET":
            status, text = "405 Method Not Allowed", "GET only\n"
        elif path == b"/":
            kind, text = "text/html; charset=utf-8", self._page
        elif path == b"/status":
            kind, text = "application/json", json.dumps(self._status())
        elif path == b"/metrics":
            text = self._metrics.to_text()
        else:
            status, text = "404 Not Found", "there are /, /status and /metrics\n"
        body = text.encode()
        head = f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
