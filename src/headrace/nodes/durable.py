"""Durable subscriptions of the gateway's own parts, found again by their owner after a restart."""

from typing import Final

from headrace.bus import Bus, Member
from headrace.wake import Waker

ZEROCTL: Final = 4  # RecordHeader.protocol
FOR_EVER: Final = 0xFFFF_FFFF  # deliveries


def durable_member(bus: Bus, filter: str, owner: str, waker: Waker) -> Member:
    """A member of the at-least-once queue subscription of this owner, which is made if it is not there. A message is
    never given up: a log without room, or a broker that is away, says nothing about it."""
    for subscription in bus.subscriptions.values():
        if subscription.owner == owner and subscription.filter == filter.encode() and subscription.durable:
            break
    else:
        subscription = bus.subscribe(
            filter,
            at_least_once=True,
            durable=True,
            queue=True,
            confirm_all=True,
            owner=owner,
            protocol=ZEROCTL,
        )
    subscription.max_deliveries = FOR_EVER
    return subscription.join(waker, -1, 0)


def drop_others(bus: Bus, owners: str, kept: set[tuple[str, str]]) -> None:
    """Ends durable subscriptions whose owner begins so, but for these pairs of owner and filter: what is not configured
    any more would be kept for nobody."""
    for subscription in list(bus.subscriptions.values()):
        known = (subscription.owner, subscription.filter.decode("utf-8", "replace"))
        if subscription.durable and subscription.owner.startswith(owners) and known not in kept:
            bus.unsubscribe(subscription)
