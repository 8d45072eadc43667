"""Every route as it is typed, and the worlds it serves."""

from __future__ import annotations

from shoal.axes.collectives import MEMBERS, Collective, Round
from shoal.testing.contracts import make, samples

SAMPLES = {text: make(text) for member in MEMBERS for text in samples(member)}
MORE = (
    "double_tree(1)",
    "double_tree(7)",
    "hierarchical(1)",
    "hierarchical(3, double_tree(2))",
    "hierarchical(4, butterfly)",
    "hierarchical(2, halving_doubling)",
    "hierarchical(2, hierarchical(3))",
    "blueconnect(3)",
    "blueconnect(2, 3)",
    "blueconnect(2, 2, 2)",
)
ROUTES: dict[str, Collective] = {
    text: route
    for text, route in {**SAMPLES, **{text: make(text) for text in MORE}}.items()
    if route.rounds is not None
}
WORLDS = tuple(range(1, 18))
SERVED = [(text, w) for text, route in ROUTES.items() for w in WORLDS if not route.refusal(w)]


def rounds_of(route: Collective, world: int) -> list[Round]:
    """The rounds, of a route that has some."""
    assert route.rounds is not None
    return list(route.rounds(world))
