"""What /metrics says, in Prometheus' text format. No text of a request or answer is ever in it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Numbers of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self.requests = Counter("finetune_requests", "Requests for answers", ("endpoint", "status"), **own)
        self.tokens = Counter("finetune_tokens", "Tokens read and written", ("kind",), **own)
        self.cancelled = Counter("finetune_cancelled", "Answers whose client left", **own)
        self.restarts = Counter("finetune_worker_restarts", "Workers started again", **own)
        self.lost = Counter("finetune_lost_requests", "Requests whose worker died", **own)
        self.first_token = Histogram(
            "finetune_time_to_first_token_seconds", "From the request to the first text", buckets=_SECONDS, **own
        )
        self.duration = Histogram(
            "finetune_request_seconds", "From the request to the end of its answer", buckets=_SECONDS, **own
        )
        self.workers = Gauge("finetune_workers_ready", "Workers that answer", **own)
        self.active = Gauge("finetune_active_requests", "Answers being written", **own)
        self.queue = Gauge("finetune_queued_requests", "Requests that wait for a worker", **own)

    def text(self, *, workers_ready: int, active: int, queued: int) -> bytes:
        self.workers.set(workers_ready)
        self.active.set(active)
        self.queue.set(queued)
        return generate_latest(self._registry)
