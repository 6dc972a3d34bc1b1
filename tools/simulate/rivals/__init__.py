"""Routing policies of other systems, which ours is compared with in virtual time. No router serves with them.

Their formulas are their authors'; code and mistakes in it are ours.
"""

from __future__ import annotations

from collections.abc import Callable

from router.routing.policy import Policy
from tools.simulate.rivals.affinity import LlmdTokenAware, RayPrefixAffinity, SglangCacheAware
from tools.simulate.rivals.hashing import choose_by_hash
from tools.simulate.rivals.linear import DynamoLinear, LMetric
from tools.simulate.rivals.seconds import MooncakeConductor, choose_earliest

RIVALS: dict[str, Callable[[], Policy]] = {
    "consistent-hash": lambda: choose_by_hash,
    "sglang": SglangCacheAware,
    "ray-prefix": RayPrefixAffinity,
    "llm-d": LlmdTokenAware,
    "dynamo": DynamoLinear,
    "dynamo-sticky": lambda: DynamoLinear(overlap=5.0),
    "lmetric": LMetric,
    "mooncake": MooncakeConductor,
    "greedy": lambda: choose_earliest,
}
"""Makes a new policy, by name: some remember what they chose."""
