"""Our router inside Ray Serve: asks the process's `RouteService` and answers in Serve's terms. Holds no policy.

    RequestRouterConfig(request_router_class="router.serve_router.PrefixRouter")

Serve pickles this module by value, so nothing in it can be shared with the rest of the process: it imports nothing of ours
at module level, keeps no module state, and finds the service through `router.registry`. Where no service is installed (a
process that only sends) the shortest queue among all candidates wins, as it does for every method but `generate`.

Ranks: the best three one by one, then all others together, where the shortest queue wins. Serve goes on to the next rank when
a replica is full.

Serve would ask a replica that is missing in its queue length cache, and pass it over when it does not answer within 0.1 s, as
one that computes may not. So a missing length is filled in with what is known here; whether there is room, the replica
says itself when the request arrives. The exception is a replica that Serve could not reach: Serve wants it asked first.

An exception in here would make the request hang for ever (Serve logs it and goes on), so everything that can go wrong ends in a
choice by shortest queue, counted as a fallback.

Limits: Serve calls this in its router loop, where nothing may block; nothing here waits.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

if TYPE_CHECKING:
    from router.service import RouteService

_SINGLY = 3
_LOG_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class PrefixRouter(RequestRouter):
    """See above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._complained_at: float | None = None
        self._unreachable: set[ReplicaID] = set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the candidates by rank. Writes the prediction to the request, for the replica."""
        service, request_id = None, ""
        ranks = [candidate_replicas]
        try:
            service = self._service()
            if pending_request is not None:
                # Without it Serve asks again at once, and for ever, while all replicas are full.
                pending_request.routing_context.should_backoff = True
                request_id = _request_id(pending_request)
            if service is not None and pending_request is not None and request_id:
                ranks = _ranks(service, request_id, candidate_replicas, pending_request)
        except Exception:
            self._complain("routing by prefix failed, so the shortest queue wins")
            self._fall_back(service, request_id, pending_request)
        try:
            self._fill_queue_lengths(service, candidate_replicas)
        except Exception:
            self._complain("queue lengths could not be filled in, so Serve asks the replicas")
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """The replica has accepted the request."""
        super().on_request_routed(pending_request, replica_id, result)
        try:
            service, request_id = self._service(), _request_id(pending_request)
            if service is not None and request_id:
                service.routed(request_id, replica_id.unique_id)
        except Exception:
            self._complain("an accepted request could not be noted")

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica is dead: it is no candidate any more, and its bookings are void."""
        super().on_replica_actor_died(replica_id)
        self._unreachable.discard(replica_id)
        try:
            service = self._service()
            if service is not None:
                service.died(replica_id.unique_id)
        except Exception:
            self._complain("the death of a replica could not be noted")

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """The replica could not be reached: Serve asks it before it gets the next request."""
        super().on_replica_actor_unavailable(replica_id)
        self._unreachable.add(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """The replica has answered, with the length of its queue."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._unreachable.discard(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are the replicas now."""
        super().update_replicas(replicas)
        self._unreachable &= {replica.replica_id for replica in replicas}
        try:
            service = self._service()
            if service is not None:
                service.members([replica.replica_id.unique_id for replica in replicas])
        except Exception:
            self._complain("a change of replicas could not be noted")

    def _service(self) -> RouteService | None:
        from router import registry

        return registry.find(self._deployment_id.name)

    def _fill_queue_lengths(self, service: RouteService | None, replicas: list[RunningReplica]) -> None:
        cache = self.replica_queue_len_cache
        for replica in replicas:
            replica_id = replica.replica_id
            if cache.get(replica_id) is not None:
                self._unreachable.discard(replica_id)
            elif replica_id not in self._unreachable:
                booked = service.requests(replica_id.unique_id) if service is not None else 0
                # A full replica would be asked as well; it may say no itself.
                self.on_new_queue_len_info(replica_id, max(0, min(booked, replica.max_ongoing_requests - 1)))

    def _fall_back(self, service: RouteService | None, request_id: str, pending_request: PendingRequest | None) -> None:
        try:
            if pending_request is not None and request_id:
                pending_request.kwargs.pop("predicted_tokens", None)
            if service is not None:
                service.route_failed(request_id)
        except Exception:
            self._complain("a fallback could not be counted")

    def _complain(self, what: str) -> None:
        """Logs the exception in progress, at most once a minute."""
        now = time.monotonic()
        if self._complained_at is None or now - self._complained_at >= _LOG_EVERY_S:
            self._complained_at = now
            _log.warning("%s; this is said once a minute at most", what, exc_info=True)


def _request_id(pending_request: PendingRequest) -> str:
    """The id of a request to generate; empty for a call of another method."""
    if pending_request.metadata.call_method != "generate":
        return ""
    return str(pending_request.args[0].request_id)


def _ranks(
    service: RouteService, request_id: str, candidates: list[RunningReplica], pending_request: PendingRequest
) -> list[list[RunningReplica]]:
    left = {replica.replica_id.unique_id: replica for replica in candidates}
    decision = service.route(request_id, list(left))
    ordered = [left.pop(name) for name in decision.ranking if name in left]
    ordered += left.values()
    pending_request.kwargs["predicted_tokens"] = decision.predicted_tokens
    ranks = [[replica] for replica in ordered[:_SINGLY]]
    return [*ranks, ordered[_SINGLY:]] if len(ordered) > _SINGLY else ranks
