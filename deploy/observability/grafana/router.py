"""What routers promise, decide and know."""

from __future__ import annotations

from shape import ONE, RATE, Dashboard, Panel, quantiles, rate

ROUTER = Dashboard(
    "twostroke-router",
    "twostroke: router and SLO",
    [
        (
            "Promises (recorded by rules.yml)",
            [
                Panel(
                    "first tokens late",
                    "percentunit",
                    [("twostroke:ttft_late:ratio_rate5m", "5 min"), ("twostroke:ttft_late:ratio_rate1h", "1 h")],
                    "More than 2.5 s. The budget is 1 %.",
                ),
                Panel(
                    "requests failed or refused",
                    "percentunit",
                    [
                        ("twostroke:requests_failed:ratio_rate5m", "5 min"),
                        ("twostroke:requests_failed:ratio_rate1h", "1 h"),
                    ],
                    "The budget is 1 %.",
                ),
                Panel(
                    "goodput",
                    "reqps",
                    [("twostroke:goodput:rate5m", "first token in time"), ("twostroke:requests:rate5m", "requests")],
                ),
                Panel(
                    "tokens late",
                    "percentunit",
                    [("twostroke:inter_token_late:ratio_rate5m", "5 min")],
                    "More than 0.1 s after the one before.",
                ),
                Panel("requests by status", "reqps", [(rate("twostroke_requests_total", "status", ONE), "{{status}}")]),
                Panel("stages", "s", quantiles("twostroke_stage_seconds", "stage", ONE, of=(0.5, 0.95))),
            ],
        ),
        (
            "Admission and routing",
            [
                Panel(
                    "time queued",
                    "s",
                    [(f"rate(twostroke_queue_seconds_sum{ONE}[{RATE}])", "{{instance}}")],
                    "Seconds of waiting per second: how many are queued on average.",
                ),
                Panel("refused", "reqps", [(rate("twostroke_refusals_total", "reason", ONE), "{{reason}}")]),
                Panel(
                    "false refusals",
                    "none",
                    [
                        (f"sum(increase(twostroke_false_refusals_total{ONE}[1h]))", "false"),
                        (f"sum(increase(twostroke_followed_refusals_total{ONE}[1h]))", "followed"),
                    ],
                    "Over an hour.",
                ),
                Panel("deciding", "s", quantiles("twostroke_decision_seconds", where=ONE)),
                Panel(
                    "placements",
                    "reqps",
                    [(rate("twostroke_decisions_total", "policy, source", ONE), "{{policy}} {{source}}")],
                ),
                Panel(
                    "first token over prediction",
                    "none",
                    quantiles("twostroke_ttft_prediction_ratio", where=ONE),
                    "1: as predicted.",
                ),
                Panel(
                    "blocks reused",
                    "none",
                    [
                        (rate("twostroke_predicted_reused_blocks_total", "", ONE), "predicted"),
                        (rate("twostroke_reused_blocks_total", "", ONE), "reused"),
                    ],
                    "Per second.",
                ),
                Panel(
                    "fairness between tenants",
                    "none",
                    [(f"twostroke_tenant_fairness{ONE}", "{{instance}}")],
                    "Jain's index: 1 is even.",
                ),
                Panel(
                    "placements not reported yet",
                    "none",
                    [
                        (f"twostroke_reservations{ONE}", "{{instance}}"),
                        (f"twostroke_foreign_reservations{ONE}", "of other routers, {{instance}}"),
                    ],
                ),
            ],
        ),
        (
            "What it knows, and what broke",
            [
                Panel(
                    "index",
                    "none",
                    [
                        (f"twostroke_index_blocks{ONE}", "blocks {{instance}}"),
                        (f"twostroke_index_holdings{ONE}", "holdings {{instance}}"),
                    ],
                ),
                Panel("events behind", "s", quantiles("twostroke_event_lag_seconds", where=ONE, of=(0.5, 0.99))),
                Panel(
                    "event log",
                    "none",
                    [
                        (f"sum by (worker) (increase(twostroke_event_gaps_total{ONE}[1h]))", "gaps {{worker}}"),
                        (
                            f"sum by (worker) (increase(twostroke_event_divergences_total{ONE}[1h]))",
                            "divergences {{worker}}",
                        ),
                    ],
                    "Over an hour; divergences should stay 0.",
                ),
                Panel(
                    "streams that went on",
                    "ops",
                    [
                        (rate("twostroke_reopened_requests_total", "", ONE), "reopened"),
                        (rate("twostroke_migrated_requests_total", "", ONE), "migrated"),
                        (rate("twostroke_attached_requests_total", "", ONE), "attached"),
                        (rate("twostroke_recovered_requests_total", "", ONE), "recovered"),
                        (rate("twostroke_replayed_requests_total", "", ONE), "computed again"),
                    ],
                ),
                Panel(
                    "judgements",
                    "ops",
                    [(rate("twostroke_worker_judgements_total", "worker, liveness", ONE), "{{worker}} {{liveness}}")],
                ),
                Panel(
                    "late itself",
                    "percentunit",
                    [(f"rate(twostroke_own_lateness_seconds_total{ONE}[{RATE}])", "{{instance}}")],
                ),
            ],
        ),
    ],
    instances_of="twostroke_open_requests",
)
