"""The operator's object of rules is the rules that Prometheus is tested with."""

from __future__ import annotations

from tests.deploy.rules import OBJECT, RULES, groups_of


def test_the_prometheus_operator_gets_the_rules_that_are_tested() -> None:
    told = groups_of(OBJECT)["spec"]["groups"]
    assert told == groups_of(RULES)["groups"], "run: python -m tests.deploy.rules"
    assert sum(len(group["rules"]) for group in told) > 10
